package broker

import (
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/bulkaction/bulkaction/internal/stage"
	"github.com/bulkaction/bulkaction/internal/telemetry"
)

// TestFrameThrottle: a broker that can't keep up shows positions behind nearPosition in fewer
// rounds, and in each round again when it can.
func TestFrameThrottle(t *testing.T) {
	t.Parallel()
	var throttle frameThrottle
	now := time.Now()
	shown := func(rounds int, interval time.Duration) (far int) {
		for range rounds {
			now = now.Add(interval)
			if throttle.next(now, time.Second) == furthest {
				far++
			}
		}
		return far
	}
	require.Equal(t, 10, shown(10, time.Second))
	shown(3, 2*time.Second)
	require.Equal(t, 3, throttle.level)
	require.LessOrEqual(t, shown(10, 2*time.Second), 1)
	shown(40, time.Second)
	require.Zero(t, throttle.level)
	require.Equal(t, 10, shown(10, time.Second))
}

// TestPollAfter: a user at the head of the queue polls every two seconds, one far behind every 20
// s.
func TestPollAfter(t *testing.T) {
	t.Parallel()
	for position, want := range map[int64]time.Duration{
		0: 2 * time.Second, 1: 2010 * time.Millisecond, 100: 3 * time.Second,
		1799: 19990 * time.Millisecond, 1800: 20 * time.Second, 1 << 62: 20 * time.Second,
	} {
		require.Equal(t, want, pollAfter(position), position)
	}
}

// TestCheckClock: a clock that is more than 2 s off Redis's is reported.
func TestCheckClock(t *testing.T) {
	t.Parallel()
	now := time.Now()
	for difference, reported := range map[time.Duration]bool{
		0: false, 1900 * time.Millisecond: false, -1900 * time.Millisecond: false,
		2200 * time.Millisecond: true, -2200 * time.Millisecond: true,
	} {
		b := &Broker{Process: stage.Process{Tel: telemetry.Nop()}}
		b.metrics = telemetry.NewRoomMetrics(b.Tel.Meter)
		c := &cleanup{broker: b}
		c.checkClock(now.Add(difference), now, now.Add(100*time.Millisecond))
		require.Equal(t, reported, !c.clockWarned.IsZero(), difference)
	}
}
