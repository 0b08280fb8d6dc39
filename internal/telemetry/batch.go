package telemetry

import (
	"context"
	"time"

	"go.opentelemetry.io/otel/attribute"
	"go.opentelemetry.io/otel/trace"
)

// Batch records one operation on several jobs: a span in the trace of each sampled job, and a span
// of the batch that links to them.
type Batch struct {
	tel                    *Telemetry
	operation, destination string
	start                  time.Time
	links                  []trace.Link
}

// NewBatch returns the batch of an operation on a destination (a stream or a queue). operation is
// this system's own name of it, for example "admit"; the spans are named after it.
func (t *Telemetry) NewBatch(operation, destination string, start time.Time) Batch {
	return Batch{tel: t, operation: operation, destination: destination, start: start}
}

// Job records the span of one job; see [Telemetry.StartJob]. It sets the span's name, and adds the
// attributes of the operation to attrs. A job that is not sampled costs nothing.
func (b *Batch) Job(ctx context.Context, s JobSpan, attrs func() []attribute.KeyValue) {
	if s.Parent == "" {
		return
	}
	s.Name = b.operation
	_, span := b.tel.StartJob(ctx, s, func() []attribute.KeyValue {
		return append(MessagingAttributes(OpProcess, b.operation, b.destination), attrs()...)
	})
	span.End()
	b.links = append(b.links, trace.Link{SpanContext: span.SpanContext()})
}

// End records the span of the batch if one of its jobs is sampled. jobs is the number of all jobs.
func (b *Batch) End(ctx context.Context, jobs int) {
	if len(b.links) == 0 {
		return
	}
	attributes := append(MessagingAttributes(OpProcess, b.operation, b.destination), MessageCount(jobs))
	_, span := b.tel.Tracer.Start(ctx, b.operation+" batch", trace.WithTimestamp(b.start),
		trace.WithLinks(b.links...), trace.WithAttributes(attributes...))
	span.End()
}
