package ledger

import (
	"context"
	"time"

	"github.com/redis/go-redis/v9"

	"github.com/bulkaction/bulkaction/internal/redisx/keyspace"
)

var reclaim = script("jobs/reclaim", "signals", "states", "blob", "ready", "non_ready", "endings")

// ReclaimReply is what was found with dead workers.
type ReclaimReply struct {
	Taken, Failed, Stale int
	Missing              []string // entries that somebody deleted while they were held: an incident
}

// Reclaim takes back entries of a type that were idle for a lease, at most most of them.
func Reclaim(
	ctx context.Context, c redis.Cmdable, p keyspace.Partition,
	typ string, lease time.Duration, most, maxLosses int,
) (ReclaimReply, error) {
	r, err := run(ctx, c, reclaim, p, typ, lease.Milliseconds(), most, maxLosses)
	if err != nil {
		return ReclaimReply{}, err
	}
	out := ReclaimReply{Taken: int(r.num(0)), Failed: int(r.num(1)), Stale: int(r.num(3))}
	missing := r.list(2)
	for i := range missing {
		out.Missing = append(out.Missing, missing.str(i))
	}
	return out, nil
}
