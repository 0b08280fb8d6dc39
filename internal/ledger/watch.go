package ledger

import (
	"context"
	"fmt"

	"github.com/redis/go-redis/v9"

	"github.com/bulkaction/bulkaction/internal/ledger/layout"
	"github.com/bulkaction/bulkaction/internal/redisx/keyspace"
)

// CountRenewal adds one to the counter of the leader lease's renewals and returns it. The counter
// outlives a change of leader. If it goes back, Redis has lost writes that it had confirmed.
func CountRenewal(ctx context.Context, c redis.Cmdable, p keyspace.Partition) (int64, error) {
	n, err := c.HIncrBy(ctx, p.Watch(), layout.WatchRenewals, 1).Result()
	if err != nil {
		return 0, fmt.Errorf("count renewals of the leader lease: %w", err)
	}
	return n, nil
}

// TakeSuspicion returns whether [Reclaim] has found deleted entries since the last call, and
// deletes the mark that says so.
func TakeSuspicion(ctx context.Context, c redis.Cmdable, p keyspace.Partition) (bool, error) {
	removed, err := c.HDel(ctx, p.Watch(), layout.WatchSuspicious).Result()
	if err != nil {
		return false, fmt.Errorf("read whether reclaim has found deleted entries: %w", err)
	}
	return removed > 0, nil
}
