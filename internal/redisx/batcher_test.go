package redisx

import (
	"context"
	"errors"
	"sync"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/bulkaction/bulkaction/api"
)

// awaitQueued waits until n items are in the next batch, which has not begun.
func awaitQueued(t *testing.T, q *Batcher[int], n int) {
	t.Helper()
	require.Eventually(t, func() bool {
		q.mu.Lock()
		defer q.mu.Unlock()
		return q.nextBatch != nil && len(q.nextBatch.items) == n
	}, 10*time.Second, time.Millisecond)
}

func TestCallsShareABatch(t *testing.T) {
	t.Parallel()
	q := NewBatcher[int](0)
	batches, release := make(chan []int), make(chan struct{})
	run := func(_ context.Context, items []int) {
		batches <- items
		<-release
	}
	var calls sync.WaitGroup
	do := func(i int) { calls.Go(func() { require.NoError(t, q.Do(t.Context(), run, i)) }) }
	do(0)
	require.Equal(t, []int{0}, <-batches) // the first item runs at once, alone
	for i := 1; i < 5; i++ {
		do(i)
		awaitQueued(t, q, i)
	}
	cancelled, cancel := context.WithCancel(t.Context())
	failed := make(chan error)
	go func() { failed <- q.Do(cancelled, run, 5) }()
	awaitQueued(t, q, 5)
	cancel()
	require.ErrorIs(t, <-failed, context.Canceled) // a cancelled call returns at once; the others still wait
	release <- struct{}{}
	require.Equal(t, []int{1, 2, 3, 4, 5}, <-batches)
	release <- struct{}{}
	calls.Wait()
}

// TestPanicOfABatchIsAnErrorForAllItsCallers: when a batch panics, the caller that runs it gets the
// panic and the other one the error ErrUnavailable. The next batch runs.
func TestPanicOfABatchIsAnErrorForAllItsCallers(t *testing.T) {
	t.Parallel()
	q := NewBatcher[int](0)
	started, release := make(chan struct{}), make(chan struct{})
	var calls sync.WaitGroup
	calls.Go(func() {
		require.NoError(t, q.Do(t.Context(), func(context.Context, []int) { close(started); <-release }, 0))
	})
	<-started
	panics := func(context.Context, []int) { panic("broken item") }
	calls.Go(func() { require.Panics(t, func() { _ = q.Do(t.Context(), panics, 1) }) })
	awaitQueued(t, q, 1)
	calls.Go(func() { require.ErrorIs(t, q.Do(t.Context(), panics, 2), api.ErrUnavailable) })
	awaitQueued(t, q, 2)
	close(release)
	calls.Wait()
	require.NoError(t, q.Do(t.Context(), func(context.Context, []int) {}, 3))
}

// TestBatchSurvivesTheCancellationOfItsFirstCaller: the context of a batch does not end with that
// of the caller that starts it. So the batch runs, and after it the next one.
func TestBatchSurvivesTheCancellationOfItsFirstCaller(t *testing.T) {
	t.Parallel()
	q := NewBatcher[int](0)
	ctx, cancel := context.WithCancel(t.Context())
	cancel()
	ran := false
	err := q.Do(ctx, func(ctx context.Context, _ []int) { ran = ctx.Err() == nil }, 1)
	require.True(t, ran)
	require.True(t, err == nil || errors.Is(err, context.Canceled))
	require.NoError(t, q.Do(t.Context(), func(context.Context, []int) {}, 2))
}

// TestBatchesAreBounded: while a batch runs, calls fill batches of at most the bound; the items of one
// call stay together.
func TestBatchesAreBounded(t *testing.T) {
	t.Parallel()
	q := NewBatcher[int](3)
	batches, release := make(chan []int), make(chan struct{})
	run := func(_ context.Context, items []int) {
		batches <- items
		<-release
	}
	var calls sync.WaitGroup
	do := func(items ...int) { calls.Go(func() { require.NoError(t, q.Do(t.Context(), run, items...)) }) }
	do(0)
	require.Equal(t, []int{0}, <-batches)
	for _, c := range []struct {
		items []int
		next  int // items of the batch that further calls join
	}{{[]int{1}, 1}, {[]int{2}, 2}, {[]int{3, 4, 5}, 3}, {[]int{6}, 1}} {
		do(c.items...)
		awaitQueued(t, q, c.next)
	}
	var ran [][]int
	for range 3 {
		release <- struct{}{}
		ran = append(ran, <-batches)
	}
	require.ElementsMatch(t, [][]int{{1, 2}, {3, 4, 5}, {6}}, ran)
	release <- struct{}{}
	calls.Wait()
}
