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

func TestSlotPoolGivesTasks(t *testing.T) {
	t.Parallel()
	s := newSlotPool(0)
	open, shut := &slot{}, &slot{closed: true}
	first, second := &task{}, &task{}
	require.True(t, s.add([]*task{first, second}))
	require.Nil(t, s.next(shut), "a closed slot takes no more")
	require.Same(t, first, s.next(open))
	_, active := s.sizeAndActive()
	require.Equal(t, 1, active)
	require.Equal(t, []*task{second}, s.block())
	s.unblock()

	// Two slots wait and one of them is closed: the other one gets the next task, no matter which
	// one was woken.
	got := make(chan *task, 2)
	leaving := &slot{}
	go func() { got <- s.next(open) }()
	go func() { got <- s.next(leaving) }()
	s.mu.Lock()
	leaving.closed = true
	s.mu.Unlock()
	s.unblock() // wakes all
	require.Nil(t, <-got)
	require.True(t, s.add([]*task{first}))
	require.Same(t, first, <-got)
}

// TestBlockedSlotsBeginNoTask: while the pool is blocked, a slot does not get the task that waits.
// It gets it after unblock.
func TestBlockedSlotsBeginNoTask(t *testing.T) {
	t.Parallel()
	s := newSlotPool(0)
	s.block()
	s.waiting = []*task{{}}
	got := make(chan *task, 1)
	go func() { got <- s.next(&slot{}) }()
	select {
	case <-got:
		require.Fail(t, "the pool is blocked")
	case <-time.After(20 * time.Millisecond):
	}
	s.unblock()
	require.NotNil(t, <-got)
}

// TestHeldTasksNotifyAtResumeAt: a notification follows when at most resumeAt tasks are unfinished,
// whichever comes first: the call of setResumeAt or the end of the tasks.
func TestHeldTasksNotifyAtResumeAt(t *testing.T) {
	t.Parallel()
	h := newHeldTasks()
	freed := h.nextChange()
	h.reserve(3)
	h.setResumeAt(1)
	h.markFinished(1)
	select {
	case <-freed:
		require.Fail(t, "two tasks are unfinished")
	default:
	}
	h.markFinished(1)
	<-freed
	freed = h.nextChange()
	h.setResumeAt(1) // only one task is unfinished already
	<-freed
	freed = h.nextChange()
	h.setResumeAt(-1)
	h.markFinished(1)
	select {
	case <-freed:
		require.Fail(t, "no notification was asked for")
	default:
	}
	all := []*task{{}, {}, {}}
	h.track(all...)
	h.untrack(all[1])
	require.ElementsMatch(t, []*task{all[0], all[2]}, h.tasks())
	h.remove(all)
	<-freed
	require.Empty(t, h.tasks())
	require.Zero(t, h.count.Load())
}

func TestAppendMillis(t *testing.T) {
	t.Parallel()
	for d, want := range map[time.Duration]string{
		0: "0", 999 * time.Nanosecond: "0", time.Microsecond: "0.001", 1500 * time.Microsecond: "1.5", 20*time.Millisecond + 40*time.Microsecond: "20.04",
		time.Hour: "3600000", 999999 * time.Microsecond: "999.999", 100 * time.Microsecond: "0.1", 101 * time.Microsecond: "0.101",
	} {
		require.Equal(t, want, string(appendMillis(nil, d)))
	}
}
