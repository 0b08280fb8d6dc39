package telemetry

import (
	"context"
	"strconv"
	"time"

	"go.opentelemetry.io/otel/attribute"
	"go.opentelemetry.io/otel/codes"
	sdktrace "go.opentelemetry.io/otel/sdk/trace"
	semconv "go.opentelemetry.io/otel/semconv/v1.43.0"
	"go.opentelemetry.io/otel/trace"
	nooptrace "go.opentelemetry.io/otel/trace/noop"

	"github.com/bulkaction/bulkaction/api"
)

// JobSpan describes the span of one step in a job's trace.
type JobSpan struct {
	Parent string         // the job's traceparent; when "" or not sampled, nothing is recorded
	Name   string         // a constant or precomputed: an unsampled job must not pay for building it
	Kind   trace.SpanKind // internal when 0
	ID     string         // the span's id, 16 hex digits, if a script has chosen it; "": random
	Start  time.Time      // now when zero
	Links  []trace.Link
}

// JobStep is a step of a sampled job that gets a span of its own: the job failed or was cancelled,
// which ends its trace, or it was reclaimed from a dead worker.
type JobStep struct {
	Name          string // fail, cancel or reclaim
	Tenant, Group string
	Ordinal       int64
	Attempt       int
	Trace         string // the job's traceparent; "": the span begins a trace of its own
	Code          string // of the error, if the job failed
}

// RecordStep records the step of a job as a span without duration, which begins and ends now.
// destination is the span's attribute messaging.destination.name: the key of the job's ready
// stream, of the group's hash if the script sweep has ended the job, or of the dead letters if the
// job is lost.
func (t *Telemetry) RecordStep(ctx context.Context, destination string, s JobStep) {
	attrs := func() []attribute.KeyValue {
		a := MessagingAttributes(OpSettle, s.Name, destination)
		a = append(a, JobAttributes(s.Tenant, s.Group, s.Ordinal, s.Attempt)...)
		if s.Code != "" {
			a = append(a, semconv.ErrorTypeKey.String(s.Code))
		}
		return a
	}
	if s.Trace == "" {
		t.NewJobTrace(trace.SpanContext{}, s.Name, time.Now(), attrs)
		return
	}
	_, span := t.StartJob(ctx, JobSpan{Parent: s.Trace, Name: s.Name}, attrs)
	if s.Code != "" {
		span.SetStatus(codes.Error, s.Code)
	}
	span.End()
}

// noSpan is the span of unsampled jobs. It is one shared value, because each conversion to the
// interface would allocate.
var noSpan trace.Span = nooptrace.Span{}

// StartJob starts the span of one step in a job's trace; the caller ends it. attrs, which may be
// nil, is called only if the job is sampled. For a job that is not sampled StartJob returns ctx
// itself and a span that does nothing, and neither it nor the caller's closure allocates.
func (t *Telemetry) StartJob(
	ctx context.Context, s JobSpan, attrs func() []attribute.KeyValue,
) (context.Context, trace.Span) {
	if s.Parent == "" || t.sampler == nil {
		return ctx, noSpan
	}
	parent := ParseTraceParent(s.Parent)
	if !parent.IsSampled() {
		return ctx, noSpan
	}
	ctx = trace.ContextWithRemoteSpanContext(ctx, parent)
	if id, err := trace.SpanIDFromHex(s.ID); err == nil {
		ctx = WithSpanID(ctx, id)
	}
	return t.Tracer.Start(ctx, s.Name, startOptions(s, attrs)...)
}

// NewJobTrace begins the trace of a job: a root span that starts at the given time and ends now.
// link is the span of the message that submitted the job, to which the root span links; an invalid
// link is left out. NewJobTrace returns the job's traceparent, or "" if tracing is off or the
// sampler does not choose the job; this costs a random trace id at most, and attrs is not called.
func (t *Telemetry) NewJobTrace(
	link trace.SpanContext, name string, at time.Time, attrs func() []attribute.KeyValue,
) string {
	if t.sampler == nil {
		return ""
	}
	// The sampler gets the trace id that the span will have, so the SDK makes the same decision.
	id := randomTraceID()
	choice := t.sampler.ShouldSample(sdktrace.SamplingParameters{
		ParentContext: context.Background(), TraceID: id, Name: name, Kind: trace.SpanKindConsumer,
	})
	if choice.Decision != sdktrace.RecordAndSample {
		return ""
	}
	s := JobSpan{Name: name, Kind: trace.SpanKindConsumer, Start: at}
	if link.IsValid() {
		s.Links = []trace.Link{{SpanContext: link}}
	}
	return t.begin(withTraceID(context.Background(), id), s, attrs)
}

// ContinueJobTrace continues the trace of a job's producer with a span that starts at the given
// time and ends now, and returns the job's traceparent. The job has its parent's sampling decision:
// the result is "" if the parent is not sampled, or if tracing is off. If the parent can't be
// parsed, the job begins a trace of its own (see NewJobTrace).
func (t *Telemetry) ContinueJobTrace(parent, name string, at time.Time, attrs func() []attribute.KeyValue) string {
	sc := ParseTraceParent(parent)
	if !sc.IsValid() {
		return t.NewJobTrace(trace.SpanContext{}, name, at, attrs)
	}
	if !sc.IsSampled() || t.sampler == nil {
		return ""
	}
	ctx := trace.ContextWithRemoteSpanContext(context.Background(), sc)
	return t.begin(ctx, JobSpan{Name: name, Kind: trace.SpanKindConsumer, Start: at}, attrs)
}

// begin records the first span that this system adds to a job's trace, below the span in ctx if
// there is one. It returns the traceparent for the next step, or "" if the SDK did not sample the
// span.
func (t *Telemetry) begin(ctx context.Context, s JobSpan, attrs func() []attribute.KeyValue) string {
	_, span := t.Tracer.Start(ctx, s.Name, startOptions(s, attrs)...)
	span.End()
	if !span.SpanContext().IsSampled() {
		return ""
	}
	return FormatTraceParent(span.SpanContext())
}

// startOptions returns the options with which the SDK starts the span s. attrs is not a field of s,
// because it would then escape to the heap.
func startOptions(s JobSpan, attrs func() []attribute.KeyValue) []trace.SpanStartOption {
	options := []trace.SpanStartOption{trace.WithSpanKind(s.Kind)}
	if !s.Start.IsZero() {
		options = append(options, trace.WithTimestamp(s.Start))
	}
	if attrs != nil {
		options = append(options, trace.WithAttributes(attrs()...))
	}
	if len(s.Links) > 0 {
		options = append(options, trace.WithLinks(s.Links...))
	}
	return options
}

// Operation is the kind of work with messages that a span describes: the attribute
// messaging.operation.type of the OpenTelemetry semantic conventions.
type Operation string

// The operations of this system.
const (
	OpSend    Operation = "send"
	OpReceive Operation = "receive"
	OpProcess Operation = "process"
	OpSettle  Operation = "settle"
)

// MessagingAttributes returns the attributes of an operation on a destination (a stream or a
// queue). name is this system's own name of the operation, for example "admit".
func MessagingAttributes(op Operation, name, destination string) []attribute.KeyValue {
	return []attribute.KeyValue{
		semconv.MessagingSystemKey.String("redis"), // not in the conventions' list, but other values are allowed
		semconv.MessagingOperationTypeKey.String(string(op)),
		semconv.MessagingOperationName(name),
		semconv.MessagingDestinationName(destination),
	}
}

// MessageID returns the attribute with the id of the message that a span handles.
func MessageID(id string) attribute.KeyValue { return semconv.MessagingMessageID(id) }

// GatherTime returns the attribute with the time for which a call has waited for its jobs.
func GatherTime(d time.Duration) attribute.KeyValue {
	return attribute.Int64("bulkaction.wait.batch_ms", d.Milliseconds())
}

// MessageCount returns the attribute with the number of messages in a batch. Only spans of batches
// have it.
func MessageCount(n int) attribute.KeyValue { return semconv.MessagingBatchMessageCount(n) }

// JobAttributes returns the attributes that identify a job. An ordinal below 0 or an attempt below
// 1 means "not known yet" and is left out.
func JobAttributes(tenant, group string, ordinal int64, attempt int) []attribute.KeyValue {
	attrs := make([]attribute.KeyValue, 0, 4)
	attrs = append(attrs, attribute.String("bulkaction.tenant", tenant), attribute.String("bulkaction.group", group))
	if ordinal >= 0 {
		attrs = append(attrs, attribute.String("bulkaction.job", group+"."+strconv.FormatInt(ordinal, 10)))
	}
	if attempt >= 1 {
		attrs = append(attrs, attribute.Int("bulkaction.attempt", attempt))
	}
	return attrs
}

// JobKey returns the attribute with the producer's own name of a job. It may be personal data, so
// only the span of the processor's run has it, and no log line.
func JobKey(key string) attribute.KeyValue { return attribute.String("bulkaction.job.key", key) }

// WaitAttributes returns the attributes that say how long a job has waited: behind other jobs
// (fairness), for a permit (rate), and after attempts that failed or were throttled, deferred or
// reclaimed (congestion).
func WaitAttributes(fairness, rate, congestion time.Duration) []attribute.KeyValue {
	return []attribute.KeyValue{
		attribute.Int64("bulkaction.wait.fairness_ms", fairness.Milliseconds()),
		attribute.Int64("bulkaction.wait.rate_ms", rate.Milliseconds()),
		attribute.Int64("bulkaction.wait.congestion_ms", congestion.Milliseconds()),
	}
}

// Batch records one operation on several jobs: a span in the trace of each sampled job, and a span
// of the batch that links to them.
type Batch struct {
	tel                    *Telemetry
	operation, destination string
	start                  time.Time
	links                  []trace.Link
}

// NewBatch returns the batch of an operation on a destination (a stream or a queue). operation is
// this system's own name of it, for example "admit"; the spans are named after it.
func (t *Telemetry) NewBatch(operation, destination string, start time.Time) Batch {
	return Batch{tel: t, operation: operation, destination: destination, start: start}
}

// Job records the span of one job; see [Telemetry.StartJob]. It sets the span's name, and adds the
// attributes of the operation to attrs. A job that is not sampled costs nothing.
func (b *Batch) Job(ctx context.Context, s JobSpan, attrs func() []attribute.KeyValue) {
	if s.Parent == "" {
		return
	}
	s.Name = b.operation
	_, span := b.tel.StartJob(ctx, s, func() []attribute.KeyValue {
		return append(MessagingAttributes(OpProcess, b.operation, b.destination), attrs()...)
	})
	span.End()
	b.links = append(b.links, trace.Link{SpanContext: span.SpanContext()})
}

// End records the span of the batch if one of its jobs is sampled. jobs is the number of all jobs.
func (b *Batch) End(ctx context.Context, jobs int) {
	if len(b.links) == 0 {
		return
	}
	attributes := append(MessagingAttributes(OpProcess, b.operation, b.destination), MessageCount(jobs))
	_, span := b.tel.Tracer.Start(ctx, b.operation+" batch", trace.WithTimestamp(b.start),
		trace.WithLinks(b.links...), trace.WithAttributes(attributes...))
	span.End()
}

// ParseTraceParent parses a W3C traceparent into a remote span context, without allocating. It
// returns the empty context if s is not valid.
func ParseTraceParent(s string) trace.SpanContext {
	parent, ok := api.ParseTraceParent(s)
	if !ok {
		return trace.SpanContext{}
	}
	return trace.NewSpanContext(trace.SpanContextConfig{
		TraceID: parent.TraceID, SpanID: parent.SpanID, TraceFlags: trace.TraceFlags(parent.Flags), Remote: true,
	})
}

// FormatTraceParent returns a span context as a W3C traceparent of 55 bytes, or "" if the context
// is not valid.
func FormatTraceParent(sc trace.SpanContext) string {
	if !sc.IsValid() {
		return ""
	}
	return api.TraceParent{TraceID: sc.TraceID(), SpanID: sc.SpanID(), Flags: byte(sc.TraceFlags())}.String()
}
