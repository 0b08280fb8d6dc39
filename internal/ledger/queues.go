package ledger

import (
	"context"
	"fmt"

	"github.com/redis/go-redis/v9"

	"github.com/bulkaction/bulkaction/internal/ledger/layout"
	"github.com/bulkaction/bulkaction/internal/redisx/keyspace"
)

// TenantQueue names the waiting groups of one tenant, for one type and lane.
type TenantQueue struct{ Type, Lane, Tenant string }

// QueuedGroups are the first groups of a [TenantQueue], in the order in which they are served.
type QueuedGroups struct {
	Groups     []QueuedGroup
	TypePaused bool
}

// QueuedGroup is a group of a [TenantQueue] and the number of its waiting jobs, of all types.
type QueuedGroup struct {
	ID      string
	Waiting int64
}

// ReadQueues reads the first most groups of each queue, in two round trips.
func ReadQueues(
	ctx context.Context, c redis.Cmdable, p keyspace.Partition, queues []TenantQueue, most int64,
) (map[TenantQueue]QueuedGroups, error) {
	orders := make(map[TenantQueue]*redis.StringSliceCmd, len(queues))
	paused := map[string]*redis.BoolCmd{}
	_, err := c.Pipelined(ctx, func(pipe redis.Pipeliner) error {
		for _, q := range queues {
			orders[q] = pipe.ZRange(ctx, p.FairTenant(q.Type, q.Lane, q.Tenant), 0, most-1)
			if paused[q.Type] == nil {
				paused[q.Type] = pipe.HExists(ctx, p.Pauses(), layout.PauseOfType+q.Type)
			}
		}
		return nil
	})
	if err != nil {
		return nil, fmt.Errorf("read queues of partition %d: %w", p.Index(), err)
	}
	waiting := map[string]*redis.SliceCmd{}
	_, err = c.Pipelined(ctx, func(pipe redis.Pipeliner) error {
		for _, order := range orders {
			for _, id := range order.Val() {
				if waiting[id] == nil {
					waiting[id] = pipe.HMGet(ctx, p.Group(id), layout.GroupWaiting)
				}
			}
		}
		return nil
	})
	if err != nil {
		return nil, fmt.Errorf("read queues of partition %d: %w", p.Index(), err)
	}
	read := make(map[TenantQueue]QueuedGroups, len(queues))
	for q, order := range orders {
		ids := order.Val()
		groups := make([]QueuedGroup, len(ids))
		for i, id := range ids {
			groups[i] = QueuedGroup{id, max(0, reply(waiting[id].Val()).num(0))}
		}
		read[q] = QueuedGroups{groups, paused[q.Type].Val()}
	}
	return read, nil
}
