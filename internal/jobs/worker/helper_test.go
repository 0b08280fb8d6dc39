package worker_test

import (
	"context"
	"sync/atomic"
	"testing"
	"time"

	"github.com/stretchr/testify/require"
	"go.uber.org/goleak"

	"github.com/bulkaction/bulkaction/internal/jobs/ledger"
	"github.com/bulkaction/bulkaction/internal/jobs/worker"
	"github.com/bulkaction/bulkaction/internal/testkit/redistest"
	"github.com/bulkaction/bulkaction/internal/testkit/stagetest"
	"github.com/bulkaction/bulkaction/processor"
)

func TestMain(m *testing.M) { goleak.VerifyTestMain(m, redistest.IgnoreServers()) }

// config returns a worker configuration whose timeouts, lease and grace period never end by
// themselves during a test.
func config() worker.Config {
	return worker.Config{
		Count: 4, Block: 50 * time.Millisecond, JobTimeout: stagetest.Patience, MaxRetries: 3, MaxThrottles: 5,
		Lease: stagetest.Patience, Grace: stagetest.Patience, Backoff: time.Millisecond, MaxBackoff: time.Second,
		Congestion: ledger.Congestion{Base: time.Millisecond, Cap: time.Hour},
	}
}

var workerCount atomic.Int64

// newWorker creates a worker with these processors, its own connection and its own process id. It
// does not run it. At the end of the test, after its Run, the worker must count no task any more.
func newWorker(w *stagetest.World, cfg worker.Config, procs ...processor.Processor) *worker.Worker {
	w.T.Helper()
	id := "worker-" + string(rune('a'+workerCount.Add(1)%26)) + time.Now().Format("150405.000000000")
	wk, err := worker.New(stagetest.Process(w, id), cfg, procs...)
	require.NoError(w.T, err)
	w.T.Cleanup(func() { require.Empty(w.T, wk.Counts()) })
	return wk
}

// blockingProcessor sends each job on started, and then blocks until the test sends an error for
// the job on end, which may be nil, or closes end.
type blockingProcessor struct {
	typ     string
	started chan processor.Job
	end     chan error
}

func newBlockingProcessor(typ string) *blockingProcessor {
	return &blockingProcessor{typ: typ, started: make(chan processor.Job, 1000), end: make(chan error)}
}

func (g *blockingProcessor) Type() string { return g.typ }

// Process returns the error that the test sends on end; or the context's cause if ctx ends first.
func (g *blockingProcessor) Process(ctx context.Context, job processor.Job) (any, error) {
	g.started <- job
	select {
	case err := <-g.end:
		return nil, err
	case <-ctx.Done():
		return nil, context.Cause(ctx)
	}
}

// ignoringProcessor is a blockingProcessor that ignores the end of its context.
type ignoringProcessor struct{ *blockingProcessor }

func (d ignoringProcessor) Process(_ context.Context, job processor.Job) (any, error) {
	d.started <- job
	return nil, <-d.end
}

// processorReturning returns a processor that returns result and err at once.
func processorReturning(typ string, result any, err error) processor.Processor {
	return processor.Func(typ, func(context.Context, processor.Job) (any, error) { return result, err })
}
