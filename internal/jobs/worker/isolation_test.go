package worker_test

import (
	"context"
	"fmt"
	"sync/atomic"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/bulkaction/bulkaction/api"
	"github.com/bulkaction/bulkaction/internal/jobs/ledger"
	"github.com/bulkaction/bulkaction/internal/jobs/worker"
	"github.com/bulkaction/bulkaction/internal/redisx/keyspace"
	"github.com/bulkaction/bulkaction/internal/testkit/stagetest"
	"github.com/bulkaction/bulkaction/processor"
)

// suspects creates a group of n jobs of type typ. Each of them has lost one worker and is ready
// again.
func suspects(w *stagetest.World, group, typ string, n int) {
	w.T.Helper()
	w.Jobs(group, typ, n)
	w.Admit(typ)
	w.Take(typ, "lost", n)
	loseWorker(w, typ, n)
}

// loseWorker reclaims the n jobs of type typ that workers hold, as if these workers were dead, and
// makes the jobs ready again.
func loseWorker(w *stagetest.World, typ string, n int) {
	w.T.Helper()
	reclaim(w, typ, n)
	promote(w, typ, n)
}

// reclaim takes back the n jobs of type typ that workers hold. They become non-ready.
func reclaim(w *stagetest.World, typ string, n int) {
	w.T.Helper()
	r, err := ledger.Reclaim(w.T.Context(), w.Conn.Cmd, w.P, typ, 0, 200, 5, false)
	require.NoError(w.T, err)
	require.Equal(w.T, n, r.Taken)
}

// promote makes n non-ready jobs of type typ ready.
func promote(w *stagetest.World, typ string, n int) {
	w.T.Helper()
	back, err := ledger.Promote(w.T.Context(), w.Conn.Cmd, w.P, ledger.PromoteArgs{Most: 200, Meter: ledger.Meter{Window: time.Second}, Seed: "0badcafe", Cap: 1 << 30})
	require.NoError(w.T, err)
	require.Equal(w.T, n, back.Moved)
}

// TestSuspectsRunAlone: no other job runs in the process while a suspect runs.
func TestSuspectsRunAlone(t *testing.T) {
	w := stagetest.Parallel(t, 1)
	suspects(w, "suspects", "T", 3)
	w.Jobs("others", "T", 40)
	w.Admit("T")
	var running, alone atomic.Int64
	proc := processor.Func("T", func(ctx context.Context, j processor.Job) (any, error) {
		with := running.Add(1)
		defer running.Add(-1)
		for range 20 { // long enough for other jobs to begin, if the worker let them
			if j.Group == "suspects" && with+running.Load() != 2 {
				return nil, processor.Permanent("NOT_ALONE", fmt.Errorf("%d jobs run beside it", running.Load()-1))
			}
			select {
			case <-ctx.Done():
			case <-time.After(time.Millisecond):
			}
		}
		if j.Group == "suspects" {
			alone.Add(1)
		}
		return nil, nil
	})
	w.Feed(stagetest.Patience, "T")
	w.Run(newWorker(w, config(), proc))
	w.AwaitCounts("suspects", api.Counts{Accepted: 3, Done: 3})
	w.AwaitCounts("others", api.Counts{Accepted: 40, Done: 40})
	require.EqualValues(t, 3, alone.Load())
}

// TestSuspectsSpreadOverProcesses: each process takes one suspect and leaves the others to idle
// processes, so that suspects run at the same time, each alone in its process.
func TestSuspectsSpreadOverProcesses(t *testing.T) {
	w := stagetest.Parallel(t, 1)
	const processes, jobs = 4, 10
	suspects(w, "suspects", "T", jobs)
	proc, cfg := newBlockingProcessor("T"), config()
	cfg.Count = jobs // one read delivers all of them
	workers := make([]*worker.Worker, processes)
	for i := range workers {
		workers[i] = newWorker(w, cfg, proc)
		w.Run(workers[i])
	}
	for range processes {
		stagetest.Receive(t, proc.started, "a suspect in each process")
	}
	for _, wk := range workers {
		require.Len(t, wk.Status().CurrentJobs, 1)
	}
	require.Equal(t, api.Counts{Accepted: jobs, InFlight: processes, Ready: jobs - processes}, w.Counts("suspects"))
	for range jobs {
		proc.end <- nil
	}
	w.AwaitCounts("suspects", api.Counts{Accepted: jobs, Done: jobs})
	for _, r := range w.Results() {
		require.LessOrEqual(t, r.Attempts, 2*processes+2, "attempts of job %d", r.Ordinal)
	}
}

// TestNeighboursOfASuspectAreNotStarted: a process runs one of two suspects, and starts neither the
// other one nor jobs that become ready later. After the first suspect is reclaimed, as if the
// process had died, it has two losses, the other suspect still has one, and later jobs have none.
func TestNeighboursOfASuspectAreNotStarted(t *testing.T) {
	w := stagetest.Parallel(t, 1)
	suspects(w, "suspects", "T", 2)
	g := newBlockingProcessor("T")
	wk := newWorker(w, config(), g)
	stop := w.Run(wk)
	first := stagetest.Receive(t, g.started, "the first suspect")
	require.Equal(t, []string{"suspects." + fmt.Sprint(first.Ordinal)}, wk.Status().CurrentJobs)
	w.Jobs("others", "T", 10)
	w.Admit("T")
	require.Equal(t, api.Counts{Accepted: 2, InFlight: 1, Ready: 1}, w.Counts("suspects"))
	require.Equal(t, api.Counts{Accepted: 10, Ready: 10}, w.Counts("others"))
	require.Empty(t, g.started)

	w.Await("the process to release the second suspect", func() bool { return w.Pending(w.P.Ready("T"), keyspace.GroupWorkers) == 1 })
	loseWorker(w, "T", 1) // as if the worker process had died
	for range 2 {
		j := w.Take("T", "next", 1)[0]
		for j.Group != "suspects" {
			w.Done("null", j)
			require.Zero(t, j.Losses)
			j = w.Take("T", "next", 1)[0]
		}
		want := 1
		if j.Ordinal == first.Ordinal {
			want = 2
		}
		require.Equal(t, want, j.Losses, "losses of job %d", j.Ordinal)
		w.Done("null", j)
	}
	g.end <- nil // the lost worker reports late
	stop()
	require.EqualValues(t, 2, w.Counts("suspects").Done)
}

// TestSuspectWaitsUntilRunningJobsEnd: a suspect begins after the running jobs have ended, and no
// other job begins meanwhile. A process that stops before that releases the suspect.
func TestSuspectWaitsUntilRunningJobsEnd(t *testing.T) {
	t.Parallel()
	for name, stops := range map[string]bool{"until they end": false, "until the process stops": true} {
		t.Run(name, func(t *testing.T) {
			w := stagetest.Parallel(t, 1)
			w.Jobs("suspects", "S", 1)
			w.Admit("S")
			w.Take("S", "lost", 1)
			reclaim(w, "S", 1)
			w.Jobs("long", "T", 2)
			w.Admit("T")
			long, suspect := newBlockingProcessor("T"), newBlockingProcessor("S")
			stop, ended := runInBackground(w, newWorker(w, config(), long, suspect))
			for range 2 {
				stagetest.Receive(t, long.started, "a long job")
			}
			promote(w, "S", 1)
			w.Await("the suspect to be held", func() bool { return w.Pending(w.P.Ready("S"), keyspace.GroupWorkers) == 1 })
			w.Jobs("late", "T", 1)
			w.Admit("T")
			long.end <- nil
			w.AwaitCounts("long", api.Counts{Accepted: 2, InFlight: 1, Done: 1})
			require.Empty(t, suspect.started)
			require.Equal(t, api.Counts{Accepted: 1, Ready: 1}, w.Counts("suspects"))
			if stops {
				stop()
				long.end <- nil
				require.NoError(t, stagetest.Receive(t, ended, "the worker's end"))
				require.Equal(t, api.Counts{Accepted: 1, Ready: 1}, w.Counts("suspects"))
				require.Equal(t, 1, w.Take("S", "next", 1)[0].Losses)
				return
			}
			long.end <- nil
			stagetest.Receive(t, suspect.started, "the suspect")
			require.Empty(t, long.started)
			suspect.end <- nil
			stagetest.Receive(t, long.started, "the late job")
			long.end <- nil
			w.AwaitCounts("late", api.Counts{Accepted: 1, Done: 1})
			w.AwaitCounts("suspects", api.Counts{Accepted: 1, Done: 1})
			stop()
			require.NoError(t, stagetest.Receive(t, ended, "the worker's end"))
		})
	}
}

// TestSuspectThatIgnoresItsTimeoutIsAbandoned: a suspect whose processor ignores the timeout is
// abandoned and becomes non-ready, and 5 jobs of another type run in the process.
func TestSuspectThatIgnoresItsTimeoutIsAbandoned(t *testing.T) {
	w := stagetest.Parallel(t, 1)
	suspects(w, "suspects", "T", 1)
	g := newBlockingProcessor("T")
	cfg := config()
	cfg.JobTimeout = 20 * time.Millisecond
	stop := w.Run(newWorker(w, cfg, ignoringProcessor{g}, processorReturning("U", nil, nil)))
	stagetest.Receive(t, g.started, "the suspect")
	w.Await("the suspect to be abandoned", func() bool { return w.Counts("suspects").NonReady == 1 })
	w.Jobs("others", "U", 5)
	w.Admit("U")
	w.AwaitCounts("others", api.Counts{Accepted: 5, Done: 5})
	g.end <- nil
	stop()
}

// TestManySuspectsNeedFewAttempts: after the first suspect, the process reads one entry at a time.
// So it reads few suspects that it must release; each release costs an attempt. Of 100 suspects,
// none needs more than 10 attempts.
func TestManySuspectsNeedFewAttempts(t *testing.T) {
	w := stagetest.Parallel(t, 1)
	const jobs = 100
	suspects(w, "suspects", "T", jobs)
	w.Feed(stagetest.Patience, "T")
	w.Run(newWorker(w, config(), processorReturning("T", nil, nil)))
	w.AwaitCounts("suspects", api.Counts{Accepted: jobs, Done: jobs})
	for _, r := range w.Results() {
		require.LessOrEqual(t, r.Attempts, 10, "attempts of job %d", r.Ordinal) // one lost, a few released, one run
	}
}
