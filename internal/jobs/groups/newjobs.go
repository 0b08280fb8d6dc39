package groups

import (
	"context"
	"slices"
	"time"

	"go.opentelemetry.io/otel/attribute"
	"go.opentelemetry.io/otel/trace"

	"github.com/bulkaction/bulkaction/internal/messages"
	"github.com/bulkaction/bulkaction/internal/telemetry"
)

// newJobs returns the jobs of a request or message, each with a trace context of its own, and
// records spans. A job with its own traceparent, or alone in its request or message, continues the
// producer's trace. Every other job, and each job of a message without a traceparent, starts a
// trace; it is linked to the producer's if that is known.
func (s *access) newJobs(ctx context.Context, tenant, group string, jobs []messages.Job, o Origin) []messages.Job {
	message := o.TraceParent
	if !o.Published {
		message = s.recordSendSpan(ctx, tenant, group, o.TraceParent, o.At, len(jobs))
	}
	link := telemetry.ParseTraceParent(message)
	fresh := slices.Clone(jobs)
	for i := range fresh {
		j := &fresh[i]
		attrs := func() []attribute.KeyValue {
			a := telemetry.MessagingAttributes(telemetry.OpReceive, "ingest", s.space.Ingest())
			return append(a, telemetry.JobAttributes(tenant, group, -1, 0)...)
		}
		switch {
		case j.TraceParent != "" && !o.Published:
			parent := s.recordSendSpan(ctx, tenant, group, j.TraceParent, o.At, 1)
			j.TraceParent = s.tel.ContinueJobTrace(parent, "ingest", o.At, attrs)
		case j.TraceParent != "":
			j.TraceParent = s.tel.ContinueJobTrace(j.TraceParent, "ingest", o.At, attrs)
		case len(jobs) == 1 && message != "":
			j.TraceParent = s.tel.ContinueJobTrace(message, "ingest", o.At, attrs)
		default:
			j.TraceParent = s.tel.NewJobTrace(link, "ingest", o.At, attrs)
		}
	}
	return fresh
}

// recordSendSpan records the span "send ingest" of a request over HTTP, or of one of its jobs that
// has a traceparent of its own. The span lasts from the time at until now. The producers of
// messages record this span themselves. It returns the traceparent that the jobs' traces continue
// or link to.
func (s *access) recordSendSpan(ctx context.Context, tenant, group, parent string, at time.Time, jobs int) string {
	if sc := telemetry.ParseTraceParent(parent); sc.IsValid() {
		ctx = trace.ContextWithRemoteSpanContext(ctx, sc)
	}
	attributes := append(telemetry.MessagingAttributes(telemetry.OpSend, "send", s.space.Ingest()),
		telemetry.JobAttributes(tenant, group, -1, 0)...)
	_, span := s.tel.Tracer.Start(ctx, "send ingest", trace.WithSpanKind(trace.SpanKindProducer),
		trace.WithTimestamp(at), trace.WithAttributes(attributes...))
	if jobs > 1 {
		span.SetAttributes(telemetry.MessageCount(jobs))
	}
	span.End()
	if next := telemetry.FormatTraceParent(span.SpanContext()); next != "" {
		return next
	}
	return parent
}
