package ledger

import (
	"context"
	"errors"
	"fmt"

	"github.com/redis/go-redis/v9"

	"github.com/bulkaction/bulkaction/api"
	"github.com/bulkaction/bulkaction/internal/ledger/layout"
	"github.com/bulkaction/bulkaction/internal/redisx/keyspace"
)

// Statuses reads the statuses of groups of one partition, in their order and in one round trip. The
// status of a group that does not exist is "".
func Statuses(ctx context.Context, c redis.Cmdable, p keyspace.Partition, groups []string) ([]api.Status, error) {
	keys := make([]string, len(groups))
	for i, id := range groups {
		keys[i] = p.Group(id)
	}
	values, err := readField(ctx, c, keys, func(int) string { return layout.GroupStatus })
	if err != nil {
		return nil, fmt.Errorf("read statuses of groups: %w", err)
	}
	out := make([]api.Status, len(groups))
	for i, v := range values {
		out[i] = api.Status(v)
	}
	return out, nil
}

// TenantOf returns the tenant of a group; "" when the group does not exist.
func TenantOf(ctx context.Context, c redis.Cmdable, p keyspace.Partition, group string) (string, error) {
	tenant, err := c.HGet(ctx, p.Group(group), layout.GroupTenant).Result()
	if err != nil && !errors.Is(err, redis.Nil) {
		return "", fmt.Errorf("read tenant of group %s: %w", group, err)
	}
	return tenant, nil
}

// readField reads one field of each hash, in one round trip. The value of a missing hash or field
// is "".
func readField(ctx context.Context, c redis.Cmdable, keys []string, field func(i int) string) ([]string, error) {
	if len(keys) == 0 {
		return nil, nil
	}
	cmds := make([]*redis.StringCmd, len(keys))
	_, err := c.Pipelined(ctx, func(pipe redis.Pipeliner) error {
		for i, key := range keys {
			cmds[i] = pipe.HGet(ctx, key, field(i))
		}
		return nil
	})
	if err != nil && !errors.Is(err, redis.Nil) {
		return nil, err
	}
	out := make([]string, len(keys))
	for i, cmd := range cmds {
		// Each reply has its own error: the connection can fail after a reply that found no value.
		v, err := cmd.Result()
		if err != nil && !errors.Is(err, redis.Nil) {
			return nil, err
		}
		out[i] = v
	}
	return out, nil
}
