package guard

import (
	"context"
	"errors"
	"fmt"
	"strconv"
	"time"

	"github.com/redis/go-redis/v9"

	"github.com/bulkaction/bulkaction/internal/redisx/call"
	"github.com/bulkaction/bulkaction/lua"
)

// The Lua scripts of guards. The header of each Lua file describes its arguments and its reply.
var (
	takeScript    = call.NewScript("take", lua.Source("parts/base", "parts/limiters", "guard/take"))
	acquireScript = call.NewScript("acquire",
		lua.Source("parts/base", "parts/quick", "guard/acquire_quick", "parts/limiters", "parts/quick_permit",
			"guard/acquire_limited", "parts/guard", "guard/acquire"))
	waitScript = call.NewScript("wait",
		lua.Source("parts/base", "parts/limiters", "parts/guard", "guard/wait"))
	releaseScript = call.NewScript("release",
		lua.Source("parts/base", "parts/quick", "guard/release_quick", "parts/limiters", "parts/quick_permit",
			"guard/release_limited", "parts/guard", "guard/release"))
	renewScript = call.NewScript("renew",
		lua.Source("parts/base", "parts/limiters", "parts/guard", "guard/renew"))
	declareScript = call.NewScript("declare",
		lua.Source("parts/base", "parts/limiters", "parts/guard", "guard/declare"))
	controlScript = call.NewScript("control",
		lua.Source("parts/base", "parts/limiters", "parts/guard", "guard/control"))
	inspectScript = call.NewScript("inspect",
		lua.Source("parts/base", "parts/limiters", "parts/guard", "guard/inspect"))
	auditScript = call.NewScript("audit",
		lua.Source("parts/base", "parts/limiters", "parts/guard", "guard/audit"))
)

// The most elements that one call of a script handles.
const (
	mostWaitsPerCall    = 1000
	mostRenewalsPerCall = 200
	mostMembersPerCall  = 200
	rowsPerPage         = 200
)

// answer is what Redis says about one call for a lease: the first part of a reply of the script
// acquire, or the call's part of a reply of the script wait.
type answer struct {
	verdict    string // GRANTED, QUEUED, DENIED, FULL, UNKNOWN, LATE, GONE
	fence      int64
	member     string
	generation int64
	probe      bool
	lease      time.Duration
	position   int64
	after      time.Duration // -1 = unknown
	reason     Reason
}

// hint is what a script's reply says about the whole guard. free is the number of members that can
// be lent now; -1 if the reply does not say it. next is the time until a member can be lent: 0 =
// ask again now, negative = unknown.
type hint struct {
	free int64
	next time.Duration
	at   int64 // guard time, µs; 0 = unknown
}

// readAnswer reads the part of a reply that concerns one call. It leaves the values behind that
// part to the caller.
func readAnswer(r *call.Reply) answer {
	a := answer{verdict: r.Text()}
	switch a.verdict {
	case "GRANTED":
		a.fence, a.member, a.generation, a.probe = r.Number(), r.Text(), r.Number(), r.Flag()
		a.lease = r.Duration()
	case "QUEUED":
		a.position = r.Number()
	case "DENIED":
		a.after, a.reason = r.Duration(), Reason(r.Text())
	}
	return a
}

// guardKeys returns the KEYS of all scripts but take.
func guardKeys(base string) []string { return []string{base, base + "-"} }

type acquireArgs struct {
	call, client, member, spec string
	lease, wait                time.Duration
	bound                      int
	validUntil                 int64 // 0 = never
}

func (a acquireArgs) args() []any {
	valid := ""
	if a.validUntil > 0 {
		valid = strconv.FormatInt(a.validUntil, 10)
	}
	return []any{a.call, a.client, a.member, a.spec, a.lease.Milliseconds(), a.wait.Milliseconds(), a.bound, valid}
}

func readAcquire(reply any) (answer, hint, error) {
	r := acquireScript.Reply(reply)
	a := readAnswer(r)
	h := hint{free: -1, next: -1}
	switch a.verdict {
	case "GRANTED", "DENIED":
		h.free, h.next = r.Number(), r.Duration()
	case "QUEUED", "FULL":
		h.next = r.Duration()
	}
	h.at = r.Number()
	return a, h, r.Err()
}

func waitArgs(client string, calls []string) []any {
	args := append(make([]any, 0, 1+len(calls)), client)
	for _, id := range calls {
		args = append(args, id)
	}
	return args
}

func readWait(reply any, n int) ([]answer, hint, error) {
	r := waitScript.Reply(reply)
	all := make([]answer, 0, n)
	for range n {
		all = append(all, readAnswer(r.List()))
	}
	h := hint{free: -1, next: r.Duration(), at: r.Number()}
	return all, h, r.Err()
}

// ending is one lease in a call of release.
type ending struct {
	call    string
	fence   string // empty = cancel the call
	outcome Outcome
}

func releaseArgs(e ending) []any {
	letter, delay := e.outcome.letter()
	return []any{1, e.call, e.fence, letter, delay.Milliseconds()}
}

// settled is the reply to one ending. changed: it has changed the state of the breaker.
type settled struct {
	verdict string // OK, GONE, LEFT, GIVEN
	breaker string // C, O or H; empty unless OK
	changed bool
}

func readRelease(reply any) (settled, hint, error) {
	r := releaseScript.Reply(reply)
	part := r.List()
	s := settled{verdict: part.Text()}
	if s.verdict == "OK" {
		s.breaker, s.changed = part.Text(), part.Flag()
	}
	h := hint{free: -1, next: r.Duration(), at: r.Number()}
	return s, h, r.Err()
}

func renewArgs(lease time.Duration, leases []*Lease) []any {
	args := append(make([]any, 0, 1+2*len(leases)), lease.Milliseconds())
	for _, l := range leases {
		args = append(args, l.call, l.fenceText())
	}
	return args
}

// readRenew returns for each lease of a renewal whether it still exists and was extended.
func readRenew(reply any, n int) ([]bool, hint, error) {
	r := renewScript.Reply(reply)
	held := make([]bool, 0, n)
	for range n {
		held = append(held, r.Text() == "OK")
	}
	h := hint{free: -1, next: -1, at: r.Number()}
	return held, h, r.Err()
}

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
