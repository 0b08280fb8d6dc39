package broker

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"time"

	"github.com/ThreeDotsLabs/watermill/message"

	clientstream "github.com/bulkaction/bulkaction/client/stream"
	"github.com/bulkaction/bulkaction/internal/roomapi"
	"github.com/bulkaction/bulkaction/internal/waitingroom"
	"github.com/bulkaction/bulkaction/internal/waitingroom/dispatch"
)

// messages handles the messages for this broker.
type messages struct {
	admissions
	subscriber message.Subscriber
}

// follow handles the messages for this broker. They only make deliveries faster, so none of
// them is ever handled again.
func (b messages) follow(ctx context.Context) error {
	topic := b.Space.Dispatch(b.instance)
	msgs, err := b.subscriber.Subscribe(ctx, topic)
	if err != nil {
		return fmt.Errorf("follow stream %s: %w", topic, err)
	}
	defer func() {
		if err := b.subscriber.Close(); err != nil {
			b.Tel.Log.Warn("closing a subscription failed", "error", err)
		}
	}()
	for {
		select {
		case msg, ok := <-msgs:
			if !ok {
				return nil
			}
			msg.Ack() // the next message may come while this one is handled
			b.handle(ctx, msg)
		case <-ctx.Done():
			return nil
		}
	}
}

// handle handles one message of this broker's stream.
func (b messages) handle(ctx context.Context, msg *message.Message) {
	var err error
	switch msg.Metadata.Get(clientstream.FieldType) {
	case dispatch.TypePromoted:
		var p dispatch.Promotion
		if err = json.Unmarshal(msg.Payload, &p); err == nil {
			err = b.handlePromotion(ctx, p)
		}
	case dispatch.TypeReplaced, dispatch.TypeRemoved:
		var r dispatch.Removed
		if err = json.Unmarshal(msg.Payload, &r); err == nil {
			b.handleRemoval(r)
		}
	default:
		err = errors.New("unknown type of message")
	}
	if err != nil && ctx.Err() == nil {
		b.Tel.Log.Warn("a message for this broker failed; the delivery check repeats what it asks for",
			"message", msg.UUID, "error", err)
	}
}

// keepStream is the interval at which a broker keeps its stream from expiring, also while it gets
// no messages.
const keepStream = dispatch.StreamTTL / 10

func (b messages) keep(ctx context.Context) error {
	return b.Conn.Cmd.PExpire(ctx, b.Space.Dispatch(b.instance), dispatch.StreamTTL).Err()
}

func (b messages) handlePromotion(ctx context.Context, p dispatch.Promotion) error {
	var here []*connection
	for _, u := range p.Users {
		c := b.conns.find(p.Event, u.User, u.Conn)
		if c != nil && !c.isOver() {
			here = append(here, c)
		} else if b.owns(u.Conn) {
			// With no_show release the slot is free at once. Otherwise this changes nothing.
			b.endedStreams.addVisitor(p.Event, waitingroom.Visitor{User: u.User, Conn: u.Conn})
		}
	}
	if len(here) == 0 {
		return nil
	}
	if err := b.admit(ctx, p.Event, here...); err != nil {
		return err
	}
	if s, err := b.snapshot(ctx, p.Event); err == nil {
		promoted := time.UnixMilli(p.Users[0].Until).Add(-s.Settings.Ready)
		b.metrics.Notified(p.Event, max(0, time.Since(promoted)))
	}
	return nil
}

func (b messages) handleRemoval(r dispatch.Removed) {
	c := b.conns.find(r.Event, r.User, r.Conn)
	if c == nil {
		return
	}
	switch r.Reason {
	case "": // of a message Replaced
		r.Reason = roomapi.EndedReplaced
	case roomapi.EndedLeft, roomapi.EndedRemoved:
	default:
		return
	}
	b.endHere(c, r.Reason)
}
