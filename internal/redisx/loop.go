package redisx

import (
	"context"
	"log/slog"
	"sync"
	"time"

	"github.com/bulkaction/bulkaction/internal/redisx/call"
)

// Loops runs steps that need Redis again and again, in any number of loops. It logs an outage of
// Redis once for all loops: when the first of them fails, and when all of them work again. A hash
// slot that Redis Cluster is moving is logged as a warning, because that is routine. A failure for
// another reason is logged as an error even if a slot is being moved.
type Loops struct {
	Log *slog.Logger

	mu      sync.Mutex
	since   time.Time
	failing map[string]bool // by the name of the loop
	warned  bool            // the present outage was logged, as a warning
	erred   bool            // the present outage was logged, as an error
}

// Run calls step until ctx ends. After a failure it sleeps for retry.Next(). After a success it
// calls wait with the idle time that step returned, or calls step again at once if idle is 0. wait
// may fail only because ctx has ended. name is the loop's name in the log.
func (l *Loops) Run(
	ctx context.Context, name string, retry Backoff,
	step func(context.Context) (idle time.Duration, err error), wait func(context.Context, time.Duration) error,
) {
	for ctx.Err() == nil {
		idle, err := step(ctx)
		switch {
		case err == nil:
			l.worked(name)
			retry.Reset()
			if idle != 0 {
				_ = wait(ctx, idle)
			}
		case ctx.Err() == nil:
			l.failed(name, err)
			_ = Sleep(ctx, retry.Next())
		}
	}
}

func (l *Loops) failed(name string, err error) {
	l.mu.Lock()
	defer l.mu.Unlock()
	if len(l.failing) == 0 {
		l.since, l.failing = time.Now(), map[string]bool{}
		l.warned, l.erred = false, false
	}
	l.failing[name] = true
	switch migrating := call.IsMigrating(err); {
	case migrating && !l.warned && !l.erred:
		l.warned = true
		l.Log.Warn("a hash slot is being moved to another redis node, trying again until it is there",
			"loop", name, "error", err)
	case !migrating && !l.erred:
		l.erred = true
		l.Log.Error("step failed, trying again until it works",
			"loop", name, "redis_unavailable", call.IsUnavailable(err), "error", err)
	}
}

func (l *Loops) worked(name string) {
	l.mu.Lock()
	defer l.mu.Unlock()
	if !l.failing[name] {
		return
	}
	if delete(l.failing, name); len(l.failing) == 0 {
		l.Log.Info("step works again", "loop", name, "after", time.Since(l.since).Round(100*time.Millisecond).String())
	}
}
