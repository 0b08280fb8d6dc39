package audit

import (
	"context"
	"fmt"
	"hash/maphash"
	"slices"
	"strings"

	"github.com/redis/go-redis/v9"

	"github.com/bulkaction/bulkaction/internal/audit/read"
	"github.com/bulkaction/bulkaction/internal/ledger"
)

// countedTenant names a tenant and its open groups, whose jobs are to be recounted.
type countedTenant struct {
	name          string
	newestGroup   string // the newest of all its groups when the open ones were listed; "" if it had none
	openGroups    []groupHeader
	nonReadyCount int64 // about how many non-ready and suspended jobs it has
}

// commands returns how many commands read the tenant and its groups.
func (t *countedTenant) commands() int {
	n := 7
	for _, g := range t.openGroups {
		n += 2 + len(read.SplitTypes(g.types))
	}
	return n
}

// fitsInOneRead reports whether the tenant and all its non-ready jobs can be read in one
// transaction.
func (t *countedTenant) fitsInOneRead() bool {
	return t.commands() <= read.PageSize && t.nonReadyCount <= read.PageSize
}

// tenantRecount compares a tenant's counters with its jobs.
type tenantRecount struct {
	stored, counted   [3]int64         // the counters as stored, and as recounted; in the order of counterNames
	inActiveSet       bool             // whether the set of active tenants holds the tenant
	paused            bool             // a paused tenant is not active
	waiting, nonReady map[string]int64 // recounted jobs by type
	consistent        bool             // stored and counted belong to the same instant
	fingerprint       uint64           // of everything that was read
}

// counterNames lists the fields of a tenant's hash that are recounted.
var counterNames = [3]string{"unfinished", "active", "congested"}

// recountTenants recounts the jobs of these tenants and yields the result for each tenant.
func (ps *pass) recountTenants(ctx context.Context, names []string, yield func(*countedTenant, tenantRecount)) error {
	for page := range slices.Chunk(names, read.PageSize/5) {
		tenants, err := ps.listTenants(ctx, page)
		if err != nil {
			return err
		}
		for len(tenants) > 0 {
			n, commands, nonReady := 0, 0, int64(0)
			for n < len(tenants) && (n == 0 ||
				commands+tenants[n].commands() <= read.PageSize && nonReady+tenants[n].nonReadyCount <= read.PageSize) {
				commands += tenants[n].commands()
				nonReady += tenants[n].nonReadyCount
				n++
			}
			if err := ps.recountPage(ctx, tenants[:n], yield); err != nil {
				return err
			}
			tenants = tenants[n:]
		}
	}
	return nil
}

// recountPage recounts some small tenants in one transaction, or a single large tenant in two
// readings.
func (ps *pass) recountPage(
	ctx context.Context, tenants []*countedTenant, yield func(*countedTenant, tenantRecount),
) error {
	if t := tenants[0]; !t.fitsInOneRead() {
		r, err := ps.recountLarge(ctx, t)
		if err != nil {
			return err
		}
		yield(t, r)
		return nil
	}
	replies := make([]*tenantReply, len(tenants))
	err := ps.Transaction(ctx, func(p redis.Pipeliner) {
		for i, t := range tenants {
			replies[i] = &tenantReply{countedTenant: t}
			for _, query := range ps.queries(ctx, replies[i]) {
				query(p)
			}
			replies[i].nonReadyBlobs = p.ZRange(ctx, ps.p.NonReadyOf(t.name), 0, 2*read.PageSize)
			replies[i].suspendedBlobs = p.ZRange(ctx, ps.p.SuspendedOf(t.name), 0, 2*read.PageSize)
		}
	})
	if err != nil {
		return err
	}
	for i, t := range tenants {
		r := replies[i].total()
		r.addNonReady(replies[i].nonReadyBlobs.Val(), replies[i].nonReadyLength.Val())
		r.addSuspended(replies[i].suspendedBlobs.Val(), replies[i].suspendedLength.Val())
		yield(t, r)
	}
	return nil
}

// recountLarge recounts a tenant that is too large for one transaction. It reads the tenant twice;
// the recount is consistent if both readings are the same and no job became ready in between.
func (ps *pass) recountLarge(ctx context.Context, t *countedTenant) (tenantRecount, error) {
	before, err := ps.newestReady(ctx)
	if err != nil {
		return tenantRecount{}, err
	}
	first, err := ps.readOnce(ctx, t)
	if err != nil {
		return tenantRecount{}, err
	}
	second, err := ps.readOnce(ctx, t)
	if err != nil {
		return tenantRecount{}, err
	}
	after, err := ps.newestReady(ctx)
	second.consistent = second.consistent && first.fingerprint == second.fingerprint && before == after
	return second, err
}

// readOnce reads a tenant once, in several pages, and recounts its jobs.
func (ps *pass) readOnce(ctx context.Context, t *countedTenant) (tenantRecount, error) {
	reply := &tenantReply{countedTenant: t}
	for page := range slices.Chunk(ps.queries(ctx, reply), read.PageSize/10) {
		err := ps.Pipeline(ctx, func(p redis.Pipeliner) {
			for _, query := range page {
				query(p)
			}
		})
		if err != nil {
			return tenantRecount{}, err
		}
	}
	r, nonReady := reply.total(), int64(0)
	err := ps.ScanMembers(ctx, ps.p.NonReadyOf(t.name), func(page []string) error {
		nonReady += int64(len(page))
		r.addNonReady(page, int64(len(page)))
		return nil
	})
	if err != nil {
		return r, err
	}
	suspended := int64(0)
	err = ps.ScanMembers(ctx, ps.p.SuspendedOf(t.name), func(page []string) error {
		suspended += int64(len(page))
		r.addSuspended(page, int64(len(page)))
		return nil
	})
	// If a scan yields a job twice, the numbers differ and the recount is not consistent.
	r.consistent = r.consistent && nonReady == reply.nonReadyLength.Val() && suspended == reply.suspendedLength.Val()
	return r, err
}

// tenantReply holds Redis's replies about a tenant and its open groups.
type tenantReply struct {
	*countedTenant
	counters       *redis.SliceCmd
	inActiveSet    *redis.BoolCmd
	newest         *redis.StringSliceCmd
	nonReadyLength *redis.IntCmd
	nonReadyBlobs  *redis.StringSliceCmd
	// The tenant's suspended jobs.
	suspendedLength *redis.IntCmd
	suspendedBlobs  *redis.StringSliceCmd
	groups          []groupReply
}

// groupReply holds Redis's replies about an open group.
type groupReply struct {
	counts    *redis.SliceCmd
	scheduled *redis.FloatCmd // its time in the sorted set of groups that may not start yet
	queues    []*redis.IntCmd
}

// queries returns functions that add the commands that read a tenant: one for the tenant, and one
// for each open group. If they are called again, the new replies replace the old ones.
func (ps *pass) queries(ctx context.Context, reply *tenantReply) []func(redis.Pipeliner) {
	reply.groups = make([]groupReply, len(reply.openGroups))
	queries := []func(redis.Pipeliner){func(p redis.Pipeliner) {
		reply.counters = p.HMGet(ctx, ps.p.Tenant(reply.name), counterNames[0], counterNames[1], counterNames[2],
			"paused")
		reply.inActiveSet = p.SIsMember(ctx, ps.p.Active(), reply.name)
		reply.newest = p.ZRevRange(ctx, ps.p.GroupsOf(reply.name), 0, 0)
		reply.nonReadyLength = p.ZCard(ctx, ps.p.NonReadyOf(reply.name))
		reply.suspendedLength = p.ZCard(ctx, ps.p.SuspendedOf(reply.name))
	}}
	for i, g := range reply.openGroups {
		queries = append(queries, func(p redis.Pipeliner) {
			group := groupReply{
				counts: p.HMGet(ctx, ps.p.Group(g.id), "types", "waiting", "non_ready", "ready", "in_flight",
					"accepted", "failed", "at:created", "paused"),
				scheduled: p.ZScore(ctx, ps.p.Scheduled(), g.id),
			}
			for _, typ := range read.SplitTypes(g.types) {
				group.queues = append(group.queues, p.LLen(ctx, ps.p.Queue(g.id, typ)))
			}
			reply.groups[i] = group
		})
	}
	return queries
}

// total adds up what the tenant's groups hold, without the non-ready and suspended jobs. It is
// consistent if the groups are still those that were listed.
func (r *tenantReply) total() tenantRecount {
	total := tenantRecount{waiting: map[string]int64{}, nonReady: map[string]int64{}, inActiveSet: r.inActiveSet.Val()}
	v := r.counters.Val()
	for i := range total.stored {
		total.stored[i] = read.Int(v[i])
	}
	total.paused = read.Text(v[3]) != ""
	newest := r.newest.Val()
	total.consistent = strings.Join(newest, "") == r.newestGroup
	total.addToFingerprint("%v %v %v %v", total.stored, total.inActiveSet, total.paused, newest)
	for i, g := range r.openGroups {
		group := r.groups[i]
		v := group.counts.Val()
		heldBack := group.scheduled.Err() == nil || read.Text(v[8]) != ""
		total.consistent = total.consistent && read.Text(v[0]) == g.types
		for _, n := range v[1:5] {
			total.counted[0] += read.Int(n)
		}
		total.addToFingerprint("%v %v", v, heldBack)
		for j, typ := range read.SplitTypes(g.types) {
			n := group.queues[j].Val()
			total.waiting[typ] += n
			if !heldBack {
				total.counted[1] += n
			}
			total.addToFingerprint("%d", n)
		}
	}
	return total
}

// fingerprintSeed makes fingerprints comparable within one process.
var fingerprintSeed = maphash.MakeSeed()

// addToFingerprint adds values to the fingerprint; their order matters.
func (r *tenantRecount) addToFingerprint(format string, args ...any) {
	r.fingerprint = 31*r.fingerprint + maphash.String(fingerprintSeed, fmt.Sprintf(format, args...))
}

// addNonReady counts these non-ready jobs of the tenant. If they are not n, a part is missing, and
// the recount is not consistent.
func (r *tenantRecount) addNonReady(blobs []string, n int64) {
	r.consistent = r.consistent && int64(len(blobs)) == n
	for _, blob := range blobs {
		r.fingerprint += maphash.String(fingerprintSeed, blob) // the order of the jobs doesn't matter
		d, err := ledger.ParseJob(blob)
		if err != nil {
			continue // readNonReady reports it
		}
		r.nonReady[d.Type]++
		switch d.Reason {
		case ledger.ReasonRate:
			r.counted[1]++
			r.counted[2]++
		case ledger.ReasonScheduled, ledger.ReasonPaused:
		default:
			r.counted[2]++
		}
	}
}

// addSuspended counts these suspended jobs of the tenant, which are n (see addNonReady). They count
// as non-ready by type, but neither as active nor as congested.
func (r *tenantRecount) addSuspended(blobs []string, n int64) {
	r.consistent = r.consistent && int64(len(blobs)) == n
	for _, blob := range blobs {
		r.fingerprint += 7 * maphash.String(fingerprintSeed, blob)
		if d, err := ledger.ParseJob(blob); err == nil {
			r.nonReady[d.Type]++
		}
	}
}

// listTenants reads which groups of these tenants are open, and about how many non-ready jobs they
// have.
func (ps *pass) listTenants(ctx context.Context, names []string) ([]*countedTenant, error) {
	const firstPage = 10
	type replies struct {
		newest, first       *redis.StringSliceCmd
		nonReady, suspended *redis.IntCmd
	}
	cmds := make([]replies, len(names))
	err := ps.Pipeline(ctx, func(p redis.Pipeliner) {
		for i, name := range names {
			key := ps.p.GroupsOf(name)
			cmds[i] = replies{
				newest:    p.ZRevRange(ctx, key, 0, 0),
				first:     p.ZRange(ctx, key, 0, firstPage-1),
				nonReady:  p.ZCard(ctx, ps.p.NonReadyOf(name)),
				suspended: p.ZCard(ctx, ps.p.SuspendedOf(name)),
			}
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
		t := &countedTenant{
			name:          name,
			newestGroup:   strings.Join(cmds[i].newest.Val(), ""),
			nonReadyCount: cmds[i].nonReady.Val() + cmds[i].suspended.Val(),
		}
		tenants[i] = t
		add := func(ids []string) error {
			for _, id := range ids {
				owned = append(owned, ownedGroup{t, id})
			}
			return nil
		}
		if ids := cmds[i].first.Val(); len(ids) < firstPage {
			_ = add(ids) // add never fails
		} else if err := ps.ReadByScore(ctx, ps.p.GroupsOf(name), add); err != nil {
			return nil, err
		}
	}
	for page := range slices.Chunk(owned, read.PageSize/2) {
		open, types := make([]*redis.FloatCmd, len(page)), make([]*redis.StringCmd, len(page))
		err := ps.Pipeline(ctx, func(p redis.Pipeliner) {
			for i, g := range page {
				open[i], types[i] = p.ZScore(ctx, ps.p.Open(), g.group), p.HGet(ctx, ps.p.Group(g.group), "types")
			}
		})
		if err != nil {
			return nil, err
		}
		for i, g := range page {
			if open[i].Err() == nil {
				g.openGroups = append(g.openGroups, groupHeader{id: g.group, types: types[i].Val()})
			}
		}
	}
	return tenants, nil
}
