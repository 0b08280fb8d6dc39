package audit

import (
	"context"
	"fmt"
	"hash/maphash"
	"slices"

	"github.com/redis/go-redis/v9"

	"github.com/bulkaction/bulkaction/api"
	"github.com/bulkaction/bulkaction/internal/redisx"
	"github.com/bulkaction/bulkaction/internal/redisx/keyspace"
)

// IncrementalCheck looks at a partition's open groups in rounds, without reading a job, and says
// who deserves a closer look: whose ledger does not add up, agrees with the lengths of its states,
// queues and failures, or has not changed since the round before although jobs are under way; and
// tenants who have less parked than their groups' ledgers say. It remembers some bytes a group.
type IncrementalCheck struct {
	reader
	p     keyspace.Partition
	known map[string]*knownGroup // of the round before
}

// knownGroup is what is remembered of an open group.
type knownGroup struct {
	tenant, types        string
	fingerprint          uint64 // of its ledger and lengths
	unchanged, recheckAt int    // rounds for which it has stayed so, and the one of the next closer look
}

// maxRecheckGap is after how many rounds at the latest a group is looked at again that stays as it
// is.
const maxRecheckGap = 8

// NewIncrementalCheck has seen nothing yet.
func NewIncrementalCheck(conn *redisx.Conn, p keyspace.Partition) *IncrementalCheck {
	return &IncrementalCheck{reader: reader{cmd: conn.Cmd}, p: p, known: map[string]*knownGroup{}}
}

// tenantBatch is a tenant with its open groups, which are read at one instant.
type tenantBatch struct {
	tenant   string
	groups   []string
	commands int // commands
}

// Run looks at all open groups. Alarmed, it takes everything that is under way for suspicious.
func (c *IncrementalCheck) Run(ctx context.Context, alarmed bool) (Candidates, error) {
	var ids []string
	if err := c.readByScore(ctx, c.p.Open(), func(page []string) error {
		ids = append(ids, page...)
		return nil
	}); err != nil {
		return Candidates{}, fmt.Errorf("list open groups: %w", err)
	}
	if err := c.updateKnown(ctx, ids); err != nil {
		return Candidates{}, fmt.Errorf("read groups: %w", err)
	}
	var found Candidates
	for batches := c.batchByTenant(); len(batches) > 0; {
		n, commands := 0, 0
		for n < len(batches) && (n == 0 || commands+batches[n].commands <= pageSize) {
			commands += batches[n].commands
			n++
		}
		if err := c.checkBatches(ctx, batches[:n], alarmed, &found); err != nil {
			return Candidates{}, fmt.Errorf("read ledgers: %w", err)
		}
		batches = batches[n:]
	}
	slices.Sort(found.Groups)
	found.Groups = slices.Compact(found.Groups)
	return found, nil
}

// updateKnown forgets groups that are not open any more, and asks new ones for what does not
// change, or hardly.
func (c *IncrementalCheck) updateKnown(ctx context.Context, ids []string) error {
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
	for page := range slices.Chunk(unknown, pageSize) {
		cmds := make([]*redis.SliceCmd, len(page))
		if err := c.pipeline(ctx, func(p redis.Pipeliner) {
			for i, id := range page {
				cmds[i] = p.HMGet(ctx, c.p.Group(id), "tenant", "types")
			}
		}); err != nil {
			return err
		}
		for i, id := range page {
			v := cmds[i].Val()
			known[id] = &knownGroup{tenant: asText(v[0]), types: asText(v[1])}
		}
	}
	return nil
}

func (c *IncrementalCheck) batchByTenant() []tenantBatch {
	at := map[string]int{}
	var all []tenantBatch
	for id, g := range c.known {
		i, ok := at[g.tenant]
		if !ok {
			i = len(all)
			at[g.tenant], all = i, append(all, tenantBatch{tenant: g.tenant, commands: 2})
		}
		all[i].groups = append(all[i].groups, id)
		all[i].commands += 3 + len(splitTypes(g.types))
	}
	return all
}

// countsFields are read of a group's hash, in this order.
var countsFields = []string{
	"accepted", "waiting", "non_ready", "ready", "in_flight", "done", "failed", "cancelled", "reduced",
	"status", "types", "tenant",
}

// groupNumbers is what is read of a group.
type groupNumbers struct {
	counts           *redis.SliceCmd
	states, failures *redis.IntCmd
	queues           []*redis.IntCmd
}

func (c *IncrementalCheck) query(ctx context.Context, p redis.Pipeliner, id string) groupNumbers {
	n := groupNumbers{
		counts:   p.HMGet(ctx, c.p.Group(id), countsFields...),
		states:   p.StrLen(ctx, c.p.States(id)),
		failures: p.HLen(ctx, c.p.Failures(id)),
	}
	for _, typ := range splitTypes(c.known[id].types) {
		n.queues = append(n.queues, p.LLen(ctx, c.p.Queue(id, typ)))
	}
	return n
}

func (n groupNumbers) hasWrongType() bool {
	return isWrongType(n.counts.Err()) || isWrongType(n.states.Err()) || isWrongType(n.failures.Err()) ||
		slices.ContainsFunc(n.queues, func(q *redis.IntCmd) bool { return isWrongType(q.Err()) })
}

// checkBatches reads some tenants at one instant, or one that is too large for that in pieces,
// twice.
func (c *IncrementalCheck) checkBatches(
	ctx context.Context, batches []tenantBatch, alarmed bool, found *Candidates,
) error {
	if len(batches) == 1 && batches[0].commands > pageSize {
		return c.checkLargeTenant(ctx, batches[0], alarmed, found)
	}
	type reply struct {
		parked, suspended *redis.IntCmd
		groups            []groupNumbers
	}
	replies := make([]reply, len(batches))
	if err := c.transaction(ctx, func(p redis.Pipeliner) {
		for i, b := range batches {
			replies[i] = reply{
				parked:    p.ZCard(ctx, c.p.NonReadyOf(b.tenant)),
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
		sum.check(b.tenant, r.parked.Val()+r.suspended.Val(), found)
	}
	return nil
}

// checkLargeTenant reads a tenant of many groups. What it has parked is judged when two readings
// agree.
func (c *IncrementalCheck) checkLargeTenant(ctx context.Context, b tenantBatch, alarmed bool, found *Candidates) error {
	var sums [2]nonReadyCounts
	var lengths [2]int64
	for reading := range sums {
		for page := range slices.Chunk(b.groups, pageSize/10) {
			numbers := make([]groupNumbers, len(page))
			if err := c.transaction(ctx, func(p redis.Pipeliner) {
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
		var parked, suspended *redis.IntCmd
		if err := c.transaction(ctx, func(p redis.Pipeliner) {
			parked, suspended = p.ZCard(ctx, c.p.NonReadyOf(b.tenant)), p.ZCard(ctx, c.p.SuspendedOf(b.tenant))
		}); err != nil {
			return err
		}
		lengths[reading] = parked.Val() + suspended.Val()
		if sums[0].unknown { // nothing is judged then, and who is gone or to be met anew can't be read again
			return nil
		}
	}
	if sums[0].total == sums[1].total && sums[0].fingerprint == sums[1].fingerprint && lengths[0] == lengths[1] {
		sums[1].check(b.tenant, lengths[1], found)
	}
	return nil
}

// nonReadyCounts are what the ledgers of a tenant's groups count as non-ready.
type nonReadyCounts struct {
	total       int64
	fingerprint uint64
	groups      []string
	unknown     bool // a cancelled group's parked jobs leave one by one, and what others have can't be told
}

func (c *nonReadyCounts) add(id string, numbers groupNumbers) {
	v := numbers.counts.Val()
	nonReady := asInt(v[2])
	c.total += nonReady
	c.fingerprint = 31*c.fingerprint + fingerprintOf(v)
	c.unknown = c.unknown || asText(v[9]) == string(api.StatusCancelled)
	if nonReady > 0 {
		c.groups = append(c.groups, id)
	}
}

func (c *nonReadyCounts) check(tenant string, have int64, found *Candidates) {
	if have < c.total && !c.unknown {
		found.Tenants = append(found.Tenants, tenant)
		found.Groups = append(found.Groups, c.groups...)
	}
}

func fingerprintOf(values []any) uint64 {
	var h maphash.Hash
	h.SetSeed(fingerprintSeed)
	for _, v := range values {
		_, _ = h.WriteString(asText(v)) // never fails
		_ = h.WriteByte('|')
	}
	return h.Sum64()
}

// checkGroup holds what is cheap to know of a group against the laws.
func (c *IncrementalCheck) checkGroup(
	id string, numbers groupNumbers, alarmed bool, found *Candidates, nonReady *nonReadyCounts,
) {
	v, g := numbers.counts.Val(), c.known[id]
	if numbers.hasWrongType() {
		found.Groups = append(found.Groups, id)
		nonReady.unknown = true
		return
	}
	status := asText(v[9])
	if status == "" || asText(v[10]) != g.types || asText(v[11]) != g.tenant {
		delete(c.known, id) // it is gone, or met anew in the next round
		nonReady.unknown = true
		return
	}
	nonReady.add(id, numbers)
	all, queued := int64(0), int64(0)
	for _, n := range v[1:8] {
		all += asInt(n)
	}
	now := fingerprintOf(v)
	for _, q := range numbers.queues {
		queued += q.Val()
		now = 31*now + uint64(q.Val())
	}
	accepted, waiting, ready, inFlight := asInt(v[0]), asInt(v[1]), asInt(v[3]), asInt(v[4])
	done, failed, reduced := asInt(v[5]), asInt(v[6]), asInt(v[8])
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
