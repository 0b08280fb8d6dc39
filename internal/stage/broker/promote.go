package broker

import (
	"context"
	"time"

	"go.opentelemetry.io/otel/attribute"

	"github.com/bulkaction/bulkaction/api"
	"github.com/bulkaction/bulkaction/internal/redisx/call"
	"github.com/bulkaction/bulkaction/internal/redisx/keyspace"
	"github.com/bulkaction/bulkaction/internal/telemetry"
	"github.com/bulkaction/bulkaction/internal/waitingroom"
)

const (
	// dueEvents is the number of events in which one step does something, so that the promoter
	// looks at the newest list of due events soon.
	dueEvents = 64
	// postponed is how long an event waits whose script has failed.
	postponed = 5 * time.Second
	// leastWait collects the permits of some milliseconds: one call promotes several users.
	leastWait = 5 * time.Millisecond
)

// promoter does what is due in events: it ends places and slots, and promotes users.
type promoter struct{ *shared }

// step does what is due in the events of a partition: it ends places and slots, dissolves
// closed queues, and promotes. It handles at most 200 users of an event before the next one, so
// that no event waits for another one's queue.
func (b promoter) step(ctx context.Context, p keyspace.Partition) (time.Duration, error) {
	events, wait, err := b.rooms.Due(ctx, p, dueEvents)
	if err != nil {
		return 0, err
	}
	if wait < 0 || wait > b.cfg.PromoteInterval {
		wait = b.cfg.PromoteInterval
	}
	for _, event := range events {
		next, err := b.promoteEvent(ctx, p, event)
		switch {
		case call.IsUnavailable(err) || ctx.Err() != nil:
			return 0, err
		case err != nil:
			b.Tel.Log.Error("a script of an event failed, the event waits", "event", event, "wait", postponed,
				"error", err)
			if err := b.rooms.Postpone(ctx, p, event, postponed); err != nil {
				return 0, err
			}
		case next >= 0:
			wait = min(wait, next)
		}
	}
	if wait > 0 {
		wait = max(wait, leastWait)
	}
	return wait, nil
}

// promoteEvent does what is due in one event. It returns how long nothing more is due, negative:
// for ever.
func (b promoter) promoteEvent(ctx context.Context, p keyspace.Partition, event string) (time.Duration, error) {
	expired, err := b.rooms.Expire(ctx, p, event)
	if err != nil {
		return 0, err
	}
	b.metrics.Count(telemetry.RoomExpired, event, expired.N-expired.NoShows)
	b.metrics.Count(telemetry.RoomNoShows, event, expired.NoShows)
	switch expired.Mode {
	case "":
		return -1, nil // it was deleted
	case api.ModeClosed, api.ModeSoldOut:
		_, wait, err := b.rooms.Forget(ctx, event)
		return wait, err
	}
	ctx, span := b.tracer().Start(ctx, "promote")
	defer span.End()
	promoted, err := b.rooms.Promote(ctx, event)
	if err != nil {
		return 0, err
	}
	span.SetAttributes(attribute.String("bulkaction.event", event), attribute.Int("bulkaction.users", promoted.N))
	b.metrics.Count(telemetry.RoomPromoted, event, promoted.N)
	if expired.N == waitingroom.MostUsers {
		return 0, nil
	}
	return promoted.Wait, nil
}
