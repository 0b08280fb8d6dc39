package bulktest_test

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io/fs"
	"runtime"
	"strings"
	"testing"
	"testing/synctest"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/bulkaction/bulkaction/bulktest"
	"github.com/bulkaction/bulkaction/client"
	"github.com/bulkaction/bulkaction/processor"
	"github.com/bulkaction/bulkaction/reducer"
	"github.com/bulkaction/bulkaction/run"
)

// fake is a fake testing.TB: failures are recorded in said, and do not fail the real test.
type fake struct {
	*testing.T
	said strings.Builder
}

func (f *fake) Errorf(format string, args ...any) { fmt.Fprintf(&f.said, format+"\n", args...) }

func (f *fake) Fatalf(format string, args ...any) {
	f.Errorf(format, args...)
	runtime.Goexit()
}

// failure returns what a test that must fail says.
func failure(t *testing.T, test func(testing.TB)) string {
	t.Helper()
	f := &fake{T: t}
	done := make(chan struct{})
	go func() {
		defer close(done)
		test(f)
	}()
	<-done
	require.NotEmpty(t, f.said.String(), "the test must fail")
	return f.said.String()
}

func TestAttempt(t *testing.T) {
	t.Parallel()
	type payload struct {
		Do string `json:"do"`
	}
	proc := processor.Typed("T", func(ctx context.Context, job processor.Job, p payload) (any, error) {
		switch p.Do {
		case "fail":
			return nil, errors.New("no")
		case "throttle":
			return nil, processor.Throttled(time.Minute, errors.New("429"))
		case "defer":
			return nil, processor.Deferred(time.Hour, "busy")
		case "permanent":
			return nil, processor.Permanent("BAD", errors.New("refused"))
		case "panic":
			panic("on purpose")
		case "nil error":
			var err *fs.PathError
			return nil, err
		case "large":
			return strings.Repeat("x", processor.MaxResultBytes), nil
		case "wait":
			<-ctx.Done()
			return nil, ctx.Err()
		case "late":
			<-time.After(30 * time.Second)
		}
		return map[string]any{"id": job.ID(), "left": job.RetriesLeft}, nil
	})
	verdict := func(kind processor.Kind, code string, after time.Duration, message string) processor.Verdict {
		return processor.Verdict{Kind: kind, Code: code, After: after, Message: message}
	}
	for name, test := range map[string]struct {
		job    processor.Job
		want   processor.Verdict
		result string
	}{
		"panic of an error": {processor.Job{Payload: []byte(`{"do":"nil error"}`)}, verdict(processor.RetryLater, "PANIC", time.Second, "the processor panicked: see `processor panicked` in the worker's log"), ""},
		"done":              {processor.Job{}, verdict(processor.Done, "", 0, ""), `{"id":"test.0","left":3}`},
		"retry":             {processor.Job{Payload: []byte(`{"do":"fail"}`), Retries: 1}, verdict(processor.RetryLater, "ERROR", 2*time.Second, "no"), ""},
		"last retry":        {processor.Job{Payload: []byte(`{"do":"fail"}`), Retries: 3}, verdict(processor.Fail, "ERROR", 0, "no"), ""},
		"throttle":          {processor.Job{Payload: []byte(`{"do":"throttle"}`)}, verdict(processor.Throttle, "API_THROTTLED", time.Minute, "429"), ""},
		"defer":             {processor.Job{Payload: []byte(`{"do":"defer"}`)}, verdict(processor.Defer, "RESOURCE_BUSY", time.Hour, "busy"), ""},
		"permanent":         {processor.Job{Payload: []byte(`{"do":"permanent"}`)}, verdict(processor.Fail, "BAD", 0, "refused"), ""},
		"panic":             {processor.Job{Payload: []byte(`{"do":"panic"}`)}, verdict(processor.RetryLater, "PANIC", time.Second, "the processor panicked: see `processor panicked` in the worker's log"), ""},
		"large":             {processor.Job{Payload: []byte(`{"do":"large"}`)}, verdict(processor.Fail, "RESULT_TOO_LARGE", 0, "the processor's result has 65538 bytes, at most 65536 are kept"), ""},
		"timeout":           {processor.Job{Payload: []byte(`{"do":"wait"}`)}, verdict(processor.RetryLater, "TIMEOUT", time.Second, "timed out after 30s"), ""},
		"late result":       {processor.Job{Payload: []byte(`{"do":"late"}`)}, verdict(processor.RetryLater, "TIMEOUT", time.Second, "timed out after 30s"), ""},
		"wrong payload":     {processor.Job{Payload: []byte(`{"do":1}`)}, verdict(processor.Fail, "INVALID_PAYLOAD", 0, "payload.do: must be a string, not a number"), ""},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			synctest.Test(t, func(t *testing.T) {
				if test.job.Payload == nil {
					test.job.Payload = bulktest.JSON(t, payload{})
				}
				got := bulktest.Attempt(t, run.Config{}, proc, test.job)
				require.Equal(t, test.want, got.Verdict)
				require.Equal(t, test.result, string(got.Result))
			})
		})
	}
}

// pass is a permission that records how it comes back.
type pass struct{ returned error }

func (*pass) Into(ctx context.Context) context.Context { return ctx }
func (p *pass) Return(err error)                       { p.returned = err }

type gated struct {
	processor.Processor
	pass *pass
}

func (g gated) Admit(context.Context, processor.Job) (processor.Pass, error) {
	if g.pass == nil {
		return nil, processor.Deferred(time.Minute, "no account")
	}
	return g.pass, nil
}

func TestAttemptAdmits(t *testing.T) {
	t.Parallel()
	proc := processor.Func("T", func(context.Context, processor.Job) (any, error) { return nil, errors.New("no") })
	job := processor.Job{Payload: bulktest.JSON(t, 1)}
	require.Equal(t, processor.Defer, bulktest.Attempt(t, run.Config{}, gated{proc, nil}, job).Kind)
	p := new(pass)
	require.Equal(t, processor.RetryLater, bulktest.Attempt(t, run.Config{}, gated{proc, p}, job).Kind)
	require.EqualError(t, p.returned, "no")
}

// TestAttemptIgnoresTheEnd: a processor that ignores the end of its context fails the test. The
// message says where the processor waits.
func TestAttemptIgnoresTheEnd(t *testing.T) {
	t.Parallel()
	release := make(chan struct{})
	defer close(release)
	proc := processor.Func("T", func(context.Context, processor.Job) (any, error) { <-release; return nil, nil })
	c := run.Config{Settings: map[string]string{"JOB_TIMEOUT": "20ms"}}
	said := failure(t, func(t testing.TB) {
		bulktest.Attempt(t, c, proc, processor.Job{Payload: bulktest.JSON(t, 1)})
	})
	require.Contains(t, said, "the processor of type T ignores the end of its context")
	require.Contains(t, said, "TestAttemptIgnoresTheEnd.func")
}

// TestAttemptEndsItsGoroutine: if a processor ends its goroutine, as package require does after a
// failure, the test fails, with a message that says so.
func TestAttemptEndsItsGoroutine(t *testing.T) {
	t.Parallel()
	proc := processor.Func("T", func(context.Context, processor.Job) (any, error) {
		runtime.Goexit()
		return nil, nil
	})
	said := failure(t, func(t testing.TB) {
		bulktest.Attempt(t, run.Config{}, proc, processor.Job{Payload: bulktest.JSON(t, 1)})
	})
	require.Contains(t, said, "the processor of type T has ended its goroutine")
}

func TestAttemptMistakes(t *testing.T) {
	t.Parallel()
	proc := processor.Func("T", func(context.Context, processor.Job) (any, error) { return nil, nil })
	for says, test := range map[string]func(t testing.TB){
		"BULKACTION_JOB_TIMEOUT": func(t testing.TB) {
			bulktest.Attempt(t, run.Config{Settings: map[string]string{"JOB_TIMEOUT": "soon"}}, proc, processor.Job{})
		},
		"payload: must be JSON of at most 262144 bytes": func(t testing.TB) {
			bulktest.Attempt(t, run.Config{}, proc, processor.Job{})
		},
		"the job has the type U, the processor serves T": func(t testing.TB) {
			bulktest.Attempt(t, run.Config{}, proc, processor.Job{Type: "U", Payload: bulktest.JSON(t, 1)})
		},
		"must not be negative": func(t testing.TB) {
			bulktest.Attempt(t, run.Config{}, proc, processor.Job{Retries: -1, Payload: bulktest.JSON(t, 1)})
		},
		"encode chan int": func(t testing.TB) { bulktest.JSON(t, make(chan int)) },
	} {
		require.Contains(t, failure(t, test), says)
	}
}

func results(t *testing.T, n int) []reducer.Result {
	t.Helper()
	all := make([]reducer.Result, n)
	for i := range all {
		all[i] = reducer.Result{Data: bulktest.JSON(t, number{i})}
	}
	return all
}

func numberOf(r reducer.Result) (float64, error) {
	var p number
	err := json.Unmarshal(r.Data, &p)
	return float64(p.N), err
}

func registry(t *testing.T, factory reducer.Factory) *reducer.Registry {
	t.Helper()
	r := reducer.NewRegistry()
	require.NoError(t, r.Register("mine", factory))
	return r
}

func TestReduce(t *testing.T) {
	t.Parallel()
	mine := registry(t, reducer.MapReduce(numberOf, func(a, b float64) float64 { return max(a, b) }))
	all := append(results(t, 30), reducer.Result{Failed: true, Data: json.RawMessage(`{"code":"BAD"}`)})
	values := bulktest.Reduce(t, mine, []client.Aggregate{
		{As: "largest", Op: "mine"}, {As: "sum", Op: "sum", Field: "data.n"}, {As: "first", Op: "collect", Field: "data.n"},
		{As: "codes", Op: "count_by", Field: "data.code", Over: "failed"},
	}, all...)
	require.Equal(t, "29", string(values["largest"]))
	require.Equal(t, "435", string(values["sum"]))
	require.JSONEq(t, `{"BAD":1}`, string(values["codes"]))
	require.Equal(t, "0", string(bulktest.Reduce(t, nil, []client.Aggregate{{As: "n", Op: "count"}})["n"]))
}

// TestReduceAllowsRoundingErrors: the order in which fractions are added changes the last digits of
// their sum. Reduce does not report that.
func TestReduceAllowsRoundingErrors(t *testing.T) {
	t.Parallel()
	sum := registry(t, reducer.MapReduce(
		func(r reducer.Result) (map[string][]float64, error) {
			n, err := numberOf(r)
			return map[string][]float64{"sum": {n / 10}}, err
		},
		func(a, b map[string][]float64) map[string][]float64 {
			return map[string][]float64{"sum": {a["sum"][0] + b["sum"][0]}}
		}))
	values := bulktest.Reduce(t, sum, []client.Aggregate{{As: "x", Op: "mine"}}, results(t, 30)...)
	var got map[string][]float64
	require.NoError(t, json.Unmarshal(values["x"], &got))
	require.InDelta(t, 43.5, got["sum"][0], 1e-9)
}

type counted struct{ sum, n float64 } // its fields are not exported: lost in JSON

// TestReduceFindsBrokenReducers: Reduce reports a reducer that is not commutative, with the two
// results that show it, one that is not associative, and one whose state JSON does not keep.
func TestReduceFindsBrokenReducers(t *testing.T) {
	t.Parallel()
	for name, test := range map[string]struct {
		factory reducer.Factory
		says    []string
	}{
		"not commutative": {
			reducer.MapReduce(numberOf, func(a, _ float64) float64 { return a }),
			[]string{"x is 0 in one part, and 1 in these parts", `1: {"n":1}`, `0: {"n":0}`},
		},
		"not associative": {
			reducer.MapReduce(numberOf, func(a, b float64) float64 { return (a + b) / 2 }),
			[]string{"in these parts"},
		},
		"state is lost in JSON": {
			reducer.MapReduce(func(r reducer.Result) (counted, error) { n, err := numberOf(r); return counted{n, 1}, err },
				func(a, b counted) counted { return counted{a.sum + b.sum, a.n + b.n} },
				reducer.Finish(func(c counted) (any, error) { return c.n, nil })),
			[]string{"x is 1 in one part, and 0 in these parts"},
		},
	} {
		said := failure(t, func(t testing.TB) {
			bulktest.Reduce(t, registry(t.(*fake).T, test.factory), []client.Aggregate{{As: "x", Op: "mine"}}, results(t.(*fake).T, 20)...)
		})
		for _, want := range test.says {
			require.Contains(t, said, want, name)
		}
		require.Contains(t, said, "associative and commutative", name)
	}
}

func TestReduceMistakes(t *testing.T) {
	t.Parallel()
	require.Contains(t, failure(t, func(t testing.TB) {
		bulktest.Reduce(t, nil, []client.Aggregate{{As: "x", Op: "no_such"}})
	}), `op "no_such" is unknown`)
	require.Contains(t, failure(t, func(t testing.TB) {
		bulktest.Reduce(t, nil, []client.Aggregate{{As: "x", Op: "count"}}, reducer.Result{Data: json.RawMessage("{")})
	}), "result 0: data must be JSON")
}
