package worker

import (
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

func TestAppendMillis(t *testing.T) {
	t.Parallel()
	for d, want := range map[time.Duration]string{
		0: "0", 999 * time.Nanosecond: "0", time.Microsecond: "0.001", 1500 * time.Microsecond: "1.5", 20*time.Millisecond + 40*time.Microsecond: "20.04",
		time.Hour: "3600000", 999999 * time.Microsecond: "999.999", 100 * time.Microsecond: "0.1", 101 * time.Microsecond: "0.101",
	} {
		require.Equal(t, want, string(appendMillis(nil, d)))
	}
}
