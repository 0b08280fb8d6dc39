package repair

import (
	"context"

	"github.com/bulkaction/bulkaction/guard"
	"github.com/bulkaction/bulkaction/internal/audit"
	"github.com/bulkaction/bulkaction/internal/redisx"
	"github.com/bulkaction/bulkaction/internal/redisx/keyspace"
)

// Guards repairs the members and counters of all guards, and calls tell for each repair. Guards may
// be in use meanwhile.
func Guards(ctx context.Context, conn *redisx.Conn, space keyspace.Space, tell func(Result)) error {
	return audit.EachGuard(ctx, conn, space, func(c *guard.Client, name string) error {
		repaired, err := c.Repair(ctx, name)
		for _, f := range repaired {
			tell(newResult(audit.GuardViolation(f), "; now it is right", true))
		}
		return err
	})
}
