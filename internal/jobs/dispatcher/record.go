package dispatcher

import (
	"context"
	"time"

	"go.opentelemetry.io/otel/attribute"

	"github.com/bulkaction/bulkaction/internal/jobs/ledger"
	"github.com/bulkaction/bulkaction/internal/telemetry"
)

// recordPromoted adds the reply of one call of the script promote to the metrics. It records a span
// for each sampled job that was promoted, and a span of the batch that links to these. took is the
// duration of the call.
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
	batch := p.Tel.NewBatch("promote", p.partition.NonReady(), r.Traced[0].Now)
	for i := range r.Traced {
		t := &r.Traced[i]
		span := telemetry.JobSpan{Parent: t.Parent, ID: t.SpanID, Start: t.Now}
		batch.Job(ctx, span, func() []attribute.KeyValue {
			return append(telemetry.JobAttributes(t.Tenant, t.Group, t.Ordinal, t.Attempt),
				attribute.String("bulkaction.non_ready.reason", nonReadyReasons[t.Reason]),
				attribute.Int64("bulkaction.non_ready.waited_ms", max(0, t.Now.Sub(t.Since)).Milliseconds()))
		})
	}
	batch.End(ctx, r.Moved)
}

// nonReadyReasons maps the letter by which the scripts say why a job was non-ready to the name that
// spans show.
var nonReadyReasons = map[string]string{
	"R": "RATE_LIMITED", "A": "API_THROTTLED", "E": "TRANSIENT_ERROR", "S": "SCHEDULED",
	"P": "SUSPENDED", "G": "RESOURCE_BUSY", "": "RELEASED",
}
