package fetcher

import (
	"context"

	"go.opentelemetry.io/otel/attribute"

	"github.com/bulkaction/bulkaction/internal/jobs/ledger"
	"github.com/bulkaction/bulkaction/internal/telemetry"
)

// recordAdmitted adds the reply of one call of the script admit to the counts and the metrics, and
// passes its permits to Config.OnPermits. It records a span for each sampled job that was admitted,
// and a span of the batch that links to these.
func (p *partitionFetcher) recordAdmitted(ctx context.Context, typ string, r ledger.AdmitReply) {
	p.fetched.Add(int64(r.Moved + r.NonReady))
	p.admittedReady.Add(int64(r.Moved))
	p.admittedNonReady.Add(int64(r.NonReady))
	p.metrics.Fetched(r.Moved, r.NonReady)
	if r.State == ledger.AdmitFull {
		p.rejected.Add(1)
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
	batch := p.Tel.NewBatch("admit", p.partition.Ready(typ), r.Traced[0].Now)
	for i := range r.Traced {
		t := &r.Traced[i]
		span := telemetry.JobSpan{Parent: t.Parent, ID: t.SpanID, Start: t.Now}
		batch.Job(ctx, span, func() []attribute.KeyValue {
			attrs := telemetry.JobAttributes(t.Tenant, t.Group, t.Ordinal, 0)
			return append(attrs, telemetry.WaitAttributes(t.Fairness, t.Rate, 0)...)
		})
	}
	batch.End(ctx, r.Moved)
}
