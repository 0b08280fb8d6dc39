package watcher

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"strconv"
	"strings"
	"time"

	"github.com/ThreeDotsLabs/watermill/message"
	"github.com/redis/go-redis/v9"

	"github.com/bulkaction/bulkaction/api"
	"github.com/bulkaction/bulkaction/internal/redisx/call"
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
		entries, err := p.conn.Cmd.XRangeN(ctx, p.p.Outbox(), "-", "+", eventBatch).Result()
		if err != nil {
			return false, fmt.Errorf("read outbox: %w", err)
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
func (p *partitionLoop) announceBatch(ctx context.Context, entries []redis.XMessage) error {
	details, err := p.readDetails(ctx, entries)
	if err != nil {
		return err
	}
	var msgs []*message.Message
	var unreadable []any
	ids := make([]string, len(entries))
	for i, e := range entries {
		ids[i] = e.ID
		event, err := p.event(e, details)
		if err == nil {
			var msg *message.Message
			if msg, err = encode(event, event); err == nil {
				msgs = append(msgs, msg)
				continue
			}
		}
		p.log.Warn("quarantined an unreadable event of the outbox", "entry", e.ID, "error", err)
		unreadable = append(unreadable, fmt.Sprintf("outbox %s: %v: %.1024q", e.ID, err, fmt.Sprint(e.Values)))
	}
	if len(msgs) > 0 {
		if err := p.events.Publish(p.space.Events(), msgs...); err != nil {
			return fmt.Errorf("publish events from %s on: %w", msgs[0].UUID, err)
		}
	}
	_, err = p.conn.Cmd.TxPipelined(ctx, func(pipe redis.Pipeliner) error {
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
	if err := p.events.Publish(p.space.Events(), msg); err != nil {
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

// groupDetails holds the replies that an event needs beside the snapshot in its outbox entry: the
// group's error codes and its partial aggregates.
type groupDetails struct{ codes, aggregate *redis.MapStringStringCmd }

// readDetails reads the details of each group that these entries name, in one round trip. An error
// of a single group is left in its replies, so that only the events of this group fail.
func (p *partitionLoop) readDetails(ctx context.Context, entries []redis.XMessage) (map[string]groupDetails, error) {
	details := map[string]groupDetails{}
	_, err := p.conn.Cmd.Pipelined(ctx, func(pipe redis.Pipeliner) error {
		for _, e := range entries {
			id, _ := e.Values["group"].(string)
			if _, ok := details[id]; !ok {
				details[id] = groupDetails{pipe.HGetAll(ctx, p.p.Codes(id)), pipe.HGetAll(ctx, p.p.Aggregate(id))}
			}
		}
		return nil
	})
	if err != nil && (call.IsUnavailable(err) || ctx.Err() != nil) {
		return nil, err
	}
	return details, nil
}

// event makes the event of an outbox entry. It shows the group's hash as it was at the transition.
// Codes and aggregate are read now: until a group has ended they may be newer than the transition,
// and afterwards they no longer change in this round.
func (p *partitionLoop) event(e redis.XMessage, details map[string]groupDetails) (api.Event, error) {
	text := func(field string) string { v, _ := e.Values[field].(string); return v }
	hash, err := readSnapshot(text("snapshot"))
	if err != nil {
		return api.Event{}, fmt.Errorf("read snapshot: %w", err)
	}
	id := text("group")
	group := details[id]
	if err := errors.Join(group.codes.Err(), group.aggregate.Err()); err != nil {
		return api.Event{}, err
	}
	at, err := strconv.ParseInt(text("at"), 10, 64)
	if err != nil {
		return api.Event{}, fmt.Errorf("read time: %w", err)
	}
	view, err := p.store.View(hash, group.codes.Val(), group.aggregate.Val(), time.UnixMilli(at))
	if err != nil {
		p.log.Warn("published an event without the group's aggregate", "group", id, "error", err)
	}
	state := strings.ToLower(text("status"))
	return api.Event{
		ID: id + "." + text("round") + "." + state, Type: "group." + state, At: time.UnixMilli(at).UTC(), Group: &view,
	}, nil
}
