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

// Fields of a message's entry. Type and traceparent are also the names of the message's metadata.
const (
	FieldType        = "type"
	FieldTraceParent = "traceparent"
	fieldData        = "data"
	fieldID          = "id"
)

// MetadataEntryID is the metadata under which a subscribed message carries its entry's id.
const MetadataEntryID = "entry_id"

// SubscriberConfig says as whom to read, and how much. Zero values take the defaults.
type SubscriberConfig struct {
	Group    string
	Consumer string // unique to the process

	MaxInFlight int // messages handed out and not yet acknowledged; 1000
	// of them together, as far as sizes can be foreseen, a quarter of it in work at once; 64 MiB
	MaxBytes int
	Block    time.Duration // longest wait of one read; MaxBlock
	MinIdle  time.Duration // an entry nobody touched for so long is taken over; renewed at a third of it; 30s
	// a nacked message is handed out again after this, then after up to 32 times as long; 250ms
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

// Subscriber is watermill's Subscriber over the batch reader. It hands out many messages at
// once, whatever they hold; it acknowledges in batches; it hands a nacked message out again
// later, for ever; it takes over what dead consumers left and outlives a Redis that is away.
// Delivery is at least once.
type Subscriber struct {
	conn   *redisx.Conn
	reader *stream.Reader
	cfg    SubscriberConfig

	mu     sync.Mutex
	closed bool
	subs   map[string]*subscription // by stream
}

var _ message.Subscriber = (*Subscriber)(nil)

// NewSubscriber returns an error when the group or the consumer has no name. The Subscriber does
// not close conn.
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

// Subscribe hands out the stream's messages until ctx ends or the Subscriber is closed, then
// closes the channel. A stream can be subscribed to once at a time. A message's context outlives
// ctx until its handler is done or CloseTimeout has passed, so that shutting down does not
// interrupt handlers.
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

// Close stops reading, waits up to CloseTimeout for the handlers, acknowledges what they finished
// and returns. What they did not is delivered again, here or elsewhere. Each call waits.
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

// OldestPending returns the id of the oldest entry of the stream that some consumer of the group
// holds; ok is false when there is none. A handler's own entry is pending while it works, so
// nothing older is left exactly when its own id is returned.
func (s *Subscriber) OldestPending(ctx context.Context, stream string) (entryID string, ok bool, err error) {
	s.mu.Lock()
	sub := s.subs[stream]
	s.mu.Unlock()
	if sub != nil { // what is acknowledged here must not seem pending
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

// EntryOf returns the stream entry that a subscribed message was made from, as it was written. A
// copy of a message keeps it only if it keeps the message's context.
func EntryOf(msg *message.Message) (stream.Entry, bool) {
	entry, ok := msg.Context().Value(entryKey{}).(stream.Entry)
	return entry, ok
}

type entryKey struct{}

// newMessage never fails: it hands on whatever an entry holds, since only the handler
// can reject it.
func newMessage(ctx context.Context, e stream.Entry) *message.Message {
	id := e.Get(fieldID)
	if id == "" {
		id = e.ID
	}
	data := e.Get(fieldData)
	// #nosec G103: the entry's memory, which handlers only read
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
