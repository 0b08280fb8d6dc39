package egress

import (
	"net/http"
	"strconv"
	"time"
)

// maxRetryAfter bounds the wait that a downstream API can demand. It also prevents an overflow of
// time.Duration.
const maxRetryAfter = 24 * time.Hour

// RetryAfter parses a Retry-After header: seconds, or a date (RFC 9110, 10.2.3). after is at most
// 24 hours. given is false if the header is absent or malformed.
func RetryAfter(header string, now time.Time) (after time.Duration, given bool) {
	if seconds, err := strconv.ParseUint(header, 10, 64); err == nil {
		return time.Duration(min(seconds, uint64(maxRetryAfter/time.Second))) * time.Second, true
	}
	if date, err := http.ParseTime(header); err == nil {
		return min(max(date.Sub(now), 0), maxRetryAfter), true
	}
	return 0, false
}
