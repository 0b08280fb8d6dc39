package groups

import (
	"context"
	"time"

	"go.opentelemetry.io/otel/attribute"
	"go.opentelemetry.io/otel/trace"

	"github.com/bulkaction/bulkaction/internal/jobs/ledger"
	"github.com/bulkaction/bulkaction/internal/messages"
	"github.com/bulkaction/bulkaction/internal/telemetry"
)

// newJobs converts jobs of a request or message to the ledger's form, and records spans. Each job
// gets a trace context: a job with its own traceparent, or alone in its request or message,
// continues the producer's trace. Every other job, and each job of a message without a traceparent,
// starts a trace; it is linked to the producer's if that is known.
func (s *access) newJobs(ctx context.Context, tenant, group string, jobs []messages.Job, o Origin) []ledger.NewJob {
	message := o.TraceParent
	if !o.Published {
		message = s.recordSendSpan(ctx, tenant, group, o.TraceParent, o.At, len(jobs))
	}
	link := telemetry.ParseTraceParent(message)
	fresh := make([]ledger.NewJob, len(jobs))
	for i := range jobs {
		j := &jobs[i]
		fresh[i] = newJob(j)
		attrs := func() []attribute.KeyValue {
			a := telemetry.MessagingAttributes(telemetry.OpReceive, "ingest", s.space.Ingest())
			return append(a, telemetry.JobAttributes(tenant, group, -1, 0)...)
		}
		switch {
		case j.TraceParent != "" && !o.Published:
			parent := s.recordSendSpan(ctx, tenant, group, j.TraceParent, o.At, 1)
			fresh[i].Trace = s.tel.ContinueJobTrace(parent, "ingest", o.At, attrs)
		case j.TraceParent != "":
			fresh[i].Trace = s.tel.ContinueJobTrace(j.TraceParent, "ingest", o.At, attrs)
		case len(jobs) == 1 && message != "":
			fresh[i].Trace = s.tel.ContinueJobTrace(message, "ingest", o.At, attrs)
		default:
			fresh[i].Trace = s.tel.NewJobTrace(link, "ingest", o.At, attrs)
		}
	}
	return fresh
}

// newJob converts a job of a request to the ledger's form, without its trace context.
func newJob(j *messages.Job) ledger.NewJob {
	fresh := ledger.NewJob{Type: j.Type, Payload: j.Payload, Key: j.Key}
	if j.RunAt != nil {
		fresh.RunAt = *j.RunAt
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
