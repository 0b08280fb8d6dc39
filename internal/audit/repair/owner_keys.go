package repair

import (
	"context"
	"errors"
	"fmt"
	"time"

	"github.com/redis/go-redis/v9"

	"github.com/bulkaction/bulkaction/internal/audit"
	"github.com/bulkaction/bulkaction/internal/redisx"
	"github.com/bulkaction/bulkaction/internal/redisx/keyspace"
)

// creationTime is longer than a process takes from reading a group's owner key to creating the
// group.
const creationTime = time.Second

// OwnerKeys deletes the owner keys whose groups do not exist, waits for creationTime, and calls
// tell for each of them. If a group was created meanwhile, its owner key is written again instead.
func OwnerKeys(ctx context.Context, conn *redisx.Conn, space keyspace.Space, tell func(Result)) error {
	orphans, err := audit.FindOwnerKeysWithoutGroup(ctx, conn, space)
	if err != nil {
		return fmt.Errorf("look for owner keys without a group: %w", err)
	}
	for _, k := range orphans {
		if err := conn.Cmd.Del(ctx, k.Key).Err(); err != nil {
			return fmt.Errorf("delete the owner key of group %s: %w", k.Group, err)
		}
	}
	// A process that is creating the group may have seen its owner key before it was deleted. Then
	// the group exists soon, and needs the key again.
	if len(orphans) > 0 && redisx.Sleep(ctx, creationTime) != nil {
		return ctx.Err()
	}
	for _, k := range orphans {
		exists, err := groupExists(ctx, conn, space, k)
		if err == nil && exists {
			err = conn.Cmd.SetNX(ctx, k.Key, k.Tenant, 0).Err()
		}
		if err != nil {
			return fmt.Errorf("delete the owner key of group %s: %w", k.Group, err)
		}
		if v := k.Violation(space); !exists {
			tell(Result{
				Law:       v.Law,
				Partition: v.Partition,
				Group:     v.Group,
				Detail:    v.Detail + "; now the key is gone",
				Done:      true,
			})
		}
	}
	return nil
}

// groupExists reports whether the group of an owner key exists in its tenant's partition.
func groupExists(ctx context.Context, conn *redisx.Conn, space keyspace.Space, k audit.OwnerKey) (bool, error) {
	_, err := conn.Cmd.HGet(ctx, space.OfTenant(k.Tenant).Group(k.Group), "status").Result()
	if errors.Is(err, redis.Nil) {
		return false, nil
	}
	return err == nil, err
}
