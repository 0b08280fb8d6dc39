package ledger

import (
	"context"
	"maps"
	"slices"

	"github.com/redis/go-redis/v9"

	"github.com/bulkaction/bulkaction/internal/redisx/keyspace"
)

var (
	repair          = script("repair/repair", "signals")
	repairCounter   = script("repair/repair_counter", "tenants")
	repairMisplaced = script("repair/repair_misplaced", "signals", "states", "blob", "non_ready")
)

// RepairGroup adds to fields of a group's ledger what they differ by from its states (code:X is an
// error code's), and puts it on the lists where it belongs. It says whether it has: not when
// somebody else has repaired the group since version was read, the field repaired of its hash.
func RepairGroup(
	ctx context.Context, c redis.Cmdable, p keyspace.Partition,
	group, tenant string, version int64, differences map[string]int64,
) (bool, error) {
	args := []any{group, tenant, version}
	for _, field := range slices.Sorted(maps.Keys(differences)) {
		args = append(args, field, differences[field])
	}
	r, err := run(ctx, c, repair, p, args...)
	return err == nil && r.str(0) != "VERSION", err
}

// Counter is what a tenant, or else a type, counts, and what it should.
type Counter struct {
	Tenant     bool
	Of, Name   string
	Have, Want int64
}

// RepairCounter sets a counter, unless it has moved.
func RepairCounter(ctx context.Context, c redis.Cmdable, p keyspace.Partition, n Counter) (bool, error) {
	what := "type"
	if n.Tenant {
		what = "tenant"
	}
	r, err := run(ctx, c, repairCounter, p, what, n.Of, n.Name, n.Have, n.Want)
	return err == nil && r.num(0) == 1, err
}

// Misplaced is an element at a location that may be misplaced: a job there, or what is no job.
type Misplaced struct {
	Location string // queue, non-ready, suspended, ready, results or failures
	// the group of a queue or of failures, the tenant of non-ready or suspended jobs, the type of a
	// ready stream
	Owner string
	Type  string // of a queue
	Item  string // an element, an entry's id, or an ordinal
	Twin  string // another of the same job, of which one is enough; "" for none
}

// RepairMisplaced quarantines a misplaced job, what is no job, or one of two elements of a job. It
// reports whether it has.
func RepairMisplaced(ctx context.Context, c redis.Cmdable, p keyspace.Partition, m Misplaced) (bool, error) {
	r, err := run(ctx, c, repairMisplaced, p, m.Location, m.Owner, m.Type, m.Item, m.Twin)
	return err == nil && r.num(0) == 1, err
}
