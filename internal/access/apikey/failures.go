package apikey

import (
	"fmt"
	"net/netip"
	"time"

	"golang.org/x/time/rate"

	"github.com/bulkaction/bulkaction/internal/access/clientaddr"
)

// The limits of failed authentications.
const (
	failuresPerMinute = 10     // of one client
	failuresBurst     = 20     // of one client
	failuresInAll     = 200    // a second, and at once, of all clients
	limitedClients    = 10_000 // most clients that are counted at a time
)

// TooManyFailuresError says that a client, or all clients together, have failed to authenticate too
// often.
type TooManyFailuresError struct {
	RetryAfter time.Duration // until another failure is answered as such
}

func (e *TooManyFailuresError) Error() string {
	return fmt.Sprintf("too many failed authentications: try again in %d s", (e.RetryAfter+time.Second-1)/time.Second)
}

// failures limits how many failed authentications a client may have, and all clients together.
// Above a limit, a failure returns a *TooManyFailuresError. A valid key is never limited, so that a
// client can't lock out another one at the same address. The limits do not reduce the reads of
// Redis.
type failures struct {
	clients *clientaddr.Limiters
	all     *rate.Limiter
}

func newFailures() *failures {
	return &failures{
		clients: clientaddr.NewLimiters(failuresPerMinute/60.0, failuresBurst, limitedClients),
		all:     rate.NewLimiter(failuresInAll, failuresInAll),
	}
}

// failed counts a failed authentication of a client. It returns cause, or a *TooManyFailuresError
// above a limit. client is the result of clientaddr.Proxies.ClientOf.
func (f *failures) failed(client netip.Addr, now time.Time, cause error) error {
	wait := f.clients.Take(client, now)
	if wait == 0 {
		wait = clientaddr.TakeFrom(f.all, now)
	}
	if wait > 0 {
		return &TooManyFailuresError{RetryAfter: wait}
	}
	return cause
}
