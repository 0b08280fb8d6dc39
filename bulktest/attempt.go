package bulktest

import (
	"cmp"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"runtime/debug"
	"testing"
	"time"

	"github.com/bulkaction/bulkaction/internal/jobs/attempt"
	"github.com/bulkaction/bulkaction/internal/messages"
	"github.com/bulkaction/bulkaction/internal/process/app"
	"github.com/bulkaction/bulkaction/internal/process/builtin"
	"github.com/bulkaction/bulkaction/processor"
	"github.com/bulkaction/bulkaction/run"
)

// Outcome is what a worker decides after one attempt.
type Outcome struct {
	// Kind is also Fail if the job has no retries left. After is the longest time until the next
	// attempt. The real wait may be up to a tenth shorter. Congestion control may make it longer
	// after a throttle without a time, and a random part of up to a minute after a deferral by
	// Admit.
	processor.Verdict
	Result json.RawMessage // of a job that is Done; null if the processor returned none
}

// Attempt runs one attempt of a job as a worker does: with the middleware and the settings of c,
// the timeout of the job's type, and Admit if p is Gated. A panic, a timeout, and a result that is
// too large or no JSON have the outcome that they have in production.
//
// Only Payload is required of the job. To test the last retry, set Retries; RetriesLeft is computed
// from it. The job counts as never throttled before. The test fails if the processor ignores the
// end of its context. Its panic is logged.
func Attempt(t testing.TB, c run.Config, p processor.Processor, job processor.Job) Outcome {
	t.Helper()
	cfg, err := app.LoadSettings(c.Settings, new(builtin.Config))
	if err != nil {
		t.Fatalf("bulktest: %v", err)
	}
	if job.Type = cmp.Or(job.Type, p.Type()); job.Type != p.Type() {
		t.Fatalf("bulktest: the job has the type %s, the processor serves %s", job.Type, p.Type())
	}
	if !json.Valid(job.Payload) || len(job.Payload) > messages.MaxPayloadBytes {
		t.Fatalf("bulktest: payload: must be JSON of at most %d bytes", messages.MaxPayloadBytes)
	}
	if job.Retries < 0 || job.Ordinal < 0 {
		t.Fatalf("bulktest: retries and ordinal of a job must not be negative")
	}
	job.Group, job.Attempt = cmp.Or(job.Group, "test"), cmp.Or(job.Attempt, job.Retries+1)
	job.Tenant = cmp.Or(job.Tenant, job.Group)
	job.RetriesLeft = max(0, cfg.Worker.MaxRetryCount-job.Retries)
	if job.AcceptedAt.IsZero() {
		job.AcceptedAt = time.Now()
	}
	result, v := runLimited(t, processor.Use(p, c.Middleware...), job,
		cmp.Or(cfg.Worker.JobTimeouts[job.Type], cfg.Worker.JobTimeout))

	v.Kind, v.After = attempt.Rules{
		MaxRetries: cfg.Worker.MaxRetryCount, MaxThrottles: cfg.Worker.MaxThrottles,
		Backoff: cfg.Backpressure.DefaultBackoff, MaxBackoff: cfg.Backpressure.MaxBackoff,
	}.Next(v, job.Retries, 0)
	return Outcome{v, result}
}

// runLimited runs an attempt with a timeout. If the processor ignores the end of its context,
// runLimited waits for it as long as a worker would, and then fails the test.
func runLimited(
	t testing.TB, p processor.Processor, job processor.Job, limit time.Duration,
) (json.RawMessage, processor.Verdict) {
	t.Helper()
	ctx, cancel := context.WithTimeout(t.Context(), limit)
	defer cancel()
	calls := newCalls()
	timedOut := processor.Classify(attempt.TimeoutError(limit))
	type end struct {
		result   json.RawMessage
		verdict  processor.Verdict
		returned bool
		took     time.Duration
	}
	ended := make(chan end, 1)
	go func() {
		began, e := time.Now(), end{}
		defer func() {
			e.took = time.Since(began)
			ended <- e
		}()
		e.result, e.verdict = encoded(t, ctx, processor.Use(p, calls.watch), job)
		e.returned = true
	}()
	abandoned := time.NewTimer(limit + attempt.AbandonDelay(limit))
	defer abandoned.Stop()
	select {
	case e := <-ended:
		if !e.returned {
			t.Fatalf("bulktest: the processor of type %s has ended its goroutine, as t.FailNow and package require "+
				"do: a processor must return; use t.Error or package assert there", job.Type)
		}
		if e.took >= limit || e.verdict.Kind != processor.Done && errors.Is(ctx.Err(), context.DeadlineExceeded) {
			return nil, timedOut // a result that comes after the timeout does not count
		}
		return e.result, e.verdict
	case <-abandoned.C:
		t.Errorf("bulktest: the processor of type %s ignores the end of its context: %s after the timeout of %s "+
			"it has not returned. %s", job.Type, attempt.AbandonDelay(limit), limit, calls.report())
		return nil, timedOut
	}
}

// encoded calls the processor once, Admit of a Gated one first, and returns its result as JSON. It
// logs a panic, also in the methods of the result or of the error, and makes it a verdict.
//
//nolint:revive // a test comes before its context
func encoded(
	t testing.TB, ctx context.Context, p processor.Processor, job processor.Job,
) (result json.RawMessage, v processor.Verdict) {
	defer func() {
		if r := recover(); r != nil {
			fmt.Fprintf(t.Output(), "the processor of type %s panicked with a %T: %v\n%s", job.Type, r, r, debug.Stack())
			result, v = nil, processor.Classify(attempt.PanicError())
		}
	}()
	value, err := processor.Run(ctx, p, job)
	if err == nil {
		result, err = attempt.EncodeResult(value)
	}
	return result, processor.Classify(err)
}
