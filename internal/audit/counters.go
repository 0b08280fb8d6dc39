package audit

import (
	"context"
	"fmt"
	"maps"
	"slices"
	"strings"

	"github.com/redis/go-redis/v9"

	"github.com/bulkaction/bulkaction/internal/audit/read"
	"github.com/bulkaction/bulkaction/internal/jobs/ledger"
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
	stored := r.stored[active]
	if isActive := stored > 0 && !r.paused; isActive != r.inActiveSet {
		c.report(ledger.Counter{Tenant: true, Of: name, Name: counterNames[active], Have: stored, Want: stored},
			fmt.Sprint(name, "set", isActive),
			"tenant %s has %d active jobs, but its being in the active set is %t", name, stored, r.inActiveSet)
	}
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
