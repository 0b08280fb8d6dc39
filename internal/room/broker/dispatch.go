package broker

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"time"

	"github.com/ThreeDotsLabs/watermill/message"

	clientstream "github.com/bulkaction/bulkaction/client/stream"
	"github.com/bulkaction/bulkaction/internal/room/dispatch"
	"github.com/bulkaction/bulkaction/internal/room/roomapi"
	"github.com/bulkaction/bulkaction/internal/room/waitingroom"
)

// messages handles the messages for this broker.
type messages struct {
	admissions
	subscriber message.Subscriber
}

// follow handles the dispatch messages for this broker until ctx ends. A message that fails is not
// repeated: messages only make deliveries faster, and the delivery check does the same later.
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

// keepStream is the interval at which a broker renews the expiry of the Redis stream with its
// dispatch messages, so that the stream does not expire while no message comes.
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
			// The promoted user's stream has ended. If the event's setting no_show is "release",
			// this call of disconnect frees the slot at once; otherwise it changes nothing.
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
