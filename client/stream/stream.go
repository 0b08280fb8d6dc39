// Package stream follows the events of an installation with watermill. It hides the form of a
// message in a stream entry, and which settings watermill's subscriber needs, so that neither a bad
// entry nor an outage of Redis ends a subscription.
package stream

import (
	"context"
	"crypto/tls"
	"encoding/json"
	"errors"
	"fmt"
	"log/slog"
	"time"

	"github.com/ThreeDotsLabs/watermill"
	"github.com/ThreeDotsLabs/watermill-redisstream/pkg/redisstream"
	"github.com/ThreeDotsLabs/watermill/message"

	"github.com/bulkaction/bulkaction/api"
	"github.com/bulkaction/bulkaction/internal/redisx"
	"github.com/bulkaction/bulkaction/internal/redisx/call"
	"github.com/bulkaction/bulkaction/internal/redisx/keyspace"
	"github.com/bulkaction/bulkaction/internal/redisx/stream"
)

// Config configures a Subscriber. Its zero value follows a default installation.
type Config struct {
	// Prefix of the installation's Redis keys; "" means "bulk-action:".
	Prefix string
	// Group is the consumer group. Each event goes to one subscriber of a group, and a new group
	// begins with the oldest event that Redis keeps. Without a group, the subscriber gets every
	// event that is published from now on.
	Group string
	// TLS is the TLS configuration for a URL with rediss:// or rediss-sentinel://; nil: the
	// authorities of the system. TLS is at least 1.2. A configuration that verifies nothing is
	// refused.
	TLS *tls.Config
	// Username and PasswordFile are the user ("" for Redis's default user) and the file with its
	// password, for a URL without both. The file is read again for each new connection.
	Username, PasswordFile string
	// Logger gets watermill's messages; nil means slog.Default.
	Logger *slog.Logger
}

// nackWait is the wait before a nacked message is delivered again.
const nackWait = time.Second

// Subscriber is a watermill Subscriber to the events of an installation. It delivers one message at
// a time, in the order of the stream, and the next one after its acknowledgement. It delivers a
// nacked message again after a second. Delivery is at least once: an event keeps its id when it is
// repeated; in a group, a message whose handler takes longer than a minute is delivered again.
type Subscriber struct {
	subscriber *redisstream.Subscriber
	conn       *redisx.Conn
	events     string
}

var _ message.Subscriber = (*Subscriber)(nil)

// NewSubscriber connects to the Redis at redisURL: redis://host:port/db, a comma list for a
// cluster, or redis-sentinel://host:port,…/master; with TLS rediss:// and rediss-sentinel://. It
// returns an error if Redis does not answer.
func NewSubscriber(ctx context.Context, redisURL string, cfg Config) (*Subscriber, error) {
	if cfg.Prefix == "" {
		cfg.Prefix = "bulk-action:"
	}
	if cfg.Logger == nil {
		cfg.Logger = slog.Default()
	}
	keys, err := keyspace.New(cfg.Prefix, 1)
	if err != nil {
		return nil, err
	}
	conn, err := redisx.Connect(ctx, redisx.Config{
		URL:            redisURL,
		Access:         redisx.Access{TLS: cfg.TLS, Username: cfg.Username, PasswordFile: cfg.PasswordFile},
		CommandTimeout: 3 * time.Second,
		ClientName:     "bulkaction-subscriber",
	})
	if err != nil {
		return nil, err
	}
	from, err := lastEntry(ctx, conn, keys.Events())
	if err != nil {
		return nil, errors.Join(err, conn.Close())
	}
	reader := stream.NewReader(conn, cfg.Group, "")
	s, err := redisstream.NewSubscriber(redisstream.SubscriberConfig{
		Client:                        conn.Block,
		Unmarshaller:                  Marshaller{},
		ConsumerGroup:                 cfg.Group,
		FanOutOldestId:                from, // with "$", events between two reads would be lost
		NackResendSleep:               nackWait,
		BlockTime:                     redisx.MaxBlock,
		DisableIndefiniteInitialBlock: true, // otherwise a read without events would outlast Close
		ShouldStopOnReadErrors: func(err error) bool {
			if call.IsNoGroup(err) { // Redis has lost its data
				_ = reader.EnsureGroup(context.WithoutCancel(ctx), keys.Events())
			}
			return false
		},
	}, watermill.NewSlogLogger(cfg.Logger))
	if err != nil {
		return nil, errors.Join(fmt.Errorf("create subscriber: %w", err), conn.Close())
	}
	return &Subscriber{subscriber: s, conn: conn, events: keys.Events()}, nil
}

// lastEntry returns the id of the newest entry of a stream.
func lastEntry(ctx context.Context, conn *redisx.Conn, name string) (string, error) {
	newest, err := conn.Cmd.XRevRangeN(ctx, name, "+", "-", 1).Result()
	if err != nil {
		return "", fmt.Errorf("find the newest entry of stream %s: %w", name, err)
	}
	if len(newest) == 0 {
		return "0-0", nil
	}
	return newest[0].ID, nil
}

// Events returns the name of the stream of events: the topic for Subscribe.
func (s *Subscriber) Events() string { return s.events }

// Subscribe returns a channel of the topic's messages, which is closed when ctx ends or the
// Subscriber is closed. Function Event decodes a message.
func (s *Subscriber) Subscribe(ctx context.Context, topic string) (<-chan *message.Message, error) {
	return s.subscriber.Subscribe(ctx, topic)
}

// Close ends the subscriptions and closes the connections to Redis.
func (s *Subscriber) Close() error {
	return errors.Join(s.subscriber.Close(), s.conn.Cmd.Close()) // the first one closes conn.Block
}

// Fields of a message's stream entry. The message has them as metadata of the same names.
const (
	FieldType        = "type"        // what kind of message it is
	FieldTraceParent = "traceparent" // trace of the sender; may be missing
)

const (
	fieldData = "data"
	fieldID   = "id"
)

// Marshaller writes and reads flat stream entries, which redis-cli can write and read too: the
// message's UUID is the field id, its payload the field data, and its metadata type and traceparent
// are fields as well. It leaves out other metadata and other fields.
type Marshaller struct{}

// Marshal returns the fields of a message's entry. A message without the metadata type is an error.
func (Marshaller) Marshal(_ string, msg *message.Message) (map[string]any, error) {
	values := map[string]any{
		fieldID:          msg.UUID,
		FieldType:        msg.Metadata.Get(FieldType),
		FieldTraceParent: msg.Metadata.Get(FieldTraceParent),
	}
	for field, value := range values {
		if value == "" {
			delete(values, field)
		}
	}
	if values[FieldType] == nil {
		return nil, errors.New("metadata type is missing; set what kind of message it is")
	}
	values[fieldData] = []byte(msg.Payload)
	return values, nil
}

// Unmarshal returns the message of an entry. It never fails, because an error would end the
// subscription for good: a message of a bad entry has no type or no payload.
func (Marshaller) Unmarshal(values map[string]any) (*message.Message, error) {
	text := func(field string) string {
		s, _ := values[field].(string)
		return s
	}
	msg := message.NewMessage(text(fieldID), []byte(text(fieldData)))
	for _, field := range []string{FieldType, FieldTraceParent} {
		if value := text(field); value != "" {
			msg.Metadata.Set(field, value)
		}
	}
	return msg, nil
}

// Event returns the event of a message. The message of an event audit.violation has an
// api.AuditEvent as its payload. For a message that is no event, Event returns an error:
// acknowledge it, because to deliver it again does not help.
func Event(msg *message.Message) (api.Event, error) {
	var e api.Event
	if err := json.Unmarshal(msg.Payload, &e); err != nil {
		return api.Event{}, fmt.Errorf("decode event %q: %w", msg.UUID, err)
	}
	if e.Type == "" || e.Type != msg.Metadata.Get(FieldType) {
		return api.Event{}, fmt.Errorf("decode event %q: its type is %q, but the entry's is %q",
			msg.UUID, e.Type, msg.Metadata.Get(FieldType))
	}
	return e, nil
}
