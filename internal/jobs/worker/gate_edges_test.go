package worker_test

import (
	"context"
	"math"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/bulkaction/bulkaction/api"
	"github.com/bulkaction/bulkaction/internal/messages"
	"github.com/bulkaction/bulkaction/internal/testkit/stagetest"
	"github.com/bulkaction/bulkaction/processor"
)

// TestJobsWithAPassAreStartedWhileLeasesAreRenewed: the lease renewal and the watchdog read tasks
// of a gated type while these are started. With -race, no data race is found. All 300 jobs are
// done.
func TestJobsWithAPassAreStartedWhileLeasesAreRenewed(t *testing.T) {
	w := stagetest.Parallel(t, 1)
	w.Jobs("g", "G", 300)
	w.Feed(stagetest.Patience, "G")
	cfg := config()
	cfg.Lease = time.Millisecond
	w.Run(newWorker(w, cfg, newGatedProcessor("G")))
	w.AwaitCounts("g", api.Counts{Accepted: 300, Done: 300})
}

// hookedError is an error that calls look when errors.As examines it.
type hookedError struct{ look func() }

func (hookedError) Error() string { return "broken" }

func (e hookedError) As(any) bool { e.look(); return false }

// TestNoAdmittedJobStartsBesideASuspect: a suspect starts just when a call of Admit for another job
// has returned an error. The entry of the other job is no longer pending then, and the worker has
// started only the suspect.
func TestNoAdmittedJobStartsBesideASuspect(t *testing.T) {
	w := stagetest.Parallel(t, 1)
	w.Jobs("suspect", "T", 1)
	w.Admit("T")
	w.Take("T", "lost", 1)
	reclaim(w, "T", 1)
	w.Jobs("g", "G", 1)
	w.Admit("G")
	looked, proceed := make(chan struct{}), make(chan struct{})
	var once sync.Once
	look := func() { once.Do(func() { close(looked); <-proceed }) }
	g := newGatedProcessor("G")
	var calls atomic.Int64
	g.admit = func(context.Context, processor.Job) error {
		if calls.Add(1) == 1 {
			return hookedError{look}
		}
		return nil
	}
	plain := newBlockingProcessor("T")
	var mu sync.Mutex
	var startedGroups []string
	cfg := config()
	cfg.OnStart = func(_ int64, _ int, _, _, group string, _ int64, _ int) {
		mu.Lock()
		defer mu.Unlock()
		startedGroups = append(startedGroups, group)
	}
	w.Run(newWorker(w, cfg, g, plain))
	stagetest.Receive(t, looked, "the end of Admit")
	promote(w, "T", 1)
	stagetest.Receive(t, plain.started, "the suspect's start")
	close(proceed)
	w.Await("the job's return", func() bool { return w.Pending(w.P.Ready("G"), "workers") == 0 })
	mu.Lock()
	require.Equal(t, []string{"suspect"}, startedGroups)
	mu.Unlock()
	plain.end <- nil
	w.AwaitCounts("suspect", api.Counts{Accepted: 1, Done: 1})
}

// TestGatedJobsLeaveSlotsToOthers: 10 jobs of another type are done before the last of 400 jobs per
// slot of a gated type, all of which get a pass. The process has one slot, or three.
func TestGatedJobsLeaveSlotsToOthers(t *testing.T) {
	t.Parallel()
	for name, slots := range map[string]int{"one slot": 1, "three slots": 3} {
		t.Run(name, func(t *testing.T) {
			w := stagetest.Parallel(t, 1)
			gated := 400 * slots
			w.Jobs("gated", "G", gated)
			w.Jobs("others", "T", 10)
			w.Admit("G")
			g := newGatedProcessor("G")
			g.process = func(context.Context, processor.Job) error { // too long for prefetching
				<-time.After(20 * time.Millisecond)
				return nil
			}
			cfg := config()
			cfg.Count = slots
			w.Run(newWorker(w, cfg, g, processorReturning("T", nil, nil)))
			for range slots {
				stagetest.Receive(t, g.started, "a gated job's start")
			}
			w.Admit("T")
			w.AwaitCounts("others", api.Counts{Accepted: 10, Done: 10})
			require.Less(t, w.Counts("gated").Done, int64(gated), "the others need not wait for the last gated job")
		})
	}
}

// TestAProcessWithoutSlotsGivesPassesBack: a process is resized to 0 slots while a job runs and two
// started jobs wait for a slot. It returns their passes, and releases the two.
func TestAProcessWithoutSlotsGivesPassesBack(t *testing.T) {
	w := withReady(t, "G", 3)
	g := newGatedProcessor("G")
	end := make(chan struct{})
	g.process = func(context.Context, processor.Job) error { <-end; return nil }
	cfg := config()
	cfg.Count = 1
	wk := newWorker(w, cfg, g)
	w.Run(wk)
	stagetest.Receive(t, g.started, "the first job's start")
	w.Await("started jobs", func() bool { return w.Counts("g").InFlight == 3 })
	require.NoError(t, wk.Resize(0))
	close(end)
	w.Await("all passes", func() bool { out, _, _ := g.passes(""); return out == 0 })
	w.AwaitCounts("g", api.Counts{Accepted: 3, Done: 1, NonReady: 2})
}

// TestAShortTimeoutOfAGroup: a group's own timeout is chosen by a tenant and says nothing about the
// account. A job that it ends fails, but its pass is returned with context.Canceled and not with a
// timeout.
func TestAShortTimeoutOfAGroup(t *testing.T) {
	t.Parallel()
	for name, process := range map[string]func(context.Context, processor.Job) error{
		"the processor notices it": untilEnd,
		"the processor ignores it": func(ctx context.Context, _ processor.Job) error {
			<-ctx.Done()
			<-time.After(200 * time.Millisecond)
			return nil
		},
	} {
		t.Run(name, func(t *testing.T) {
			w := stagetest.Parallel(t, 1)
			zero := 0
			w.Submit(messages.SubmitGroup{
				ID: "g", Tenant: "acme", Type: "G", JobTimeout: messages.Duration(20 * time.Millisecond),
				MaxRetries: &zero, Jobs: stagetest.Numbered(1),
			})
			w.Admit("G")
			g := newGatedProcessor("G")
			g.process = process
			w.Run(newWorker(w, config(), g))
			w.AwaitCounts("g", api.Counts{Accepted: 1, Failed: 1})
			require.Equal(t, processor.CodeTimeout, w.DeadLetters()[0].Code)
			_, back, err := g.passes("g.0")
			require.True(t, back)
			require.ErrorIs(t, err, context.Canceled)
		})
	}
}

// TestHardlyAnyPasses: a processor with one free pass states 1e-300, NaN, -Inf or -1 passes a
// second. Its job still gets to Admit, which defers it.
func TestHardlyAnyPasses(t *testing.T) {
	t.Parallel()
	for _, perSecond := range []float64{1e-300, math.NaN(), math.Inf(-1), -1} {
		w := stagetest.Shared(t)
		w.Jobs("g", "G", 1)
		w.Admit("G")
		g := newGatedProcessor("G")
		g.offer(processor.Availability{Free: 1, PerSecond: perSecond})
		g.admit = func(context.Context, processor.Job) error { return processor.Deferred(time.Hour, "busy") }
		w.Run(newWorker(w, config(), g))
		w.AwaitCounts("g", api.Counts{Accepted: 1, NonReady: 1})
	}
}

// TestStopDoesNotWaitForAdmitOfASuspect: a worker stops although a call of Admit for a suspect
// ignores the end of its context. The suspect is ready then. The late pass comes back with a
// deferral.
func TestStopDoesNotWaitForAdmitOfASuspect(t *testing.T) {
	w := stagetest.Parallel(t, 1)
	suspects(w, "g", "G", 1)
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

// panickingPass is a gated processor, and at the same time the pass that it gives. The pass's
// method Return panics.
type panickingPass struct{ *gatedProcessor }

func (p panickingPass) Admit(context.Context, processor.Job) (processor.Pass, error) { return p, nil }
func (p panickingPass) Into(ctx context.Context) context.Context                     { return ctx }
func (p panickingPass) Return(error)                                                 { panic("oh") }

func (p panickingPass) Process(context.Context, processor.Job) (any, error) { return nil, nil }

// TestAPassThatPanics: a job is done, and the process lives on, although the method Return of its
// pass panics.
func TestAPassThatPanics(t *testing.T) {
	w := withReady(t, "G", 1)
	w.Run(newWorker(w, config(), panickingPass{newGatedProcessor("G")}))
	w.AwaitCounts("g", api.Counts{Accepted: 1, Done: 1})
}
