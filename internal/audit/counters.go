package audit

import (
	"bufio"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"maps"
	"slices"
	"strings"
	"time"

	"github.com/redis/go-redis/v9"

	"github.com/bulkaction/bulkaction/internal/audit/read"
	"github.com/bulkaction/bulkaction/internal/jobs/ledger"
	"github.com/bulkaction/bulkaction/internal/redisx"
	"github.com/bulkaction/bulkaction/internal/redisx/keyspace"
)

// counters is the part of a pass that compares the counters of tenants and types with recounts.
type counters struct{ *scope }

// check compares the counters of all tenants and types with recounts. It reads the counters of
// types between two recounts of the tenants with open groups or non-ready jobs. It judges them only
// if the two are equal, no group was created or has ended, and no job became ready in between.
func (c counters) check(ctx context.Context) error {
	openBefore, err := c.openGroupsNow(ctx)
	if err != nil {
		return err
	}
	if err := c.ReadByScore(ctx, c.p.Open(), func(ids []string) error { return c.addNewGroups(ctx, ids) }); err != nil {
		return err
	}
	if err := c.checkPlaces(ctx); err != nil {
		return err
	}
	newestBefore, err := c.newestReady(ctx)
	if err != nil {
		return err
	}
	waiting, nonReady := map[string]int64{}, map[string]int64{} // by type
	fingerprints := map[string]uint64{}                         // of the recounts, by tenant
	if err := c.recount(ctx, slices.Sorted(maps.Keys(c.tenants)), func(t *countedTenant, r tenantRecount) {
		c.checkTenant(t.name, r)
		if len(t.openGroups) > 0 || len(r.nonReady) > 0 {
			fingerprints[t.name] = r.fingerprint
		}
		for typ, n := range r.waiting {
			waiting[typ] += n
		}
		for typ, n := range r.nonReady {
			nonReady[typ] += n
		}
	}); err != nil {
		return err
	}
	types := slices.Sorted(maps.Keys(c.types))
	stored, err := read.Ask(ctx, c.Pipeline, read.PageSize, types, func(p redis.Pipeliner, typ string) *redis.SliceCmd {
		return p.HMGet(ctx, c.p.Load(typ), "waiting", "non_ready")
	})
	if err != nil {
		return err
	}
	// If this second recount equals the first, the first was still true when the counters of types
	// were read in between.
	unchanged := true
	if err := c.recount(ctx, slices.Sorted(maps.Keys(fingerprints)), func(t *countedTenant, r tenantRecount) {
		unchanged = unchanged && r.fingerprint == fingerprints[t.name]
	}); err != nil {
		return err
	}
	newestAfter, err := c.newestReady(ctx)
	if err != nil {
		return err
	}
	openAfter, err := c.openGroupsNow(ctx)
	if err != nil || !unchanged || newestAfter != newestBefore || openAfter != openBefore {
		return err
	}
	for i, typ := range types {
		v := stored[i].Val()
		c.checkType(typ, "waiting", read.Int(v[0]), waiting[typ])
		c.checkType(typ, "non_ready", read.Int(v[1]), nonReady[typ])
	}
	return nil
}

// report adds a finding about a wrong counter, with its repair. The key distinguishes it from other
// findings about counters.
func (c counters) report(counter ledger.Counter, key, format string, args ...any) {
	c.found.add(newFinding(LawCounters, "", "", key, format, args...).repairedBy(
		Repair{Kind: RepairCounter, Counter: counter}))
}

// checkType reports a type's counter that differs from the recount, unless the type is uncertain.
func (c counters) checkType(typ, counter string, stored, counted int64) {
	if stored != counted && !c.found.uncertainTypes[typ] {
		c.report(ledger.Counter{Of: typ, Name: counter, Have: stored, Want: counted},
			fmt.Sprint(typ, counter, stored-counted),
			"type %s counts %d jobs as %s, but %d are", typ, stored, counter, counted)
	}
}

// checkTenant reports a tenant's counters that differ from the recount, and a tenant that is
// wrongly in the set of active tenants or missing in it. It reports nothing if the recount is not
// consistent or the tenant is uncertain.
func (c counters) checkTenant(name string, r tenantRecount) {
	if !r.consistent || c.found.uncertainTenants[name] {
		return
	}
	for i, counter := range counterNames {
		if stored, counted := r.stored[i], r.counted[i]; stored != counted {
			c.report(ledger.Counter{Tenant: true, Of: name, Name: counter, Have: stored, Want: counted},
				fmt.Sprint(name, counter, stored-counted),
				"tenant %s counts %d jobs as %s, but %d are", name, stored, counter, counted)
		}
	}
	for set, jobs := range []string{"non-ready", "suspended"} {
		if r.unindexed[set] {
			c.found.add(newFinding(LawRegistry, "", name, name+" "+jobs,
				"tenant %s has %s jobs, but is missing on the list of such tenants: they stay there", name, jobs).repairedBy(
				Repair{Kind: RepairGroup}))
		}
	}
	stored := r.stored[active]
	if isActive := stored > 0 && !r.paused; isActive != r.inActiveSet {
		c.report(ledger.Counter{Tenant: true, Of: name, Name: counterNames[active], Have: stored, Want: stored},
			fmt.Sprint(name, "set", isActive),
			"tenant %s has %d active jobs, but its being in the active set is %t", name, stored, r.inActiveSet)
	}
}

// maxPlaceEntries is the most entries of ready streams that are read in one transaction.
const maxPlaceEntries = 10_000

// checkPlaces compares the count of jobs in flight of each tenant with a bound with the entries of its
// jobs in the ready streams. It reads both in one transaction; if there are too many entries, it judges
// nothing.
func (c counters) checkPlaces(ctx context.Context) error {
	bounded, entries, err := c.bounded(ctx)
	if err != nil || len(bounded) == 0 || entries > maxPlaceEntries {
		return err
	}
	var stored []*redis.SliceCmd
	var streams []*redis.XMessageSliceCmd
	if err := c.Transaction(ctx, func(p redis.Pipeliner) {
		stored, streams = nil, nil
		for _, name := range bounded {
			stored = append(stored, p.HMGet(ctx, c.p.Tenant(name), "in_flight", "places"))
		}
		for typ := range c.types {
			streams = append(streams, p.XRangeN(ctx, c.p.Ready(typ), "-", "+", maxPlaceEntries))
		}
	}); err != nil {
		return err
	}
	ofGroup, unsure, bytes := map[string]int64{}, map[string]bool{}, 0
	for _, stream := range streams {
		for _, e := range stream.Val() {
			blob := ledger.MessageBlob(e.Values)
			bytes += len(blob)
			if j, err := ledger.ParseJob(blob); err == nil {
				ofGroup[j.Group]++
				unsure[j.Group] = unsure[j.Group] || c.found.uncertainTypes[j.Type]
			}
		}
	}
	groups := slices.Sorted(maps.Keys(ofGroup))
	owners, err := read.Ask(ctx, c.Pipeline, read.PageSize, groups, func(p redis.Pipeliner, group string) *redis.StringCmd {
		return p.HGet(ctx, c.p.Group(group), "tenant")
	})
	counted, uncertain := map[string]int64{}, map[string]bool{} // by tenant; entries of groups that are gone are nobody's
	for i, owner := range owners {
		counted[owner.Val()] += ofGroup[groups[i]]
		uncertain[owner.Val()] = uncertain[owner.Val()] || unsure[groups[i]]
	}
	for i, name := range bounded {
		v, want := stored[i].Val(), counted[name]
		if have := read.Int(v[1]); err == nil && v[0] != nil && have != want && !uncertain[name] {
			c.found.add(newFinding(LawPlaces, "", "", fmt.Sprint(name, " ", have-want),
				"tenant %s counts %d jobs in flight, but its jobs have %d entries in the ready streams", name, have, want).repairedBy(
				Repair{Kind: RepairCounter, Counter: ledger.Counter{Tenant: true, Of: name, Name: "places", Have: have, Want: want}}))
		}
	}
	return errors.Join(err, c.Pacer.Wait(ctx, int(entries), bytes))
}

// bounded returns the tenants with a bound of jobs in flight that are not uncertain, and how many
// entries the ready streams have.
func (c counters) bounded(ctx context.Context) (tenants []string, entries int64, err error) {
	names, types := slices.Sorted(maps.Keys(c.tenants)), slices.Sorted(maps.Keys(c.types))
	bounds, err := read.Ask(ctx, c.Pipeline, read.PageSize, names, func(p redis.Pipeliner, name string) *redis.BoolCmd {
		return p.HExists(ctx, c.p.Tenant(name), "in_flight")
	})
	for i, bound := range bounds {
		if bound.Val() && !c.found.uncertainTenants[names[i]] {
			tenants = append(tenants, names[i])
		}
	}
	if err != nil || len(tenants) == 0 {
		return nil, 0, err
	}
	lengths, err := read.Ask(ctx, c.Pipeline, read.PageSize, types, func(p redis.Pipeliner, typ string) *redis.IntCmd {
		return p.XLen(ctx, c.p.Ready(typ))
	})
	for _, n := range lengths {
		entries += n.Val()
	}
	return tenants, entries, err
}

// addNewGroups adds the tenants and types of the groups with these ids to those that this pass
// knows. Some of the groups may be newer than the pass.
func (c counters) addNewGroups(ctx context.Context, ids []string) error {
	headers, err := c.Headers(ctx, c.p, ids)
	for _, h := range headers {
		if h.Tenant != "" {
			c.tenants[h.Tenant] = true
		}
		for _, typ := range h.TypeList() {
			c.types[typ] = true
		}
	}
	return err
}

// openGroupsNow returns a text that changes whenever a group is created or ends.
func (c counters) openGroupsNow(ctx context.Context) (string, error) {
	var card *redis.IntCmd
	var newest *redis.ZSliceCmd
	err := c.Transaction(ctx, func(p redis.Pipeliner) {
		card, newest = p.ZCard(ctx, c.p.Open()), p.ZRevRangeWithScores(ctx, c.p.Open(), 0, 0)
	})
	return fmt.Sprint(card.Val(), newest.Val()), err
}

// newestReady returns a text that changes whenever a job becomes ready: the id of the newest entry
// of each ready stream. The counters may be equal before and after a job that left a ready stream
// and became ready again; the entry ids are not.
func (c counters) newestReady(ctx context.Context) (string, error) {
	types := slices.Sorted(maps.Keys(c.types))
	newest, err := read.Ask(ctx, c.Pipeline, read.PageSize/5, types,
		func(p redis.Pipeliner, typ string) *redis.XMessageSliceCmd {
			return p.XRevRangeN(ctx, c.p.Ready(typ), "+", "-", 1)
		})
	var ids strings.Builder
	for i, reply := range newest {
		for _, e := range reply.Val() {
			ids.WriteString(types[i] + " " + e.ID + "\n")
		}
	}
	return ids.String(), err
}

// Receipts holds, by group, how many jobs its producer was told were accepted.
type Receipts map[string]int64

// ReadReceipts reads receipts, one JSON object per line: {"group": …, "accepted": n}. If a group
// has several, the largest number counts. Empty lines are skipped.
func ReadReceipts(from io.Reader) (Receipts, error) {
	all := Receipts{}
	lines, n := bufio.NewScanner(from), 1
	for ; lines.Scan(); n++ {
		if len(lines.Bytes()) == 0 {
			continue
		}
		var r struct {
			Group    string
			Accepted *int64
		}
		if err := json.Unmarshal(lines.Bytes(), &r); err != nil || r.Group == "" || r.Accepted == nil ||
			*r.Accepted < 0 {
			return nil, fmt.Errorf(`line %d: {"group": "…", "accepted": n} is expected`, n)
		}
		all[r.Group] = max(all[r.Group], *r.Accepted)
	}
	switch err := lines.Err(); {
	case errors.Is(err, bufio.ErrTooLong):
		return nil, fmt.Errorf("line %d: it is longer than %d bytes, no receipt is", n, bufio.MaxScanTokenSize)
	case err != nil:
		return nil, err
	}
	return all, nil
}

// Check adds a violation of the law receipt for each group that does not exist or holds fewer jobs
// than its receipt says. Redis has then lost them, by a cut of its append-only file or because a
// lagging replica became master. A group that has expired in between looks the same.
func (all Receipts) Check(ctx context.Context, conn *redisx.Conn, space keyspace.Space, report *Report) error {
	r := read.Reader{Cmd: conn.Cmd}
	var keys []string
	for _, id := range slices.Sorted(maps.Keys(all)) {
		keys = append(keys, space.OfGroup(id).Owner(id))
	}
	owners, err := readOwnerKeys(ctx, r, keys)
	if err != nil {
		return fmt.Errorf("check receipts: %w", err)
	}
	held, err := readGroupField(ctx, r, space, owners, "accepted")
	if err != nil {
		return fmt.Errorf("check receipts: %w", err)
	}
	var found []Violation
	for i, k := range owners {
		v := Violation{Law: LawReceipt, Partition: space.OfGroup(k.group).Index(), Group: k.group}
		told, have := all[k.group], read.Int(held[i].Val())
		switch {
		case !k.exists:
			v.Detail = fmt.Sprintf("%d jobs are missing: there is no such group", told)
		case have < told:
			v.Partition = space.OfTenant(k.tenant).Index()
			v.Detail = fmt.Sprintf("%d jobs are missing: it holds %d of the %d that its producer was told",
				told-have, have, told)
		default:
			continue
		}
		found = append(found, v)
	}
	report.Add(found...)
	return nil
}

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
	var found []ownerKey
	err := read.ScanKeys(ctx, conn, ownerPattern(space), func(keys []string) error {
		some, err := withoutGroup(ctx, conn, space, keys)
		found = append(found, some...)
		return err
	})
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
