// Package bulktest tests processors, reducers and producers without a server, and without waiting.
//
//   - [Attempt] runs one attempt of a job and says what a worker decides after it.
//   - [Reduce] computes aggregates of given results, and checks that they are the same for every
//     division and every order of the results.
//   - [Run] runs a whole installation inside the test: all six roles, the HTTP API, and an embedded
//     Redis. Groups are submitted to it as in production.
//
// # The clock
//
// Run calls the test in a bubble of [testing/synctest]. There the time stands still while any
// goroutine works, and jumps ahead as soon as all of them wait. It controls the clock of Go and
// that of the embedded Redis: backoffs, timeouts, start times, rate limits, leases and retentions.
// So a backoff of a minute takes some milliseconds, and times do not depend on the speed of the
// machine. The clock begins at midnight UTC 2000-01-01. The order in which jobs run is not fixed,
// and backoffs have a random part of up to a tenth.
//
// The clock can't jump while a goroutine of the test waits for something outside of the bubble: the
// network, a child process, a channel that was made outside. Such a call works, but the time stands
// still meanwhile. An idle HTTP connection over the network also counts as waiting; close it
// (http.Client.CloseIdleConnections), or replace the http.RoundTripper. Package httptest listens on
// the network.
//
// Attempt and Reduce use the clock of their caller. For an attempt that times out at once, call
// Attempt inside of synctest.Test or of Run.
//
// The embedded Redis is github.com/alicebob/miniredis: what a test says about speed, memory, loss
// of data, Cluster or Sentinel holds only there.
package bulktest

import (
	"cmp"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"net"
	"runtime/debug"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"testing/synctest"
	"time"

	"github.com/bulkaction/bulkaction/internal/jobs/worker"
	"github.com/bulkaction/bulkaction/internal/messages"
	"github.com/bulkaction/bulkaction/internal/process/app"
	"github.com/bulkaction/bulkaction/internal/process/builtin"
	"github.com/bulkaction/bulkaction/processor"
	"github.com/bulkaction/bulkaction/run"
)

// JSON encodes a value as JSON, for payloads and results. If that is impossible, the test fails.
func JSON(t testing.TB, v any) json.RawMessage {
	t.Helper()
	b, err := json.Marshal(v)
	if err != nil {
		t.Fatalf("bulktest: encode %T: %v", v, err)
	}
	return b
}

// standstill is how long (in real time) a bubble's clock may stand still. The test fails when it
// has stood still for that long, at the latest after twice that time.
const standstill = 30 * time.Second

// Run runs an installation with these processors, and calls the function test with it in a bubble
// of testing/synctest (see "The clock" above). c is as for run.NewAll, but has no RedisURL, and no
// setting REDIS_URL or ADMIN_ADDR. With c.Logger nil, warnings go to the test's log. The
// installation ends with the test.
//
// The test fails, and says which processors run and where, if a processor has not returned when the
// roles have stopped, or if the clock stands still for 30 seconds of real time because a goroutine
// works without end or waits for something outside of the bubble.
//
// It takes a *testing.T because synctest.Test does. test must not call t.Run, t.Parallel or
// t.Deadline of its argument; the caller may call t.Parallel before.
func Run(t *testing.T, c run.Config, procs []processor.Processor, test func(t *testing.T, s *System)) {
	t.Helper()
	runBubble(t, c, procs, test, standstill)
}

func runBubble(
	t *testing.T, c run.Config, procs []processor.Processor, test func(t *testing.T, s *System), limit time.Duration,
) {
	t.Helper()
	if c.RedisURL != "" || c.Settings["REDIS_URL"] != "" || c.Settings["ADMIN_ADDR"] != "" {
		t.Fatal("bulktest: RedisURL, REDIS_URL and ADMIN_ADDR must not be set: the embedded Redis is used, " +
			"and the network stops the clock")
	}
	initResolver()
	w := &watchdog{calls: newCalls(), output: &output{w: t.Output()}}
	ended := make(chan any, 1) // receives the value of a panic
	go func() {
		defer func() { ended <- recover() }()
		synctest.Test(t, func(t *testing.T) {
			w.tick(t)
			test(t, startSystem(t, c, procs, w))
		})
	}()
	for last, done := int64(-1), false; !done; {
		select {
		case r := <-ended:
			done = true
			switch message := fmt.Sprint(r); {
			case r == nil:
			case !strings.HasPrefix(message, "deadlock: "):
				panic(r)
			case !t.Failed(): // otherwise close has said which processors are left
				t.Errorf("bulktest: the test has ended, but goroutines that it started have not: %s", message)
			}
		case <-time.After(limit):
			now := w.activity.Load()
			if now == last {
				w.output.closed.Store(true)
				t.Fatalf("bulktest: the clock has stood still for %s: a goroutine works without end, or waits for "+
					"something outside of the bubble, such as the network. %s", limit, w.calls.report())
			}
			last = now
		}
	}
	if t.Failed() {
		t.FailNow()
	}
}

// initResolver makes package net read the configuration of DNS. It does that at the first lookup of
// a name, and creates a channel for it. In a bubble the channel would belong to the bubble, and a
// lookup in another one would end the program.
var initResolver = sync.OnceFunc(func() { _, _ = net.DefaultResolver.LookupHost(context.Background(), "localhost") })

// watchdog sees whether a bubble goes on.
type watchdog struct {
	calls    *calls
	output   *output
	activity atomic.Int64 // grows with the bubble's clock, and with each reply of Redis
}

// tick starts a goroutine that tells the watchdog every 5 s of the bubble's time that the clock
// still advances, until the test ends.
func (w *watchdog) tick(t *testing.T) {
	ctx := t.Context()
	go func() {
		ticker := time.NewTicker(5 * time.Second)
		defer ticker.Stop()
		for {
			select {
			case <-ticker.C:
				w.activity.Add(1)
			case <-ctx.Done():
				return
			}
		}
	}()
}

// output is a writer to the log of a test, which drops what comes after the end of the test: a
// write to the log would be a panic then. Goroutines of a test that failed because its clock stands
// still may run on.
type output struct {
	w      io.Writer
	closed atomic.Bool
}

func (o *output) Write(b []byte) (int, error) {
	if o.closed.Load() {
		return len(b), nil
	}
	return o.w.Write(b)
}

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

	v.Kind, v.After = worker.Rules{
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
	timedOut := processor.Classify(worker.TimeoutError(limit))
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
	abandoned := time.NewTimer(limit + worker.AbandonDelay(limit))
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
			"it has not returned. %s", job.Type, worker.AbandonDelay(limit), limit, calls.report())
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
			result, v = nil, processor.Classify(worker.PanicError())
		}
	}()
	value, err := processor.Run(ctx, p, job)
	if err == nil {
		result, err = worker.EncodeResult(value)
	}
	return result, processor.Classify(err)
}
