package audit

import (
	"context"
	"errors"
	"fmt"
	"slices"
	"strings"
	"sync"
	"time"

	"github.com/redis/go-redis/v9"

	"github.com/bulkaction/bulkaction/internal/redisx"
	"github.com/bulkaction/bulkaction/internal/redisx/keyspace"
)

// orphanInterval is how long a name must have been without its group: one that is being created
// gets it within moments.
const orphanInterval = 500 * time.Millisecond

// ownerKey is an owner key: who owns which group.
type ownerKey struct{ key, group, tenant string }

// CheckOwnerKeys adds a violation of the law registry for each owner key whose group does not
// exist. A crash between forgetting a group and its name leaves one, and so does a shard that lost
// the group while another kept the name; the id can't be used by other tenants until the key is
// gone. It looks at the names of all keys in Redis.
func CheckOwnerKeys(ctx context.Context, conn *redisx.Conn, space keyspace.Space, report *Report) error {
	names, err := findOrphans(ctx, conn, space)
	if err != nil {
		return fmt.Errorf("look for names without a group: %w", err)
	}
	for _, n := range names {
		report.Violations = append(report.Violations, n.violation(space))
	}
	report.sort()
	return nil
}

func (n ownerKey) violation(space keyspace.Space) Violation {
	return Violation{
		Law: LawRegistry, Partition: space.OfGroup(n.group).Index(), Group: n.group,
		Detail: fmt.Sprintf("its owner key says tenant %s, but there is no such group", n.tenant),
	}
}

// RepairOwnerKeys drops such names.
func RepairOwnerKeys(ctx context.Context, conn *redisx.Conn, space keyspace.Space, tell func(RepairResult)) error {
	names, err := findOrphans(ctx, conn, space)
	if err != nil {
		return fmt.Errorf("look for names without a group: %w", err)
	}
	for _, n := range names {
		if err := conn.Cmd.Del(ctx, n.key).Err(); err != nil {
			return fmt.Errorf("drop the name of group %s: %w", n.group, err)
		}
	}
	// Who creates a group just now has seen its name: that comes back when the group is there.
	if len(names) > 0 && redisx.Sleep(ctx, 2*orphanInterval) != nil {
		return ctx.Err()
	}
	for _, n := range names {
		is, err := n.groupExists(ctx, conn, space)
		if err == nil && is {
			err = conn.Cmd.SetNX(ctx, n.key, n.tenant, 0).Err()
		}
		if err != nil {
			return fmt.Errorf("drop the name of group %s: %w", n.group, err)
		}
		if v := n.violation(space); !is {
			tell(RepairResult{
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

func (n ownerKey) groupExists(ctx context.Context, conn *redisx.Conn, space keyspace.Space) (bool, error) {
	_, err := conn.Cmd.HGet(ctx, space.OfTenant(n.tenant).Group(n.group), "status").Result()
	if errors.Is(err, redis.Nil) {
		return false, nil
	}
	return err == nil, err
}

// findOrphans scans every shard, and asks some times about the names whose groups are not there.
func findOrphans(ctx context.Context, conn *redisx.Conn, space keyspace.Space) ([]ownerKey, error) {
	var mu sync.Mutex
	var found []ownerKey
	scan := func(ctx context.Context, shard redis.UniversalClient) error {
		for cursor := uint64(0); ; {
			keys, next, err := shard.Scan(ctx, cursor, ownerPattern(space), pageSize).Result()
			if err != nil {
				return err
			}
			some, err := ownerKeysWithoutGroup(ctx, conn, space, keys)
			if err != nil {
				return err
			}
			mu.Lock()
			found = append(found, some...)
			mu.Unlock()
			if cursor = next; cursor == 0 {
				return nil
			}
		}
	}
	err := conn.Shards(ctx, scan)
	for i := 1; i < confirmations && err == nil && len(found) > 0; i++ {
		if err = redisx.Sleep(ctx, orphanInterval); err == nil {
			var keys []string
			for _, n := range found {
				keys = append(keys, n.key)
			}
			found, err = ownerKeysWithoutGroup(ctx, conn, space, keys)
		}
	}
	slices.SortFunc(found, func(a, b ownerKey) int { return strings.Compare(a.group, b.group) })
	return slices.Compact(found), err
}

// ownerPattern matches the owner keys of all partitions; what it matches besides is told
// apart by its name.
func ownerPattern(space keyspace.Space) string {
	before, after, _ := strings.Cut(space.Partition(0).Owner("*"), "{0}")
	escaped := strings.NewReplacer(`\`, `\\`, `*`, `\*`, `?`, `\?`, `[`, `\[`, `]`, `\]`).Replace(before)
	return escaped + "{*}" + after
}

// ownerKeysWithoutGroup are those of some owner keys whose groups do not exist.
func ownerKeysWithoutGroup(
	ctx context.Context, conn *redisx.Conn, space keyspace.Space, keys []string,
) ([]ownerKey, error) {
	r := reader{cmd: conn.Cmd}
	var all []ownerKey
	for page := range slices.Chunk(keys, pageSize) {
		tenants := make([]*redis.StringCmd, len(page))
		if err := r.pipeline(ctx, func(p redis.Pipeliner) {
			for i, key := range page {
				tenants[i] = p.Get(ctx, key)
			}
		}); err != nil {
			return nil, err
		}
		var keysRead []ownerKey
		for i, key := range page {
			group := key[strings.LastIndexByte(key, ':')+1:]
			if tenants[i].Err() == nil && space.OfGroup(group).Owner(group) == key {
				keysRead = append(keysRead, ownerKey{key, group, tenants[i].Val()})
			}
		}
		states := make([]*redis.StringCmd, len(keysRead))
		if err := r.pipeline(ctx, func(p redis.Pipeliner) {
			for i, n := range keysRead {
				states[i] = p.HGet(ctx, space.OfTenant(n.tenant).Group(n.group), "status")
			}
		}); err != nil {
			return nil, err
		}
		for i, n := range keysRead {
			if errors.Is(states[i].Err(), redis.Nil) {
				all = append(all, n)
			}
		}
	}
	return all, nil
}
