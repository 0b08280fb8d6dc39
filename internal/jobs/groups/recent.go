package groups

import (
	"context"
	"sync"
	"time"
)

// recent is a cache of values that were read of groups, for a short time. Concurrent calls for the
// same key share one read.
type recent[T any] struct {
	age  time.Duration // how long a value is used again
	most int           // values that are kept

	reading keyedMutex // by the same keys
	mu      sync.Mutex
	kept    map[string]recentValue[T]
}

type recentValue[T any] struct {
	value T
	until time.Time
}

// get returns the cached value of a key, if it is not too old and good returns true for it;
// otherwise it calls read and caches the value. The value is shared: the caller must not change it.
func (r *recent[T]) get(ctx context.Context, key string, good func(T) bool, read func() (T, error)) (T, error) {
	var none T
	lock, err := r.reading.lock(ctx, key)
	if err != nil {
		return none, err
	}
	defer r.reading.unlock(lock)
	if v, ok := r.find(key, time.Now()); ok && good(v) {
		return v, nil
	}
	v, err := read()
	if err != nil {
		return none, err
	}
	r.keep(key, v, time.Now())
	return v, nil
}

func (r *recent[T]) find(key string, now time.Time) (T, bool) {
	r.mu.Lock()
	defer r.mu.Unlock()
	v, ok := r.kept[key]
	return v.value, ok && now.Before(v.until)
}

// keep caches a value, unless the cache is full of values that are not too old.
func (r *recent[T]) keep(key string, v T, now time.Time) {
	r.mu.Lock()
	defer r.mu.Unlock()
	if r.kept == nil {
		r.kept = map[string]recentValue[T]{}
	}
	delete(r.kept, key)
	for other, old := range r.kept {
		if !now.Before(old.until) {
			delete(r.kept, other)
		}
	}
	if len(r.kept) < r.most {
		r.kept[key] = recentValue[T]{v, now.Add(r.age)}
	}
}
