// Package credential defines how a processor gets the account with which it makes a call. A
// [Source] decides which account is used next; the processor says afterwards what the call showed
// about the account. The package hides whether processes share this decision, and connects accounts
// to the interface [processor.Gated].
package credential

import (
	"context"
	"errors"
	"fmt"
	"math"
	"strconv"
	"strings"
	"sync/atomic"
	"time"

	"github.com/bulkaction/bulkaction/processor"
)

// Source lends the accounts of one service, any of which can be used for any call. A source may
// also be a [processor.Limited].
type Source interface {
	// Borrow returns the account for one call. It may wait for a free account until ctx ends. The
	// error is a [*DeniedError] if no account may be used for some time.
	Borrow(ctx context.Context) (Loan, error)
}

// Loan is the right to use one account for one call.
type Loan interface {
	// ID is the account's id. It is no secret.
	ID() string
	// Return ends the loan and says how the call ended. It must be called exactly once. It does not
	// wait for a network.
	Return(o Outcome)
}

// Revocable is a [Loan] that may end before its Return: other calls have shown that the account
// does not work now, or the right to use it was lost. Revoked returns nil while the account may be
// used.
type Revocable interface {
	Loan
	Revoked() *DeniedError
}

// Account is an account that a source lends, with the limits that its operator has set.
type Account struct {
	ID          string
	Rate        *Rate       // nil: the source's default
	Concurrency Concurrency // 0: the source's default
}

// Choice makes the source that lends the accounts of one pool, and so decides which account is used
// next. A processor calls it for each of its pools, at start and after each change of the accounts.
// The pool's name has the characters A-Z a-z 0-9 . _ -
type Choice func(pool string, accounts []Account) (Source, error)

// TakeTurns is a [Choice]: its source lends the accounts in turn, see [InTurn].
func TakeTurns(_ string, accounts []Account) (Source, error) {
	ids := make([]string, len(accounts))
	for i, a := range accounts {
		ids[i] = a.ID
	}
	return InTurn(ids...), nil
}

// Kind says what a call showed about its account.
type Kind int

// These are the kinds of outcomes.
const (
	Neutral   Kind = iota // nothing about the account, such as an answer about the recipient
	Success               // the account works
	Failure               // the account or its service does not work
	Throttled             // the service asks for a pause
	Unused                // the account was not used
	Unknown               // the account was not used: this process does not know it
)

// Outcome is how a call ended that used an account.
type Outcome struct {
	Kind  Kind
	After time.Duration // for Throttled: how long the account should not be used
}

// DeniedError says that no account may be used now.
type DeniedError struct {
	Guard  string        // name of the accounts' guard; "" without a guard
	After  time.Duration // for how long no account may be used; 0 if that is not known
	Reason string        // for people, such as "rate limit"
}

func (e *DeniedError) Error() string {
	text := "no account"
	if e.Guard != "" {
		text += " of guard " + e.Guard
	}
	text += " is free"
	if e.After > 0 {
		text += " until " + time.Now().Add(e.After).UTC().Format(time.TimeOnly)
	}
	return text + ": " + e.Reason
}

// maxUnknown is how many accounts that this process does not know Admit borrows before it defers
// the job.
const maxUnknown = 3

// Admit borrows an account from s and returns it as the pass of a job; [From] returns it to the
// processor. knows says whether this process has the account's secret. It may first read the
// accounts file again, because other processes may have added accounts. A denial becomes a
// [processor.Deferred] error.
func Admit(ctx context.Context, s Source, knows func(id string) bool) (processor.Pass, error) {
	for range maxUnknown {
		loan, err := s.Borrow(ctx)
		if err != nil {
			return nil, deferral(err)
		}
		if knows(loan.ID()) {
			return pass{loan}, nil
		}
		loan.Return(Outcome{Kind: Unknown})
	}
	return nil, processor.Deferred(0, "this worker does not know the accounts that are free")
}

// mostDeferred is the longest time for which a job without an account is deferred. The account may
// come back earlier than the denial says, for example because an operator closes its breaker.
const mostDeferred = time.Minute

// deferral turns a [*DeniedError] into an error that defers the job. It wraps other errors, which
// then decide about the job themselves.
func deferral(err error) error {
	var denied *DeniedError
	if errors.As(err, &denied) {
		return processor.Deferred(min(denied.After, mostDeferred), denied.Error())
	}
	return fmt.Errorf("get an account: %w", err)
}

// pass is a loan as the permission for a job.
type pass struct{ loan Loan }

type loanKey struct{}

func (p pass) Into(ctx context.Context) context.Context {
	return context.WithValue(ctx, loanKey{}, p.loan)
}

func (p pass) Return(err error) { p.loan.Return(OutcomeOf(err)) }

// From returns the loan with which a job was admitted. The error defers the job: its loan was
// revoked. Both are nil if the job was admitted without an account.
func From(ctx context.Context) (Loan, error) {
	loan, _ := ctx.Value(loanKey{}).(Loan)
	if r, ok := loan.(Revocable); ok {
		if denied := r.Revoked(); denied != nil {
			return nil, deferral(denied)
		}
	}
	return loan, nil
}

// Verdict returns err together with the outcome o of the account. Use it where [OutcomeOf] would
// derive another outcome from err. err must not be nil.
func Verdict(err error, o Outcome) error { return &verdict{err, o} }

type verdict struct {
	error
	outcome Outcome
}

func (v *verdict) Unwrap() error { return v.error }

// OutcomeOf returns what the error of a call shows about the account that the call used.
//
//	nil                         Success
//	[Verdict]                   its outcome
//	[processor.Permanent]       Neutral
//	[processor.Throttled]       Throttled
//	[processor.Deferred]        Unused
//	the end of a cancelled ctx  Neutral
//	any other error             Failure
func OutcomeOf(err error) Outcome {
	var v *verdict
	if errors.As(err, &v) {
		return v.outcome
	}
	if errors.Is(err, context.Canceled) {
		return Outcome{}
	}
	switch decision := processor.Classify(err); decision.Kind {
	case processor.Done:
		return Outcome{Kind: Success}
	case processor.Throttle:
		return Outcome{Kind: Throttled, After: decision.After}
	case processor.Defer:
		return Outcome{Kind: Unused}
	case processor.RetryLater:
		return Outcome{Kind: Failure}
	case processor.Fail:
	}
	return Outcome{}
}

// AvailabilityOf adds up the availability of several sources; Next is the earliest, or zero if that
// of one source is. A source that is no [processor.Limited] counts as not bounded.
func AvailabilityOf(sources ...Source) processor.Availability {
	sum := processor.Availability{}
	for i, s := range sources {
		a := processor.Availability{Free: -1, PerSecond: math.Inf(1)}
		if limited, ok := s.(processor.Limited); ok {
			a = limited.Availability()
		}
		if sum.Free < 0 || a.Free < 0 {
			sum.Free = -1
		} else {
			sum.Free += a.Free
		}
		if i == 0 || a.Next.Before(sum.Next) {
			sum.Next = a.Next
		}
		sum.PerSecond += a.PerSecond
	}
	return sum
}

// InTurn returns a source that lends the accounts one after the other, without a limit and without
// regard to outcomes. Each process has its own turn. ids must not be empty.
func InTurn(ids ...string) Source { return &inTurn{ids: ids} }

type inTurn struct {
	ids  []string
	next atomic.Uint64
}

func (t *inTurn) Borrow(ctx context.Context) (Loan, error) {
	if err := ctx.Err(); err != nil {
		return nil, err
	}
	return unlimited(t.ids[(t.next.Add(1)-1)%uint64(len(t.ids))]), nil
}

// unlimited is the loan of an account without limits.
type unlimited string

func (u unlimited) ID() string   { return string(u) }
func (unlimited) Return(Outcome) {}

// Limits are the limits of accounts that set none of their own. Each field is set by an environment
// variable with the prefix of its processor.
type Limits struct {
	// Rate is how often one account may be used in a time span, such as 80/10m; none is no limit.
	Rate Rate `env:"ACCOUNT_RATE" envDefault:"80/10m" check:"rate"`
	// Limiter is how uses are counted. sliding: a rate of 80/10m allows at most 80 uses in any 10
	// minutes. token: an account saves up unused uses, so that some 10 minutes have up to 160.
	Limiter string `env:"ACCOUNT_LIMITER" envDefault:"sliding" oneof:"sliding,token"`
	// Breaker says when an account is not used because it fails: after this many failures in a row,
	// for this time, until this many uses succeed, such as 3/10m/3; none is no breaker.
	Breaker Breaker `env:"ACCOUNT_BREAKER" envDefault:"3/10m/3" check:"breaker"`
	// Concurrency is how often one account may be used at once; the text unbounded allows any
	// number.
	Concurrency Concurrency `env:"ACCOUNT_CONCURRENCY" envDefault:"1" check:"concurrency"`
}

// These are the values of [Limits.Limiter].
const (
	Sliding = "sliding"
	Token   = "token"
)

// Rate is the most calls in a time span. Its text is a number, a slash and a time, such as 80/10m,
// or none.
type Rate struct {
	Permits int // 0: no limit
	Window  time.Duration
}

// The largest values that guards know.
const (
	maxPermits = 1_000_000_000
	maxCount   = 1_000_000
	maxProbes  = 1_000
	maxTime    = 24 * time.Hour
)

const none = "none"

// UnmarshalText reads the text of a rate.
func (r *Rate) UnmarshalText(text []byte) error {
	s := string(text)
	if s == none {
		*r = Rate{}
		return nil
	}
	permits, window, _ := strings.Cut(s, "/")
	n, err := strconv.Atoi(permits)
	d, badWindow := parseTime(window)
	if err != nil || badWindow != nil || n < 1 || n > maxPermits {
		return fmt.Errorf("%q is neither a number above 0 with a time of at most 24h, such as 80/10m, nor none", s)
	}
	*r = Rate{Permits: n, Window: d}
	return nil
}

// MarshalText returns the text of a rate.
func (r Rate) MarshalText() ([]byte, error) {
	if r.Permits == 0 {
		return []byte(none), nil
	}
	return fmt.Appendf(nil, "%d/%s", r.Permits, r.Window), nil
}

// Breaker says when a circuit breaker opens and closes. Its text is such as 3/10m/3, or none.
type Breaker struct {
	Failures  int           // in a row, which open it; 0: no breaker
	OpenFor   time.Duration // how long it stays open; afterwards calls probe the account
	Successes int           // of probes, which close it
}

// UnmarshalText reads the text of a breaker.
func (b *Breaker) UnmarshalText(text []byte) error {
	s := string(text)
	if s == none {
		*b = Breaker{}
		return nil
	}
	parts := strings.Split(s, "/")
	if len(parts) == 3 {
		failures, bad1 := strconv.Atoi(parts[0])
		openFor, bad2 := parseTime(parts[1])
		successes, bad3 := strconv.Atoi(parts[2])
		if bad1 == nil && bad2 == nil && bad3 == nil && failures >= 1 && failures <= maxCount &&
			successes >= 1 && successes <= maxProbes {
			*b = Breaker{Failures: failures, OpenFor: openFor, Successes: successes}
			return nil
		}
	}
	return fmt.Errorf("%q is neither failures/time/successes of at least 1, such as 3/10m/3, nor none", s)
}

// MarshalText returns the text of a breaker.
func (b Breaker) MarshalText() ([]byte, error) {
	if b.Failures == 0 {
		return []byte(none), nil
	}
	return fmt.Appendf(nil, "%d/%s/%d", b.Failures, b.OpenFor, b.Successes), nil
}

// parseTime reads a time of whole milliseconds, 1 ms to 24 h.
func parseTime(s string) (time.Duration, error) {
	d, err := time.ParseDuration(s)
	if err == nil && (d < time.Millisecond || d > maxTime || d%time.Millisecond != 0) {
		err = errors.New("not 1ms to 24h")
	}
	return d, err
}

// Concurrency is how many calls may use an account at once: a number above 0, or Unbounded. Its
// text is the number, or unbounded.
type Concurrency int

// Unbounded is the concurrency of an account that any number of calls may use at once.
const Unbounded Concurrency = -1

const unbounded = "unbounded"

// UnmarshalText reads the text of a concurrency.
func (c *Concurrency) UnmarshalText(text []byte) error {
	s := string(text)
	if s == unbounded {
		*c = Unbounded
		return nil
	}
	n, err := strconv.Atoi(s)
	if err != nil || n < 1 || n > maxCount {
		return fmt.Errorf("%q is neither a number above 0 nor unbounded", s)
	}
	*c = Concurrency(n)
	return nil
}

// MarshalText returns the text of a concurrency.
func (c Concurrency) MarshalText() ([]byte, error) {
	if c == Unbounded {
		return []byte(unbounded), nil
	}
	return strconv.AppendInt(nil, int64(c), 10), nil
}
