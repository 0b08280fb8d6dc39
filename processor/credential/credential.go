// Package credential defines how a processor gets the account with which it makes a call. A
// [Source] decides which account is used next; the processor says afterwards how the account fared.
// The package hides whether processes share this decision.
package credential

import (
	"context"
	"fmt"
	"sync/atomic"
	"time"
)

// Source lends the accounts of one service. All of them can replace each other.
type Source interface {
	// Borrow returns the account for one call. It may wait for a free account until ctx ends. The
	// error is a [*DeniedError] if no account may be used for some time.
	Borrow(ctx context.Context) (Loan, error)
}

// Loan is the right to use one account for one call.
type Loan interface {
	// ID is the account's id. It is no secret.
	ID() string
	// Return ends the loan and says how the call ended. It must be called exactly once.
	Return(o Outcome)
}

// Unbounded is the concurrency of an account that any number of calls may use at once.
const Unbounded = -1

// Account is an account that a source lends, with the limits that its operator has set.
type Account struct {
	ID          string
	Rate        *Rate // nil: the source's default
	Concurrency int   // most calls at once; 0: the source's default; or Unbounded
}

// Rate is the most calls in a time span.
type Rate struct {
	Permits int // 0: no limit
	Window  time.Duration
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
)

// Outcome is how a call ended that used an account.
type Outcome struct {
	Kind  Kind
	After time.Duration // for Throttled: how long the account should not be used
}

// DeniedError says that no account may be used now. The job should run again after this time.
type DeniedError struct {
	After  time.Duration // 0 if the time is not known
	Reason string
}

func (e *DeniedError) Error() string {
	return fmt.Sprintf("no account is free for %s: %s", e.After, e.Reason)
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
