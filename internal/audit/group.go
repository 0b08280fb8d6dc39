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

// head is what must be known of a group to read the rest of it at once.
type head struct {
	id, tenant, types string
	states            int64 // bytes
}

// page audits some groups by themselves.
func (ps *pass) page(ctx context.Context, ids []string) error {
	for len(ids) > 0 {
		n := min(len(ids), pageSize)
		cmds := make([]*redis.SliceCmd, n)
		err := ps.inTurn(ctx, func(p redis.Pipeliner) {
			for i, id := range ids[:n] {
				cmds[i] = p.HMGet(ctx, ps.p.Group(id), "tenant", "types", "accepted")
			}
		})
		if err != nil {
			return err
		}
		heads := make([]head, n)
		for i, cmd := range cmds {
			v := cmd.Val()
			heads[i] = head{id: ids[i], tenant: text(v[0]), types: text(v[1]), states: 2 * number(v[2])}
		}
		if err := ps.heads(ctx, heads); err != nil {
			return err
		}
		ids = ids[n:]
	}
	return nil
}

// heads audits groups, as many at once as make a page.
func (ps *pass) heads(ctx context.Context, heads []head) error {
	for len(heads) > 0 {
		n, commands, bytes := 0, 0, int64(0)
		for n < len(heads) && (n == 0 ||
			commands+heads[n].commands() <= pageSize && bytes+heads[n].states <= pageBytes) {
			commands += heads[n].commands()
			bytes += heads[n].states
			n++
		}
		groups, changed, err := ps.read(ctx, heads[:n])
		if err != nil {
			return err
		}
		for _, g := range groups {
			if err := ps.throttle.read(ctx, 20, len(g.states)); err != nil {
				return err
			}
			if err := ps.group(ctx, g); err != nil {
				return fmt.Errorf("group %s: %w", g.id, err)
			}
		}
		if err := ps.owners(ctx, groups); err != nil {
			return err
		}
		if err := ps.heads(ctx, changed); err != nil {
			return err
		}
		heads = heads[n:]
	}
	return nil
}

func (h head) commands() int { return 11 + len(split(h.types)) }

// read takes a snapshot of groups. Those that got another type since are returned as changed; those
// that are gone are left out.
func (ps *pass) read(ctx context.Context, heads []head) (groups []*group, changed []head, err error) {
	type replies struct {
		hash, codes, slots            *redis.MapStringStringCmd
		states                        *redis.StringCmd
		failures, lines               *redis.IntCmd
		queues                        []*redis.IntCmd
		listed, ofTenant, open, ended *redis.FloatCmd
		dirty                         *redis.BoolCmd
	}
	cmds := make([]replies, len(heads))
	err = ps.atOnce(ctx, func(p redis.Pipeliner) {
		for i, h := range heads {
			cmds[i] = replies{
				hash: p.HGetAll(ctx, ps.p.Group(h.id)), states: p.Get(ctx, ps.p.States(h.id)),
				failures: p.HLen(ctx, ps.p.Failures(h.id)), codes: p.HGetAll(ctx, ps.p.Codes(h.id)),
				lines: p.LLen(ctx, ps.p.Results(h.id)), slots: p.HGetAll(ctx, ps.p.Aggregate(h.id)),
				listed: p.ZScore(ctx, ps.p.Groups(), h.id), ofTenant: p.ZScore(ctx, ps.p.GroupsOf(h.tenant), h.id),
				open: p.ZScore(ctx, ps.p.Open(), h.id), ended: p.ZScore(ctx, ps.p.Ended(), h.id),
				dirty: p.SIsMember(ctx, ps.p.Dirty(), h.id),
			}
			for _, typ := range split(h.types) {
				cmds[i].queues = append(cmds[i].queues, p.LLen(ctx, ps.p.Queue(h.id, typ)))
			}
		}
	})
	if err != nil {
		return nil, nil, err
	}
	is := func(c *redis.FloatCmd) bool { return c.Err() == nil }
	for i, h := range heads {
		c := cmds[i]
		own := []redis.Cmder{c.hash, c.states, c.failures, c.codes, c.lines, c.slots}
		for _, q := range c.queues {
			own = append(own, q)
		}
		if ps.alienOf(h, own) {
			continue
		}
		hash := c.hash.Val()
		if hash["status"] == "" {
			if is(c.listed) {
				f := finding{Registry, h.id, none, "unknown"}
				ps.found.add(f, "it is on the list of groups, but there is no such group")
				ps.mend(f, ps.cureUnlisted(h.id, h.tenant))
			}
			continue
		}
		if hash["types"] != h.types || hash["tenant"] != h.tenant {
			changed = append(changed, head{
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
			types:    split(h.types),
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

// group holds one group against the laws, and keeps what has to be sought in places that
// groups share.
func (ps *pass) group(ctx context.Context, g *group) error {
	ps.groups++
	ps.jobs += g.number("accepted")
	ps.tenants[g.tenant] = true
	for _, typ := range g.types {
		ps.types[typ] = true
	}
	ps.ledger(g)
	ps.lifecycle(g)
	ps.aggregate(g)
	if err := ps.own(ctx, g); err != nil {
		return err
	}
	ps.keep(g)
	if ps.bytes < ps.opts.batch {
		return nil
	}
	return ps.shared(ctx, false)
}

// owners holds groups against the registry, which lies in other partitions too.
func (ps *pass) owners(ctx context.Context, groups []*group) error {
	cmds := make([]*redis.StringCmd, len(groups))
	err := ps.inTurn(ctx, func(p redis.Pipeliner) {
		for i, g := range groups {
			cmds[i] = p.Get(ctx, ps.space.OfGroup(g.id).Owner(g.id))
		}
	})
	if err != nil {
		return err
	}
	for i, g := range groups {
		if !g.ofTenant {
			ps.report(g, Registry, "list", "it is missing on its tenant's list of groups")
			ps.mendGroup(g, Registry, "list")
		}
		if at := ps.space.OfTenant(g.tenant).Index(); at != ps.p.Index() {
			ps.report(g, Registry, "partition", "its tenant %s belongs to partition %d", g.tenant, at)
		}
		if id := g.hash["id"]; id != g.id {
			ps.report(g, Registry, "id", "it says that its id is %q", id)
		}
		owner := cmds[i].Val()
		if owner == g.tenant {
			continue
		}
		var now *redis.StringCmd // a group is forgotten before its owner key
		if err := ps.inTurn(ctx, func(p redis.Pipeliner) { now = p.HGet(ctx, ps.p.Group(g.id), "tenant") }); err != nil {
			return err
		}
		if now.Val() == g.tenant {
			ps.report(g, Registry, "owner "+owner, "it is a group of tenant %s, but its owner key says %q",
				g.tenant, owner)
			ps.mend(finding{Registry, g.id, none, "owner " + owner}, ps.cureOwner(g, owner))
		}
	}
	return nil
}

// report notes a finding about a group as a whole.
func (ps *pass) report(g *group, law, same, format string, args ...any) {
	ps.found.add(finding{law, g.id, none, same}, format, args...)
	ps.doubt(law, g.tenant, g.types...)
	if law == Conservation || law == States {
		ps.mendGroup(g, law, same)
	}
}

// mendGroup notes that the group's ledger and lists mend a finding about it.
func (ps *pass) mendGroup(g *group, law, same string) {
	if c, ok := ps.cureGroup(g); ok {
		ps.mend(finding{law, g.id, none, same}, c)
	}
}

// doubt notes whose counters can't be judged after a finding.
func (ps *pass) doubt(law, tenant string, types ...string) {
	if law != Conservation && law != States && law != Place {
		return
	}
	ps.doubtfulTenants[tenant] = true
	for _, typ := range types {
		ps.doubtfulTypes[typ] = true
	}
}

func (g *group) number(field string) int64 { return number(g.hash[field]) }

func (g *group) status() string { return g.hash["status"] }

// unended counts the jobs that are not done, failed or cancelled.
func (g *group) unended() int64 {
	return g.counts[ledger.Waiting] + g.counts[ledger.NonReady] + g.counts[ledger.Ready] + g.counts[ledger.InFlight]
}

func text(v any) string { s, _ := v.(string); return s }

// number reads a hash field's value; one that is not there is 0.
func number(v any) int64 {
	n, _ := strconv.ParseInt(text(v), 10, 64)
	return n
}

func split(types string) []string {
	if types == "" {
		return nil
	}
	return strings.Split(types, "|")
}
