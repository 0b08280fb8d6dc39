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

// ErrFenced says that another watcher is the partition's leader now.
var ErrFenced = errors.New("another watcher leads the partition")

// Lead makes a watcher the leader of a partition until the lease ends, or extends its lease. A
// lease of 0 ends the leadership. It returns the fencing number, which grows with each change of
// leader, or 0 while another watcher is the leader and for a lease of 0. Twice: the leader keeps
// its number.
func Lead(
	ctx context.Context, c redis.Cmdable, p keyspace.Partition, watcher string, lease time.Duration,
) (fence int64, err error) {
	return acquireLease(ctx, c, p, watcher, lease, "watch")
}

// LeadRebalancing does the same as Lead for the process that rebalances the quotas of all
// partitions. Call it on partition 0.
func LeadRebalancing(
	ctx context.Context, c redis.Cmdable, p keyspace.Partition, process string, lease time.Duration,
) (fence int64, err error) {
	return acquireLease(ctx, c, p, process, lease, "rebalance")
}

func acquireLease(
	ctx context.Context, c redis.Cmdable, p keyspace.Partition, process string, lease time.Duration, scope string,
) (int64, error) {
	r, err := run(ctx, c, lead, p, process, lease.Milliseconds(), scope)
	if err != nil {
		return 0, err
	}
	return r.num(0), nil
}

// Advance moves a group through its states as far as its counts allow, and removes it from the
// dirty groups. It returns the number of transitions; each is in the outbox. Twice: the second call
// makes none. Errors: ErrFenced.
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

// Expire deletes an ended group, or with resultsOnly only its result lines. The group's owner key,
// dead letters and outbox entries stay. With the last group of a tenant that has no settings and is
// not paused it deletes the tenant. It does nothing to a group that has not ended, or whose
// cancellation Sweep has not completed. Twice: the second call finds nothing. Errors: ErrFenced.
func Expire(
	ctx context.Context, c redis.Cmdable, p keyspace.Partition, group string, fence int64, resultsOnly bool,
) error {
	scope := "all"
	if resultsOnly {
		scope = "results"
	}
	r, err := run(ctx, c, expire, p, group, fence, scope)
	if err != nil {
		return err
	}
	if r.str(0) == "FENCED" {
		return ErrFenced
	}
	return nil
}
