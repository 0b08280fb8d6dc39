package redisx

import (
	"context"
	"fmt"
	"sync"

	"github.com/bulkaction/bulkaction/api"
)

// Batcher implements group commit. The first caller's batch runs at once. Calls that arrive while
// it runs share the next batch, so that the number of batches does not grow with the number of
// concurrent calls. It is written by hand because singleflight would give all callers the result of
// one call, and collecting for a fixed time would delay a lone caller. BenchmarkAppendTogether of
// package groups measures it.
type Batcher[T any] struct {
	most    int
	running chan struct{} // holds a token while a batch runs

	mu        sync.Mutex
	nextBatch *batch[T] // takes the items of further calls; nil: the next call begins one
}

// batch is the items of the calls that run together.
type batch[T any] struct {
	items    []T
	done     chan struct{} // closed after run has returned or panicked
	panicked bool          // set before done is closed
}

// ErrBatchPanicked is the error of the calls that shared a batch with a call that panicked. It is
// not known whether their items were handled, so the calls must be repeated.
var ErrBatchPanicked = fmt.Errorf("a request that was handled together with this one panicked: %w", api.ErrUnavailable)

// NewBatcher returns a Batcher whose batches have `most` items at most, each call's items being
// together in one batch; 0: any number.
func NewBatcher[T any](most int) *Batcher[T] {
	return &Batcher[T]{most: most, running: make(chan struct{}, 1)}
}

// Do adds items, one or more, to a batch, and returns when run has returned for that batch. The
// first caller of a batch runs it on behalf of all, so run's context ignores that caller's
// cancellation, and that caller waits for run even if ctx ends. Do returns an error when ctx ends;
// the caller must then not use the items any more, because the batch may still run. If run panics,
// the panic reaches the caller that runs the batch, and the other callers get ErrBatchPanicked.
func (q *Batcher[T]) Do(ctx context.Context, run func(context.Context, []T), items ...T) error {
	q.mu.Lock()
	b := q.nextBatch
	first := b == nil || q.most > 0 && len(b.items)+len(items) > q.most
	if first {
		b = &batch[T]{done: make(chan struct{})}
		q.nextBatch = b
	}
	b.items = append(b.items, items...)
	q.mu.Unlock()
	if first {
		q.runBatch(context.WithoutCancel(ctx), b, run)
	}
	select {
	case <-b.done:
		if b.panicked {
			return ErrBatchPanicked
		}
		return nil
	case <-ctx.Done():
		return ctx.Err()
	}
}

// runBatch waits until no other batch runs, closes b for further items, and runs it.
func (q *Batcher[T]) runBatch(ctx context.Context, b *batch[T], run func(context.Context, []T)) {
	q.running <- struct{}{}
	b.panicked = true
	defer func() {
		<-q.running
		close(b.done)
	}()
	q.mu.Lock()
	if q.nextBatch == b {
		q.nextBatch = nil
	}
	q.mu.Unlock()
	run(ctx, b.items)
	b.panicked = false
}
