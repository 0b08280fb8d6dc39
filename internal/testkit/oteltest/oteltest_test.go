package oteltest_test

import (
	"errors"
	"testing"
	"time"

	"github.com/stretchr/testify/require"
	"go.opentelemetry.io/otel/attribute"
	"go.opentelemetry.io/otel/codes"
	"go.opentelemetry.io/otel/exporters/otlp/otlptrace/otlptracehttp"
	"go.opentelemetry.io/otel/sdk/resource"
	sdk "go.opentelemetry.io/otel/sdk/trace"
	"go.opentelemetry.io/otel/trace"

	"github.com/bulkaction/bulkaction/internal/testkit/oteltest"
)

// provider returns a TracerProvider that exports each span to r when it ends. It sets the
// environment variables of the endpoint and of the compression, which configure the exporter.
func provider(t *testing.T, r *oteltest.Receiver, compression string) *sdk.TracerProvider {
	t.Helper()
	t.Setenv("OTEL_EXPORTER_OTLP_ENDPOINT", r.Endpoint())
	t.Setenv("OTEL_EXPORTER_OTLP_COMPRESSION", compression)
	exporter, err := otlptracehttp.New(t.Context())
	require.NoError(t, err)
	p := sdk.NewTracerProvider(sdk.WithSyncer(exporter),
		sdk.WithResource(resource.NewSchemaless(attribute.String("service.name", "worker"))))
	t.Cleanup(func() { _ = p.Shutdown(t.Context()) })
	return p
}

func TestReceivesWhatTheSDKExports(t *testing.T) {
	for _, compression := range []string{"none", "gzip"} {
		t.Run(compression, func(t *testing.T) {
			r := oteltest.New(t)
			tracer := provider(t, r, compression).Tracer("test")
			start := time.Now().Add(-time.Second).Round(0)

			ctx, producer := tracer.Start(t.Context(), "send ingest", trace.WithSpanKind(trace.SpanKindProducer))
			_, linked := tracer.Start(t.Context(), "batch", trace.WithNewRoot())
			_, consumer := tracer.Start(ctx, "process NOOP",
				trace.WithSpanKind(trace.SpanKindConsumer),
				trace.WithTimestamp(start),
				trace.WithLinks(trace.LinkFromContext(trace.ContextWithSpan(t.Context(), linked))),
				trace.WithAttributes(
					attribute.String("bulkaction.tenant", "acme"),
					attribute.Int("bulkaction.attempt", 2),
					attribute.Bool("b", true),
					attribute.Float64("f", 0.5),
					attribute.StringSlice("list", []string{"x", "y"}),
				))
			consumer.RecordError(errors.New("boom"))
			consumer.SetStatus(codes.Error, "gave up")
			consumer.End(trace.WithTimestamp(start.Add(time.Second)))
			linked.End()
			producer.End()

			spans := r.WaitFor(t, time.Minute, func(spans []oteltest.Span) bool { return len(spans) == 3 })
			require.Equal(t, spans, r.Spans())
			got := spans[0]
			require.Len(t, got.Events, 1)
			require.Equal(t, "exception", got.Events[0].Name)
			require.Equal(t, "boom", got.Events[0].Attributes["exception.message"])
			got.Events = nil
			require.Equal(t, oteltest.Span{
				Service:  "worker",
				Name:     "process NOOP",
				Kind:     "consumer",
				TraceID:  producer.SpanContext().TraceID().String(),
				SpanID:   consumer.SpanContext().SpanID().String(),
				ParentID: producer.SpanContext().SpanID().String(),
				Start:    start,
				End:      start.Add(time.Second),
				Attributes: map[string]any{
					"bulkaction.tenant": "acme", "bulkaction.attempt": int64(2), "b": true, "f": 0.5, "list": []any{"x", "y"},
				},
				Links: []oteltest.Link{{
					TraceID: linked.SpanContext().TraceID().String(), SpanID: linked.SpanContext().SpanID().String(),
				}},
				StatusCode:    "Error",
				StatusMessage: "gave up",
			}, got)

			require.Equal(t, "producer", spans[2].Kind)
			require.Equal(t, "Unset", spans[2].StatusCode)
			require.Empty(t, spans[2].ParentID)
		})
	}
}
