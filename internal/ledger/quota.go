package ledger

import (
	"context"

	"github.com/redis/go-redis/v9"

	"github.com/bulkaction/bulkaction/internal/redisx/keyspace"
)

var quota = script("tenants/quota", "signals", "tenants", "pauses", "ready", "limiters", "shares")

// Part is one partition's part of the limit.
type Part struct {
	Fenced  bool  // another process divides the limit by now
	InForce int64 // permits a window that it may spend now, or has spent within the last (sliding)
	Freed   int64 // of what it has just lost, others may have so much at once
	FromUS  int64 // Redis time (µs) from which they may have all of it; 0: nothing is on its way
	Demand  int64 // permits that its jobs could use
	Active  int64 // tenants with jobs that want a permit
}

// Gain are the terms of a larger part: not as a whole before a time (Redis, µs), and so much of the
// increase at once. The zero Gain is all of it at once.
type Gain struct{ NotBeforeUS, AtOnce int64 }

// LookAtPart reads a partition's part and makes every earlier divider's calls void.
func LookAtPart(ctx context.Context, c redis.Cmdable, p keyspace.Partition, fence int64, limit Limit) (Part, error) {
	return SetPart(ctx, c, p, fence, limit, -1, Gain{})
}

// SetPart changes a partition's part of the limit. The caller gives only what it has taken from
// others, and when they say.
func SetPart(
	ctx context.Context, c redis.Cmdable, p keyspace.Partition, fence int64, limit Limit, permits int64, gain Gain,
) (Part, error) {
	args := append([]any{fence}, limit.args()...)
	r, err := run(ctx, c, quota, p, append(args, permits, gain.NotBeforeUS, gain.AtOnce)...)
	if err != nil {
		return Part{}, err
	}
	if r.str(0) == "FENCED" {
		return Part{Fenced: true}, nil
	}
	return Part{InForce: r.num(1), Freed: r.num(2), FromUS: r.num(3), Demand: r.num(4), Active: r.num(5)}, nil
}
