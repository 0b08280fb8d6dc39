package broker

import (
	"context"

	"github.com/bulkaction/bulkaction/internal/room/position"
	"github.com/bulkaction/bulkaction/internal/room/waitingroom"
	"github.com/bulkaction/bulkaction/internal/telemetry"
)

// source reads one partition from Redis for the views of its events. It also counts how often a
// view is loaded, and adds to lookups each event whose number of seats is not known yet.
type source struct {
	position.Source
	broker *shared
}

func (s source) Snapshot(ctx context.Context, events ...string) (waitingroom.Snapshots, error) {
	snapshots, err := s.Source.Snapshot(ctx, events...)
	for _, e := range snapshots.Events {
		if e.Settings.SeatsPending {
			s.broker.lookups.add(e.Event)
		}
	}
	return snapshots, err
}

func (s source) Numbers(ctx context.Context, event string, yield func(numbers []int64)) error {
	s.broker.metrics.Count(telemetry.RoomResyncs, event, 1)
	return s.Source.Numbers(ctx, event, yield)
}
