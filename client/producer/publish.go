package producer

import (
	"context"
	"fmt"
	"time"

	"go.opentelemetry.io/otel/attribute"
	"go.opentelemetry.io/otel/codes"
	"go.opentelemetry.io/otel/propagation"
	semconv "go.opentelemetry.io/otel/semconv/v1.43.0"
	"go.opentelemetry.io/otel/trace"

	"github.com/bulkaction/bulkaction/client/internal/submission"
	"github.com/bulkaction/bulkaction/internal/messages"
	"github.com/bulkaction/bulkaction/internal/redisx/call"
	"github.com/bulkaction/bulkaction/internal/redisx/wm"
)

// Limits of one message. A small message is cheap for the server to handle and for the producer to
// repeat.
const (
	maxMessageJobs  = 500
	maxMessageBytes = 512 << 10
	reservedBytes   = 16 << 10 // kept free for the fields beside jobs
)

// publishAttempts is how often a message is published at most. It is published again only if the
// outcome of the last attempt is unknown or Redis was not ready.
const publishAttempts = 4

// retryDelay is the wait after the first attempt; after the n-th attempt it is n times as long.
const retryDelay = 100 * time.Millisecond

// outgoingMessage is a message for the ingest stream that is not published yet.
type outgoingMessage struct {
	typ           string
	group, tenant string // attributes of the message's span
	data          []byte
	jobs          int
	acceptedOps   map[string]bool // reducers that validation accepts
}

func newAppendMessage(group, tenant string, jobs [][]byte) outgoingMessage {
	// This can't fail: a string can always be encoded.
	head, _ := submission.Encode(struct {
		Group string `json:"group"`
	}{group})
	data := submission.WithJobs(head, jobs)
	return outgoingMessage{typ: messages.TypeJobsAppend, group: group, tenant: tenant, data: data, jobs: len(jobs)}
}

// splitJobs divides encoded jobs among messages, within the limits of one message.
func splitJobs(jobs [][]byte) [][][]byte {
	var batches [][][]byte
	for start := 0; start < len(jobs); {
		size, end := len(jobs[start]), start+1
		for end < len(jobs) && end-start < maxMessageJobs && size+1+len(jobs[end]) <= maxMessageBytes-reservedBytes {
			size += 1 + len(jobs[end])
			end++
		}
		batches = append(batches, jobs[start:end])
		start = end
	}
	return batches
}

// publish adds one message to the ingest stream, in a span whose traceparent the message carries.
func (p *Producer) publish(ctx context.Context, id string, m outgoingMessage) error {
	attrs := []attribute.KeyValue{
		semconv.MessagingSystemKey.String("redis"),
		semconv.MessagingDestinationName(p.stream),
		semconv.MessagingOperationName("send"),
		semconv.MessagingOperationTypeSend,
		semconv.MessagingMessageID(id),
		attribute.String("bulkaction.group", m.group),
	}
	if m.tenant != "" {
		attrs = append(attrs, attribute.String("bulkaction.tenant", m.tenant))
	}
	if m.jobs > 0 {
		attrs = append(attrs, semconv.MessagingBatchMessageCount(m.jobs))
	}
	ctx, span := p.tracer.Start(ctx, "send ingest", trace.WithSpanKind(trace.SpanKindProducer),
		trace.WithAttributes(attrs...))
	defer span.End()

	msg := wm.NewMessage(id, m.typ, m.data)
	msg.SetContext(ctx)
	propagation.TraceContext{}.Inject(ctx, propagation.MapCarrier(msg.Metadata))

	err := p.publishWithRetry(ctx, func() error { return p.publisher.Publish(p.stream, msg) })
	if err != nil {
		span.RecordError(err)
		span.SetStatus(codes.Error, "not published")
	}
	return err
}

// publishWithRetry calls publish, with waits in between, until it succeeds, fails for good, or has
// used its attempts. It turns out-of-memory into ErrBacklogFull.
func (p *Producer) publishWithRetry(ctx context.Context, publish func() error) error {
	for attempt := 1; ; attempt++ {
		err := publish()
		switch {
		case err == nil:
			return nil
		case call.IsOOM(err):
			return fmt.Errorf("%w: %w", ErrBacklogFull, err)
		case attempt == publishAttempts || ctx.Err() != nil || !call.IsUnavailable(err):
			return err
		}
		if stopped := p.sleep(ctx, time.Duration(attempt)*retryDelay); stopped != nil {
			return err
		}
	}
}
