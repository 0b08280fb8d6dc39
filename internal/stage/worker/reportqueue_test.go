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

func TestRetryDelay(t *testing.T) {
	for _, tt := range []struct {
		base, most time.Duration
		tries      int
		want       time.Duration
	}{
		{time.Second, time.Minute, 0, time.Second},
		{time.Second, time.Minute, 1, 2 * time.Second},
		{time.Second, time.Minute, 5, 32 * time.Second},
		{time.Second, time.Minute, 6, time.Minute},
		{time.Second, time.Minute, math.MaxInt, time.Minute},
		{time.Hour, 24 * time.Hour, 29, 24 * time.Hour}, // a shift by 29 bits would overflow
		{time.Hour, time.Minute, 3, time.Minute},
		{time.Millisecond, time.Millisecond, 100, time.Millisecond},
	} {
		p := &partitionFeed{Worker: &Worker{cfg: Config{Backoff: tt.base, MaxBackoff: tt.most}}}
		for range 100 {
			got := p.retryDelay(tt.tries)
			require.LessOrEqual(t, got, tt.want, "%+v", tt)
			require.GreaterOrEqual(t, got, tt.want*9/10-1, "%+v", tt)
		}
	}
}

func TestOverdue(t *testing.T) {
	now := time.Now()
	tasks := func(since ...time.Duration) []*task {
		var all []*task
		for i, d := range since {
			all = append([]*task{{startOrder: int64(i), startedAt: now.Add(-d)}}, all...) // newest first: overdue must sort them
		}
		return all
	}
	const long, short = maxSlotWait, maxSlotWait - time.Millisecond
	for name, tt := range map[string]struct {
		waiting []*task
		size    int
		each    time.Duration
		want    []int64 // startOrder of the overdue tasks
	}{
		"no task waits":                           {nil, 4, time.Hour, nil},
		"slow jobs: all that wait for long":       {tasks(long, long, short), 4, time.Hour, []int64{0, 1}},
		"tasks that get a slot soon stay":         {tasks(long, long, long), 2, maxSlotWait, []int64{2}},
		"all tasks get a slot soon":               {tasks(long, long, long), 3, maxSlotWait, nil},
		"quick jobs":                              {tasks(long, long, long), 1, 0, nil},
		"no task has waited for long":             {tasks(short, short), 1, time.Hour, nil},
		"the order of starts counts, not the age": {tasks(short, long), 1, maxSlotWait, []int64{1}},
	} {
		t.Run(name, func(t *testing.T) {
			var got []int64
			for _, l := range overdue(tt.waiting, tt.size, tt.each, now) {
				got = append(got, l.startOrder)
			}
			require.Equal(t, tt.want, got)
		})
	}
}

func TestRunTimes(t *testing.T) {
	r, now := newRunTimes(), time.Now()
	require.Empty(t, r.milliseconds(now))
	r.add("A", 2, 40*time.Millisecond)
	r.add("B", 1, time.Second)
	r.add("C", 0, 0)
	require.Equal(t, map[string]float64{"A": 20, "B": 1000}, r.milliseconds(now.Add(500*time.Millisecond)))
	require.Equal(t, map[string]float64{"A": 20, "B": 1000}, r.milliseconds(now.Add(time.Second)), "a type without new jobs keeps its mean")
	r.add("A", 1, 120*time.Millisecond)
	got := r.milliseconds(now.Add(time.Second + runAge))
	require.InDelta(t, 20+100*(1-1/math.E), got["A"], 0.01)
	require.InDelta(t, 1000, got["B"], 0)
}
