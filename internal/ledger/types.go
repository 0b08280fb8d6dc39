package ledger

import (
	"context"
	"fmt"
	"strconv"

	"github.com/redis/go-redis/v9"

	"github.com/bulkaction/bulkaction/api"
	"github.com/bulkaction/bulkaction/internal/redisx"
	"github.com/bulkaction/bulkaction/internal/redisx/call"
	"github.com/bulkaction/bulkaction/internal/redisx/keyspace"
)

// Types lists the job types that a partition has seen.
func Types(ctx context.Context, conn *redisx.Conn, p keyspace.Partition) ([]string, error) {
	types, err := conn.Cmd.ZRange(ctx, p.Types(), 0, -1).Result()
	if err != nil {
		return nil, fmt.Errorf("list types of partition %d: %w", p.Index(), err)
	}
	return types, nil
}

// Loads returns, for each of the types, how many of its jobs wait and run in one partition, and the
// counters of its workers' failures.
func Loads(ctx context.Context, conn *redisx.Conn, p keyspace.Partition, types []string) ([]api.TypeStats, error) {
	out := make([]api.TypeStats, len(types))
	if len(types) == 0 {
		return out, nil
	}
	type replies struct {
		load    *redis.SliceCmd
		length  *redis.IntCmd
		pending *redis.XPendingCmd
	}
	cmds := make([]replies, len(types))
	_, _ = conn.Cmd.Pipelined(ctx, func(pipe redis.Pipeliner) error {
		for i, typ := range types {
			cmds[i] = replies{
				load:    pipe.HMGet(ctx, p.Load(typ), "waiting", "non_ready", "stale", "lost"),
				length:  pipe.XLen(ctx, p.Ready(typ)),
				pending: pipe.XPending(ctx, p.Ready(typ), keyspace.GroupWorkers),
			}
		}
		return nil
	})
	for i, typ := range types {
		load, err := cmds[i].load.Result()
		if err != nil {
			return nil, fmt.Errorf("read load of type %s: %w", typ, err)
		}
		var inFlight int64
		pending, err := cmds[i].pending.Result()
		switch {
		case err == nil:
			inFlight = pending.Count
		case call.IsUnavailable(err):
			return nil, fmt.Errorf("read load of type %s: %w", typ, err)
		}
		ready := max(0, cmds[i].length.Val()-inFlight)
		s := api.TypeStats{
			Type: typ, Waiting: count(load[0]), NonReady: count(load[1]), Ready: ready, InFlight: inFlight,
			StaleOutcomes: count(load[2]), LeasesLost: count(load[3]),
		}
		s.Backlog = s.Waiting + s.NonReady + s.Ready
		out[i] = s
	}
	return out, nil
}

// count reads a hash field's value; one that is not there is 0.
func count(v any) int64 {
	s, _ := v.(string)
	n, _ := strconv.ParseInt(s, 10, 64)
	return n
}
