package guard

import "time"

// Outcome is how a call ended that used a lease. The caller decides what a failure is: a refused
// recipient, for example, is no failure of the account that sent the mail.
type Outcome int64

const (
	// Neutral says nothing about the member.
	Neutral Outcome = iota
	// Success counts for the breaker: it ends a row of failures, and enough successful probes close
	// a half-open breaker.
	Success
	// Failure counts for the breaker.
	Failure
	// Unused means that the holder did not call the member. The lease's permit is given back if it
	// can still be taken out of the limiter's data exactly.
	Unused

	throttled
)

const outcomeBits = 3

// Throttled says that the downstream API asks for a pause: the member is not lent for d, at most 24
// hours. It is no failure.
func Throttled(d time.Duration) Outcome {
	d = min(max(d, 0), 24*time.Hour)
	return throttled | Outcome(d.Milliseconds())<<outcomeBits
}

// letter returns the letter by which scripts know the outcome, and the pause of a Throttled one.
func (o Outcome) letter() (string, time.Duration) {
	switch o & (1<<outcomeBits - 1) {
	case Success:
		return "s", 0
	case Failure:
		return "f", 0
	case Unused:
		return "u", 0
	case throttled:
		return "t", time.Duration(o>>outcomeBits) * time.Millisecond
	}
	return "n", 0
}
