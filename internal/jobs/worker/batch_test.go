package worker_test

import (
	"context"
	"encoding/json"
	"errors"
	"runtime"
	"slices"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/bulkaction/bulkaction/api"
	"github.com/bulkaction/bulkaction/internal/access/auth"
	"github.com/bulkaction/bulkaction/internal/jobs/worker"
	"github.com/bulkaction/bulkaction/internal/messages"
	"github.com/bulkaction/bulkaction/internal/stage"
	"github.com/bulkaction/bulkaction/internal/telemetry"
	"github.com/bulkaction/bulkaction/internal/testkit/stagetest"
	"github.com/bulkaction/bulkaction/processor"
)

type number = processor.Outcome[int]

// calls records the calls of a batcher of the type T, which answers with what do returns; nil: each
// job's payload is its result.
type calls struct {
	mu  sync.Mutex
	all [][]processor.BatchJob[int]
	do  func(ctx context.Context, jobs []processor.BatchJob[int]) ([]number, error)
}

func (c *calls) batcher(o processor.BatchOptions) processor.Batcher {
	return processor.Batch("T", o, func(ctx context.Context, jobs []processor.BatchJob[int]) ([]number, error) {
		c.mu.Lock()
		c.all = append(c.all, jobs)
		c.mu.Unlock()
		if c.do != nil {
			return c.do(ctx, jobs)
		}
		return echo(jobs), nil
	})
}

func echo(jobs []processor.BatchJob[int]) []number {
	out := make([]number, len(jobs))
	for i, j := range jobs {
		out[i].Result = j.Payload
	}
	return out
}

// sizes returns how many jobs each call had, ascending.
func (c *calls) sizes() (n []int) {
	c.mu.Lock()
	defer c.mu.Unlock()
	for _, jobs := range c.all {
		n = append(n, len(jobs))
	}
	slices.Sort(n)
	return n
}

func TestBatchRunsManyJobsInOneCall(t *testing.T) {
	stagetest.Both(t, func(w *stagetest.World) {
		w.Jobs("g", "T", 50)
		w.Admit("T")
		var c calls
		stop := w.Run(newWorker(w, config(), c.batcher(processor.BatchOptions{Size: 20})))
		w.AwaitCounts("g", api.Counts{Accepted: 50, Done: 50})
		stop()
		require.LessOrEqual(t, slices.Max(c.sizes()), 20)
		require.Equal(t, 20, c.sizes()[len(c.sizes())-2])
		job := c.all[0][0]
		require.NotNil(t, job.Context())
		job.Job = job.WithContext(nil) //nolint:staticcheck // only the rest counts here
		require.Equal(t, processor.Job{
			Tenant: "acme", Group: "g", Type: "T", Ordinal: job.Ordinal, Payload: job.Job.Payload, Attempt: 1, RetriesLeft: 3, AcceptedAt: job.AcceptedAt,
		}, job.Job)
		for _, r := range w.Results() {
			require.Equal(t, json.Number(r.Data).String(), string(c.payload(r.Ordinal)))
		}
	})
}

func (c *calls) payload(ordinal int64) []byte {
	for _, jobs := range c.all {
		for _, j := range jobs {
			if j.Ordinal == ordinal {
				return j.Job.Payload
			}
		}
	}
	return nil
}

// TestBatchMixesOnlyWhatItMay: by default a call has jobs of one tenant; ByGroup of one group; Any of
// all. A group with a timeout of its own has calls of its own.
func TestBatchMixesOnlyWhatItMay(t *testing.T) {
	t.Parallel()
	for by, want := range map[processor.BatchBy][]string{
		processor.ByTenant: {"a b", "c", "other"}, processor.ByGroup: {"a", "b", "c", "other"}, processor.Any: {"a b other", "c"},
	} {
		w := stagetest.Shared(t)
		for group, tenant := range map[string]string{"a": "acme", "b": "acme", "c": "acme", "other": "bolt"} {
			g := messages.SubmitGroup{ID: group, Tenant: tenant, Type: "T", Jobs: stagetest.Numbered(5)}
			if group == "c" {
				g.JobTimeout = messages.Duration(20 * time.Second)
			}
			w.Submit(g)
		}
		w.Admit("T")
		var c calls
		cfg := config()
		cfg.Count = 1
		w.Run(newWorker(w, cfg, c.batcher(processor.BatchOptions{Size: 1000, Wait: time.Second, By: by})))
		for _, group := range []string{"a", "b", "c", "other"} {
			w.AwaitCounts(group, api.Counts{Accepted: 5, Done: 5})
		}
		var got []string
		for _, jobs := range c.all {
			var groups []string
			for _, j := range jobs {
				groups = append(groups, j.Group)
			}
			slices.Sort(groups)
			got = append(got, strings.Join(slices.Compact(groups), " "))
		}
		slices.Sort(got)
		require.Equal(t, want, got)
	}
}

// TestBatchOutcomes: each job has its own outcome; an error of the call is that of all others.
func TestBatchOutcomes(t *testing.T) {
	t.Parallel()
	w := stagetest.Shared(t)
	w.Submit(messages.SubmitGroup{ID: "g", Tenant: "acme", Type: "T", Jobs: append(stagetest.Numbered(4), messages.Job{Payload: []byte(`"x"`)})})
	w.Feed(stagetest.Patience, "T")
	c := calls{do: func(_ context.Context, jobs []processor.BatchJob[int]) ([]number, error) {
		if jobs[0].Attempt > 1 {
			return echo(jobs), nil
		}
		out := echo(jobs)
		for i, j := range jobs {
			out[i].Err = [...]error{nil, processor.Permanent("BAD", errors.New("no")), processor.Throttled(time.Millisecond, nil), errors.New("again")}[j.Ordinal]
		}
		return out, nil
	}}
	w.Run(newWorker(w, config(), c.batcher(processor.BatchOptions{Wait: time.Second})))
	w.AwaitCounts("g", api.Counts{Accepted: 5, Done: 3, Failed: 2})
	require.Equal(t, map[string]int64{"BAD": 1, processor.CodeInvalidPayload: 1}, w.Group("g").FailuresByCode)
	require.EqualValues(t, 1, w.Group("g").Retries)
}

// TestErrorsOfCalls: what a call returns, or how it ends, is the outcome of each of its jobs.
func TestErrorsOfCalls(t *testing.T) {
	t.Parallel()
	for code, do := range map[string]func(context.Context, []processor.BatchJob[int]) ([]number, error){
		"ERROR":        func(context.Context, []processor.BatchJob[int]) ([]number, error) { return nil, errors.New("no") },
		"PANIC":        func(context.Context, []processor.BatchJob[int]) ([]number, error) { panic("secret") },
		"BATCH_LENGTH": func(context.Context, []processor.BatchJob[int]) ([]number, error) { return make([]number, 7), nil },
		"BAD": func(context.Context, []processor.BatchJob[int]) ([]number, error) {
			return nil, processor.Permanent("BAD", nil)
		},
		"TIMEOUT": func(ctx context.Context, jobs []processor.BatchJob[int]) ([]number, error) {
			<-ctx.Done()
			return echo(jobs), nil
		},
	} {
		t.Run(code, func(t *testing.T) {
			w := stagetest.Shared(t)
			w.Jobs("g", "T", 10)
			w.Feed(stagetest.Patience, "T")
			cfg := config()
			cfg.MaxRetries, cfg.Count = 1, 1
			if code == "TIMEOUT" {
				cfg.JobTimeout = 50 * time.Millisecond
			}
			c := calls{do: do}
			w.Run(newWorker(w, cfg, c.batcher(processor.BatchOptions{})))
			w.AwaitCounts("g", api.Counts{Accepted: 10, Failed: 10})
			require.Equal(t, map[string]int64{code: 10}, w.Group("g").FailuresByCode)
		})
	}
}

// TestBatchesOutliveTheirGoroutines: a batcher that ends its goroutine costs no slot.
func TestBatchesOutliveTheirGoroutines(t *testing.T) {
	t.Parallel()
	w := stagetest.Shared(t)
	w.Jobs("g", "T", 20)
	w.Feed(stagetest.Patience, "T")
	cfg := config()
	cfg.Count, cfg.MaxRetries = 1, 0
	c := calls{do: func(context.Context, []processor.BatchJob[int]) ([]number, error) {
		runtime.Goexit()
		return nil, nil
	}}
	w.Run(newWorker(w, cfg, c.batcher(processor.BatchOptions{Size: 3})))
	w.AwaitCounts("g", api.Counts{Accepted: 20, Failed: 20})
}

// TestOnePoisonItem: the API refuses a whole call because of one item. All others succeed, alone, and
// none of them uses a retry for it.
func TestOnePoisonItem(t *testing.T) {
	t.Parallel()
	w := stagetest.Shared(t)
	none := 0
	w.Submit(messages.SubmitGroup{ID: "g", Tenant: "acme", Type: "T", MaxRetries: &none, Jobs: stagetest.Numbered(30)})
	w.Feed(stagetest.Patience, "T")
	c := calls{do: func(_ context.Context, jobs []processor.BatchJob[int]) ([]number, error) {
		for _, j := range jobs {
			if j.Ordinal == 7 {
				return nil, processor.Retry(processor.CodeBatchRejected, errors.New("400"))
			}
		}
		return echo(jobs), nil
	}}
	w.Run(newWorker(w, config(), c.batcher(processor.BatchOptions{Size: 30, Wait: time.Second})))
	w.AwaitCounts("g", api.Counts{Accepted: 30, Done: 29, Failed: 1})
	require.Equal(t, map[string]int64{processor.CodeBatchRejected: 1}, w.Group("g").FailuresByCode)
	require.EqualValues(t, 7, w.DeadLetters()[0].Payload[0]-'0')
	for _, jobs := range c.all[1:] {
		if jobs[0].Attempt > 1 {
			require.Len(t, jobs, 1)
		}
	}
}

// TestOnePanickingItem: an item that makes the call panic fails alone: the last attempts of the others
// are calls of their own.
func TestOnePanickingItem(t *testing.T) {
	t.Parallel()
	w := stagetest.Shared(t)
	w.Jobs("g", "T", 20)
	w.Feed(stagetest.Patience, "T")
	c := calls{do: func(_ context.Context, jobs []processor.BatchJob[int]) ([]number, error) {
		for _, j := range jobs {
			if j.Ordinal == 7 {
				panic("secret")
			}
		}
		return echo(jobs), nil
	}}
	cfg := config()
	cfg.MaxRetries = 1
	w.Run(newWorker(w, cfg, c.batcher(processor.BatchOptions{Size: 20, Wait: time.Second})))
	w.AwaitCounts("g", api.Counts{Accepted: 20, Done: 19, Failed: 1})
	require.Equal(t, map[string]int64{"PANIC": 1}, w.Group("g").FailuresByCode)
}

// TestBatchesHaveTheirBytes: a call has at most its bytes; a larger payload has one of its own. The
// sizes of payloads that Redis stores apart are known when they are loaded.
func TestBatchesHaveTheirBytes(t *testing.T) {
	t.Parallel()
	for _, size := range []int{500, 100_000} {
		w := stagetest.Shared(t)
		text := `"` + strings.Repeat("x", size) + `"`
		jobs := make([]messages.Job, 30)
		for i := range jobs {
			jobs[i].Payload = []byte(text)
		}
		jobs[11].Payload = []byte(`"` + strings.Repeat("x", size*5/2) + `"`)
		w.Submit(messages.SubmitGroup{ID: "g", Tenant: "acme", Type: "T", Jobs: jobs})
		w.Feed(stagetest.Patience, "T")
		var mu sync.Mutex
		var most int
		b := processor.Batch("T", processor.BatchOptions{Bytes: 2*size + 10, Wait: time.Second}, func(_ context.Context, jobs []processor.BatchJob[string]) ([]number, error) {
			mu.Lock()
			defer mu.Unlock()
			if most = max(most, len(jobs)); len(jobs) > 1 {
				for _, j := range jobs {
					if len(j.Payload) > size {
						return nil, processor.Permanent("TOGETHER", nil)
					}
				}
			}
			return make([]number, len(jobs)), nil
		})
		w.Run(newWorker(w, config(), b))
		w.AwaitCounts("g", api.Counts{Accepted: 30, Done: 30})
		require.Equal(t, 2, most)
	}
}

// TestBatchWaitsForFurtherJobs: while no slot is free, jobs gather; the call has all of them.
func TestBatchWaitsForFurtherJobs(t *testing.T) {
	t.Parallel()
	w := stagetest.Shared(t)
	w.Feed(stagetest.Patience, "T")
	began, end := make(chan int, 10), make(chan struct{})
	c := calls{do: func(_ context.Context, jobs []processor.BatchJob[int]) ([]number, error) {
		began <- len(jobs)
		<-end
		return echo(jobs), nil
	}}
	cfg := config()
	cfg.Count = 1
	w.Jobs("first", "T", 1)
	w.Run(newWorker(w, cfg, c.batcher(processor.BatchOptions{Size: 50})))
	require.Equal(t, 1, <-began, "a slot is free, and no further job is ready: the call begins at once")
	w.Jobs("g", "T", 120)
	close(end)
	w.AwaitCounts("g", api.Counts{Accepted: 120, Done: 120})
	require.LessOrEqual(t, slices.Max(c.sizes()), 50)
}

// TestCancelledJobsOfACall: the end of one job shows in its own context within a second; when all
// have ended, the call's context ends.
func TestCancelledJobsOfACall(t *testing.T) {
	t.Parallel()
	w := stagetest.Shared(t)
	w.Jobs("a", "T", 3)
	w.Jobs("b", "T", 3)
	w.Admit("T")
	began, ended := make(chan struct{}), make(chan error, 2)
	c := calls{do: func(ctx context.Context, jobs []processor.BatchJob[int]) ([]number, error) {
		close(began)
		for _, j := range jobs {
			if j.Group == "a" {
				<-j.Context().Done()
			}
		}
		ended <- ctx.Err()
		<-ctx.Done()
		ended <- ctx.Err()
		return echo(jobs), nil
	}}
	cfg := config()
	cfg.Count = 1
	w.Run(newWorker(w, cfg, c.batcher(processor.BatchOptions{Wait: time.Second, Size: 6})))
	<-began
	cancelGroup(w, "a")
	require.NoError(t, <-ended)
	cancelGroup(w, "b")
	require.ErrorIs(t, <-ended, context.Canceled)
	w.AwaitCounts("a", api.Counts{Accepted: 3, Cancelled: 3})
	w.AwaitCounts("b", api.Counts{Accepted: 3, Cancelled: 3})
}

// TestCallThatIgnoresItsEnd: its jobs are abandoned, and it loses its slot once.
func TestCallThatIgnoresItsEnd(t *testing.T) {
	t.Parallel()
	w := stagetest.Shared(t)
	w.Jobs("g", "T", 20)
	w.Feed(stagetest.Patience, "T")
	cfg := config()
	cfg.Count, cfg.MaxRetries, cfg.JobTimeout = 1, 0, 50*time.Millisecond
	end := make(chan struct{})
	var once sync.Once
	c := calls{do: func(_ context.Context, jobs []processor.BatchJob[int]) ([]number, error) {
		once.Do(func() { <-end })
		return echo(jobs), nil
	}}
	wk := newWorker(w, cfg, c.batcher(processor.BatchOptions{Size: 10}))
	w.Run(wk)
	w.Await("the end of all jobs", func() bool { n := w.Counts("g"); return n.Done+n.Failed == 20 })
	require.Equal(t, 1, wk.Status().Workers)
	close(end)
	w.Await("free slots", func() bool { return wk.Status().Active == 0 })
}

// TestStopReleasesWhatGathers: a process that stops gives back the jobs that gather, and reports those
// of its calls.
func TestStopReleasesWhatGathers(t *testing.T) {
	t.Parallel()
	w := stagetest.Shared(t)
	w.Jobs("a", "T", 10)
	w.Admit("T")
	began, end := make(chan struct{}, 10), make(chan struct{})
	c := calls{do: func(_ context.Context, jobs []processor.BatchJob[int]) ([]number, error) {
		began <- struct{}{}
		<-end
		return echo(jobs), nil
	}}
	cfg := config()
	cfg.Count = 1
	wk := newWorker(w, cfg, c.batcher(processor.BatchOptions{Size: 10, Wait: time.Second}))
	stop := w.Run(wk)
	<-began
	w.Submit(messages.SubmitGroup{ID: "b", Tenant: "bolt", Type: "T", Jobs: stagetest.Numbered(5)})
	w.Admit("T")
	stopped := make(chan struct{})
	go func() { defer close(stopped); stop() }()
	w.AwaitCounts("b", api.Counts{Accepted: 5, Ready: 5})
	close(end)
	<-stopped
	w.AwaitCounts("a", api.Counts{Accepted: 10, Done: 10})
	require.EqualValues(t, 5, w.Conn.Cmd.XLen(context.WithoutCancel(t.Context()), w.P.Ready("T")).Val())
}

// TestBatchesBesideSingles: a worker with both kinds of types runs both, however long the calls are.
func TestBatchesBesideSingles(t *testing.T) {
	t.Parallel()
	w := stagetest.Shared(t)
	w.Jobs("many", "T", 300)
	w.Jobs("single", "S", 100)
	w.Feed(stagetest.Patience, "T", "S")
	c := calls{do: func(_ context.Context, jobs []processor.BatchJob[int]) ([]number, error) {
		time.Sleep(5 * time.Millisecond)
		return echo(jobs), nil
	}}
	cfg := config()
	cfg.Count = 2
	w.Run(newWorker(w, cfg, c.batcher(processor.BatchOptions{Size: 10}), processorReturning("S", 1, nil)))
	w.AwaitCounts("single", api.Counts{Accepted: 100, Done: 100})
	w.AwaitCounts("many", api.Counts{Accepted: 300, Done: 300})
}

func TestWrongBatchOptions(t *testing.T) {
	t.Parallel()
	w := stagetest.Shared(t)
	cfg := config()
	cfg.Lease = time.Second
	for says, o := range map[string]processor.BatchOptions{
		"Size 1001: must be 1 to 1000":         {Size: 1001},
		"Bytes 8000001: must be 1 to 8000000":  {Bytes: 8_000_001},
		"Wait 2s: must be at most 1s":          {Wait: 2 * time.Second},
		"a quarter of LEASE, 250ms":            {Wait: 300 * time.Millisecond},
		"By 3: must be ByTenant, ByGroup or A": {By: 3},
	} {
		_, err := worker.New(stage.Process{ID: "id", Space: w.Space, Tel: telemetry.Nop()}, cfg, (&calls{}).batcher(o))
		require.ErrorContains(t, err, says)
	}
	_, err := worker.New(stage.Process{ID: "id", Space: w.Space, Tel: telemetry.Nop()}, cfg, neither{})
	require.ErrorContains(t, err, "must have the method Process or ProcessBatch")
}

type neither struct{}

func (neither) Type() string { return "T" }

func cancelGroup(w *stagetest.World, group string) {
	w.T.Helper()
	_, err := w.Store.Cancel(auth.Trust(w.T.Context()), group)
	require.NoError(w.T, err)
}

// TestSuspectsOfBatchesRunAlone: a job that was in flight when a worker died has a call of its own,
// and no other call runs beside it.
func TestSuspectsOfBatchesRunAlone(t *testing.T) {
	t.Parallel()
	w := stagetest.Shared(t)
	suspects(w, "suspects", "T", 3)
	w.Jobs("others", "T", 40)
	w.Feed(stagetest.Patience, "T")
	var running atomic.Int64
	c := calls{do: func(_ context.Context, jobs []processor.BatchJob[int]) ([]number, error) {
		with := running.Add(1)
		defer running.Add(-1)
		time.Sleep(5 * time.Millisecond) // long enough for other calls to begin, if the worker let them
		if jobs[0].Group == "suspects" && (len(jobs) > 1 || with+running.Load() != 2) {
			return nil, processor.Permanent("NOT_ALONE", nil)
		}
		return echo(jobs), nil
	}}
	w.Run(newWorker(w, config(), c.batcher(processor.BatchOptions{Size: 10})))
	w.AwaitCounts("suspects", api.Counts{Accepted: 3, Done: 3})
	w.AwaitCounts("others", api.Counts{Accepted: 40, Done: 40})
}

// TestACallIsChargedOnce: the run times of a call's jobs are the call's time together.
func TestACallIsChargedOnce(t *testing.T) {
	t.Parallel()
	w := stagetest.Shared(t)
	w.Jobs("g", "T", 20)
	w.Admit("T")
	began := time.Now()
	c := calls{do: func(_ context.Context, jobs []processor.BatchJob[int]) ([]number, error) {
		time.Sleep(100 * time.Millisecond)
		return echo(jobs), nil
	}}
	w.Run(newWorker(w, config(), c.batcher(processor.BatchOptions{Size: 20, Wait: time.Second})))
	w.AwaitCounts("g", api.Counts{Accepted: 20, Done: 20})
	require.Equal(t, []int{20}, c.sizes())
	whole := float64(time.Since(began).Milliseconds() + 1)
	for _, r := range w.Results() {
		require.GreaterOrEqual(t, r.DurationMS, 100./20)
		require.LessOrEqual(t, r.DurationMS, whole/20)
	}
}

// gatedCalls is a batcher whose calls need a pass, which is for at most three jobs.
type gatedCalls struct {
	processor.Batcher
	admit func(ctx context.Context, jobs []processor.Job) error

	mu       sync.Mutex
	admitted int // jobs that a pass was given for
	returned []error
}

type callPass struct {
	g *gatedCalls
	n int
}

type callPassKey struct{}

func (p *callPass) Into(ctx context.Context) context.Context {
	return context.WithValue(ctx, callPassKey{}, p.n)
}
func (p *callPass) Return(err error) {
	p.g.mu.Lock()
	defer p.g.mu.Unlock()
	p.g.returned = append(p.g.returned, err)
}

func (g *gatedCalls) AdmitBatch(ctx context.Context, jobs []processor.Job) (processor.Pass, int, error) {
	if g.admit != nil {
		if err := g.admit(ctx, jobs); err != nil {
			return nil, 0, err
		}
	}
	g.mu.Lock()
	defer g.mu.Unlock()
	n := min(len(jobs), 3)
	g.admitted += n
	return &callPass{g, n}, n, nil
}

// TestGatedBatches: a call has at most as many jobs as its pass is for. Each pass is returned once,
// with the error of the call.
func TestGatedBatches(t *testing.T) {
	t.Parallel()
	w := stagetest.Shared(t)
	w.Jobs("g", "T", 20)
	suspects(w, "suspects", "T", 2)
	w.Feed(stagetest.Patience, "T")
	var refused atomic.Int64
	c := calls{do: func(ctx context.Context, jobs []processor.BatchJob[int]) ([]number, error) {
		if n, _ := ctx.Value(callPassKey{}).(int); n < len(jobs) {
			return nil, processor.Permanent("NO_PASS", nil)
		}
		if jobs[0].Attempt == 1 {
			refused.Add(1)
			return nil, processor.Retry("FIRST", nil)
		}
		return echo(jobs), nil
	}}
	g := &gatedCalls{Batcher: c.batcher(processor.BatchOptions{Size: 10, Wait: time.Second})}
	stop := w.Run(newWorker(w, config(), g))
	w.AwaitCounts("g", api.Counts{Accepted: 20, Done: 20})
	w.AwaitCounts("suspects", api.Counts{Accepted: 2, Done: 2})
	stop()
	require.LessOrEqual(t, slices.Max(c.sizes()), 3)
	require.GreaterOrEqual(t, g.admitted, 22)
	failed, ended := 0, 0
	for _, err := range g.returned {
		switch {
		case err == nil:
			ended++
		case processor.Classify(err).Code == "FIRST":
			failed++
		}
	}
	require.EqualValues(t, refused.Load(), failed)
	require.Equal(t, len(c.all), failed+ended)
}

// TestGatedPoisonItem: the jobs that run alone after a refused call share the pass that is for them.
func TestGatedPoisonItem(t *testing.T) {
	t.Parallel()
	w := stagetest.Shared(t)
	w.Jobs("g", "T", 9)
	w.Feed(stagetest.Patience, "T")
	c := calls{do: func(ctx context.Context, jobs []processor.BatchJob[int]) ([]number, error) {
		if ctx.Value(callPassKey{}) == nil {
			return nil, processor.Permanent("NO_PASS", nil)
		}
		for _, j := range jobs {
			if j.Ordinal == 4 {
				return nil, processor.Retry(processor.CodeBatchRejected, nil)
			}
		}
		return echo(jobs), nil
	}}
	cfg := config()
	cfg.MaxRetries = 0
	g := &gatedCalls{Batcher: c.batcher(processor.BatchOptions{Size: 3, Wait: time.Second})}
	admitted := 0
	g.admit = func(context.Context, []processor.Job) error { g.mu.Lock(); defer g.mu.Unlock(); admitted++; return nil }
	stop := w.Run(newWorker(w, cfg, g))
	w.AwaitCounts("g", api.Counts{Accepted: 9, Done: 8, Failed: 1})
	stop()
	require.Equal(t, map[string]int64{processor.CodeBatchRejected: 1}, w.Group("g").FailuresByCode)
	require.Len(t, g.returned, admitted)
}

// TestAdmissionsOfBatches: an error of AdmitBatch decides about all jobs of the call, which is not made;
// a deferral uses no attempt. A process that stops gives back the jobs that wait for a pass.
func TestAdmissionsOfBatches(t *testing.T) {
	t.Parallel()
	for code, admit := range map[string]func(ctx context.Context, n int64) error{
		"": func(_ context.Context, n int64) error {
			return map[bool]error{true: processor.Deferred(time.Millisecond, "busy")}[n == 1]
		},
		"PANIC": func(context.Context, int64) error { panic("secret") },
		"BAD":   func(context.Context, int64) error { return processor.Permanent("BAD", nil) },
		"stop":  func(ctx context.Context, _ int64) error { <-ctx.Done(); return ctx.Err() },
	} {
		t.Run(code, func(t *testing.T) {
			w := stagetest.Shared(t)
			w.Jobs("g", "T", 3)
			w.Feed(stagetest.Patience, "T")
			cfg := config()
			cfg.MaxRetries = 0
			var c calls
			var n atomic.Int64
			g := &gatedCalls{Batcher: c.batcher(processor.BatchOptions{})}
			g.admit = func(ctx context.Context, _ []processor.Job) error { return admit(ctx, n.Add(1)) }
			stop := w.Run(newWorker(w, cfg, g))
			if code == "stop" {
				w.Await("AdmitBatch", func() bool { return n.Load() > 0 })
				stop()
				w.Await("the jobs", func() bool { return w.Counts("g").Ready == 3 })
				return
			}
			w.Await("the end", func() bool { c := w.Counts("g"); return c.Done+c.Failed == 3 })
			stop()
			require.Equal(t, code == "", len(c.all) > 0)
			if code != "" {
				require.Equal(t, map[string]int64{code: 3}, w.Group("g").FailuresByCode)
			}
		})
	}
}

// TestBatchesWithoutSlotsGivePassesBack: a process is resized to 0 slots while batches get their passes.
// It returns these, and releases the jobs.
func TestBatchesWithoutSlotsGivePassesBack(t *testing.T) {
	t.Parallel()
	w := stagetest.Shared(t)
	w.Jobs("g", "T", 9)
	w.Feed(stagetest.Patience, "T")
	var c calls
	g := &gatedCalls{Batcher: c.batcher(processor.BatchOptions{Size: 3})}
	asked, resized := make(chan struct{}, 9), make(chan struct{})
	g.admit = func(context.Context, []processor.Job) error { asked <- struct{}{}; <-resized; return nil }
	wk := newWorker(w, config(), g)
	w.Run(wk)
	stagetest.Receive(t, asked, "a call of AdmitBatch")
	require.NoError(t, wk.Resize(0))
	close(resized)
	w.Await("all passes", func() bool {
		g.mu.Lock()
		defer g.mu.Unlock()
		return g.admitted > 0 && len(g.returned) == (g.admitted+2)/3
	})
	require.Empty(t, c.sizes())
}

// TestAdmissionsHaveTheirBytes: AdmitBatch gets only jobs whose payloads have at most the bytes of a call.
// Its error decides about these alone.
func TestAdmissionsHaveTheirBytes(t *testing.T) {
	t.Parallel()
	const size = 100_000
	w := stagetest.Shared(t)
	jobs := make([]messages.Job, 12)
	for i := range jobs {
		jobs[i].Payload = []byte(`"` + strings.Repeat("x", size) + `"`)
	}
	w.Submit(messages.SubmitGroup{ID: "g", Tenant: "acme", Type: "T", Jobs: jobs})
	w.Feed(stagetest.Patience, "T")
	g := &gatedCalls{Batcher: processor.Batch("T", processor.BatchOptions{Bytes: 2*size + 10, Wait: time.Second},
		func(_ context.Context, jobs []processor.BatchJob[string]) ([]number, error) {
			return make([]number, len(jobs)), nil
		})}
	var most, calls atomic.Int64
	g.admit = func(_ context.Context, jobs []processor.Job) error {
		if n := int64(len(jobs)); n > most.Load() {
			most.Store(n)
		}
		if calls.Add(1) == 1 {
			return processor.Permanent("BAD", nil)
		}
		return nil
	}
	w.Run(newWorker(w, config(), g))
	w.AwaitCounts("g", api.Counts{Accepted: 12, Done: 10, Failed: 2})
	require.EqualValues(t, 2, most.Load())
}
