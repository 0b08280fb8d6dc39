package ledger

import (
	"context"
	"fmt"

	"github.com/redis/go-redis/v9"

	"github.com/bulkaction/bulkaction/api"
	"github.com/bulkaction/bulkaction/internal/redisx/keyspace"
)

var create = script("groups/create", "signals")

// CreateArgs are the arguments of Create.
type CreateArgs struct {
	Group, Tenant string
	Type          string            // of jobs that name none
	Hash          string            // digest of the submission, by which a repetition is recognized
	Fields        map[string]string // further fields of the group's hash
}

// Create creates a group without jobs and returns its status. Twice: the second call, with the same
// Hash, changes nothing and returns the status that the group has then. Errors: api.ErrConflict if
// a submission with another Hash has created a group with this id.
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
