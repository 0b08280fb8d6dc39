package ledger

import (
	"context"
	"errors"
	"time"

	"github.com/redis/go-redis/v9"

	"github.com/bulkaction/bulkaction/internal/redisx/keyspace"
)

var (
	advance = script("groups/advance", "signals", "tenants")
	lead    = script("processes/lead")
	expire  = script("groups/expire", "tenants")
)

// ErrFenced says that another watcher leads the partition by now.
var ErrFenced = errors.New("another watcher leads the partition")

// Lead asks to lead a partition for a lease; 0 gives it up. The fencing number is
// 0 while another leads.
func Lead(
	ctx context.Context, c redis.Cmdable, p keyspace.Partition, watcher string, lease time.Duration,
) (fence int64, err error) {
	return takeTheLead(ctx, c, p, watcher, lease, "watch")
}

// LeadRebalancing asks in the same way to rebalance the quotas of all partitions. It is
// asked for in partition 0.
func LeadRebalancing(
	ctx context.Context, c redis.Cmdable, p keyspace.Partition, process string, lease time.Duration,
) (fence int64, err error) {
	return takeTheLead(ctx, c, p, process, lease, "rebalance")
}

func takeTheLead(
	ctx context.Context, c redis.Cmdable, p keyspace.Partition, process string, lease time.Duration, what string,
) (int64, error) {
	r, err := run(ctx, c, lead, p, process, lease.Milliseconds(), what)
	if err != nil {
		return 0, err
	}
	return r.num(0), nil
}

// Advance moves a group through its states as far as it can go and returns the
// number of transitions.
func Advance(ctx context.Context, c redis.Cmdable, p keyspace.Partition, group string, fence int64) (int, error) {
	r, err := run(ctx, c, advance, p, group, fence)
	if err != nil {
		return 0, err
	}
	if r.str(0) == "FENCED" {
		return 0, ErrFenced
	}
	return int(r.num(1)), nil
}

// Expire forgets an ended group, or with resultsOnly its results.
func Expire(
	ctx context.Context, c redis.Cmdable, p keyspace.Partition, group string, fence int64, resultsOnly bool,
) error {
	what := "all"
	if resultsOnly {
		what = "results"
	}
	r, err := run(ctx, c, expire, p, group, fence, what)
	if err != nil {
		return err
	}
	if r.str(0) == "FENCED" {
		return ErrFenced
	}
	return nil
}
