// Package stage holds what the roles share: Loop, which repeats the step of a role and waits for
// work instead of polling for it, functions that run several loops or periodic calls, and the check
// of the number of partitions. The package of a role is in the folder of its name below this one.
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

// Loop repeats a step until its context ends. It never waits while there is work.
type Loop struct {
	Name string // name of the loop in log messages
	Conn *redisx.Conn
	Wake string // key of the list that gets a wake token when there may be work; "": none
	Log  *slog.Logger
}

// Step does some of a role's work. It returns how long to wait before the next step: 0 when there
// is more work now; a negative time when only a wake token should end the wait. A wake token ends
// any wait earlier, and no wait is longer than redisx.MaxBlock.
type Step func(ctx context.Context) (idle time.Duration, err error)

// Run calls step until ctx ends, and always returns nil. When step fails, Run repeats it with
// backoff until it succeeds: a role continues after an outage of Redis. It logs the first error and
// the success, not the errors between. Before it returns, it waits for its last blocking read,
// about redisx.MaxBlock at most.
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

// waker waits for a wake token, but no longer than a given time. Redis may end a blocking read up
// to 100 ms late, so waker measures the time itself, and a read that has not ended serves the next
// wait. It begins a read only during a wait, because a token is for an idle process.
type waker struct {
	conn      *redisx.Conn
	key       string
	token     chan struct{} // a read has returned a token
	readEnded chan struct{} // a read has ended without a token
	reading   atomic.Bool   // a read runs
	reads     sync.WaitGroup
}

func newWaker(conn *redisx.Conn, key string) *waker {
	return &waker{conn: conn, key: key, token: make(chan struct{}, 1), readEnded: make(chan struct{}, 1)}
}

// wait returns when there is a token, after the time d, or when ctx ends.
func (w *waker) wait(ctx context.Context, d time.Duration) {
	timer := time.NewTimer(d)
	defer timer.Stop()
	for {
		if w.key != "" && w.reading.CompareAndSwap(false, true) {
			w.reads.Go(func() { w.readToken(context.WithoutCancel(ctx)) })
		}
		select {
		case <-w.readEnded: // begin the next read
		case <-w.token:
			return
		case <-timer.C:
			return
		case <-ctx.Done():
			return
		}
	}
}

// readToken does one blocking read and signals its result. After an error of Redis it signals
// nothing, so that wait ends by its timer and no further read is tried at once.
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

// RunAll calls all functions at the same time and returns when all have returned. The first error
// ends the context of the others. It returns all errors, joined in the order of runs.
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

// Every calls f at once and then again after each interval, until ctx ends; then it returns nil. It
// logs errors of f at debug level only, so it is meant for an f that may fail sometimes. name is
// for the log.
func Every(
	ctx context.Context, log *slog.Logger, name string, interval time.Duration, f func(context.Context) error,
) error {
	for {
		if err := f(ctx); err != nil && ctx.Err() == nil {
			log.Debug("periodic call failed", "call", name, "error", err)
		}
		if redisx.Sleep(ctx, interval) != nil {
			return nil
		}
	}
}
