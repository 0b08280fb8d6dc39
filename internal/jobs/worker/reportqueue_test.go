package worker

import (
	"math"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/bulkaction/bulkaction/processor"
)

func TestReportQueue(t *testing.T) {
	q := newReportQueue()
	q.add(&task{currentAttempt: 1})
	q.add(&task{currentAttempt: 2, result: make([]byte, 10)})
	q.add(&task{currentAttempt: 3, result: make([]byte, 100)})
	q.add(&task{currentAttempt: 4, verdict: processor.Verdict{Message: "0123456789"}})
	q.close()
	var got [][]int
	for q.wait() {
		var batch []int
		for _, t := range q.take(3, 50) {
			batch = append(batch, t.currentAttempt)
		}
		got = append(got, batch)
	}
	require.Equal(t, [][]int{{1, 2, 3}, {4}}, got) // the third task exceeds the bytes, and is the last one by number as well
	require.Empty(t, q.tasks)

	q = newReportQueue()
	for range 3 {
		q.add(&task{result: make([]byte, 100)})
	}
	require.Len(t, q.take(3, 50), 1)
	require.Len(t, q.take(3, 150), 2)
}

func TestJittered(t *testing.T) {
	for _, d := range []time.Duration{time.Millisecond, time.Second, 24 * time.Hour} {
		for range 100 {
			got := jittered(d)
			require.LessOrEqual(t, got, d)
			require.GreaterOrEqual(t, got, d*9/10-1)
		}
	}
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

func TestRunTimes(t *testing.T) {
	r, now := newRates(), time.Now()
	milliseconds := func(now time.Time) map[string]float64 {
		_, runMS := r.report(now)
		return runMS
	}
	require.Empty(t, milliseconds(now))
	r.ran("A", 2, 40*time.Millisecond)
	r.ran("B", 1, time.Second)
	r.ran("C", 0, 0)
	require.Equal(t, map[string]float64{"A": 20, "B": 1000}, milliseconds(now.Add(500*time.Millisecond)))
	require.Equal(t, map[string]float64{"A": 20, "B": 1000}, milliseconds(now.Add(time.Second)), "a type without new jobs keeps its mean")
	r.ran("A", 1, 120*time.Millisecond)
	got := milliseconds(now.Add(time.Second + runAge))
	require.InDelta(t, 20+100*(1-1/math.E), got["A"], 0.01)
	require.InDelta(t, 1000, got["B"], 0)
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
