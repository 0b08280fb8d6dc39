package why

import (
	"math"
	"strconv"
	"time"
)

// formatTime writes a time for a person, in UTC and without fractions of a second.
func formatTime(at time.Time) string { return at.UTC().Format("2006-01-02 15:04:05Z") }

// plural writes "1 job" or "2 jobs".
func plural(n int64, what string) string {
	if n == 1 {
		return "1 " + what
	}
	return strconv.FormatInt(n, 10) + " " + what + "s"
}

func latest(a, b time.Time) time.Time {
	if b.After(a) {
		return b
	}
	return a
}

// timeIfAfter returns at if it is after now, otherwise nil.
func timeIfAfter(at, now time.Time) *time.Time {
	if !at.After(now) {
		return nil
	}
	at = at.Truncate(time.Millisecond).UTC()
	return &at
}

// roundTo rounds v to a multiple of 1/parts.
func roundTo(v, parts float64) float64 { return math.Round(v*parts) / parts }
