package broker

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"time"

	"github.com/ThreeDotsLabs/watermill/message"

	clientstream "github.com/bulkaction/bulkaction/client/stream"
	"github.com/bulkaction/bulkaction/internal/redisx"
	"github.com/bulkaction/bulkaction/internal/redisx/keyspace"
	"github.com/bulkaction/bulkaction/internal/redisx/stream"
	"github.com/bulkaction/bulkaction/internal/redisx/wm"
	"github.com/bulkaction/bulkaction/internal/room/roomapi"
	"github.com/bulkaction/bulkaction/internal/room/waitingroom"
)

// routerLease is the idle time of a message in the stream entry after which another broker's router
// takes it over.
const routerLease = 10 * time.Second

// router returns the consumer of a partition's Redis stream entry. It copies each message to the
// Redis stream of the broker that the message names.
func (b *Broker) router(p keyspace.Partition) *stream.Consumer {
	return stream.NewConsumer(b.Conn, stream.ConsumerConfig{
		Stream: p.Entry(), Group: keyspace.GroupRouter, Name: b.ID,
		Rejected:    stream.Quarantine{Key: p.Quarantine(), Source: "entry"},
		Handle:      b.route,
		MaxInFlight: 1000, MaxBytes: 16 << 20, Block: redisx.MaxBlock, Lease: routerLease,
		RetryAfter: 100 * time.Millisecond, CloseTimeout: time.Second, Log: b.Tel.Log,
	})
}

// route copies messages of the stream entry to the Redis streams of the brokers that they name. It
// rejects what is no dispatch message about promotions, and drops a message for a dead broker: that
// broker's users connect to another broker, which claims.
func (b *Broker) route(ctx context.Context, entries []stream.Entry) []stream.Verdict {
	verdicts := make([]stream.Verdict, len(entries))
	alive, err := b.alive(ctx)
	if err != nil {
		return verdicts // again, later
	}
	byBroker := map[string][]int{}
	for i, e := range entries {
		var p waitingroom.Promotion
		err := json.Unmarshal([]byte(e.Get("data")), &p)
		switch {
		case err != nil || e.Get("type") != waitingroom.TypePromoted || p.To == "":
			verdicts[i] = stream.Verdict{Action: stream.Reject, Reason: errors.New("no message entry.promoted")}
		case !alive[p.To]:
			verdicts[i] = stream.Verdict{Action: stream.Ack}
		default:
			byBroker[p.To] = append(byBroker[p.To], i)
		}
	}
	for to, list := range byBroker {
		msgs := make([]waitingroom.Message, len(list))
		for j, i := range list {
			msgs[j] = waitingroom.Message{ID: entries[i].ID, Data: entries[i].Get("data")}
		}
		if b.rooms.Send(ctx, to, waitingroom.TypePromoted, msgs...) != nil {
			continue // again, later
		}
		for _, i := range list {
			verdicts[i] = stream.Verdict{Action: stream.Ack}
		}
	}
	return verdicts
}

// followDispatch handles the dispatch messages for this broker until ctx ends. A message that fails is not
// repeated: messages only make deliveries faster, and the delivery check does the same later.
func (b *Broker) followDispatch(ctx context.Context) error {
	follower, err := wm.NewFollower(b.Conn, b.Tel.Log)
	if err != nil {
		return err
	}
	topic := b.Space.Dispatch(b.instance)
	msgs, err := follower.Subscribe(ctx, topic)
	if err != nil {
		return fmt.Errorf("follow stream %s: %w", topic, err)
	}
	defer func() {
		if err := follower.Close(); err != nil {
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
			b.handleMessage(ctx, msg)
		case <-ctx.Done():
			return nil
		}
	}
}

// handleMessage handles one message of this broker's stream.
func (b *Broker) handleMessage(ctx context.Context, msg *message.Message) {
	var err error
	switch msg.Metadata.Get(clientstream.FieldType) {
	case waitingroom.TypePromoted:
		var p waitingroom.Promotion
		if err = json.Unmarshal(msg.Payload, &p); err == nil {
			err = b.handlePromotion(ctx, p)
		}
	case waitingroom.TypeReplaced, waitingroom.TypeRemoved:
		var r waitingroom.StreamEnd
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

// keepStream renews the expiry of the Redis stream with the dispatch messages of this broker, so that
// the stream does not expire while no message comes.
func (b *Broker) keepStream(ctx context.Context) error {
	return b.Conn.Cmd.PExpire(ctx, b.Space.Dispatch(b.instance), waitingroom.DispatchTTL).Err()
}

func (b *Broker) handlePromotion(ctx context.Context, p waitingroom.Promotion) error {
	var here []*connection
	for _, u := range p.Users {
		c := b.conns.find(p.Event, u.User, u.Conn)
		if c != nil && !c.now().over {
			here = append(here, c)
		} else if b.owns(u.Conn) {
			// The promoted user's stream has ended. If the event's setting no_show is "release",
			// this call of disconnect frees the slot at once; otherwise it changes nothing.
			b.endedStreams.add(p.Event, waitingroom.Visitor{User: u.User, Conn: u.Conn})
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

func (b *Broker) handleRemoval(r waitingroom.StreamEnd) {
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
