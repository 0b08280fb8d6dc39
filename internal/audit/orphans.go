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

// orphanWait is how long a name must have been without its group: one that is being created gets it
// within moments.
const orphanWait = 500 * time.Millisecond

// name is an owner key: who owns which group.
type name struct{ key, group, tenant string }

// Orphans adds a violation of the law registry for each owner key whose group does not exist. A
// crash between forgetting a group and its name leaves one, and so does a shard that lost the group
// while another kept the name; the id can't be used by other tenants until the key is gone. It
// looks at the names of all keys in Redis.
func Orphans(ctx context.Context, conn *redisx.Conn, space keyspace.Space, report *Report) error {
	names, err := orphans(ctx, conn, space)
	if err != nil {
		return fmt.Errorf("look for names without a group: %w", err)
	}
	for _, n := range names {
		report.Violations = append(report.Violations, n.violation(space))
	}
	report.sort()
	return nil
}

func (n name) violation(space keyspace.Space) Violation {
	return Violation{
		Law: Registry, Partition: space.OfGroup(n.group).Index(), Group: n.group,
		Detail: fmt.Sprintf("its owner key says tenant %s, but there is no such group", n.tenant),
	}
}

// RepairOrphans drops such names.
func RepairOrphans(ctx context.Context, conn *redisx.Conn, space keyspace.Space, tell func(RepairResult)) error {
	names, err := orphans(ctx, conn, space)
	if err != nil {
		return fmt.Errorf("look for names without a group: %w", err)
	}
	for _, n := range names {
		if err := conn.Cmd.Del(ctx, n.key).Err(); err != nil {
			return fmt.Errorf("drop the name of group %s: %w", n.group, err)
		}
	}
	// Who creates a group just now has seen its name: that comes back when the group is there.
	if len(names) > 0 && redisx.Sleep(ctx, 2*orphanWait) != nil {
		return ctx.Err()
	}
	for _, n := range names {
		is, err := n.exists(ctx, conn, space)
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

func (n name) exists(ctx context.Context, conn *redisx.Conn, space keyspace.Space) (bool, error) {
	_, err := conn.Cmd.HGet(ctx, space.OfTenant(n.tenant).Group(n.group), "status").Result()
	if errors.Is(err, redis.Nil) {
		return false, nil
	}
	return err == nil, err
}

// orphans scans every shard, and asks some times about the names whose groups are not there.
func orphans(ctx context.Context, conn *redisx.Conn, space keyspace.Space) ([]name, error) {
	var mu sync.Mutex
	var found []name
	scan := func(ctx context.Context, shard redis.UniversalClient) error {
		for cursor := uint64(0); ; {
			keys, next, err := shard.Scan(ctx, cursor, ownerPattern(space), pageSize).Result()
			if err != nil {
				return err
			}
			some, err := nameless(ctx, conn, space, keys)
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
		if err = redisx.Sleep(ctx, orphanWait); err == nil {
			var keys []string
			for _, n := range found {
				keys = append(keys, n.key)
			}
			found, err = nameless(ctx, conn, space, keys)
		}
	}
	slices.SortFunc(found, func(a, b name) int { return strings.Compare(a.group, b.group) })
	return slices.Compact(found), err
}

// ownerPattern matches the owner keys of all partitions; what it matches besides is told
// apart by its name.
func ownerPattern(space keyspace.Space) string {
	before, after, _ := strings.Cut(space.Partition(0).Owner("*"), "{0}")
	escaped := strings.NewReplacer(`\`, `\\`, `*`, `\*`, `?`, `\?`, `[`, `\[`, `]`, `\]`).Replace(before)
	return escaped + "{*}" + after
}

// nameless are those of some owner keys whose groups do not exist.
func nameless(ctx context.Context, conn *redisx.Conn, space keyspace.Space, keys []string) ([]name, error) {
	d := db{cmd: conn.Cmd}
	var all []name
	for page := range slices.Chunk(keys, pageSize) {
		tenants := make([]*redis.StringCmd, len(page))
		if err := d.inTurn(ctx, func(p redis.Pipeliner) {
			for i, key := range page {
				tenants[i] = p.Get(ctx, key)
			}
		}); err != nil {
			return nil, err
		}
		var names []name
		for i, key := range page {
			group := key[strings.LastIndexByte(key, ':')+1:]
			if tenants[i].Err() == nil && space.OfGroup(group).Owner(group) == key {
				names = append(names, name{key, group, tenants[i].Val()})
			}
		}
		states := make([]*redis.StringCmd, len(names))
		if err := d.inTurn(ctx, func(p redis.Pipeliner) {
			for i, n := range names {
				states[i] = p.HGet(ctx, space.OfTenant(n.tenant).Group(n.group), "status")
			}
		}); err != nil {
			return nil, err
		}
		for i, n := range names {
			if errors.Is(states[i].Err(), redis.Nil) {
				all = append(all, n)
			}
		}
	}
	return all, nil
}
