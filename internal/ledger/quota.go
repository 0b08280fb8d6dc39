package ledger

import (
	"context"

	"github.com/redis/go-redis/v9"

	"github.com/bulkaction/bulkaction/internal/redisx/keyspace"
)

var quota = script("tenants/quota", "signals", "tenants", "pauses", "ready", "limiters", "shares")

// Quota is the part of the global limit that is assigned to one partition.
type Quota struct {
	Fenced    bool  // another process rebalances now; the other fields mean nothing
	Effective int64 // permits a window that it may spend now, or has spent in the last one (sliding)
	Freed     int64 // the part of this call's decrease that other partitions may have at once
	FromUS    int64 // Redis time (µs) from which they may have all of it; 0: they may have it now
	Demand    int64 // permits that its waiting and due jobs could use
	Active    int64 // number of its active tenants
}

// Increase tells when an increase of a quota becomes effective: AtOnce permits now, the whole at
// NotBeforeUS (Redis time, µs). The zero Increase is effective at once.
type Increase struct{ NotBeforeUS, AtOnce int64 }

// ReadQuota reads a partition's quota. From then on Redis refuses the calls of earlier leaders,
// those with a smaller fence.
func ReadQuota(ctx context.Context, c redis.Cmdable, p keyspace.Partition, fence int64, limit Limit) (Quota, error) {
	return SetQuota(ctx, c, p, fence, limit, -1, Increase{})
}

// SetQuota changes a partition's quota. A decrease is effective at once. The caller increases a
// quota only by what it has taken from other partitions before: by Freed at once, by the rest from
// FromUS on. Twice: the second call changes nothing and returns Freed 0.
func SetQuota(
	ctx context.Context, c redis.Cmdable, p keyspace.Partition, fence int64, limit Limit, permits int64,
	increase Increase,
) (Quota, error) {
	args := append([]any{fence}, limit.args()...)
	r, err := run(ctx, c, quota, p, append(args, permits, increase.NotBeforeUS, increase.AtOnce)...)
	if err != nil {
		return Quota{}, err
	}
	if r.str(0) == "FENCED" {
		return Quota{Fenced: true}, nil
	}
	return Quota{Effective: r.num(1), Freed: r.num(2), FromUS: r.num(3), Demand: r.num(4), Active: r.num(5)}, nil
}
