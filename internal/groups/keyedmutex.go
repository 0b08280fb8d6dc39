package groups

import (
	"context"
	"sync"
)

// keyedMutex let appends of this process to one group go one after the other, so that each knows
// the group's next ordinal, and can compose the jobs' blobs that the script would otherwise have to
// put together.
type keyedMutex struct {
	mu    sync.Mutex
	locks map[string]*groupLock
}

type groupLock struct {
	free        chan struct{} // holds a token while nobody is in the lane
	nextOrdinal int64         // ordinal of the group's next job, as far as this process knows
	users       int
}

// maxUnusedLocks bounds what is remembered of groups to which nothing is being appended.
const maxUnusedLocks = 10_000

// lock waits until the lane is free. The caller leaves it.
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

// removeUnused forgets the lanes that nobody uses when these have become many; the lock is held.
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
