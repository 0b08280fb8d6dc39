package ledger

import (
	"context"
	"fmt"
	"maps"
	"slices"

	"github.com/redis/go-redis/v9"

	"github.com/bulkaction/bulkaction/internal/redisx/call"
	"github.com/bulkaction/bulkaction/internal/redisx/keyspace"
)

var (
	repair          = script("repair/repair", "signals", "priority", "fair_queue", "non_ready", "tags")
	repairCounter   = script("repair/repair_counter", "tenants")
	repairMisplaced = script("repair/repair_misplaced", "signals", "states", "blob", "non_ready", "places")
	lose            = script("jobs/lose", "signals", "states", "blob", "tenants", "priority", "fair_queue", "endings", "places")
)

// RepairGroup corrects the counts of a group, and the lists that name it. It adds each difference
// to the field of the group's hash with its name; a name code:X stands for the count of error code
// X. The caller has read version, the field repaired of the group, before it recounted. RepairGroup
// reports false, and changes nothing, if the group was repaired since then. It makes the group
// dirty; if a cancelled group has jobs left, Sweep begins again. A group with waiting
// jobs that may start enters the fair queue again, and the tenant the lists of tenants with non-ready
// and suspended jobs. If the group does not exist, RepairGroup removes its id from the lists and
// reports true; if it has another tenant, it only removes it from the list of this tenant. Twice: the second call reports false if the group
// exists.
func RepairGroup(
	ctx context.Context, c redis.Cmdable, p keyspace.Partition,
	group, tenant string, version int64, differences map[string]int64,
) (bool, error) {
	args := []any{group, tenant, version}
	for _, field := range slices.Sorted(maps.Keys(differences)) {
		args = append(args, field, differences[field])
	}
	r := run(ctx, c, repair, p, args...)
	return call.Done(r, r.Code("OK", "VERSION", "GONE") != "VERSION")
}

// Counter is a counter of a tenant or type that is wrong, or that of the bytes of a queue of callbacks.
type Counter struct {
	Tenant    bool   // of a tenant
	Callbacks bool   // of a queue of callbacks; otherwise of a type
	Of        string // the tenant or type
	Name      string // field of its hash
	Have      int64  // the counter's value while it was recounted
	Want      int64  // what was counted
}

// RepairCounter sets a counter to the recounted value. With the counter active it also adds the
// tenant to the set of active tenants, or removes it. It reports false, and changes nothing, if the
// counter does not have the value Have any more. Twice: the second call reports false, or sets the
// same.
func RepairCounter(ctx context.Context, c redis.Cmdable, p keyspace.Partition, n Counter) (bool, error) {
	scope := "type"
	switch {
	case n.Tenant:
		scope = "tenant"
	case n.Callbacks:
		scope = "callbacks"
	}
	r := run(ctx, c, repairCounter, p, scope, n.Of, n.Name, n.Have, n.Want)
	return call.Done(r, r.Flag())
}

// Misplaced names an element of a location for RepairMisplaced: a job that seems to be misplaced,
// or something that is no job.
type Misplaced struct {
	Location string // queue, non-ready, suspended, ready, results or failures
	// Owner is the group of a queue or of failures, the tenant of non-ready or suspended jobs, or
	// the type of a ready stream.
	Owner string
	Type  string // of a queue; "": another location
	Item  string // the element, the entry's id in a stream, or the ordinal in failures
	Twin  string // another element of the same job: only one is removed; "": none
}

// RepairMisplaced checks an element again. If it is a misplaced job, no job, or one of two elements
// of a job, RepairMisplaced moves it from its location to the quarantine, and reports true. Twice:
// the second call reports false.
func RepairMisplaced(ctx context.Context, c redis.Cmdable, p keyspace.Partition, m Misplaced) (bool, error) {
	r := run(ctx, c, repairMisplaced, p, m.Location, m.Owner, m.Type, m.Item, m.Twin)
	return call.Done(r, r.Flag())
}

// MaxLose is the most jobs of one Lose.
const MaxLose = 200

// Missed is a job that the audit found at none of its possible locations, and the state that the
// job had then.
type Missed struct {
	Ordinal int64
	State   State
}

// Lose fails jobs of a group that have vanished from Redis, with code LOST. typ is their type, ""
// if they may be of several types. It returns the ordinals of the jobs that it has failed. It
// leaves out jobs that have moved since they were missed. Twice: the second call fails none,
// because they have ended.
func Lose(
	ctx context.Context, c redis.Cmdable, p keyspace.Partition, group, typ string, jobs []Missed,
) ([]int64, error) {
	if len(jobs) > MaxLose {
		return nil, fmt.Errorf("lose jobs of group %s: %d are more than %d", group, len(jobs), MaxLose)
	}
	args := []any{group, typ}
	for _, j := range jobs {
		args = append(args, j.Ordinal, string(j.State))
	}
	r := run(ctx, c, lose, p, args...)
	return call.Done(r, r.Numbers())
}
