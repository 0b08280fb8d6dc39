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
	errLeaseLost = errors.New("the job's lease was lost")
	errShutdown  = errors.New("the worker is shutting down")
)

// run runs one task in a slot and says whether the slot may go on: false when the watchdog has
// given the task up meanwhile and another slot has taken this one's place.
func (w *Worker) runTask(ctx context.Context, t *task) bool {
	began, limit := monotonicNow(), t.timeout(w.cfg.JobTimeout)
	t.runStart.Store(began)
	t.ctx.begin(ctx, began, limit)
	defer t.ctx.finish()
	jobCtx, span := w.startSpan(&t.ctx, t)
	result, err := w.callProcessor(jobCtx, t)
	now := monotonicNow()
	if !t.outcomeSet.CompareAndSwap(false, true) {
		if span != nil {
			span.End()
		}
		return false
	}
	w.setOutcome(t, span, result, err, now, limit)
	t.feed.queueReport(t)
	return true
}

// process calls the processor and encodes its result. A panic, also in the result's own methods, is
// an error like any other.
func (w *Worker) callProcessor(ctx context.Context, t *task) (encoded []byte, err error) {
	if t.loadedPayload == "" {
		return nil, processor.Permanent("PAYLOAD_LOST", errors.New("the job's payload is not in Redis any more"))
	}
	defer func() {
		if r := recover(); r != nil {
			w.tel.Log.Error("processor panicked", "group", t.Group, "ordinal", t.Ordinal,
				"attempt", t.currentAttempt, "type", t.Type,
				"panic", fmt.Sprintf("%T", r), "stack", string(debug.Stack()))
			err = processor.Retry("PANIC", errors.New("the processor panicked"))
		}
	}()
	result, err := t.proc.Process(ctx, processor.Job{
		Tenant: t.terms.Tenant, Group: t.Group, Ordinal: t.Ordinal, Type: t.Type,
		Payload: json.RawMessage(t.loadedPayload), Attempt: t.currentAttempt, AcceptedAt: t.Accepted,
	})
	if err != nil {
		return nil, err
	}
	return encodeResult(result)
}

// finish turns what the processor answered into the task's outcome.
func (w *Worker) setOutcome(t *task, span trace.Span, result []byte, err error, now int64, limit time.Duration) {
	t.runTime, t.result = time.Duration(now-t.runStart.Load()), result
	w.meanRunTime.add(t.runTime)
	cause := t.ctx.endCause(now)
	switch {
	case errors.Is(cause, context.DeadlineExceeded) && (err != nil || t.runTime >= limit):
		err = timeoutError(limit) // what comes after the time is up counts no more as done
	case err != nil && stoppedByWorker(cause):
		t.released = true
	}
	t.verdict = processor.Classify(err)
	t.processTrace = t.Trace
	if span != nil && span.SpanContext().IsValid() {
		if err != nil {
			span.SetStatus(codes.Error, t.verdict.Code)
		}
		t.processTrace = telemetry.FormatTraceParent(span.SpanContext())
		span.End()
	}
}

func stoppedByWorker(cause error) bool {
	return errors.Is(cause, errCancelled) || errors.Is(cause, errLeaseLost) || errors.Is(cause, errShutdown)
}

func timeoutError(limit time.Duration) error {
	return processor.Retry(processor.CodeTimeout, fmt.Errorf("timed out after %s", limit))
}

var noResult = []byte("null") // never written to

// encodeResult gives the result's JSON on one line.
func encodeResult(result any) ([]byte, error) {
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
	if len(b) > processor.MaxResultBytes {
		return nil, processor.Permanent("RESULT_TOO_LARGE",
			fmt.Errorf("the processor's result has %d bytes, at most %d are kept", len(b), processor.MaxResultBytes))
	}
	return b, nil
}

// startSpan returns no span for a job that has no trace.
func (w *Worker) startSpan(ctx context.Context, t *task) (context.Context, trace.Span) {
	if t.Trace == "" {
		return ctx, nil
	}
	return w.tel.StartJob(ctx, telemetry.JobSpan{
		Parent: t.Trace, Name: "process " + t.Type, Kind: trace.SpanKindConsumer}, func() []attribute.KeyValue {
		attrs := telemetry.MessagingAttributes(telemetry.OpProcess, "process", t.feed.partition.Ready(t.Type))
		attrs = append(attrs, telemetry.MessageID(t.entryID))
		attrs = append(attrs, telemetry.JobAttributes(t.terms.Tenant, t.Group, t.Ordinal, t.currentAttempt)...)
		return append(attrs, telemetry.WaitAttributes(t.Waited())...)
	})
}
