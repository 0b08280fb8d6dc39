package stage

import (
	"context"
	"errors"
	"fmt"
	"strconv"

	"github.com/redis/go-redis/v9"

	"github.com/bulkaction/bulkaction/internal/redisx"
	"github.com/bulkaction/bulkaction/internal/redisx/call"
	"github.com/bulkaction/bulkaction/internal/redisx/keyspace"
)

// CheckPartitions returns an error when the configured number of partitions differs from the number
// stored in Redis, or when Redis fails. If Redis has no number, it stores the configured one. A
// process with another number would look for tenants in the wrong partitions.
func CheckPartitions(ctx context.Context, conn *redisx.Conn, space keyspace.Space) error {
	want := strconv.Itoa(space.Partitions())
	have, err := conn.Cmd.Get(ctx, space.PartitionCount()).Result()
	if errors.Is(err, redis.Nil) { // GET comes first, because it works even when memory is full
		if err = conn.Cmd.SetNX(ctx, space.PartitionCount(), want, 0).Err(); err == nil {
			have, err = conn.Cmd.Get(ctx, space.PartitionCount()).Result()
		}
	}
	if call.IsMoved(err) && !conn.IsCluster() {
		return errors.New(
			"BULKACTION_REDIS_URL names one node of a Redis Cluster: name several, separated by commas, or " +
				"add ?cluster=true",
		)
	}
	if err != nil {
		return fmt.Errorf("check number of partitions: %w", err)
	}
	if have != want {
		return fmt.Errorf(
			"BULKACTION_PARTITIONS is %s, but the data in Redis was made with %s (key %s): set it to %s, or "+
				"use another BULKACTION_KEY_PREFIX",
			want, have, space.PartitionCount(), have,
		)
	}
	return nil
}
