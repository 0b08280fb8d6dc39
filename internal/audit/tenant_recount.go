package audit

import (
	"context"
	"fmt"
	"hash/maphash"
	"slices"
	"strings"

	"github.com/redis/go-redis/v9"

	"github.com/bulkaction/bulkaction/internal/ledger"
)

// countedTenant is what counts for a tenant's counters.
type countedTenant struct {
	name          string
	newestGroup   string        // of its groups, before they were listed
	openGroups    []groupHeader // the open ones
	nonReadyCount int64         // about how many jobs
}

func (t *countedTenant) commands() int {
	n := 7
	for _, g := range t.openGroups {
		n += 2 + len(splitTypes(g.types))
	}
	return n
}

// fitsInOneRead says whether all of it fits into one transaction.
func (t *countedTenant) fitsInOneRead() bool {
	return t.commands() <= pageSize && t.nonReadyCount <= pageSize
}

// tenantRecount is what a tenant's counters say, and what they should.
type tenantRecount struct {
	stored, counted     [3]int64 // see counterNames
	inActiveSet, paused bool     // in the set of active tenants; a paused one is not
	waiting, nonReady   map[string]int64
	consistent          bool // want is what it was at the instant of have
	fingerprint         uint64
}

var counterNames = [3]string{"unfinished", "active", "congested"}

// recountTenants yields a tally of each tenant.
func (ps *pass) recountTenants(ctx context.Context, names []string, yield func(*countedTenant, tenantRecount)) error {
	for page := range slices.Chunk(names, pageSize/5) {
		tenants, err := ps.listTenants(ctx, page)
		if err != nil {
			return err
		}
		for len(tenants) > 0 {
			n, commands, nonReady := 0, 0, int64(0)
			for n < len(tenants) && (n == 0 ||
				commands+tenants[n].commands() <= pageSize && nonReady+tenants[n].nonReadyCount <= pageSize) {
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

// recountPage reads some small tenants at once, or a large one twice.
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
	err := ps.transaction(ctx, func(p redis.Pipeliner) {
		for i, t := range tenants {
			replies[i] = &tenantReply{countedTenant: t}
			for _, query := range ps.queries(ctx, replies[i]) {
				query(p)
			}
			replies[i].nonReadyBlobs = p.ZRange(ctx, ps.p.NonReadyOf(t.name), 0, 2*pageSize)
			replies[i].suspendedBlobs = p.ZRange(ctx, ps.p.SuspendedOf(t.name), 0, 2*pageSize)
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

// recountLarge reads a large tenant two times. The tally is whole when both are the same and
// nothing became ready meanwhile.
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

// readOnce reads a tenant page by page.
func (ps *pass) readOnce(ctx context.Context, t *countedTenant) (tenantRecount, error) {
	reply := &tenantReply{countedTenant: t}
	for page := range slices.Chunk(ps.queries(ctx, reply), pageSize/10) {
		err := ps.pipeline(ctx, func(p redis.Pipeliner) {
			for _, query := range page {
				query(p)
			}
		})
		if err != nil {
			return tenantRecount{}, err
		}
	}
	r, nonReady := reply.total(), int64(0)
	err := ps.scanMembers(ctx, ps.p.NonReadyOf(t.name), func(page []string) error {
		nonReady += int64(len(page))
		r.addNonReady(page, int64(len(page)))
		return nil
	})
	if err != nil {
		return r, err
	}
	suspended := int64(0)
	err = ps.scanMembers(ctx, ps.p.SuspendedOf(t.name), func(page []string) error {
		suspended += int64(len(page))
		r.addSuspended(page, int64(len(page)))
		return nil
	})
	// a scan may yield an element twice
	r.consistent = r.consistent && nonReady == reply.nonReadyLength.Val() && suspended == reply.suspendedLength.Val()
	return r, err
}

// tenantReply is what Redis says of a tenant.
type tenantReply struct {
	*countedTenant
	counters       *redis.SliceCmd
	inActiveSet    *redis.BoolCmd
	newest         *redis.StringSliceCmd
	nonReadyLength *redis.IntCmd
	nonReadyBlobs  *redis.StringSliceCmd
	// What was put aside, because it is paused.
	suspendedLength *redis.IntCmd
	suspendedBlobs  *redis.StringSliceCmd
	groups          []groupReply
}

type groupReply struct {
	counts    *redis.SliceCmd
	scheduled *redis.FloatCmd // until its time comes
	queues    []*redis.IntCmd
}

// queries are the questions about a tenant: one, and one a group. They may be asked again.
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
			for _, typ := range splitTypes(g.types) {
				group.queues = append(group.queues, p.LLen(ctx, ps.p.Queue(g.id, typ)))
			}
			reply.groups[i] = group
		})
	}
	return queries
}

// total adds up what the tenant's groups hold. It is whole when they are those that were listed.
func (r *tenantReply) total() tenantRecount {
	total := tenantRecount{waiting: map[string]int64{}, nonReady: map[string]int64{}, inActiveSet: r.inActiveSet.Val()}
	v := r.counters.Val()
	for i := range total.stored {
		total.stored[i] = asInt(v[i])
	}
	total.paused = asText(v[3]) != ""
	newest := r.newest.Val()
	total.consistent = strings.Join(newest, "") == r.newestGroup
	total.addToFingerprint("%v %v %v %v", total.stored, total.inActiveSet, total.paused, newest)
	for i, g := range r.openGroups {
		group := r.groups[i]
		v := group.counts.Val()
		heldBack := group.scheduled.Err() == nil || asText(v[8]) != ""
		total.consistent = total.consistent && asText(v[0]) == g.types
		for _, n := range v[1:5] {
			total.counted[0] += asInt(n)
		}
		total.addToFingerprint("%v %v", v, heldBack)
		for j, typ := range splitTypes(g.types) {
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

// prints are comparable within one process.
var fingerprintSeed = maphash.MakeSeed()

func (r *tenantRecount) addToFingerprint(format string, args ...any) {
	r.fingerprint = 31*r.fingerprint + maphash.String(fingerprintSeed, fmt.Sprintf(format, args...))
}

// addNonReady adds parked jobs, all of which there are n.
func (r *tenantRecount) addNonReady(blobs []string, n int64) {
	r.consistent = r.consistent && int64(len(blobs)) == n
	for _, blob := range blobs {
		r.fingerprint += maphash.String(fingerprintSeed, blob) // in whatever order
		d, err := ledger.ParseJob(blob)
		if err != nil {
			continue // reported where it lies
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

// addSuspended adds jobs that were put aside, all of which there are n: they want no permit and are
// not congested.
func (r *tenantRecount) addSuspended(blobs []string, n int64) {
	r.consistent = r.consistent && int64(len(blobs)) == n
	for _, blob := range blobs {
		r.fingerprint += 7 * maphash.String(fingerprintSeed, blob)
		if d, err := ledger.ParseJob(blob); err == nil {
			r.nonReady[d.Type]++
		}
	}
}

// listTenants finds the open groups of some tenants.
func (ps *pass) listTenants(ctx context.Context, names []string) ([]*countedTenant, error) {
	const firstPage = 10
	type replies struct {
		newest, first       *redis.StringSliceCmd
		nonReady, suspended *redis.IntCmd
	}
	cmds := make([]replies, len(names))
	err := ps.pipeline(ctx, func(p redis.Pipeliner) {
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
			_ = add(ids) // never fails
		} else if err := ps.readByScore(ctx, ps.p.GroupsOf(name), add); err != nil {
			return nil, err
		}
	}
	for page := range slices.Chunk(owned, pageSize/2) {
		open, types := make([]*redis.FloatCmd, len(page)), make([]*redis.StringCmd, len(page))
		err := ps.pipeline(ctx, func(p redis.Pipeliner) {
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
