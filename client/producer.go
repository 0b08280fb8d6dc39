package client

import (
	"context"
	"errors"
	"fmt"
	"strconv"
	"time"

	"github.com/ThreeDotsLabs/watermill/message"
	"github.com/google/uuid"
	"go.opentelemetry.io/otel"
	"go.opentelemetry.io/otel/trace"

	"github.com/bulkaction/bulkaction/internal/messages"
	"github.com/bulkaction/bulkaction/internal/redisx"
	"github.com/bulkaction/bulkaction/internal/redisx/keyspace"
	"github.com/bulkaction/bulkaction/internal/redisx/wm"
)

// Producer submits bulk actions by writing the ingest stream: no API server is needed, and what
// Redis has answered for is stored. Nobody answers for the content, though: a message that the
// server refuses goes to the stream ingest:rejected. It is safe for concurrent use.
//
// A message whose fate is unknown, because the connection broke, is published again under the same
// message id, which the server takes once.
type Producer struct {
	conn      *redisx.Conn
	publisher message.Publisher
	stream    string
	backlog   *backlog
	tracer    trace.Tracer
	sleep     func(context.Context, time.Duration) error
}

// ProducerOption changes a Producer from its defaults.
type ProducerOption func(*producerOptions)

type producerOptions struct {
	prefix     string
	maxBacklog int64
	tracers    trace.TracerProvider
}

// WithPrefix sets the installation's key prefix (default "bulk-action:").
func WithPrefix(prefix string) ProducerOption {
	return func(o *producerOptions) { o.prefix = prefix }
}

// WithMaxBacklog sets how many messages (default 100,000) may wait in the ingest stream before the
// Producer returns ErrBacklogFull instead of adding to them.
func WithMaxBacklog(messages int64) ProducerOption {
	return func(o *producerOptions) { o.maxBacklog = messages }
}

// WithTracerProvider sets where the span of each message goes (default: OpenTelemetry's
// global provider).
func WithTracerProvider(p trace.TracerProvider) ProducerOption {
	return func(o *producerOptions) { o.tracers = p }
}

// NewProducer connects to the Redis at redisURL: redis://host:port/db, a comma list for a cluster,
// or redis-sentinel://host:port,…/master. A Redis that is away is logged and no error: calls fail
// until it is back.
func NewProducer(ctx context.Context, redisURL string, opts ...ProducerOption) (*Producer, error) {
	o := producerOptions{prefix: "bulk-action:", maxBacklog: defaultMaxBacklog, tracers: otel.GetTracerProvider()}
	for _, opt := range opts {
		opt(&o)
	}
	keys, err := keyspace.New(o.prefix, 1)
	if err != nil {
		return nil, err
	}
	conn, err := redisx.Connect(ctx, redisx.Config{
		URL:            redisURL,
		CommandTimeout: 3 * time.Second,
		ClientName:     "bulkaction-producer",
	})
	if err != nil {
		return nil, err
	}
	publisher, err := wm.NewPublisher(conn, nil)
	if err != nil {
		return nil, errors.Join(err, conn.Close())
	}
	return &Producer{
		conn:      conn,
		publisher: publisher,
		stream:    keys.Ingest(),
		backlog:   &backlog{client: conn.Cmd, stream: keys.Ingest(), max: o.maxBacklog, now: time.Now},
		tracer:    o.tracers.Tracer("github.com/bulkaction/bulkaction/client"),
		sleep:     redisx.Sleep,
	}, nil
}

// Close closes the connections.
func (p *Producer) Close() error { return p.conn.Close() }

// Submit publishes a group with its jobs and returns its id. Jobs beyond 500 or 512 KiB follow in
// messages of their own. After an error, Submit of the same Group with the returned id is safe:
// what is there already is not added again.
func (p *Producer) Submit(ctx context.Context, g Group) (id string, err error) {
	if g.ID == "" {
		g.ID = uuid.NewString()
	}
	jobs, err := marshalJobs(g.Jobs)
	if err != nil {
		return "", fmt.Errorf("submit group %s: %w", g.ID, err)
	}
	batches := splitJobs(jobs)
	if g.Seal && g.Total != nil && *g.Total != int64(len(jobs)) {
		return "", fmt.Errorf("submit group %s: total is %d, but it is sealed with %d jobs", g.ID, *g.Total, len(jobs))
	}
	if g.Seal && len(batches) > 1 {
		// The jobs may arrive in any order; the total says when all are there.
		total := int64(len(jobs))
		g.Total, g.Seal = &total, false
	}
	var first [][]byte
	if len(batches) > 0 {
		first, batches = batches[0], batches[1:]
	}
	data, err := g.marshal(first)
	if err != nil {
		return "", err
	}
	outgoing := []outgoingMessage{{
		typ:         messages.TypeGroupSubmit,
		group:       g.ID,
		tenant:      g.Tenant,
		data:        data,
		jobs:        len(first),
		acceptedOps: opsOf(g),
	}}
	for _, b := range batches {
		outgoing = append(outgoing, newAppendMessage(g.ID, g.Tenant, b))
	}
	_, err = p.send(ctx, g.ID, outgoing)
	return g.ID, err
}

// AppendOption changes one AppendJobs.
type AppendOption func(*appendOptions)

type appendOptions struct{ key string }

// WithDedupKey makes AppendJobs safe to repeat, also by another process: the same jobs under the
// same key are added once (for as long as the server remembers message ids, a day by default).
func WithDedupKey(key string) AppendOption {
	return func(o *appendOptions) { o.key = key }
}

// AppendJobs publishes jobs of a group that is not sealed, in messages of at most 500 jobs and 512
// KiB. It returns how many are published for certain: all, or fewer with the error.
func (p *Producer) AppendJobs(ctx context.Context, group string, jobs []Job, opts ...AppendOption) (int, error) {
	o := appendOptions{key: uuid.NewString()}
	for _, opt := range opts {
		opt(&o)
	}
	encoded, err := marshalJobs(jobs)
	if err != nil {
		return 0, fmt.Errorf("append to group %s: %w", group, err)
	}
	var outgoing []outgoingMessage
	for _, b := range splitJobs(encoded) {
		outgoing = append(outgoing, newAppendMessage(group, "", b))
	}
	return p.send(ctx, group+"/"+o.key, outgoing)
}

// Seal says that no more jobs come to the group; with total, none after that many,
// whenever they arrive.
func (p *Producer) Seal(ctx context.Context, group string, total *int64) error {
	return p.command(ctx, messages.TypeGroupSeal, group, messages.SealGroup{Group: group, Total: total})
}

// Cancel ends the group at once: nothing of it starts any more.
func (p *Producer) Cancel(ctx context.Context, group string) error {
	return p.command(ctx, messages.TypeGroupCancel, group, messages.CancelGroup{Group: group})
}

func (p *Producer) command(ctx context.Context, typ, group string, body any) error {
	data, err := marshal(body)
	if err != nil {
		return fmt.Errorf("encode %s of group %s: %w", typ, group, err)
	}
	_, err = p.send(ctx, uuid.NewString(), []outgoingMessage{{typ: typ, group: group, data: data}})
	return err
}

// send publishes messages in order, under message ids made from key, and returns how many jobs were
// in those that succeeded.
func (p *Producer) send(ctx context.Context, key string, outgoing []outgoingMessage) (jobs int, err error) {
	if err := validateAll(outgoing); err != nil || len(outgoing) == 0 {
		return 0, err
	}
	if err := p.backlog.accept(ctx, int64(len(outgoing))); err != nil {
		return 0, fmt.Errorf("publish %s of group %s: %w", outgoing[0].typ, outgoing[0].group, err)
	}
	for i, m := range outgoing {
		id := messageID(key+"/"+strconv.Itoa(i), m.data)
		if err := p.publish(ctx, id, m); err != nil {
			return jobs, fmt.Errorf("publish %s of group %s: %w", m.typ, m.group, err)
		}
		jobs += m.jobs
	}
	return jobs, nil
}
