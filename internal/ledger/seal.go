package ledger

import (
	"context"
	"fmt"

	"github.com/redis/go-redis/v9"

	"github.com/bulkaction/bulkaction/api"
	"github.com/bulkaction/bulkaction/internal/redisx/keyspace"
)

var seal = script("groups/seal", "signals")

// Seal says that no more jobs come to a group; with total, that there will be so many in all.
// It answers whether the seal has taken effect. Errors: api.ErrNotFound, api.ErrConflict.
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
