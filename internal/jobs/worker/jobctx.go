package worker

import (
	"context"
	"sync"
	"time"
)

// jobContext is the context of a job's processor: it ends at the job's timeout, or when the worker
// stops the job. It creates a standard context, with a timer and an entry in its parent, only when
// the processor uses it, because many processors never use it; BenchmarkJobContext compares both.
type jobContext struct {
	parent    context.Context //nolint:containedctx // a context is the parent of a context
	startedAt int64           // time of monotonicNow
	timeout   time.Duration   // time from startedAt until the context ends

	mu        sync.Mutex
	cause     error           // why stop was called, perhaps before begin; or nil
	finished  bool            // finish was called
	ctx       context.Context //nolint:containedctx // the standard context, once it is created
	cancel    context.CancelCauseFunc
	stopTimer context.CancelFunc // releases the timer of ctx
}

// begin sets the parent, the start time (see monotonicNow) and the timeout. The caller calls it
// once, before it passes the context on.
func (c *jobContext) begin(parent context.Context, startedAt int64, timeout time.Duration) {
	c.mu.Lock()
	defer c.mu.Unlock()
	c.parent, c.startedAt, c.timeout = parent, startedAt, timeout
}

// stop ends the context with a cause. Before begin, it makes the context end as soon as it begins.
// Only the first cause counts.
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
		c.create() // created now: a timeout that is already over must stay the cause
	}
}

// stopCause returns the cause of the first stop, or nil.
func (c *jobContext) stopCause() error {
	c.mu.Lock()
	defer c.mu.Unlock()
	return c.cause
}

// finish releases the timer and the entry in the parent. A processor that still uses the context
// finds it cancelled.
func (c *jobContext) finish() {
	c.mu.Lock()
	defer c.mu.Unlock()
	c.finished = true
	if c.ctx != nil {
		c.cancel(nil)
		c.stopTimer()
	}
}

// endCause returns why the context has ended by the time now (see monotonicNow), or nil if it has
// not.
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

// ensure returns the standard context, and creates it at the first call.
func (c *jobContext) ensure() context.Context {
	c.mu.Lock()
	defer c.mu.Unlock()
	if c.ctx == nil {
		c.create()
	}
	return c.ctx
}

// create creates the standard context. It has ended already if stop or finish was called, or the
// timeout is over. The caller holds the lock.
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

// Deadline, Done, Err and Value implement [context.Context].
func (c *jobContext) Deadline() (time.Time, bool) { return c.ensure().Deadline() }
func (c *jobContext) Done() <-chan struct{}       { return c.ensure().Done() }
func (c *jobContext) Err() error                  { return c.ensure().Err() }
func (c *jobContext) Value(key any) any           { return c.ensure().Value(key) }

var processStart = time.Now()

// monotonicNow returns the monotonic time since the process started, in ns; it is never 0. A change
// of the system clock does not affect it, so such a change ends no job.
func monotonicNow() int64 { return int64(time.Since(processStart)) + 1 }
