package guard

import (
	"context"
	"time"
)

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
