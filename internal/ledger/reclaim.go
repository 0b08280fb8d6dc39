package ledger

import (
	"context"
	"time"

	"github.com/redis/go-redis/v9"

	"github.com/bulkaction/bulkaction/internal/redisx/keyspace"
)

var reclaim = script("jobs/reclaim", "signals", "states", "blob", "ready", "non_ready", "endings")

// ReclaimReply says what Reclaim has done.
type ReclaimReply struct {
	Taken   int      // jobs that are non-ready now, due at once
	Failed  int      // jobs that have failed, because they lost more than maxLosses workers
	Stale   int      // entries that were no jobs, or whose job has another attempt or a cancelled group by now
	Missing []string // pending entries that another program has deleted from the stream: an incident
}

// Reclaim takes back the jobs of dead workers: it takes at most `most` pending entries of a type's
// ready stream that were idle for a lease. Twice: the second call takes the next ones.
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
