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

// tenant is what counts for a tenant's counters.
type tenant struct {
	name   string
	newest string        // of its groups, before they were listed
	groups []groupHeader // the open ones
	parked int64         // about how many jobs
}

func (t *tenant) commands() int {
	n := 7
	for _, g := range t.groups {
		n += 2 + len(split(g.types))
	}
	return n
}

// small says whether all of it fits into one transaction.
func (t *tenant) small() bool { return t.commands() <= pageSize && t.parked <= pageSize }

// tally is what a tenant's counters say, and what they should.
type tally struct {
	have, want        [3]int64 // see counterNames
	inSet, paused     bool     // in the set of active tenants; a paused one is not
	waiting, nonReady map[string]int64
	whole             bool // want is what it was at the instant of have
	print             uint64
}

var counterNames = [3]string{"unfinished", "active", "congested"}

// tallies yields a tally of each tenant.
func (ps *pass) tallies(ctx context.Context, names []string, yield func(*tenant, tally)) error {
	for page := range slices.Chunk(names, pageSize/5) {
		tenants, err := ps.list(ctx, page)
		if err != nil {
			return err
		}
		for len(tenants) > 0 {
			n, commands, parked := 0, 0, int64(0)
			for n < len(tenants) && (n == 0 ||
				commands+tenants[n].commands() <= pageSize && parked+tenants[n].parked <= pageSize) {
				commands += tenants[n].commands()
				parked += tenants[n].parked
				n++
			}
			if err := ps.tally(ctx, tenants[:n], yield); err != nil {
				return err
			}
			tenants = tenants[n:]
		}
	}
	return nil
}

// tally reads some small tenants at once, or a large one twice.
func (ps *pass) tally(ctx context.Context, tenants []*tenant, yield func(*tenant, tally)) error {
	if t := tenants[0]; !t.small() {
		y, err := ps.twice(ctx, t)
		if err != nil {
			return err
		}
		yield(t, y)
		return nil
	}
	samples := make([]*sample, len(tenants))
	err := ps.atOnce(ctx, func(p redis.Pipeliner) {
		for i, t := range tenants {
			samples[i] = &sample{tenant: t}
			for _, ask := range ps.asks(ctx, samples[i]) {
				ask(p)
			}
			samples[i].blobs = p.ZRange(ctx, ps.p.NonReadyOf(t.name), 0, 2*pageSize)
			samples[i].aside = p.ZRange(ctx, ps.p.SuspendedOf(t.name), 0, 2*pageSize)
		}
	})
	if err != nil {
		return err
	}
	for i, t := range tenants {
		y := samples[i].tally()
		y.count(samples[i].blobs.Val(), samples[i].card.Val())
		y.countAside(samples[i].aside.Val(), samples[i].asideCard.Val())
		yield(t, y)
	}
	return nil
}

// twice reads a large tenant two times. The tally is whole when both are the same and nothing
// became ready meanwhile.
func (ps *pass) twice(ctx context.Context, t *tenant) (tally, error) {
	before, err := ps.newestReady(ctx)
	if err != nil {
		return tally{}, err
	}
	first, err := ps.once(ctx, t)
	if err != nil {
		return tally{}, err
	}
	second, err := ps.once(ctx, t)
	if err != nil {
		return tally{}, err
	}
	after, err := ps.newestReady(ctx)
	second.whole = second.whole && first.print == second.print && before == after
	return second, err
}

// once reads a tenant page by page.
func (ps *pass) once(ctx context.Context, t *tenant) (tally, error) {
	s := &sample{tenant: t}
	for page := range slices.Chunk(ps.asks(ctx, s), pageSize/10) {
		err := ps.inTurn(ctx, func(p redis.Pipeliner) {
			for _, ask := range page {
				ask(p)
			}
		})
		if err != nil {
			return tally{}, err
		}
	}
	y, scanned := s.tally(), int64(0)
	err := ps.members(ctx, ps.p.NonReadyOf(t.name), func(page []string) error {
		scanned += int64(len(page))
		y.count(page, int64(len(page)))
		return nil
	})
	if err != nil {
		return y, err
	}
	aside := int64(0)
	err = ps.members(ctx, ps.p.SuspendedOf(t.name), func(page []string) error {
		aside += int64(len(page))
		y.countAside(page, int64(len(page)))
		return nil
	})
	y.whole = y.whole && scanned == s.card.Val() && aside == s.asideCard.Val() // a scan may yield an element twice
	return y, err
}

// sample is what Redis says of a tenant.
type sample struct {
	*tenant
	counters *redis.SliceCmd
	inSet    *redis.BoolCmd
	newest   *redis.StringSliceCmd
	card     *redis.IntCmd
	blobs    *redis.StringSliceCmd
	// What was put aside, because it is paused.
	asideCard *redis.IntCmd
	aside     *redis.StringSliceCmd
	open      []groupSample
}

type groupSample struct {
	ledger *redis.SliceCmd
	held   *redis.FloatCmd // until its time comes
	queues []*redis.IntCmd
}

// asks are the questions about a tenant: one, and one a group. They may be asked again.
func (ps *pass) asks(ctx context.Context, s *sample) []func(redis.Pipeliner) {
	s.open = make([]groupSample, len(s.groups))
	asks := []func(redis.Pipeliner){func(p redis.Pipeliner) {
		s.counters = p.HMGet(ctx, ps.p.Tenant(s.name), counterNames[0], counterNames[1], counterNames[2], "paused")
		s.inSet, s.newest = p.SIsMember(ctx, ps.p.Active(), s.name), p.ZRevRange(ctx, ps.p.GroupsOf(s.name), 0, 0)
		s.card, s.asideCard = p.ZCard(ctx, ps.p.NonReadyOf(s.name)), p.ZCard(ctx, ps.p.SuspendedOf(s.name))
	}}
	for i, g := range s.groups {
		asks = append(asks, func(p redis.Pipeliner) {
			o := groupSample{
				ledger: p.HMGet(ctx, ps.p.Group(g.id), "types", "waiting", "non_ready", "ready", "in_flight",
					"accepted", "failed", "at:created", "paused"),
				held: p.ZScore(ctx, ps.p.Scheduled(), g.id),
			}
			for _, typ := range split(g.types) {
				o.queues = append(o.queues, p.LLen(ctx, ps.p.Queue(g.id, typ)))
			}
			s.open[i] = o
		})
	}
	return asks
}

// tally adds up what the tenant's groups hold. It is whole when they are those that were listed.
func (s *sample) tally() tally {
	y := tally{waiting: map[string]int64{}, nonReady: map[string]int64{}, inSet: s.inSet.Val()}
	v := s.counters.Val()
	for i := range y.have {
		y.have[i] = number(v[i])
	}
	y.paused = text(v[3]) != ""
	newest := s.newest.Val()
	y.whole = len(newest) == 0 && s.tenant.newest == "" || len(newest) == 1 && newest[0] == s.tenant.newest
	y.mark("%v %v %v %v", y.have, y.inSet, y.paused, newest)
	for i, g := range s.groups {
		o := s.open[i]
		v := o.ledger.Val()
		held := o.held.Err() == nil || text(v[8]) != ""
		y.whole = y.whole && text(v[0]) == g.types
		for _, n := range v[1:5] {
			y.want[0] += number(n)
		}
		y.mark("%v %v", v, held)
		for j, typ := range split(g.types) {
			n := o.queues[j].Val()
			y.waiting[typ] += n
			if !held {
				y.want[1] += n
			}
			y.mark("%d", n)
		}
	}
	return y
}

// prints are comparable within one process.
var fingerprintSeed = maphash.MakeSeed()

func (y *tally) mark(format string, args ...any) {
	y.print = 31*y.print + maphash.String(fingerprintSeed, fmt.Sprintf(format, args...))
}

// count adds parked jobs, all of which there are n.
func (y *tally) count(blobs []string, n int64) {
	y.whole = y.whole && int64(len(blobs)) == n
	for _, blob := range blobs {
		y.print += maphash.String(fingerprintSeed, blob) // in whatever order
		d, err := ledger.ParseJob(blob)
		if err != nil {
			continue // reported where it lies
		}
		y.nonReady[d.Type]++
		switch d.Reason {
		case ledger.ReasonRate:
			y.want[1]++
			y.want[2]++
		case ledger.ReasonScheduled, ledger.ReasonPaused:
		default:
			y.want[2]++
		}
	}
}

// countAside adds jobs that were put aside, all of which there are n: they want no permit and are
// not congested.
func (y *tally) countAside(blobs []string, n int64) {
	y.whole = y.whole && int64(len(blobs)) == n
	for _, blob := range blobs {
		y.print += 7 * maphash.String(fingerprintSeed, blob)
		if d, err := ledger.ParseJob(blob); err == nil {
			y.nonReady[d.Type]++
		}
	}
}

// list finds the open groups of some tenants.
func (ps *pass) list(ctx context.Context, names []string) ([]*tenant, error) {
	const few = 10
	type replies struct {
		newest, first *redis.StringSliceCmd
		parked, aside *redis.IntCmd
	}
	cmds := make([]replies, len(names))
	err := ps.inTurn(ctx, func(p redis.Pipeliner) {
		for i, name := range names {
			key := ps.p.GroupsOf(name)
			cmds[i] = replies{
				newest: p.ZRevRange(ctx, key, 0, 0),
				first:  p.ZRange(ctx, key, 0, few-1),
				parked: p.ZCard(ctx, ps.p.NonReadyOf(name)),
				aside:  p.ZCard(ctx, ps.p.SuspendedOf(name)),
			}
		}
	})
	if err != nil {
		return nil, err
	}
	type pair struct {
		*tenant
		group string
	}
	tenants, pairs := make([]*tenant, len(names)), []pair(nil)
	for i, name := range names {
		t := &tenant{
			name:   name,
			newest: strings.Join(cmds[i].newest.Val(), ""),
			parked: cmds[i].parked.Val() + cmds[i].aside.Val(),
		}
		tenants[i] = t
		add := func(ids []string) error {
			for _, id := range ids {
				pairs = append(pairs, pair{t, id})
			}
			return nil
		}
		if ids := cmds[i].first.Val(); len(ids) < few {
			_ = add(ids) // never fails
		} else if err := ps.ranked(ctx, ps.p.GroupsOf(name), add); err != nil {
			return nil, err
		}
	}
	for page := range slices.Chunk(pairs, pageSize/2) {
		open, types := make([]*redis.FloatCmd, len(page)), make([]*redis.StringCmd, len(page))
		err := ps.inTurn(ctx, func(p redis.Pipeliner) {
			for i, x := range page {
				open[i], types[i] = p.ZScore(ctx, ps.p.Open(), x.group), p.HGet(ctx, ps.p.Group(x.group), "types")
			}
		})
		if err != nil {
			return nil, err
		}
		for i, x := range page {
			if open[i].Err() == nil {
				x.groups = append(x.groups, groupHeader{id: x.group, types: types[i].Val()})
			}
		}
	}
	return tenants, nil
}
