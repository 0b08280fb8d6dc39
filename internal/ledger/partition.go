package ledger

import (
	"context"
	"fmt"

	"github.com/redis/go-redis/v9"

	"github.com/bulkaction/bulkaction/internal/redisx/keyspace"
)

// PartitionStats are numbers of one partition as a whole.
type PartitionStats struct {
	Types         []string // the job types that the partition has seen and that were not retired
	Groups        int64    // all groups, ended ones too
	ActiveTenants int64
	DeadLetters   int64
}

// ReadPartition reads a partition's numbers in one round trip.
func ReadPartition(ctx context.Context, c redis.Cmdable, p keyspace.Partition) (PartitionStats, error) {
	var types *redis.StringSliceCmd
	var groups, active, dead *redis.IntCmd
	_, err := c.Pipelined(ctx, func(pipe redis.Pipeliner) error {
		types = pipe.ZRange(ctx, p.Types(), 0, -1)
		groups, active, dead = pipe.ZCard(ctx, p.Groups()), pipe.SCard(ctx, p.Active()), pipe.XLen(ctx, p.DeadLetters())
		return nil
	})
	if err != nil {
		return PartitionStats{}, fmt.Errorf("read stats of partition %d: %w", p.Index(), err)
	}
	return PartitionStats{
		Types: types.Val(), Groups: groups.Val(), ActiveTenants: active.Val(), DeadLetters: dead.Val(),
	}, nil
}
