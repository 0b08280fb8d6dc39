package groups

import (
	"context"
	"errors"
	"sync"
	"testing"

	"github.com/stretchr/testify/require"

	"github.com/bulkaction/bulkaction/internal/ledger"
	"github.com/bulkaction/bulkaction/internal/messages"
	"github.com/bulkaction/bulkaction/internal/redisx/keyspace"
)

func newConvoy(t testing.TB) *convoy[int] {
	t.Helper()
	space, err := keyspace.New("bulk-action:", 1)
	require.NoError(t, err)
	return newConvoys[int](space)[0]
}

// waiting blocks until n have joined the next trip.
func waiting(t *testing.T, c *convoy[int], n int) {
	t.Helper()
	require.Eventually(t, func() bool {
		c.mu.Lock()
		defer c.mu.Unlock()
		return c.next != nil && len(c.next.all) == n
	}, patience, patience/1000)
}

func TestConvoy(t *testing.T) {
	t.Parallel()
	c := newConvoy(t)
	trips, release := make(chan []int), make(chan struct{})
	carry := func(_ context.Context, all []int) {
		trips <- all
		<-release
	}
	var all sync.WaitGroup
	join := func(i int) { all.Go(func() { require.NoError(t, c.join(t.Context(), i, carry)) }) }
	join(0)
	require.Equal(t, []int{0}, <-trips) // alone, at once
	for i := 1; i < 5; i++ {
		join(i)
		waiting(t, c, i)
	}
	gone, leave := context.WithCancel(t.Context())
	left := make(chan error)
	go func() { left <- c.join(gone, 5, carry) }()
	waiting(t, c, 5)
	leave()
	require.ErrorIs(t, <-left, context.Canceled) // without holding up the others
	release <- struct{}{}
	require.Equal(t, []int{1, 2, 3, 4, 5}, <-trips)
	release <- struct{}{}
	all.Wait()
}

// Who opens a trip may be told to stop; those who joined it still arrive.
func TestConvoyOutlivesWhoLeadsIt(t *testing.T) {
	t.Parallel()
	c := newConvoy(t)
	ctx, cancel := context.WithCancel(t.Context())
	cancel()
	carried := false
	err := c.join(ctx, 1, func(ctx context.Context, _ []int) { carried = ctx.Err() == nil })
	require.True(t, carried)
	require.True(t, err == nil || errors.Is(err, context.Canceled))
	require.NoError(t, c.join(t.Context(), 2, func(context.Context, []int) {}))
}

func TestShare(t *testing.T) {
	t.Parallel()
	of := func(group string, jobs int) *appending {
		return &appending{group: group, jobs: make([]messages.Job, jobs)}
	}
	big := func(group string) *appending {
		a := of(group, 1)
		a.jobs[0].Payload = make([]byte, ledger.MaxAppendBytes*2/3)
		return a
	}
	a1, b1, a2, b2, a3, b3, b4 := of("a", 1), of("b", ledger.MaxAppend), of("a", ledger.MaxAppend-1), of("b", 1), of("a", 1), big("b"), big("b")
	got := share([]*appending{a1, b1, a2, b2, a3, b3, b4})
	require.Equal(t, [][]*appending{{a1, a2}, {b1}, {b2, b3}, {a3}, {b4}}, got)
}
