package ledger

import (
	"context"

	"github.com/redis/go-redis/v9"

	"github.com/bulkaction/bulkaction/internal/redisx/keyspace"
)

var limitState = script("tenants/limit_state", "signals", "tenants", "pauses", "ready", "limiters", "shares")

// PermitsUsed returns how many permits of the global limit a partition has spent: in the current
// window (fixed), in the last Window (sliding), or how many the bucket lacks (token). It is 0
// without a limit. The numbers of all partitions add up to the number of the installation.
func PermitsUsed(ctx context.Context, c redis.Cmdable, p keyspace.Partition, limit Limit) (int64, error) {
	if limit.Permits <= 0 {
		return 0, nil
	}
	r, err := run(ctx, c, limitState, p, limit.args()...)
	if err != nil {
		return 0, err
	}
	return r.num(0), nil
}
