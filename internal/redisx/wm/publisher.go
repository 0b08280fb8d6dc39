// Package wm implements watermill's Publisher with our connection. It hides the form of a message
// in a stream entry.
package wm

import (
	"context"
	"errors"
	"fmt"
	"sync/atomic"

	"github.com/ThreeDotsLabs/watermill-redisstream/pkg/redisstream"
	"github.com/ThreeDotsLabs/watermill/message"
	"github.com/redis/go-redis/v9"

	"github.com/bulkaction/bulkaction/internal/redisx"
)

// Field names of a message's entry. type and traceparent are also the names of the message's
// metadata.
const (
	FieldType        = "type"
	FieldTraceParent = "traceparent"
	fieldData        = "data"
	fieldID          = "id"
)

// NewPublisher returns a watermill Publisher that writes flat stream entries, which redis-cli can
// read and write: the message's UUID is the field id, its payload the field data, and its metadata
// type (required) and traceparent are fields too; other metadata is left out. maxLen has the number
// of entries at which the stream of that name is trimmed, roughly; a stream that carries jobs must
// not be trimmed. The messages of one call are published in order, all or none. Publishing is not
// retried: after an error the caller may publish the same messages again, because consumers
// recognize them by their ids. Close leaves conn open.
func NewPublisher(conn *redisx.Conn, maxLen map[string]int64) (message.Publisher, error) {
	p := &publisher{conn: conn, cfg: redisstream.PublisherConfig{Marshaller: flat{}, Maxlens: maxLen}}
	var err error
	if p.single, err = p.over(conn.Cmd); err != nil {
		return nil, err
	}
	return p, nil
}

// publisher sends the messages of one call in one round trip. watermill's own publisher waits for
// the reply to each message.
type publisher struct {
	conn   *redisx.Conn
	cfg    redisstream.PublisherConfig
	single message.Publisher
	closed atomic.Bool
}

func (p *publisher) Publish(topic string, msgs ...*message.Message) error {
	switch {
	case p.closed.Load():
		return errors.New("publisher is closed")
	case len(msgs) == 0:
		return nil
	case len(msgs) == 1:
		return p.single.Publish(topic, msgs[0])
	}
	// A transaction, because no message may be published if an earlier one of the call is refused.
	tx := p.conn.Cmd.TxPipeline()
	together, err := p.over(queue{p.conn.Cmd, tx})
	if err != nil {
		return err
	}
	if err := together.Publish(topic, msgs...); err != nil {
		return err
	}
	cmds, err := tx.Exec(msgs[0].Context())
	// the message's own command has the reason; the transaction's error only says that there is one
	for i, cmd := range cmds {
		if cmd.Err() != nil {
			return fmt.Errorf("publish message %s to stream %s: %w", msgs[i].UUID, topic, cmd.Err())
		}
	}
	return err
}

func (p *publisher) Close() error {
	p.closed.Store(true)
	return nil
}

// over returns watermill's Publisher that uses the given client.
func (p *publisher) over(client redis.UniversalClient) (message.Publisher, error) {
	cfg := p.cfg
	cfg.Client = client
	w, err := redisstream.NewPublisher(cfg, nil)
	if err != nil {
		return nil, fmt.Errorf("create publisher: %w", err)
	}
	return w, nil
}

// queue is a client that adds XADD commands to a pipeline instead of sending them.
type queue struct {
	redis.UniversalClient
	pipe redis.Pipeliner
}

func (q queue) XAdd(ctx context.Context, a *redis.XAddArgs) *redis.StringCmd {
	return q.pipe.XAdd(ctx, a)
}

type flat struct{}

func (flat) Marshal(_ string, msg *message.Message) (map[string]any, error) {
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
