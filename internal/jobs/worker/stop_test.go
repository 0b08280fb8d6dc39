package worker_test

import (
	"context"
	"errors"
	"sync/atomic"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/bulkaction/bulkaction/api"
	"github.com/bulkaction/bulkaction/internal/jobs/worker"
	"github.com/bulkaction/bulkaction/internal/messages"
	"github.com/bulkaction/bulkaction/internal/redisx/keyspace"
	"github.com/bulkaction/bulkaction/internal/stage/presence"
	"github.com/bulkaction/bulkaction/internal/testkit/stagetest"
	"github.com/bulkaction/bulkaction/processor"
)

// runInBackground starts a worker. stop tells the worker to stop and does not wait; ended gets what
// Run returns.
func runInBackground(w *stagetest.World, wk *worker.Worker) (stop context.CancelFunc, ended <-chan error) {
	ctx, stop := context.WithCancel(context.WithoutCancel(w.T.Context()))
	done := make(chan error, 1)
	go func() { done <- wk.Run(ctx) }()
	w.T.Cleanup(stop)
	return stop, done
}

func TestStopWaitsForTheRunningJob(t *testing.T) {
	w := withReady(t, "T", 1)
	g := newBlockingProcessor("T")
	cfg := config()
	cfg.Count = 3
	wk := newWorker(w, cfg, g)
	stop, ended := runInBackground(w, wk)
	stagetest.Receive(t, g.started, "the job's start")
	st := wk.Status()
	require.Equal(t, []string{"g.0"}, st.CurrentJobs)
	require.Equal(t, []int{3, 1, 2}, []int{st.Workers, st.Active, st.Idle})
	require.False(t, st.ShuttingDown)

	stop()
	w.Await("a status that says it is stopping", func() bool {
		all, err := presence.Workers(t.Context(), w.Conn, w.Space)
		return err == nil && len(all) == 1 && all[0].ShuttingDown && len(all[0].Types) == 0 && all[0].Active == 1
	})
	require.True(t, wk.Status().ShuttingDown)
	require.Empty(t, ended)
	require.Equal(t, api.Counts{Accepted: 1, InFlight: 1}, w.Counts("g"))
	require.NoError(t, wk.Resize(5)) // the worker is stopping: this has no effect

	g.end <- nil
	require.NoError(t, stagetest.Receive(t, ended, "the worker's end"))
	require.Equal(t, api.Counts{Accepted: 1, Done: 1}, w.Counts("g"))
	consumers, err := w.Conn.Cmd.XInfoConsumers(t.Context(), w.P.Ready("T"), keyspace.GroupWorkers).Result()
	require.NoError(t, err)
	require.Empty(t, consumers)
}

func TestStopReleasesJobsAfterTheGracePeriod(t *testing.T) {
	t.Parallel()
	for name, ignores := range map[string]bool{"a processor that ends with its context": false, "a processor that ignores its context": true} {
		t.Run(name, func(t *testing.T) {
			w := withReady(t, "T", 1)
			g := newBlockingProcessor("T")
			var proc processor.Processor
			causes := make(chan error, 1)
			if ignores {
				proc = ignoringProcessor{g}
			} else {
				proc = processor.Func("T", func(ctx context.Context, j processor.Job) (any, error) {
					_, err := g.Process(ctx, j)
					causes <- context.Cause(ctx)
					return nil, err
				})
			}
			cfg := config()
			cfg.Grace = 10 * time.Millisecond
			stop, ended := runInBackground(w, newWorker(w, cfg, proc))
			stagetest.Receive(t, g.started, "the job's start")
			stop()
			require.NoError(t, stagetest.Receive(t, ended, "the worker's end"))
			require.Equal(t, api.Counts{Accepted: 1, NonReady: 1}, w.Counts("g"))
			require.Zero(t, w.Group("g").Retries)
			if ignores {
				g.end <- nil // the processor returns late, which changes nothing
			} else {
				require.ErrorContains(t, <-causes, "shutting down")
			}

			// Another worker process starts the released job, as its second attempt.
			w.Feed(stagetest.Patience, "T")
			again := newBlockingProcessor("T")
			w.Run(newWorker(w, config(), again))
			require.Equal(t, 2, stagetest.Receive(t, again.started, "the job's second start").Attempt)
			again.end <- nil
			w.AwaitCounts("g", api.Counts{Accepted: 1, Done: 1})
		})
	}
}

func TestStopReleasesJobsThatNeverRan(t *testing.T) {
	w := stagetest.Parallel(t, 1)
	const quick, held = 200, 30
	w.Jobs("quick", "T", quick)
	w.Admit("T")
	g := newBlockingProcessor("T")
	cfg := config()
	cfg.Count = 1
	stop, ended := runInBackground(w, newWorker(w, cfg, processor.Func("T", func(ctx context.Context, j processor.Job) (any, error) {
		if j.Group == "quick" {
			return nil, nil
		}
		return g.Process(ctx, j)
	})))
	w.AwaitCounts("quick", api.Counts{Accepted: quick, Done: quick}) // from now on the worker expects short jobs, and prefetches

	w.Jobs("g", "T", held)
	w.Admit("T")
	stagetest.Receive(t, g.started, "the first job's start")
	var c api.Counts
	w.Await("some jobs to be prefetched", func() bool { c = w.Counts("g"); return c.InFlight+c.NonReady > 1 })
	stop()
	w.Await("all but the running job to be released", func() bool { c = w.Counts("g"); return c.InFlight == 1 && c.NonReady > 0 })
	require.EqualValues(t, held-1, c.NonReady+c.Ready)
	g.end <- nil
	require.NoError(t, stagetest.Receive(t, ended, "the worker's end"))
	require.Equal(t, api.Counts{Accepted: held, NonReady: c.NonReady, Ready: c.Ready, Done: 1}, w.Counts("g"))
	require.Empty(t, g.started)
}

func TestJobTimeoutFailsTheJob(t *testing.T) {
	t.Parallel()
	zero := 0
	for name, tt := range map[string]struct{ worker, typ, group time.Duration }{
		"of the worker": {worker: 20 * time.Millisecond},
		"of the type":   {worker: stagetest.Patience, typ: 20 * time.Millisecond},
		"of the group":  {worker: stagetest.Patience, typ: stagetest.Patience, group: 20 * time.Millisecond},
	} {
		t.Run(name, func(t *testing.T) {
			w := stagetest.Parallel(t, 1)
			w.Submit(messages.SubmitGroup{
				ID: "g", Tenant: "acme", Type: "T", JobTimeout: messages.Duration(tt.group), MaxRetries: &zero, Jobs: stagetest.Numbered(1)})
			w.Admit("T")
			cfg := config()
			cfg.JobTimeout = tt.worker
			cfg.TypeTimeouts = map[string]time.Duration{"T": tt.typ, "U": time.Millisecond}
			causes := make(chan error, 1)
			w.Run(newWorker(w, cfg, processor.Func("T", func(ctx context.Context, _ processor.Job) (any, error) {
				<-ctx.Done()
				causes <- context.Cause(ctx)
				return nil, errors.New("context ended")
			})))
			w.AwaitCounts("g", api.Counts{Accepted: 1, Failed: 1})
			letter := w.DeadLetters()[0]
			require.Equal(t, processor.CodeTimeout, letter.Code)
			require.Equal(t, "timed out after 20ms", letter.Error)
			require.ErrorIs(t, <-causes, context.DeadlineExceeded)
		})
	}
}

// TestResultAfterTheTimeoutDoesNotCount: a processor returns a result just after the timeout, so
// that it is not abandoned before. Its job fails as timed out.
func TestResultAfterTheTimeoutDoesNotCount(t *testing.T) {
	w := stagetest.Parallel(t, 1)
	zero := 0
	w.Submit(messages.SubmitGroup{ID: "g", Tenant: "acme", Type: "T", MaxRetries: &zero, Jobs: stagetest.Numbered(1)})
	w.Admit("T")
	cfg := config()
	cfg.JobTimeout = 300 * time.Millisecond
	w.Run(newWorker(w, cfg, processor.Func("T", func(ctx context.Context, _ processor.Job) (any, error) { <-ctx.Done(); return "late", nil })))
	w.AwaitCounts("g", api.Counts{Accepted: 1, Failed: 1})
	require.Equal(t, map[string]int64{processor.CodeTimeout: 1}, w.Group("g").FailuresByCode)
}

func TestProcessorThatIgnoresItsTimeoutIsAbandoned(t *testing.T) {
	w := stagetest.Parallel(t, 1)
	zero := 0
	w.Submit(messages.SubmitGroup{ID: "g", Tenant: "acme", Type: "T", MaxRetries: &zero, Jobs: stagetest.Numbered(3)})
	w.Admit("T")
	cfg := config()
	cfg.Count, cfg.JobTimeout = 1, 30*time.Millisecond
	g := newBlockingProcessor("T")
	wk := newWorker(w, cfg, ignoringProcessor{g})
	stop := w.Run(wk)
	// The jobs are abandoned one after the other, and a new slot replaces the only slot each time.
	for range 3 {
		stagetest.Receive(t, g.started, "a job's start")
	}
	w.AwaitCounts("g", api.Counts{Accepted: 3, Failed: 3})
	require.Equal(t, map[string]int64{processor.CodeTimeout: 3}, w.Group("g").FailuresByCode)
	w.Await("one idle slot", func() bool {
		st := wk.Status()
		return st.Workers == 1 && st.Active == 0 && st.Idle == 1 && len(st.CurrentJobs) == 0
	})

	for range 3 {
		g.end <- nil // the abandoned processors return late
	}
	w.Jobs("next", "T", 1)
	w.Admit("T")
	stagetest.Receive(t, g.started, "the next job's start")
	g.end <- nil
	w.AwaitCounts("next", api.Counts{Accepted: 1, Done: 1})
	require.Equal(t, api.Counts{Accepted: 3, Failed: 3}, w.Counts("g"))
	st := wk.Status()
	require.Equal(t, []int{1, 0}, []int{st.Workers, st.Active})
	stop()
}

func TestResize(t *testing.T) {
	w := stagetest.Parallel(t, 1)
	const n = 40
	w.Jobs("g", "T", n)
	w.Admit("T")
	g := newBlockingProcessor("T")
	var running, most atomic.Int64
	cfg := config()
	cfg.Count = 2
	wk := newWorker(w, cfg, processor.Func("T", func(ctx context.Context, j processor.Job) (any, error) {
		now := running.Add(1)
		defer running.Add(-1)
		for m := most.Load(); now > m && !most.CompareAndSwap(m, now); m = most.Load() {
		}
		return g.Process(ctx, j)
	}))
	require.NoError(t, wk.Resize(1)) // before the worker runs
	require.Equal(t, 1, wk.Status().Workers)
	w.Run(wk)
	active := func(size, n int) {
		t.Helper()
		w.Await("active slots, whose jobs run", func() bool { // a slot is active just before its job runs
			st := wk.Status()
			return st.Workers == size && st.Active == n && running.Load() == int64(n)
		})
	}
	active(1, 1)
	require.NoError(t, wk.Resize(4))
	active(4, 4) // new slots open at once
	require.NoError(t, wk.Resize(2))
	active(2, 4) // running jobs go on
	ended := 0
	for ; wk.Status().Active > 2; ended++ { // a slot that stays open may begin another job
		g.end <- nil
		w.Await("the job's end", func() bool { return w.Counts("g").Done == int64(ended+1) })
	}
	most.Store(0)
	for ; ended < n; ended++ {
		g.end <- nil
	}
	w.AwaitCounts("g", api.Counts{Accepted: n, Done: n})
	require.LessOrEqual(t, most.Load(), int64(2))

	require.ErrorContains(t, wk.Resize(-1), "must be 0 to 10000")
	require.ErrorContains(t, wk.Resize(api.MaxWorkers+1), "must be 0 to 10000")
}

// TestPoolOfNoSlots: a pool of 4 slots is resized to 0 through Redis. Its 4 running jobs end, and 4
// other jobs stay ready until Resize gives the pool a slot again.
func TestPoolOfNoSlots(t *testing.T) {
	w := stagetest.Parallel(t, 1)
	g := newBlockingProcessor("T")
	wk := newWorker(w, config(), g)
	w.Run(wk)
	resize := func(n int) {
		w.Await("the pool to be resized", func() bool {
			err := presence.SetPoolSize(t.Context(), w.Conn, w.Space, wk.ID, n)
			return err == nil && wk.Status().Workers == n
		})
	}
	w.Jobs("g", "T", 8)
	w.Admit("T")
	w.AwaitCounts("g", api.Counts{Accepted: 8, Ready: 4, InFlight: 4})
	resize(0)
	close(g.end)
	w.AwaitCounts("g", api.Counts{Accepted: 8, Ready: 4, Done: 4})
	require.NoError(t, wk.Resize(1), "a resize that was taken is not taken again")
	w.AwaitCounts("g", api.Counts{Accepted: 8, Done: 8})
	require.Equal(t, 1, wk.Status().Workers)
	require.ErrorIs(t, presence.SetPoolSize(t.Context(), w.Conn, w.Space, "gone", 1), api.ErrNotFound)
}

// TestPrefetchIsBounded: a process with 3 slots prefetches no job that takes 60 ms or more. It
// holds only the 3 jobs that it runs; the rest of the 50 jobs stay ready.
func TestPrefetchIsBounded(t *testing.T) {
	w := withReady(t, "T", 50)
	g := newBlockingProcessor("T")
	cfg := config()
	cfg.Count, cfg.Block = 3, 10*time.Millisecond
	w.Run(newWorker(w, cfg, processor.Func("T", func(ctx context.Context, j processor.Job) (any, error) {
		select { // too long for prefetching
		case <-time.After(60 * time.Millisecond):
		case <-ctx.Done():
		}
		return g.Process(ctx, j)
	})))
	for done := range int64(12) {
		w.AwaitCounts("g", api.Counts{Accepted: 50, Ready: 47 - done, InFlight: 3, Done: done})
		g.end <- nil
	}
	require.LessOrEqual(t, w.Pending(w.P.Ready("T"), keyspace.GroupWorkers), int64(3))
	close(g.end)
	w.AwaitCounts("g", api.Counts{Accepted: 50, Done: 50})
}

// TestJobsThatWaitBehindSlowJobsAreReleased: after many quick jobs, a worker prefetches slow ones
// as if they were quick too. The ones that wait for a slot are released.
func TestJobsThatWaitBehindSlowJobsAreReleased(t *testing.T) {
	w := stagetest.Parallel(t, 1)
	slow := newBlockingProcessor("SLOW")
	cfg := config()
	cfg.Count = 2
	stop := w.Run(newWorker(w, cfg, processorReturning("QUICK", nil, nil), slow))
	w.Jobs("quick", "QUICK", 500)
	w.Admit("QUICK")
	w.AwaitCounts("quick", api.Counts{Accepted: 500, Done: 500})

	const jobs = 60
	w.Jobs("slow", "SLOW", jobs)
	w.Admit("SLOW")
	for range cfg.Count {
		stagetest.Receive(t, slow.started, "a slow job")
	}
	w.Await("the jobs without a slot to be released or left ready", func() bool {
		c := w.Counts("slow")
		return c.InFlight == int64(cfg.Count) && c.NonReady > 0
	})
	c := w.Counts("slow")
	require.EqualValues(t, jobs-cfg.Count, c.NonReady+c.Ready)
	require.Zero(t, w.Group("slow").Retries)

	// A second process runs the 58 jobs that were released or never read. The first one ends only
	// the two that it had begun.
	w.Feed(stagetest.Patience, "SLOW")
	w.Run(newWorker(w, config(), processorReturning("SLOW", nil, nil)))
	w.Await("the others to be done", func() bool { return w.Counts("slow").Done == jobs-int64(cfg.Count) })
	require.Empty(t, slow.started, "the first process began none of them")
	for range cfg.Count {
		slow.end <- nil
	}
	w.AwaitCounts("slow", api.Counts{Accepted: jobs, Done: jobs})
	stop()
}
