package lending

import (
	"cmp"
	"context"
	"fmt"
	"math"
	"strings"
	"sync"
	"sync/atomic"
	"time"

	"github.com/bulkaction/bulkaction/guard"
	"github.com/bulkaction/bulkaction/processor"
	"github.com/bulkaction/bulkaction/processor/credential"
)

// permissionJobs is how many jobs one permission of a breaker serves at most, and permissionAge for
// how long it is given to further jobs.
const (
	permissionJobs = 100
	permissionAge  = 100 * time.Millisecond
)

// maxNameBytes is the longest name of a guard.
const maxNameBytes = 128

// share returns a source of the accounts ids, which have no limit but the breaker. It lends them in
// turn, and leaves out those whose breaker is open. If breaker.Failures is 0, they have no breaker.
func (n Lender) share(pool string, ids []string, breaker credential.Breaker) (credential.Source, error) {
	service, _, _ := strings.Cut(pool, ".")
	all := &inTurn{}
	for _, id := range ids {
		one := &shared{name: service + "." + id, id: id, policy: breaker}
		if len(one.name) > maxNameBytes {
			return nil, fmt.Errorf("account %s: an id of an account without limits has at most %d characters",
				id, maxNameBytes-len(service)-1)
		}
		all.accounts = append(all.accounts, one)
	}
	if breaker.Failures == 0 {
		return credential.InTurn(ids...), nil // nothing guards these accounts
	}
	for _, one := range all.accounts {
		// The breaker in Redis opens at the first failed permission. This process counts the failed
		// calls in a row, and fails a permission only when there are breaker.Failures of them.
		one.breaker = n.Guards.Breaker(one.name, guard.BreakerPolicy{
			Failures: 1, OpenFor: breaker.OpenFor, Successes: breaker.Successes,
		})
	}
	return all, nil
}

// inTurn lends shared accounts one after the other.
type inTurn struct {
	accounts []*shared
	next     atomic.Uint64
}

func (t *inTurn) Borrow(ctx context.Context) (credential.Loan, error) {
	sources := make(inOrder, len(t.accounts))
	first := t.next.Add(1) - 1
	for i := range sources {
		sources[i] = t.accounts[(first+uint64(i))%uint64(len(t.accounts))]
	}
	return sources.Borrow(ctx)
}

// Availability returns "no bound" (Free -1) unless all accounts are denied now, as by an open
// breaker or a throttle; then Free is 0, and Next is when the first denial ends.
func (t *inTurn) Availability() processor.Availability {
	a := processor.Availability{Free: 0, PerSecond: math.Inf(1)}
	for i, one := range t.accounts {
		until := one.deniedUntil()
		if until.IsZero() {
			a.Free, a.Next = -1, time.Time{}
			break
		}
		if i == 0 || until.Before(a.Next) {
			a.Next = until
		}
	}
	return a
}

// shared is an account that any number of calls may use at once; only a breaker guards it. Calls of
// this process that run at the same time share permissions of the breaker, so that Redis is asked
// once for many calls.
//
// A permission fails when as many calls in a row have failed as the breaker's policy says, or one
// probe; the row is counted across permissions. By that failure, and by a throttle, the loans of
// calls that have the permission and have not begun are revoked. A permission that was neither
// failed nor throttled succeeds if one of its calls has succeeded; otherwise it is neutral.
type shared struct {
	name, id string
	breaker  *guard.Breaker
	policy   credential.Breaker

	mu       sync.Mutex
	current  *permission
	asking   chan struct{}           // closed when the breaker has answered; nil: it is not asked
	denied   *credential.DeniedError // calls are denied without asking the breaker until checkAt
	deniedAt time.Time
	checkAt  time.Time
	row      int // failed calls in a row
	probes   int // successful probes that are needed to close the breaker; until 0 a permission has one call
	openings int // how often the breaker was found open, or was opened by this process
}

// permission is one permission of a breaker, which calls share. The mutex of its account guards it.
type permission struct {
	done     func(guard.Outcome) // nil after the release
	openings int                 // those of the account at the start
	since    time.Time
	calls    int  // that have got it
	running  int  // calls without an outcome
	good     bool // a call has succeeded
	revoked  *credential.DeniedError
}

// deniedUntil returns the time until which calls are denied without asking the breaker; zero if
// they are not denied.
func (s *shared) deniedUntil() time.Time {
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.stillDenied() == nil {
		return time.Time{}
	}
	return s.checkAt
}

// stillDenied returns the last denial, with its remaining time; nil if the breaker is to be asked.
// The caller holds the lock.
func (s *shared) stillDenied() *credential.DeniedError {
	if s.denied == nil || !time.Now().Before(s.checkAt) {
		return nil
	}
	rest := *s.denied
	if rest.After > 0 {
		rest.After = max(rest.After-time.Since(s.deniedAt), time.Millisecond)
	}
	return &rest
}

// deny makes Borrow refuse all calls for d.After, but for a second if that is unknown, and for
// mostDenied at most. The caller holds the lock.
func (s *shared) deny(d *credential.DeniedError) {
	s.denied, s.deniedAt = d, time.Now()
	s.checkAt = s.deniedAt.Add(min(cmp.Or(d.After, time.Second), mostDenied))
}

// Borrow joins the current permission, or asks the breaker for one.
func (s *shared) Borrow(ctx context.Context) (credential.Loan, error) {
	s.mu.Lock()
	defer s.mu.Unlock()
	for {
		if p := s.current; p != nil && s.mayJoin(p) {
			p.calls++
			p.running++
			return &sharedLoan{s, p}, nil
		}
		if denied := s.stillDenied(); denied != nil {
			return nil, denied
		}
		if s.asking == nil {
			return s.ask(ctx)
		}
		asking := s.asking
		s.mu.Unlock()
		select {
		case <-asking:
		case <-ctx.Done():
		}
		s.mu.Lock()
		if ctx.Err() != nil {
			return nil, ctx.Err()
		}
	}
}

func (s *shared) mayJoin(p *permission) bool {
	return p.done != nil && s.probes == 0 && p.calls < permissionJobs && time.Since(p.since) < permissionAge
}

// ask asks the breaker in Redis for a permission. All calls that wait for one share it, so ask
// ignores the cancellation of ctx. The caller holds the lock; ask gives it up meanwhile.
func (s *shared) ask(ctx context.Context) (credential.Loan, error) {
	asking := make(chan struct{})
	s.asking = asking
	s.mu.Unlock()
	done, err := s.breaker.Allow(context.WithoutCancel(ctx))
	s.mu.Lock()
	s.asking = nil
	close(asking)
	if err != nil {
		denied := denialOf(s.name, err)
		if denied == nil {
			return nil, err
		}
		if denied.Reason == words[guard.CircuitOpen] && s.probes == 0 { // otherwise it may be half-open
			s.opened()
		}
		s.deny(denied)
		return nil, denied
	}
	s.denied = nil
	s.current = &permission{done: done, openings: s.openings, since: time.Now(), calls: 1, running: 1}
	return &sharedLoan{s, s.current}, nil
}

// opened records that the breaker has opened. The outcomes of permissions from before change
// nothing any more, neither here nor in Redis. The caller holds the lock.
func (s *shared) opened() {
	s.probes, s.row = s.policy.Successes, 0
	s.openings++
}

// sharedLoan is one call under a permission.
type sharedLoan struct {
	account    *shared
	permission *permission
}

func (l *sharedLoan) ID() string { return l.account.id }

// Revoked returns why the call must not begin, if so.
func (l *sharedLoan) Revoked() *credential.DeniedError {
	l.account.mu.Lock()
	defer l.account.mu.Unlock()
	return l.permission.revoked
}

// Return records the outcome of the call, and releases the permission as soon as the permission's
// outcome is certain.
func (l *sharedLoan) Return(o credential.Outcome) {
	s, p := l.account, l.permission
	s.mu.Lock()
	defer s.mu.Unlock()
	p.running--
	late := p.openings != s.openings
	switch {
	case o.Kind == credential.Success:
		p.good = true
		if !late {
			s.row = 0
		}
	case o.Kind == credential.Failure && late:
		s.release(p, guard.Failure)
	case o.Kind == credential.Failure:
		s.row++
		if s.row >= s.policy.Failures || s.probes > 0 {
			s.opened()
			s.revoke(p, guard.Failure, s.policy.OpenFor, guard.CircuitOpen)
		}
	case o.Kind == credential.Throttled:
		s.revoke(p, guard.Throttled(o.After), o.After, guard.RateLimited)
	}
	if p.running == 0 {
		outcome := guard.Neutral
		if p.good {
			outcome = guard.Success
		}
		s.release(p, outcome)
	}
}

// revoke releases a permission with the outcome o, and denies the account for the time after, also
// to calls that have the permission and have not begun. The caller holds the lock.
func (s *shared) revoke(p *permission, o guard.Outcome, after time.Duration, reason guard.Reason) {
	if p.done == nil {
		return // a late answer: the permission was released already
	}
	p.revoked = &credential.DeniedError{Guard: s.name, After: after, Reason: words[reason]}
	s.deny(p.revoked)
	s.release(p, o)
}

// release tells the breaker the outcome of a permission, once. The caller holds the lock.
func (s *shared) release(p *permission, o guard.Outcome) {
	if p.done == nil {
		return
	}
	if o == guard.Success && s.probes > 0 && p.openings == s.openings {
		s.probes--
	}
	go p.done(o)
	p.done = nil
}
