package broker

import (
	"context"
	"sync"
	"time"

	"github.com/bulkaction/bulkaction/internal/redisx"
	"github.com/bulkaction/bulkaction/internal/redisx/call"
	"github.com/bulkaction/bulkaction/internal/room/waitingroom"
)

// disconnects holds the visitors whose streams have ended, until sendDisconnects has told Redis.
// Its zero value is empty.
type disconnects struct {
	mu      sync.Mutex
	byEvent map[string][]waitingroom.Visitor
	wake    chan struct{}
}

func (d *disconnects) add(c *connection) { d.addVisitor(c.event, c.visitor()) }

func (d *disconnects) addVisitor(event string, v waitingroom.Visitor) {
	d.mu.Lock()
	if d.byEvent == nil {
		d.byEvent = map[string][]waitingroom.Visitor{}
	}
	d.byEvent[event] = append(d.byEvent[event], v)
	wake := d.signal()
	d.mu.Unlock()
	select {
	case wake <- struct{}{}:
	default:
	}
}

// signal returns the channel that wakes sendDisconnects: it holds an element when there may be
// visitors. The caller holds mu.
func (d *disconnects) signal() chan struct{} {
	if d.wake == nil {
		d.wake = make(chan struct{}, 1)
	}
	return d.wake
}

func (d *disconnects) wait(ctx context.Context) error {
	d.mu.Lock()
	wake := d.signal()
	d.mu.Unlock()
	select {
	case <-wake:
		return nil
	case <-ctx.Done():
		return ctx.Err()
	}
}

// take removes and returns up to 200 visitors of one event; none if there are none.
func (d *disconnects) take() (event string, visitors []waitingroom.Visitor) {
	d.mu.Lock()
	defer d.mu.Unlock()
	for event, all := range d.byEvent {
		n := min(len(all), waitingroom.MostUsers)
		if d.byEvent[event] = all[n:]; len(all) == n {
			delete(d.byEvent, event)
		}
		return event, all[:n]
	}
	return "", nil
}

// sendDisconnects tells Redis, by the script disconnect, which streams have ended, so that their
// users become away. One call has up to 200 users of an event. It repeats failed calls: a user who
// has a newer stream by then is not affected. It runs until ctx ends.
func (b *shared) sendDisconnects(ctx context.Context) error {
	retry := redisx.Backoff{Min: 50 * time.Millisecond, Max: time.Second}
	giveBack := func(event string, visitors []waitingroom.Visitor) {
		for _, v := range visitors {
			b.endedStreams.addVisitor(event, v)
		}
	}
	for {
		event, visitors := b.endedStreams.take()
		if len(visitors) == 0 {
			if b.endedStreams.wait(ctx) != nil {
				return nil
			}
			continue
		}
		codes, err := b.rooms.Disconnect(ctx, event, visitors...)
		if err == nil {
			retry.Reset()
			b.metrics.disconnected(event, codes)
			continue
		}
		b.Tel.Log.Debug("users could not be noted as away, trying again", "event", event, "error", err)
		if !call.IsUnavailable(err) { // the event's data is damaged: the other events do not wait for it
			time.AfterFunc(postponed, func() { giveBack(event, visitors) })
			continue
		}
		giveBack(event, visitors)
		if redisx.Sleep(ctx, retry.Next()) != nil {
			return nil
		}
	}
}
