// Package producer submits bulk actions from Go by writing messages to the stream ingest in Redis.
// It encodes messages, splits large groups and repeats failed writes. While too many messages wait
// in the stream, it adds none and returns ErrBacklogFull.
package producer

import (
	"context"
	"crypto/tls"
	"errors"
	"fmt"
	"strconv"
	"time"

	"github.com/ThreeDotsLabs/watermill/message"
	"github.com/google/uuid"
	"go.opentelemetry.io/otel"
	"go.opentelemetry.io/otel/trace"

	"github.com/bulkaction/bulkaction/api"
	"github.com/bulkaction/bulkaction/client"
	"github.com/bulkaction/bulkaction/client/internal/submission"
	"github.com/bulkaction/bulkaction/internal/messages"
	"github.com/bulkaction/bulkaction/internal/redisx"
	"github.com/bulkaction/bulkaction/internal/redisx/keyspace"
	"github.com/bulkaction/bulkaction/internal/redisx/wm"
)

// Producer submits bulk actions by writing messages to the ingest stream in Redis. It needs no API
// server. A message for which a method returned no error is stored. The server checks it later: a
// message that the server refuses goes to the stream ingest:rejected. A Producer is safe for
// concurrent use.
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

// WithStream publishes to a further ingest stream, PREFIXingest:NAME, instead of the ingest stream.
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

// Cancel ends the group at once: none of its jobs starts any more, and all unfinished ones, also
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
