package groups

import (
	"context"
	"sync"

	"github.com/bulkaction/bulkaction/internal/redisx"
)

// recent is a cache of values that were read of groups, for a short time. Concurrent calls for the
// same key share one read.
type recent[T any] struct {
	kept    *redisx.Cache[string, T]
	reading keyedMutex // by the same keys
}

// get returns the cached value of a key, if it is not too old and good returns true for it;
// otherwise it calls read and caches the value. The value is shared: the caller must not change it.
func (r *recent[T]) get(ctx context.Context, key string, good func(T) bool, read func() (T, error)) (T, error) {
	lock, err := r.reading.lock(ctx, key)
	if err != nil {
		var none T
		return none, err
	}
	defer r.reading.unlock(lock)
	if v, _, ok := r.kept.Get(key); ok && good(v) {
		return v, nil
	}
	v, err := read()
	if err == nil {
		r.kept.Put(key, v)
	}
	return v, err
}

// keyedMutex is a set of mutexes, one for each key. With group ids as keys, the appends of this
// process to one group run one after the other. So each append but the first knows the group's
// next ordinal, unless another process appends too, and can compose the jobs' blobs for the script.
type keyedMutex struct {
	mu    sync.Mutex
	locks map[string]*groupLock
}

type groupLock struct {
	free        chan struct{} // holds a token while the lock is free
	nextOrdinal int64         // ordinal of the group's next job, as far as this process knows
	users       int           // goroutines that hold the lock or wait for it
}

// maxUnusedLocks is the number of locks, used and unused ones, from which on a keyedMutex removes
// the unused ones before it adds another.
const maxUnusedLocks = 10_000

// lock waits for the lock of the key group until ctx ends. Without an error, the caller must call
// unlock.
func (l *keyedMutex) lock(ctx context.Context, group string) (*groupLock, error) {
	l.mu.Lock()
	if l.locks == nil {
		l.locks = make(map[string]*groupLock)
	}
	a := l.locks[group]
	if a == nil {
		l.removeUnused()
		a = &groupLock{free: make(chan struct{}, 1)}
		a.free <- struct{}{}
		l.locks[group] = a
	}
	a.users++
	l.mu.Unlock()
	select {
	case <-a.free:
		return a, nil
	case <-ctx.Done():
		l.mu.Lock()
		a.users--
		l.mu.Unlock()
		return nil, ctx.Err()
	}
}

func (l *keyedMutex) unlock(a *groupLock) {
	a.free <- struct{}{}
	l.mu.Lock()
	a.users--
	l.mu.Unlock()
}

// removeUnused removes all unused locks if there are maxUnusedLocks locks. l.mu must be held.
func (l *keyedMutex) removeUnused() {
	if len(l.locks) < maxUnusedLocks {
		return
	}
	for group, a := range l.locks {
		if a.users == 0 {
			delete(l.locks, group)
		}
	}
}
