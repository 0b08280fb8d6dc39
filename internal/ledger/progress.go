package ledger

import (
	"context"
	"fmt"
	"time"

	"github.com/redis/go-redis/v9"

	"github.com/bulkaction/bulkaction/api"
	"github.com/bulkaction/bulkaction/internal/ledger/layout"
	"github.com/bulkaction/bulkaction/internal/redisx/keyspace"
)

// GroupRef names a group and the partition that holds it.
type GroupRef struct {
	Partition keyspace.Partition
	ID        string
}

// Progress is how far a group is. The zero Progress is that of a group that does not exist. Times
// are those of the present round, by Redis's clock; a time that has not come yet is zero.
type Progress struct {
	Status             api.Status
	Counts             api.Counts
	Reduced            int64 // the part of Counts.Done whose results are reduced
	Throttles, Retries int64

	Created   time.Time
	Started   time.Time // the first job started
	JobsEnded time.Time // all jobs had ended
	Completed time.Time // the group became COMPLETED: all results were reduced
}

var progressFields = []string{
	layout.GroupStatus, layout.GroupAccepted, layout.GroupWaiting, layout.GroupNonReady, layout.GroupReady,
	layout.GroupInFlight, layout.GroupDone, layout.GroupFailed, layout.GroupCancelled,
	layout.GroupReduced, layout.GroupThrottles, layout.GroupRetries,
	layout.GroupAt + "created", layout.GroupStarted, layout.GroupAt + "aggregating", layout.GroupAt + "completed",
}

// ReadProgress reads the progress of groups, in their order. It costs one HMGET a group, all in one
// pipeline; that is much less than [ReadGroups].
func ReadProgress(ctx context.Context, c redis.Cmdable, groups []GroupRef) ([]Progress, error) {
	if len(groups) == 0 {
		return nil, nil
	}
	cmds := make([]*redis.SliceCmd, len(groups))
	_, err := c.Pipelined(ctx, func(pipe redis.Pipeliner) error {
		for i, g := range groups {
			cmds[i] = pipe.HMGet(ctx, g.Partition.Group(g.ID), progressFields...)
		}
		return nil
	})
	if err != nil {
		return nil, fmt.Errorf("read progress of groups: %w", err)
	}
	out := make([]Progress, len(groups))
	for i, cmd := range cmds {
		v := reply(cmd.Val())
		out[i] = Progress{
			Status: api.Status(v.str(0)),
			Counts: api.Counts{
				Accepted: v.num(1), Waiting: v.num(2), NonReady: v.num(3), Ready: v.num(4),
				InFlight: v.num(5), Done: v.num(6), Failed: v.num(7), Cancelled: v.num(8),
			},
			Reduced: v.num(9), Throttles: v.num(10), Retries: v.num(11),
			Created: instant(v.str(12)), Started: instant(v.str(13)),
			JobsEnded: instant(v.str(14)), Completed: instant(v.str(15)),
		}
	}
	return out, nil
}
