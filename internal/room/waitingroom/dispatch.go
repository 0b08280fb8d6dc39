package waitingroom

import (
	"context"
	"encoding/json"
	"fmt"
	"time"

	"github.com/google/uuid"
	"github.com/redis/go-redis/v9"

	"github.com/bulkaction/bulkaction/internal/redisx/keyspace"
)

// DispatchTTL is how long the dispatch stream of a broker process exists after its last message or
// renewal. The broker renews it. The TTL removes the streams of processes that do not run any more.
const DispatchTTL = 10 * time.Minute

// Types of the messages to single broker processes, each of which reads a Redis stream of its own.
const (
	TypePromoted = "entry.promoted" // data: Promotion
	TypeReplaced = "entry.replaced" // data: StreamEnd without a reason
	TypeRemoved  = "entry.removed"  // data: StreamEnd
)

// Promotion is the message that users were promoted and hold a slot. The script promote_users
// writes it to the Redis stream entry, and a router hands it to the broker To, which has their
// conns.
type Promotion struct {
	Event string         `json:"event"`
	To    string         `json:"to"`
	Users []PromotedUser `json:"users"`
}

// PromotedUser is a user in a Promotion.
type PromotedUser struct {
	User  string      `json:"user"`
	Conn  string      `json:"conn"`
	Fence json.Number `json:"fence"`
	Until int64       `json:"until"` // ms since 1970: the user is READY until then
}

// StreamEnd is the message that a user has opened a newer stream, or has no record any more. The
// broker that gets it ends the user's stream, Conn, and shows the reason.
type StreamEnd struct {
	Event  string `json:"event"`
	User   string `json:"user"`
	Conn   string `json:"conn"`
	Reason string `json:"reason,omitempty"` // left, or removed (by an operator); "": a newer stream
}

// SendEnd sends m to the broker whose instance is in m.Conn. It sends nothing if m.Conn is no conn
// of a broker, as for a user who polls. If the message is lost, the broker finds out from the
// stream moves, or when the token expires.
func (r *Rooms) SendEnd(ctx context.Context, m StreamEnd) error {
	instance, typ := keyspace.InstanceOf(m.Conn), TypeRemoved
	if instance == "" {
		return nil
	}
	if m.Reason == "" {
		typ = TypeReplaced
	}
	data, err := json.Marshal(m)
	if err != nil {
		return fmt.Errorf("encode a message to broker %s: %w", instance, err)
	}
	return r.Send(ctx, instance, typ, Message{uuid.NewString(), string(data)})
}

// Message is the id and the data of a message to a broker.
type Message struct{ ID, Data string }

// Send adds messages to the Redis stream of a broker, which then exists for another DispatchTTL.
// After an error, some of them may have been added.
func (r *Rooms) Send(ctx context.Context, instance, typ string, msgs ...Message) error {
	stream := r.space.Dispatch(instance)
	_, err := r.rdb.Pipelined(ctx, func(pipe redis.Pipeliner) error {
		for _, m := range msgs {
			pipe.XAdd(ctx, &redis.XAddArgs{Stream: stream, Values: []string{"id", m.ID, "type", typ, "data", m.Data}})
		}
		pipe.PExpire(ctx, stream, DispatchTTL)
		return nil
	})
	if err != nil {
		return fmt.Errorf("send messages to broker %s: %w", instance, err)
	}
	return nil
}
