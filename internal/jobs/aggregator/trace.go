package aggregator

import (
	"context"
	"time"

	"go.opentelemetry.io/otel/attribute"
	"go.opentelemetry.io/otel/trace"

	"github.com/bulkaction/bulkaction/internal/telemetry"
)

// recordSpans records, for each sampled job, the span "reduce", which ends the job's trace, and a
// span of the batch that links to these. began is when the batch began.
func (p *partitionReducer) recordSpans(ctx context.Context, tenant, group string, jobs []jobResult, began time.Time) {
	batch := p.Tel.NewBatch("reduce", p.partition.ResultStream(), began)
	for i := range jobs {
		j := &jobs[i]
		span := telemetry.JobSpan{Parent: j.trace, Kind: trace.SpanKindConsumer, Start: began}
		batch.Job(ctx, span, func() []attribute.KeyValue {
			return telemetry.JobAttributes(tenant, group, j.Ordinal, j.Attempts)
		})
	}
	batch.End(ctx, len(jobs))
}
