package httpapi

import (
	"context"
	"errors"
	"sync"
	"time"

	"golang.org/x/sync/semaphore"

	"github.com/bulkaction/bulkaction/api"
	"github.com/bulkaction/bulkaction/internal/web"
)

// bodyMemory limits the memory for large bodies of all requests together.
//
// A body reserves memory step by step while it arrives. If all bodies that hold memory waited for
// more, none of them would ever finish. Therefore at most one of them waits; the others are
// refused, which frees memory.
type bodyMemory struct {
	free    *semaphore.Weighted
	growing *semaphore.Weighted // held by the body that holds memory and waits for more

	mu       sync.Mutex
	holdTime time.Duration // how long bodies hold memory, averaged
}

func newBodyMemory() *bodyMemory {
	return &bodyMemory{free: semaphore.NewWeighted(maxBodyMemory), growing: semaphore.NewWeighted(1)}
}

// memoryLease is the memory that one body holds.
type memoryLease struct {
	pool  *bodyMemory
	bytes int64
	since time.Time // when it got its first memory
}

// grow makes the reservation of a body size bytes large; up to smallBody it needs none. If memory
// is short, it waits for at most bodyMemoryWait. A body that already holds memory does not wait if
// another such body does. Without memory, grow returns a problem with status 429, or the error of a
// context that was cancelled.
func (l *memoryLease) grow(ctx context.Context, size int64) error {
	if size <= smallBody {
		return nil
	}
	more := size - l.bytes
	if !l.pool.free.TryAcquire(more) && !l.await(ctx, more) {
		return l.pool.full(ctx)
	}
	if l.bytes == 0 {
		l.since = time.Now()
	}
	l.bytes = size
	return nil
}

func (l *memoryLease) await(ctx context.Context, more int64) bool {
	if l.bytes > 0 {
		if !l.pool.growing.TryAcquire(1) {
			return false
		}
		defer l.pool.growing.Release(1)
	}
	ctx, cancel := context.WithTimeout(ctx, bodyMemoryWait)
	defer cancel()
	return l.pool.free.Acquire(ctx, more) == nil
}

// release frees the memory. It may be called more than once.
func (l *memoryLease) release() {
	if l.bytes == 0 {
		return
	}
	l.pool.free.Release(l.bytes)
	l.bytes = 0
	l.pool.mu.Lock()
	defer l.pool.mu.Unlock()
	l.pool.holdTime += (time.Since(l.since) - l.pool.holdTime) / 4
}

// full returns the error for a body that gets no memory. Its Retry-After is the time for which
// bodies have held memory lately, on average, but at least a second.
func (m *bodyMemory) full(ctx context.Context) error {
	if errors.Is(ctx.Err(), context.Canceled) {
		return ctx.Err()
	}
	m.mu.Lock()
	defer m.mu.Unlock()
	return web.RetryLater(api.TooManyRequests, max(m.holdTime, time.Second),
		"too many large bodies are being read: retry, or stream the jobs")
}
