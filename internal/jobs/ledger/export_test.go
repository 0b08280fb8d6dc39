package ledger

import (
	"context"

	"github.com/redis/go-redis/v9"

	"github.com/bulkaction/bulkaction/internal/redisx/keyspace"
)

// CallbackBounds are bounds of an endpoint that a test chooses.
type CallbackBounds = callbackBounds

// NewCallbackBounds returns bounds.
func NewCallbackBounds(callbacks, bytes int) CallbackBounds { return callbackBounds{callbacks, bytes} }

// Add is AddCallbacks with these bounds.
func (b callbackBounds) Add(ctx context.Context, c redis.Cmdable, p keyspace.Partition, all ...NewCallback) (int64, []error, error) {
	return b.add(ctx, c, p, all)
}

// Redeliver is RedeliverCallbacks with these bounds.
func (b callbackBounds) Redeliver(ctx context.Context, c redis.Cmdable, p keyspace.Partition, ids ...string) (int64, []string, bool, error) {
	return b.redeliver(ctx, c, p, ids...)
}
