package audit

import (
	"context"
	"fmt"
	"maps"
	"slices"

	"github.com/redis/go-redis/v9"

	"github.com/bulkaction/bulkaction/api"
	"github.com/bulkaction/bulkaction/internal/audit/read"
	"github.com/bulkaction/bulkaction/internal/redisx"
	"github.com/bulkaction/bulkaction/internal/redisx/keyspace"
)

// Incremental is the incremental check of one partition: each call of its method Run looks for
// candidates among the open groups, without reading a job, which [RunGroups] then audits job by job. A group is a candidate if its counts do not add up or do not agree with
// the lengths of its states, queues and failures. It is one too if it has ready, in-flight or
// unreduced jobs: they may have vanished with their stream. Such groups are few, because streams
// are short. A tenant is a candidate if it has fewer non-ready and suspended jobs than its groups
// count.
//
// It remembers some bytes per group from one call to the next. It is not safe for concurrent use.
type Incremental struct {
	read.Reader
	p     keyspace.Partition
	known map[string]read.Header // the open groups of the last check, by id
}

// NewIncremental returns a check of a partition that knows no group yet.
func NewIncremental(conn *redisx.Conn, p keyspace.Partition) *Incremental {
	return &Incremental{Reader: read.Reader{Cmd: conn.Cmd}, p: p, known: map[string]read.Header{}}
}

// tenantGroups names the open groups of a tenant. They are read in one transaction if they are few.
type tenantGroups struct {
	tenant   string
	groups   []read.Header
	commands int // how many commands read them
}

// Run makes one check of all open groups. It returns the candidates, and how many groups are open.
func (c *Incremental) Run(ctx context.Context) (found Candidates, open int, err error) {
	var ids []string
	if err := c.ReadByScore(ctx, c.p.Open(), func(page []string) error {
		ids = append(ids, page...)
		return nil
	}); err != nil {
		return Candidates{}, 0, fmt.Errorf("list open groups: %w", err)
	}
	if err := c.updateKnown(ctx, ids); err != nil {
		return Candidates{}, 0, fmt.Errorf("read groups: %w", err)
	}
	r := incrementalRun{Incremental: c}
	cost := func(t *tenantGroups) (int, int64) { return t.commands, 0 }
	for batch := range read.Batches(c.groupsByTenant(), cost) {
		check := r.checkTenants
		if batch[0].commands > read.PageSize {
			check = r.checkLargeTenant
		}
		if err := check(ctx, batch); err != nil {
			return Candidates{}, 0, fmt.Errorf("read counts: %w", err)
		}
	}
	slices.Sort(r.found.Groups)
	r.found.Groups = slices.Compact(r.found.Groups)
	return r.found, len(ids), nil
}

// updateKnown brings the known groups in line with ids, the open groups: it drops the others and
// reads the headers of new ones.
func (c *Incremental) updateKnown(ctx context.Context, ids []string) error {
	known := make(map[string]read.Header, len(ids))
	var unknown []string
	for _, id := range ids {
		if g, ok := c.known[id]; ok {
			known[id] = g
		} else {
			unknown = append(unknown, id)
		}
	}
	c.known = known
	headers, err := c.Headers(ctx, c.p, unknown)
	for _, h := range headers {
		known[h.ID] = h
	}
	return err
}

// groupsByTenant returns the known groups, divided by tenant.
func (c *Incremental) groupsByTenant() []*tenantGroups {
	byTenant := map[string]*tenantGroups{}
	for _, g := range c.known {
		t := byTenant[g.Tenant]
		if t == nil {
			t = &tenantGroups{tenant: g.Tenant, commands: 2}
			byTenant[g.Tenant] = t
		}
		t.groups = append(t.groups, g)
		t.commands += read.Numbers.Commands(g)
	}
	return slices.Collect(maps.Values(byTenant))
}

type incrementalRun struct {
	*Incremental
	found Candidates
}

// queue adds to a pipeline the commands that read the counts, status and lengths of a known group.
func (r *incrementalRun) queue(ctx context.Context, p redis.Pipeliner, g read.Header) func() *read.Group {
	return read.Numbers.Queue(ctx, p, r.p, g)
}

// checkTenants checks the groups and the non-ready jobs of several tenants, which it reads in one
// transaction.
func (r *incrementalRun) checkTenants(ctx context.Context, tenants []*tenantGroups) error {
	type reply struct {
		nonReady func() [2]int64
		groups   []func() *read.Group
	}
	replies, err := read.Ask(ctx, r.Transaction, len(tenants), tenants,
		func(p redis.Pipeliner, t *tenantGroups) (all reply) {
			all.nonReady = read.QueueNonReady(ctx, p, r.p, t.tenant)
			for _, g := range t.groups {
				all.groups = append(all.groups, r.queue(ctx, p, g))
			}
			return all
		})
	for i, reply := range replies {
		var sum nonReadyCounts
		for _, group := range reply.groups {
			r.checkGroup(group(), &sum)
		}
		r.compareNonReady(tenants[i].tenant, sum, reply.nonReady())
	}
	return err
}

// checkLargeTenant checks tenants[0], which has too many groups for one transaction. It reads
// everything about the tenant twice, in several transactions, and judges its non-ready jobs only if
// both readings are equal.
func (r *incrementalRun) checkLargeTenant(ctx context.Context, tenants []*tenantGroups) error {
	t := tenants[0]
	var sums [2]nonReadyCounts
	var lengths [2][2]int64
	for reading := range sums {
		groups, err := read.Ask(ctx, r.Transaction, read.PageSize/10, t.groups,
			func(p redis.Pipeliner, g read.Header) func() *read.Group { return r.queue(ctx, p, g) })
		if err != nil {
			return err
		}
		for _, group := range groups {
			if reading == 0 {
				r.checkGroup(group(), &sums[0])
			} else {
				sums[1].add(group())
			}
		}
		var nonReady func() [2]int64
		if err := r.Transaction(ctx, func(p redis.Pipeliner) {
			nonReady = read.QueueNonReady(ctx, p, r.p, t.tenant)
		}); err != nil {
			return err
		}
		lengths[reading] = nonReady()
		if sums[0].unknown { // the non-ready jobs can't be judged, and a group may not be known any more
			return nil
		}
	}
	if sums[0].total == sums[1].total && sums[0].fingerprint == sums[1].fingerprint && lengths[0] == lengths[1] {
		r.compareNonReady(t.tenant, sums[1], lengths[1])
	}
	return nil
}

// nonReadyCounts is the sum of the non-ready counts of a tenant's groups.
type nonReadyCounts struct {
	total       int64
	fingerprint uint64   // of the counts of all groups
	groups      []string // those that count non-ready jobs
	// unknown says that the sum can't be compared with the sorted sets, because a group of the
	// tenant is cancelled, so that its non-ready jobs are being removed one by one, or because the
	// counts of a group could not be read.
	unknown bool
}

func (c *nonReadyCounts) add(g *read.Group) {
	nonReady := g.Int("non_ready")
	c.total += nonReady
	c.fingerprint = 31*c.fingerprint + g.Fingerprint()
	c.unknown = c.unknown || g.Fields["status"] == string(api.StatusCancelled)
	if nonReady > 0 {
		c.groups = append(c.groups, g.ID)
	}
}

// compareNonReady adds a tenant, and its groups with non-ready jobs, to the candidates if the
// tenant has fewer non-ready and suspended jobs (lengths) than its groups count.
func (r *incrementalRun) compareNonReady(tenant string, counted nonReadyCounts, lengths [2]int64) {
	if lengths[0]+lengths[1] < counted.total && !counted.unknown {
		r.found.Tenants = append(r.found.Tenants, tenant)
		r.found.Groups = append(r.found.Groups, counted.groups...)
	}
}

// checkGroup adds a group to the candidates if its numbers look wrong, if it has ready, in-flight
// or unreduced jobs, or if one of its keys has the wrong Redis type. It adds the group's count of
// non-ready jobs to nonReady. It forgets a group that was deleted, or that has other types or
// another tenant now.
func (r *incrementalRun) checkGroup(g *read.Group, nonReady *nonReadyCounts) {
	if len(g.WrongTypes) > 0 {
		r.found.Groups = append(r.found.Groups, g.ID)
		nonReady.unknown = true
		return
	}
	status := g.Fields["status"]
	if status == "" || g.Fields["types"] != g.Types || g.Fields["tenant"] != g.Tenant {
		delete(r.known, g.ID) // it was deleted, or the next check learns its new tenant or types
		nonReady.unknown = true
		return
	}
	nonReady.add(g)
	all := int64(0)
	for _, field := range []string{"waiting", "non_ready", "ready", "in_flight", "done", "failed", "cancelled"} {
		all += g.Int(field)
	}
	accepted, done, reduced := g.Int("accepted"), g.Int("done"), g.Int("reduced")
	underWay := g.Int("ready")+g.Int("in_flight") > 0 || done > reduced
	wrong := all != accepted || g.StateBytes != 2*accepted || g.Failures != g.Int("failed") || reduced > done ||
		status != string(api.StatusCancelled) && g.Queued() != g.Int("waiting")
	if wrong || underWay {
		r.found.Groups = append(r.found.Groups, g.ID)
	}
}
