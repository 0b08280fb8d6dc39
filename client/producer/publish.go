package producer

import (
	"context"
	"errors"
	"fmt"
	"sync"
	"time"

	"github.com/redis/go-redis/v9"
	"go.opentelemetry.io/otel/attribute"
	"go.opentelemetry.io/otel/codes"
	"go.opentelemetry.io/otel/propagation"
	semconv "go.opentelemetry.io/otel/semconv/v1.43.0"
	"go.opentelemetry.io/otel/trace"

	"github.com/bulkaction/bulkaction/client"
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

// validateAll returns an error if the server would refuse one of the messages for its content. The
// producer has to check this, because the server can't answer a message on a stream. If one message
// of a call is invalid, the producer publishes none of them.
func validateAll(outgoing []outgoingMessage) error {
	jobs := 0
	for _, p := range outgoing {
		if err := p.validate(); err != nil {
			if jobs > 0 {
				err = fmt.Errorf("after the first %d jobs: %w", jobs, err)
			}
			return fmt.Errorf("%s of group %s: %w", p.typ, p.group, err)
		}
		jobs += p.jobs
	}
	return nil
}

func (p outgoingMessage) validate() (err error) {
	d := messages.Decoder{Ops: p.acceptedOps}
	switch p.typ {
	case messages.TypeGroupSubmit:
		_, err = d.DecodeSubmit(p.data)
	case messages.TypeJobsAppend:
		_, err = d.DecodeAppend(p.data)
	case messages.TypeGroupSeal:
		_, err = d.DecodeSeal(p.data)
	case messages.TypeGroupCancel:
		_, err = d.DecodeCancel(p.data)
	}
	return err
}

// opsOf returns the ops that the submission's aggregates name, so that validation accepts all of
// them. Only the server knows which custom reducers it has besides the built-in ones.
func opsOf(g client.Submission) map[string]bool {
	ops := map[string]bool{}
	for _, a := range g.Aggregate {
		ops[a.Op] = true
	}
	return ops
}

// ErrBacklogFull says that too many published messages wait for the server. When the ingest stream
// is too long, the error is a *BacklogError, and nothing was published. When Redis is out of
// memory, it wraps Redis's answer, and earlier messages of the same call may have been published.
var ErrBacklogFull = errors.New("ingest backlog full")

// BacklogError says how long the ingest stream is and when the caller should try again.
type BacklogError struct {
	Length, Max int64 // messages in the stream (approximately), and their limit
	Wait        time.Duration
}

func (e *BacklogError) Error() string {
	return fmt.Sprintf("%s: %d messages, at most %d: try again in %s", ErrBacklogFull, e.Length, e.Max, e.Wait)
}

// Is makes errors.Is find ErrBacklogFull in the error.
func (e *BacklogError) Is(target error) bool { return target == ErrBacklogFull }

const (
	defaultMaxBacklog = 100_000
	backlogMaxAge     = 500 * time.Millisecond
	backlogMinWait    = time.Second
	backlogMaxWait    = time.Minute
)

// backlog refuses messages with a *BacklogError while the ingest stream is too long. It never
// waits. The limit is approximate: the length is read again only after backlogMaxAge, and in
// between only the messages of this producer are counted.
type backlog struct {
	client redis.Cmdable
	stream string
	max    int64
	now    func() time.Time

	mu     sync.Mutex
	length int64 // length at the last read, plus the messages accepted since then
	readAt time.Time
	// drainRate estimates how many messages per second the server takes from the stream, smoothed
	// over several reads. It is too low while other producers add messages.
	drainRate float64
	// freeAt is when the stream will have space for all messages that were refused so far, at most
	// backlogMaxWait ahead.
	freeAt time.Time
}

// accept counts n messages as published, or returns a *BacklogError when the stream has no space
// for them. If a message is not published after all, it stays counted until the next read of the
// length. More messages than the limit are accepted only into an empty stream: waiting would not
// help them.
func (b *backlog) accept(ctx context.Context, n int64) error {
	b.mu.Lock()
	defer b.mu.Unlock()
	if now := b.now(); b.readAt.IsZero() || now.Sub(b.readAt) > backlogMaxAge {
		length, err := b.client.XLen(ctx, b.stream).Result()
		if err != nil {
			return fmt.Errorf("read length of ingest stream: %w", err)
		}
		if !b.readAt.IsZero() {
			b.drainRate += (max(0, float64(b.length-length)/now.Sub(b.readAt).Seconds()) - b.drainRate) / 2
		}
		b.length, b.readAt = length, now
	}
	if b.length+min(n, b.max) > b.max {
		return &BacklogError{Length: b.length, Max: b.max, Wait: b.retryAfter(min(n, b.max))}
	}
	b.length += n
	return nil
}

// retryAfter returns how long a caller with n refused messages should wait. It moves freeAt, so
// each refused caller gets a later time than the caller before it, up to backlogMaxWait: so callers
// do not all come back at once. While the stream does not drain, it returns backlogMinWait.
func (b *backlog) retryAfter(n int64) time.Duration {
	if b.drainRate < 1 {
		return backlogMinWait
	}
	now, ahead := b.now(), n
	if b.freeAt.Before(now) {
		b.freeAt, ahead = now, n+b.length-b.max
	}
	b.freeAt = b.freeAt.Add(time.Duration(float64(ahead) / b.drainRate * float64(time.Second)))
	if latest := now.Add(backlogMaxWait); b.freeAt.After(latest) {
		b.freeAt = latest
	}
	return max(backlogMinWait, b.freeAt.Sub(now))
}
