package bulktest_test

import (
	"context"
	"testing"

	"github.com/stretchr/testify/require"
	sdktrace "go.opentelemetry.io/otel/sdk/trace"
	"go.opentelemetry.io/otel/sdk/trace/tracetest"

	"github.com/bulkaction/bulkaction/bulktest"
	"github.com/bulkaction/bulkaction/client"
	"github.com/bulkaction/bulkaction/processor"
	"github.com/bulkaction/bulkaction/run"
)

// TestBatchTraces: each job of a call has its span, below which nothing else is; the call has one, with
// links to the jobs.
func TestBatchTraces(t *testing.T) {
	t.Parallel()
	spans := tracetest.NewSpanRecorder()
	c := run.Config{TracerProvider: sdktrace.NewTracerProvider(sdktrace.WithSpanProcessor(spans))}
	b := processor.Batch("T", processor.BatchOptions{}, func(_ context.Context, jobs []processor.BatchJob[int]) ([]processor.Outcome[int], error) {
		return make([]processor.Outcome[int], len(jobs)), nil
	})
	bulktest.Run(t, c, []processor.Batcher{b}, func(t *testing.T, s *bulktest.System) {
		jobs := make([]client.NewJob, 20)
		for i := range jobs {
			jobs[i].Payload = bulktest.JSON(t, i)
		}
		s.Submit(client.Submission{Type: "T", Jobs: jobs})
	})
	var single, linked int
	for _, span := range spans.Ended() {
		switch span.Name() {
		case "process T":
			single++
		case "process T batch":
			linked += len(span.Links())
		}
	}
	require.Equal(t, 20, single)
	require.Equal(t, 20, linked)
}
