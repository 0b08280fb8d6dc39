package watcher

import (
	"context"
	"encoding/json"
	"fmt"
	"strings"

	"github.com/ThreeDotsLabs/watermill/message"
	"github.com/redis/go-redis/v9"

	"github.com/bulkaction/bulkaction/api"
	"github.com/bulkaction/bulkaction/internal/ledger"
	"github.com/bulkaction/bulkaction/internal/redisx/wm"
)

// eventBatch is how many events are published together. maxEventBatches is how many such batches
// one step publishes before it goes on with other work; together they are more than the events that
// the other work of one step adds, so that the outbox doesn't grow without bound.
const (
	eventBatch      = 20
	maxEventBatches = 50
)

// announce publishes the events of the outbox, oldest first, and removes them. It returns whether
// there were any. If the removal of published events fails, they are published again with the same
// ids.
func (p *partitionLoop) announce(ctx context.Context) (worked bool, err error) {
	for range maxEventBatches {
		entries, err := ledger.ReadOutbox(ctx, p.Conn.Cmd, p.p, eventBatch)
		if err != nil {
			return false, err
		}
		if len(entries) == 0 {
			break
		}
		if err := p.announceBatch(ctx, entries); err != nil {
			return false, err
		}
		worked = true
	}
	return worked, nil
}

// announceBatch publishes these entries of the outbox in their order and removes them. An entry
// that can't be turned into an event is quarantined and removed.
func (p *partitionLoop) announceBatch(ctx context.Context, entries []ledger.OutboxEntry) error {
	var msgs []*message.Message
	var unreadable []any
	ids := make([]string, len(entries))
	for i := range entries {
		e := &entries[i]
		ids[i] = e.ID
		msg, err := p.event(e)
		if err == nil {
			msgs = append(msgs, msg)
			continue
		}
		p.log.Warn("quarantined an unreadable event of the outbox", "entry", e.ID, "error", err)
		unreadable = append(unreadable, fmt.Sprintf("outbox %s: %v: %.1024q", e.ID, err, e.Text()))
	}
	if len(msgs) > 0 {
		if err := p.events.Publish(p.Space.Events(), msgs...); err != nil {
			return fmt.Errorf("publish events from %s on: %w", msgs[0].UUID, err)
		}
	}
	_, err := p.Conn.Cmd.TxPipelined(ctx, func(pipe redis.Pipeliner) error {
		if len(unreadable) > 0 {
			pipe.LPush(ctx, p.p.Quarantine(), unreadable...)
			pipe.LTrim(ctx, p.p.Quarantine(), 0, 999)
		}
		pipe.XDel(ctx, p.p.Outbox(), ids...)
		return nil
	})
	if err != nil {
		return fmt.Errorf("clear outbox: %w", err)
	}
	return nil
}

// publish publishes an event. The message carries data as JSON: e itself or a document that
// contains it.
func (p *partitionLoop) publish(e api.Event, data any) error {
	msg, err := encode(e, data)
	if err != nil {
		return err
	}
	if err := p.events.Publish(p.Space.Events(), msg); err != nil {
		return fmt.Errorf("publish event %s: %w", e.ID, err)
	}
	return nil
}

// encode makes the message of an event, with data as its JSON.
func encode(e api.Event, data any) (*message.Message, error) {
	encoded, err := json.Marshal(data)
	if err != nil {
		return nil, fmt.Errorf("encode event %s: %w", e.ID, err)
	}
	msg := message.NewMessage(e.ID, encoded)
	msg.Metadata.Set(wm.FieldType, e.Type)
	return msg, nil
}

// event makes the message of an outbox entry. It shows the group as it was when it entered the
// status.
func (p *partitionLoop) event(e *ledger.OutboxEntry) (*message.Message, error) {
	if e.Err != nil {
		return nil, e.Err
	}
	view, err := p.store.View(&e.After, e.At)
	if err != nil {
		p.log.Warn("published an event without the group's aggregate", "group", e.Group, "error", err)
	}
	status := strings.ToLower(string(e.Status))
	event := api.Event{ID: e.Group + "." + e.Round + "." + status, Type: "group." + status, At: e.At, Group: &view}
	return encode(event, event)
}
