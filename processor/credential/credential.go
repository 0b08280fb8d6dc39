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
