package broker

import (
	"context"
	"time"

	"go.opentelemetry.io/otel/attribute"

	"github.com/bulkaction/bulkaction/api"
	"github.com/bulkaction/bulkaction/internal/redisx/call"
	"github.com/bulkaction/bulkaction/internal/redisx/keyspace"
	"github.com/bulkaction/bulkaction/internal/room/waitingroom"
	"github.com/bulkaction/bulkaction/internal/telemetry"
)

const (
	// dueEvents is the largest number of due events that one step of the promoter handles, so that
	// it soon reads the list of due events anew.
	dueEvents = 64
	// postponed is the pause of an event after Redis has answered one of its scripts with an error.
	postponed = 5 * time.Second
	// leastWait is the shortest wait between two steps of the promoter, unless something is due at
	// once. Meanwhile an event with a limited promotion rate gets permits, so that one call
	// promotes several users.
	leastWait = 5 * time.Millisecond
)

// promoteDue does what is due in the events of a partition: it ends places and slots whose time is over,
// dissolves the queues of closed events, and promotes users. Of one event it ends at most 200 of
// them and promotes at most 200 users before the next event, so that no event waits for another
// one's queue. It returns how long nothing is due in the partition, at most PromoteInterval.
func (b *Broker) promoteDue(ctx context.Context, p keyspace.Partition) (time.Duration, error) {
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

// promoteEvent does what is due in one event. It returns the time until something is due there
// again; negative: nothing, before another script changes the event.
func (b *Broker) promoteEvent(ctx context.Context, p keyspace.Partition, event string) (time.Duration, error) {
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
