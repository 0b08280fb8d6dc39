// Package lending decides, by guards, which account a processor uses for its next call: it makes
// each credential.Source from pools and breakers of package guard. All worker processes share the
// decisions, in Redis. The package hides how limits of accounts become guards, and how long a job
// may wait for an account.
package lending

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"log/slog"
	"math"
	"strings"
	"sync"
	"sync/atomic"
	"time"

	"github.com/bulkaction/bulkaction/guard"
	"github.com/bulkaction/bulkaction/processor"
	"github.com/bulkaction/bulkaction/processor/credential"
)

// redisTimeout bounds the time to declare a pool, or to give a member back.
const redisTimeout = 5 * time.Second

// mostDenied is the longest time for which a denial is believed without asking Redis again. The
// real denial may be longer, but an operator may close the breaker or raise the rate before its
// end.
const mostDenied = time.Minute

// warnPause is the shortest time between two warnings about the same account.
const warnPause = time.Minute

// Lender makes sources. All fields but Wait are needed.
type Lender struct {
	Guards  *guard.Client
	Wait    time.Duration // longest time that a job waits in the queue of a guard; 0: jobs don't wait
	MaxWait time.Duration // longest time that any program waits in the queue of these guards
	Log     *slog.Logger
}

// Choice returns a function that makes the credential.Source of a pool of accounts; limits are the
// limits of accounts that set no own ones. The function declares the pool in Redis. Accounts with
// neither a rate nor a bound on concurrency are not part of the pool: only a breaker guards each of
// them (see shared). They are lent before the others.
func (n Lender) Choice(limits credential.Limits) credential.Choice {
	return func(name string, accounts []credential.Account) (credential.Source, error) {
		spec := guard.Spec{
			Rate: rateOf(limits.Rate, limits.Limiter), Breaker: guard.BreakerPolicy(limits.Breaker),
			Concurrency: int(limits.Concurrency), MaxWait: n.MaxWait,
		}
		var unlimited []string
		each := 1
		for _, a := range accounts {
			rate := limits.Rate
			m := guard.Member{ID: a.ID, Concurrency: int(a.Concurrency)}
			if a.Rate != nil {
				rate = *a.Rate
				own := rateOf(rate, limits.Limiter)
				m.Rate = &own
			}
			if rate.Permits == 0 && cmp.Or(a.Concurrency, limits.Concurrency) == credential.Unbounded {
				unlimited = append(unlimited, a.ID)
				continue
			}
			spec.Members = append(spec.Members, m)
			switch at := int(cmp.Or(a.Concurrency, limits.Concurrency)); {
			case at == guard.Unbounded || each == guard.Unbounded:
				each = guard.Unbounded
			default:
				each = max(each, at)
			}
		}
		var sources inOrder
		if len(unlimited) > 0 {
			s, err := n.share(name, unlimited, limits.Breaker)
			if err != nil {
				return nil, err
			}
			sources = append(sources, s)
		}
		if len(spec.Members) > 0 {
			ctx, cancel := context.WithTimeout(context.Background(), redisTimeout)
			defer cancel()
			pool, err := n.Guards.Pool(ctx, name, spec)
			if err != nil {
				return nil, err
			}
			sources = append(sources, &source{pool: pool, name: name, wait: n.Wait, log: n.Log, each: each})
		}
		if len(sources) == 1 {
			return sources[0], nil
		}
		return sources, nil
	}
}

// inOrder is a source made of several: it asks them in this order until one lends an account. If
// all deny one, it returns the denial with the shortest After (0: its end is not known). Any other
// error it returns at once.
type inOrder []credential.Source

func (o inOrder) Borrow(ctx context.Context) (credential.Loan, error) {
	var shortest *credential.DeniedError
	for _, s := range o {
		l, err := s.Borrow(ctx)
		var denied *credential.DeniedError
		switch {
		case err == nil:
			return l, nil
		case !errors.As(err, &denied):
			return nil, err
		case shortest == nil || denied.After < shortest.After:
			shortest = denied
		}
	}
	return nil, shortest
}

func (o inOrder) Availability() processor.Availability { return credential.AvailabilityOf(o...) }

func rateOf(r credential.Rate, limiter string) guard.Rate {
	switch {
	case r.Permits == 0:
		return guard.Rate{}
	case limiter == credential.Token:
		return guard.Bucket(r.Permits, r.Window)
	}
	return guard.PerWindow(r.Permits, r.Window)
}

// PerKey returns a function that returns the source of a key, such as the name of a host. Any
// number of calls may run at once for a key. Each key has a rate limit and a breaker of its own;
// their settings are the same.
func (n Lender) PerKey(name string, rate credential.Rate, limiter string, breaker credential.Breaker,
) func(key string) credential.Source {
	keys := n.Guards.PerKey(name, guard.Spec{
		Rate: rateOf(rate, limiter), Breaker: guard.BreakerPolicy(breaker),
		Concurrency: guard.Unbounded, MaxWait: n.MaxWait,
	})
	return func(key string) credential.Source {
		return &source{
			pool: keys.For(key), name: name + "/" + key, wait: n.Wait, log: n.Log, each: guard.Unbounded, quiet: true,
		}
	}
}

// source lends the members of a pool.
type source struct {
	pool   *guard.Pool
	name   string
	wait   time.Duration
	log    *slog.Logger
	denied atomic.Pointer[time.Time] // until then Availability shows no free member; nil: no such time
	each   int                       // calls that a member serves at once, at most; guard.Unbounded
	quiet  bool                      // failures of members are not logged: job payloads name the members
	warned sync.Map                  // by member: when its failure was logged last
}

// Borrow waits in the queue of the guard for a member, for at most the source's wait. A denial that
// lasts longer also changes what Availability returns.
func (s *source) Borrow(ctx context.Context) (credential.Loan, error) {
	l, err := s.pool.Acquire(ctx, guard.MaxWait(s.wait))
	if err == nil {
		s.denied.Store(nil)
		return loan{l, s}, nil
	}
	denied := denialOf(s.name, err)
	if denied == nil {
		return nil, err
	}
	if denied.After > s.wait {
		// Availability shows no free member until s.wait before the denial's end: a job that is
		// read then gets a member, because it waits in the queue for up to s.wait.
		until := time.Now().Add(min(denied.After, mostDenied) - s.wait)
		s.denied.Store(&until)
	}
	return nil, denied
}

// denialOf returns the denial that an error of a guard means, or nil if it means none. The denial
// says when to try again (After) only for a rate limit or an open breaker; the end of other denials
// is not known.
func denialOf(name string, err error) *credential.DeniedError {
	var denied *guard.DeniedError
	d := &credential.DeniedError{Guard: name}
	switch {
	case errors.As(err, &denied):
		d.Reason = words[denied.Reason]
		if denied.Reason == guard.RateLimited || denied.Reason == guard.CircuitOpen {
			d.After = denied.After
		}
	case errors.Is(err, guard.ErrUnavailable):
		d.Reason = "Redis is unavailable"
	case errors.Is(err, guard.ErrWaitTimeout):
		d.Reason = "none became free in time"
	case errors.Is(err, guard.ErrQueueFull):
		d.Reason = words[guard.Queued]
	default:
		return nil
	}
	return d
}

// words are the reasons of a denial, for people.
var words = map[guard.Reason]string{
	guard.RateLimited: "rate limit",
	guard.CircuitOpen: "circuit breaker open",
	guard.Busy:        "all are in use",
	guard.Queued:      "others wait for one",
	guard.Disabled:    "all are disabled",
}

// Availability returns how many calls may begin now, as the last replies of Redis said. It does not
// ask Redis. After a denial that was longer than the wait, Free is 0 and Next is the time denied,
// until Borrow gets a member again.
func (s *source) Availability() processor.Availability {
	known := s.pool.Availability()
	a := processor.Availability{Free: max(known.Free, 0) * s.each, PerSecond: known.PerSecond}
	if until := s.denied.Load(); until != nil {
		a.Free, a.Next = 0, *until
	}
	if math.IsNaN(a.PerSecond) {
		a.PerSecond = math.Inf(1)
	}
	return a
}

// loan is a lease of a member.
type loan struct {
	lease *guard.Lease
	from  *source
}

// Revoked returns a denial if the lease was lost, for example while Redis was away or because an
// operator took it back: another call may have the account now. Otherwise it returns nil.
func (l loan) Revoked() *credential.DeniedError {
	select {
	case <-l.lease.Lost():
		return &credential.DeniedError{Guard: l.from.name, Reason: "the lease was lost"}
	default:
		return nil
	}
}

func (l loan) ID() string { return l.lease.Member() }

// Return releases the lease in a goroutine of its own, so it does not block. If Redis is away, the
// lease ends by itself.
func (l loan) Return(o credential.Outcome) {
	if o.Kind == credential.Failure {
		l.from.warn(l.ID())
	}
	go func() {
		ctx, cancel := context.WithTimeout(context.Background(), redisTimeout)
		defer cancel()
		var err error
		if o.Kind == credential.Unknown {
			err = l.lease.ReleaseUnknown(ctx)
		} else {
			err = l.lease.Release(ctx, outcomeOf(o))
		}
		if err != nil {
			l.from.log.Warn("an account could not be given back, its lease ends by itself",
				"guard", l.from.name, "account", l.ID(), "error", err)
		}
	}()
}

// warn logs that a call with a member has failed, for each member at most once in warnPause. For a
// quiet source it does nothing.
func (s *source) warn(member string) {
	now := time.Now()
	last, known := s.warned.Load(member)
	if s.quiet || known && now.Sub(last.(time.Time)) < warnPause {
		return
	}
	s.warned.Store(member, now)
	s.log.Warn("a call with an account failed: the account or its service does not work",
		"guard", s.name, "account", member)
}

func outcomeOf(o credential.Outcome) guard.Outcome {
	switch o.Kind {
	case credential.Success:
		return guard.Success
	case credential.Failure:
		return guard.Failure
	case credential.Throttled:
		return guard.Throttled(o.After)
	case credential.Unused, credential.Unknown:
		return guard.Unused
	case credential.Neutral:
	}
	return guard.Neutral
}

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
