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

	"github.com/bulkaction/bulkaction/internal/audit/read"
	"github.com/bulkaction/bulkaction/internal/redisx"
	"github.com/bulkaction/bulkaction/internal/redisx/keyspace"
)

// orphanInterval is the pause between two checks of an owner key without a group. A process writes
// a group's owner key first and the group much less than this time later.
const orphanInterval = 500 * time.Millisecond

// ownerKey is an owner key of a group: the Redis key, the group in its name, and the tenant that is
// its value.
type ownerKey struct {
	key, group, tenant string
	exists             bool // false for a key that is not there
}

// CheckOwnerKeys adds to the report a violation of the law registry for each owner key whose group
// does not exist. Such a key stays if a process crashes between deleting a group and its owner key,
// or if a shard loses the group while another shard has the key. Other tenants can't use the
// group's id until the key is deleted. The check scans the names of all keys in Redis.
func CheckOwnerKeys(ctx context.Context, conn *redisx.Conn, space keyspace.Space, report *Report) error {
	orphans, err := FindOwnerKeysWithoutGroup(ctx, conn, space)
	if err != nil {
		return fmt.Errorf("look for owner keys without a group: %w", err)
	}
	found := make([]Violation, len(orphans))
	for i, f := range orphans {
		found[i] = f.Violation
	}
	report.Add(found...)
	return nil
}

// FindOwnerKeysWithoutGroup scans the keys of every shard. It returns a finding for each owner key
// whose group did not exist in several checks, ordered by group. Package repair deletes these keys.
func FindOwnerKeysWithoutGroup(ctx context.Context, conn *redisx.Conn, space keyspace.Space) ([]Finding, error) {
	var mu sync.Mutex
	var found []ownerKey
	scan := func(ctx context.Context, shard redis.UniversalClient) error {
		for cursor := uint64(0); ; {
			keys, next, err := shard.Scan(ctx, cursor, ownerPattern(space), read.PageSize).Result()
			if err != nil {
				return err
			}
			some, err := withoutGroup(ctx, conn, space, keys)
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
			for _, k := range found {
				keys = append(keys, k.key)
			}
			found, err = withoutGroup(ctx, conn, space, keys)
		}
	}
	slices.SortFunc(found, func(a, b ownerKey) int { return strings.Compare(a.group, b.group) })
	var findings []Finding
	for _, k := range slices.Compact(found) {
		f := newFinding(LawRegistry, k.group, k.tenant, "",
			"its owner key says tenant %s, but there is no such group", k.tenant)
		f.Partition = space.OfGroup(k.group).Index()
		findings = append(findings, f)
	}
	return findings, err
}

// ownerPattern returns a SCAN pattern that matches the owner keys of all partitions. It may match
// other keys too.
func ownerPattern(space keyspace.Space) string {
	return read.AnyPartition(space.Partition(0).Owner("*"))
}

// withoutGroup filters keys: it returns the owner keys among them whose groups do not exist.
func withoutGroup(
	ctx context.Context, conn *redisx.Conn, space keyspace.Space, keys []string,
) ([]ownerKey, error) {
	r := read.Reader{Cmd: conn.Cmd}
	found, err := readOwnerKeys(ctx, r, keys)
	if err != nil {
		return nil, err
	}
	found = slices.DeleteFunc(found, func(k ownerKey) bool {
		return !k.exists || space.OfGroup(k.group).Owner(k.group) != k.key
	})
	statuses, err := readGroupField(ctx, r, space, found, "status")
	var orphans []ownerKey
	for i, status := range statuses {
		if errors.Is(status.Err(), redis.Nil) {
			orphans = append(orphans, found[i])
		}
	}
	return orphans, err
}

// readOwnerKeys reads the tenants in these keys, which may be owner keys. The part after the last
// colon of a key's name is taken as the group.
func readOwnerKeys(ctx context.Context, r read.Reader, keys []string) ([]ownerKey, error) {
	tenants, err := read.Ask(ctx, r.Pipeline, read.PageSize, keys,
		func(p redis.Pipeliner, key string) *redis.StringCmd { return p.Get(ctx, key) })
	all := make([]ownerKey, len(tenants))
	for i, tenant := range tenants {
		group := keys[i][strings.LastIndexByte(keys[i], ':')+1:]
		all[i] = ownerKey{key: keys[i], group: group, tenant: tenant.Val(), exists: tenant.Err() == nil}
	}
	return all, err
}

// readGroupField reads one field of the hash of each group that an owner key names.
func readGroupField(
	ctx context.Context, r read.Reader, space keyspace.Space, keys []ownerKey, field string,
) ([]*redis.StringCmd, error) {
	return read.Ask(ctx, r.Pipeline, read.PageSize, keys, func(p redis.Pipeliner, k ownerKey) *redis.StringCmd {
		return p.HGet(ctx, space.OfTenant(k.tenant).Group(k.group), field)
	})
}
