package redisx

import (
	"context"
	"fmt"

	"github.com/redis/go-redis/v9"

	"github.com/bulkaction/bulkaction/internal/redisx/call"
)

// CheckEviction returns an error if a master may evict keys when its memory is full, because it
// would lose jobs, or if a master does not answer. It accepts a server that does not report its
// policy, such as an embedded one, and one that this process may not ask.
func (c *Conn) CheckEviction(ctx context.Context) error {
	return c.Shards(ctx, func(ctx context.Context, shard redis.UniversalClient) error {
		policy, err := call.EvictionPolicy(ctx, shard)
		if err != nil {
			return fmt.Errorf("ask redis for its eviction policy: %w", err)
		}
		if policy == "" || policy == "noeviction" {
			return nil
		}
		return fmt.Errorf("%s evicts keys when memory is full (maxmemory-policy %s), which would lose jobs: "+
			"run `CONFIG SET maxmemory-policy noeviction` there, and set it in its configuration file",
			at(shard), policy)
	})
}
