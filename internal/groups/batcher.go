package groups

import (
	"context"
	"sync"

	"github.com/bulkaction/bulkaction/internal/redisx/keyspace"
)

// batcher implements group commit. The first caller's batch runs at once. Calls that arrive while
// it runs share the next batch, so that the number of batches does not grow with the number of
// concurrent calls.
type batcher[T any] struct {
	running chan struct{} // holds a token while a batch runs

	mu        sync.Mutex
	nextBatch *batch[T]
}

// batch is the items of the calls that run together. done is closed after run has returned.
type batch[T any] struct {
	items []T
	done  chan struct{}
}

// newBatchers returns a batcher for each partition.
func newBatchers[T any](space keyspace.Space) []*batcher[T] {
	all := make([]*batcher[T], space.Partitions())
	for i := range all {
		all[i] = &batcher[T]{running: make(chan struct{}, 1)}
	}
	return all
}

// do adds items to a batch and returns after run has been called with that batch. The caller that
// starts a batch runs it on behalf of all its callers, so run's context ignores that caller's
// cancellation. do returns an error only when ctx ends. The caller must then not use the items any
// more, because the batch may still run.
func (q *batcher[T]) do(ctx context.Context, run func(context.Context, []T), items ...T) error {
	q.mu.Lock()
	if q.nextBatch == nil {
		q.nextBatch = &batch[T]{done: make(chan struct{})}
	}
	b := q.nextBatch
	first := len(b.items) == 0
	b.items = append(b.items, items...)
	q.mu.Unlock()
	if first {
		q.runBatch(context.WithoutCancel(ctx), b, run)
	}
	select {
	case <-b.done:
		return nil
	case <-ctx.Done():
		return ctx.Err()
	}
}

// runBatch waits until no other batch runs, closes b for further items, and runs it.
func (q *batcher[T]) runBatch(ctx context.Context, b *batch[T], run func(context.Context, []T)) {
	q.running <- struct{}{}
	defer func() {
		<-q.running
		close(b.done)
	}()
	q.mu.Lock()
	q.nextBatch = nil
	q.mu.Unlock()
	run(ctx, b.items)
}
