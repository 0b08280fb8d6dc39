package ingest

import (
	"context"

	"github.com/bulkaction/bulkaction/internal/access/auth"
	"github.com/bulkaction/bulkaction/internal/redisx"
	"github.com/bulkaction/bulkaction/internal/redisx/keyspace"
	"github.com/bulkaction/bulkaction/internal/redisx/stream"
)

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
