package worker

import (
	"math"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/bulkaction/bulkaction/processor"
)

func TestQueue(t *testing.T) {
	q := newQueue()
	q.add(&task{attempt: 1})
	q.add(&task{attempt: 2, result: make([]byte, 10)})
	q.add(&task{attempt: 3, result: make([]byte, 100)})
	q.add(&task{attempt: 4, verdict: processor.Verdict{Message: "0123456789"}})
	q.close()
	var got [][]int
	for q.wait() {
		var batch []int
		for _, t := range q.take(3, 50) {
			batch = append(batch, t.attempt)
		}
		got = append(got, batch)
	}
	require.Equal(t, [][]int{{1, 2, 3}, {4}}, got) // the third went over the bytes, and would have made the number anyway
	require.Zero(t, q.len())

	q = newQueue()
	for range 3 {
		q.add(&task{result: make([]byte, 100)})
	}
	require.Len(t, q.take(3, 50), 1)
	require.Len(t, q.take(3, 150), 2)
}

func TestBackoff(t *testing.T) {
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
		{time.Hour, 24 * time.Hour, 29, 24 * time.Hour}, // shifted, it would overflow
		{time.Hour, time.Minute, 3, time.Minute},
		{time.Millisecond, time.Millisecond, 100, time.Millisecond},
	} {
		p := &partition{Worker: &Worker{cfg: Config{Backoff: tt.base, MaxBackoff: tt.most}}}
		for range 100 {
			got := p.backoff(tt.tries)
			require.LessOrEqual(t, got, tt.want, "%+v", tt)
			require.GreaterOrEqual(t, got, tt.want*9/10-1, "%+v", tt)
		}
	}
}
