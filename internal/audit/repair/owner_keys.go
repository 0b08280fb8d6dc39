package repair

import (
	"context"
	"fmt"
	"time"

	"github.com/bulkaction/bulkaction/internal/audit"
	"github.com/bulkaction/bulkaction/internal/jobs/ledger"
	"github.com/bulkaction/bulkaction/internal/redisx"
	"github.com/bulkaction/bulkaction/internal/redisx/keyspace"
)

// creationTime is a wait that is longer than any process takes from reading a group's owner key to
// creating the group.
const creationTime = time.Second

// OwnerKeys looks in all of Redis for owner keys whose groups do not exist, deletes them, and waits
// for creationTime. If the group of a deleted key was created meanwhile, it writes the key again.
// It calls tell for each key that stays deleted.
func OwnerKeys(ctx context.Context, conn *redisx.Conn, space keyspace.Space, tell func(Result)) error {
	orphans, err := audit.FindOwnerKeysWithoutGroup(ctx, conn, space)
	if err != nil {
		return fmt.Errorf("look for owner keys without a group: %w", err)
	}
	key := func(f audit.Finding) string { return space.OfGroup(f.Group).Owner(f.Group) }
	for _, f := range orphans {
		if err := conn.Cmd.Del(ctx, key(f)).Err(); err != nil {
			return fmt.Errorf("delete the owner key of group %s: %w", f.Group, err)
		}
	}
	// A process that is creating the group may have read the owner key before its deletion. Then
	// the group soon exists, and its key must be written again.
	if len(orphans) > 0 && redisx.Sleep(ctx, creationTime) != nil {
		return ctx.Err()
	}
	for _, f := range orphans {
		tenant, err := ledger.TenantOf(ctx, conn.Cmd, space.OfTenant(f.Tenant), f.Group)
		if err == nil && tenant != "" {
			err = conn.Cmd.SetNX(ctx, key(f), f.Tenant, 0).Err()
		}
		if err != nil {
			return fmt.Errorf("delete the owner key of group %s: %w", f.Group, err)
		}
		if tenant == "" {
			tell(newResult(f.Violation, "; now the key is gone", true))
		}
	}
	return nil
}
