package worker

import (
	"context"
	"sync"
	"time"
)

// jobContext is what a job's processor runs under. It becomes a real context, with a timer and a
// place among its parent's children, only when somebody asks it for something: many processors
// never do, and it would cost more than they.
type jobContext struct {
	parent    context.Context //nolint:containedctx // it is a context itself
	startedAt int64           // by clock
	timeout   time.Duration

	mu        sync.Mutex
	cause     error // why it was stopped, also before it began
	finished  bool
	ctx       context.Context //nolint:containedctx // itself, once it was asked for
	cancel    context.CancelCauseFunc
	stopTimer context.CancelFunc
}

// begin is called once, before anybody has it as a context.
func (c *jobContext) begin(parent context.Context, startedAt int64, timeout time.Duration) {
	c.mu.Lock()
	defer c.mu.Unlock()
	c.parent, c.startedAt, c.timeout = parent, startedAt, timeout
}

// stop ends the context, now or when it begins.
func (c *jobContext) stop(cause error) {
	c.mu.Lock()
	defer c.mu.Unlock()
	first := c.cause == nil
	if first {
		c.cause = cause
	}
	switch {
	case c.ctx != nil:
		c.cancel(cause)
	case first && c.parent != nil && !c.finished:
		c.create() // now, since its deadline may have come before
	}
}

// stopped is why it was stopped.
func (c *jobContext) stopCause() error {
	c.mu.Lock()
	defer c.mu.Unlock()
	return c.cause
}

// end lets go of what it has taken: whoever keeps the context finds it cancelled.
func (c *jobContext) finish() {
	c.mu.Lock()
	defer c.mu.Unlock()
	c.finished = true
	if c.ctx != nil {
		c.cancel(nil)
		c.stopTimer()
	}
}

// ended is why the context has ended, nil if it has not.
func (c *jobContext) endCause(now int64) error {
	c.mu.Lock()
	defer c.mu.Unlock()
	switch {
	case c.ctx != nil:
		return context.Cause(c.ctx)
	case c.cause != nil:
		return c.cause
	case now-c.startedAt >= int64(c.timeout):
		return context.DeadlineExceeded
	}
	return nil
}

func (c *jobContext) ensure() context.Context {
	c.mu.Lock()
	defer c.mu.Unlock()
	if c.ctx == nil {
		c.create()
	}
	return c.ctx
}

// make makes it real; the lock is held.
func (c *jobContext) create() {
	timed, release := context.WithDeadline(c.parent, processStart.Add(time.Duration(c.startedAt)+c.timeout))
	c.ctx, c.cancel = context.WithCancelCause(timed)
	c.stopTimer = release
	if c.cause != nil {
		c.cancel(c.cause)
	}
	if c.finished {
		c.cancel(nil)
		c.stopTimer()
	}
}

// Deadline, Done, Err and Value are those of [context.Context].
func (c *jobContext) Deadline() (time.Time, bool) { return c.ensure().Deadline() }
func (c *jobContext) Done() <-chan struct{}       { return c.ensure().Done() }
func (c *jobContext) Err() error                  { return c.ensure().Err() }
func (c *jobContext) Value(key any) any           { return c.ensure().Value(key) }

var processStart = time.Now()

// clock is the monotonic time in ns: a clock that steps gives up nothing. It is never 0.
func monotonicNow() int64 { return int64(time.Since(processStart)) + 1 }
