package ledger

import (
	"context"
	"fmt"
	"slices"
	"strings"

	"github.com/redis/go-redis/v9"

	"github.com/bulkaction/bulkaction/api"
	"github.com/bulkaction/bulkaction/internal/ledger/layout"
	"github.com/bulkaction/bulkaction/internal/redisx"
	"github.com/bulkaction/bulkaction/internal/redisx/call"
	"github.com/bulkaction/bulkaction/internal/redisx/keyspace"
)

// Types returns the job types that a partition has seen and that were not retired.
func Types(ctx context.Context, conn *redisx.Conn, p keyspace.Partition) ([]string, error) {
	types, err := conn.Cmd.ZRange(ctx, p.Types(), 0, -1).Result()
	if err != nil {
		return nil, fmt.Errorf("list types of partition %d: %w", p.Index(), err)
	}
	return types, nil
}

// Loads returns, for each of the types, how many of its jobs wait and run in one partition, and how
// many stale reports and lost leases were counted. It makes one round trip. A type whose ready
// stream has no consumer group yet has no jobs in flight.
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
				load: pipe.HMGet(ctx, p.Load(typ),
					layout.LoadWaiting, layout.LoadNonReady, layout.LoadStale, layout.LoadLost),
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
		numbers := reply(load)
		s := api.TypeStats{
			Type: typ, Waiting: numbers.num(0), NonReady: numbers.num(1), Ready: ready, InFlight: inFlight,
			StaleOutcomes: numbers.num(2), LeasesLost: numbers.num(3),
		}
		s.Backlog = s.Waiting + s.NonReady + s.Ready
		out[i] = s
	}
	return out, nil
}

// PausedTypes returns the paused types in alphabetical order, also those without jobs.
func PausedTypes(ctx context.Context, c redis.Cmdable, p keyspace.Partition) ([]string, error) {
	var types []string
	for cursor := uint64(0); ; { // in pages: the hash also holds the paused tenants, of which there may be many
		page, next, err := c.HScan(ctx, p.Pauses(), cursor, layout.PauseOfType+"*", 1000).Result()
		if err != nil {
			return nil, fmt.Errorf("read pauses of partition %d: %w", p.Index(), err)
		}
		for i := 0; i < len(page); i += 2 {
			types = append(types, strings.TrimPrefix(page[i], layout.PauseOfType))
		}
		if cursor = next; cursor == 0 {
			slices.Sort(types)
			return slices.Compact(types), nil // HSCAN may return a field more than once
		}
	}
}

// TypePaused reports whether a type is paused.
func TypePaused(ctx context.Context, c redis.Cmdable, p keyspace.Partition, typ string) (bool, error) {
	return c.HExists(ctx, p.Pauses(), layout.PauseOfType+typ).Result()
}
