package ledger

import (
	"context"

	"github.com/redis/go-redis/v9"

	"github.com/bulkaction/bulkaction/api"
	"github.com/bulkaction/bulkaction/internal/ledger/layout"
	"github.com/bulkaction/bulkaction/internal/redisx/keyspace"
)

// GroupState holds what submissions and commands change in a group.
type GroupState struct {
	Status    api.Status
	Round     int
	Sealed    bool
	Announced bool // the total number of jobs is known
	Paused    bool
	Submitted bool // the last piece of the submission is stored
}

// QueueGroupState adds the read of a group's state to a pipeline. After the pipeline has run, the
// returned function gives the state; it returns false if the group does not exist or was not read.
func QueueGroupState(
	ctx context.Context, pipe redis.Pipeliner, p keyspace.Partition, group string,
) func() (GroupState, bool) {
	read := pipe.HMGet(ctx, p.Group(group), layout.GroupStatus, layout.GroupRound, layout.GroupSealed,
		layout.GroupTotal, layout.GroupPaused, layout.GroupSubmitted)
	return func() (GroupState, bool) {
		v := reply(read.Val())
		if read.Err() != nil || v[0] == nil {
			return GroupState{}, false
		}
		return GroupState{
			Status:    api.Status(v.str(0)),
			Round:     int(v.num(1)),
			Sealed:    v[2] != nil,
			Announced: v[3] != nil,
			Paused:    v[4] != nil,
			Submitted: v[5] != nil,
		}, true
	}
}
