// Package bulktest tests processors, reducers and producers without a server, and without waiting.
//
//   - [Attempt] runs one attempt of a job and says what a worker decides after it; [AttemptBatch] runs
//     one call of a batcher.
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
	"slices"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"testing/synctest"
	"time"

	"github.com/bulkaction/bulkaction/api"
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
func Run[P processor.Runner](t *testing.T, c run.Config, procs []P, test func(t *testing.T, s *System)) {
	t.Helper()
	runBubble(t, c, runners(procs), test, standstill)
}

func runners[P processor.Runner](procs []P) []processor.Runner {
	all := make([]processor.Runner, len(procs))
	for i, p := range procs {
		all[i] = p
	}
	return all
}

func runBubble(
	t *testing.T, c run.Config, procs []processor.Runner, test func(t *testing.T, s *System), limit time.Duration,
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
	// attempt. The real wait may be up to a tenth shorter, or, if a batcher named the time, up to a tenth
	// longer. Congestion control may make it longer
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
	s := loadSettings(t, c)
	job = s.complete(t, p.Type(), job)
	calls := newCalls()
	p = processor.Use(p, append(slices.Clone(c.Middleware), calls.watch)...)
	ends := runLimited(t, job.Type, 1, s.timeout(job.Type), calls, func(ctx context.Context) []end {
		return []end{encoded(t, ctx, p, job)}
	})
	return s.decide(job, ends[0], false)
}

// AttemptBatch runs one call of a batcher with these jobs as a worker does: see Attempt. The outcomes
// are in the order of the jobs. A job without a Group is that of its place in the call. The test also
// fails if a worker would not make such a call: for the number of its jobs, or because Options don't let
// them share one, also for the bytes of their payloads; and if a worker would not start with the type. The jobs that AdmitBatch of a GatedBatcher has not admitted are deferred, without a
// code, because they wait for another call.
func AttemptBatch(t testing.TB, c run.Config, b processor.Batcher, jobs ...processor.Job) []Outcome {
	t.Helper()
	s := loadSettings(t, c)
	if !api.ValidID(b.Type()) {
		t.Fatalf("bulktest: the type %q of the batcher must %s", b.Type(), api.IDRule)
	}
	o, err := b.Options().Defaults()
	if err != nil {
		t.Fatalf("bulktest: options of type %s: %v", b.Type(), err)
	}
	if len(jobs) == 0 || len(jobs) > o.Size {
		t.Fatalf("bulktest: a call of type %s has 1 to %d jobs, not %d", b.Type(), o.Size, len(jobs))
	}
	jobs = slices.Clone(jobs)
	size := 0
	for i, job := range jobs {
		if job.Group == "" {
			job.Ordinal = int64(i)
		}
		jobs[i] = s.complete(t, b.Type(), job)
		first, job := jobs[0], jobs[i]
		if o.By == processor.ByTenant && job.Tenant != first.Tenant || o.By == processor.ByGroup && job.Group != first.Group {
			t.Fatalf("bulktest: the jobs %s and %s can't share a call: their tenants or groups differ", first.ID(), job.ID())
		}
		size += len(job.Payload)
	}
	if len(jobs) > 1 && size > o.Bytes {
		t.Fatalf("bulktest: the payloads of a call of type %s with several jobs have at most %d bytes, not %d", b.Type(), o.Bytes, size)
	}
	calls := newCalls()
	b = processor.UseBatch(b, append(slices.Clone(c.BatchMiddleware), calls.watchBatch)...)
	ends := runLimited(t, b.Type(), len(jobs), s.timeout(b.Type()), calls, func(ctx context.Context) []end {
		return encodedBatch(t, ctx, b, jobs)
	})
	outcomes := make([]Outcome, len(jobs))
	for i, e := range ends {
		outcomes[i] = s.decide(jobs[i], e, len(jobs) > 1)
	}
	return outcomes
}

// settings are those of a run.Config.
type settings struct{ app.Config }

func loadSettings(t testing.TB, c run.Config) settings {
	t.Helper()
	cfg, err := app.LoadSettings(c.Settings, new(builtin.Config))
	if err != nil {
		t.Fatalf("bulktest: %v", err)
	}
	return settings{cfg}
}

func (s settings) timeout(typ string) time.Duration {
	return cmp.Or(s.Worker.JobTimeouts[typ], s.Worker.JobTimeout)
}

// complete returns a job of type typ with defaults in place of zeros. The test fails if it is no job
// that a worker would start.
func (s settings) complete(t testing.TB, typ string, job processor.Job) processor.Job {
	t.Helper()
	if job.Type = cmp.Or(job.Type, typ); job.Type != typ {
		t.Fatalf("bulktest: the job has the type %s, the processor serves %s", job.Type, typ)
	}
	if !json.Valid(job.Payload) || len(job.Payload) > messages.MaxPayloadBytes {
		t.Fatalf("bulktest: payload: must be JSON of at most %d bytes", messages.MaxPayloadBytes)
	}
	if job.Retries < 0 || job.Ordinal < 0 {
		t.Fatalf("bulktest: retries and ordinal of a job must not be negative")
	}
	job.Group, job.Attempt = cmp.Or(job.Group, "test"), cmp.Or(job.Attempt, job.Retries+1)
	job.Tenant = cmp.Or(job.Tenant, job.Group)
	job.RetriesLeft = max(0, s.Worker.MaxRetryCount-job.Retries)
	if job.AcceptedAt.IsZero() {
		job.AcceptedAt = time.Now()
	}
	return job
}

// decide returns what a worker decides after the end of a job's attempt. shared says whether it had
// its call together with others: if that call was refused as a whole, the job has used no retry.
func (s settings) decide(job processor.Job, e end, shared bool) Outcome {
	rules := worker.Rules{
		MaxRetries: s.Worker.MaxRetryCount, MaxThrottles: s.Worker.MaxThrottles,
		Backoff: s.Backpressure.DefaultBackoff, MaxBackoff: s.Backpressure.MaxBackoff,
	}
	v := e.verdict
	if shared && v.Kind == processor.RetryLater && v.Code == processor.CodeBatchRejected && s.Worker.MaxThrottles > 0 {
		_, v.After = rules.Next(processor.Verdict{Kind: processor.Throttle}, 0, 0)
	} else {
		v.Kind, v.After = rules.Next(v, job.Retries, 0)
	}
	return Outcome{v, e.result}
}

// end is how the attempt of one job has ended.
type end struct {
	result  json.RawMessage
	verdict processor.Verdict
}

// runLimited runs a call for some jobs with a timeout. If the processor ignores the end of its context,
// runLimited waits for it as long as a worker would, and then fails the test.
func runLimited(
	t testing.TB, typ string, jobs int, limit time.Duration, calls *calls, call func(ctx context.Context) []end,
) []end {
	t.Helper()
	ctx, cancel := context.WithTimeout(t.Context(), limit)
	defer cancel()
	timedOut := end{verdict: processor.Classify(worker.TimeoutError(limit))}
	type returned struct {
		ends []end // nil: the processor has ended its goroutine
		took time.Duration
	}
	ended := make(chan returned, 1)
	go func() {
		began, r := time.Now(), returned{}
		defer func() {
			r.took = time.Since(began)
			ended <- r
		}()
		r.ends = call(ctx)
	}()
	abandoned := time.NewTimer(limit + worker.AbandonDelay(limit))
	defer abandoned.Stop()
	select {
	case r := <-ended:
		if r.ends == nil {
			t.Fatalf("bulktest: the processor of type %s has ended its goroutine, as t.FailNow and package require "+
				"do: a processor must return; use t.Error or package assert there", typ)
		}
		for i, e := range r.ends {
			if r.took >= limit || e.verdict.Kind != processor.Done && errors.Is(ctx.Err(), context.DeadlineExceeded) {
				r.ends[i] = timedOut // a result that comes after the timeout does not count
			}
		}
		return r.ends
	case <-abandoned.C:
		t.Errorf("bulktest: the processor of type %s ignores the end of its context: %s after the timeout of %s "+
			"it has not returned. %s", typ, worker.AbandonDelay(limit), limit, calls.report())
		return slices.Repeat([]end{timedOut}, jobs)
	}
}

// encoded calls the processor once, Admit of a Gated one first, and returns its result as JSON.
//
//nolint:revive // a test comes before its context
func encoded(t testing.TB, ctx context.Context, p processor.Processor, job processor.Job) (e end) {
	defer recovered(t, job.Type, func(panicked end) { e = panicked })
	value, err := processor.Run(ctx, p, job)
	return encode(value, err)
}

// encodedBatch makes one call of the batcher, AdmitBatch of a gated one first, and returns the results
// as JSON.
//
//nolint:revive // a test comes before its context
func encodedBatch(t testing.TB, ctx context.Context, b processor.Batcher, jobs []processor.Job) (ends []end) {
	ends = make([]end, len(jobs))
	defer recovered(t, b.Type(), func(panicked end) { ends = slices.Repeat([]end{panicked}, len(jobs)) })
	given, callErr := slices.Clone(jobs), worker.PanicError()
	if gated, ok := b.(processor.GatedBatcher); ok {
		pass, n, err := gated.AdmitBatch(ctx, slices.Clone(jobs))
		if err == nil && n < 1 {
			err = processor.Deferred(0, "AdmitBatch admitted no job")
		}
		if err != nil {
			return slices.Repeat([]end{encode(nil, err)}, len(jobs))
		}
		if pass != nil {
			ctx = pass.Into(ctx)
		}
		given = given[:min(n, len(given))]
		for i := len(given); i < len(jobs); i++ {
			ends[i].verdict = processor.Verdict{Kind: processor.Defer, Message: "waits for another call: AdmitBatch has not admitted it"}
		}
		defer func() {
			if pass != nil {
				pass.Return(callErr)
			}
		}()
	}
	for i := range given {
		given[i] = given[i].WithContext(ctx)
	}
	var outcomes []processor.Outcome[any]
	outcomes, callErr = processor.RunBatch(ctx, b, given)
	for i, o := range outcomes {
		func() {
			defer recovered(t, b.Type(), func(panicked end) { ends[i] = panicked })
			ends[i] = encode(o.Result, o.Err)
		}()
	}
	return ends
}

func encode(value any, err error) (e end) {
	if err == nil {
		e.result, err = worker.EncodeResult(value)
	}
	e.verdict = processor.Classify(err)
	return e
}

// recovered logs a panic of the processor, or of the methods of a result or error, and passes the end
// that it means to set. It must be deferred.
func recovered(t testing.TB, typ string, set func(panicked end)) {
	if r := recover(); r != nil {
		fmt.Fprintf(t.Output(), "the processor of type %s panicked with a %T: %v\n%s", typ, r, r, debug.Stack())
		set(end{verdict: processor.Classify(worker.PanicError())})
	}
}
