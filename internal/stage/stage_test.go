package stage_test

import (
	"context"
	"errors"
	"sync/atomic"
	"testing"
	"time"

	"github.com/stretchr/testify/require"
	"go.uber.org/goleak"

	"github.com/bulkaction/bulkaction/api"
	"github.com/bulkaction/bulkaction/internal/jobs/dispatcher"
	"github.com/bulkaction/bulkaction/internal/jobs/fetcher"
	"github.com/bulkaction/bulkaction/internal/jobs/ledger"
	"github.com/bulkaction/bulkaction/internal/jobs/worker"
	"github.com/bulkaction/bulkaction/internal/redisx/keyspace"
	"github.com/bulkaction/bulkaction/internal/stage"
	"github.com/bulkaction/bulkaction/internal/testkit/redistest"
	"github.com/bulkaction/bulkaction/internal/testkit/stagetest"
	"github.com/bulkaction/bulkaction/processor"
)

func TestMain(m *testing.M) { goleak.VerifyTestMain(m, redistest.IgnoreServers()) }

// runLoop starts a role with one loop: it calls step again and again, and waits in between, for a
// token of the list wake too unless wake is "". stop ends the role.
func runLoop(w *stagetest.World, wake string, step stage.Step) (stop func()) {
	w.T.Helper()
	r := stagetest.Process(w, "p").Runner()
	r.Loop("l", wake, step)
	return w.Run(r)
}

func TestLoopIsWoken(t *testing.T) {
	stagetest.Both(t, func(w *stagetest.World) {
		steps := make(chan struct{})
		runLoop(w, w.P.Wake("l"), func(ctx context.Context) (time.Duration, error) {
			select {
			case steps <- struct{}{}:
			case <-ctx.Done():
			}
			return -1, nil
		})
		<-steps
		began := time.Now()
		for range 10 {
			require.NoError(w.T, w.Conn.Cmd.LPush(context.WithoutCancel(w.T.Context()), w.P.Wake("l"), "1").Err())
			stagetest.Receive(w.T, steps, "a step")
		}
		require.Less(w.T, time.Since(began), 5*time.Second) // ten waits without tokens would take ten seconds
		stagetest.Receive(w.T, steps, "a step without a token, after the longest wait")
	})
}

func TestLoopNeverSleepsWithWork(t *testing.T) {
	w := stagetest.Parallel(t, 1)
	const n = 1000
	done := make(chan struct{})
	var steps atomic.Int64
	runLoop(w, "", func(context.Context) (time.Duration, error) {
		if steps.Add(1) == n {
			close(done)
			return -1, nil
		}
		return 0, nil
	})
	stagetest.Receive(t, done, "all steps")
}

func TestLoopGoesOnAfterErrors(t *testing.T) {
	w := stagetest.Parallel(t, 1)
	worked := make(chan struct{})
	var steps atomic.Int64
	stop := runLoop(w, "", func(context.Context) (time.Duration, error) {
		if steps.Add(1) < 3 {
			return 0, errors.New("boom")
		}
		if steps.Load() == 3 {
			close(worked)
		}
		return -1, nil
	})
	stagetest.Receive(t, worked, "a step that works")
	stop() // fails the test if Run returns an error
}

// TestRunnerCleansUp: two functions of OnStop run after the only loop has ended with an error, in
// the order in which they were added. Their context has not ended, although that of the role has.
func TestRunnerCleansUp(t *testing.T) {
	t.Parallel()
	ctx, stop := context.WithCancel(t.Context())
	var order []string
	boom := errors.New("boom")
	r := stage.Process{}.Runner()
	r.Add(func(ctx context.Context) error {
		stop()
		<-ctx.Done()
		order = append(order, "loop")
		return boom
	})
	for _, name := range []string{"first", "second"} {
		r.OnStop(func(ctx context.Context) {
			require.NoError(t, ctx.Err())
			order = append(order, name)
		})
	}
	require.ErrorIs(t, r.Run(ctx), boom)
	require.Equal(t, []string{"loop", "first", "second"}, order)
}

func TestRunAllEndsWithTheFirstError(t *testing.T) {
	t.Parallel()
	boom := errors.New("boom")
	err := stage.RunAll(t.Context(),
		func(ctx context.Context) error { <-ctx.Done(); return nil },
		func(context.Context) error { return boom },
	)
	require.ErrorIs(t, err, boom)
	require.NoError(t, stage.RunAll(t.Context(), func(context.Context) error { return nil }))
}

func TestCheckPartitions(t *testing.T) {
	stagetest.Both(t, func(w *stagetest.World) {
		ctx := context.WithoutCancel(w.T.Context())
		four, err := keyspace.New("layout:", 4)
		require.NoError(w.T, err)
		eight, err := keyspace.New("layout:", 8)
		require.NoError(w.T, err)
		require.NoError(w.T, w.Conn.Cmd.Del(ctx, four.PartitionCount()).Err())
		require.NoError(w.T, stage.CheckPartitions(ctx, w.Conn, four))
		require.NoError(w.T, stage.CheckPartitions(ctx, w.Conn, four))
		err = stage.CheckPartitions(ctx, w.Conn, eight)
		require.ErrorContains(w.T, err, "BULKACTION_PARTITIONS is 8, but the data in Redis was made with 4 (key ")
		require.NoError(w.T, w.Conn.Cmd.Del(ctx, four.PartitionCount()).Err())
	})
}

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
		meter := ledger.Meter{Window: time.Second}
		wk, err := worker.New(stagetest.Process(w, "w"), worker.Config{
			Count: 3, Block: 50 * time.Millisecond, JobTimeout: stagetest.Patience, Lease: stagetest.Patience, Grace: stagetest.Patience,
			Backoff: time.Millisecond, MaxBackoff: time.Second, Congestion: ledger.Congestion{Cap: time.Second},
		}, slow)
		require.NoError(w.T, err)
		stop := w.Run(wk)
		w.Run(fetcher.New(stagetest.Process(w, "f"), fetcher.Config{
			Interval: 50 * time.Millisecond, BatchSize: 50, ReadyCap: 100, Meter: meter, LaneWeights: [3]int{6, 3, 1},
		}))
		w.Run(dispatcher.New(stagetest.Process(w, "d"), dispatcher.Config{
			Interval: 50 * time.Millisecond, BatchSize: 50, FetchBatch: 50, ReadyCap: 100, Meter: meter, Lease: stagetest.Patience, MaxLosses: 5,
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
		require.Equal(w.T, api.TypeStats{Type: "SLOW_TEST", Backlog: 2, Runnable: 2, Ready: 2, InFlight: 3, Workers: 1, Totals: api.JobTotals{Accepted: 5, Started: 3}}, st.Types[0])

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
