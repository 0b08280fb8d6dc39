package worker_test

import (
	"context"
	"errors"
	"fmt"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/bulkaction/bulkaction/api"
	"github.com/bulkaction/bulkaction/internal/testkit/stagetest"
	"github.com/bulkaction/bulkaction/processor"
)

// lastErrorText returns the last error of a job, as its processor sees it, as text.
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
	t.Parallel()
	w := stagetest.Shared(t)
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
