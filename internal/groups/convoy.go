package groups

import (
	"context"
	"sync"

	"github.com/bulkaction/bulkaction/internal/redisx/keyspace"
)

// convoy lets those who come while one trip is under way share the next: who comes alone goes at
// once, and the more come, the fewer trips there are for each.
type convoy[T any] struct {
	turn chan struct{} // held by who carries a trip out

	mu   sync.Mutex
	next *trip[T]
}

type trip[T any] struct {
	all  []T
	done chan struct{}
}

// newConvoys returns one a partition.
func newConvoys[T any](space keyspace.Space) []*convoy[T] {
	all := make([]*convoy[T], space.Partitions())
	for i := range all {
		all[i] = &convoy[T]{turn: make(chan struct{}, 1)}
	}
	return all
}

// join returns when carry has been called with a list that one is in. Who opens a trip carries it
// out, for the others too, so that its ctx has no end there. After an error, which is ctx's, what
// became of one must not be looked at.
func (c *convoy[T]) join(ctx context.Context, one T, carry func(context.Context, []T)) error {
	c.mu.Lock()
	if c.next == nil {
		c.next = &trip[T]{done: make(chan struct{})}
	}
	mine := c.next
	first := len(mine.all) == 0
	mine.all = append(mine.all, one)
	c.mu.Unlock()
	if first {
		c.lead(context.WithoutCancel(ctx), mine, carry)
	}
	select {
	case <-mine.done:
		return nil
	case <-ctx.Done():
		return ctx.Err()
	}
}

func (c *convoy[T]) lead(ctx context.Context, mine *trip[T], carry func(context.Context, []T)) {
	c.turn <- struct{}{}
	defer func() {
		<-c.turn
		close(mine.done)
	}()
	c.mu.Lock()
	c.next = nil
	c.mu.Unlock()
	carry(ctx, mine.all)
}
