package waitingroom

import (
	"context"
	"errors"
	"fmt"
	"strconv"
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

// reply reads the values of a script's reply one after the other. At the first value that is
// missing, is no number or is no list where one belongs, it sets failed, an error that the caller
// checks at the end.
type reply struct {
	values []any
	failed error
}

// run executes a script on a partition.
func (r *store) run(ctx context.Context, s *call.Script, p keyspace.Partition, args ...any) (*reply, error) {
	began := time.Now()
	answer, err := s.Run(ctx, r.rdb, p.Keys(), args)
	r.observe(s.Name(), time.Since(began), err)
	if err != nil {
		return nil, fmt.Errorf("partition %d: %w", p.Index(), err)
	}
	list, ok := answer.([]any)
	if !ok {
		return nil, fmt.Errorf("partition %d: script %s: unexpected reply %T", p.Index(), s.Name(), answer)
	}
	return &reply{values: list}, nil
}

func (r *reply) next() any {
	if len(r.values) == 0 {
		if r.failed == nil {
			r.failed = errors.New("the reply is too short")
		}
		return nil
	}
	v := r.values[0]
	r.values = r.values[1:]
	return v
}

func (r *reply) more() bool { return len(r.values) > 0 && r.failed == nil }

func (r *reply) text() string {
	switch v := r.next().(type) {
	case string:
		return v
	case int64:
		return strconv.FormatInt(v, 10)
	}
	return ""
}

func (r *reply) code() Code { return Code(r.text()) }

func (r *reply) number() int64 {
	switch v := r.next().(type) {
	case int64:
		return v
	case string:
		n, err := strconv.ParseInt(v, 10, 64)
		if err != nil {
			f, floatErr := strconv.ParseFloat(v, 64) // the score of a sorted set
			if floatErr != nil && r.failed == nil {
				r.failed = fmt.Errorf("the reply has %q instead of a number", v)
			}
			return int64(f)
		}
		return n
	}
	return 0
}

// list reads a list.
func (r *reply) list() *reply {
	list, ok := r.next().([]any)
	if !ok && r.failed == nil {
		r.failed = errors.New("the reply has no list where one belongs")
	}
	return &reply{values: list}
}

// time reads ms since the epoch; 0 is the zero time.
func (r *reply) time() time.Time {
	if ms := r.number(); ms > 0 {
		return time.UnixMilli(ms)
	}
	return time.Time{}
}

// wait reads ms; a negative number stays negative.
func (r *reply) wait() time.Duration { return time.Duration(r.number()) * time.Millisecond }

// pairs reads a reply of HGETALL.
func (r *reply) pairs() map[string]string {
	list, _ := r.next().([]any)
	all := make(map[string]string, len(list)/2)
	for i := 0; i+1 < len(list); i += 2 {
		name, _ := list[i].(string)
		all[name], _ = list[i+1].(string)
	}
	return all
}
