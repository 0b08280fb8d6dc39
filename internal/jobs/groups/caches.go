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

const (
	// tenantCacheMaxAge is the age at which a tenantCache is emptied. It is short because groups
	// are deleted, and another tenant may then use the same group id.
	tenantCacheMaxAge  = time.Second
	tenantCacheMaxSize = 10_000
)

// tenantCache remembers the tenants of groups that were asked for recently, because a group often
// gets many appends in a short time. An entry may be out of date: a caller that finds no group in
// that tenant's partition must ask Redis.
type tenantCache struct {
	mu      sync.Mutex
	byGroup map[string]string // group id to tenant id
	since   time.Time         // when byGroup was last emptied
}

// get returns the tenant of a group, if it is known. It first empties a cache that is too old or
// full.
func (o *tenantCache) get(group string) (tenant string, known bool) {
	o.mu.Lock()
	defer o.mu.Unlock()
	if time.Since(o.since) > tenantCacheMaxAge || len(o.byGroup) >= tenantCacheMaxSize {
		o.byGroup, o.since = make(map[string]string), time.Now()
	}
	tenant, known = o.byGroup[group]
	return tenant, known
}

func (o *tenantCache) put(group, tenant string) {
	o.mu.Lock()
	defer o.mu.Unlock()
	if o.byGroup != nil {
		o.byGroup[group] = tenant
	}
}
