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

// Sentry looks at a partition's open groups in rounds, without reading a job, and says who deserves
// a closer look: whose ledger does not add up, agrees with the lengths of its states, queues and
// failures, or has not changed since the round before although jobs are under way; and tenants who
// have less parked than their groups' ledgers say. It remembers some bytes a group.
type Sentry struct {
	db
	p      keyspace.Partition
	groups map[string]*glimpse // of the round before
}

// glimpse is what is remembered of an open group.
type glimpse struct {
	tenant, types string
	print         uint64 // of its ledger and lengths
	same, next    int    // rounds for which it has stayed so, and the one of the next closer look
}

// restRounds is after how many rounds at the latest a group is looked at again that stays as it is.
const restRounds = 8

// NewSentry has seen nothing yet.
func NewSentry(conn *redisx.Conn, p keyspace.Partition) *Sentry {
	return &Sentry{db: db{cmd: conn.Cmd}, p: p, groups: map[string]*glimpse{}}
}

// beat is a tenant with its open groups, which are read at one instant.
type beat struct {
	tenant string
	groups []string
	size   int // commands
}

// Round looks at all open groups. Alarmed, it takes everything that is under way for suspicious.
func (s *Sentry) Round(ctx context.Context, alarmed bool) (Suspects, error) {
	var ids []string
	if err := s.ranked(ctx, s.p.Open(), func(page []string) error {
		ids = append(ids, page...)
		return nil
	}); err != nil {
		return Suspects{}, fmt.Errorf("list open groups: %w", err)
	}
	if err := s.meet(ctx, ids); err != nil {
		return Suspects{}, fmt.Errorf("read groups: %w", err)
	}
	var found Suspects
	for beats := s.beats(); len(beats) > 0; {
		n, size := 0, 0
		for n < len(beats) && (n == 0 || size+beats[n].size <= pageSize) {
			size += beats[n].size
			n++
		}
		if err := s.walk(ctx, beats[:n], alarmed, &found); err != nil {
			return Suspects{}, fmt.Errorf("read ledgers: %w", err)
		}
		beats = beats[n:]
	}
	slices.Sort(found.Groups)
	found.Groups = slices.Compact(found.Groups)
	return found, nil
}

// meet forgets groups that are not open any more, and asks new ones for what does not
// change, or hardly.
func (s *Sentry) meet(ctx context.Context, ids []string) error {
	known := make(map[string]*glimpse, len(ids))
	var fresh []string
	for _, id := range ids {
		if g := s.groups[id]; g != nil {
			known[id] = g
		} else {
			fresh = append(fresh, id)
		}
	}
	s.groups = known
	for page := range slices.Chunk(fresh, pageSize) {
		cmds := make([]*redis.SliceCmd, len(page))
		if err := s.inTurn(ctx, func(p redis.Pipeliner) {
			for i, id := range page {
				cmds[i] = p.HMGet(ctx, s.p.Group(id), "tenant", "types")
			}
		}); err != nil {
			return err
		}
		for i, id := range page {
			v := cmds[i].Val()
			known[id] = &glimpse{tenant: text(v[0]), types: text(v[1])}
		}
	}
	return nil
}

func (s *Sentry) beats() []beat {
	at := map[string]int{}
	var all []beat
	for id, g := range s.groups {
		i, ok := at[g.tenant]
		if !ok {
			i = len(all)
			at[g.tenant], all = i, append(all, beat{tenant: g.tenant, size: 2})
		}
		all[i].groups = append(all[i].groups, id)
		all[i].size += 3 + len(split(g.types))
	}
	return all
}

// ledgerFields are read of a group's hash, in this order.
var ledgerFields = []string{
	"accepted", "waiting", "non_ready", "ready", "in_flight", "done", "failed", "cancelled", "reduced",
	"status", "types", "tenant",
}

// sight is what is read of a group.
type sight struct {
	ledger           *redis.SliceCmd
	states, failures *redis.IntCmd
	queues           []*redis.IntCmd
}

func (s *Sentry) see(ctx context.Context, p redis.Pipeliner, id string) sight {
	x := sight{
		ledger:   p.HMGet(ctx, s.p.Group(id), ledgerFields...),
		states:   p.StrLen(ctx, s.p.States(id)),
		failures: p.HLen(ctx, s.p.Failures(id)),
	}
	for _, typ := range split(s.groups[id].types) {
		x.queues = append(x.queues, p.LLen(ctx, s.p.Queue(id, typ)))
	}
	return x
}

func (x sight) hasWrongType() bool {
	return isWrongType(x.ledger.Err()) || isWrongType(x.states.Err()) || isWrongType(x.failures.Err()) ||
		slices.ContainsFunc(x.queues, func(q *redis.IntCmd) bool { return isWrongType(q.Err()) })
}

// walk reads some tenants at one instant, or one that is too large for that in pieces, twice.
func (s *Sentry) walk(ctx context.Context, beats []beat, alarmed bool, found *Suspects) error {
	if len(beats) == 1 && beats[0].size > pageSize {
		return s.large(ctx, beats[0], alarmed, found)
	}
	type reply struct {
		parked, aside *redis.IntCmd
		groups        []sight
	}
	replies := make([]reply, len(beats))
	if err := s.atOnce(ctx, func(p redis.Pipeliner) {
		for i, b := range beats {
			replies[i] = reply{
				parked: p.ZCard(ctx, s.p.NonReadyOf(b.tenant)),
				aside:  p.ZCard(ctx, s.p.SuspendedOf(b.tenant)),
			}
			for _, id := range b.groups {
				replies[i].groups = append(replies[i].groups, s.see(ctx, p, id))
			}
		}
	}); err != nil {
		return err
	}
	for i, b := range beats {
		r := replies[i]
		var sum parkedJobs
		for j, id := range b.groups {
			s.judge(id, r.groups[j], alarmed, found, &sum)
		}
		sum.judge(b.tenant, r.parked.Val()+r.aside.Val(), found)
	}
	return nil
}

// large reads a tenant of many groups. What it has parked is judged when two readings agree.
func (s *Sentry) large(ctx context.Context, b beat, alarmed bool, found *Suspects) error {
	var sums [2]parkedJobs
	var cards [2]int64
	for turn := range sums {
		for page := range slices.Chunk(b.groups, pageSize/10) {
			sights := make([]sight, len(page))
			if err := s.atOnce(ctx, func(p redis.Pipeliner) {
				for i, id := range page {
					sights[i] = s.see(ctx, p, id)
				}
			}); err != nil {
				return err
			}
			for i, id := range page {
				if turn == 0 {
					s.judge(id, sights[i], alarmed, found, &sums[0])
				} else {
					sums[1].add(id, sights[i])
				}
			}
		}
		var parked, aside *redis.IntCmd
		if err := s.atOnce(ctx, func(p redis.Pipeliner) {
			parked, aside = p.ZCard(ctx, s.p.NonReadyOf(b.tenant)), p.ZCard(ctx, s.p.SuspendedOf(b.tenant))
		}); err != nil {
			return err
		}
		cards[turn] = parked.Val() + aside.Val()
		if sums[0].sweeping { // nothing is judged then, and who is gone or to be met anew can't be read again
			return nil
		}
	}
	if sums[0].n == sums[1].n && sums[0].print == sums[1].print && cards[0] == cards[1] {
		sums[1].judge(b.tenant, cards[1], found)
	}
	return nil
}

// parkedJobs are what the ledgers of a tenant's groups count as non-ready.
type parkedJobs struct {
	n        int64
	print    uint64
	groups   []string
	sweeping bool // a cancelled group's parked jobs leave one by one, and what others have can't be told
}

func (x *parkedJobs) add(id string, s sight) {
	v := s.ledger.Val()
	n := number(v[2])
	x.n += n
	x.print = 31*x.print + fingerprint(v)
	x.sweeping = x.sweeping || text(v[9]) == string(api.StatusCancelled)
	if n > 0 {
		x.groups = append(x.groups, id)
	}
}

func (x *parkedJobs) judge(tenant string, have int64, found *Suspects) {
	if have < x.n && !x.sweeping {
		found.Tenants = append(found.Tenants, tenant)
		found.Groups = append(found.Groups, x.groups...)
	}
}

func fingerprint(values []any) uint64 {
	var h maphash.Hash
	h.SetSeed(printSeed)
	for _, v := range values {
		_, _ = h.WriteString(text(v)) // never fails
		_ = h.WriteByte('|')
	}
	return h.Sum64()
}

// judge holds what is cheap to know of a group against the laws.
func (s *Sentry) judge(id string, x sight, alarmed bool, found *Suspects, sum *parkedJobs) {
	v, g := x.ledger.Val(), s.groups[id]
	if x.hasWrongType() {
		found.Groups = append(found.Groups, id)
		sum.sweeping = true
		return
	}
	status := text(v[9])
	if status == "" || text(v[10]) != g.types || text(v[11]) != g.tenant {
		delete(s.groups, id) // it is gone, or met anew in the next round
		sum.sweeping = true
		return
	}
	sum.add(id, x)
	all, queued := int64(0), int64(0)
	for _, n := range v[1:8] {
		all += number(n)
	}
	print := fingerprint(v)
	for _, q := range x.queues {
		queued += q.Val()
		print = 31*print + uint64(q.Val())
	}
	accepted, waiting, ready, inFlight := number(v[0]), number(v[1]), number(v[3]), number(v[4])
	done, failed, reduced := number(v[5]), number(v[6]), number(v[8])
	underWay := ready+inFlight > 0 || done > reduced
	cancelled := status == string(api.StatusCancelled)
	wrong := all != accepted || x.states.Val() != 2*accepted || x.failures.Val() != failed || reduced > done ||
		!cancelled && queued != waiting
	if print != g.print {
		g.print, g.same, g.next = print, 0, 1
	} else {
		g.same++
	}
	again := (wrong || underWay) && g.same >= g.next
	if again || wrong && g.same == 0 || underWay && alarmed {
		found.Groups = append(found.Groups, id)
	}
	if again {
		g.next = g.same + min(g.same, restRounds)
	}
}
