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
	"github.com/bulkaction/bulkaction/internal/redisx"
)

// announce publishes what lies in the outbox. An event that is published twice, because its removal
// failed, has the same id.
func (p *partition) announce(ctx context.Context) (bool, error) {
	entries, err := p.conn.Cmd.XRangeN(ctx, p.p.Outbox(), "-", "+", 50).Result()
	if err != nil {
		return false, fmt.Errorf("read outbox: %w", err)
	}
	for _, e := range entries {
		event, err := p.event(ctx, e)
		if redisx.IsUnavailable(err) || ctx.Err() != nil {
			return false, err
		}
		if err == nil {
			err = p.publish(event, event)
			if _, unreadable := errors.AsType[*json.MarshalerError](err); err != nil && !unreadable {
				return false, err
			}
		}
		_, clearErr := p.conn.Cmd.TxPipelined(ctx, func(pipe redis.Pipeliner) error {
			if err != nil {
				p.log.Warn("set an unreadable event aside", "entry", e.ID, "error", err)
				pipe.LPush(ctx, p.p.Garbage(), fmt.Sprintf("outbox %s: %v: %.1024q", e.ID, err, fmt.Sprint(e.Values)))
				pipe.LTrim(ctx, p.p.Garbage(), 0, 999)
			}
			pipe.XDel(ctx, p.p.Outbox(), e.ID)
			return nil
		})
		if clearErr != nil {
			return false, fmt.Errorf("clear outbox: %w", clearErr)
		}
	}
	return len(entries) > 0, nil
}

// publish sends an event in the form that data has.
func (p *partition) publish(e api.Event, data any) error {
	encoded, err := json.Marshal(data)
	if err != nil {
		return fmt.Errorf("encode event %s: %w", e.ID, err)
	}
	msg := message.NewMessage(e.ID, encoded)
	msg.Metadata.Set(redisx.FieldType, e.Type)
	if err := p.events.Publish(p.space.Events(), msg); err != nil {
		return fmt.Errorf("publish event %s: %w", e.ID, err)
	}
	return nil
}

// event shows the group as it was at the transition; its aggregate and codes do not change after the last.
func (p *partition) event(ctx context.Context, e redis.XMessage) (api.Event, error) {
	text := func(field string) string { v, _ := e.Values[field].(string); return v }
	var flat []string
	if err := json.Unmarshal([]byte(text("snapshot")), &flat); err != nil {
		return api.Event{}, fmt.Errorf("read snapshot: %w", err)
	}
	hash := make(map[string]string, len(flat)/2)
	for i := 0; i+1 < len(flat); i += 2 {
		hash[flat[i]] = flat[i+1]
	}
	id := text("group")
	var codes, aggregate *redis.MapStringStringCmd
	_, err := p.conn.Cmd.Pipelined(ctx, func(pipe redis.Pipeliner) error {
		codes, aggregate = pipe.HGetAll(ctx, p.p.Codes(id)), pipe.HGetAll(ctx, p.p.Aggregate(id))
		return nil
	})
	if err != nil {
		return api.Event{}, err
	}
	at, err := strconv.ParseInt(text("at"), 10, 64)
	if err != nil {
		return api.Event{}, fmt.Errorf("read time: %w", err)
	}
	view, err := p.store.View(hash, codes.Val(), aggregate.Val(), time.UnixMilli(at))
	if err != nil {
		p.log.Warn("announced a group without its aggregate", "group", id, "error", err)
	}
	state := strings.ToLower(text("status"))
	return api.Event{
		ID: id + "." + text("round") + "." + state, Type: "group." + state, At: time.UnixMilli(at).UTC(), Group: &view,
	}, nil
}
