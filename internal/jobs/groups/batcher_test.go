package groups

import (
	"context"
	"errors"
	"sync"
	"testing"

	"github.com/stretchr/testify/require"

	"github.com/bulkaction/bulkaction/api"
	"github.com/bulkaction/bulkaction/internal/jobs/ledger"
	"github.com/bulkaction/bulkaction/internal/messages"
	"github.com/bulkaction/bulkaction/internal/redisx/keyspace"
)

func newTestBatcher(t testing.TB) *batcher[int] {
	t.Helper()
	space, err := keyspace.New("bulk-action:", 1)
	require.NoError(t, err)
	return newBatchers[int](space)[0]
}

// awaitQueued waits until n items are in the next batch, which has not begun.
func awaitQueued(t *testing.T, q *batcher[int], n int) {
	t.Helper()
	require.Eventually(t, func() bool {
		q.mu.Lock()
		defer q.mu.Unlock()
		return q.nextBatch != nil && len(q.nextBatch.items) == n
	}, retryTime, retryTime/1000)
}

func TestCallsShareABatch(t *testing.T) {
	t.Parallel()
	q := newTestBatcher(t)
	batches, release := make(chan []int), make(chan struct{})
	run := func(_ context.Context, items []int) {
		batches <- items
		<-release
	}
	var calls sync.WaitGroup
	do := func(i int) { calls.Go(func() { require.NoError(t, q.do(t.Context(), run, i)) }) }
	do(0)
	require.Equal(t, []int{0}, <-batches) // the first item runs at once, alone
	for i := 1; i < 5; i++ {
		do(i)
		awaitQueued(t, q, i)
	}
	cancelled, cancel := context.WithCancel(t.Context())
	failed := make(chan error)
	go func() { failed <- q.do(cancelled, run, 5) }()
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
	q := newTestBatcher(t)
	started, release := make(chan struct{}), make(chan struct{})
	var calls sync.WaitGroup
	calls.Go(func() {
		require.NoError(t, q.do(t.Context(), func(context.Context, []int) { close(started); <-release }, 0))
	})
	<-started
	panics := func(context.Context, []int) { panic("broken item") }
	calls.Go(func() { require.Panics(t, func() { _ = q.do(t.Context(), panics, 1) }) })
	awaitQueued(t, q, 1)
	calls.Go(func() { require.ErrorIs(t, q.do(t.Context(), panics, 2), api.ErrUnavailable) })
	awaitQueued(t, q, 2)
	close(release)
	calls.Wait()
	require.NoError(t, q.do(t.Context(), func(context.Context, []int) {}, 3))
}

// TestBatchSurvivesTheCancellationOfItsFirstCaller: the context of a batch does not end with that
// of the caller that starts it. So the batch runs, and after it the next one.
func TestBatchSurvivesTheCancellationOfItsFirstCaller(t *testing.T) {
	t.Parallel()
	q := newTestBatcher(t)
	ctx, cancel := context.WithCancel(t.Context())
	cancel()
	ran := false
	err := q.do(ctx, func(ctx context.Context, _ []int) { ran = ctx.Err() == nil }, 1)
	require.True(t, ran)
	require.True(t, err == nil || errors.Is(err, context.Canceled))
	require.NoError(t, q.do(t.Context(), func(context.Context, []int) {}, 2))
}

func TestSplitCalls(t *testing.T) {
	t.Parallel()
	of := func(group string, jobs int) *pendingAppend {
		return &pendingAppend{group: group, jobs: make([]messages.Job, jobs)}
	}
	big := func(group string) *pendingAppend {
		a := of(group, 1)
		a.jobs[0].Payload = make([]byte, ledger.MaxAppendBytes*2/3)
		return a
	}
	a1, b1, a2, b2, a3, b3, b4 := of("a", 1), of("b", ledger.MaxAppend), of("a", ledger.MaxAppend-1), of("b", 1), of("a", 1), big("b"), big("b")
	got := splitCalls([]*pendingAppend{a1, b1, a2, b2, a3, b3, b4})
	require.Equal(t, [][]*pendingAppend{{a1, a2}, {b1}, {b2, b3}, {a3}, {b4}}, got)
}
