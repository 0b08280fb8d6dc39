package ledger

import (
	"context"
	"errors"
	"fmt"

	"github.com/redis/go-redis/v9"

	"github.com/bulkaction/bulkaction/internal/jobs/ledger/layout"
	"github.com/bulkaction/bulkaction/internal/redisx/keyspace"
)

// ActiveTenants returns one page of a partition's active tenants, about n, from an SSCAN cursor.
// Begin with cursor 0; a next cursor of 0 is the end. Pages may repeat a tenant. unfinished has the
// number of jobs of each tenant that have not ended. It makes two round trips, and one cheap read a
// tenant.
func ActiveTenants(
	ctx context.Context, c redis.Cmdable, p keyspace.Partition, cursor uint64, n int64,
) (tenants []string, unfinished []int64, next uint64, err error) {
	tenants, next, err = c.SScan(ctx, p.Active(), cursor, "", n).Result()
	if err != nil {
		return nil, nil, 0, fmt.Errorf("list active tenants of partition %d: %w", p.Index(), err)
	}
	reads, err := pipelined(ctx, c, tenants, func(pipe redis.Pipeliner, tenant string) *redis.SliceCmd {
		return pipe.HMGet(ctx, p.Tenant(tenant), layout.TenantUnfinished)
	})
	if err != nil {
		return nil, nil, 0, fmt.Errorf("read active tenants of partition %d: %w", p.Index(), err)
	}
	unfinished = make([]int64, len(tenants))
	for i, read := range reads {
		unfinished[i] = values(read.Val()).num(0)
	}
	return tenants, unfinished, next, nil
}

// StoreBusiest stores the document with a partition's busiest tenants, which the watcher has found.
// Twice: the second call stores the same.
func StoreBusiest(ctx context.Context, c redis.Cmdable, p keyspace.Partition, document []byte) error {
	if err := c.Set(ctx, p.Top(), document, 0).Err(); err != nil {
		return fmt.Errorf("store the busiest tenants of partition %d: %w", p.Index(), err)
	}
	return nil
}

// Busiest returns the document that StoreBusiest stored last; nil if there is none.
func Busiest(ctx context.Context, c redis.Cmdable, p keyspace.Partition) ([]byte, error) {
	document, err := c.Get(ctx, p.Top()).Bytes()
	if errors.Is(err, redis.Nil) {
		return nil, nil
	}
	if err != nil {
		return nil, fmt.Errorf("read the busiest tenants of partition %d: %w", p.Index(), err)
	}
	return document, nil
}
