package ledger

import (
	"context"
	"fmt"

	"github.com/redis/go-redis/v9"

	"github.com/bulkaction/bulkaction/api"
	"github.com/bulkaction/bulkaction/internal/redisx/keyspace"
)

var create = script("groups/create", "signals")

// CreateArgs is a group that is to come into being. Fields are further fields of its hash.
type CreateArgs struct {
	Group, Tenant, Type, Hash string
	Fields                    map[string]string
}

// Create makes a group, or finds that the same one is there; its status is returned.
// Another group under the same id is api.ErrConflict.
func Create(ctx context.Context, c redis.Cmdable, p keyspace.Partition, a CreateArgs) (api.Status, error) {
	args := []any{a.Group, a.Tenant, a.Type, a.Hash}
	for k, v := range a.Fields {
		args = append(args, k, v)
	}
	r, err := run(ctx, c, create, p, args...)
	if err != nil {
		return "", err
	}
	if r.str(0) == "CONFLICT" {
		return "", fmt.Errorf("group %s: another group has this id: choose another id: %w", a.Group, api.ErrConflict)
	}
	return api.Status(r.str(1)), nil
}
