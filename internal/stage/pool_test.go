package stage_test

import (
	"context"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/bulkaction/bulkaction/api"
	"github.com/bulkaction/bulkaction/internal/jobs/dispatcher"
	"github.com/bulkaction/bulkaction/internal/jobs/fetcher"
	"github.com/bulkaction/bulkaction/internal/jobs/ledger"
	"github.com/bulkaction/bulkaction/internal/jobs/worker"
	"github.com/bulkaction/bulkaction/internal/testkit/stagetest"
	"github.com/bulkaction/bulkaction/processor"
)

// TestStatsShowTheWholePool: Store.Stats lists one worker, fetcher and dispatcher process. The
// worker's numbers are compared while it is idle, runs 3 of 5 jobs, stops and is gone.
func TestStatsShowTheWholePool(t *testing.T) {
	stagetest.Both(t, func(w *stagetest.World) {
		started, end := make(chan string, 100), make(chan struct{})
		slow := processor.Func("SLOW_TEST", func(ctx context.Context, j processor.Job) (any, error) {
			started <- j.ID()
			select {
			case <-end:
			case <-ctx.Done():
			}
			return nil, ctx.Err()
		})
		rate := ledger.Rate{Window: time.Second}
		wk, err := worker.New(stagetest.Process(w, "w"), worker.Config{
			Count: 3, Block: 50 * time.Millisecond, JobTimeout: stagetest.Patience, Lease: stagetest.Patience, Grace: stagetest.Patience,
			Backoff: time.Millisecond, MaxBackoff: time.Second, Congestion: ledger.Congestion{Cap: time.Second},
		}, slow)
		require.NoError(w.T, err)
		stop := w.Run(wk)
		w.Run(fetcher.New(stagetest.Process(w, "f"), fetcher.Config{
			Interval: 50 * time.Millisecond, BatchSize: 50, ReadyCap: 100, Rate: rate, LaneWeights: [3]int{6, 3, 1},
		}))
		w.Run(dispatcher.New(stagetest.Process(w, "d"), dispatcher.Config{
			Interval: 50 * time.Millisecond, BatchSize: 50, FetchBatch: 50, ReadyCap: 100, Rate: rate, Lease: stagetest.Patience, MaxLosses: 5,
		}))

		ctx := context.WithoutCancel(w.T.Context())
		var st api.Stats
		await := func(what string, ok func() bool) {
			w.T.Helper()
			w.Await(what, func() bool {
				st, err = w.Store.Stats(ctx)
				require.NoError(w.T, err)
				return ok()
			})
		}
		await("the whole pool", func() bool { return len(st.Workers) == 1 && len(st.Stages) == 2 })
		require.Equal(w.T, 3, st.Workers[0].Workers)
		require.Equal(w.T, 3, st.Workers[0].Idle)
		require.False(w.T, st.Workers[0].ShuttingDown)
		require.Equal(w.T, "dispatcher", st.Stages[0].Role)
		require.Equal(w.T, "fetcher", st.Stages[1].Role)
		for _, s := range st.Stages {
			require.True(w.T, s.Running)
			require.NotEmpty(w.T, s.Counts)
		}

		w.Jobs("g", "SLOW_TEST", 5)
		for range 3 {
			stagetest.Receive(w.T, started, "a job's start")
		}
		await("the pool at work", func() bool {
			return st.Workers[0].Active == 3 && len(st.Types) == 1 && st.Types[0].InFlight == 3 && st.Types[0].Ready == 2 && st.Stages[1].Counts["total_fetched"] == 5
		})
		require.ElementsMatch(w.T, []string{"g.0", "g.1", "g.2"}, st.Workers[0].CurrentJobs)
		require.Equal(w.T, api.TypeStats{Type: "SLOW_TEST", Backlog: 2, Ready: 2, InFlight: 3, Workers: 1, Totals: api.JobTotals{Accepted: 5, Started: 3}}, st.Types[0])

		go stop()
		await("a worker that stops", func() bool { return len(st.Workers) == 1 && st.Workers[0].ShuttingDown })
		require.Equal(w.T, 3, st.Workers[0].Active)
		close(end)
		w.AwaitCounts("g", api.Counts{Accepted: 5, Done: 3, Ready: 2})
		await("no worker any more", func() bool { return len(st.Workers) == 0 })
		require.True(w.T, wk.Status().ShuttingDown)
		require.Zero(w.T, wk.Status().Workers)
	})
}
