package egress

import (
	"math"
	"net/http"
	"regexp"
	"strconv"
	"strings"
	"time"
)

// maxRetryAfter bounds the wait that a downstream API can demand. It also prevents an overflow of
// time.Duration.
const maxRetryAfter = 24 * time.Hour

var seconds = regexp.MustCompile(`^[0-9]+(\.[0-9]+)?$`)

// RetryAfter parses a Retry-After header: seconds, or a date (RFC 9110, 10.2.3). Fractions of a
// second, which some APIs send, are rounded up to milliseconds. after is at most 24 hours. given is
// false if the header is absent or malformed.
func RetryAfter(header string, now time.Time) (after time.Duration, given bool) {
	header = strings.TrimSpace(header)
	if seconds.MatchString(header) {
		n, _ := strconv.ParseFloat(header, 64) // +Inf if it is too large
		return time.Duration(math.Ceil(min(n, maxRetryAfter.Seconds())*1000)) * time.Millisecond, true
	}
	if date, err := http.ParseTime(header); err == nil {
		return min(max(date.Sub(now), 0), maxRetryAfter), true
	}
	return 0, false
}
