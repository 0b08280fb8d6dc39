package position

import (
	"context"
	"sync"
	"time"
)

const (
	// keepView is how long the view of an existing event is kept after its last Close.
	keepView = time.Minute
	// snapshotInterval is the time from one snapshot of the events to the next. A read of moves
	// blocks no longer than this.
	snapshotInterval = time.Second
	// readInterval is the pause after a read of moves with few entries (fewer than manyMoves).
	// Without it, a busy partition would cause one read for each entry.
	readInterval = 200 * time.Millisecond
	// wakeInterval replaces readInterval while a caller of Wait waits for a change.
	wakeInterval = 25 * time.Millisecond
	// manyMoves is the number of entries from which a read counts as full: probably there are more,
	// so the next read begins at once.
	manyMoves = 100
)

// Views are the views of those events of one partition in which this broker has users. One
// goroutine calls Round in a loop; the other methods may be called by several goroutines.
type Views struct {
	source Source
	wake   chan struct{}

	// Only for Round.
	snapshotAt time.Time // when the last snapshots were requested
	readAt     time.Time // when the last read of moves ended
	entries    int       // how many entries it had

	progress progress

	mu     sync.Mutex
	events map[string]*Event
}

// New returns the views of the partition that source reads.
func New(source Source) *Views {
	return &Views{source: source, wake: make(chan struct{}, 1), events: map[string]*Event{}}
}

// Open returns the event with this name. Round follows it until the caller calls Close, and for
// another minute. A broker opens an event for each connection and for each poll.
func (v *Views) Open(name string) *Event {
	v.mu.Lock()
	defer v.mu.Unlock()
	e := v.events[name]
	if e == nil {
		e = &Event{views: v, name: name}
		v.events[name] = e
		defer v.wakeUp()
	}
	e.users++
	e.usedAt = time.Now()
	return e
}

// Len returns how many events are followed.
func (v *Views) Len() int {
	v.mu.Lock()
	defer v.mu.Unlock()
	return len(v.events)
}

// followed returns the events that Round follows. It first drops those without users (each Open has
// had its Close) that were not used for a minute, or do not exist in Redis.
func (v *Views) followed() []*Event {
	v.mu.Lock()
	defer v.mu.Unlock()
	events := make([]*Event, 0, len(v.events))
	for name, e := range v.events {
		if e.users <= 0 && (time.Since(e.usedAt) >= keepView || e.isUnknown()) {
			delete(v.events, name)
			continue
		}
		events = append(events, e)
	}
	if len(events) == 0 {
		v.progress.reset()
	}
	return events
}

// lookUp returns the event with this name; nil if it is not followed.
func (v *Views) lookUp(name string) *Event {
	v.mu.Lock()
	defer v.mu.Unlock()
	return v.events[name]
}

// wakeUp lets Round read moves earlier.
func (v *Views) wakeUp() {
	select {
	case v.wake <- struct{}{}:
	default:
	}
}

// pause waits until the next read of moves may begin: after a read of few entries (fewer than
// manyMoves) until readInterval has passed, after a full or an empty read not at all. Without
// events it waits until one is opened, for snapshotInterval at most.
func (v *Views) pause(ctx context.Context) error {
	wait := time.Duration(0)
	switch {
	case v.Len() == 0:
		wait = snapshotInterval
	case v.entries > 0 && v.entries < manyMoves:
		wait = time.Until(v.readAt.Add(readInterval))
	}
	if wait <= 0 {
		return ctx.Err()
	}
	timer := time.NewTimer(wait)
	defer timer.Stop()
	for wake := v.wake; ; wake = nil {
		select {
		case <-ctx.Done():
			return ctx.Err()
		case <-timer.C:
			return nil
		case <-wake:
			timer.Reset(max(0, time.Until(v.readAt.Add(wakeInterval))))
		}
	}
}
