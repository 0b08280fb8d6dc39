package broker

import (
	"context"
	"crypto/sha256"
	"encoding/hex"

	"go.opentelemetry.io/otel/attribute"
	"go.opentelemetry.io/otel/trace"

	"github.com/bulkaction/bulkaction/internal/room/waitingroom"
	"github.com/bulkaction/bulkaction/internal/telemetry"
)

// countEntry counts what enter has answered to a visitor.
func countEntry(m *telemetry.RoomMetrics, event string, e waitingroom.Entry) {
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

// countDisconnected counts the users whom disconnect has removed.
func countDisconnected(m *telemetry.RoomMetrics, event string, codes []waitingroom.Code) {
	n := map[waitingroom.Code]int{}
	for _, code := range codes {
		n[code]++
	}
	m.Count(telemetry.RoomLeft, event, n[waitingroom.Gone])
	m.Count(telemetry.RoomNoShows, event, n[waitingroom.NoShow])
}

// beginSpan begins a span about the user of a connection. Spans name users by a hash, because ids
// may be personal. A later span about the same connection links to the first one.
func (b *Broker) beginSpan(ctx context.Context, name string, c *connection) (context.Context, trace.Span) {
	var options []trace.SpanStartOption
	if c.span.IsSampled() {
		options = append(options, trace.WithLinks(trace.Link{SpanContext: c.span}))
	}
	ctx, span := b.tracer().Start(ctx, name, options...)
	if span.IsRecording() {
		span.SetAttributes(attribute.String("bulkaction.event", c.event),
			attribute.String("bulkaction.user", hashOf(c.user)))
	}
	return ctx, span
}

func (b *Broker) tracer() trace.Tracer { return b.Tel.TracerProvider.Tracer("broker") }

// hashOf returns 16 hexadecimal digits that stand for a user.
func hashOf(user string) string {
	sum := sha256.Sum256([]byte(user))
	return hex.EncodeToString(sum[:8])
}
