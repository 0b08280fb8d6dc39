package worker

import (
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"runtime/debug"
	"time"

	"go.opentelemetry.io/otel/attribute"
	"go.opentelemetry.io/otel/codes"
	"go.opentelemetry.io/otel/trace"

	"github.com/bulkaction/bulkaction/internal/telemetry"
	"github.com/bulkaction/bulkaction/processor"
)

// Why a job's context may end before the job does. A processor finds them with context.Cause.
var (
	errCancelled = errors.New("the group was cancelled")
	errLost      = errors.New("the job's lease was lost")
	errShutdown  = errors.New("the worker is shutting down")
)

// run runs one task in a slot and says whether the slot may go on: false when the watchdog has given the
// task up meanwhile and another slot has taken this one's place.
func (w *Worker) run(ctx context.Context, t *task) bool {
	now := time.Now()
	t.began.Store(&now)
	w.metrics.Waited(t.Waited())
	limit := t.timeout(w.cfg.JobTimeout)
	timed, release := context.WithDeadline(ctx, now.Add(limit))
	defer release()
	jobCtx, cancel := context.WithCancelCause(timed)
	defer cancel(nil)
	t.mu.Lock()
	t.cancel = cancel
	if t.cause != nil {
		cancel(t.cause)
	}
	t.mu.Unlock()

	jobCtx, span := w.startSpan(jobCtx, t, now)
	result, err := w.process(jobCtx, t)
	took := time.Since(now)
	if !t.ended.CompareAndSwap(false, true) {
		span.End()
		return false
	}
	w.finish(jobCtx, t, span, result, err, took, limit)
	t.part.ended.add(t)
	return true
}

// process calls the processor and encodes its result. A panic, also in the result's own methods, is an error
// like any other.
func (w *Worker) process(ctx context.Context, t *task) (encoded []byte, err error) {
	if t.payload == "" {
		return nil, processor.Permanent("PAYLOAD_LOST", errors.New("the job's payload is not in Redis any more"))
	}
	defer func() {
		if r := recover(); r != nil {
			w.tel.Log.Error("processor panicked", "group", t.Group, "ordinal", t.Ordinal, "attempt", t.attempt, "type", t.Type,
				"panic", fmt.Sprintf("%T", r), "stack", string(debug.Stack()))
			err = processor.Retry("PANIC", errors.New("the processor panicked"))
		}
	}()
	result, err := w.procs[t.Type].Process(ctx, processor.Job{
		Tenant: t.terms.Tenant, Group: t.Group, Ordinal: t.Ordinal, Type: t.Type,
		Payload: json.RawMessage(t.payload), Attempt: t.attempt, AcceptedAt: t.Accepted,
	})
	if err != nil {
		return nil, err
	}
	return encodeResult(result)
}

// finish turns what the processor answered into the task's outcome.
func (w *Worker) finish(ctx context.Context, t *task, span trace.Span, result []byte, err error, took, limit time.Duration) {
	t.took, t.result = took, result
	w.durable.add(took)
	w.ran.add(t.Type, took)
	cause := context.Cause(ctx)
	switch {
	case errors.Is(cause, context.DeadlineExceeded) && (err != nil || took >= limit):
		err = timeoutError(limit) // what comes after the time is up counts no more as done
	case err != nil && interrupted(cause):
		t.released = true
	}
	t.verdict = processor.Classify(err)
	w.count(t)
	t.trace = t.Trace
	if span.SpanContext().IsValid() {
		if err != nil {
			span.SetStatus(codes.Error, t.verdict.Code)
		}
		t.trace = telemetry.FormatTraceParent(span.SpanContext())
		span.End()
	}
}

func interrupted(cause error) bool {
	return errors.Is(cause, errCancelled) || errors.Is(cause, errLost) || errors.Is(cause, errShutdown)
}

func timeoutError(limit time.Duration) error {
	return processor.Retry(processor.CodeTimeout, fmt.Errorf("timed out after %s", limit))
}

func (w *Worker) count(t *task) {
	switch {
	case t.released:
	case t.verdict.Kind == processor.Done:
		w.metrics.Succeeded(t.took)
	default:
		w.metrics.Failed(t.took, t.verdict.Code == processor.CodeTimeout)
	}
}

// encodeResult gives the result's JSON on one line.
func encodeResult(result any) ([]byte, error) {
	var b []byte
	switch v := result.(type) {
	case nil:
		return []byte("null"), nil
	case json.RawMessage:
		b = v
		if len(b) == 0 {
			return []byte("null"), nil
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
			return nil, processor.Permanent("INVALID_RESULT", fmt.Errorf("the processor's result can't be written as JSON: %T", v))
		}
	}
	if len(b) > processor.MaxResultBytes {
		return nil, processor.Permanent("RESULT_TOO_LARGE", fmt.Errorf("the processor's result has %d bytes, at most %d are kept", len(b), processor.MaxResultBytes))
	}
	return b, nil
}

func (w *Worker) startSpan(ctx context.Context, t *task, now time.Time) (context.Context, trace.Span) {
	if t.Trace == "" {
		return ctx, trace.SpanFromContext(ctx)
	}
	return w.tel.StartJob(ctx, telemetry.JobSpan{
		Parent: t.Trace, Name: "process " + t.Type, Kind: trace.SpanKindConsumer, Start: now}, func() []attribute.KeyValue {
		attrs := telemetry.MessagingAttributes(telemetry.OpProcess, "process", t.part.p.Ready(t.Type))
		attrs = append(attrs, telemetry.MessageID(t.entry))
		attrs = append(attrs, telemetry.JobAttributes(t.terms.Tenant, t.Group, t.Ordinal, t.attempt)...)
		return append(attrs, telemetry.WaitAttributes(t.Waited())...)
	})
}
