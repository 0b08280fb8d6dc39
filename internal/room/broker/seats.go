package broker

import (
	"context"
	"errors"
	"fmt"
	"sync"
	"time"

	"github.com/bulkaction/bulkaction/api"
	"github.com/bulkaction/bulkaction/internal/redisx"
	"github.com/bulkaction/bulkaction/internal/room/seats"
	"github.com/bulkaction/bulkaction/internal/room/waitingroom"
)

// lookups holds the events whose number of seats is not known yet, until it is known (see askOnce).
// The zero value is empty.
type lookups struct {
	mu     sync.Mutex
	events map[string]*lookup
}

// lookup is when to ask the seat service again about one event.
type lookup struct {
	retry redisx.Backoff
	at    time.Time // when it is asked
}

// add notes an event, unless it is noted.
func (l *lookups) add(event string) {
	l.mu.Lock()
	defer l.mu.Unlock()
	if l.events == nil {
		l.events = map[string]*lookup{}
	}
	if l.events[event] == nil {
		n := &lookup{retry: redisx.Backoff{Min: time.Second, Max: 30 * time.Second}}
		n.at = time.Now().Add(n.retry.Next())
		l.events[event] = n
	}
}

// due returns the events about which the seat service is to be asked now, and sets their next
// times.
func (l *lookups) due(now time.Time) []string {
	l.mu.Lock()
	defer l.mu.Unlock()
	var due []string
	for event, n := range l.events {
		if !now.Before(n.at) {
			due = append(due, event)
			n.at = now.Add(n.retry.Next())
		}
	}
	return due
}

func (l *lookups) remove(event string) {
	l.mu.Lock()
	defer l.mu.Unlock()
	delete(l.events, event)
}

// createFromSeats creates an event with the number of seats that the seat service names as its
// capacity. If the service does not know the event, it returns waitingroom.ErrUnknown. If the
// service does not answer, the event has no slots yet, so that users wait, and the broker asks
// again. Several brokers may do so at the same time: the first one creates the event.
func (b *shared) createFromSeats(ctx context.Context, event string) error {
	_, err, _ := b.loading.Do("seats "+event, func() (any, error) {
		ctx, cancel := context.WithTimeout(context.WithoutCancel(ctx), 10*time.Second)
		defer cancel()
		s := b.cfg.Defaults
		n, err := b.cfg.Seats(ctx, event)
		switch {
		case errors.Is(err, seats.ErrUnknown):
			return nil, waitingroom.ErrUnknown
		case err != nil:
			b.Tel.Log.Warn("the seat service does not answer: users wait, asking again", "event", event, "error", err)
			s.SeatsPending = true
		default:
			s.Capacity = n
		}
		s.Mode = api.ModeOpen
		if _, err := b.rooms.Declare(ctx, event, s, waitingroom.DeclareOptions{IfAbsent: true}); err != nil {
			return nil, fmt.Errorf("create event %s: %w", event, err)
		}
		return nil, nil
	})
	return err
}

// askForSeats asks the seat service about each event in lookups, with backoff, until its number of
// seats is known (see askOnce). It runs until ctx ends.
func (b *shared) askForSeats(ctx context.Context) error {
	for redisx.Sleep(ctx, time.Second) == nil {
		for _, event := range b.lookups.due(time.Now()) {
			done, err := b.askOnce(ctx, event)
			if err != nil && ctx.Err() == nil {
				b.Tel.Log.Debug("the seats of an event are not known yet", "event", event, "error", err)
			}
			if done {
				b.lookups.remove(event)
			}
		}
	}
	return nil
}

// askOnce asks for the seats of one event. done is true if they are known now: from the service, by
// another broker, or because an operator has set the capacity. It is also true, with an error, if
// the event can't be read: the next snapshot adds it to lookups again.
func (b *shared) askOnce(ctx context.Context, event string) (done bool, err error) {
	s, err := b.fresh(ctx, event)
	if err != nil || !s.Settings.SeatsPending {
		return !s.Settings.SeatsPending, err
	}
	n, err := b.cfg.Seats(ctx, event)
	if err != nil {
		return false, err
	}
	_, err = b.rooms.Change(ctx, event, waitingroom.Changes{Capacity: &n, SeatsKnown: true})
	return err == nil, err
}
