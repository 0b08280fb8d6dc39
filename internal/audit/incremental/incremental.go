// Package incremental looks for groups and tenants in which something may be wrong, without reading
// a job. It hides what it remembers from one check to the next. Package audit then audits its
// candidates job by job.
package incremental

import (
	"context"
	"fmt"
	"hash/maphash"
	"slices"

	"github.com/redis/go-redis/v9"

	"github.com/bulkaction/bulkaction/api"
	"github.com/bulkaction/bulkaction/internal/audit"
	"github.com/bulkaction/bulkaction/internal/audit/read"
	"github.com/bulkaction/bulkaction/internal/redisx"
	"github.com/bulkaction/bulkaction/internal/redisx/keyspace"
)

// Check looks for candidates among a partition's open groups. A group is a candidate if its counts
// do not add up or do not agree with the lengths of its states, queues and failures. It is one too
// if it has ready, in-flight or unreduced jobs and nothing about it has changed since the last
// check: such a job may be missing. A tenant is a candidate if it has fewer non-ready and suspended
// jobs than its groups count.
//
// It remembers some bytes per group from one check to the next. It is not safe for concurrent use.
type Check struct {
	read.Reader
	p     keyspace.Partition
	known map[string]*knownGroup // the open groups of the last check, by id
}

// knownGroup is what a check remembers of an open group.
type knownGroup struct {
	tenant, types string
	fingerprint   uint64 // of the group's counts and the lengths of its queues
	unchanged     int    // in how many checks in a row the fingerprint has been the same
	recheckAt     int    // the value of unchanged at which the group becomes a candidate again
}

// maxRecheckGap is the largest number of checks between two in which an unchanged group is a
// candidate. The gap grows up to it, because jobs that take long, or have no worker, don't change
// for long either.
const maxRecheckGap = 8

// New returns a check of a partition that knows no group yet. Its first run therefore finds no
// unchanged ones.
func New(conn *redisx.Conn, p keyspace.Partition) *Check {
	return &Check{Reader: read.Reader{Cmd: conn.Cmd}, p: p, known: map[string]*knownGroup{}}
}

// tenantBatch names the open groups of a tenant. They are read in one transaction if they are few.
type tenantBatch struct {
	tenant   string
	groups   []string
	commands int // how many commands read them
}

// Run makes one check of all open groups and returns the candidates. If alarmed is set, each group
// with ready, in-flight or unreduced jobs is a candidate.
func (c *Check) Run(ctx context.Context, alarmed bool) (audit.Candidates, error) {
	var ids []string
	if err := c.ReadByScore(ctx, c.p.Open(), func(page []string) error {
		ids = append(ids, page...)
		return nil
	}); err != nil {
		return audit.Candidates{}, fmt.Errorf("list open groups: %w", err)
	}
	if err := c.updateKnown(ctx, ids); err != nil {
		return audit.Candidates{}, fmt.Errorf("read groups: %w", err)
	}
	var found audit.Candidates
	for batches := c.batchByTenant(); len(batches) > 0; {
		n, commands := 0, 0
		for n < len(batches) && (n == 0 || commands+batches[n].commands <= read.PageSize) {
			commands += batches[n].commands
			n++
		}
		if err := c.checkBatches(ctx, batches[:n], alarmed, &found); err != nil {
			return audit.Candidates{}, fmt.Errorf("read counts: %w", err)
		}
		batches = batches[n:]
	}
	slices.Sort(found.Groups)
	found.Groups = slices.Compact(found.Groups)
	return found, nil
}

// updateKnown forgets the groups that are not open any more, and reads tenant and types of new
// ones.
func (c *Check) updateKnown(ctx context.Context, ids []string) error {
	known := make(map[string]*knownGroup, len(ids))
	var unknown []string
	for _, id := range ids {
		if g := c.known[id]; g != nil {
			known[id] = g
		} else {
			unknown = append(unknown, id)
		}
	}
	c.known = known
	for page := range slices.Chunk(unknown, read.PageSize) {
		cmds := make([]*redis.SliceCmd, len(page))
		if err := c.Pipeline(ctx, func(p redis.Pipeliner) {
			for i, id := range page {
				cmds[i] = p.HMGet(ctx, c.p.Group(id), "tenant", "types")
			}
		}); err != nil {
			return err
		}
		for i, id := range page {
			v := cmds[i].Val()
			known[id] = &knownGroup{tenant: read.Text(v[0]), types: read.Text(v[1])}
		}
	}
	return nil
}

// batchByTenant returns the known groups, one batch per tenant.
func (c *Check) batchByTenant() []tenantBatch {
	at := map[string]int{}
	var all []tenantBatch
	for id, g := range c.known {
		i, ok := at[g.tenant]
		if !ok {
			i = len(all)
			at[g.tenant], all = i, append(all, tenantBatch{tenant: g.tenant, commands: 2})
		}
		all[i].groups = append(all[i].groups, id)
		all[i].commands += 3 + len(read.SplitTypes(g.types))
	}
	return all
}

// countsFields lists the fields that are read of a group's hash. The code below uses their
// positions.
var countsFields = []string{
	"accepted", "waiting", "non_ready", "ready", "in_flight", "done", "failed", "cancelled", "reduced",
	"status", "types", "tenant",
}

// groupNumbers holds Redis's replies about a group: fields of its hash, and lengths.
type groupNumbers struct {
	counts           *redis.SliceCmd
	states, failures *redis.IntCmd
	queues           []*redis.IntCmd
}

// query adds the commands that read the numbers of a known group.
func (c *Check) query(ctx context.Context, p redis.Pipeliner, id string) groupNumbers {
	n := groupNumbers{
		counts:   p.HMGet(ctx, c.p.Group(id), countsFields...),
		states:   p.StrLen(ctx, c.p.States(id)),
		failures: p.HLen(ctx, c.p.Failures(id)),
	}
	for _, typ := range read.SplitTypes(c.known[id].types) {
		n.queues = append(n.queues, p.LLen(ctx, c.p.Queue(id, typ)))
	}
	return n
}

// hasWrongType reports whether a key of the group has the wrong Redis type.
func (n groupNumbers) hasWrongType() bool {
	return read.IsWrongType(n.counts.Err()) || read.IsWrongType(n.states.Err()) ||
		read.IsWrongType(n.failures.Err()) ||
		slices.ContainsFunc(n.queues, func(q *redis.IntCmd) bool { return read.IsWrongType(q.Err()) })
}

// checkBatches checks the groups and the non-ready jobs of some tenants, which are read in one
// transaction. A single tenant that is too large for that is passed on to checkLargeTenant.
func (c *Check) checkBatches(
	ctx context.Context, batches []tenantBatch, alarmed bool, found *audit.Candidates,
) error {
	if len(batches) == 1 && batches[0].commands > read.PageSize {
		return c.checkLargeTenant(ctx, batches[0], alarmed, found)
	}
	type reply struct {
		nonReady, suspended *redis.IntCmd
		groups              []groupNumbers
	}
	replies := make([]reply, len(batches))
	if err := c.Transaction(ctx, func(p redis.Pipeliner) {
		for i, b := range batches {
			replies[i] = reply{
				nonReady:  p.ZCard(ctx, c.p.NonReadyOf(b.tenant)),
				suspended: p.ZCard(ctx, c.p.SuspendedOf(b.tenant)),
			}
			for _, id := range b.groups {
				replies[i].groups = append(replies[i].groups, c.query(ctx, p, id))
			}
		}
	}); err != nil {
		return err
	}
	for i, b := range batches {
		r := replies[i]
		var sum nonReadyCounts
		for j, id := range b.groups {
			c.checkGroup(id, r.groups[j], alarmed, found, &sum)
		}
		sum.check(b.tenant, r.nonReady.Val()+r.suspended.Val(), found)
	}
	return nil
}

// checkLargeTenant checks a tenant with many groups. Everything about it is read twice, in several
// transactions, and its non-ready jobs are judged only if both readings are the same.
func (c *Check) checkLargeTenant(ctx context.Context, b tenantBatch, alarmed bool, found *audit.Candidates) error {
	var sums [2]nonReadyCounts
	var lengths [2]int64
	for reading := range sums {
		for page := range slices.Chunk(b.groups, read.PageSize/10) {
			numbers := make([]groupNumbers, len(page))
			if err := c.Transaction(ctx, func(p redis.Pipeliner) {
				for i, id := range page {
					numbers[i] = c.query(ctx, p, id)
				}
			}); err != nil {
				return err
			}
			for i, id := range page {
				if reading == 0 {
					c.checkGroup(id, numbers[i], alarmed, found, &sums[0])
				} else {
					sums[1].add(id, numbers[i])
				}
			}
		}
		var nonReady, suspended *redis.IntCmd
		if err := c.Transaction(ctx, func(p redis.Pipeliner) {
			nonReady, suspended = p.ZCard(ctx, c.p.NonReadyOf(b.tenant)), p.ZCard(ctx, c.p.SuspendedOf(b.tenant))
		}); err != nil {
			return err
		}
		lengths[reading] = nonReady.Val() + suspended.Val()
		if sums[0].unknown { // the non-ready jobs can't be judged, and a group may not be known any more
			return nil
		}
	}
	if sums[0].total == sums[1].total && sums[0].fingerprint == sums[1].fingerprint && lengths[0] == lengths[1] {
		sums[1].check(b.tenant, lengths[1], found)
	}
	return nil
}

// nonReadyCounts adds up what the groups of a tenant count as non-ready.
type nonReadyCounts struct {
	total       int64
	fingerprint uint64   // of the counts of all groups
	groups      []string // those that count non-ready jobs
	// unknown says that the sum can't be compared with the sorted sets: a group of the tenant is
	// cancelled, and its non-ready jobs leave one by one, or the counts of a group could not be
	// read.
	unknown bool
}

// add adds the counts of a group.
func (c *nonReadyCounts) add(id string, numbers groupNumbers) {
	v := numbers.counts.Val()
	nonReady := read.Int(v[2])
	c.total += nonReady
	c.fingerprint = 31*c.fingerprint + fingerprintOf(v)
	c.unknown = c.unknown || read.Text(v[9]) == string(api.StatusCancelled)
	if nonReady > 0 {
		c.groups = append(c.groups, id)
	}
}

// check adds the tenant and these groups to the candidates if the tenant has fewer non-ready and
// suspended jobs than its groups count. Have is how many it has.
func (c *nonReadyCounts) check(tenant string, have int64, found *audit.Candidates) {
	if have < c.total && !c.unknown {
		found.Tenants = append(found.Tenants, tenant)
		found.Groups = append(found.Groups, c.groups...)
	}
}

// fingerprintSeed makes fingerprints comparable within one process.
var fingerprintSeed = maphash.MakeSeed()

// fingerprintOf returns a hash of these fields.
func fingerprintOf(values []any) uint64 {
	var h maphash.Hash
	h.SetSeed(fingerprintSeed)
	for _, v := range values {
		_, _ = h.WriteString(read.Text(v)) // never fails
		_ = h.WriteByte('|')
	}
	return h.Sum64()
}

// checkGroup adds a group to the candidates if its numbers look wrong, or if they haven't changed
// although jobs are under way. It adds the group's non-ready jobs to nonReady, and remembers the
// numbers for the next check. It forgets a group that was deleted or has other types or another
// tenant.
func (c *Check) checkGroup(
	id string, numbers groupNumbers, alarmed bool, found *audit.Candidates, nonReady *nonReadyCounts,
) {
	v, g := numbers.counts.Val(), c.known[id]
	if numbers.hasWrongType() {
		found.Groups = append(found.Groups, id)
		nonReady.unknown = true
		return
	}
	status := read.Text(v[9])
	if status == "" || read.Text(v[10]) != g.types || read.Text(v[11]) != g.tenant {
		delete(c.known, id) // it was deleted, or the next check learns its new tenant or types
		nonReady.unknown = true
		return
	}
	nonReady.add(id, numbers)
	all, queued := int64(0), int64(0)
	for _, n := range v[1:8] {
		all += read.Int(n)
	}
	now := fingerprintOf(v)
	for _, q := range numbers.queues {
		queued += q.Val()
		now = 31*now + uint64(q.Val())
	}
	accepted, waiting, ready, inFlight := read.Int(v[0]), read.Int(v[1]), read.Int(v[3]), read.Int(v[4])
	done, failed, reduced := read.Int(v[5]), read.Int(v[6]), read.Int(v[8])
	underWay := ready+inFlight > 0 || done > reduced
	cancelled := status == string(api.StatusCancelled)
	wrong := all != accepted || numbers.states.Val() != 2*accepted || numbers.failures.Val() != failed ||
		reduced > done ||
		!cancelled && queued != waiting
	if now != g.fingerprint {
		g.fingerprint, g.unchanged, g.recheckAt = now, 0, 1
	} else {
		g.unchanged++
	}
	recheck := (wrong || underWay) && g.unchanged >= g.recheckAt
	if recheck || wrong && g.unchanged == 0 || underWay && alarmed {
		found.Groups = append(found.Groups, id)
	}
	if recheck {
		g.recheckAt = g.unchanged + min(g.unchanged, maxRecheckGap)
	}
}
