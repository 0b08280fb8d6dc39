package broker

import (
	"context"
	"errors"
	"fmt"
	"sync"
	"time"

	"github.com/bulkaction/bulkaction/api"
	"github.com/bulkaction/bulkaction/internal/redisx"
	"github.com/bulkaction/bulkaction/internal/redisx/call"
	"github.com/bulkaction/bulkaction/internal/room/position"
	"github.com/bulkaction/bulkaction/internal/room/roomapi"
	"github.com/bulkaction/bulkaction/internal/room/waitingroom"
)

func (b *Broker) viewsOf(event string) *position.Views {
	return b.views[b.Space.OfEvent(event).Index()]
}

// apiError turns an error of package waitingroom into the error that the API shows.
func (b *Broker) apiError(err error) error {
	switch {
	case err == nil:
		return nil
	case errors.Is(err, waitingroom.ErrUnknown):
		return roomapi.ErrUnknownEvent
	case call.IsUnavailable(err) || call.IsOOM(err):
		return fmt.Errorf("%w: %w", api.ErrUnavailable, err)
	}
	return err
}

// snapshot returns the settings and sizes of an event, which may be a second old, and older while
// Redis does not answer.
func (b *Broker) snapshot(ctx context.Context, event string) (waitingroom.Snapshot, error) {
	followed := b.viewsOf(event).Open(event)
	defer followed.Close()
	if s, ok := followed.Snapshot(); ok && s.Event != "" { // it may have been declared since
		return s, nil
	}
	return b.fresh(ctx, event)
}

// fresh reads the settings and sizes of an event from Redis. Callers at the same time share one
// read.
func (b *Broker) fresh(ctx context.Context, event string) (waitingroom.Snapshot, error) {
	found := b.loading.DoChan("snapshot "+event, func() (any, error) {
		ctx, cancel := context.WithTimeout(context.WithoutCancel(ctx), 5*time.Second)
		defer cancel()
		s, err := b.rooms.Snapshot(ctx, b.Space.OfEvent(event), event)
		if err == nil && len(s.Events) == 0 {
			err = waitingroom.ErrUnknown
		}
		if err != nil {
			return waitingroom.Snapshot{}, b.apiError(err)
		}
		return s.Events[0], nil
	})
	select {
	case r := <-found:
		s, _ := r.Val.(waitingroom.Snapshot)
		return s, r.Err
	case <-ctx.Done():
		return waitingroom.Snapshot{}, fmt.Errorf("%w: %w", api.ErrUnavailable, ctx.Err())
	}
}

// mode returns the mode of an event. With a seat service, an unknown event counts as open, because
// the service may know it.
func (b *Broker) mode(ctx context.Context, event string) (string, error) {
	s, err := b.snapshot(ctx, event)
	if errors.Is(err, roomapi.ErrUnknownEvent) && b.cfg.Seats != nil {
		return api.ModeOpen, nil
	}
	return s.Settings.Mode, err
}

// lookups holds the events whose number of seats is not known yet, until it is known (see askOnce).
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
func (b *Broker) createFromSeats(ctx context.Context, event string) error {
	_, err, _ := b.loading.Do("seats "+event, func() (any, error) {
		ctx, cancel := context.WithTimeout(context.WithoutCancel(ctx), 10*time.Second)
		defer cancel()
		s := b.cfg.Defaults
		n, err := b.cfg.Seats(ctx, event)
		switch {
		case errors.Is(err, waitingroom.ErrUnknown):
			return nil, err
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

// askForSeats asks the seat service about the events in lookups that are due, until its number of
// seats is known (see askOnce).
func (b *Broker) askForSeats(ctx context.Context) error {
	for _, event := range b.lookups.due(time.Now()) {
		done, err := b.askOnce(ctx, event)
		if err != nil && ctx.Err() == nil {
			b.Tel.Log.Debug("the seats of an event are not known yet", "event", event, "error", err)
		}
		if done {
			b.lookups.remove(event)
		}
	}
	return nil
}

// askOnce asks for the seats of one event. done is true if they are known now: from the service, by
// another broker, or because an operator has set the capacity. It is also true, with an error, if
// the event can't be read: the next snapshot adds it to lookups again.
func (b *Broker) askOnce(ctx context.Context, event string) (done bool, err error) {
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
