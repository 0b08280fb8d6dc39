package guard

import (
	"context"
	"fmt"
	"strings"
	"time"
)

// Breaker is a circuit breaker that processes share through Redis. Once open, it stays open for its
// time, even if no process uses it or Redis's clock steps back. A step forward of the clock
// shortens that time. FLUSHALL closes the breaker, and so can an operator.
type Breaker struct{ g *shared }

// BreakerOption is an option of Breaker.
type BreakerOption interface{ toBreaker(*Spec) }

// Breaker returns a circuit breaker. It is closed until b.Failures calls in a row have failed; then
// it is open for b.OpenFor; then it is half-open: it lets at most b.Successes probes through at
// once, and closes when b.Successes have succeeded. A probe that fails, or whose process dies,
// opens it again. The outcome of a call that began before a change of state does not count. A
// mistake in the name or in b is an error of each call.
func (c *Client) Breaker(name string, b BreakerPolicy, o ...BreakerOption) *Breaker {
	spec := Spec{Breaker: b, Concurrency: Unbounded}
	for _, option := range o {
		option.toBreaker(&spec)
	}
	g := c.declared(kindBreaker, name, spec)
	if b == (BreakerPolicy{}) {
		g.mu.Lock()
		g.broken = joinMistakes(g.broken, invalid("breaker %s: failures 0: must be 1 to 1000000", name))
		g.mu.Unlock()
	}
	return &Breaker{g}
}

// Allow asks whether a call may be made. If so, done must be called with its outcome. Otherwise the
// error is a *DeniedError. Its reason is CircuitOpen; RateLimited after an outcome Throttled; or
// Disabled. Further errors as those of TryAcquire. When Redis is away the call is allowed, unless
// the option OnOutage says otherwise.
func (b *Breaker) Allow(ctx context.Context) (done func(Outcome), err error) {
	l, err := b.g.acquire(ctx, acquireConfig{})
	if err != nil {
		return nil, err
	}
	return func(o Outcome) {
		if err := l.releaseAnyway(ctx, o); err != nil {
			b.g.c.cfg.logger.Warn("guard: the outcome of a call was lost", "guard", b.g.name, "error", err)
		}
	}, nil
}

// Do calls f if the breaker allows it, and reports the outcome: Success if f returned nil, Neutral
// for an error of ctx, Failure for another error or a panic. It returns the error of f, or that of
// Allow if f was not called.
func (b *Breaker) Do(ctx context.Context, f func(ctx context.Context) error) error {
	done, err := b.Allow(ctx)
	if err != nil {
		return err
	}
	outcome := Failure
	defer func() { done(outcome) }()
	err = f(ctx)
	outcome = outcomeOf(ctx, err)
	return err
}

// Lock is a lock that processes share. It is not reentrant.
//
// A holder that dies keeps the lock until its TTL has passed since the last renewal. When Redis's
// clock steps forward, the lock may end earlier by as much. When Redis is away, nobody can lock,
// and Lost of the present lease closes before its TTL ends. A lock is kept on one Redis master:
// after a failover or FLUSHALL it may be held twice, for at most a third of its TTL. A holder that
// was suspended may not notice that it has lost the lock. So give the lease's fence to the store
// that the lock protects; the store must refuse a smaller fence than it has seen (see the example).
type Lock struct {
	g    *shared
	wait time.Duration
}

// LockOption is an option of Lock.
type LockOption func(*Spec)

// TTL sets after what time the lock of a dead holder is free; 30 s by default.
func TTL(d time.Duration) LockOption { return func(s *Spec) { s.Lease = d } }

// LockMaxWait sets how long Lock waits; 60 s by default.
func LockMaxWait(d time.Duration) LockOption { return func(s *Spec) { s.MaxWait = d } }

// Lock returns a lock. A mistake in the name or in an option is an error of each call.
func (c *Client) Lock(name string, o ...LockOption) *Lock {
	spec := Spec{OnOutage: Closed}
	for _, option := range o {
		option(&spec)
	}
	return &Lock{g: c.declared(kindLock, name, spec), wait: spec.withDefaults().MaxWait}
}

// TryLock locks, or answers at once with a *DeniedError; further errors as those of
// Pool.TryAcquire. To unlock, release the lease with Neutral.
func (k *Lock) TryLock(ctx context.Context) (*Lease, error) {
	return k.g.acquire(ctx, acquireConfig{})
}

// Lock locks; it waits in the queue for at most the option LockMaxWait. Errors as those of
// Pool.Acquire. To unlock, release the lease with Neutral.
func (k *Lock) Lock(ctx context.Context) (*Lease, error) {
	return k.g.acquire(ctx, acquireConfig{wait: k.wait})
}

// Do locks, calls f and unlocks. The ctx of f ends with cause ErrLost when the lock is lost. Do
// returns the error of Lock, or those of f and of the release.
func (k *Lock) Do(ctx context.Context, f func(ctx context.Context, l *Lease) error) error {
	l, err := k.Lock(ctx)
	if err != nil {
		return err
	}
	return l.do(ctx, f, func(context.Context, error) Outcome { return Neutral })
}

// PerKey makes a guard for each key, for example for each host. Each is a Pool with one member.
type PerKey struct {
	c    *Client
	name string
	spec Spec
	err  error
}

// PerKey returns guards with the same spec, one for each key. The spec has no Members. Redis
// forgets the guard of a key 30 to 60 minutes after its last use, or later if a lease, window or
// OpenFor is long; until then it needs about 1 KB. Call it once: keys in use keep the spec with
// which they were first used.
func (c *Client) PerKey(name string, s Spec) *PerKey {
	p := &PerKey{c: c, name: name, spec: s}
	if !validID(name) {
		p.err = fmt.Errorf("guard %.140q: %w", name, invalid("name: must be 1 to 128 of A-Z a-z 0-9 . _ -"))
	}
	return p
}

// For returns the guard of a key. Upper and lower case are the same. A key that is not 1 to 128 of
// the characters A-Z a-z 0-9 . _ - is stored as its SHA-256.
func (p *PerKey) For(key string) *Pool {
	return &Pool{p.c.use(kindKey, p.name+"/"+storedKey(strings.ToLower(key)), func(g *shared) {
		g.broken = joinMistakes(p.err, g.setSpec(p.spec))
	})}
}
