package broker

import (
	"testing"
	"time"

	"github.com/stretchr/testify/require"
)

// A process that can't keep up shows far positions less often, and all of them again when it can.
func TestPace(t *testing.T) {
	t.Parallel()
	var p pace
	now := time.Now()
	shown := func(rounds int, interval time.Duration) (far int) {
		for range rounds {
			now = now.Add(interval)
			if p.next(now, time.Second) == furthest {
				far++
			}
		}
		return far
	}
	require.Equal(t, 10, shown(10, time.Second))
	shown(3, 2*time.Second)
	require.Equal(t, 3, p.level)
	require.LessOrEqual(t, shown(10, 2*time.Second), 1)
	shown(40, time.Second)
	require.Zero(t, p.level)
	require.Equal(t, 10, shown(10, time.Second))
}
