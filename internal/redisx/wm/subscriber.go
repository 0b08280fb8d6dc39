package wm

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"sync"
	"time"
	"unsafe"

	"github.com/ThreeDotsLabs/watermill/message"
	"github.com/redis/go-redis/v9"

	"github.com/bulkaction/bulkaction/internal/redisx"
	"github.com/bulkaction/bulkaction/internal/redisx/stream"
)

// Field names of a message's entry. type and traceparent are also the names of the message's
// metadata.
const (
	FieldType        = "type"
	FieldTraceParent = "traceparent"
	fieldData        = "data"
	fieldID          = "id"
)

// MetadataEntryID is the name of the metadata with the id of the message's stream entry.
const MetadataEntryID = "entry_id"

// SubscriberConfig names the consumer and sets the bounds of a Subscriber. Zero values mean the
// defaults, which the comments give after their last semicolon.
type SubscriberConfig struct {
	Group    string // name of the consumer group; required
	Consumer string // name of the consumer, unique for each process; required

	MaxInFlight int // most messages that are delivered and not yet acknowledged; 1000
	// most bytes of these messages, as far as sizes are known in advance; handlers have at most a
	// quarter of these bytes at once; 64 MiB
	MaxBytes int
	Block    time.Duration // longest wait of one read; redisx.MaxBlock
	MinIdle  time.Duration // an entry that was idle for this time is claimed; the owner renews after a third of it; 30s
	// time until a nacked message is delivered again; doubles each time, up to 32 times this; 250ms
	RedeliverAfter time.Duration
	CloseTimeout   time.Duration // how long Close waits for handlers; 30s
	DeleteOnAck    bool          // entries leave the stream when they are acknowledged
	Logger         *slog.Logger  // slog.Default
}

func (c *SubscriberConfig) setDefaults() {
	c.MaxInFlight = orDefault(c.MaxInFlight, 1000)
	c.MaxBytes = orDefault(c.MaxBytes, 64<<20)
	c.Block = orDefault(c.Block, redisx.MaxBlock)
	c.MinIdle = orDefault(c.MinIdle, 30*time.Second)
	c.RedeliverAfter = orDefault(c.RedeliverAfter, 250*time.Millisecond)
	c.CloseTimeout = orDefault(c.CloseTimeout, 30*time.Second)
	if c.Logger == nil {
		c.Logger = slog.Default()
	}
}

func orDefault[T int | time.Duration](value, def T) T {
	if value > 0 {
		return value
	}
	return def
}

// Subscriber is a watermill Subscriber that reads in batches. It delivers many messages
// concurrently, whatever their content, and acknowledges in batches. It delivers a nacked message
// again later, without limit. It claims the messages of dead consumers, and continues after an
// outage of Redis. Delivery is at least once.
type Subscriber struct {
	conn   *redisx.Conn
	reader *stream.Reader
	cfg    SubscriberConfig

	mu     sync.Mutex
	closed bool
	subs   map[string]*subscription // by stream
}

var _ message.Subscriber = (*Subscriber)(nil)

// NewSubscriber returns an error if the group or the consumer has no name. The Subscriber does not
// close conn.
func NewSubscriber(conn *redisx.Conn, cfg SubscriberConfig) (*Subscriber, error) {
	if cfg.Group == "" || cfg.Consumer == "" {
		return nil, errors.New("create subscriber: group and consumer need names")
	}
	cfg.setDefaults()
	return &Subscriber{
		conn:   conn,
		reader: stream.NewReader(conn, cfg.Group, cfg.Consumer),
		cfg:    cfg,
		subs:   map[string]*subscription{},
	}, nil
}

// Subscribe returns a channel with the stream's messages. The channel is closed when ctx ends or
// the Subscriber is closed. A stream can have one subscription at a time. A shutdown does not
// interrupt handlers: after ctx has ended, the messages' contexts end when all handlers are done,
// or after CloseTimeout.
func (s *Subscriber) Subscribe(ctx context.Context, stream string) (<-chan *message.Message, error) {
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.closed {
		return nil, fmt.Errorf("subscribe to stream %s: subscriber is closed", stream)
	}
	if old := s.subs[stream]; old != nil && !old.ended() {
		return nil, fmt.Errorf("subscribe to stream %s: already subscribed", stream)
	}
	ctx, stop := context.WithCancel(ctx)
	sub := newSubscription(s, stream, stop)
	s.subs[stream] = sub
	go sub.run(ctx)
	return sub.out, nil
}

// Close stops reading, waits up to CloseTimeout for the handlers, and acknowledges the messages
// that they finished. The other messages are delivered again, to this process or another. If Close
// is called several times, each call waits until the subscriptions have ended.
func (s *Subscriber) Close() error {
	s.mu.Lock()
	s.closed = true
	subs := make([]*subscription, 0, len(s.subs))
	for _, sub := range s.subs {
		sub.stop()
		subs = append(subs, sub)
	}
	s.mu.Unlock()

	var errs []error
	for _, sub := range subs {
		<-sub.done
		errs = append(errs, sub.err)
	}
	return errors.Join(errs...)
}

// OldestPending returns the id of the oldest pending entry of the stream's group, of any consumer;
// ok is false if there is none. It first sends the acknowledgements that this process holds back. A
// handler's own entry is pending while the handler runs: if OldestPending returns this id, no older
// entry is pending.
func (s *Subscriber) OldestPending(ctx context.Context, stream string) (entryID string, ok bool, err error) {
	s.mu.Lock()
	sub := s.subs[stream]
	s.mu.Unlock()
	if sub != nil { // entries that this process has acknowledged must not seem pending
		if err := sub.acks.Flush(ctx); err != nil {
			return "", false, err
		}
	}
	pending, err := s.conn.Cmd.XPendingExt(ctx, &redis.XPendingExtArgs{
		Stream: stream, Group: s.cfg.Group, Start: "-", End: "+", Count: 1,
	}).Result()
	if err != nil {
		return "", false, fmt.Errorf("find oldest pending entry of stream %s: %w", stream, err)
	}
	if len(pending) == 0 {
		return "", false, nil
	}
	return pending[0].ID, true, nil
}

// EntryOf returns the stream entry of a received message, as it was written. It returns false for a
// copy of the message that has another context.
func EntryOf(msg *message.Message) (stream.Entry, bool) {
	entry, ok := msg.Context().Value(entryKey{}).(stream.Entry)
	return entry, ok
}

type entryKey struct{}

// newMessage builds a message from an entry. It never fails: only the handler can reject an invalid
// message. The payload shares the entry's memory, so handlers may only read it.
func newMessage(ctx context.Context, e stream.Entry) *message.Message {
	id := e.Get(fieldID)
	if id == "" {
		id = e.ID
	}
	data := e.Get(fieldData)
	// #nosec G103: shares the entry's memory; handlers only read it
	msg := message.NewMessage(id, unsafe.Slice(unsafe.StringData(data), len(data)))
	msg.Metadata[MetadataEntryID] = e.ID
	for _, field := range []string{FieldType, FieldTraceParent} {
		if value := e.Get(field); value != "" {
			msg.Metadata[field] = value
		}
	}
	msg.SetContext(context.WithValue(ctx, entryKey{}, e))
	return msg
}
