package worker

import (
	"context"
	"encoding/json"
	"fmt"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/bulkaction/bulkaction/internal/jobs/ledger"
	"github.com/bulkaction/bulkaction/internal/redisx/keyspace"
	"github.com/bulkaction/bulkaction/internal/redisx/stream"
	"github.com/bulkaction/bulkaction/internal/stage"
	"github.com/bulkaction/bulkaction/internal/telemetry"
	"github.com/bulkaction/bulkaction/processor/noop"
)

// BenchmarkJobContext compares the cost of a jobContext that the processor does not use with that
// of a standard context.
func BenchmarkJobContext(b *testing.B) {
	parent, cancel := context.WithCancel(b.Context())
	defer cancel()
	b.Run("jobContext", func(b *testing.B) {
		b.ReportAllocs()
		for b.Loop() {
			c := new(jobContext)
			c.begin(parent, monotonicNow(), time.Minute)
			c.finish()
		}
	})
	b.Run("standard", func(b *testing.B) {
		b.ReportAllocs()
		for b.Loop() {
			timed, release := context.WithTimeout(parent, time.Minute)
			_, stop := context.WithCancelCause(timed)
			stop(nil)
			release()
		}
	})
}

// BenchmarkResultLine compares the speed of appendResultLine with that of encoding/json.
func BenchmarkResultLine(b *testing.B) {
	t := &task{Job: ledger.Job{Ordinal: 123456}, currentAttempt: 1, runTime: 1250 * time.Microsecond}
	t.startedAt = time.Now()
	t.result = []byte(`{"id":"msg-000001","accepted":true,"cost":0.25}`)
	b.Run("appendResultLine", func(b *testing.B) {
		b.ReportAllocs()
		buffer := make([]byte, 0, 1<<10)
		for b.Loop() {
			buffer = appendResultLine(buffer[:0], t, "worker-host-12345-0a1b2c3d")
		}
	})
	b.Run("encoding/json", func(b *testing.B) {
		b.ReportAllocs()
		for b.Loop() {
			_, err := json.Marshal(struct {
				Ordinal    int64           `json:"ordinal"`
				DurationMS float64         `json:"duration_ms"`
				Attempts   int             `json:"attempts"`
				StartedMS  int64           `json:"started_ms"`
				Worker     string          `json:"worker"`
				Data       json.RawMessage `json:"data"`
			}{t.Ordinal, float64(t.runTime) / 1e6, t.currentAttempt, t.startedAt.UnixMilli(), "worker-host-12345-0a1b2c3d", t.result})
			require.NoError(b, err)
		}
	})
}

// BenchmarkBatch measures what a batch of no-op jobs costs a worker, without Redis: to parse the
// entries, queue the tasks, run them, and build their outcomes.
func BenchmarkBatch(b *testing.B) {
	space, err := keyspace.New("b:", 1)
	require.NoError(b, err)
	w, err := New(stage.Process{ID: "w", Space: space, Tel: telemetry.Nop()}, Config{Count: 10, JobTimeout: 1e9}, noop.Processor{})
	require.NoError(b, err)
	w.slots.start(func(sl *slot) { w.serve(b.Context(), b.Context(), sl) })
	f := w.feeds[0]
	entries := make([]stream.Entry, maxBatch)
	for i := range entries {
		blob := fmt.Sprintf(`g%d|NOOP|1|0|0|0|70|8|0|1700000000123||%d|1700000000000||{}`, i%10, i/10)
		entries[i] = stream.Entry{ID: fmt.Sprintf("1700000000000-%d", i), Fields: []string{ledger.BlobField, blob}}
	}
	b.ReportAllocs()
	for b.Loop() {
		tasks, _ := f.parseEntries(b.Context(), noop.Type, entries)
		w.held.move(0, stateRead, tasks...)
		for _, t := range tasks {
			t.inFlight, t.loadedPayload, t.terms.JobTimeout = true, t.Payload, time.Minute
		}
		w.held.track(tasks...)
		w.slots.add(tasks)
		for !f.reports.hasAtLeast(len(tasks)) {
			<-f.reports.wake
		}
		batch := f.reports.take(maxBatch, maxBatchBytes)
		f.recordMetrics(batch)
		groups := f.groupOutcomes(batch)
		w.held.remove(batch)
		require.Empty(b, groups[0].Others)
	}
	b.ReportMetric(float64(b.Elapsed().Nanoseconds())/float64(b.N*maxBatch), "ns/job")
	w.slots.close()
	w.slots.goroutines.Wait()
}
