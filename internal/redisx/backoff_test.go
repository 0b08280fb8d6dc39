package redisx

import (
	"context"
	"testing"
	"time"

	"github.com/stretchr/testify/require"
)

func TestBackoff(t *testing.T) {
	b := Backoff{Min: 10 * time.Millisecond, Max: 100 * time.Millisecond}
	for range 2 {
		for i, ceiling := range []time.Duration{20, 40, 80, 100, 100} {
			got := b.Next()
			require.GreaterOrEqual(t, got, max(b.Min, ceiling*time.Millisecond/2), "wait %d", i)
			require.LessOrEqual(t, got, ceiling*time.Millisecond, "wait %d", i)
		}
		b.Reset()
	}
	tight := Backoff{Min: time.Second, Max: time.Second}
	require.Equal(t, time.Second, tight.Next())
}

func TestSleepEndsWithContext(t *testing.T) {
	ctx, cancel := context.WithCancel(context.Background())
	require.NoError(t, Sleep(ctx, 0))
	cancel()
	require.ErrorIs(t, Sleep(ctx, time.Hour), context.Canceled)
	require.ErrorIs(t, Sleep(ctx, 0), context.Canceled)
}
