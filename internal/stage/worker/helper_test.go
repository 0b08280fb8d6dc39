package worker_test

import (
	"context"
	"sync/atomic"
	"testing"
	"time"

	"github.com/stretchr/testify/require"
	"go.uber.org/goleak"

	"github.com/bulkaction/bulkaction/internal/ledger"
	"github.com/bulkaction/bulkaction/internal/redistest"
	"github.com/bulkaction/bulkaction/internal/stage/worker"
	"github.com/bulkaction/bulkaction/internal/stagetest"
	"github.com/bulkaction/bulkaction/processor"
)

func TestMain(m *testing.M) { goleak.VerifyTestMain(m, redistest.IgnoreServers()) }

// config waits for nothing but what a test lets it wait for.
func config() worker.Config {
	return worker.Config{
		Count: 4, Block: 50 * time.Millisecond, JobTimeout: stagetest.Patience, MaxRetries: 3, MaxThrottles: 5,
		Lease: stagetest.Patience, Grace: stagetest.Patience, Backoff: time.Millisecond, MaxBackoff: time.Second,
		Congestion: ledger.Congestion{Base: time.Millisecond, Cap: time.Hour},
	}
}

var workerCount atomic.Int64

// pool makes a worker process; its connection is its own.
func newWorker(w *stagetest.World, cfg worker.Config, procs ...processor.Processor) *worker.Worker {
	w.T.Helper()
	id := "worker-" + string(rune('a'+workerCount.Add(1)%26)) + time.Now().Format("150405.000000000")
	wk, err := worker.New(cfg, w.Connect(), w.Space, w.Tel, id, procs...)
	require.NoError(w.T, err)
	return wk
}

// gate is a processor whose jobs tell that they run, and end when they are told how.
type blockingProcessor struct {
	typ     string
	started chan processor.Job
	end     chan error
}

func newBlockingProcessor(typ string) *blockingProcessor {
	return &blockingProcessor{typ: typ, started: make(chan processor.Job, 1000), end: make(chan error)}
}

func (g *blockingProcessor) Type() string { return g.typ }

// Process ends with the error that it is given, or with the cause of its context's end.
func (g *blockingProcessor) Process(ctx context.Context, job processor.Job) (any, error) {
	g.started <- job
	select {
	case err := <-g.end:
		return nil, err
	case <-ctx.Done():
		return nil, context.Cause(ctx)
	}
}

// deaf is a gate that ignores its context.
type ignoringProcessor struct{ *blockingProcessor }

func (d ignoringProcessor) Process(_ context.Context, job processor.Job) (any, error) {
	d.started <- job
	return nil, <-d.end
}

// answer is a processor that ends at once.
func processorReturning(typ string, result any, err error) processor.Processor {
	return processor.Func(typ, func(context.Context, processor.Job) (any, error) { return result, err })
}
