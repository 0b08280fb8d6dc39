package ledger

import (
	"context"
	"fmt"

	"github.com/bulkaction/bulkaction/internal/redisx"
	"github.com/bulkaction/bulkaction/internal/redisx/keyspace"
)

// Types lists the job types that a partition has seen.
func Types(ctx context.Context, conn *redisx.Conn, p keyspace.Partition) ([]string, error) {
	types, err := conn.Cmd.ZRange(ctx, p.Types(), 0, -1).Result()
	if err != nil {
		return nil, fmt.Errorf("list types of partition %d: %w", p.Index(), err)
	}
	return types, nil
}
