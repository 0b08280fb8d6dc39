package worker

import (
	"context"
	"errors"
	"testing"
	"time"

	"github.com/stretchr/testify/require"
)

// TestJobContextBehavesLikeAContext: a job's context behaves like a standard context that began
// with the job, no matter when it is first used.
func TestJobContextBehavesLikeAContext(t *testing.T) {
	t.Parallel()
	type key struct{}
	parent := context.WithValue(context.Background(), key{}, "v")
	begin := func(limit time.Duration) *jobContext {
		c := &jobContext{}
		c.begin(parent, monotonicNow(), limit)
		return c
	}

	c := begin(time.Hour)
	require.NoError(t, c.endCause(monotonicNow()))
	require.Nil(t, c.ctx, "created only when it is used")
	deadline, ok := c.Deadline()
	require.True(t, ok)
	require.WithinDuration(t, time.Now().Add(time.Hour), deadline, time.Minute)
	require.NoError(t, c.Err())
	require.Equal(t, "v", c.Value(key{}))
	child, cancel := context.WithCancel(c)
	defer cancel()
	c.stop(errLeaseLost)
	<-child.Done()
	require.Equal(t, errLeaseLost, context.Cause(child))
	require.Equal(t, errLeaseLost, context.Cause(c))
	require.Equal(t, errLeaseLost, c.endCause(monotonicNow()))
	c.stop(errShutdown)
	require.Equal(t, errLeaseLost, c.stopCause(), "the first cause counts")
	c.finish()

	c = begin(time.Hour)
	c.stop(errCancelled) // stop comes before the first use
	<-c.Done()
	require.Equal(t, errCancelled, context.Cause(c))
	c.finish()

	c = &jobContext{}
	c.stop(errLeaseLost) // stop comes before begin
	c.begin(parent, monotonicNow(), time.Hour)
	require.Equal(t, errLeaseLost, c.endCause(monotonicNow()))
	require.ErrorIs(t, c.Err(), context.Canceled)
	c.finish()

	c = begin(0)
	require.Equal(t, context.DeadlineExceeded, c.endCause(monotonicNow()))
	c.stop(errShutdown)
	require.Equal(t, context.DeadlineExceeded, c.endCause(monotonicNow()), "the timeout came first")
	<-c.Done()
	require.Equal(t, context.DeadlineExceeded, c.Err())
	c.finish()

	c = begin(time.Millisecond)
	<-c.Done()
	require.Equal(t, context.DeadlineExceeded, context.Cause(c))
	c.finish()

	ctx, giveUp := context.WithCancelCause(context.Background())
	c = &jobContext{}
	c.begin(ctx, monotonicNow(), time.Hour)
	giveUp(errors.New("the parent's cause"))
	require.EqualError(t, context.Cause(c), "the parent's cause")
	c.finish()

	c = begin(time.Hour)
	c.finish()
	require.ErrorIs(t, c.Err(), context.Canceled, "a processor that keeps it finds it ended")
	c.stop(errLeaseLost)
	require.Equal(t, context.Canceled, context.Cause(c))
}

func divide(a, b int) int { return a / b }

func TestPanickedAt(t *testing.T) {
	t.Parallel()
	at := func(f func()) (place string) {
		defer func() {
			if recover() != nil {
				place = panickedAt()
			}
		}()
		f()
		return
	}
	require.Contains(t, at(func() { panic("x") }), "TestPanickedAt.func")
	require.Regexp(t, `worker\.divide \(.*run_test\.go:83\)`, at(func() { require.Zero(t, divide(1, 0)) }))
}
