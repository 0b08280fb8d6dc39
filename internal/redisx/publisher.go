package redisx

import (
	"errors"
	"fmt"

	"github.com/ThreeDotsLabs/watermill-redisstream/pkg/redisstream"
	"github.com/ThreeDotsLabs/watermill/message"
	"github.com/redis/go-redis/v9"
)

// NewPublisher is watermill's Publisher to streams, as flat entries that redis-cli can write and read: the
// message's UUID is the field id, its payload is data, and its metadata gives type, which must be there,
// and traceparent; other metadata is left out. maxLen bounds streams, by name, to about that many entries; a
// stream that carries jobs must not be bounded. Publishing is not retried: after an error that IsAmbiguous
// the same message may be published again, since consumers know it by its id. Close leaves conn open.
func NewPublisher(conn *Conn, maxLen map[string]int64) (message.Publisher, error) {
	p, err := redisstream.NewPublisher(redisstream.PublisherConfig{
		Client:     keepOpen{conn.Cmd},
		Marshaller: flat{},
		Maxlens:    maxLen,
	}, nil)
	if err != nil {
		return nil, fmt.Errorf("create publisher: %w", err)
	}
	return p, nil
}

// keepOpen keeps watermill from closing the client that all share.
type keepOpen struct{ redis.UniversalClient }

func (keepOpen) Close() error { return nil }

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
