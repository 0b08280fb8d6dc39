package watcher

import (
	"context"
	"encoding/json"
	"fmt"
	"strings"
	"time"

	"github.com/ThreeDotsLabs/watermill/message"
	"github.com/redis/go-redis/v9"

	"github.com/bulkaction/bulkaction/api"
	"github.com/bulkaction/bulkaction/internal/access/auth"
	"github.com/bulkaction/bulkaction/internal/jobs/ledger"
	"github.com/bulkaction/bulkaction/internal/redisx/call"
	"github.com/bulkaction/bulkaction/internal/redisx/stream"
	"github.com/bulkaction/bulkaction/internal/redisx/wm"
)

// eventBatch is how many events are published together. maxEventBatches is how many such batches
// one step publishes before it goes on with other work; together they are more than the events that
// the other work of one step adds, so that the outbox doesn't grow without bound.
const (
	eventBatch      = 20
	maxEventBatches = 50
)

// outbox publishes the events of one partition that scripts have stored in its outbox.
type outbox struct{ *partition }

// publishAll publishes the events of the outbox, oldest first, and removes them: up to 1,000 in one
// call (see maxEventBatches). It returns whether there were any. If the removal of published events
// fails, they are published again with the same ids.
func (o *outbox) publishAll(ctx context.Context) (worked bool, err error) {
	for range maxEventBatches {
		entries, err := ledger.ReadOutbox(ctx, o.Conn.Cmd, o.Partition, eventBatch)
		if err != nil {
			return false, err
		}
		if len(entries) == 0 {
			break
		}
		if err := o.publishBatch(ctx, entries); err != nil {
			return false, err
		}
		worked = true
	}
	return worked, nil
}

// publishBatch publishes these entries of the outbox in their order and removes them. An entry
// that can't be turned into an event is quarantined and removed. If it can't be quarantined, it
// stays in the outbox; then publishBatch returns an error after it has removed the others.
func (o *outbox) publishBatch(ctx context.Context, entries []ledger.OutboxEntry) error {
	var msgs []*message.Message
	var done, unreadable []string
	var add []func(redis.Pipeliner)
	quarantine := stream.Quarantine{Key: o.Quarantine(), Source: "outbox"}
	for i := range entries {
		e := &entries[i]
		msg, err := o.event(e)
		if err == nil {
			msgs, done = append(msgs, msg), append(done, e.ID)
			continue
		}
		o.log.Warn("unreadable event of the outbox", "entry", e.ID, "error", err)
		unreadable = append(unreadable, e.ID)
		add = append(add, func(pipe redis.Pipeliner) { quarantine.AddText(ctx, pipe, e.ID, err, e.Text()) })
	}
	if len(msgs) > 0 {
		if err := o.publish(msgs...); err != nil {
			return err
		}
	}
	_, quarantineErr := o.Conn.Cmd.Pipelined(ctx, func(pipe redis.Pipeliner) error {
		for _, add := range add {
			add(pipe)
		}
		return nil
	})
	if quarantineErr != nil {
		quarantineErr = fmt.Errorf("quarantine events of the outbox: %w", quarantineErr)
	} else {
		done = append(done, unreadable...)
	}
	if len(done) > 0 {
		if err := o.Conn.Cmd.XDel(ctx, o.Outbox(), done...).Err(); err != nil {
			return fmt.Errorf("clear outbox: %w", err)
		}
	}
	return quarantineErr
}

// event returns the message for the stream events, made from an outbox entry. It contains the group
// as it was when it entered its new status, without its aggregate if that can't be read.
func (o *outbox) event(e *ledger.OutboxEntry) (*message.Message, error) {
	if e.Err != nil {
		return nil, e.Err
	}
	view, err := o.store.View(&e.After, e.At)
	if err != nil {
		o.log.Warn("published an event without the group's aggregate", "group", e.Group, "error", err)
	}
	status := strings.ToLower(string(e.Status))
	event := api.Event{ID: e.Group + "." + e.Round + "." + status, Type: "group." + status, At: e.At, Group: &view}
	return encode(event, event)
}

// publish publishes events, in their order.
func (p *partition) publish(events ...*message.Message) error {
	if err := p.events.Publish(p.Space.Events(), events...); err != nil {
		return fmt.Errorf("publish events from %s on: %w", events[0].UUID, err)
	}
	return nil
}

// encode returns the message of an event, with data as its JSON.
func encode(e api.Event, data any) (*message.Message, error) {
	encoded, err := json.Marshal(data)
	if err != nil {
		return nil, fmt.Errorf("encode event %s: %w", e.ID, err)
	}
	return wm.NewMessage(e.ID, e.Type, encoded), nil
}

// publishViolation publishes a violation and logs it. The event shows the group of the violation,
// unless the group can't be read: that may be what is wrong with it.
func (p *partition) publishViolation(ctx context.Context, id string, v api.Violation) error {
	e := api.AuditEvent{Event: api.Event{ID: id, Type: "audit.violation", At: time.Now().UTC()}, Violation: v}
	if v.Group != "" {
		shown, err := p.store.Group(auth.Trust(ctx), v.Group)
		switch {
		case err == nil:
			e.Group = &shown
		case call.IsUnavailable(err) || ctx.Err() != nil:
			return err
		default: // the group can't be read, which may be the violation: publish without it
		}
	}
	msg, err := encode(e.Event, e)
	if err != nil {
		return err
	}
	if err := p.publish(msg); err != nil {
		return err
	}
	log := p.log
	if v.Group != "" {
		log = log.With("group", v.Group)
	}
	if v.Ordinal != nil {
		log = log.With("ordinal", *v.Ordinal)
	}
	log.Error("the data in redis breaks a law", "law", v.Law, "detail", v.Detail, "event", id)
	return nil
}
