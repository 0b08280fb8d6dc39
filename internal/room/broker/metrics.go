package broker

import (
	"context"
	"time"

	"github.com/bulkaction/bulkaction/internal/room/waitingroom"
	"github.com/bulkaction/bulkaction/internal/telemetry"
)

// metrics counts what the broker does in the metrics of package telemetry.
type metrics struct{ *telemetry.RoomMetrics }

func newMetrics(b *shared) metrics {
	m := telemetry.NewRoomMetrics(b.Tel.Meter)
	m.ShowGauges(b.Tel.Meter, func(ctx context.Context) int64 {
		ctx, cancel := context.WithTimeout(ctx, time.Second)
		defer cancel()
		return b.Conn.Cmd.XLen(ctx, b.Space.Dispatch(b.instance)).Val()
	})
	return metrics{m}
}

// entry counts what enter has answered to a visitor.
func (m metrics) entry(event string, e waitingroom.Entry) {
	switch {
	case e.New:
		m.Count(telemetry.RoomEntered, event, 1)
	case e.Number > 0:
		m.Count(telemetry.RoomReconnects, event, 1)
	}
	if e.New && e.Code == waitingroom.Ready {
		m.Count(telemetry.RoomPromoted, event, 1)
	}
}

// disconnected counts the users whom disconnect has removed.
func (m metrics) disconnected(event string, codes []waitingroom.Code) {
	n := map[waitingroom.Code]int{}
	for _, code := range codes {
		n[code]++
	}
	m.Count(telemetry.RoomLeft, event, n[waitingroom.Gone])
	m.Count(telemetry.RoomNoShows, event, n[waitingroom.NoShow])
}

// gauge shows the sizes of an event, as the views know them.
func (m metrics) gauge(s waitingroom.Snapshot, connections int, pace float64) {
	m.SetGauges(s.Event, telemetry.RoomGauges{
		Waiting: s.Waiting, Away: s.Away, Used: s.Used, Free: s.Free, Connections: int64(connections), Pace: pace,
	})
}
