package redisx

import (
	"context"
	"errors"
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

func TestRetryWhile(t *testing.T) {
	passing, final := errors.New("passing"), errors.New("final")
	retry := func(ctx context.Context, patience time.Duration, results ...error) (calls int, err error) {
		err = RetryWhile(ctx, patience, func(err error) bool { return errors.Is(err, passing) }, func(context.Context) error {
			calls++
			return results[min(calls, len(results))-1]
		})
		return calls, err
	}
	for _, tt := range []struct {
		patience time.Duration
		results  []error
		calls    int
		err      error
	}{
		{time.Hour, []error{passing, passing, nil}, 3, nil},
		{time.Hour, []error{passing, final}, 2, final},
		{0, []error{passing}, 1, passing},
	} {
		calls, err := retry(t.Context(), tt.patience, tt.results...)
		require.Equal(t, tt.err, err)
		require.Equal(t, tt.calls, calls)
	}
	ended, cancel := context.WithCancel(t.Context())
	cancel()
	calls, err := retry(ended, time.Hour, passing)
	require.Equal(t, passing, err)
	require.Equal(t, 1, calls)
}
