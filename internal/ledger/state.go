package ledger

// A job's state is two bytes in its group's string `states`, at twice its ordinal: a letter,
// which says where the job is, and the mark of its attempt. A report under another
// attempt is stale. A person can read the string in redis-cli.

// Letter says where a job is. It is the first byte of the job's state.
type Letter byte

// Letters of a job's state.
const (
	Waiting   Letter = 'W' // in the fair queue
	NonReady  Letter = 'N' // in a sorted set, until its time comes or what is paused is resumed
	Ready     Letter = 'R' // in a ready stream
	InFlight  Letter = 'I' // a worker has started it
	Done      Letter = 'D' // its result is not reduced yet
	Reduced   Letter = 'A' // done, and its result is part of the group's aggregate
	Failed    Letter = 'F'
	Cancelled Letter = 'C'
)

// Word is the letter in the words of the API; "" where the letter is none.
func (l Letter) Word() string {
	switch l {
	case Waiting:
		return "waiting"
	case NonReady:
		return "non_ready"
	case Ready:
		return "ready"
	case InFlight:
		return "in_flight"
	case Done, Reduced:
		return "done"
	case Failed:
		return "failed"
	case Cancelled:
		return "cancelled"
	}
	return ""
}

// StateBytes is the length of a [State].
const StateBytes = 2

// State is a job's state: its letter and the mark of its attempt.
type State string

// StateAt is the i-th state, from 0, of a string of states that is long enough.
func StateAt(states string, i int64) State { return State(states[StateBytes*i : StateBytes*(i+1)]) }

// Letter says where the job is.
func (s State) Letter() Letter { return Letter(s[0]) }

// Attempt is the number of the job's attempt, modulo 90.
func (s State) Attempt() int { return int(s[1]) - firstMark }

// IsOf says whether the state's mark is that of an attempt.
func (s State) IsOf(attempt int) bool { return s[1] == mark(attempt) }

// An attempt's mark is a printable byte, so that a person can read states.
const (
	firstMark = '!'
	marks     = 90
)

func mark(attempt int) byte { return byte(firstMark + attempt%marks) }
