// Package lending decides, by guards, which account a processor uses for its next call: it makes
// each credential.Source from pools and breakers of package guard. All worker processes share the
// decisions, in Redis. The package hides how limits of accounts become guards, and how long a job
// may wait for an account.
package lending

import (
	"cmp"
	"context"
	"errors"
	"log/slog"
	"math"
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

// rateOf returns the limit of a guard.
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
