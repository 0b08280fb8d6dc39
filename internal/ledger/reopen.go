package ledger

import (
	"context"
	"fmt"

	"github.com/redis/go-redis/v9"

	"github.com/bulkaction/bulkaction/api"
	"github.com/bulkaction/bulkaction/internal/redisx/keyspace"
)

var (
	reopen  = script("groups/reopen", "signals")
	requeue = script("groups/requeue", "signals", "blob", "tenants", "priority", "fair_queue")
)

// Reopen opens the next round of an ended group and returns its number. Requeue then moves the
// failed jobs. Twice: with the same request id ("": none) the second call returns the same number,
// whatever has happened since. Errors: api.ErrNotFound; api.ErrConflict if the group has not ended,
// was cancelled, or has no failed jobs.
func Reopen(ctx context.Context, c redis.Cmdable, p keyspace.Partition, group, request string) (int, error) {
	r, err := run(ctx, c, reopen, p, group, request)
	if err != nil {
		return 0, err
	}
	switch r.str(0) {
	case "OK":
		return int(r.num(1)), nil
	case "NOGROUP":
		return 0, fmt.Errorf("group %s: %w", group, api.ErrNotFound)
	case "STATE":
		return 0, fmt.Errorf("group %s is %s: only a completed or failed group can be retried: %w",
			group, r.str(1), api.ErrConflict)
	}
	return 0, fmt.Errorf("group %s: no job has failed, so there is nothing to retry: %w", group, api.ErrConflict)
}

// Requeue moves a batch of a reopened group's failed jobs into the fair queue; more says that
// others may be left. The jobs of a paused group enter the fair queue when it is resumed. Twice:
// the second call moves the next ones.
func Requeue(ctx context.Context, c redis.Cmdable, p keyspace.Partition, group string) (more bool, err error) {
	r, err := run(ctx, c, requeue, p, group, 100)
	if err != nil {
		return false, err
	}
	return r.str(0) == "MORE", nil
}
