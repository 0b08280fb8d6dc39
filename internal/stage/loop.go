// Package stage holds what the roles share: the loop of a partition, which waits for work instead
// of polling for it, and the check of the number of partitions. A role's own behaviour is in the
// package of its name below this one.
package stage

import (
	"context"
	"errors"
	"log/slog"
	"sync"
	"sync/atomic"
	"time"

	"github.com/redis/go-redis/v9"

	"github.com/bulkaction/bulkaction/internal/redisx"
)

// Loop repeats a step until its context ends. A loop that has work never sleeps.
type Loop struct {
	Name string // for the log
	Conn *redisx.Conn
	Wake string // a list that gets a token when there may be work; "" is none
	Log  *slog.Logger
}

// Step does some work and says how long to wait before the next: 0 when there is more to do now,
// a negative time to wait until woken, but never longer than the loop's longest wait of a second.
type Step func(ctx context.Context) (idle time.Duration, err error)

// Run returns nil when ctx has ended. Errors of a step are logged once until it works again, and
// are retried with backoff: a role outlives Redis.
func (l Loop) Run(ctx context.Context, step Step) error {
	backoff := redisx.Backoff{Min: 50 * time.Millisecond, Max: 5 * time.Second}
	failing := false
	w := newWaker(l.Conn, l.Wake)
	defer w.reads.Wait()
	for ctx.Err() == nil {
		idle, err := step(ctx)
		switch {
		case err != nil && ctx.Err() != nil:
			return nil
		case err != nil:
			if !failing {
				l.Log.Error("step failed, trying again until it works", "loop", l.Name, "error", err)
			}
			failing = true
			if redisx.Sleep(ctx, backoff.Next()) != nil {
				return nil
			}
			continue
		case failing:
			l.Log.Info("step works again", "loop", l.Name)
			failing = false
		}
		backoff.Reset()
		if idle == 0 {
			continue
		}
		if idle < 0 {
			idle = redisx.MaxBlock
		}
		w.wait(ctx, min(idle, redisx.MaxBlock))
	}
	return nil
}

// waker waits for a token or for a time. Redis ends a blocking read up to 100 ms late when it has
// nothing else to do, so the time is kept here: a read that is still going on then serves the next
// wait. It reads only while somebody waits: a token is for who is idle.
type waker struct {
	conn      *redisx.Conn
	key       string
	token     chan struct{}
	readEnded chan struct{} // a read has ended without one
	reading   atomic.Bool
	reads     sync.WaitGroup
}

func newWaker(conn *redisx.Conn, key string) *waker {
	return &waker{conn: conn, key: key, token: make(chan struct{}, 1), readEnded: make(chan struct{}, 1)}
}

func (w *waker) wait(ctx context.Context, d time.Duration) {
	timer := time.NewTimer(d)
	defer timer.Stop()
	for {
		if w.key != "" && w.reading.CompareAndSwap(false, true) {
			w.reads.Go(func() { w.readToken(context.WithoutCancel(ctx)) })
		}
		select {
		case <-w.readEnded: // and again
		case <-w.token:
			return
		case <-timer.C:
			return
		case <-ctx.Done():
			return
		}
	}
}

// read reads once. When Redis does not answer, nothing is told: the time goes on alone.
func (w *waker) readToken(ctx context.Context) {
	err := w.conn.Block.BLPop(ctx, redisx.MaxBlock, w.key).Err()
	w.reading.Store(false)
	signal := w.readEnded
	switch {
	case err == nil:
		signal = w.token
	case !errors.Is(err, redis.Nil):
		return
	}
	select {
	case signal <- struct{}{}:
	default:
	}
}

// Group runs several loops until all have returned; the first error ends the others.
func RunAll(ctx context.Context, runs ...func(context.Context) error) error {
	ctx, cancel := context.WithCancel(ctx)
	defer cancel()
	errs := make([]error, len(runs))
	var wg sync.WaitGroup
	for i, run := range runs {
		wg.Go(func() {
			if errs[i] = run(ctx); errs[i] != nil {
				cancel()
			}
		})
	}
	wg.Wait()
	return errors.Join(errs...)
}

// Every calls f at intervals until ctx ends; the first call is at once. Errors are logged at debug
// level: whoever calls this can do without a round.
func Every(
	ctx context.Context, log *slog.Logger, name string, interval time.Duration, f func(context.Context) error,
) error {
	for {
		if err := f(ctx); err != nil && ctx.Err() == nil {
			log.Debug("round failed", "round", name, "error", err)
		}
		if redisx.Sleep(ctx, interval) != nil {
			return nil
		}
	}
}
