// Package dispatch sends messages to single broker processes, each of which reads a Redis stream of
// its own. It hides the form of the messages, and the expiry of the streams of processes that do
// not run any more.
package dispatch

import (
	"context"
	"encoding/json"
	"fmt"
	"time"

	"github.com/ThreeDotsLabs/watermill/message"
	"github.com/google/uuid"

	"github.com/bulkaction/bulkaction/internal/redisx"
	"github.com/bulkaction/bulkaction/internal/redisx/keyspace"
	"github.com/bulkaction/bulkaction/internal/redisx/wm"
)

// StreamTTL is how long the dispatch stream of a broker process exists after its last message or
// renewal. The broker renews it. The TTL removes the streams of processes that do not run any more.
const StreamTTL = 10 * time.Minute

// Types of the messages.
const (
	TypePromoted = "entry.promoted" // data: Promotion
	TypeReplaced = "entry.replaced" // data: Replaced
	TypeRemoved  = "entry.removed"  // data: Removed
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

// Replaced is the message that a user has opened a newer stream. The broker that gets it ends the
// older stream, conn.
type Replaced struct {
	Event string `json:"event"`
	User  string `json:"user"`
	Conn  string `json:"conn"`
}

// Reasons of Removed.
const (
	ReasonLeft    = "left"    // the user has left
	ReasonRemoved = "removed" // an operator has removed the user
)

// Removed is the message that a user has no record any more. The broker that gets it ends the
// user's stream, conn, and shows the reason.
type Removed struct {
	Event  string `json:"event"`
	User   string `json:"user"`
	Conn   string `json:"conn"`
	Reason string `json:"reason"` // one of the constants Reason…
}

// Publisher sends messages to brokers. It may be used by several goroutines.
type Publisher struct {
	conn      *redisx.Conn
	space     keyspace.Space
	publisher message.Publisher
}

// NewPublisher returns a publisher that uses conn. The caller closes conn.
func NewPublisher(conn *redisx.Conn, space keyspace.Space) (*Publisher, error) {
	p, err := wm.NewPublisher(conn)
	if err != nil {
		return nil, err
	}
	return &Publisher{conn: conn, space: space, publisher: p}, nil
}

// Removed sends m to the broker whose instance is in m.Conn. It sends nothing if m.Conn is no conn
// of a broker, as for a user who polls. If the message is lost, the broker finds out from the
// stream moves, or when the token expires.
func (p *Publisher) Removed(ctx context.Context, m Removed) error {
	return p.toOwner(ctx, m.Conn, TypeRemoved, m)
}

// Replaced sends m to the broker of m.Conn, as Removed does.
func (p *Publisher) Replaced(ctx context.Context, m Replaced) error {
	return p.toOwner(ctx, m.Conn, TypeReplaced, m)
}

// toOwner sends a message to the broker of a conn.
func (p *Publisher) toOwner(ctx context.Context, conn, typ string, m any) error {
	instance := keyspace.InstanceOf(conn)
	if instance == "" {
		return nil
	}
	data, err := json.Marshal(m)
	if err != nil {
		return fmt.Errorf("encode a message to broker %s: %w", instance, err)
	}
	return p.Send(ctx, instance, wm.NewMessage(uuid.NewString(), typ, data))
}

// Send adds messages to the Redis stream of a broker, which then exists for another StreamTTL.
func (p *Publisher) Send(ctx context.Context, instance string, msgs ...*message.Message) error {
	stream := p.space.Dispatch(instance)
	for _, msg := range msgs {
		msg.SetContext(ctx)
	}
	if err := p.publisher.Publish(stream, msgs...); err != nil {
		return fmt.Errorf("send a message to broker %s: %w", instance, err)
	}
	if err := p.conn.Cmd.PExpire(ctx, stream, StreamTTL).Err(); err != nil {
		return fmt.Errorf("set the end of the stream of broker %s: %w", instance, err)
	}
	return nil
}
