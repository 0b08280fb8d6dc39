package why

import (
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
