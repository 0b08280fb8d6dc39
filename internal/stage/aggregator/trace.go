package aggregator

import (
	"context"
	"time"

	"go.opentelemetry.io/otel/attribute"
	"go.opentelemetry.io/otel/trace"

	"github.com/bulkaction/bulkaction/internal/telemetry"
)

// recordSpans records the reduce span of each sampled job, which ends the job's trace, and a span
// of the batch that links to them. began is when the batch began.
func (p *partitionReducer) recordSpans(ctx context.Context, tenant, group string, jobs []jobResult, began time.Time) {
	var links []trace.Link
	for i := range jobs {
		j := &jobs[i]
		if j.trace == "" {
			continue
		}
		_, span := p.Tel.StartJob(ctx,
			telemetry.JobSpan{Parent: j.trace, Name: "reduce", Kind: trace.SpanKindConsumer, Start: began},
			func() []attribute.KeyValue {
				attrs := telemetry.MessagingAttributes(telemetry.OpProcess, "reduce", p.partition.ResultStream())
				return append(attrs, telemetry.JobAttributes(tenant, group, j.Ordinal, j.Attempts)...)
			})
		span.End()
		links = append(links, trace.Link{SpanContext: span.SpanContext()})
	}
	if len(links) == 0 {
		return
	}
	attributes := append(telemetry.MessagingAttributes(telemetry.OpProcess, "reduce", p.partition.ResultStream()),
		telemetry.MessageCount(len(jobs)))
	_, batch := p.Tel.Tracer.Start(ctx, "reduce batch", trace.WithTimestamp(began),
		trace.WithLinks(links...), trace.WithAttributes(attributes...))
	batch.End()
}
