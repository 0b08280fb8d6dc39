// Package producer submits bulk actions from Go by writing messages to the stream ingest in Redis.
// It encodes messages, splits large groups and repeats failed writes. While too many messages wait
// in the stream, it adds none and returns ErrBacklogFull.
package producer

import (
	"context"
	"crypto/tls"
	"errors"
	"fmt"
	"log/slog"
	"strconv"
	"sync"
	"time"

	"github.com/ThreeDotsLabs/watermill/message"
	"github.com/google/uuid"
	"github.com/redis/go-redis/v9"
	"go.opentelemetry.io/otel"
	"go.opentelemetry.io/otel/attribute"
	"go.opentelemetry.io/otel/codes"
	"go.opentelemetry.io/otel/propagation"
	semconv "go.opentelemetry.io/otel/semconv/v1.43.0"
	"go.opentelemetry.io/otel/trace"

	"github.com/bulkaction/bulkaction/api"
	"github.com/bulkaction/bulkaction/client"
	"github.com/bulkaction/bulkaction/client/internal/submission"
	"github.com/bulkaction/bulkaction/internal/messages"
	"github.com/bulkaction/bulkaction/internal/redisx"
	"github.com/bulkaction/bulkaction/internal/redisx/call"
	"github.com/bulkaction/bulkaction/internal/redisx/keyspace"
	"github.com/bulkaction/bulkaction/internal/redisx/wm"
)

// Producer submits bulk actions by writing messages to the ingest stream in Redis. It needs no API
// server. A message for which a method returned no error is stored. The server checks it later: a
// message that the server refuses goes to the stream ingest:rejected. If no ingest process reads the
// stream, as with a wrong prefix, the Producer logs a warning by slog's default logger, once a minute
// at most. A Producer is safe for concurrent use.
//
// When a connection breaks, it is unknown whether the message was stored. The Producer then
// publishes it again under the same message id; the server takes messages with the same id once.
type Producer struct {
	conn      *redisx.Conn
	publisher message.Publisher
	stream    string
	backlog   *backlog
	tracer    trace.Tracer
	sleep     func(context.Context, time.Duration) error
}

// Option changes a setting of a Producer from its default.
type Option func(*options)

type options struct {
	prefix     string
	stream     string
	maxBacklog int64
	tracers    trace.TracerProvider
	access     redisx.Access
}

// WithPrefix sets the prefix of the installation's Redis keys (default "bulk-action:").
func WithPrefix(prefix string) Option {
	return func(o *options) { o.prefix = prefix }
}

// WithStream publishes to an additional ingest stream, PREFIXingest:NAME, instead of the ingest stream.
// The server must read it (BULKACTION_INGEST_STREAMS). It refuses messages that name another tenant
// than the stream's; a Submission need not name one.
func WithStream(name string) Option {
	return func(o *options) { o.stream = name }
}

// WithMaxBacklog sets how many messages (default 100,000) may wait in the ingest stream,
// approximately. Beyond that the Producer returns ErrBacklogFull instead of adding to them.
func WithMaxBacklog(messages int64) Option {
	return func(o *options) { o.maxBacklog = messages }
}

// WithTLSConfig sets the TLS configuration for a URL with rediss:// or rediss-sentinel://: RootCAs
// for an authority of your own, Certificates if Redis demands one (default: the authorities of the
// system). TLS is at least 1.2. A configuration that verifies nothing is refused.
func WithTLSConfig(c *tls.Config) Option {
	return func(o *options) { o.access.TLS = c }
}

// WithPasswordFile sets the user ("" for Redis's default user) and the file with its password, for
// a URL without both. The file is read again for each new connection, so that the password can be
// changed without a restart. Line breaks at its end are ignored.
func WithPasswordFile(user, name string) Option {
	return func(o *options) { o.access.Username, o.access.PasswordFile = user, name }
}

// WithTracerProvider sets the tracer provider for the span of each message (default:
// OpenTelemetry's global one).
func WithTracerProvider(p trace.TracerProvider) Option {
	return func(o *options) { o.tracers = p }
}

// New connects to the Redis at redisURL: redis://host:port/db, a comma list for a cluster,
// or redis-sentinel://host:port,…/master; with TLS rediss:// and rediss-sentinel://. If Redis does
// not answer, New logs that and succeeds; calls fail until Redis is back. A refused password is an
// error.
func New(ctx context.Context, redisURL string, opts ...Option) (*Producer, error) {
	o := options{prefix: "bulk-action:", maxBacklog: defaultMaxBacklog, tracers: otel.GetTracerProvider()}
	for _, opt := range opts {
		opt(&o)
	}
	keys, err := keyspace.New(o.prefix, 1)
	if err != nil {
		return nil, err
	}
	stream := keys.Ingest()
	if o.stream != "" {
		if !api.ValidID(o.stream) || !keyspace.FitsIngestOf(o.stream) {
			return nil, fmt.Errorf("stream %.140q: must "+api.IDRule+", have at most %d bytes, and not be rejected",
				o.stream, keyspace.MaxIngestName)
		}
		stream = keyspace.IngestOf(o.prefix, o.stream)
	}
	conn, err := redisx.Connect(ctx, redisx.Config{
		URL:            redisURL,
		Access:         o.access,
		CommandTimeout: 3 * time.Second,
		ClientName:     "bulkaction-producer",
	})
	if err != nil {
		return nil, err
	}
	publisher, err := wm.NewPublisher(conn)
	if err != nil {
		return nil, errors.Join(err, conn.Close())
	}
	return &Producer{
		conn:      conn,
		publisher: publisher,
		stream:    stream,
		backlog:   &backlog{client: conn.Cmd, stream: stream, max: o.maxBacklog, now: time.Now},
		tracer:    o.tracers.Tracer("github.com/bulkaction/bulkaction/client/producer"),
		sleep:     redisx.Sleep,
	}, nil
}

// Close closes the connections to Redis.
func (p *Producer) Close() error { return p.conn.Close() }

// Submit publishes a group with its jobs and returns the group's id. Jobs beyond the first 500 or
// 512 KiB follow in messages of their own. After an error, the caller may submit the same
// Submission with the returned id again: the server does not add a job twice.
func (p *Producer) Submit(ctx context.Context, g client.Submission) (id string, err error) {
	if g.ID == "" {
		g.ID = uuid.NewString()
	}
	jobs, err := submission.EncodeAll(g.Jobs, payloadOf)
	if err != nil {
		return "", fmt.Errorf("submit group %s: %w", g.ID, err)
	}
	batches := splitJobs(jobs)
	if g.Seal && g.Total != nil && *g.Total != int64(len(jobs)) {
		return "", fmt.Errorf("submit group %s: total is %d, but it is sealed with %d jobs", g.ID, *g.Total, len(jobs))
	}
	if g.Seal && len(batches) > 1 {
		// The messages may arrive in any order. The total tells the server when it has all of them.
		total := int64(len(jobs))
		g.Total, g.Seal = &total, false
	}
	var first [][]byte
	if len(batches) > 0 {
		first, batches = batches[0], batches[1:]
	}
	g.Jobs = nil // they are encoded already
	head, err := g.MarshalJSON()
	if err != nil {
		return "", err
	}
	outgoing := []outgoingMessage{{
		typ:         messages.TypeGroupSubmit,
		group:       g.ID,
		tenant:      g.Tenant,
		data:        submission.WithJobs(head, first),
		jobs:        len(first),
		acceptedOps: opsOf(g),
	}}
	for _, b := range batches {
		outgoing = append(outgoing, newAppendMessage(g.ID, g.Tenant, b))
	}
	_, err = p.send(ctx, g.ID, outgoing)
	return g.ID, err
}

func payloadOf(j client.NewJob) any { return j.Payload }

// AppendOption changes a setting of one AppendJobs.
type AppendOption func(*appendOptions)

type appendOptions struct{ key string }

// WithDedupKey makes AppendJobs safe to repeat, also by another process: the same jobs under the
// same key are added once. This holds as long as the server remembers message ids, a day by
// default.
func WithDedupKey(key string) AppendOption {
	return func(o *appendOptions) { o.key = key }
}

// AppendJobs publishes jobs of a group that is not sealed, in messages of at most 500 jobs and 512
// KiB. It returns how many jobs are certainly published: all, or fewer together with an error.
func (p *Producer) AppendJobs(
	ctx context.Context, group string, jobs []client.NewJob, opts ...AppendOption,
) (int, error) {
	o := appendOptions{key: uuid.NewString()}
	for _, opt := range opts {
		opt(&o)
	}
	encoded, err := submission.EncodeAll(jobs, payloadOf)
	if err != nil {
		return 0, fmt.Errorf("append to group %s: %w", group, err)
	}
	var outgoing []outgoingMessage
	for _, b := range splitJobs(encoded) {
		outgoing = append(outgoing, newAppendMessage(group, "", b))
	}
	return p.send(ctx, group+"/"+o.key, outgoing)
}

// Seal tells the server that no more jobs come to the group. With total, the group takes jobs until
// it has total jobs, whenever they arrive.
func (p *Producer) Seal(ctx context.Context, group string, total *int64) error {
	return p.command(ctx, messages.TypeGroupSeal, group, messages.SealGroup{Group: group, Total: total})
}

// Cancel ends the group at once: no more of its jobs start, and all unfinished ones, also
// those in flight, become cancelled.
func (p *Producer) Cancel(ctx context.Context, group string) error {
	return p.command(ctx, messages.TypeGroupCancel, group, messages.CancelGroup{Group: group})
}

func (p *Producer) command(ctx context.Context, typ, group string, body any) error {
	data, err := submission.Encode(body)
	if err != nil {
		return fmt.Errorf("encode %s of group %s: %w", typ, group, err)
	}
	_, err = p.send(ctx, uuid.NewString(), []outgoingMessage{{typ: typ, group: group, data: data}})
	return err
}

// send publishes messages in order, up to the first error, and returns how many jobs those have
// that were published. It publishes none if one is invalid or the backlog is full. It derives the
// message ids from key.
func (p *Producer) send(ctx context.Context, key string, outgoing []outgoingMessage) (jobs int, err error) {
	if err := validateAll(outgoing); err != nil || len(outgoing) == 0 {
		return 0, err
	}
	if err := p.backlog.accept(ctx, int64(len(outgoing))); err != nil {
		return 0, fmt.Errorf("publish %s of group %s: %w", outgoing[0].typ, outgoing[0].group, err)
	}
	for i, m := range outgoing {
		id := submission.ID(key+"/"+strconv.Itoa(i), m.data)
		if err := p.publish(ctx, id, m); err != nil {
			return jobs, fmt.Errorf("publish %s of group %s: %w", m.typ, m.group, err)
		}
		jobs += m.jobs
	}
	return jobs, nil
}

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
	// The readers of the stream are looked at when its length is read, once in readersInterval.
	readersInterval = time.Minute
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
	freeAt    time.Time
	readersAt time.Time // when the readers of the stream were looked at (see warnUnread)
	delivered string    // the id of the last message that was delivered then; "": there was no reader
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
		if now.Sub(b.readersAt) > readersInterval {
			b.readersAt = now
			b.warnUnread(ctx)
		}
	}
	if b.length+min(n, b.max) > b.max {
		return &BacklogError{Length: b.length, Max: b.max, Wait: b.retryAfter(min(n, b.max))}
	}
	b.length += n
	return nil
}

// warnUnread logs a warning if no process reads the stream: no ingest has ever read it, or messages
// wait there and none was delivered since the last call. (How long ago a consumer was there says
// little: Redis 7.0 does not count reads of an empty stream.) It logs nothing if Redis doesn't tell,
// for example because the user lacks the right.
func (b *backlog) warnUnread(ctx context.Context) {
	groups, err := b.client.XInfoGroups(ctx, b.stream).Result()
	if err != nil && !redis.HasErrorPrefix(err, "no such key") {
		return
	}
	unread, delivered := true, ""
	for _, g := range groups {
		if g.Name == keyspace.GroupIngest {
			delivered = g.LastDeliveredID
			unread = b.length > g.Pending && delivered == b.delivered
		}
	}
	if b.delivered = delivered; unread {
		slog.WarnContext(ctx, "no ingest process reads this stream: messages wait there", "stream", b.stream,
			"hint", "start ingest with the same Redis, BULKACTION_KEY_PREFIX and BULKACTION_INGEST_STREAMS, or correct the producer's")
	}
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
