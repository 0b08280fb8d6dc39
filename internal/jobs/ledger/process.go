package ledger

import (
	"context"
	"fmt"
	"time"

	"github.com/redis/go-redis/v9"

	"github.com/bulkaction/bulkaction/internal/jobs/ledger/layout"
	"github.com/bulkaction/bulkaction/internal/redisx/call"
	"github.com/bulkaction/bulkaction/internal/redisx/keyspace"
	"github.com/bulkaction/bulkaction/lua"
)

var (
	lead         = script("processes/lead")
	retire       = script("processes/retire")
	dropConsumer = call.NewScript("drop_consumer", lua.Source("processes/drop_consumer"))
)

// Lead makes a watcher the leader of a partition until the lease ends, or extends its lease. A
// lease of 0 ends the leadership. It returns the fencing number, which grows with each change of
// leader, and when the same leader comes back after its lease has ended; 0 if another watcher is
// the leader, or if the lease is 0. Twice: the leader keeps its number.
func Lead(
	ctx context.Context, c redis.Cmdable, p keyspace.Partition, watcher string, lease time.Duration,
) (fence int64, err error) {
	return acquireLease(ctx, c, p, watcher, lease, "watch")
}

// LeadRebalancing does the same as Lead for the quota rebalancer, the process that rebalances the
// quotas of all partitions. Call it on partition 0.
func LeadRebalancing(
	ctx context.Context, c redis.Cmdable, p keyspace.Partition, process string, lease time.Duration,
) (fence int64, err error) {
	return acquireLease(ctx, c, p, process, lease, "rebalance")
}

func acquireLease(
	ctx context.Context, c redis.Cmdable, p keyspace.Partition, process string, length time.Duration, scope string,
) (int64, error) {
	r := run(ctx, c, lead, p, process, length.Milliseconds(), scope)
	fence, _ := r.Number(), r.Duration()
	return call.Done(r, fence)
}

// CountRenewal adds one to the counter of the leader lease's renewals and returns it. The counter
// survives a change of leader. If its value is not higher than the one returned before, Redis has
// lost writes that it had confirmed.
func CountRenewal(ctx context.Context, c redis.Cmdable, p keyspace.Partition) (int64, error) {
	n, err := c.HIncrBy(ctx, p.Watch(), layout.WatchRenewals, 1).Result()
	if err != nil {
		return 0, fmt.Errorf("count renewals of the leader lease: %w", err)
	}
	return n, nil
}

// TakeDeletedFound returns whether, since the last call, [Reclaim] has found pending entries that
// are no longer in their ready stream. It deletes the mark that says so.
func TakeDeletedFound(ctx context.Context, c redis.Cmdable, p keyspace.Partition) (bool, error) {
	removed, err := c.HDel(ctx, p.Watch(), layout.WatchSuspicious).Result()
	if err != nil {
		return false, fmt.Errorf("read whether reclaim has found deleted entries: %w", err)
	}
	return removed > 0, nil
}

// Retire deletes a type that has no jobs and was not served after latest. It reports whether it
// has. A new job of the type creates it again. Twice: the second call reports false.
func Retire(ctx context.Context, c redis.Cmdable, p keyspace.Partition, typ string, latest time.Time) (bool, error) {
	r := run(ctx, c, retire, p, typ, latest.UnixMilli())
	return call.Done(r, r.Flag())
}

// DropConsumer deletes a stream's consumer, if it holds no entries and was idle for at least the
// given time. It reports whether it has deleted it. Twice: the second call reports false.
func DropConsumer(
	ctx context.Context, c redis.Cmdable, stream, group, consumer string, idle time.Duration,
) (bool, error) {
	r := dropConsumer.Read(ctx, c, []string{stream}, []any{group, consumer, idle.Milliseconds()})
	return call.Done(r, r.Flag())
}
