package dispatcher

import (
	"context"
	"time"

	"go.opentelemetry.io/otel/attribute"
	"go.opentelemetry.io/otel/trace"

	"github.com/bulkaction/bulkaction/internal/ledger"
	"github.com/bulkaction/bulkaction/internal/telemetry"
)

// recordPromoted adds one call of promote to the metrics. It records a span for each sampled job
// that was promoted, and one of the batch that links to them. took is how long the call took.
func (p *partitionDispatcher) recordPromoted(ctx context.Context, r ledger.PromoteReply, took time.Duration) {
	p.metrics.Cycle(r.Moved, r.Skipped, took)
	for _, a := range r.Permits {
		p.metrics.Allowed(a.Tenant, int(a.N))
	}
	for _, d := range r.Denials {
		p.metrics.Denied(d.Tenant, d.Reason)
	}
	if len(r.Traced) == 0 {
		return
	}
	destination := p.partition.NonReady()
	links := make([]trace.Link, 0, len(r.Traced))
	for i := range r.Traced {
		t := &r.Traced[i]
		_, span := p.Tel.StartJob(ctx, telemetry.JobSpan{
			Parent: t.Parent, ID: t.SpanID, Name: "promote", Start: t.Now}, func() []attribute.KeyValue {
			attrs := telemetry.MessagingAttributes(telemetry.OpProcess, "promote", destination)
			attrs = append(attrs, telemetry.JobAttributes(t.Tenant, t.Group, t.Ordinal, t.Attempt)...)
			return append(attrs, attribute.String("bulkaction.non_ready.reason", nonReadyReasons[t.Reason]),
				attribute.Int64("bulkaction.non_ready.waited_ms", max(0, t.Now.Sub(t.Since)).Milliseconds()))
		})
		span.End()
		links = append(links, trace.Link{SpanContext: span.SpanContext()})
	}
	attributes := append(telemetry.MessagingAttributes(telemetry.OpProcess, "promote", destination),
		telemetry.MessageCount(r.Moved))
	_, batch := p.Tel.Tracer.Start(ctx, "promote batch", trace.WithTimestamp(r.Traced[0].Now),
		trace.WithLinks(links...), trace.WithAttributes(attributes...))
	batch.End()
}

// nonReadyReasons maps the letter by which the scripts say why a job was non-ready to the name that
// spans show.
var nonReadyReasons = map[string]string{
	"R": "RATE_LIMITED", "A": "API_THROTTLED", "E": "TRANSIENT_ERROR", "S": "SCHEDULED",
}
