package ledger

import (
	"strconv"
)

// This file encodes and decodes states. A job's state is two bytes in the string states:GROUP, at
// twice its ordinal: the state letter and the mark of its attempt. A report of another attempt is
// stale. A person can read the string in redis-cli.

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

// words are the names of the states in the API.
var words = map[Letter]string{
	Waiting: "waiting", NonReady: "non_ready", Ready: "ready", InFlight: "in_flight",
	Done: "done", Reduced: "done", Failed: "failed", Cancelled: "cancelled",
}

// Word returns the state's name in the API; "" for a byte that is no letter.
func (l Letter) Word() string { return words[l] }

// letterOf returns the letter at the beginning of a state; 0 for "".
func letterOf(state string) Letter {
	if state == "" {
		return 0
	}
	return Letter(state[0])
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

// The marks of attempts are printable bytes from '!' on, so that a person can read states.
const (
	firstMark = '!'
	marks     = 90
)

func mark(attempt int) byte { return byte(firstMark + attempt%marks) }

// jobRanges builds the argument with which scripts get jobs of one group: each range of consecutive
// ordinals with the same attempt as 'first n attempt', joined by spaces.
type jobRanges struct {
	b       []byte
	lo, n   int64
	attempt int
}

// add adds a job. Its ordinal is higher than those before.
func (r *jobRanges) add(ordinal int64, attempt int) {
	if r.n > 0 && ordinal == r.lo+r.n && attempt == r.attempt {
		r.n++
		return
	}
	r.flush()
	r.lo, r.n, r.attempt = ordinal, 1, attempt
}

func (r *jobRanges) flush() {
	if r.n == 0 {
		return
	}
	if len(r.b) > 0 {
		r.b = append(r.b, ' ')
	}
	r.b = strconv.AppendInt(r.b, r.lo, 10)
	r.b = strconv.AppendInt(append(r.b, ' '), r.n, 10)
	r.b = strconv.AppendInt(append(r.b, ' '), int64(r.attempt), 10)
	r.n = 0
}

// text returns the encoded ranges.
func (r *jobRanges) text() []byte {
	r.flush()
	return r.b
}
