package worker

import (
	"testing"
	"time"

	"github.com/stretchr/testify/require"
)

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

// TestBlockedPoolAcceptsNoTasks: a pool that is blocked or closed gives back its waiting tasks, and
// accepts no others.
func TestBlockedPoolAcceptsNoTasks(t *testing.T) {
	s := newSlotPool(1)
	first, second := []*task{{}}, []*task{{}}
	require.True(t, s.add(first))
	require.Equal(t, first, s.block())
	require.False(t, s.add(second))
	s.unblock()
	require.True(t, s.add(second))
	require.Equal(t, second, s.close())
	require.False(t, s.add(first))
}

func TestOverdue(t *testing.T) {
	now := time.Now()
	tasks := func(since ...time.Duration) []*task { // oldest first
		var all []*task
		for i, d := range since {
			all = append(all, &task{currentAttempt: i, startedAt: now.Add(-d)})
		}
		return all
	}
	attempts := func(tasks []*task) (attempts []int) {
		for _, t := range tasks {
			attempts = append(attempts, t.currentAttempt)
		}
		return attempts
	}
	const long, short = maxSlotWait, maxSlotWait - time.Millisecond
	for name, tt := range map[string]struct {
		waiting []*task
		size    int
		each    time.Duration
		want    []int // places of the overdue tasks
		stay    []int
	}{
		"no task waits":                           {nil, 4, time.Hour, nil, nil},
		"slow jobs: all that wait for long":       {tasks(long, long, short), 4, time.Hour, []int{0, 1}, []int{2}},
		"tasks that get a slot soon stay":         {tasks(long, long, long), 2, maxSlotWait, []int{2}, []int{0, 1}},
		"all tasks get a slot soon":               {tasks(long, long, long), 3, maxSlotWait, nil, []int{0, 1, 2}},
		"quick jobs":                              {tasks(long, long, long), 1, 0, nil, []int{0, 1, 2}},
		"no task has waited for long":             {tasks(short, short), 1, time.Hour, nil, []int{0, 1}},
		"the order of starts counts, not the age": {tasks(short, long), 1, maxSlotWait, []int{1}, []int{0}},
		"one of the later tasks stays":            {tasks(long, short, long), 1, maxSlotWait, []int{2}, []int{0, 1}},
	} {
		t.Run(name, func(t *testing.T) {
			s := newSlotPool(tt.size)
			require.True(t, s.add(tt.waiting))
			require.Empty(t, s.takeOverdue(tt.each, now), "slots are free")
			s.active = tt.size
			require.Equal(t, tt.want, attempts(s.takeOverdue(tt.each, now)))
			require.Equal(t, tt.stay, attempts(s.waiting))
		})
	}
}
