package worker_test

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"math"
	"runtime"
	"strings"
	"sync/atomic"
	"testing"
	"time"

	"github.com/stretchr/testify/require"
	"go.uber.org/goleak"

	"github.com/bulkaction/bulkaction/api"
	"github.com/bulkaction/bulkaction/internal/jobs/ledger"
	"github.com/bulkaction/bulkaction/internal/jobs/worker"
	"github.com/bulkaction/bulkaction/internal/messages"
	"github.com/bulkaction/bulkaction/internal/redisx"
	"github.com/bulkaction/bulkaction/internal/redisx/keyspace"
	"github.com/bulkaction/bulkaction/internal/stage"
	"github.com/bulkaction/bulkaction/internal/stage/presence"
	"github.com/bulkaction/bulkaction/internal/telemetry"
	"github.com/bulkaction/bulkaction/internal/testkit/redistest"
	"github.com/bulkaction/bulkaction/internal/testkit/stagetest"
	"github.com/bulkaction/bulkaction/processor"
)

// withReady returns an installation with a group g of n ready jobs of a type, for a parallel test.
func withReady(t *testing.T, typ string, n int) *stagetest.World {
	t.Helper()
	w := stagetest.Parallel(t, 1)
	w.Jobs("g", typ, n)
	w.Admit(typ)
	return w
}

func TestTakesAJobAndRunsIt(t *testing.T) {
	stagetest.Both(t, func(w *stagetest.World) {
		w.Submit(messages.SubmitGroup{ID: "g", Tenant: "acme", Type: "T", Jobs: []messages.Job{{Payload: []byte(`{"to":"a@example.com"}`)}}})
		w.Admit("T")
		ran := make(chan processor.Job, 10)
		stop := w.Run(newWorker(w, config(), processor.Func("T", func(_ context.Context, j processor.Job) (any, error) {
			ran <- j
			return map[string]int{"cost": 3}, nil
		})))
		w.AwaitCounts("g", api.Counts{Accepted: 1, Done: 1})
		stop()

		require.Len(w.T, ran, 1)
		job := <-ran
		require.WithinDuration(w.T, time.Now(), job.AcceptedAt, stagetest.Patience)
		job.AcceptedAt = time.Time{}
		require.Equal(w.T, processor.Job{Tenant: "acme", Group: "g", Type: "T", Payload: json.RawMessage(`{"to":"a@example.com"}`), Attempt: 1, RetriesLeft: 3}, job)

		results := w.Results()
		require.Len(w.T, results, 1)
		require.Positive(w.T, results[0].DurationMS)
		results[0].DurationMS = 0
		require.Equal(w.T, []api.Result{{Attempts: 1, Data: json.RawMessage(`{"cost":3}`)}}, results)

		// No entry and no status of the worker is left.
		ctx := context.WithoutCancel(w.T.Context())
		require.Zero(w.T, w.Conn.Cmd.XLen(ctx, w.P.Ready("T")).Val())
		require.Zero(w.T, w.Pending(w.P.Ready("T"), keyspace.GroupWorkers))
		workers, err := presence.Workers(ctx, w.Conn, w.Space)
		require.NoError(w.T, err)
		require.Empty(w.T, workers)
	})
}

func TestFailingJobIsRetriedAndThenDeadLettered(t *testing.T) {
	stagetest.Both(t, func(w *stagetest.World) {
		w.Jobs("g", "T", 1)
		w.Feed(stagetest.Patience, "T")
		cfg := config()
		cfg.Backoff, cfg.MaxBackoff, cfg.MaxRetries = 16*time.Millisecond, 40*time.Millisecond, 4
		attempts, retries := make(chan int, 100), make(chan int, 100)
		waits := make(chan time.Duration, 100)
		var ended time.Time // end of the previous attempt; attempts of a job never overlap
		w.Run(newWorker(w, cfg, processor.Func("T", func(_ context.Context, j processor.Job) (any, error) {
			defer func() { ended = time.Now() }()
			attempts <- j.Attempt
			retries <- j.Retries
			if j.Attempt > 1 {
				waits <- time.Since(ended)
			}
			return nil, processor.Retry("API_DOWN", errors.New("the API is down"))
		})))
		w.AwaitCounts("g", api.Counts{Accepted: 1, Failed: 1})

		require.Len(w.T, attempts, 5)
		for want := 1; want <= 5; want++ {
			require.Equal(w.T, want, <-attempts)
			require.Equal(w.T, want-1, <-retries)
		}
		for _, least := range []time.Duration{16, 32, 40, 40} { // less the jitter of a tenth, and less what Redis's clock of milliseconds cuts off
			require.GreaterOrEqual(w.T, <-waits, least*time.Millisecond*9/10-2*time.Millisecond)
		}
		g := w.Group("g")
		require.Equal(w.T, map[string]int64{"API_DOWN": 1}, g.FailuresByCode)
		require.EqualValues(w.T, 4, g.Retries)

		letters := w.DeadLetters()
		require.Len(w.T, letters, 1)
		require.WithinDuration(w.T, time.Now(), letters[0].At, stagetest.Patience)
		letters[0].At, letters[0].EntryID = time.Time{}, ""
		require.Equal(w.T, []api.DeadLetter{{
			Job: "g.0", Tenant: "acme", Group: "g", Type: "T", Code: "API_DOWN", Error: "the API is down", Attempts: 5, Payload: json.RawMessage(`0`),
		}}, letters)
	})
}

func TestGroupSetsMaxRetries(t *testing.T) {
	w := stagetest.Parallel(t, 1)
	none := 0
	w.Submit(messages.SubmitGroup{ID: "g", Tenant: "acme", Type: "T", MaxRetries: &none, Jobs: stagetest.Numbered(1)})
	w.Admit("T")
	w.Run(newWorker(w, config(), processorReturning("T", nil, errors.New("boom"))))
	w.AwaitCounts("g", api.Counts{Accepted: 1, Failed: 1})
	require.Equal(t, map[string]int64{processor.CodeError: 1}, w.Group("g").FailuresByCode)
}

func TestErrorDecidesWhetherTheJobIsRetried(t *testing.T) {
	t.Parallel()
	type bad struct{ F func() }
	for name, tt := range map[string]struct {
		proc     func(context.Context, processor.Job) (any, error)
		code     string
		attempts int
	}{
		"permanent": {func(context.Context, processor.Job) (any, error) {
			return nil, processor.Permanent("NO_SUCH_USER", nil)
		}, "NO_SUCH_USER", 1},
		"panic":             {func(context.Context, processor.Job) (any, error) { panic("secret") }, "PANIC", 2},
		"panic of a result": {func(context.Context, processor.Job) (any, error) { return panickingResult{}, nil }, "PANIC", 2},
		"panic of a nil error": {func(context.Context, processor.Job) (any, error) {
			var err *hostileError
			return nil, err
		}, "PANIC", 2},
		"panic of a wrapped nil error": {func(context.Context, processor.Job) (any, error) {
			var err *hostileError
			return nil, processor.Retry("API", err)
		}, "PANIC", 2},
		"panic of a target check": {func(context.Context, processor.Job) (any, error) {
			return nil, &hostileError{as: func() bool { panic("secret") }}
		}, "PANIC", 2},
		"panic with a panicking error": {func(context.Context, processor.Job) (any, error) {
			panic(&hostileError{as: func() bool { panic("secret") }})
		}, "PANIC", 2},
		"end of the goroutine": {func(context.Context, processor.Job) (any, error) {
			runtime.Goexit()
			return nil, nil
		}, "PANIC", 2},
		"end of the goroutine by an error": {func(context.Context, processor.Job) (any, error) {
			return nil, &hostileError{as: func() bool { runtime.Goexit(); return false }}
		}, "PANIC", 2},
		"not encodable":  {func(context.Context, processor.Job) (any, error) { return bad{}, nil }, "INVALID_RESULT", 1},
		"not a number":   {func(context.Context, processor.Job) (any, error) { return math.NaN(), nil }, "INVALID_RESULT", 1},
		"malformed JSON": {func(context.Context, processor.Job) (any, error) { return json.RawMessage(`{"a":`), nil }, "INVALID_RESULT", 1},
		"too large": {func(context.Context, processor.Job) (any, error) {
			return strings.Repeat("x", processor.MaxResultBytes), nil
		}, "RESULT_TOO_LARGE", 1},
		"too large and JSON": {func(context.Context, processor.Job) (any, error) {
			return json.RawMessage(strings.Repeat(" ", processor.MaxResultBytes+1)), nil
		}, "RESULT_TOO_LARGE", 1},
	} {
		t.Run(name, func(t *testing.T) {
			w := stagetest.Parallel(t, 1)
			w.Jobs("g", "T", 1)
			w.Feed(stagetest.Patience, "T")
			cfg := config()
			cfg.MaxRetries = 1
			w.Run(newWorker(w, cfg, processor.Func("T", tt.proc)))
			w.AwaitCounts("g", api.Counts{Accepted: 1, Failed: 1})
			letter := w.DeadLetters()[0]
			require.Equal(t, tt.code, letter.Code)
			require.Equal(t, tt.attempts, letter.Attempts)
			require.NotContains(t, letter.Error, "secret")
		})
	}
}

// hostileError is an error of a processor whose methods panic: all on a nil pointer, As if it is set.
type hostileError struct{ as func() bool }

func (e *hostileError) Error() string { return fmt.Sprint("no, ", e.as != nil) }
func (e *hostileError) As(any) bool   { return e.as() }

// TestSlotsOutliveTheirGoroutines: a processor that ends its goroutine costs no slot, neither one that
// runs normal jobs nor the isolation of suspects.
func TestSlotsOutliveTheirGoroutines(t *testing.T) {
	t.Parallel()
	w := stagetest.Shared(t)
	w.Jobs("g", "T", 10)
	w.Feed(stagetest.Patience, "T")
	cfg := config()
	cfg.Count, cfg.MaxRetries = 1, 0
	wk := newWorker(w, cfg, processor.Func("T", func(context.Context, processor.Job) (any, error) {
		runtime.Goexit()
		return nil, nil
	}))
	stop := w.Run(wk)
	w.AwaitCounts("g", api.Counts{Accepted: 10, Failed: 10})
	stop()
}

type panickingResult struct{}

func (panickingResult) MarshalJSON() ([]byte, error) { panic("secret") }

func TestResultsAreEncodedOnOneLine(t *testing.T) {
	w := withReady(t, "T", 6)
	kinds := []any{
		nil, struct{ A int }{7}, json.RawMessage("{\n  \"a\": [1,\r\n 2]\n}"), json.RawMessage(nil), "a\nb", strings.Repeat("x", processor.MaxResultBytes-2),
	}
	w.Run(newWorker(w, config(), processor.Func("T", func(_ context.Context, j processor.Job) (any, error) { return kinds[j.Ordinal], nil })))
	w.AwaitCounts("g", api.Counts{Accepted: 6, Done: 6})
	got := map[int64]string{}
	for _, r := range w.Results() {
		got[r.Ordinal] = string(r.Data)
	}
	require.Equal(t, map[int64]string{
		0: `null`, 1: `{"A":7}`, 2: `{"a":[1,2]}`, 3: `null`, 4: `"a\nb"`, 5: `"` + strings.Repeat("x", processor.MaxResultBytes-2) + `"`,
	}, got)
}

// TestLargeResultsAreReportedInPieces: 100 jobs have results of the largest size. Each entry of the
// results stream has at most a megabyte and two such results.
func TestLargeResultsAreReportedInPieces(t *testing.T) {
	w := withReady(t, "T", 100)
	cfg := config()
	cfg.Count = 100
	w.Run(newWorker(w, cfg, processorReturning("T", strings.Repeat("x", processor.MaxResultBytes-2), nil)))
	w.AwaitCounts("g", api.Counts{Accepted: 100, Done: 100})
	require.Len(t, w.Results(), 100)
	entries, err := w.Conn.Cmd.XRange(t.Context(), w.P.ResultStream(), "-", "+").Result()
	require.NoError(t, err)
	for _, e := range entries {
		require.Less(t, len(e.Values["l"].(string)), 1<<20+2*processor.MaxResultBytes)
	}
}

func TestThrottledUsesNoRetry(t *testing.T) {
	t.Parallel()
	for name, tt := range map[string]struct {
		after       time.Duration
		least, most time.Duration
	}{
		"with Retry-After":                   {after: 90 * time.Second, least: 90 * time.Second, most: 90 * time.Second},
		"without Retry-After":                {least: 450 * time.Millisecond, most: 500 * time.Millisecond}, // the backoff less its jitter
		"with a Retry-After above the bound": {after: 1000 * time.Hour, least: 24 * time.Hour, most: 24 * time.Hour},
	} {
		t.Run(name, func(t *testing.T) {
			w := withReady(t, "T", 1)
			cfg := config()
			cfg.Backoff = 500 * time.Millisecond
			w.Run(newWorker(w, cfg, processorReturning("T", nil, processor.Throttled(tt.after, errors.New("429")))))
			w.AwaitCounts("g", api.Counts{Accepted: 1, NonReady: 1})
			j := w.Job("g", 0)
			require.Equal(t, processor.CodeThrottled, j.LastError.Code)
			wait := j.Until.Sub(j.LastError.At)
			require.GreaterOrEqual(t, wait, tt.least)
			require.LessOrEqual(t, wait, tt.most)
			require.Zero(t, w.Group("g").Retries)
		})
	}
}

// TestDeferredUsesNoRetry: a deferred job waits as long as its processor says. It may be deferred
// again and again: that uses no retry and no throttle.
func TestDeferredUsesNoRetry(t *testing.T) {
	w := stagetest.Parallel(t, 1)
	w.Jobs("g", "T", 2)
	w.Feed(stagetest.Patience, "T")
	cfg := config()
	cfg.MaxThrottles, cfg.MaxRetries = 0, 0
	w.Run(newWorker(w, cfg, processor.Func("T", func(_ context.Context, j processor.Job) (any, error) {
		switch {
		case j.Ordinal == 1:
			return nil, processor.Deferred(time.Hour, "no account is free")
		case j.Attempt <= 5:
			return nil, processor.Deferred(time.Millisecond, "no account is free")
		}
		return nil, nil
	})))
	w.AwaitCounts("g", api.Counts{Accepted: 2, Done: 1, NonReady: 1})
	require.Zero(t, w.Group("g").Retries)
	j := w.Job("g", 1)
	require.Equal(t, processor.CodeResourceBusy, j.LastError.Code)
	require.Equal(t, "no account is free", j.LastError.Error)
	require.Equal(t, time.Hour, j.Until.Sub(j.LastError.At))
	require.Equal(t, api.WhyResource, j.Waiting)
	require.Empty(t, w.DeadLetters())
}

func TestJobFailsAfterMaxThrottles(t *testing.T) {
	w := stagetest.Parallel(t, 1)
	w.Jobs("g", "T", 1)
	w.Feed(stagetest.Patience, "T")
	cfg := config()
	cfg.MaxThrottles, cfg.MaxRetries = 3, 0
	w.Run(newWorker(w, cfg, processorReturning("T", nil, processor.Throttled(time.Millisecond, nil))))
	w.AwaitCounts("g", api.Counts{Accepted: 1, Failed: 1})
	letter := w.DeadLetters()[0]
	require.Equal(t, processor.CodeThrottled, letter.Code)
	require.Equal(t, 4, letter.Attempts)
}

func TestLargePayloadIsLoadedFromItsKey(t *testing.T) {
	w := stagetest.Parallel(t, 1)
	large := []byte(`"` + strings.Repeat("x", 100<<10) + `"`)
	w.Submit(messages.SubmitGroup{ID: "g", Tenant: "acme", Type: "T", Jobs: []messages.Job{{Payload: large}, {Payload: []byte(`1`)}, {Payload: large}}})
	w.Admit("T")
	stagetest.LosePayload(t, w.Conn.Cmd, w.P, "g", 2)
	got := make(chan processor.Job, 10)
	w.Run(newWorker(w, config(), processor.Func("T", func(_ context.Context, j processor.Job) (any, error) { got <- j; return nil, nil })))
	w.AwaitCounts("g", api.Counts{Accepted: 3, Done: 2, Failed: 1})
	require.Len(t, got, 2)
	for range 2 {
		if j := <-got; j.Ordinal == 0 {
			require.Equal(t, string(large), string(j.Payload))
		}
	}
	require.Equal(t, map[string]int64{"PAYLOAD_LOST": 1}, w.Group("g").FailuresByCode)
	require.Zero(t, w.Conn.Cmd.Exists(t.Context(), w.P.Payloads("g")).Val())
}

func TestUnreadableEntriesAreQuarantined(t *testing.T) {
	stagetest.Both(t, func(w *stagetest.World) {
		ctx := context.WithoutCancel(w.T.Context())
		for _, fields := range [][]any{{"j", "rubbish"}, {"x", "y"}, {"j", "g|OTHER|1|0|0|0|0|0|0|0||0|0||1"}} {
			require.NoError(w.T, w.Conn.Cmd.Do(ctx, append([]any{"xadd", w.P.Ready("T"), "*"}, fields...)...).Err())
		}
		w.Jobs("g", "T", 2)
		w.Admit("T")
		w.Run(newWorker(w, config(), processorReturning("T", nil, nil)))
		w.AwaitCounts("g", api.Counts{Accepted: 2, Done: 2})
		w.Await("three quarantined entries", func() bool { return len(w.Quarantined()) == 3 })
		w.Await("empty stream", func() bool { return w.Conn.Cmd.XLen(ctx, w.P.Ready("T")).Val() == 0 })
		require.Zero(w.T, w.Pending(w.P.Ready("T"), keyspace.GroupWorkers))
		require.Contains(w.T, w.Quarantined()[2], "rubbish")
	})
}

func TestWorkerRunsOnlyItsTypes(t *testing.T) {
	w := stagetest.Parallel(t, 1)
	w.Jobs("a", "A", 20)
	w.Jobs("b", "B", 20)
	w.Jobs("c", "C", 1)
	for _, typ := range []string{"A", "B", "C"} {
		w.Admit(typ)
	}
	cfg := config()
	cfg.Types = []string{"A", "B"}
	wk := newWorker(w, cfg, processorReturning("A", 1, nil), processorReturning("B", 2, nil), processorReturning("C", 3, nil))
	require.Equal(t, []string{"A", "B"}, wk.Status().Types)
	w.Run(wk)
	w.AwaitCounts("a", api.Counts{Accepted: 20, Done: 20})
	w.AwaitCounts("b", api.Counts{Accepted: 20, Done: 20})
	require.Equal(t, api.Counts{Accepted: 1, Ready: 1}, w.Counts("c"))
}

// TestTwoWorkersRunEachJobOnce: two processes that read the same stream run each of its 500 jobs
// once, and each job counts as done once.
func TestTwoWorkersRunEachJobOnce(t *testing.T) {
	stagetest.Both(t, func(w *stagetest.World) {
		const n = 500
		w.Jobs("g", "T", n)
		w.Admit("T")
		ran := make(chan int64, 2*n)
		proc := processor.Func("T", func(_ context.Context, j processor.Job) (any, error) { ran <- j.Ordinal; return nil, nil })
		w.Run(newWorker(w, config(), proc))
		w.Run(newWorker(w, config(), proc))
		w.AwaitCounts("g", api.Counts{Accepted: n, Done: n})
		require.Len(w.T, ran, n)
		seen := map[int64]bool{}
		for range n {
			seen[<-ran] = true
		}
		require.Len(w.T, seen, n)
	})
}

// TestOneSlotServesAllPartitions: a process with one slot runs all jobs of ten groups, in an
// installation with eight partitions.
func TestOneSlotServesAllPartitions(t *testing.T) {
	w := stagetest.Parallel(t, 8)
	groups := []string{"g0", "g1", "g2", "g3", "g4", "g5", "g6", "g7", "g8", "g9"}
	for _, g := range groups {
		w.Submit(messages.SubmitGroup{ID: g, Type: "T", Jobs: stagetest.Numbered(30)})
	}
	w.Admit("T")
	cfg := config()
	cfg.Count, cfg.Block = 1, time.Second
	w.Run(newWorker(w, cfg, processorReturning("T", nil, nil)))
	for _, g := range groups {
		w.AwaitCounts(g, api.Counts{Accepted: 30, Done: 30})
	}
}

// TestIdlePartitionsDoNotDelayABusyOne: one of 16 partitions has jobs. The feeds of the others
// block in Redis for a second at a time, but the one slot runs the 40 jobs in less than 10 s.
func TestIdlePartitionsDoNotDelayABusyOne(t *testing.T) {
	w := stagetest.Parallel(t, 16)
	w.Jobs("g", "T", 40)
	w.Admit("T")
	cfg := config()
	cfg.Count, cfg.Block = 1, time.Second
	began := time.Now()
	w.Run(newWorker(w, cfg, processor.Func("T", func(ctx context.Context, _ processor.Job) (any, error) {
		return nil, redisx.Sleep(ctx, 25*time.Millisecond) // longer than prefetchFor, so that nothing is prefetched
	})))
	w.AwaitCounts("g", api.Counts{Accepted: 40, Done: 40})
	require.Less(t, time.Since(began), 10*time.Second) // the jobs take 1 s; with a blocked read of a second between two jobs, they would take 40 s
}

func TestNewRefuses(t *testing.T) {
	t.Parallel()
	for name, tt := range map[string]struct {
		types []string
		procs []processor.Runner
		want  string
	}{
		"no processor":               {nil, nil, "at least one"},
		"two of a type":              {nil, []processor.Runner{processorReturning("T", nil, nil), processorReturning("T", nil, nil)}, "two processors for type T"},
		"a type without a processor": {[]string{"X"}, []processor.Runner{processorReturning("T", nil, nil)}, `no processor for type "X"`},
		"a type in lower case":       {[]string{"t"}, []processor.Runner{processorReturning("T", nil, nil)}, `no processor for type "t"; did you mean T?`},
		"an invalid type":            {nil, []processor.Runner{processorReturning("{T}", nil, nil)}, `processor type "{T}"`},
	} {
		cfg := config()
		cfg.Types = tt.types
		space, err := keyspace.New("x:", 1)
		require.NoError(t, err)
		_, err = worker.New(stage.Process{ID: "id", Space: space, Tel: telemetry.Nop()}, cfg, tt.procs...)
		require.ErrorContains(t, err, tt.want, name)
	}
}

func lastErrorText(j processor.Job) string {
	e := j.LastError
	if e == nil {
		return "none"
	}
	return fmt.Sprintf("%s: %s (attempt %d)", e.Code, e.Text, e.Attempt)
}

// TestAnAttemptKnowsTheLastError: the processor sees the error of the latest attempt that had one,
// as a deferral is no error. Of the four errors of a job, the API shows the last three.
func TestAnAttemptKnowsTheLastError(t *testing.T) {
	stagetest.Both(t, func(w *stagetest.World) {
		w.Jobs("g", "T", 2)
		w.Feed(stagetest.Patience, "T")
		cfg := config()
		cfg.MaxRetries = 9
		saw := make(chan string, 100)
		w.Run(newWorker(w, cfg, processor.Func("T", func(_ context.Context, j processor.Job) (any, error) {
			if j.Ordinal == 1 {
				return j.LastError, nil
			}
			saw <- lastErrorText(j)
			if j.LastError != nil && time.Since(j.LastError.At).Abs() > stagetest.Patience {
				return nil, processor.Permanent("WRONG_TIME", fmt.Errorf("%s", j.LastError.At))
			}
			switch j.Attempt {
			case 1:
				return nil, errors.New("the first")
			case 2:
				return nil, processor.Throttled(time.Millisecond, errors.New("the second"))
			case 3:
				panic("the third")
			case 4:
				return nil, processor.Deferred(time.Millisecond, "busy")
			}
			return nil, processor.Permanent("NO_SUCH_USER", errors.New("the last"))
		})))
		w.AwaitCounts("g", api.Counts{Accepted: 2, Done: 1, Failed: 1})

		require.Len(w.T, saw, 5)
		for _, want := range []string{
			"none",
			"ERROR: the first (attempt 1)",
			"API_THROTTLED: the second (attempt 2)",
			"PANIC: the processor panicked: see `processor panicked` in the worker's log (attempt 3)",
			"PANIC: the processor panicked: see `processor panicked` in the worker's log (attempt 3)", // the deferral in between is no error
		} {
			require.Equal(w.T, want, <-saw)
		}
		j := w.Job("g", 0)
		for i := range j.Errors {
			require.WithinDuration(w.T, time.Now(), j.Errors[i].At, stagetest.Patience)
			j.Errors[i].At = time.Time{}
		}
		require.Equal(w.T, []api.JobError{
			{Code: "NO_SUCH_USER", Error: "the last", Attempt: 5},
			{Code: "PANIC", Error: "the processor panicked: see `processor panicked` in the worker's log", Attempt: 3},
			{Code: "API_THROTTLED", Error: "the second", Attempt: 2},
		}, j.Errors)
		require.Equal(w.T, "NO_SUCH_USER", j.LastError.Code)
		require.Empty(w.T, w.Job("g", 1).Errors)
		require.Equal(w.T, "null", string(w.Results()[0].Data), "the other job had no error")
	})
}

// TestAnAttemptOfAGatedTypeKnowsTheLastError: for a job of a gated type, the script start delivers
// the last error. So Process sees it, and Admit, which is called before the start, does not.
func TestAnAttemptOfAGatedTypeKnowsTheLastError(t *testing.T) {
	w := stagetest.Parallel(t, 1)
	w.Jobs("g", "G", 1)
	w.Feed(stagetest.Patience, "G")
	g := newGatedProcessor("G")
	g.process = func(_ context.Context, j processor.Job) error {
		if j.Attempt == 1 {
			return errors.New("the first")
		}
		return nil
	}
	w.Run(newWorker(w, config(), g))
	w.AwaitCounts("g", api.Counts{Accepted: 1, Done: 1})
	for _, want := range []string{"none", "ERROR: the first (attempt 1)"} {
		require.Equal(t, "none", lastErrorText(<-g.asked))
		require.Equal(t, want, lastErrorText(<-g.started))
	}
}

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
func newWorker(w *stagetest.World, cfg worker.Config, procs ...processor.Runner) *worker.Worker {
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
