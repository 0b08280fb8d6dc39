// Package ingest is the part of the role ingest that accepts submissions from the ingest streams. It
// validates them, stores their jobs, and puts groups into their tenants' fair queues. The package
// hides that small messages are stored together, and how messages that can't be accepted are
// retried or quarantined.
package ingest

import (
	"cmp"
	"context"
	"sync/atomic"
	"time"

	"github.com/bulkaction/bulkaction/internal/access/auth"
	"github.com/bulkaction/bulkaction/internal/jobs/groups"
	"github.com/bulkaction/bulkaction/internal/messages"
	"github.com/bulkaction/bulkaction/internal/redisx"
	"github.com/bulkaction/bulkaction/internal/redisx/keyspace"
	"github.com/bulkaction/bulkaction/internal/redisx/stream"
	"github.com/bulkaction/bulkaction/internal/stage"
)

// Config configures the stream consumer.
type Config struct {
	Lease   time.Duration // after a silence of this length, other processes take over the messages of an ingest process
	Grace   time.Duration // how long begun messages go on after Run's ctx
	Streams []Stream      // further ingest streams, each of one tenant
	// MaxInFlight is how many messages of the ingest stream this process holds at most while they
	// wait for the backlog or for their group. At this number it reads no more messages. 0 means
	// 10,000. Each further stream may have as many.
	MaxInFlight int
	// Gateway runs beside the consumer, until its context ends: the process counts as a live ingest
	// until both have ended. nil: there is none.
	Gateway func(context.Context) error
}

// Ingest is the stream consumer of one process.
type Ingest struct {
	stage.Process
	cfg     Config
	store   *groups.Store
	decoder messages.Decoder

	sources     []*source // the ingest stream, and the further ones
	created     time.Time
	lastRefusal atomic.Int64 // when a message was last refused because the backlog was full, in Unix nanoseconds
}

// defaultInFlight and inFlightBytes bound the messages that one process holds. The number is higher
// than the 1,000 of other consumers, because appends may arrive long before their group's
// submission. The bytes keep a process without further streams below 150 MB, including decoded
// messages and the garbage collector's reserve.
const (
	defaultInFlight = 10_000
	inFlightBytes   = 32 << 20
)

// retryAfter is the wait before a message that was put off is handled for the second time; later
// waits are longer.
const retryAfter = 250 * time.Millisecond

// New returns the stream consumer of a process.
func New(p stage.Process, cfg Config, store *groups.Store, decoder messages.Decoder) *Ingest {
	in := &Ingest{Process: p, cfg: cfg, store: store, decoder: decoder, created: time.Now()}
	inFlight := cmp.Or(cfg.MaxInFlight, defaultInFlight)
	in.sources = append(in.sources, newSource(in, Stream{}, inFlight, inFlightBytes))
	for _, further := range cfg.Streams {
		// The further streams together may hold as many bytes as the ingest stream. The number of
		// entries is not divided: appends may stand before their group's submission, which must be
		// read, too.
		in.sources = append(in.sources, newSource(in, further, inFlight, inFlightBytes/len(cfg.Streams)))
	}
	return in
}

// Run handles messages until ctx ends, and finishes those that it has begun, for at most
// Config.Grace. If an ingest stream or the gateway fails for good, Run stops and returns the error.
func (in *Ingest) Run(ctx context.Context) error {
	r := in.Runner()
	if in.cfg.Gateway != nil {
		r.Add(in.cfg.Gateway)
	}
	for _, src := range in.sources {
		r.Add(src.consumer.Run)
		r.Every("apply cancellations early", earlyCancelInterval, new(earlyCancel).runOnce(src))
	}
	r.ReportAlive("ingest")
	return r.Run(ctx)
}

// Stream is a further ingest stream, beside the one that all tenants share. All its messages belong
// to one tenant.
type Stream struct {
	Name   string // as in keyspace.IngestOf
	Tenant string
}

// source is an ingest stream that this process reads.
type source struct {
	*Ingest
	name      string         // "" for the ingest stream
	principal auth.Principal // of its messages
	consumer  *stream.Consumer
	oldest    oldestPending
}

// newSource returns the source for the ingest stream or, if s is not zero, for a further stream. It
// holds at most maxInFlight messages and maxBytes bytes (see stream.ConsumerConfig).
func newSource(in *Ingest, s Stream, maxInFlight, maxBytes int) *source {
	src := &source{Ingest: in, name: s.Name, principal: auth.Principal{Role: auth.Producer, Tenant: s.Tenant}}
	src.consumer = stream.NewConsumer(in.Conn, stream.ConsumerConfig{
		Stream:       src.key(),
		Group:        keyspace.GroupIngest,
		Name:         in.ID,
		Rejected:     stream.Quarantine{Key: in.Space.Rejected()},
		Handle:       src.handle,
		MaxInFlight:  maxInFlight,
		MaxBytes:     maxBytes,
		Block:        redisx.MaxBlock,
		Lease:        in.cfg.Lease,
		RetryAfter:   retryAfter,
		CloseTimeout: in.cfg.Grace,
		Log:          in.Tel.Log,
	})
	return src
}

func (in *source) key() string {
	if in.name == "" {
		return in.Space.Ingest()
	}
	return keyspace.IngestOf(in.Space.Prefix(), in.name)
}

// withPrincipal returns a context with the rights by which the store carries out messages. A
// message of the ingest stream may name any tenant. A message of a further stream may do what a
// producer of its tenant may: groups of other tenants do not exist for it.
func (in *source) withPrincipal(ctx context.Context) context.Context {
	if in.name == "" {
		return auth.Trust(ctx)
	}
	return auth.With(ctx, in.principal)
}
