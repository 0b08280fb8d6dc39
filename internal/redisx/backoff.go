package redisx

import (
	"context"
	"math/rand/v2"
	"time"
)

// Backoff yields waits that double from Min to Max, with jitter so that processes which failed
// together don't return together. The zero step is the first; it is not safe for concurrent use.
type Backoff struct {
	Min, Max time.Duration
	ceiling  time.Duration
}

// Next is how long to wait now: between Min and Max, in the upper half of the current ceiling.
func (b *Backoff) Next() time.Duration {
	b.ceiling = min(max(2*b.ceiling, 2*b.Min), b.Max)
	return max(b.Min, Jitter(b.ceiling))
}

// Reset starts over at Min, after a success.
func (b *Backoff) Reset() { b.ceiling = 0 }

// Jitter is a random wait from d/2 up to d.
func Jitter(d time.Duration) time.Duration {
	if d < 2 {
		return d
	}
	return d/2 + rand.N(d/2+1)
}

// Sleep waits for d or until ctx ends, whose error it then returns.
func Sleep(ctx context.Context, d time.Duration) error {
	timer := time.NewTimer(d)
	defer timer.Stop()
	select {
	case <-timer.C:
		return ctx.Err()
	case <-ctx.Done():
		return ctx.Err()
	}
}
