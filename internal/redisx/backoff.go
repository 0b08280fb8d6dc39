package redisx

import (
	"context"
	"math/rand/v2"
	"time"
)

// Backoff returns waiting times that double from Min to Max. Jitter keeps processes that failed
// together from retrying together. It is ready for use once Min and Max are set, and not safe for
// concurrent use.
type Backoff struct {
	Min, Max time.Duration
	ceiling  time.Duration
}

// Next returns how long to wait now: a random time between half the ceiling and the ceiling, but at
// least Min. The ceiling is twice Min at the first call, doubles with each further call, and is at
// most Max.
func (b *Backoff) Next() time.Duration {
	b.ceiling = min(max(2*b.ceiling, 2*b.Min), b.Max)
	return max(b.Min, Jitter(b.ceiling))
}

// Reset makes the ceiling of the next wait twice Min again; call it after a success.
func (b *Backoff) Reset() { b.ceiling = 0 }

// Jitter returns a random time between d/2 and d.
func Jitter(d time.Duration) time.Duration {
	if d < 2 {
		return d
	}
	return d/2 + rand.N(d/2+1)
}

// RetryWhile calls step until it succeeds or returns an error that retryable refuses, with waits of
// 10 ms to half a second. It makes no further try if the last one ended when patience was over, or
// if ctx has ended. It returns the error of the last try; nil if that succeeded.
func RetryWhile(
	ctx context.Context, patience time.Duration, retryable func(error) bool, step func(context.Context) error,
) error {
	deadline := time.Now().Add(patience)
	return Retry(ctx, Backoff{Min: 10 * time.Millisecond, Max: 500 * time.Millisecond}, func(err error) bool {
		return retryable(err) && !time.Now().After(deadline)
	}, step)
}

// Retry calls step until it succeeds, ctx ends, or again, which may log the error, says that it is
// not to be tried again. It returns the error of the last try; nil if that succeeded.
func Retry(
	ctx context.Context, backoff Backoff, again func(error) bool, step func(context.Context) error,
) error {
	for {
		err := step(ctx)
		if err == nil || !again(err) || ctx.Err() != nil || Sleep(ctx, backoff.Next()) != nil {
			return err
		}
	}
}

// Sleep waits for d and returns nil. If ctx ends first, Sleep returns the error of ctx at once.
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
