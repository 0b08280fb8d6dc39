package ledger

import (
	"context"
	"fmt"

	"github.com/redis/go-redis/v9"

	"github.com/bulkaction/bulkaction/api"
	"github.com/bulkaction/bulkaction/internal/redisx/keyspace"
)

var seal = script("groups/seal", "signals")

// Seal seals a group: it gets no more jobs. With total it announces that the group gets exactly
// total jobs, and the group is sealed as soon as it has them. Seal reports whether the group is
// sealed now. Twice: the second call reports the same. Errors: api.ErrNotFound; api.ErrConflict if
// the group is cancelled, has more than total jobs, has announced another total, or without total
// has fewer jobs than announced.
func Seal(ctx context.Context, c redis.Cmdable, p keyspace.Partition, group string, total *int64) (bool, error) {
	arg := any("")
	if total != nil {
		arg = *total
	}
	r, err := run(ctx, c, seal, p, group, arg)
	if err != nil {
		return false, err
	}
	switch r.str(0) {
	case "OK":
		return true, nil
	case "PENDING":
		return false, nil
	case "NOGROUP":
		return false, fmt.Errorf("group %s: %w", group, api.ErrNotFound)
	case "CANCELLED":
		return false, fmt.Errorf("group %s is CANCELLED and can't be sealed any more: %w", group, api.ErrConflict)
	}
	return false, fmt.Errorf("group %s: has %d jobs, which disagrees with the total of %d: %w",
		group, r.num(1), r.num(2), api.ErrConflict)
}
