// Package stage holds what the roles share: Process, what a role gets from its process; Runner,
// which runs the loops of a role, waits for wake tokens between their steps, and at the end gives
// up what the role holds; and the check of the number of partitions. The package of a role is in
// the folder of its name below this one.
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

// Step does some of a role's work. It returns how long to wait before the next step: 0 when there
// is more work now; a negative time when only a wake token should end the wait. A wake token ends
// any wait earlier, and no wait is longer than redisx.MaxBlock.
type Step func(ctx context.Context) (idle time.Duration, err error)

// loop is one loop of a role: it repeats a step until its context ends (see Runner.Loop).
type loop struct {
	name  string
	waker *waker
	log   *slog.Logger
}

// run calls step again and again until ctx ends. Before it returns, it waits for the last blocking
// read of its waker.
func (l loop) run(ctx context.Context, step Step) {
	defer l.waker.reads.Wait()
	loops := redisx.Loops{Log: l.log}
	retry := redisx.Backoff{Min: 50 * time.Millisecond, Max: 5 * time.Second}
	loops.Run(ctx, l.name, retry, step, func(ctx context.Context, idle time.Duration) error {
		if idle < 0 {
			idle = redisx.MaxBlock
		}
		l.waker.wait(ctx, min(idle, redisx.MaxBlock))
		return nil
	})
}

// waker waits in Redis (BLPOP) for a wake token, for at most a given time. Redis may end a blocking
// read up to 100 ms late, so waker measures the time itself; a read that is still blocked serves
// the next wait too. It begins a read only during a wait, because a token is for an idle process.
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

// wait blocks until there is a wake token, the time d is over, or ctx ends.
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

// readToken does one blocking read, and signals on token or on readEnded whether it returned a
// token. After an error of Redis it signals nothing, so that wait ends by its timer and does not
// read again at once.
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
