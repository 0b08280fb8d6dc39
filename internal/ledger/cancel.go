package ledger

import (
	"context"
	"fmt"

	"github.com/redis/go-redis/v9"

	"github.com/bulkaction/bulkaction/api"
	"github.com/bulkaction/bulkaction/internal/redisx/keyspace"
)

var (
	cancel = script("groups/cancel", "signals", "tenants", "priority", "fair_queue")
	sweep  = script("groups/sweep", "signals", "tenants", "non_ready", "blob")
)

// SweepJobs is how many jobs one Sweep settles: some milliseconds of Redis's time.
const SweepJobs = 5000

// Cancel ends a group at once. Errors: api.ErrNotFound, api.ErrConflict when
// it has ended otherwise.
func Cancel(ctx context.Context, c redis.Cmdable, p keyspace.Partition, group string) error {
	r, err := run(ctx, c, cancel, p, group)
	if err != nil {
		return err
	}
	return r.refused(group, "cancelled")
}

// refused says why a group can't be what was asked for; nil when it is.
func (r reply) refused(group, what string) error {
	switch r.str(0) {
	case "NOGROUP":
		return fmt.Errorf("group %s: %w", group, api.ErrNotFound)
	case "ENDED":
		return fmt.Errorf("group %s is %s and can't be %s any more: %w", group, r.str(1), what, api.ErrConflict)
	}
	return nil
}

// Sweep settles a chunk of a cancelled group's ledger; more says that there is more to do.
func Sweep(ctx context.Context, c redis.Cmdable, p keyspace.Partition, group string) (more bool, err error) {
	r, err := run(ctx, c, sweep, p, group, SweepJobs)
	if err != nil {
		return false, err
	}
	return r.str(0) == "MORE", nil
}
