package bulktest_test

import (
	"context"
	"errors"
	"fmt"
	"runtime"
	"strings"
	"testing"
	"testing/synctest"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/bulkaction/bulkaction/bulktest"
	"github.com/bulkaction/bulkaction/client"
	"github.com/bulkaction/bulkaction/processor"
	"github.com/bulkaction/bulkaction/run"
)

type order struct {
	Do string `json:"do"`
}

type badJSON struct{}

func (badJSON) MarshalJSON() ([]byte, error) { panic("on purpose") }

// orders is a batcher whose calls end as the payload of their first job says, and whose outcomes end
// as those of their jobs say.
var orders = processor.Batch("T", processor.BatchOptions{Size: 10}, func(
	ctx context.Context, jobs []processor.BatchJob[order],
) ([]processor.Outcome[any], error) {
	switch jobs[0].Payload.Do {
	case "call fails":
		return nil, errors.New("no")
	case "reject":
		return nil, processor.Retry(processor.CodeBatchRejected, errors.New("one is bad"))
	case "short":
		return []processor.Outcome[any]{}, nil
	case "panic":
		panic("on purpose")
	case "wait":
		<-jobs[0].Context().Done()
		return nil, ctx.Err()
	case "late":
		<-time.After(30 * time.Second)
	}
	outcomes := make([]processor.Outcome[any], len(jobs))
	for i, j := range jobs {
		outcomes[i].Result = map[string]any{"id": j.ID(), "left": j.RetriesLeft}
		switch j.Payload.Do {
		case "fail":
			outcomes[i].Err = errors.New("no")
		case "permanent":
			outcomes[i].Err = processor.Permanent("BAD", errors.New("refused"))
		case "throttle":
			outcomes[i].Err = processor.Throttled(time.Minute, errors.New("429"))
		case "large":
			outcomes[i].Result = strings.Repeat("x", processor.MaxResultBytes)
		case "bad JSON":
			outcomes[i].Result = badJSON{}
		}
	}
	return outcomes, nil
})

func TestAttemptBatch(t *testing.T) {
	t.Parallel()
	for name, test := range map[string]struct {
		do   []string
		want []string
	}{
		"each its own": {[]string{"", "fail", "permanent", "throttle"}, []string{
			`done  0s  {"id":"test.0","left":3}`, "retry ERROR 1s no ", "fail BAD 0s refused ", "throttle API_THROTTLED 1m0s 429 "}},
		"call fails": {[]string{"call fails", ""}, []string{"retry ERROR 1s no ", "retry ERROR 1s no "}},
		"short": {[]string{"short", ""}, []string{
			"retry BATCH_LENGTH 1s the call returned 0 outcomes for 2 jobs ", "retry BATCH_LENGTH 1s the call returned 0 outcomes for 2 jobs "}},
		"timeout": {[]string{"wait", ""}, []string{"retry TIMEOUT 1s timed out after 30s ", "retry TIMEOUT 1s timed out after 30s "}},
		"late":    {[]string{"late", ""}, []string{"retry TIMEOUT 1s timed out after 30s ", "retry TIMEOUT 1s timed out after 30s "}},
		"panic": {[]string{"panic", ""}, []string{
			"retry PANIC 1s the processor panicked: see `processor panicked` in the worker's log ",
			"retry PANIC 1s the processor panicked: see `processor panicked` in the worker's log "}},
		"results that can't be kept": {[]string{"large", "bad JSON", ""}, []string{
			"fail RESULT_TOO_LARGE 0s the processor's result has 65538 bytes, at most 65536 are kept ",
			"retry PANIC 1s the processor panicked: see `processor panicked` in the worker's log ",
			`done  0s  {"id":"test.2","left":3}`}},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			synctest.Test(t, func(t *testing.T) {
				var jobs []processor.Job
				for _, do := range test.do {
					jobs = append(jobs, processor.Job{Payload: bulktest.JSON(t, order{do})})
				}
				require.Equal(t, test.want, inLines(bulktest.AttemptBatch(t, run.Config{}, orders, jobs...)))
			})
		})
	}
}

func inLines(outcomes []bulktest.Outcome) (lines []string) {
	for _, o := range outcomes {
		lines = append(lines, fmt.Sprintf("%s %s %s %s %s", o.Kind, o.Code, o.After, o.Message, o.Result))
	}
	return lines
}

// TestAttemptBatchRejected: after a call with several jobs that was rejected as a whole, none has used
// a retry, also if it has none left. Alone, the job has.
func TestAttemptBatchRejected(t *testing.T) {
	t.Parallel()
	last := processor.Job{Payload: bulktest.JSON(t, order{"reject"}), Retries: 3}
	require.Equal(t, []string{"retry BATCH_REJECTED 1s one is bad ", "retry BATCH_REJECTED 1s one is bad "},
		inLines(bulktest.AttemptBatch(t, run.Config{}, orders, last, last)))
	require.Equal(t, []string{"fail BATCH_REJECTED 0s one is bad "}, inLines(bulktest.AttemptBatch(t, run.Config{}, orders, last)))
	none := run.Config{Settings: map[string]string{"MAX_THROTTLES": "0"}}
	require.Equal(t, "fail BATCH_REJECTED 0s one is bad ", inLines(bulktest.AttemptBatch(t, none, orders, last, last))[0])
}

func TestAttemptBatchHasMiddleware(t *testing.T) {
	t.Parallel()
	var sizes []int
	c := run.Config{BatchMiddleware: []processor.BatchMiddleware{func(next processor.BatchHandler) processor.BatchHandler {
		return func(ctx context.Context, jobs []processor.Job) ([]processor.Outcome[any], error) {
			sizes = append(sizes, len(jobs))
			return next(ctx, jobs)
		}
	}}}
	bulktest.AttemptBatch(t, c, orders, processor.Job{Payload: bulktest.JSON(t, order{})}, processor.Job{Payload: bulktest.JSON(t, order{})})
	require.Equal(t, []int{2}, sizes)
}

func TestAttemptBatchMistakes(t *testing.T) {
	t.Parallel()
	job := processor.Job{Payload: bulktest.JSON(t, order{})}
	of := func(tenant string) processor.Job { return processor.Job{Group: tenant, Payload: job.Payload} }
	wide := processor.Job{Payload: []byte(`{"do": "abc"}`)}
	release := make(chan struct{})
	defer close(release)
	does := func(f func()) processor.Batcher {
		return processor.Batch("T", processor.BatchOptions{}, func(context.Context, []processor.BatchJob[order]) ([]processor.Outcome[any], error) {
			f()
			return nil, nil
		})
	}
	for says, test := range map[string]func(t testing.TB){
		"a call of type T has 1 to 10 jobs, not 0": func(t testing.TB) { bulktest.AttemptBatch(t, run.Config{}, orders) },
		"not 11": func(t testing.TB) {
			bulktest.AttemptBatch(t, run.Config{}, orders, job, job, job, job, job, job, job, job, job, job, job)
		},
		"options of type T: option Size -1": func(t testing.TB) {
			bulktest.AttemptBatch(t, run.Config{}, processor.Batch("T", processor.BatchOptions{Size: -1}, noOrders), job)
		},
		`the type "a b" of the batcher must`: func(t testing.TB) {
			bulktest.AttemptBatch(t, run.Config{}, processor.Batch("a b", processor.BatchOptions{}, noOrders), job)
		},
		"with several jobs have at most 20 bytes, not 22": func(t testing.TB) {
			bulktest.AttemptBatch(t, run.Config{}, processor.Batch("T", processor.BatchOptions{Bytes: 20}, noOrders), wide, job)
		},
		"the jobs a.0 and b.0 can't share a call": func(t testing.TB) { bulktest.AttemptBatch(t, run.Config{}, orders, of("a"), of("b")) },
		"the job has the type U":                  func(t testing.TB) { bulktest.AttemptBatch(t, run.Config{}, orders, processor.Job{Type: "U"}) },
		"the processor of type T has ended its goroutine": func(t testing.TB) {
			bulktest.AttemptBatch(t, run.Config{}, does(runtime.Goexit), job)
		},
		"job test.0, attempt 1, and 1 more jobs of the call": func(t testing.TB) {
			c := run.Config{Settings: map[string]string{"JOB_TIMEOUT": "20ms"}}
			require.Len(t, bulktest.AttemptBatch(t, c, does(func() { <-release }), job, job), 2)
		},
	} {
		require.Contains(t, failure(t, test), says)
	}
	require.Len(t, bulktest.AttemptBatch(t, run.Config{}, processor.Batch("T", processor.BatchOptions{Bytes: 1}, noOrders), job), 1)
	require.NotEmpty(t, bulktest.AttemptBatch(t, run.Config{}, processor.Batch("T", processor.BatchOptions{By: processor.Any}, noOrders), of("a"), of("b")))
}

// gatedOrders admits as many jobs as admits says.
type gatedOrders struct {
	processor.Batcher
	admits int
	pass   *pass
}

func (g gatedOrders) AdmitBatch(_ context.Context, jobs []processor.Job) (processor.Pass, int, error) {
	if len(jobs) > 2 {
		return nil, 0, processor.Permanent("MANY", nil)
	}
	return g.pass, g.admits, nil
}

func TestAttemptBatchAdmits(t *testing.T) {
	t.Parallel()
	failing, good := processor.Job{Payload: bulktest.JSON(t, order{"call fails"})}, processor.Job{Payload: bulktest.JSON(t, order{})}
	attempt := func(admits int, jobs ...processor.Job) (lines []string, returned error) {
		p := new(pass)
		return inLines(bulktest.AttemptBatch(t, run.Config{}, gatedOrders{orders, admits, p}, jobs...)), p.returned
	}
	lines, returned := attempt(1, good, failing)
	require.Equal(t, []string{`done  0s  {"id":"test.0","left":3}`, "defer  0s waits for another call: AdmitBatch has not admitted it "}, lines)
	require.NoError(t, returned)
	lines, returned = attempt(9, failing, good)
	require.Equal(t, []string{"retry ERROR 1s no ", "retry ERROR 1s no "}, lines)
	require.EqualError(t, returned, "no")
	lines, _ = attempt(0, good)
	require.Equal(t, []string{"defer RESOURCE_BUSY 1s AdmitBatch admitted no job "}, lines)
	lines, _ = attempt(3, good, good, good)
	require.Equal(t, "fail MANY 0s MANY ", lines[2])
}

func noOrders(context.Context, []processor.BatchJob[order]) ([]processor.Outcome[any], error) {
	return nil, errors.New("no")
}

// TestRunBatches: in a whole installation, the jobs of a group share calls.
func TestRunBatches(t *testing.T) {
	t.Parallel()
	sizes := make(chan int, 1000)
	b := processor.Batch("T", processor.BatchOptions{Size: 10}, func(
		_ context.Context, jobs []processor.BatchJob[order],
	) ([]processor.Outcome[string], error) {
		sizes <- len(jobs)
		outcomes := make([]processor.Outcome[string], len(jobs))
		for i, j := range jobs {
			outcomes[i].Result = j.ID()
		}
		return outcomes, nil
	})
	bulktest.Run(t, run.Config{}, []processor.Runner{b}, func(t *testing.T, s *bulktest.System) {
		g := client.Submission{ID: "g", Type: "T"}
		for range 100 {
			g.Jobs = append(g.Jobs, client.NewJob{Payload: order{}})
		}
		ended := s.Submit(g)
		require.EqualValues(t, 100, ended.Counts.Done)
		require.JSONEq(t, `"g.99"`, string(ended.Results[99].Data))
		require.Less(t, len(sizes), 100)
	})
}
