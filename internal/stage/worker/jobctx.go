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
	parent context.Context //nolint:containedctx // it is a context itself
	began  int64           // by clock
	limit  time.Duration

	mu      sync.Mutex
	cause   error // why it was stopped, also before it began
	over    bool
	real    context.Context //nolint:containedctx // itself, once it was asked for
	cancel  context.CancelCauseFunc
	release context.CancelFunc
}

// begin is called once, before anybody has it as a context.
func (c *jobContext) begin(parent context.Context, began int64, limit time.Duration) {
	c.mu.Lock()
	defer c.mu.Unlock()
	c.parent, c.began, c.limit = parent, began, limit
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
	case c.real != nil:
		c.cancel(cause)
	case first && c.parent != nil && !c.over:
		c.make() // now, since its deadline may have come before
	}
}

// stopped is why it was stopped.
func (c *jobContext) stopped() error {
	c.mu.Lock()
	defer c.mu.Unlock()
	return c.cause
}

// end lets go of what it has taken: whoever keeps the context finds it cancelled.
func (c *jobContext) end() {
	c.mu.Lock()
	defer c.mu.Unlock()
	c.over = true
	if c.real != nil {
		c.cancel(nil)
		c.release()
	}
}

// ended is why the context has ended, nil if it has not.
func (c *jobContext) ended(now int64) error {
	c.mu.Lock()
	defer c.mu.Unlock()
	switch {
	case c.real != nil:
		return context.Cause(c.real)
	case c.cause != nil:
		return c.cause
	case now-c.began >= int64(c.limit):
		return context.DeadlineExceeded
	}
	return nil
}

func (c *jobContext) get() context.Context {
	c.mu.Lock()
	defer c.mu.Unlock()
	if c.real == nil {
		c.make()
	}
	return c.real
}

// make makes it real; the lock is held.
func (c *jobContext) make() {
	timed, release := context.WithDeadline(c.parent, epoch.Add(time.Duration(c.began)+c.limit))
	c.real, c.cancel = context.WithCancelCause(timed)
	c.release = release
	if c.cause != nil {
		c.cancel(c.cause)
	}
	if c.over {
		c.cancel(nil)
		c.release()
	}
}

// Deadline, Done, Err and Value are those of [context.Context].
func (c *jobContext) Deadline() (time.Time, bool) { return c.get().Deadline() }
func (c *jobContext) Done() <-chan struct{}       { return c.get().Done() }
func (c *jobContext) Err() error                  { return c.get().Err() }
func (c *jobContext) Value(key any) any           { return c.get().Value(key) }

var epoch = time.Now()

// clock is the monotonic time in ns: a clock that steps gives up nothing. It is never 0.
func clock() int64 { return int64(time.Since(epoch)) + 1 }
