package fetcher

import (
	"context"

	"go.opentelemetry.io/otel/attribute"
	"go.opentelemetry.io/otel/trace"

	"github.com/bulkaction/bulkaction/internal/ledger"
	"github.com/bulkaction/bulkaction/internal/telemetry"
)

// recordAdmitted adds one call of admit to the counts and the metrics. It records a span for each
// sampled job that was admitted, and one of the batch that links to them.
func (p *partitionFetcher) recordAdmitted(ctx context.Context, typ string, r ledger.AdmitReply) {
	p.fetched.Add(int64(r.Moved + r.NonReady))
	p.admittedReady.Add(int64(r.Moved))
	p.admittedNonReady.Add(int64(r.NonReady))
	p.metrics.Fetched(r.Moved, r.NonReady)
	if r.State == ledger.AdmitFull {
		p.metrics.Rejected()
	}
	if p.cfg.OnPermits != nil {
		p.cfg.OnPermits(r.AtUS, p.partition.Index(), typ, r.Permits)
	}
	for _, a := range r.Permits {
		p.metrics.Allowed(a.Tenant, int(a.N))
	}
	for _, d := range r.Denials {
		p.metrics.Denied(d.Tenant, d.Reason)
	}
	if len(r.Traced) == 0 {
		return
	}
	destination := p.partition.Ready(typ)
	links := make([]trace.Link, 0, len(r.Traced))
	for i := range r.Traced {
		t := &r.Traced[i]
		_, span := p.Tel.StartJob(ctx, telemetry.JobSpan{
			Parent: t.Parent, ID: t.SpanID, Name: "admit", Start: t.Now}, func() []attribute.KeyValue {
			attrs := telemetry.MessagingAttributes(telemetry.OpProcess, "admit", destination)
			attrs = append(attrs, telemetry.JobAttributes(t.Tenant, t.Group, t.Ordinal, 0)...)
			return append(attrs, telemetry.WaitAttributes(t.Fairness, t.Rate, 0)...)
		})
		span.End()
		links = append(links, trace.Link{SpanContext: span.SpanContext()})
	}
	attributes := append(telemetry.MessagingAttributes(telemetry.OpProcess, "admit", destination),
		telemetry.MessageCount(r.Moved))
	_, batch := p.Tel.Tracer.Start(ctx, "admit batch", trace.WithTimestamp(r.Traced[0].Now),
		trace.WithLinks(links...), trace.WithAttributes(attributes...))
	batch.End()
}
