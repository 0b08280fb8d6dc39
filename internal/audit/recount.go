package audit

import (
	"context"
	"errors"
	"fmt"
	"hash/maphash"
	"slices"
	"strings"

	"github.com/redis/go-redis/v9"

	"github.com/bulkaction/bulkaction/internal/audit/read"
	"github.com/bulkaction/bulkaction/internal/jobs/ledger"
)

// countedTenant is a tenant whose jobs are recounted: its name and its open groups.
type countedTenant struct {
	name          string
	newestGroup   string // the newest of all its groups when the open ones were listed; "" if it had none
	openGroups    []read.Header
	nonReadyCount int64 // about how many non-ready and suspended jobs it has
}

// cost returns how many commands read the tenant and its groups, and about how many bytes its
// non-ready jobs take. The commands are those that queries adds, and one for each of the two
// non-ready sets.
func (t *countedTenant) cost() (commands int, bytes int64) {
	commands = 9
	for _, g := range t.openGroups {
		commands += read.Unfinished.Commands(g)
	}
	return commands, t.nonReadyCount * (read.PageBytes / read.PageSize)
}

// tenantRecount holds a tenant's counters as stored, and as recounted from its jobs.
type tenantRecount struct {
	stored, counted   [3]int64         // the counters as stored, and as recounted; in the order of counterNames
	inActiveSet       bool             // whether the set of active tenants holds the tenant
	paused            bool             // a paused tenant is not active
	unindexed         [2]bool          // it is missing on the list of tenants with non-ready, suspended jobs
	waiting, nonReady map[string]int64 // recounted jobs by type
	read              [2]int64         // how many non-ready and suspended jobs were recounted
	consistent        bool             // stored and counted belong to the same instant
	fingerprint       uint64           // of everything that was read
}

// counterNames lists the fields of a tenant's hash that are recounted, in the order of the indexes
// below.
var counterNames = [3]string{unfinished: "unfinished", active: "active", congested: "congested"}

// Indexes of counterNames.
const (
	unfinished = iota
	active
	congested
)

// recount recounts the jobs of these tenants and yields the result for each tenant.
func (c counters) recount(ctx context.Context, names []string, yield func(*countedTenant, tenantRecount)) error {
	for page := range slices.Chunk(names, read.PageSize/5) {
		tenants, err := c.listTenants(ctx, page)
		if err != nil {
			return err
		}
		for batch := range read.Batches(tenants, (*countedTenant).cost) {
			recount := c.recountSmall
			if commands, bytes := batch[0].cost(); commands > read.PageSize || bytes > read.PageBytes {
				recount = c.recountLarge
			}
			recounts, err := recount(ctx, batch)
			if err != nil {
				return err
			}
			for i, r := range recounts {
				yield(batch[i], r)
			}
		}
	}
	return nil
}

// recountSmall recounts the jobs of several small tenants in one transaction.
func (c counters) recountSmall(ctx context.Context, tenants []*countedTenant) ([]tenantRecount, error) {
	replies, err := read.Ask(ctx, c.Transaction, len(tenants), tenants,
		func(p redis.Pipeliner, t *countedTenant) *tenantReply {
			r := &tenantReply{countedTenant: t}
			for _, query := range c.queries(ctx, r) {
				query(p)
			}
			for i, at := range read.NonReadyOf(t.name) {
				r.nonReady[i] = p.ZRange(ctx, at.Key(c.p), 0, 2*read.PageSize)
			}
			return r
		})
	recounts := make([]tenantRecount, len(replies))
	for i, reply := range replies {
		r := reply.total()
		for set, blobs := range reply.nonReady {
			for _, blob := range blobs.Val() {
				r.addNonReady(set, blob)
			}
		}
		r.consistent = r.consistent && r.read == reply.lengths()
		recounts[i] = r
	}
	return recounts, err
}

// recountLarge recounts the jobs of tenants[0] alone, a tenant that is too large for one
// transaction. It reads the tenant twice; the recount is consistent if both readings are equal and
// no job became ready in between.
func (c counters) recountLarge(ctx context.Context, tenants []*countedTenant) ([]tenantRecount, error) {
	before, err := c.newestReady(ctx)
	if err != nil {
		return nil, err
	}
	first, err := c.readOnce(ctx, tenants[0])
	if err != nil {
		return nil, err
	}
	second, err := c.readOnce(ctx, tenants[0])
	if err != nil {
		return nil, err
	}
	after, err := c.newestReady(ctx)
	second.consistent = second.consistent && first.fingerprint == second.fingerprint && before == after
	return []tenantRecount{second}, err
}

// readOnce reads a tenant once, in several pages, and recounts its jobs.
func (c counters) readOnce(ctx context.Context, t *countedTenant) (tenantRecount, error) {
	reply := &tenantReply{countedTenant: t}
	_, err := read.Ask(ctx, c.Pipeline, read.PageSize/10, c.queries(ctx, reply),
		func(p redis.Pipeliner, query func(redis.Pipeliner)) struct{} {
			query(p)
			return struct{}{}
		})
	if err != nil {
		return tenantRecount{}, err
	}
	r := reply.total()
	for set, at := range read.NonReadyOf(t.name) {
		err := c.ScanMembers(ctx, at.Key(c.p), func(blob string) error {
			r.addNonReady(set, blob)
			return nil
		})
		if err != nil {
			return r, err
		}
	}
	// A scan may yield a job twice: then the number of jobs read differs from the length of the
	// set, and the recount is not consistent.
	r.consistent = r.consistent && r.read == reply.lengths()
	return r, nil
}

// tenantReply holds Redis's replies about a tenant and its open groups.
type tenantReply struct {
	*countedTenant
	counters    *redis.SliceCmd
	inActiveSet *redis.BoolCmd
	newest      *redis.StringSliceCmd
	lengths     func() [2]int64 // of its non-ready and suspended sets
	inNonReady  *redis.FloatCmd // whether the lists of tenants with such jobs have it
	inSuspended *redis.BoolCmd
	nonReady    [2]*redis.StringSliceCmd // the members of these sets, if they are few
	groups      []func() *read.Group
}

// queries returns functions that each add commands to a pipeline: the first reads the tenant, and
// each further one reads an open group. If a function is called again, the new replies replace the
// old ones.
func (c counters) queries(ctx context.Context, reply *tenantReply) []func(redis.Pipeliner) {
	reply.groups = make([]func() *read.Group, len(reply.openGroups))
	queries := []func(redis.Pipeliner){func(p redis.Pipeliner) {
		reply.counters = p.HMGet(ctx, c.p.Tenant(reply.name), append(counterNames[:], "paused")...)
		reply.inActiveSet = p.SIsMember(ctx, c.p.Active(), reply.name)
		reply.newest = p.ZRevRange(ctx, c.p.GroupsOf(reply.name), 0, 0)
		reply.lengths = read.QueueNonReady(ctx, p, c.p, reply.name)
		reply.inNonReady = p.ZScore(ctx, c.p.NonReady(), reply.name)
		reply.inSuspended = p.SIsMember(ctx, c.p.Suspended(), reply.name)
	}}
	for i, g := range reply.openGroups {
		queries = append(queries, func(p redis.Pipeliner) {
			reply.groups[i] = read.Unfinished.Queue(ctx, p, c.p, g)
		})
	}
	return queries
}

// total adds up the counts of the tenant's open groups, without the members of the non-ready and
// suspended sets. The result is consistent if the tenant has no newer group than those that were
// listed, and these still have the same types.
func (r *tenantReply) total() tenantRecount {
	total := tenantRecount{waiting: map[string]int64{}, nonReady: map[string]int64{}, inActiveSet: r.inActiveSet.Val()}
	v := r.counters.Val()
	for i := range total.stored {
		total.stored[i] = read.Int(v[i])
	}
	total.paused = read.Text(v[3]) != ""
	newest := strings.Join(r.newest.Val(), "")
	total.consistent = newest == r.newestGroup
	lengths := r.lengths()
	total.unindexed = [2]bool{
		lengths[0] > 0 && errors.Is(r.inNonReady.Err(), redis.Nil), lengths[1] > 0 && !r.inSuspended.Val(),
	}
	total.fingerprint = maphash.String(fingerprintSeed,
		fmt.Sprint(total.stored, total.inActiveSet, total.paused, total.unindexed, newest))
	for _, reply := range r.groups {
		g := reply()
		total.consistent = total.consistent && g.Fields["types"] == g.Types
		total.counted[unfinished] += g.Int("waiting") + g.Int("non_ready") + g.Int("ready") + g.Int("in_flight")
		total.fingerprint = 31*total.fingerprint + g.Fingerprint()
		for i, typ := range g.TypeList() {
			total.waiting[typ] += g.Queues[i]
		}
		if !g.Scheduled && g.Fields["paused"] == "" {
			total.counted[active] += g.Queued()
		}
	}
	return total
}

// fingerprintSeed is the random seed of the fingerprints' hash: they can be compared only within
// one process.
var fingerprintSeed = maphash.MakeSeed()

// addNonReady counts a member of one of the tenant's sets: set 0 is the non-ready jobs, set 1 the
// suspended ones. Suspended jobs count as non-ready by type, but neither as active nor as
// congested. An unreadable member is not counted: sharedLocations reports it.
func (r *tenantRecount) addNonReady(set int, blob string) {
	r.read[set]++
	// The order of the jobs doesn't matter, but the set does.
	r.fingerprint += (1 + 6*uint64(set)) * maphash.String(fingerprintSeed, blob)
	d, err := ledger.ParseJob(blob)
	if err != nil {
		return
	}
	r.nonReady[d.Type]++
	if set == 1 {
		return
	}
	switch d.Reason {
	case ledger.ReasonRate:
		r.counted[active]++
		r.counted[congested]++
	case ledger.ReasonScheduled, ledger.ReasonPaused, ledger.ReasonResource:
	default:
		r.counted[congested]++
	}
}

// groupsAtOnce is how many groups of a tenant are read together with those of other tenants.
const groupsAtOnce = 10

// listTenants returns the open groups of these tenants, and about how many non-ready and suspended
// jobs each tenant has.
func (c counters) listTenants(ctx context.Context, names []string) ([]*countedTenant, error) {
	type reply struct {
		newest, first *redis.StringSliceCmd
		lengths       func() [2]int64
	}
	replies, err := read.Ask(ctx, c.Pipeline, len(names), names, func(p redis.Pipeliner, name string) reply {
		key := c.p.GroupsOf(name)
		return reply{
			newest: p.ZRevRange(ctx, key, 0, 0), first: p.ZRange(ctx, key, 0, groupsAtOnce-1),
			lengths: read.QueueNonReady(ctx, p, c.p, name),
		}
	})
	if err != nil {
		return nil, err
	}
	type ownedGroup struct {
		*countedTenant
		group string
	}
	tenants, owned := make([]*countedTenant, len(names)), []ownedGroup(nil)
	for i, name := range names {
		lengths := replies[i].lengths()
		t := &countedTenant{
			name:          name,
			newestGroup:   strings.Join(replies[i].newest.Val(), ""),
			nonReadyCount: lengths[0] + lengths[1],
		}
		tenants[i] = t
		add := func(ids []string) error {
			for _, id := range ids {
				owned = append(owned, ownedGroup{t, id})
			}
			return nil
		}
		if ids := replies[i].first.Val(); len(ids) < groupsAtOnce {
			_ = add(ids) // add never fails
		} else if err := c.ReadByScore(ctx, c.p.GroupsOf(name), add); err != nil {
			return nil, err
		}
	}
	type openReply struct {
		open, listed *redis.FloatCmd
		hash         *redis.SliceCmd
	}
	open, err := read.Ask(ctx, c.Pipeline, read.PageSize/3, owned, func(p redis.Pipeliner, g ownedGroup) openReply {
		return openReply{
			p.ZScore(ctx, c.p.Open(), g.group), p.ZScore(ctx, c.p.Groups(), g.group),
			p.HMGet(ctx, c.p.Group(g.group), "types", "tenant", "repaired"),
		}
	})
	for i, g := range open {
		if g.hash.Err() != nil { // of another Redis type
			continue
		}
		t, id, v := owned[i].countedTenant, owned[i].group, g.hash.Val()
		relist := Repair{Kind: RepairGroup, Version: read.Int(v[2])}
		switch tenant := read.Text(v[1]); {
		case tenant == "":
			c.found.add(unknownOn(id, t.name, "groups of tenant "+t.name))
		case tenant != t.name:
			c.found.add(newFinding(LawRegistry, id, t.name, "on "+t.name,
				"it is on the list of groups of tenant %s, but it is a group of tenant %s", t.name, tenant).repairedBy(relist))
		case errors.Is(g.listed.Err(), redis.Nil):
			c.found.add(unlisted(id, tenant).repairedBy(relist))
			fallthrough
		default:
			if g.open.Err() == nil {
				t.openGroups = append(t.openGroups, read.Header{ID: id, Types: read.Text(v[0])})
			}
		}
	}
	return tenants, err
}
