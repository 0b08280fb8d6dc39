package ledger

// A job's state is two bytes in the string states:GROUP, at twice its ordinal: the state letter and
// the mark of its attempt. The report of another attempt is stale. A person can read the string in
// redis-cli.

// Letter is the state letter of a job: the first byte of its state.
type Letter byte

// Letters of a job's state.
const (
	Waiting   Letter = 'W' // in the fair queue
	NonReady  Letter = 'N' // in a sorted set, until it is due or resumed
	Ready     Letter = 'R' // in a ready stream
	InFlight  Letter = 'I' // in a ready stream; a worker has started it
	Done      Letter = 'D' // and its result is not reduced yet
	Reduced   Letter = 'A' // done, and its result is part of the group's aggregate
	Failed    Letter = 'F'
	Cancelled Letter = 'C'
)

// Word returns the state's name in the API; "" for a byte that is no letter.
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

// StateAt returns the i-th state, from 0, of a string of states. It panics if the string is too
// short.
func StateAt(states string, i int64) State { return State(states[StateBytes*i : StateBytes*(i+1)]) }

// Letter returns the state letter.
func (s State) Letter() Letter { return Letter(s[0]) }

// Attempt returns the number of the job's attempt, modulo 90.
func (s State) Attempt() int { return int(s[1]) - firstMark }

// IsOf says whether the state's mark is that of an attempt.
func (s State) IsOf(attempt int) bool { return s[1] == mark(attempt) }

// An attempt's mark is a printable byte, so that a person can read states.
const (
	firstMark = '!'
	marks     = 90
)

func mark(attempt int) byte { return byte(firstMark + attempt%marks) }
