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

// SweepJobs is the number of jobs that one Sweep moves: some milliseconds of Redis's time.
const SweepJobs = 5000

// Cancel ends a group at once and seals it: none of its jobs starts any more, and the outcomes of
// jobs in flight are stale. It deletes the group's queues; Sweep then moves the jobs that have not
// ended to cancelled. Twice: the second call changes nothing. Errors: api.ErrNotFound;
// api.ErrConflict if the group is completed or failed.
func Cancel(ctx context.Context, c redis.Cmdable, p keyspace.Partition, group string) error {
	r, err := run(ctx, c, cancel, p, group)
	if err != nil {
		return err
	}
	return r.refused(group, "cancelled")
}

// refused returns the error of a command on a group that was refused, nil if it was not. done is
// the command's past participle.
func (r reply) refused(group, done string) error {
	switch r.str(0) {
	case "NOGROUP":
		return fmt.Errorf("group %s: %w", group, api.ErrNotFound)
	case "ENDED":
		return fmt.Errorf("group %s is %s and can't be %s any more: %w", group, r.str(1), done, api.ErrConflict)
	}
	return nil
}

// Sweep moves a batch of a cancelled group's jobs to cancelled; more says that something may be
// left to do. The last calls remove its non-ready and suspended jobs, its large payloads and latest
// errors, and put it among the ended groups. It does nothing to a group that is not cancelled.
// Twice: the second call moves the next ones.
func Sweep(ctx context.Context, c redis.Cmdable, p keyspace.Partition, group string) (more bool, err error) {
	r, err := run(ctx, c, sweep, p, group, SweepJobs)
	if err != nil {
		return false, err
	}
	return r.str(0) == "MORE", nil
}
