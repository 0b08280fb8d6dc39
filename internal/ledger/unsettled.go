package ledger

import (
	"context"
	"fmt"

	"github.com/redis/go-redis/v9"

	"github.com/bulkaction/bulkaction/internal/ledger/layout"
	"github.com/bulkaction/bulkaction/internal/redisx/call"
	"github.com/bulkaction/bulkaction/internal/redisx/keyspace"
)

// Unsettled returns which of these groups of a partition have a cancellation that [Sweep] has not
// completed, or a reopening that [Requeue] has not completed. It costs one round trip. A group
// whose hash can't be read is left out: the caller finds the error when it moves the group.
func Unsettled(ctx context.Context, c redis.Cmdable, p keyspace.Partition, groups []string) (map[string]bool, error) {
	if len(groups) == 0 {
		return nil, nil
	}
	fields := make([]*redis.SliceCmd, len(groups))
	_, err := c.Pipelined(ctx, func(pipe redis.Pipeliner) error {
		for i, id := range groups {
			fields[i] = pipe.HMGet(ctx, p.Group(id), layout.GroupSweep, layout.GroupRequeue)
		}
		return nil
	})
	if err != nil && (call.IsUnavailable(err) || ctx.Err() != nil) {
		return nil, fmt.Errorf("read unfinished cancellations and reopenings: %w", err)
	}
	unsettled := map[string]bool{}
	for i, id := range groups {
		if v := fields[i].Val(); len(v) == 2 && (v[0] != nil || v[1] != nil) {
			unsettled[id] = true
		}
	}
	return unsettled, nil
}
