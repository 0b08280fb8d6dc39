package audit

import (
	"context"
	"fmt"
	"maps"
	"slices"
	"strings"

	"github.com/redis/go-redis/v9"

	"github.com/bulkaction/bulkaction/internal/audit/read"
)

// typeTotals are the numbers of waiting and non-ready jobs by type, as the recounts of all tenants
// add up.
type typeTotals struct {
	waiting, nonReady map[string]int64
	fingerprints      map[string]uint64 // by tenant, of the recounts that were added
}

// checkCounters compares the counters of all tenants and types with recounts. The counters of types
// are judged only if nothing has moved between two recounts of all tenants: the types were read
// between them.
func (ps *pass) checkCounters(ctx context.Context) error {
	openBefore, err := ps.openGroupsNow(ctx)
	if err != nil {
		return err
	}
	if err := ps.addNewGroups(ctx); err != nil {
		return err
	}
	newestBefore, err := ps.newestReady(ctx)
	if err != nil {
		return err
	}
	sum := typeTotals{waiting: map[string]int64{}, nonReady: map[string]int64{}, fingerprints: map[string]uint64{}}
	if err := ps.recountTenants(ctx, slices.Sorted(maps.Keys(ps.tenants)), func(t *countedTenant, r tenantRecount) {
		ps.checkTenantCounters(t.name, r)
		sum.add(t, r)
	}); err != nil {
		return err
	}
	types := slices.Sorted(maps.Keys(ps.types))
	have, err := ps.readTypeCounters(ctx, types)
	if err != nil {
		return err
	}
	// If a second recount is the same, the first one was still true when the counters of types were
	// read.
	unchanged := true
	if err := ps.recountTenants(ctx, slices.Sorted(maps.Keys(sum.fingerprints)), func(t *countedTenant,
		r tenantRecount) {
		unchanged = unchanged && r.fingerprint == sum.fingerprints[t.name]
	}); err != nil {
		return err
	}
	newestAfter, err := ps.newestReady(ctx)
	if err != nil {
		return err
	}
	openAfter, err := ps.openGroupsNow(ctx)
	if err != nil || !unchanged || newestAfter != newestBefore || openAfter != openBefore {
		return err
	}
	for i, typ := range types {
		ps.checkTypeCounter(typ, "waiting", have[i][0], sum.waiting[typ])
		ps.checkTypeCounter(typ, "non_ready", have[i][1], sum.nonReady[typ])
	}
	return nil
}

// add adds a tenant's recount to the totals. It leaves out a tenant without open groups and
// non-ready jobs.
func (sum *typeTotals) add(t *countedTenant, r tenantRecount) {
	if len(t.openGroups) == 0 && len(r.nonReady) == 0 {
		return
	}
	sum.fingerprints[t.name] = r.fingerprint
	for typ, n := range r.waiting {
		sum.waiting[typ] += n
	}
	for typ, n := range r.nonReady {
		sum.nonReady[typ] += n
	}
}

// checkTypeCounter reports a type's counter that differs from the recount, unless the type is
// uncertain.
func (ps *pass) checkTypeCounter(typ, counter string, stored, counted int64) {
	if stored != counted && !ps.uncertainTypes[typ] {
		f := finding{LawCounters, "", noOrdinal, fmt.Sprint(typ, counter, stored-counted)}
		ps.found.add(f, "type %s counts %d jobs as %s, but %d are", typ, stored, counter, counted)
		ps.addWrong(f, WrongCounter{Of: typ, Name: counter, Have: stored, Want: counted})
	}
}

// checkTenantCounters reports a tenant's counters that differ from the recount, and a tenant that
// is wrongly in the set of active tenants or missing in it. It reports nothing if the recount is
// not consistent or the tenant is uncertain.
func (ps *pass) checkTenantCounters(name string, r tenantRecount) {
	if !r.consistent || ps.uncertainTenants[name] {
		return
	}
	for i, counter := range counterNames {
		if r.stored[i] != r.counted[i] {
			f := finding{LawCounters, "", noOrdinal, fmt.Sprint(name, counter, r.stored[i]-r.counted[i])}
			ps.found.add(f, "tenant %s counts %d jobs as %s, but %d are", name, r.stored[i], counter, r.counted[i])
			ps.addWrong(f, WrongCounter{
				Tenant: true,
				Of:     name,
				Name:   counter,
				Have:   r.stored[i],
				Want:   r.counted[i],
			})
		}
	}
	if active := r.stored[1] > 0 && !r.paused; active != r.inActiveSet {
		f := finding{LawCounters, "", noOrdinal, fmt.Sprint(name, "set", active)}
		ps.found.add(f, "tenant %s has %d active jobs, but its being in the active set is %t", name, r.stored[1],
			r.inActiveSet)
		ps.addWrong(f, WrongCounter{
			Tenant: true,
			Of:     name,
			Name:   counterNames[1],
			Have:   r.stored[1],
			Want:   r.stored[1],
		})
	}
}

// addNewGroups adds the tenants and types of groups that were created since this pass began.
func (ps *pass) addNewGroups(ctx context.Context) error {
	return ps.ReadByScore(ctx, ps.p.Open(), func(ids []string) error {
		for page := range slices.Chunk(ids, read.PageSize) {
			cmds := make([]*redis.SliceCmd, len(page))
			err := ps.Pipeline(ctx, func(p redis.Pipeliner) {
				for i, id := range page {
					cmds[i] = p.HMGet(ctx, ps.p.Group(id), "tenant", "types")
				}
			})
			if err != nil {
				return err
			}
			for _, c := range cmds {
				if tenant := read.Text(c.Val()[0]); tenant != "" {
					ps.tenants[tenant] = true
				}
				for _, typ := range read.SplitTypes(read.Text(c.Val()[1])) {
					ps.types[typ] = true
				}
			}
		}
		return nil
	})
}

// openGroupsNow returns a text that changes whenever a group is created or ends.
func (ps *pass) openGroupsNow(ctx context.Context) (string, error) {
	var card *redis.IntCmd
	var newest *redis.ZSliceCmd
	err := ps.Transaction(ctx, func(p redis.Pipeliner) {
		card, newest = p.ZCard(ctx, ps.p.Open()), p.ZRevRangeWithScores(ctx, ps.p.Open(), 0, 0)
	})
	return fmt.Sprint(card.Val(), newest.Val()), err
}

// newestReady returns a text that changes whenever a job becomes ready: the id of the newest entry
// of each ready stream. Counters alone don't show a job that was taken back and made ready again.
func (ps *pass) newestReady(ctx context.Context) (string, error) {
	var ids strings.Builder
	for page := range slices.Chunk(slices.Sorted(maps.Keys(ps.types)), read.PageSize/5) {
		newest := make([]*redis.XMessageSliceCmd, len(page))
		err := ps.Pipeline(ctx, func(p redis.Pipeliner) {
			for i, typ := range page {
				newest[i] = p.XRevRangeN(ctx, ps.p.Ready(typ), "+", "-", 1)
			}
		})
		if err != nil {
			return "", err
		}
		for i, c := range newest {
			for _, e := range c.Val() {
				ids.WriteString(page[i] + " " + e.ID + "\n")
			}
		}
	}
	return ids.String(), nil
}

// readTypeCounters returns the counters waiting and non-ready of each of these types.
func (ps *pass) readTypeCounters(ctx context.Context, types []string) ([][2]int64, error) {
	var all [][2]int64
	for page := range slices.Chunk(types, read.PageSize) {
		cmds := make([]*redis.SliceCmd, len(page))
		err := ps.Pipeline(ctx, func(p redis.Pipeliner) {
			for i, typ := range page {
				cmds[i] = p.HMGet(ctx, ps.p.Load(typ), "waiting", "non_ready")
			}
		})
		if err != nil {
			return nil, err
		}
		for _, c := range cmds {
			all = append(all, [2]int64{read.Int(c.Val()[0]), read.Int(c.Val()[1])})
		}
	}
	return all, nil
}
