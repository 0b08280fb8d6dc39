package guard

import (
	"context"
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
