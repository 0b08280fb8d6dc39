// Package wm implements watermill's Publisher and Subscriber with a connection of package redisx.
// It hides that the messages of one call share a round trip, and that read messages are deleted.
package wm

import (
	"context"
	"errors"
	"fmt"
	"sync/atomic"

	"github.com/ThreeDotsLabs/watermill-redisstream/pkg/redisstream"
	"github.com/ThreeDotsLabs/watermill/message"
	"github.com/redis/go-redis/v9"

	"github.com/bulkaction/bulkaction/client/stream"
	"github.com/bulkaction/bulkaction/internal/redisx"
)

// NewMessage returns a message with this id, type and data. It publishes nothing.
func NewMessage(id, typ string, data []byte) *message.Message {
	msg := message.NewMessage(id, data)
	msg.Metadata.Set(stream.FieldType, typ)
	return msg
}

// NewPublisher returns a watermill Publisher that writes the entries of stream.Marshaller. The
// messages of one call are published in order, all or none. Publishing is not retried: after an
// error the caller may publish the same messages again, because consumers recognize them by their
// ids. Close leaves conn open.
func NewPublisher(conn *redisx.Conn) (message.Publisher, error) {
	p := &publisher{conn: conn}
	var err error
	if p.single, err = over(conn.Cmd); err != nil {
		return nil, err
	}
	return p, nil
}

// publisher sends the messages of one call in one round trip. watermill's own publisher waits for
// the reply to each message.
type publisher struct {
	conn   *redisx.Conn
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
	// Use a transaction: if Redis refuses one message of the call, no later one may be published.
	tx := p.conn.Cmd.TxPipeline()
	together, err := over(queue{p.conn.Cmd, tx})
	if err != nil {
		return err
	}
	if err := together.Publish(topic, msgs...); err != nil {
		return err
	}
	cmds, err := tx.Exec(msgs[0].Context())
	// Return the error of the refused message's own command: the transaction's error says only that
	// a command failed.
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

// over returns watermill's own Publisher on top of the given Redis client.
func over(client redis.UniversalClient) (message.Publisher, error) {
	cfg := redisstream.PublisherConfig{Client: client, Marshaller: stream.Marshaller{}}
	w, err := redisstream.NewPublisher(cfg, nil)
	if err != nil {
		return nil, fmt.Errorf("create publisher: %w", err)
	}
	return w, nil
}

// queue is a Redis client for watermill's Publisher: it adds XADD commands to a pipeline instead of
// sending them.
type queue struct {
	redis.UniversalClient
	pipe redis.Pipeliner
}

func (q queue) XAdd(ctx context.Context, a *redis.XAddArgs) *redis.StringCmd {
	return q.pipe.XAdd(ctx, a)
}
