package broker

import (
	"context"
	"crypto/sha256"
	"encoding/hex"

	"go.opentelemetry.io/otel/attribute"
	"go.opentelemetry.io/otel/trace"
)

// beginSpan begins a span about the user of a connection. Spans name users by a hash, because ids
// may be personal. A later span about the same connection links to the first one.
func (b *shared) beginSpan(ctx context.Context, name string, c *connection) (context.Context, trace.Span) {
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

func (b *shared) tracer() trace.Tracer { return b.Tel.TracerProvider.Tracer("broker") }

// hashOf returns 16 hexadecimal digits that stand for a user.
func hashOf(user string) string {
	sum := sha256.Sum256([]byte(user))
	return hex.EncodeToString(sum[:8])
}
