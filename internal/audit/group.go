package audit

import (
	"context"
	"fmt"
	"strconv"
	"strings"

	"github.com/redis/go-redis/v9"

	"github.com/bulkaction/bulkaction/internal/ledger"
)

// group is what belongs to one group, all as it was at one instant.
type group struct {
	id, tenant string
	types      []string
	hash       map[string]string
	states     string
	queues     []int64 // lengths, in the order of types
	failures   int64   // records
	lines      int64   // chunks of result lines
	codes      map[string]string
	slots      map[string]string // of the aggregate
	open, ended, dirty,
	listed, ofTenant bool

	counts [256]int64 // jobs by letter
}

// groupHeader is what must be known of a group to read the rest of it at once.
type groupHeader struct {
	id, tenant, types string
	states            int64 // bytes
}

// checkGroups audits some groups by themselves.
func (ps *pass) checkGroups(ctx context.Context, ids []string) error {
	for len(ids) > 0 {
		n := min(len(ids), pageSize)
		cmds := make([]*redis.SliceCmd, n)
		err := ps.pipeline(ctx, func(p redis.Pipeliner) {
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
			headers[i] = groupHeader{id: ids[i], tenant: asText(v[0]), types: asText(v[1]), states: 2 * asInt(v[2])}
		}
		if err := ps.headers(ctx, headers); err != nil {
			return err
		}
		ids = ids[n:]
	}
	return nil
}

// headers audits groups, as many at once as make a page.
func (ps *pass) headers(ctx context.Context, headers []groupHeader) error {
	for len(headers) > 0 {
		n, commands, bytes := 0, 0, int64(0)
		for n < len(headers) && (n == 0 ||
			commands+headers[n].commands() <= pageSize && bytes+headers[n].states <= pageBytes) {
			commands += headers[n].commands()
			bytes += headers[n].states
			n++
		}
		groups, changed, err := ps.readGroups(ctx, headers[:n])
		if err != nil {
			return err
		}
		for _, g := range groups {
			if err := ps.pacer.wait(ctx, 20, len(g.states)); err != nil {
				return err
			}
			if err := ps.checkGroup(ctx, g); err != nil {
				return fmt.Errorf("group %s: %w", g.id, err)
			}
		}
		if err := ps.checkOwners(ctx, groups); err != nil {
			return err
		}
		if err := ps.headers(ctx, changed); err != nil {
			return err
		}
		headers = headers[n:]
	}
	return nil
}

func (h groupHeader) commands() int { return 11 + len(splitTypes(h.types)) }

// readGroups takes a snapshot of groups. Those that got another type since are returned as changed;
// those that are gone are left out.
func (ps *pass) readGroups(
	ctx context.Context, headers []groupHeader,
) (groups []*group, changed []groupHeader, err error) {
	type replies struct {
		hash, codes, slots            *redis.MapStringStringCmd
		states                        *redis.StringCmd
		failures, lines               *redis.IntCmd
		queues                        []*redis.IntCmd
		listed, ofTenant, open, ended *redis.FloatCmd
		dirty                         *redis.BoolCmd
	}
	cmds := make([]replies, len(headers))
	err = ps.transaction(ctx, func(p redis.Pipeliner) {
		for i, h := range headers {
			cmds[i] = replies{
				hash: p.HGetAll(ctx, ps.p.Group(h.id)), states: p.Get(ctx, ps.p.States(h.id)),
				failures: p.HLen(ctx, ps.p.Failures(h.id)), codes: p.HGetAll(ctx, ps.p.Codes(h.id)),
				lines: p.LLen(ctx, ps.p.Results(h.id)), slots: p.HGetAll(ctx, ps.p.Aggregate(h.id)),
				listed: p.ZScore(ctx, ps.p.Groups(), h.id), ofTenant: p.ZScore(ctx, ps.p.GroupsOf(h.tenant), h.id),
				open: p.ZScore(ctx, ps.p.Open(), h.id), ended: p.ZScore(ctx, ps.p.Ended(), h.id),
				dirty: p.SIsMember(ctx, ps.p.Dirty(), h.id),
			}
			for _, typ := range splitTypes(h.types) {
				cmds[i].queues = append(cmds[i].queues, p.LLen(ctx, ps.p.Queue(h.id, typ)))
			}
		}
	})
	if err != nil {
		return nil, nil, err
	}
	is := func(c *redis.FloatCmd) bool { return c.Err() == nil }
	for i, h := range headers {
		c := cmds[i]
		own := []redis.Cmder{c.hash, c.states, c.failures, c.codes, c.lines, c.slots}
		for _, q := range c.queues {
			own = append(own, q)
		}
		if ps.hasWrongType(h, own) {
			continue
		}
		hash := c.hash.Val()
		if hash["status"] == "" {
			if is(c.listed) {
				f := finding{LawRegistry, h.id, noOrdinal, "unknown"}
				ps.found.add(f, "it is on the list of groups, but there is no such group")
				ps.addRepair(f, ps.unlistedRepair(h.id, h.tenant))
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
			id:       h.id,
			tenant:   h.tenant,
			types:    splitTypes(h.types),
			hash:     hash,
			states:   c.states.Val(),
			failures: c.failures.Val(),
			lines:    c.lines.Val(),
			codes:    c.codes.Val(),
			slots:    c.slots.Val(),
			open:     is(c.open),
			ended:    is(c.ended),
			dirty:    c.dirty.Val(),
			listed:   is(c.listed),
			ofTenant: is(c.ofTenant),
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

// checkGroup holds one group against the laws, and keeps what has to be sought in places that
// groups share.
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

// checkOwners holds groups against the registry, which lies in other partitions too.
func (ps *pass) checkOwners(ctx context.Context, groups []*group) error {
	cmds := make([]*redis.StringCmd, len(groups))
	err := ps.pipeline(ctx, func(p redis.Pipeliner) {
		for i, g := range groups {
			cmds[i] = p.Get(ctx, ps.space.OfGroup(g.id).Owner(g.id))
		}
	})
	if err != nil {
		return err
	}
	for i, g := range groups {
		if !g.ofTenant {
			ps.reportGroup(g, LawRegistry, "list", "it is missing on its tenant's list of groups")
			ps.addGroupRepair(g, LawRegistry, "list")
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
		var now *redis.StringCmd // a group is forgotten before its owner key
		if err := ps.pipeline(ctx, func(p redis.Pipeliner) {
			now = p.HGet(ctx, ps.p.Group(g.id), "tenant")
		}); err != nil {
			return err
		}
		if now.Val() == g.tenant {
			ps.reportGroup(g, LawRegistry, "owner "+owner, "it is a group of tenant %s, but its owner key says %q",
				g.tenant, owner)
			ps.addRepair(finding{LawRegistry, g.id, noOrdinal, "owner " + owner}, ps.ownerRepair(g, owner))
		}
	}
	return nil
}

// reportGroup notes a finding about a group as a whole.
func (ps *pass) reportGroup(g *group, law, same, format string, args ...any) {
	ps.found.add(finding{law, g.id, noOrdinal, same}, format, args...)
	ps.markUncertain(law, g.tenant, g.types...)
	if law == LawConservation || law == LawStates {
		ps.addGroupRepair(g, law, same)
	}
}

// addGroupRepair notes that the group's ledger and lists mend a finding about it.
func (ps *pass) addGroupRepair(g *group, law, same string) {
	if c, ok := ps.groupRepair(g); ok {
		ps.addRepair(finding{law, g.id, noOrdinal, same}, c)
	}
}

// markUncertain notes whose counters can't be judged after a finding.
func (ps *pass) markUncertain(law, tenant string, types ...string) {
	if law != LawConservation && law != LawStates && law != LawLocation {
		return
	}
	ps.uncertainTenants[tenant] = true
	for _, typ := range types {
		ps.uncertainTypes[typ] = true
	}
}

func (g *group) intField(field string) int64 { return asInt(g.hash[field]) }

func (g *group) status() string { return g.hash["status"] }

// unfinished counts the jobs that are not done, failed or cancelled.
func (g *group) unfinished() int64 {
	return g.counts[ledger.Waiting] + g.counts[ledger.NonReady] + g.counts[ledger.Ready] + g.counts[ledger.InFlight]
}

func asText(v any) string { s, _ := v.(string); return s }

// asInt reads a hash field's value; one that is not there is 0.
func asInt(v any) int64 {
	n, _ := strconv.ParseInt(asText(v), 10, 64)
	return n
}

func splitTypes(types string) []string {
	if types == "" {
		return nil
	}
	return strings.Split(types, "|")
}
