package worker

import (
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"runtime"
	"runtime/debug"
	"strings"
	"sync"
	"time"
	"unicode/utf8"

	"go.opentelemetry.io/otel/attribute"
	"go.opentelemetry.io/otel/codes"
	"go.opentelemetry.io/otel/trace"

	"github.com/bulkaction/bulkaction/internal/telemetry"
	"github.com/bulkaction/bulkaction/processor"
)

// Causes for which the worker ends a job's context before the job ends. It then releases the job,
// unless its processor returns a result all the same. A processor gets them from context.Cause.
var (
	errCancelled = errors.New("the group was cancelled")
	errLeaseLost = errors.New("the job's lease was lost")
	errShutdown  = errors.New("the worker is shutting down")
)

// serve runs tasks and batches in slot sl until the slot is closed or abandoned. Jobs run under
// workCtx, those of batches start under ctx. It
// releases a task whose group was cancelled, or whose lease was lost, before it began.
func (w *Worker) serve(ctx, workCtx context.Context, sl *slot) {
	abandoned, returned := false, false
	defer func() {
		if !returned && !abandoned {
			go w.serve(ctx, workCtx, sl) // a processor has ended this goroutine by runtime.Goexit
		}
	}()
	for t, b := w.slots.next(sl); t != nil || b != nil; t, b = w.slots.next(sl) {
		switch {
		case b != nil:
			w.runBatch(ctx, workCtx, b, &abandoned)
		case t.ctx.stopCause() != nil:
			release(t)
		default:
			w.runTask(workCtx, t, &abandoned)
		}
		if abandoned {
			return // replaceSlot has removed this slot from the pool
		}
	}
	returned = true
	w.slots.goroutines.Done()
}

// runTask runs a task's processor under ctx, sets the task's outcome and queues its report, also if
// the processor ends the goroutine. It sets abandoned when the task was abandoned meanwhile: then
// its outcome was set elsewhere, the caller's slot (a suspect has none) is not in the pool any more,
// and the caller must end.
func (w *Worker) runTask(ctx context.Context, t *task, abandoned *bool) {
	limit, pass := t.terms.JobTimeout, t.pass // abandon may change t.pass
	t.runStart = monotonicNow()
	t.ctx.begin(ctx, t.runStart, limit)
	w.held.move(t.currentState(), stateRunning, t)
	defer t.ctx.finish()
	jobCtx, span := w.startSpan(&t.ctx, t)
	var end attemptEnd
	defer func() {
		now := monotonicNow()
		if !w.held.move(stateRunning, stateEnded, t) {
			if span != nil {
				span.End()
			}
			*abandoned = true
			return
		}
		cause := t.ctx.endCause(now)
		w.setOutcome(t, span, end, cause, now, limit)
		w.meanRunTime.add(t.runTime)
		defer t.feed.reports.add(t)
		if end.err != nil && w.hasShortTimeout(t) && errors.Is(cause, context.DeadlineExceeded) {
			t.returnPass(context.Canceled)
		} else {
			t.returnPass(end.err)
		}
	}()
	w.callProcessor(jobCtx, t, pass, &end)
}

// attemptEnd is what an attempt has returned.
type attemptEnd struct {
	result  []byte            // JSON
	err     error             // of the processor, so only a guard may call its methods
	verdict processor.Verdict // about err
	whole   bool              // the processor has returned, and result and verdict are set
}

// hasShortTimeout reports whether the task's group has a shorter timeout than the operator of the
// worker has set for the type. A tenant chooses a group's timeout, so its end says nothing about
// the account of the task's pass. Otherwise a tenant could open, by short timeouts, the breakers of
// accounts that others use, too.
func (w *Worker) hasShortTimeout(t *task) bool {
	return t.terms.JobTimeout < w.cfg.timeoutOf(t.Type)
}

// callProcessor runs the task's processor and sets end. What the processor returns is used here
// only: a panic, also in the methods of its result or of its error, and the end of the goroutine
// become an error that is retried. If the payload is lost, callProcessor calls no processor and the
// error is permanent. If Admit has decided about the job, its error is that of the attempt.
func (w *Worker) callProcessor(ctx context.Context, t *task, pass processor.Pass, end *attemptEnd) {
	defer func() {
		if r := recover(); r != nil || !end.whole {
			*end = attemptEnd{err: w.panicked(t, r)}
			end.verdict = processor.Classify(end.err)
		}
	}()
	switch {
	case t.loadedPayload == "":
		end.err = errPayloadLost
	case t.admitErr != nil:
		end.err = t.admitErr
	default:
		if pass != nil {
			ctx = pass.Into(ctx)
		}
		var result any
		if result, end.err = t.proc.Process(ctx, w.jobOf(t)); end.err == nil {
			end.result, end.err = EncodeResult(result)
		}
	}
	end.verdict, end.whole = processor.Classify(end.err), true
}

var errPayloadLost = processor.Permanent("PAYLOAD_LOST", errors.New("the job's payload is no longer in Redis"))

// jobOf returns the job of a started task.
func (w *Worker) jobOf(t *task) processor.Job {
	job := t.job()
	job.RetriesLeft = max(0, w.cfg.retriesOf(t.terms)-t.Retries)
	return job
}

// job returns the job as Admit gets it; for Process, jobOf adds RetriesLeft. Before the job
// is started, Tenant and LastError are empty.
func (t *task) job() processor.Job {
	return processor.Job{
		Tenant: t.terms.Tenant, Group: t.Group, Ordinal: t.Ordinal, Type: t.Type,
		Payload: json.RawMessage(t.loadedPayload), Attempt: t.currentAttempt, Retries: t.Retries,
		AcceptedAt: t.Accepted, Key: t.Key(), LastError: t.lastError,
	}
}

// panicked logs that the task's processor, or its pass, has panicked with the value r, or has ended
// its goroutine (r is nil), and returns the error for the outcome of the attempt. It must be called
// in the deferred function that recovers. attrs are further attributes of the log line; of a call, t is
// its first job.
func (w *Worker) panicked(t *task, r any, attrs ...any) error {
	w.Tel.Log.Error("processor panicked", append(attrs, "group", t.Group, "ordinal", t.Ordinal,
		"attempt", t.currentAttempt, "type", t.Type,
		"panic", panicText(r), "at", panickedAt(), "stack", string(debug.Stack()))...)
	return PanicError()
}

// panicText returns what a log may show of a panic's value: the text of the runtime's own panics. A
// value of the processor might hold a payload, so only its type is shown; its methods may panic.
func panicText(r any) (text string) {
	if r == nil {
		return "it ended its goroutine by runtime.Goexit"
	}
	defer func() {
		if text == "" {
			_ = recover()
			text = fmt.Sprintf("a value of type %T, which is not logged because it might hold a payload", r)
		}
	}()
	var own runtime.Error
	if err, ok := r.(error); ok && errors.As(err, &own) {
		return own.Error()
	}
	return ""
}

// panickedAt returns the function, file and line that panicked or ended the goroutine: the first
// frame of the stack that is not the runtime's. It must be called in a deferred function.
func panickedAt() string {
	pcs := make([]uintptr, 64)
	frames := runtime.CallersFrames(pcs[:runtime.Callers(0, pcs)])
	for panicked := false; ; {
		f, more := frames.Next()
		switch {
		case f.Function == "runtime.gopanic" || f.Function == "runtime.Goexit":
			panicked = true
		case panicked && !strings.HasPrefix(f.Function, "runtime."):
			return fmt.Sprintf("%s (%s:%d)", f.Function, f.File, f.Line)
		case !more:
			return ""
		}
	}
}

// setOutcome sets the task's outcome from what the processor returned. now is the time of its return
// (see monotonicNow), cause why the context had ended by then, limit the job's timeout. A job that the
// worker has stopped is released only if the processor returned an error. Of a call's time, a job has
// its share. setOutcome also ends the span, if there is one.
func (w *Worker) setOutcome(t *task, span trace.Span, end attemptEnd, cause error, now int64, limit time.Duration) {
	t.runTime, t.result, t.verdict = time.Duration(now-t.runStart), end.result, end.verdict
	defer t.share()
	switch {
	case errors.Is(cause, context.DeadlineExceeded) && (end.err != nil || t.runTime >= limit):
		t.verdict = processor.Classify(TimeoutError(limit)) // a result after the timeout does not count
	case end.err != nil && stoppedByWorker(cause):
		t.released = true
	}
	t.processTrace = t.Trace
	if span != nil && span.SpanContext().IsValid() {
		if t.verdict.Kind != processor.Done {
			span.SetStatus(codes.Error, t.verdict.Code)
		}
		t.processTrace = telemetry.FormatTraceParent(span.SpanContext())
		span.End()
	}
}

// stoppedByWorker reports whether cause is one for which the worker itself ended a job's context. A
// job that returns an error after that is released, not failed or retried.
func stoppedByWorker(cause error) bool {
	return errors.Is(cause, errCancelled) || errors.Is(cause, errLeaseLost) || errors.Is(cause, errShutdown)
}

// startSpan starts the span of the attempt and returns its context. For a job without a trace
// context it returns ctx and a nil span.
func (w *Worker) startSpan(ctx context.Context, t *task) (context.Context, trace.Span) {
	if t.Trace == "" {
		return ctx, nil
	}
	return w.Tel.StartJob(ctx, telemetry.JobSpan{
		Parent: t.Trace, Name: "process " + t.Type, Kind: trace.SpanKindConsumer}, func() []attribute.KeyValue {
		attrs := telemetry.MessagingAttributes(telemetry.OpProcess, "process", t.feed.partition.Ready(t.Type))
		attrs = append(attrs, telemetry.MessageID(t.entryID))
		attrs = append(attrs, telemetry.JobAttributes(t.terms.Tenant, t.Group, t.Ordinal, t.currentAttempt)...)
		if key := t.Key(); key != "" {
			attrs = append(attrs, telemetry.JobKey(key))
		}
		return append(attrs, telemetry.WaitAttributes(t.Waited())...)
	})
}

// jobContext is the context of a job's processor: it ends at the job's timeout, or when the worker
// stops the job. It creates a standard context, with a timer and an entry in its parent, only when
// the processor uses it, because many processors never use it; BenchmarkJobContext compares both.
type jobContext struct {
	parent    context.Context //nolint:containedctx // a context is the parent of a context
	startedAt int64           // time of monotonicNow
	timeout   time.Duration   // time from startedAt until the context ends

	mu        sync.Mutex
	cause     error           // why stop was called, perhaps before begin; or nil
	finished  bool            // finish was called
	ctx       context.Context //nolint:containedctx // the standard context, once it is created
	cancel    context.CancelCauseFunc
	stopTimer context.CancelFunc // releases the timer of ctx
}

// begin sets the parent, the start time (see monotonicNow) and the timeout. The caller calls it
// once, before it passes the context on.
func (c *jobContext) begin(parent context.Context, startedAt int64, timeout time.Duration) {
	c.mu.Lock()
	defer c.mu.Unlock()
	c.parent, c.startedAt, c.timeout = parent, startedAt, timeout
}

// stop ends the context with a cause. Before begin, it makes the context end as soon as it begins.
// Only the first cause counts, and first says whether this is the first.
func (c *jobContext) stop(cause error) (first bool) {
	c.mu.Lock()
	defer c.mu.Unlock()
	first = c.cause == nil
	if first {
		c.cause = cause
	}
	switch {
	case c.ctx != nil:
		c.cancel(cause)
	case first && c.parent != nil && !c.finished:
		c.create() // created now: a timeout that is already over must stay the cause
	}
	return first
}

// stopCause returns the cause of the first stop, or nil.
func (c *jobContext) stopCause() error {
	c.mu.Lock()
	defer c.mu.Unlock()
	return c.cause
}

// finish releases the timer and the entry in the parent. A processor that still uses the context
// finds it cancelled.
func (c *jobContext) finish() {
	c.mu.Lock()
	defer c.mu.Unlock()
	c.finished = true
	if c.ctx != nil {
		c.cancel(nil)
		c.stopTimer()
	}
}

// endCause returns why the context has ended by the time now (see monotonicNow), or nil if it has
// not.
func (c *jobContext) endCause(now int64) error {
	c.mu.Lock()
	defer c.mu.Unlock()
	switch {
	case c.ctx != nil:
		return context.Cause(c.ctx)
	case c.cause != nil:
		return c.cause
	case now-c.startedAt >= int64(c.timeout):
		return context.DeadlineExceeded
	}
	return nil
}

// ensure returns the standard context, and creates it at the first call.
func (c *jobContext) ensure() context.Context {
	c.mu.Lock()
	defer c.mu.Unlock()
	if c.ctx == nil {
		c.create()
	}
	return c.ctx
}

// create creates the standard context. It has ended already if stop or finish was called, or the
// timeout is over. The caller holds the lock.
func (c *jobContext) create() {
	timed, release := context.WithDeadline(c.parent, processStart.Add(time.Duration(c.startedAt)+c.timeout))
	c.ctx, c.cancel = context.WithCancelCause(timed)
	c.stopTimer = release
	if c.cause != nil {
		c.cancel(c.cause)
	}
	if c.finished {
		c.cancel(nil)
		c.stopTimer()
	}
}

// Deadline, Done, Err and Value implement [context.Context].
func (c *jobContext) Deadline() (time.Time, bool) { return c.ensure().Deadline() }
func (c *jobContext) Done() <-chan struct{}       { return c.ensure().Done() }
func (c *jobContext) Err() error                  { return c.ensure().Err() }
func (c *jobContext) Value(key any) any           { return c.ensure().Value(key) }

var processStart = time.Now()

// monotonicNow returns the monotonic time since the process started, in ns; it is never 0. A change
// of the system clock does not affect it, so such a change ends no job.
func monotonicNow() int64 { return int64(time.Since(processStart)) + 1 }

// MaxWait is the longest delay of a job that a downstream API or a processor may ask for. A longer
// Retry-After is cut to it.
const MaxWait = 24 * time.Hour

// AbandonDelay returns how long after its timeout a processor that ignores the end of its context
// is abandoned: a second, or as long as the timeout if that is shorter.
func AbandonDelay(timeout time.Duration) time.Duration { return min(time.Second, timeout) }

// TimeoutError returns the error of an attempt that ran longer than limit. Its job is retried, if
// it has retries left.
func TimeoutError(limit time.Duration) error {
	return processor.Retry(processor.CodeTimeout, fmt.Errorf("timed out after %s", limit))
}

const codePanic = "PANIC"

// PanicError returns the error of an attempt whose processor has panicked. Its job is retried, if
// it has retries left. The error leaves the panic's value out, because it may contain a payload.
func PanicError() error {
	return processor.Retry(codePanic, errors.New("the processor panicked: see `processor panicked` in the worker's log"))
}

var noResult = []byte("null") // callers must not change it

// EncodeResult returns a processor's result as JSON without line breaks, with the character U+FFFD in
// place of bytes that are not UTF-8; nil and an empty json.RawMessage become null. Its errors are
// permanent: for a result that is not JSON, or that is larger than processor.MaxResultBytes.
func EncodeResult(result any) ([]byte, error) {
	var b []byte
	switch v := result.(type) {
	case nil:
		return noResult, nil
	case json.RawMessage:
		b = v
		if len(b) == 0 {
			return noResult, nil
		}
		if len(b) <= processor.MaxResultBytes {
			var line bytes.Buffer
			if err := json.Compact(&line, b); err != nil {
				return nil, processor.Permanent("INVALID_RESULT", errors.New("the processor's result is not JSON"))
			}
			b = line.Bytes()
		}
	default:
		var err error
		if b, err = json.Marshal(v); err != nil {
			return nil, processor.Permanent("INVALID_RESULT",
				fmt.Errorf("the processor's result can't be written as JSON: %T", v))
		}
	}
	if !utf8.Valid(b) { // of a json.RawMessage or of a MarshalJSON: a reader of all results would stop here
		b = bytes.ToValidUTF8(b, []byte(string(utf8.RuneError)))
	}
	if len(b) > processor.MaxResultBytes {
		return nil, processor.Permanent("RESULT_TOO_LARGE",
			fmt.Errorf("the processor's result has %d bytes, at most %d are kept", len(b), processor.MaxResultBytes))
	}
	return b, nil
}

// Rules are the settings that decide, after an attempt, whether the job is tried again and when.
type Rules struct {
	MaxRetries   int           // retries of the job
	MaxThrottles int           // throttles that a job may have; the next one fails it
	Backoff      time.Duration // wait before the first retry; it doubles with each further retry
	MaxBackoff   time.Duration // longest wait after an error or a throttle without Retry-After
}

// Next returns what happens to the job after an attempt with this verdict, and for how long the job
// then waits. Before a retry, and after a throttle without Retry-After, the worker shortens this by
// up to a tenth, at random, and Redis may choose a longer wait. retries and throttles are the
// numbers before the attempt. A job that would need another retry or throttle and has none left
// fails.
func (r Rules) Next(v processor.Verdict, retries, throttles int) (processor.Kind, time.Duration) {
	switch {
	case v.Kind == processor.Done:
		return processor.Done, 0
	case v.Kind == processor.Defer:
		return processor.Defer, min(v.After, MaxWait)
	case v.Kind == processor.Throttle && throttles < r.MaxThrottles && v.After > 0:
		return processor.Throttle, min(v.After, MaxWait)
	case v.Kind == processor.Throttle && throttles < r.MaxThrottles:
		return processor.Throttle, r.wait(throttles)
	case v.Kind == processor.RetryLater && retries < r.MaxRetries:
		return processor.RetryLater, r.wait(retries)
	}
	return processor.Fail, 0
}

// wait returns the wait before the next attempt, after tries earlier retries or throttles: Backoff,
// doubled tries times, at most MaxBackoff.
func (r Rules) wait(tries int) time.Duration {
	d := min(r.Backoff, r.MaxBackoff)
	for ; tries > 0 && d < r.MaxBackoff; tries-- {
		d = min(2*d, r.MaxBackoff)
	}
	return d
}
