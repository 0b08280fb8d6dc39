package groups

import (
	"context"
	"sync"
)

// lanes let appends of this process to one group go one after the other, so that each knows the
// group's next ordinal, and can compose the jobs' blobs that the script would otherwise have to
// put together.
type lanes struct {
	mu  sync.Mutex
	all map[string]*lane
}

type lane struct {
	free  chan struct{} // holds a token while nobody is in the lane
	next  int64         // ordinal of the group's next job, as far as this process knows
	users int
}

// maxLanes bounds what is remembered of groups to which nothing is being appended.
const maxLanes = 10_000

// enter waits until the lane is free. The caller leaves it.
func (l *lanes) enter(ctx context.Context, group string) (*lane, error) {
	l.mu.Lock()
	if l.all == nil {
		l.all = make(map[string]*lane)
	}
	a := l.all[group]
	if a == nil {
		l.tidy()
		a = &lane{free: make(chan struct{}, 1)}
		a.free <- struct{}{}
		l.all[group] = a
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

func (l *lanes) leave(a *lane) {
	a.free <- struct{}{}
	l.mu.Lock()
	a.users--
	l.mu.Unlock()
}

// tidy forgets the lanes that nobody uses when these have become many; the lock is held.
func (l *lanes) tidy() {
	if len(l.all) < maxLanes {
		return
	}
	for group, a := range l.all {
		if a.users == 0 {
			delete(l.all, group)
		}
	}
}
