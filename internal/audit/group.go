package audit

import (
	"context"
	"fmt"

	"github.com/redis/go-redis/v9"

	"github.com/bulkaction/bulkaction/internal/audit/read"
	"github.com/bulkaction/bulkaction/internal/ledger"
)

// group is what Redis holds for one group beside its jobs, as of one instant.
type group struct {
	id, tenant   string
	types        []string
	hash         map[string]string
	states       string
	queues       []int64 // the lengths of its queues, in the order of types
	failures     int64   // how many failures it has
	resultChunks int64   // how many chunks its result lines are stored in
	codes        map[string]string
	partials     map[string]string // the hash of its partial aggregates

	// Whether it is on the partition's lists of open, ended, dirty and all groups, and on its
	// tenant's list.
	open, ended, dirty, listed, listedForTenant bool

	counts [256]int64 // the number of jobs by state letter, counted in states
}

// groupHeader is what a pass must know of a group before it can read the rest in one transaction.
type groupHeader struct {
	id, tenant, types string // types is the hash field: the group's types with "|" between them
	states            int64  // the expected length of its states in bytes
}

// checkGroups reads groups by id and checks each one by itself. A group that doesn't exist is left
// out, and reported if it is on the list of groups.
func (ps *pass) checkGroups(ctx context.Context, ids []string) error {
	for len(ids) > 0 {
		n := min(len(ids), read.PageSize)
		cmds := make([]*redis.SliceCmd, n)
		err := ps.Pipeline(ctx, func(p redis.Pipeliner) {
			for i, id := range ids[:n] {
				cmds[i] = p.HMGet(ctx, ps.p.Group(id), "tenant", "types", "accepted")
			}
		})
		if err != nil {
			return err
		}
		headers := make([]groupHeader, n)
		for i, cmd := range cmds {
			v := cmd.Val()
			headers[i] = groupHeader{
				id:     ids[i],
				tenant: read.Text(v[0]),
				types:  read.Text(v[1]),
				states: 2 * read.Int(v[2]),
			}
		}
		if err := ps.checkByHeader(ctx, headers); err != nil {
			return err
		}
		ids = ids[n:]
	}
	return nil
}

// checkByHeader reads the groups with these headers, as many at once as make a page, and checks
// them. If a group has got another type since its header was read, it is read again.
func (ps *pass) checkByHeader(ctx context.Context, headers []groupHeader) error {
	for len(headers) > 0 {
		n, commands, bytes := 0, 0, int64(0)
		for n < len(headers) && (n == 0 ||
			commands+headers[n].commands() <= read.PageSize && bytes+headers[n].states <= read.PageBytes) {
			commands += headers[n].commands()
			bytes += headers[n].states
			n++
		}
		groups, changed, err := ps.readGroups(ctx, headers[:n])
		if err != nil {
			return err
		}
		for _, g := range groups {
			if err := ps.Pacer.Wait(ctx, 20, len(g.states)); err != nil {
				return err
			}
			if err := ps.checkGroup(ctx, g); err != nil {
				return fmt.Errorf("group %s: %w", g.id, err)
			}
		}
		if err := ps.checkOwners(ctx, groups); err != nil {
			return err
		}
		if err := ps.checkByHeader(ctx, changed); err != nil {
			return err
		}
		headers = headers[n:]
	}
	return nil
}

// commands is the number of commands that read the group.
func (h groupHeader) commands() int { return 11 + len(read.SplitTypes(h.types)) }

// readGroups reads groups in one transaction. Groups that have got another type or tenant since
// their headers were read are returned as new headers in changed. Groups that don't exist and
// groups with a key of the wrong Redis type are left out; of the former, those on the list of
// groups are reported.
func (ps *pass) readGroups(
	ctx context.Context, headers []groupHeader,
) (groups []*group, changed []groupHeader, err error) {
	type replies struct {
		hash, codes, partials         *redis.MapStringStringCmd
		states                        *redis.StringCmd
		failures, resultChunks        *redis.IntCmd
		queues                        []*redis.IntCmd
		listed, ofTenant, open, ended *redis.FloatCmd
		dirty                         *redis.BoolCmd
	}
	cmds := make([]replies, len(headers))
	err = ps.Transaction(ctx, func(p redis.Pipeliner) {
		for i, h := range headers {
			cmds[i] = replies{
				hash: p.HGetAll(ctx, ps.p.Group(h.id)), states: p.Get(ctx, ps.p.States(h.id)),
				failures: p.HLen(ctx, ps.p.Failures(h.id)), codes: p.HGetAll(ctx, ps.p.Codes(h.id)),
				resultChunks: p.LLen(ctx, ps.p.Results(h.id)), partials: p.HGetAll(ctx, ps.p.Aggregate(h.id)),
				listed: p.ZScore(ctx, ps.p.Groups(), h.id), ofTenant: p.ZScore(ctx, ps.p.GroupsOf(h.tenant), h.id),
				open: p.ZScore(ctx, ps.p.Open(), h.id), ended: p.ZScore(ctx, ps.p.Ended(), h.id),
				dirty: p.SIsMember(ctx, ps.p.Dirty(), h.id),
			}
			for _, typ := range read.SplitTypes(h.types) {
				cmds[i].queues = append(cmds[i].queues, p.LLen(ctx, ps.p.Queue(h.id, typ)))
			}
		}
	})
	if err != nil {
		return nil, nil, err
	}
	present := func(c *redis.FloatCmd) bool { return c.Err() == nil }
	for i, h := range headers {
		c := cmds[i]
		own := []redis.Cmder{c.hash, c.states, c.failures, c.codes, c.resultChunks, c.partials}
		for _, q := range c.queues {
			own = append(own, q)
		}
		if ps.hasWrongType(h, own) {
			continue
		}
		hash := c.hash.Val()
		if hash["status"] == "" {
			if present(c.listed) {
				f := finding{LawRegistry, h.id, noOrdinal, "unknown"}
				ps.found.add(f, "it is on the list of groups, but there is no such group")
				ps.addWrong(f, DeletedGroup{h.id, h.tenant})
			}
			continue
		}
		if hash["types"] != h.types || hash["tenant"] != h.tenant {
			changed = append(changed, groupHeader{
				id:     h.id,
				tenant: hash["tenant"],
				types:  hash["types"],
				states: int64(len(c.states.Val())),
			})
			continue
		}
		g := &group{
			id:              h.id,
			tenant:          h.tenant,
			types:           read.SplitTypes(h.types),
			hash:            hash,
			states:          c.states.Val(),
			failures:        c.failures.Val(),
			resultChunks:    c.resultChunks.Val(),
			codes:           c.codes.Val(),
			partials:        c.partials.Val(),
			open:            present(c.open),
			ended:           present(c.ended),
			dirty:           c.dirty.Val(),
			listed:          present(c.listed),
			listedForTenant: present(c.ofTenant),
		}
		for _, q := range c.queues {
			g.queues = append(g.queues, q.Val())
		}
		for at := 0; at+1 < len(g.states); at += 2 {
			g.counts[g.states[at]]++
		}
		groups = append(groups, g)
	}
	return groups, changed, nil
}

// checkGroup checks one group against the laws, and tracks it if it has jobs in locations that
// groups share. When the tracked groups take too much memory, it checks these locations for them at
// once.
func (ps *pass) checkGroup(ctx context.Context, g *group) error {
	ps.groups++
	ps.jobs += g.intField("accepted")
	ps.tenants[g.tenant] = true
	for _, typ := range g.types {
		ps.types[typ] = true
	}
	ps.checkCounts(g)
	ps.checkLifecycle(g)
	ps.checkAggregate(g)
	if err := ps.checkOwnLocations(ctx, g); err != nil {
		return err
	}
	ps.track(g)
	if ps.trackedBytes < ps.opts.stateBytes {
		return nil
	}
	return ps.checkSharedLocations(ctx, false)
}

// checkOwners checks groups against the law registry. Owner keys are in the partition of the group
// id, which may be another one.
func (ps *pass) checkOwners(ctx context.Context, groups []*group) error {
	cmds := make([]*redis.StringCmd, len(groups))
	err := ps.Pipeline(ctx, func(p redis.Pipeliner) {
		for i, g := range groups {
			cmds[i] = p.Get(ctx, ps.space.OfGroup(g.id).Owner(g.id))
		}
	})
	if err != nil {
		return err
	}
	for i, g := range groups {
		if !g.listedForTenant {
			ps.reportGroup(g, LawRegistry, "list", "it is missing on its tenant's list of groups")
			ps.addWrongGroup(g, LawRegistry, "list")
		}
		if at := ps.space.OfTenant(g.tenant).Index(); at != ps.p.Index() {
			ps.reportGroup(g, LawRegistry, "partition", "its tenant %s belongs to partition %d", g.tenant, at)
		}
		if id := g.hash["id"]; id != g.id {
			ps.reportGroup(g, LawRegistry, "id", "it says that its id is %q", id)
		}
		owner := cmds[i].Val()
		if owner == g.tenant {
			continue
		}
		var now *redis.StringCmd // a group is deleted before its owner key: it must still be there
		if err := ps.Pipeline(ctx, func(p redis.Pipeliner) {
			now = p.HGet(ctx, ps.p.Group(g.id), "tenant")
		}); err != nil {
			return err
		}
		if now.Val() == g.tenant {
			ps.reportGroup(g, LawRegistry, "owner "+owner, "it is a group of tenant %s, but its owner key says %q",
				g.tenant, owner)
			ps.addWrong(finding{LawRegistry, g.id, noOrdinal, "owner " + owner}, WrongOwner{g.id, g.tenant, owner})
		}
	}
	return nil
}

// reportGroup reports something about a group as a whole. Key tells it apart from other findings
// about this law and group. The counters of its tenant and types may become uncertain (see
// markUncertain). A finding about its counts or states also says how to repair them.
func (ps *pass) reportGroup(g *group, law, key, format string, args ...any) {
	ps.found.add(finding{law, g.id, noOrdinal, key}, format, args...)
	ps.markUncertain(law, g.tenant, g.types...)
	if law == LawConservation || law == LawStates {
		ps.addWrongGroup(g, law, key)
	}
}

// addWrongGroup adds, to a finding about a group as a whole, that its counts or lists are wrong. It
// adds nothing if the right counts are not certain.
func (ps *pass) addWrongGroup(g *group, law, key string) {
	if w, ok := g.wrongGroup(); ok {
		ps.addWrong(finding{law, g.id, noOrdinal, key}, w)
	}
}

// markUncertain makes this pass not judge the counters of a tenant and of types, after a finding
// that may explain their errors.
func (ps *pass) markUncertain(law, tenant string, types ...string) {
	if law != LawConservation && law != LawStates && law != LawLocation {
		return
	}
	ps.uncertainTenants[tenant] = true
	for _, typ := range types {
		ps.uncertainTypes[typ] = true
	}
}

// intField returns a field of the group's hash as a number; 0 if it is missing.
func (g *group) intField(field string) int64 { return read.Int(g.hash[field]) }

// status returns the group's status; "" if it is missing.
func (g *group) status() string { return g.hash["status"] }

// unfinished returns the number of jobs whose states are not final.
func (g *group) unfinished() int64 {
	return g.counts[ledger.Waiting] + g.counts[ledger.NonReady] + g.counts[ledger.Ready] + g.counts[ledger.InFlight]
}
