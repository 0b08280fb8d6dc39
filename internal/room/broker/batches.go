package broker

import (
	"context"
	"sync"
	"time"

	"github.com/bulkaction/bulkaction/internal/redisx"
	"github.com/bulkaction/bulkaction/internal/redisx/call"
	"github.com/bulkaction/bulkaction/internal/room/waitingroom"
)

// enterTimeout bounds one call of the script enter. The call serves several visitors, so it must
// not end with the request of one visitor.
const enterTimeout = 5 * time.Second

// enterKind is what the calls of visitors must have in common to share one call of the script.
type enterKind struct {
	event string
	mode  waitingroom.Mode
	poll  time.Duration
}

// enterCall is the call of enterOne for one visitor, and its answer.
type enterCall struct {
	visitor waitingroom.Visitor
	reply   waitingroom.EnterReply
	err     error
}

// enterOne calls the script enter for one visitor, in one call with others of the same kind. It
// waits for the answer even if ctx ends: the caller must know whether the visitor of a closed
// stream has a place.
func (b *Broker) enterOne(ctx context.Context, kind enterKind, v waitingroom.Visitor) (waitingroom.EnterReply, error) {
	c := &enterCall{visitor: v}
	b.enters.Lock()
	batcher, _, ok := b.batchers.Get(kind)
	if !ok {
		batcher = redisx.NewBatcher[*enterCall](waitingroom.MostUsers)
	}
	b.batchers.Put(kind, batcher) // keeps it: of two batchers in use, the newer one could overtake the older one's visitors
	b.enters.Unlock()
	err := batcher.Do(context.WithoutCancel(ctx), func(ctx context.Context, all []*enterCall) {
		b.enterBatch(ctx, kind, all)
	}, c)
	if err != nil {
		return waitingroom.EnterReply{}, err
	}
	return c.reply, c.err
}

// enterBatch calls enter once for several visitors.
func (b *Broker) enterBatch(ctx context.Context, kind enterKind, batch []*enterCall) {
	ctx, cancel := context.WithTimeout(ctx, enterTimeout)
	defer cancel()
	visitors := make([]waitingroom.Visitor, len(batch))
	for i, c := range batch {
		visitors[i] = c.visitor
	}
	reply, err := b.rooms.Enter(ctx, kind.event, kind.mode, kind.poll, visitors...)
	for i, c := range batch {
		if c.err = err; err == nil {
			c.reply = waitingroom.EnterReply{Change: reply.Change, Entries: reply.Entries[i : i+1]}
		}
	}
}

// disconnects holds the visitors whose streams have ended, until sendDisconnects has told Redis.
type disconnects struct {
	wake chan struct{} // holds an element when there may be visitors

	mu      sync.Mutex
	byEvent map[string][]waitingroom.Visitor
}

func (d *disconnects) add(event string, visitors ...waitingroom.Visitor) {
	d.mu.Lock()
	d.byEvent[event] = append(d.byEvent[event], visitors...)
	d.mu.Unlock()
	select {
	case d.wake <- struct{}{}:
	default:
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
func (b *Broker) sendDisconnects(ctx context.Context) error {
	retry := redisx.Backoff{Min: 50 * time.Millisecond, Max: time.Second}
	for ctx.Err() == nil {
		event, visitors := b.endedStreams.take()
		if len(visitors) == 0 {
			select {
			case <-b.endedStreams.wake:
			case <-ctx.Done():
			}
			continue
		}
		codes, err := b.rooms.Disconnect(ctx, event, visitors...)
		if err == nil {
			retry.Reset()
			countDisconnected(b.metrics, event, codes)
			continue
		}
		b.Tel.Log.Debug("users could not be noted as away, trying again", "event", event, "error", err)
		if call.IsUnavailable(err) {
			b.endedStreams.add(event, visitors...)
			_ = redisx.Sleep(ctx, retry.Next())
		} else { // the event's data is damaged: the other events do not wait for it
			time.AfterFunc(postponed, func() { b.endedStreams.add(event, visitors...) })
		}
	}
	return nil
}
