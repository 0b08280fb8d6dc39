package worker_test

import (
	"context"
	"errors"
	"fmt"
	"math"
	"runtime"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/redis/go-redis/v9"
	"github.com/stretchr/testify/require"

	"github.com/bulkaction/bulkaction/api"
	"github.com/bulkaction/bulkaction/internal/access/auth"
	"github.com/bulkaction/bulkaction/internal/stage/presence"
	"github.com/bulkaction/bulkaction/internal/testkit/stagetest"
	"github.com/bulkaction/bulkaction/processor"
)

// gatedProcessor is a fake of a gated processor. Each call of Admit sends its job on asked and
// calls admit; each call of Process sends its job on started and calls process. It records with
// which error each pass was returned.
type gatedProcessor struct {
	typ            string
	admit, process func(ctx context.Context, j processor.Job) error
	asked, started chan processor.Job

	available atomic.Pointer[processor.Availability]
	mu        sync.Mutex
	lent      int              // passes that are out
	returned  map[string]error // by job id
}

func newGatedProcessor(typ string) *gatedProcessor {
	g := &gatedProcessor{
		typ: typ, asked: make(chan processor.Job, 1000), started: make(chan processor.Job, 1000),
		returned: map[string]error{},
	}
	g.offer(processor.Availability{Free: -1, PerSecond: math.Inf(1)})
	nothing := func(context.Context, processor.Job) error { return nil }
	g.admit, g.process = nothing, nothing
	return g
}

func (g *gatedProcessor) offer(a processor.Availability) { g.available.Store(&a) }

func (g *gatedProcessor) Type() string { return g.typ }

func (g *gatedProcessor) Availability() processor.Availability { return *g.available.Load() }

func (g *gatedProcessor) Admit(ctx context.Context, j processor.Job) (processor.Pass, error) {
	g.asked <- j
	if err := g.admit(ctx, j); err != nil {
		return nil, err
	}
	g.mu.Lock()
	defer g.mu.Unlock()
	g.lent++
	return &testPass{g, j.ID()}, nil
}

func (g *gatedProcessor) Process(ctx context.Context, j processor.Job) (any, error) {
	if ctx.Value(passKey{}) != j.ID() {
		return nil, processor.Permanent("NO_PASS", errors.New("the context has no pass of this job"))
	}
	g.started <- j
	return nil, g.process(ctx, j)
}

// passes returns how many passes are out, of all jobs; whether the pass of the job with this id has
// come back; and the error with which that pass was returned.
func (g *gatedProcessor) passes(id string) (out int, back bool, returned error) {
	g.mu.Lock()
	defer g.mu.Unlock()
	returned, back = g.returned[id]
	return g.lent, back, returned
}

type passKey struct{}

type testPass struct {
	g  *gatedProcessor
	id string
}

func (p *testPass) Into(ctx context.Context) context.Context {
	return context.WithValue(ctx, passKey{}, p.id)
}

func (p *testPass) Return(err error) {
	p.g.mu.Lock()
	defer p.g.mu.Unlock()
	p.g.lent--
	p.g.returned[p.id] = err
}

// untilEnd waits until ctx ends.
func untilEnd(ctx context.Context, _ processor.Job) error {
	<-ctx.Done()
	return ctx.Err()
}

func TestJobsWaitForAPassOutsideOfTheSlots(t *testing.T) {
	w := stagetest.Parallel(t, 1)
	w.Jobs("gated", "G", 20)
	w.Jobs("others", "T", 50)
	g := newGatedProcessor("G")
	open := make(chan struct{})
	g.admit = func(ctx context.Context, _ processor.Job) error {
		select {
		case <-open:
		case <-ctx.Done():
		}
		return ctx.Err()
	}
	w.Admit("G")
	cfg := config()
	cfg.Count = 1
	w.Run(newWorker(w, cfg, g, processorReturning("T", nil, nil)))
	stagetest.Receive(t, g.asked, "a call of Admit")
	w.Admit("T")
	w.AwaitCounts("others", api.Counts{Accepted: 50, Done: 50})
	require.Equal(t, api.Counts{Accepted: 20, Ready: 20}, w.Counts("gated"), "no job is started without a pass")
	close(open)
	w.AwaitCounts("gated", api.Counts{Accepted: 20, Done: 20})
	out, back, returned := g.passes("gated.7")
	require.Zero(t, out)
	require.NoError(t, returned)
	require.True(t, back)
}

func TestADeferredJobIsNotStarted(t *testing.T) {
	stagetest.Both(t, func(w *stagetest.World) {
		w.Jobs("g", "G", 1)
		w.Admit("G")
		g := newGatedProcessor("G")
		g.admit = func(context.Context, processor.Job) error { return processor.Deferred(time.Hour, "no account is free") }
		w.Run(newWorker(w, config(), g))
		w.AwaitCounts("g", api.Counts{Accepted: 1, NonReady: 1})
		job := w.Job("g", 0)
		require.Equal(w.T, "no account is free", job.LastError.Error)
		require.Equal(w.T, processor.CodeResourceBusy, job.LastError.Code)
		require.Zero(w.T, w.Group("g").Retries)
		require.Empty(w.T, g.started)
	})
}

// TestErrorsOfAdmit: a permanent error, another error, a panic or a timeout of Admit fails a job
// that has no retries, with the code of that error. Process is not called.
func TestErrorsOfAdmit(t *testing.T) {
	t.Parallel()
	for name, tt := range map[string]struct {
		admit func(context.Context, processor.Job) error
		want  string
	}{
		"permanent": {func(context.Context, processor.Job) error { return processor.Permanent("NO", errors.New("never")) }, "NO"},
		"retry":     {func(context.Context, processor.Job) error { return errors.New("broken") }, processor.CodeError},
		"panic":     {func(context.Context, processor.Job) error { panic("oh") }, "PANIC"},
		"timeout":   {untilEnd, processor.CodeTimeout},
		"panic of a nil error": {func(context.Context, processor.Job) error {
			var err *hostileError
			return err
		}, "PANIC"},
		"end of the goroutine": {func(context.Context, processor.Job) error { runtime.Goexit(); return nil }, "PANIC"},
	} {
		t.Run(name, func(t *testing.T) {
			w := withReady(t, "G", 1)
			g := newGatedProcessor("G")
			g.admit = tt.admit
			cfg := config()
			cfg.MaxRetries = 0
			if name == "timeout" {
				cfg.TypeTimeouts = map[string]time.Duration{"G": 20 * time.Millisecond}
			}
			w.Run(newWorker(w, cfg, g))
			w.AwaitCounts("g", api.Counts{Accepted: 1, Failed: 1})
			require.Equal(t, tt.want, w.DeadLetters()[0].Code)
			require.Empty(t, g.started)
		})
	}
}

// TestPassesComeBack: the pass of a job comes back when Process succeeds, fails, panics or times
// out: with the error of Process, or with a timeout if Process ignores the timeout.
func TestPassesComeBack(t *testing.T) {
	t.Parallel()
	failure := processor.Permanent("NO", errors.New("never"))
	release := make(chan struct{})
	t.Cleanup(func() { close(release) }) // after all subtests
	for name, tt := range map[string]struct {
		process func(context.Context, processor.Job) error
		want    func(t *testing.T, err error)
	}{
		"done":      {nil, func(t *testing.T, err error) { require.NoError(t, err) }},
		"permanent": {func(context.Context, processor.Job) error { return failure }, func(t *testing.T, err error) { require.ErrorIs(t, err, failure) }},
		"panic":     {func(context.Context, processor.Job) error { panic("oh") }, func(t *testing.T, err error) { require.Equal(t, "PANIC", processor.Classify(err).Code) }},
		"timeout":   {untilEnd, func(t *testing.T, err error) { require.Equal(t, processor.CodeTimeout, processor.Classify(err).Code) }},
		"it ignores the timeout": {
			func(ctx context.Context, _ processor.Job) error {
				<-ctx.Done()
				<-release
				return nil
			},
			func(t *testing.T, err error) { require.Equal(t, processor.CodeTimeout, processor.Classify(err).Code) },
		},
	} {
		t.Run(name, func(t *testing.T) {
			w := withReady(t, "G", 1)
			g := newGatedProcessor("G")
			if tt.process != nil {
				g.process = tt.process
			}
			cfg := config()
			cfg.MaxRetries = 0
			cfg.TypeTimeouts = map[string]time.Duration{"G": 20 * time.Millisecond}
			if name == "done" || name == "permanent" || name == "panic" {
				cfg.TypeTimeouts = nil
			}
			w.Run(newWorker(w, cfg, g))
			w.Await("the end of the job", func() bool { return w.Counts("g").Ready+w.Counts("g").InFlight == 0 })
			out, back, err := g.passes("g.0")
			require.Zero(t, out)
			require.True(t, back)
			tt.want(t, err)
		})
	}
}

// TestACancelledGroupWaitsForNoPass: a group is cancelled while its job waits for a pass. The
// context of the call of Admit ends, the ready stream becomes empty, and Process is not called.
func TestACancelledGroupWaitsForNoPass(t *testing.T) {
	w := withReady(t, "G", 1)
	g := newGatedProcessor("G")
	ended := make(chan error, 1)
	g.admit = func(ctx context.Context, _ processor.Job) error {
		<-ctx.Done()
		ended <- context.Cause(ctx)
		return ctx.Err()
	}
	w.Run(newWorker(w, config(), g))
	stagetest.Receive(t, g.asked, "the call of Admit")
	_, err := w.Store.Cancel(auth.Trust(t.Context()), "g")
	require.NoError(t, err)
	require.ErrorContains(t, stagetest.Receive(t, ended, "its end"), "cancelled")
	w.Await("an empty stream", func() bool { return w.Conn.Cmd.XLen(t.Context(), w.P.Ready("G")).Val() == 0 })
	require.Empty(t, g.started)
}

// TestAPassOfAJobThatIsNotStarted: Admit cancels the group of its job and then gives a pass. The
// job is not started, and the pass comes back with a deferral.
func TestAPassOfAJobThatIsNotStarted(t *testing.T) {
	w := withReady(t, "G", 1)
	g := newGatedProcessor("G")
	g.admit = func(context.Context, processor.Job) error {
		_, err := w.Store.Cancel(auth.Trust(context.WithoutCancel(t.Context())), "g")
		return err
	}
	w.Run(newWorker(w, config(), g))
	w.Await("the pass", func() bool { _, back, _ := g.passes("g.0"); return back })
	_, _, err := g.passes("g.0")
	require.Equal(t, processor.Defer, processor.Classify(err).Kind)
	require.Empty(t, g.started)
}

// TestHowManyJobsWaitForAPass: a process reads no more jobs ahead than will get a pass and a slot,
// but at least two.
func TestHowManyJobsWaitForAPass(t *testing.T) {
	t.Parallel()
	for name, tt := range map[string]struct {
		available processor.Availability
		slots     int
		want      int64
	}{
		"none is free":        {processor.Availability{Free: 0}, 50, 2},
		"one is free":         {processor.Availability{Free: 1}, 50, 2},
		"some are free":       {processor.Availability{Free: 7}, 50, 7},
		"more than slots":     {processor.Availability{Free: 70}, 5, 5},
		"more than one slot":  {processor.Availability{Free: 70}, 1, 2},
		"any number is free":  {processor.Availability{Free: -1, PerSecond: math.Inf(1)}, 6, 6},
		"a time that is over": {processor.Availability{Free: 0, Next: time.Now().Add(-time.Second)}, 50, 2},
	} {
		t.Run(name, func(t *testing.T) {
			w := withReady(t, "G", 100)
			g := newGatedProcessor("G")
			g.offer(tt.available)
			g.admit = untilEnd
			cfg := config()
			cfg.Count = tt.slots
			stop := w.Run(newWorker(w, cfg, g))
			for range tt.want {
				stagetest.Receive(t, g.asked, "a call of Admit")
			}
			require.Equal(t, tt.want, w.Pending(w.P.Ready("G"), "workers"))
			require.Empty(t, g.asked)
			stop()
			require.Equal(t, api.Counts{Accepted: 100, Ready: 100}, w.Counts("g"), "the jobs are given back")
			require.Zero(t, w.Pending(w.P.Ready("G"), "workers"))
		})
	}
}

// TestJobsWithAPassWaitForASlot: jobs with a pass wait for a slot. While all slots are busy, the
// process reads only two jobs ahead.
func TestJobsWithAPassWaitForASlot(t *testing.T) {
	w := withReady(t, "G", 20)
	g := newGatedProcessor("G")
	g.process = untilEnd
	cfg := config()
	cfg.Count, cfg.Grace = 1, time.Millisecond
	stop := w.Run(newWorker(w, cfg, g))
	stagetest.Receive(t, g.started, "the first job's start")
	for range 3 {
		stagetest.Receive(t, g.asked, "a call of Admit")
	}
	w.Await("started jobs", func() bool { return w.Counts("g").InFlight == 3 })
	require.Empty(t, g.asked)
	stop()
	out, _, _ := g.passes("")
	require.Zero(t, out)
	require.Equal(t, api.Counts{Accepted: 20, Ready: 17, NonReady: 3}, w.Counts("g"))
}

// TestNoJobIsReadWhileNoPassIsExpected: a processor says that no pass is free for an hour: Admit is
// not called. After it no longer names a time, its 4 jobs are done.
func TestNoJobIsReadWhileNoPassIsExpected(t *testing.T) {
	w := withReady(t, "G", 4)
	g := newGatedProcessor("G")
	g.offer(processor.Availability{Free: 0, Next: time.Now().Add(time.Hour)})
	wk := newWorker(w, config(), g)
	w.Run(wk)
	w.Await("a heartbeat", func() bool {
		all, err := presence.Workers(t.Context(), w.Conn, w.Space)
		return err == nil && len(all) == 1
	})
	require.Empty(t, g.asked)
	g.offer(processor.Availability{Free: 0})
	w.AwaitCounts("g", api.Counts{Accepted: 4, Done: 4})
}

func TestTheReportSaysHowManyPassesThereAre(t *testing.T) {
	w := stagetest.Parallel(t, 1)
	bounded, open := newGatedProcessor("BOUNDED"), newGatedProcessor("OPEN")
	bounded.offer(processor.Availability{Free: 3, PerSecond: 12.5})
	w.Run(newWorker(w, config(), bounded, open, processorReturning("T", nil, nil)))
	w.Await("a heartbeat", func() bool {
		all, err := presence.Workers(t.Context(), w.Conn, w.Space)
		return err == nil && len(all) == 1 && fmt.Sprint(all[0].PermissionsPerSecond) == "map[BOUNDED:12.5]"
	})
}

// TestStopDoesNotWaitForAdmit: a worker stops although a call of Admit ignores the end of its
// context. The job is ready then. The late pass comes back with a deferral.
func TestStopDoesNotWaitForAdmit(t *testing.T) {
	w := withReady(t, "G", 1)
	g := newGatedProcessor("G")
	end := make(chan struct{})
	g.admit = func(context.Context, processor.Job) error { <-end; return nil }
	cfg := config()
	cfg.Grace = time.Millisecond
	stop, ended := runInBackground(w, newWorker(w, cfg, g))
	stagetest.Receive(t, g.asked, "the call of Admit")
	stop()
	require.NoError(t, stagetest.Receive(t, ended, "the worker's end"))
	require.Equal(t, api.Counts{Accepted: 1, Ready: 1}, w.Counts("g"))
	close(end)
	w.Await("the late pass", func() bool { _, back, _ := g.passes("g.0"); return back })
	_, _, err := g.passes("g.0")
	require.Equal(t, processor.Defer, processor.Classify(err).Kind)
}

// TestWaitingJobsKeepTheirLease: the lease of a job that waits for a pass is renewed.
func TestWaitingJobsKeepTheirLease(t *testing.T) {
	w := withReady(t, "G", 1)
	g := newGatedProcessor("G")
	g.admit = untilEnd
	cfg := config()
	cfg.Lease = 90 * time.Millisecond
	w.Run(newWorker(w, cfg, g))
	stagetest.Receive(t, g.asked, "the call of Admit")
	idle := func() time.Duration {
		p, err := w.Conn.Cmd.XPendingExt(t.Context(), &redis.XPendingExtArgs{
			Stream: w.P.Ready("G"), Group: "workers", Start: "-", End: "+", Count: 1,
		}).Result()
		require.NoError(t, err)
		require.Len(t, p, 1)
		return p[0].Idle
	}
	for before := idle(); ; { // the idle time falls when the lease is renewed
		now := idle()
		if now < before {
			break
		}
		before = now
	}
}

// TestASuspectOfAGatedType: the first call of Admit for a suspect defers the job, and the second
// one gives a pass. The job is done, and its pass comes back without an error.
func TestASuspectOfAGatedType(t *testing.T) {
	w := stagetest.Parallel(t, 1)
	suspects(w, "g", "G", 1)
	g := newGatedProcessor("G")
	var calls atomic.Int64
	g.admit = func(context.Context, processor.Job) error {
		if calls.Add(1) == 1 {
			return processor.Deferred(time.Millisecond, "busy")
		}
		return nil
	}
	w.Feed(stagetest.Patience, "G")
	w.Run(newWorker(w, config(), g))
	w.AwaitCounts("g", api.Counts{Accepted: 1, Done: 1})
	require.EqualValues(t, 2, calls.Load())
	out, back, err := g.passes("g.0")
	require.Zero(t, out)
	require.NoError(t, err)
	require.True(t, back)
}

// TestFewPassesForManyJobs: three workers share few passes: each job is done once, without a retry,
// and no more jobs run at the same time than there are accounts.
func TestFewPassesForManyJobs(t *testing.T) {
	w := stagetest.Parallel(t, 1)
	const jobs, accounts = 300, 3
	w.Jobs("g", "G", jobs)
	w.Feed(stagetest.Patience, "G")
	passes := make(chan struct{}, accounts)
	var most, running atomic.Int64
	for range 3 {
		g := newGatedProcessor("G")
		g.offer(processor.Availability{Free: accounts, PerSecond: 1000})
		g.admit = func(ctx context.Context, _ processor.Job) error {
			select {
			case passes <- struct{}{}:
				return nil
			case <-time.After(time.Millisecond):
				return processor.Deferred(2*time.Millisecond, "busy")
			case <-ctx.Done():
				return ctx.Err()
			}
		}
		g.process = func(context.Context, processor.Job) error {
			n := running.Add(1)
			for m := most.Load(); n > m && !most.CompareAndSwap(m, n); m = most.Load() {
			}
			running.Add(-1)
			<-passes
			return nil
		}
		w.Run(newWorker(w, config(), g))
	}
	w.AwaitCounts("g", api.Counts{Accepted: jobs, Done: jobs})
	require.LessOrEqual(t, most.Load(), int64(accounts))
	require.Zero(t, w.Group("g").Retries)
}
