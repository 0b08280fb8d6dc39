package waitingroom

import (
	"context"
	"fmt"
	"time"

	"github.com/bulkaction/bulkaction/internal/redisx/call"
	"github.com/bulkaction/bulkaction/internal/redisx/keyspace"
	"github.com/bulkaction/bulkaction/lua"
)

// The Lua scripts of the package. The header of each Lua file describes its arguments and replies.
var (
	declareScript = call.NewScript("declare_room",
		lua.Source("parts/base", "parts/limiters", "parts/signals", "parts/room", "room/declare_room"))
	enterScript = call.NewScript("enter",
		lua.Source("parts/base", "parts/limiters", "parts/signals", "parts/room", "room/enter"))
	disconnectScript = call.NewScript("disconnect",
		lua.Source("parts/base", "parts/limiters", "parts/signals", "parts/room", "room/disconnect"))
	leaveScript = call.NewScript("leave",
		lua.Source("parts/base", "parts/limiters", "parts/signals", "parts/room", "room/leave"))
	promoteScript = call.NewScript("promote_users",
		lua.Source("parts/base", "parts/limiters", "parts/signals", "parts/room", "room/promote_users"))
	claimScript = call.NewScript("claim",
		lua.Source("parts/base", "parts/limiters", "parts/signals", "parts/room", "room/claim"))
	renewScript = call.NewScript("renew_token",
		lua.Source("parts/base", "parts/limiters", "parts/signals", "parts/room", "room/renew_token"))
	completeScript = call.NewScript("complete",
		lua.Source("parts/base", "parts/limiters", "parts/signals", "parts/room", "room/complete"))
	expireScript = call.NewScript("expire_users",
		lua.Source("parts/base", "parts/limiters", "parts/signals", "parts/room", "room/expire_users"))
	sweepScript = call.NewScript("sweep_room",
		lua.Source("parts/base", "parts/limiters", "parts/signals", "parts/room", "room/sweep_room"))
	forgetScript = call.NewScript("forget",
		lua.Source("parts/base", "parts/limiters", "parts/signals", "parts/room", "room/forget"))
	snapshotScript = call.NewScript("snapshot", lua.Source("parts/base", "room/snapshot"))
)

// run executes a script on a partition.
func (r *Rooms) run(ctx context.Context, s *call.Script, p keyspace.Partition, args ...any) *call.Reply {
	began := time.Now()
	reply, err := s.Run(ctx, r.rdb, p.Keys(), args)
	r.observe(s.Name(), time.Since(began), err)
	if err != nil {
		return call.Failed(fmt.Errorf("partition %d: %w", p.Index(), err))
	}
	return s.Reply(reply)
}
