package worker_test

import (
	"context"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/bulkaction/bulkaction/api"
	"github.com/bulkaction/bulkaction/internal/access/auth"
	"github.com/bulkaction/bulkaction/internal/jobs/ledger"
	"github.com/bulkaction/bulkaction/internal/redisx/keyspace"
	"github.com/bulkaction/bulkaction/internal/testkit/redistest"
	"github.com/bulkaction/bulkaction/internal/testkit/stagetest"
	"github.com/bulkaction/bulkaction/processor"
)

// TestLeasesAreRenewed: 20 jobs that run for two and a half leases, of 2 s each, are not reclaimed:
// each is done in its first attempt. With so long a lease, the worker renews it in time on busy
// cores.
func TestLeasesAreRenewed(t *testing.T) {
	stagetest.Both(t, func(w *stagetest.World) {
		const lease, held = 2 * time.Second, 20
		cfg := config()
		cfg.Count, cfg.Lease = held, lease
		g := newBlockingProcessor("T")
		w.Run(newWorker(w, cfg, g))
		w.Feed(lease, "T")
		w.Jobs("g", "T", held)
		attempts := []int{stagetest.Receive(w.T, g.started, "the first job's start").Attempt}
		w.AwaitCounts("g", api.Counts{Accepted: held, InFlight: held})
		<-time.After(5 * lease / 2)
		require.Equal(w.T, api.Counts{Accepted: held, InFlight: held}, w.Counts("g"))
		close(g.end)
		w.AwaitCounts("g", api.Counts{Accepted: held, Done: held})
		for range len(g.started) {
			attempts = append(attempts, (<-g.started).Attempt)
		}
		require.Len(w.T, attempts, held)
		for _, n := range attempts {
			require.Equal(w.T, 1, n)
		}
	})
}

func TestLostLeaseEndsTheContext(t *testing.T) {
	w := withReady(t, "T", 1)
	cfg := config()
	cfg.Count, cfg.Lease = 1, 300*time.Millisecond
	first := newBlockingProcessor("T")
	causes := make(chan error, 1)
	w.Run(newWorker(w, cfg, processor.Func("T", func(ctx context.Context, j processor.Job) (any, error) {
		if j.Attempt == 1 {
			_, err := first.Process(ctx, j)
			causes <- context.Cause(ctx)
			return "of the worker that lost the job", err
		}
		return "of the worker that owns the job", nil
	})))
	stagetest.Receive(t, first.started, "the job's start")
	// The test reclaims the job, as a dispatcher does when a worker does not renew the lease.
	w.Await("the job to be reclaimed", func() bool {
		r, err := ledger.Reclaim(t.Context(), w.Conn.Cmd, w.P, "T", 0, 10, 5, false)
		return err == nil && r.Taken == 1
	})
	require.ErrorContains(t, stagetest.Receive(t, causes, "the context's end"), "lease was lost")
	w.Feed(stagetest.Patience, "T")
	w.AwaitCounts("g", api.Counts{Accepted: 1, Done: 1})
	results := w.Results()
	require.Len(t, results, 1)
	require.Equal(t, `"of the worker that owns the job"`, string(results[0].Data))
}

// TestStaleOutcomeChangesNothing: a worker reports success for a job that was reclaimed and is
// non-ready. The job is then started a second time, and has one result in the end.
func TestStaleOutcomeChangesNothing(t *testing.T) {
	w := withReady(t, "T", 1)
	slow := newBlockingProcessor("T")
	w.Run(newWorker(w, config(), ignoringProcessor{slow})) // the lease is long, so the worker does not notice that it lost the job
	stagetest.Receive(t, slow.started, "the job's start")
	r, err := ledger.Reclaim(t.Context(), w.Conn.Cmd, w.P, "T", 0, 10, 5, false)
	require.NoError(t, err)
	require.Equal(t, 1, r.Taken)
	require.Equal(t, api.Counts{Accepted: 1, NonReady: 1}, w.Counts("g"))
	slow.end <- nil
	w.Await("the outcome to be reported", func() bool { return len(slow.started) == 0 && w.Pending(w.P.Ready("T"), keyspace.GroupWorkers) == 0 })
	w.Feed(stagetest.Patience, "T")
	stagetest.Receive(t, slow.started, "the job's second start")
	require.Equal(t, api.Counts{Accepted: 1, InFlight: 1}, w.Counts("g"))
	slow.end <- nil
	w.AwaitCounts("g", api.Counts{Accepted: 1, Done: 1})
	require.Len(t, w.Results(), 1)
}

func TestCancelledGroupEndsTheContext(t *testing.T) {
	stagetest.Both(t, func(w *stagetest.World) {
		w.Jobs("g", "T", 2)
		w.Admit("T")
		g := newBlockingProcessor("T")
		causes := make(chan error, 1)
		cfg := config()
		cfg.Count = 1
		stop := w.Run(newWorker(w, cfg, processor.Func("T", func(ctx context.Context, j processor.Job) (any, error) {
			_, _ = g.Process(ctx, j)
			causes <- context.Cause(ctx)
			return nil, nil
		})))
		stagetest.Receive(w.T, g.started, "the job's start")
		ctx := context.WithoutCancel(w.T.Context())
		_, err := w.Store.Cancel(auth.Trust(ctx), "g")
		require.NoError(w.T, err)
		cancelled := time.Now()
		require.ErrorContains(w.T, stagetest.Receive(w.T, causes, "the context's end"), "group was cancelled")
		require.Less(w.T, time.Since(cancelled), time.Second) // the bound that docs/flow-control.md promises
		w.Await("empty stream", func() bool { return w.Conn.Cmd.XLen(ctx, w.P.Ready("T")).Val() == 0 })
		stop()
		require.Equal(w.T, api.Counts{Accepted: 2, Cancelled: 2}, w.Counts("g"))
		require.Empty(w.T, g.started)
		require.Empty(w.T, w.Results())
	})
}

// TestOutcomesAreReportedOnceRedisIsBack: 10 of 40 jobs end while Redis is away. After its restart
// all 40 are done, each in its first attempt.
func TestOutcomesAreReportedOnceRedisIsBack(t *testing.T) {
	t.Parallel()
	server := redistest.Server(t, redistest.AOF)
	w := stagetest.New(t, server.URL(), "t:", 1)
	const n = 40
	w.Jobs("g", "T", n)
	w.Admit("T")
	g := newBlockingProcessor("T")
	cfg := config()
	cfg.Count = 10
	w.Run(newWorker(w, cfg, g))
	for range cfg.Count {
		stagetest.Receive(t, g.started, "a job's start")
	}
	server.Kill()
	for range cfg.Count { // the jobs end while Redis is away
		g.end <- nil
	}
	server.Restart()
	close(g.end)
	w.AwaitCounts("g", api.Counts{Accepted: n, Done: n})
	require.Len(t, w.Results(), n)
	for len(g.started) > 0 {
		require.Equal(t, 1, (<-g.started).Attempt)
	}
}

// TestWorkerStopsWhileRedisIsAway: while Redis is away, a worker is stopped whose grace period is
// 10 ms. Of its two jobs one has ended and one still runs. It stops, and both jobs are still in
// flight in Redis.
func TestWorkerStopsWhileRedisIsAway(t *testing.T) {
	t.Parallel()
	server := redistest.Server(t, redistest.AOF)
	w := stagetest.New(t, server.URL(), "t:", 1)
	w.Jobs("g", "T", 2)
	w.Admit("T")
	g := newBlockingProcessor("T")
	cfg := config()
	cfg.Grace = 10 * time.Millisecond
	stop, ended := runInBackground(w, newWorker(w, cfg, g))
	stagetest.Receive(t, g.started, "a job's start")
	stagetest.Receive(t, g.started, "a job's start")
	server.Kill()
	g.end <- nil
	stop()
	require.NoError(t, stagetest.Receive(t, ended, "the worker's end"))
	server.Restart()
	require.Equal(t, api.Counts{Accepted: 2, InFlight: 2}, w.Counts("g"))
}
