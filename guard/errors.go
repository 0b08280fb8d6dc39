package guard

import (
	"context"
	"errors"
	"fmt"
	"time"

	"github.com/redis/go-redis/v9"

	"github.com/bulkaction/bulkaction/internal/redisx/call"
)

// The errors of this package, for errors.Is.
var (
	// ErrDenied: the guard can't lend now. The error is a *DeniedError, which says when to try
	// again.
	ErrDenied = errors.New("denied")
	// ErrLost is the cause with which Do ends the ctx of its function: the lease has ended before
	// its release. It expired, an operator took it back, Redis lost it, or Close gave up waiting.
	ErrLost = errors.New("lease lost")
	// ErrQueueFull: as many calls as MaxQueue allows stand in the queue.
	ErrQueueFull = errors.New("queue is full")
	// ErrWaitTimeout: the call has waited for MaxWait.
	ErrWaitTimeout = errors.New("waited too long")
	// ErrUnavailable: Redis can't serve the call now, and the outage policy is Closed or is not
	// for this call, such as Client.Pool or Control.
	ErrUnavailable = errors.New("redis is unavailable")
	// ErrUnknownMember: the pool has no such member.
	ErrUnknownMember = errors.New("no such member")
	// ErrUnknownGuard: Redis knows no guard of this name: it was never used, or its keys have
	// expired.
	ErrUnknownGuard = errors.New("no such guard")
	// ErrNoBreaker: Control was asked to open or close the breaker of a member that has none.
	ErrNoBreaker = errors.New("the member has no circuit breaker")
	// ErrTooManyTokens: Take was asked for more permits than the limiter can ever allow at once,
	// or, while Redis is away, than its Local rate can.
	ErrTooManyTokens = errors.New("more tokens than the limit can ever allow")
	// ErrNoPublish: the Redis user may not publish to the channel that wakes waiters.
	ErrNoPublish = errors.New("the Redis user needs the commands publish and subscribe and the channels " +
		"PREFIXguard:wake:*")
	// ErrClosed: the Client has been closed.
	ErrClosed = errors.New("guard client is closed")
	// ErrInvalid: a name, id, rate or other setting is outside its limits. Nothing was written.
	ErrInvalid = errors.New("invalid")
	// ErrSetup: this Redis can't hold guards, for example because it evicts keys.
	ErrSetup = errors.New("redis is not suitable for guards")
)

// errNotSent is the error of a call that was not sent to Redis, because earlier calls of the guard
// got no answer.
var errNotSent = fmt.Errorf("%w: the last call got no answer", ErrUnavailable)

// mayHaveArrived says whether Redis may have carried out a call for a lease whose answer is unknown
// because of err. Such a call may have a lease or stand in the queue, so it must be cancelled.
func mayHaveArrived(ctx context.Context, err error) bool {
	return (errors.Is(err, ErrUnavailable) || ctx.Err() != nil) && !errors.Is(err, errNotSent)
}

// Reason is why a guard can't lend now. It is that of the member that can be lent first. If that
// has an open breaker and no permit, it is the one that lasts longer.
type Reason string

// The reasons of a denial, as replies, JSON and metrics show them.
const (
	RateLimited Reason = "rate_limited" // no permit left, or the downstream API asked to wait
	CircuitOpen Reason = "circuit_open" // the breaker is open, or all its probes are out
	Busy        Reason = "busy"         // all leases are out
	Queued      Reason = "queued"       // others wait already; a call that does not wait may not overtake them
	Disabled    Reason = "disabled"     // all members are off, or the one that On names
)

// DeniedError says why a guard did not lend, and when the next member is due or its lease ends. If
// a lease is released, a member can be lent before that time.
type DeniedError struct {
	Guard  string        // name of the guard, without its kind
	Until  time.Time     // by the clock of this process; zero if it is not known
	After  time.Duration // rounded up to ms; 0 if it is not known
	Reason Reason
}

func (e *DeniedError) Error() string {
	text := fmt.Sprintf("guard %s: denied: %s", e.Guard, e.Reason)
	if e.After > 0 {
		text += fmt.Sprintf(", try again in %v", e.After)
	}
	return text
}

// Unwrap returns ErrDenied.
func (e *DeniedError) Unwrap() error { return ErrDenied }

// invalid returns an ErrInvalid with a text that names the field and its limit.
func invalid(format string, args ...any) error {
	return fmt.Errorf("%w: %s", ErrInvalid, fmt.Sprintf(format, args...))
}

// joinMistakes joins errors as one line. It leaves out those that are nil, and returns nil if all
// are.
func joinMistakes(errs ...error) error {
	var joined error
	for _, err := range errs {
		switch {
		case err == nil:
		case joined == nil:
			joined = err
		default:
			joined = fmt.Errorf("%w; %w", joined, err)
		}
	}
	return joined
}

// outage classifies the error of a call to Redis. unavailable: Redis could not serve this call.
// away: it serves no call of this guard now. An error that Redis itself answers, such as lack of
// memory or a moving slot, concerns one call only, so it is not away; nor is a cancelled ctx.
func outage(err error) (unavailable, away bool) {
	if call.IsOOM(err) {
		return true, false
	}
	if !call.IsUnavailable(err) {
		return false, false
	}
	var answer redis.Error
	return true, !errors.As(err, &answer) && !errors.Is(err, context.Canceled)
}
