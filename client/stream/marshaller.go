// Package stream follows the events of an installation with watermill. It hides the form of a
// message in a stream entry, and which settings watermill's subscriber needs, so that neither a bad
// entry nor an outage of Redis ends a subscription.
package stream

import (
	"encoding/json"
	"errors"
	"fmt"

	"github.com/ThreeDotsLabs/watermill/message"

	"github.com/bulkaction/bulkaction/api"
)

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
