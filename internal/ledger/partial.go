package ledger

import (
	"context"
	"fmt"

	"github.com/redis/go-redis/v9"

	"github.com/bulkaction/bulkaction/internal/ledger/layout"
	"github.com/bulkaction/bulkaction/internal/redisx/keyspace"
)

// PartialAggregate is one partial aggregate of a group, with what an aggregator needs to know of
// the group.
type PartialAggregate struct {
	Exists     bool // whether the group exists
	Tenant     string
	Aggregates string // that were asked for, as JSON; "": none
	Version    int64  // see ReduceArgs
	State      string // encoded by its reducers; "": nothing was added to it yet
	Err        error  // that the group can't be read
}

// ReadPartials reads the partial aggregate with this number of each group of a partition, in the
// order of the groups and in one round trip.
func ReadPartials(
	ctx context.Context, c redis.Cmdable, p keyspace.Partition, partial string, groups []string,
) []PartialAggregate {
	if len(groups) == 0 {
		return nil
	}
	type replies struct{ group, partial *redis.SliceCmd }
	reads := make([]replies, len(groups))
	// Each reply has the error of the pipeline or its own.
	_, _ = c.Pipelined(ctx, func(pipe redis.Pipeliner) error {
		for i, id := range groups {
			reads[i].group = pipe.HMGet(ctx, p.Group(id), layout.GroupStatus, layout.GroupTenant, layout.GroupAggregate)
			reads[i].partial = pipe.HMGet(ctx, p.Aggregate(id),
				layout.AggregateVersion+partial, layout.AggregatePartial+partial)
		}
		return nil
	})
	out := make([]PartialAggregate, len(groups))
	for i, r := range reads {
		group, err := r.group.Result()
		if err == nil {
			err = r.partial.Err()
		}
		if err != nil {
			out[i].Err = fmt.Errorf("read aggregate of group %s: %w", groups[i], err)
			continue
		}
		fields, values := reply(group), reply(r.partial.Val())
		out[i] = PartialAggregate{
			Exists: fields.str(0) != "", Tenant: fields.str(1), Aggregates: fields.str(2),
			Version: values.num(0), State: values.str(1),
		}
	}
	return out
}
