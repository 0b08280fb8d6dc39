package redisx

import (
	"container/list"
	"context"
	"fmt"
	"sync"
	"time"

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

// Cache keeps values that this process has read: at most Max, each for TTL. A new value replaces the
// oldest one if the cache is full. It is safe for concurrent use; the fields may be changed only
// before.
type Cache[K comparable, V any] struct {
	TTL time.Duration
	Max int
	Now func() time.Time // the clock

	mu    sync.Mutex
	byKey map[K]*list.Element
	order list.List // of *cached[K, V], the oldest first
}

type cached[K comparable, V any] struct {
	key   K
	value V
	at    time.Time
}

// NewCache returns an empty cache that uses the time of this machine.
func NewCache[K comparable, V any](ttl time.Duration, most int) *Cache[K, V] {
	return &Cache[K, V]{TTL: ttl, Max: most, Now: time.Now, byKey: map[K]*list.Element{}}
}

// Get returns the value of a key, and when it was put. ok is false if there is none that is younger
// than TTL.
func (c *Cache[K, V]) Get(key K) (value V, at time.Time, ok bool) {
	c.mu.Lock()
	defer c.mu.Unlock()
	found := c.byKey[key]
	if found == nil {
		return value, at, false
	}
	e := found.Value.(*cached[K, V])
	if c.Now().Sub(e.at) >= c.TTL {
		return value, at, false
	}
	return e.value, e.at, true
}

// GetOr returns the value of a key or, if there is none, the one that read returns, which it puts
// unless read returns an error. Concurrent calls for one key may read several times.
func (c *Cache[K, V]) GetOr(key K, read func() (V, error)) (V, error) {
	if value, _, ok := c.Get(key); ok {
		return value, nil
	}
	value, err := read()
	if err == nil {
		c.Put(key, value)
	}
	return value, err
}

// Put keeps the value of a key, in place of an earlier one.
func (c *Cache[K, V]) Put(key K, value V) {
	c.mu.Lock()
	defer c.mu.Unlock()
	now := c.Now()
	c.remove(c.byKey[key])
	for first := c.order.Front(); first != nil; first = c.order.Front() {
		if len(c.byKey) < c.Max && now.Sub(first.Value.(*cached[K, V]).at) < c.TTL {
			break
		}
		c.remove(first)
	}
	c.byKey[key] = c.order.PushBack(&cached[K, V]{key, value, now})
}

// Delete removes the value of a key.
func (c *Cache[K, V]) Delete(key K) {
	c.mu.Lock()
	defer c.mu.Unlock()
	c.remove(c.byKey[key])
}

// remove removes an element, unless it is nil. The caller holds mu.
func (c *Cache[K, V]) remove(e *list.Element) {
	if e != nil {
		delete(c.byKey, c.order.Remove(e).(*cached[K, V]).key)
	}
}

// All returns all values, also those that are too old.
func (c *Cache[K, V]) All() map[K]V {
	c.mu.Lock()
	defer c.mu.Unlock()
	all := map[K]V{}
	for key, e := range c.byKey {
		all[key] = e.Value.(*cached[K, V]).value
	}
	return all
}
