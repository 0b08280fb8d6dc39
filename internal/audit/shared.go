package audit

import (
	"context"
	"maps"
	"slices"
	"strings"

	"github.com/redis/go-redis/v9"

	"github.com/bulkaction/bulkaction/api"
	"github.com/bulkaction/bulkaction/internal/ledger"
)

// live is a group with jobs in places that groups share.
type live struct {
	id, tenant, created string
	types               []string
	sieve               sieve // from the first such job to the last
}

// inShared says whether a job with a state lies in a place that groups share.
func inShared(letter ledger.Letter) bool {
	return letter == ledger.NonReady || letter == ledger.Ready || letter == ledger.InFlight || letter == ledger.Done
}

// keep remembers what of a group has to be sought in shared places.
func (l *look) keep(g *group) {
	jobs := len(g.states) / 2
	from, to := 0, jobs
	for from < jobs && !inShared(ledger.StateAt(g.states, int64(from)).Letter()) {
		from++
	}
	for to > from && !inShared(ledger.StateAt(g.states, int64(to-1)).Letter()) {
		to--
	}
	if from == to {
		return
	}
	l.live[g.id] = &live{
		id: g.id, tenant: g.tenant, created: g.hash["at:created"], types: g.types,
		sieve: sieve{first: int64(from), base: strings.Clone(g.states[2*from : 2*to])},
	}
	l.bytes += 2*(to-from) + 256
}

// shared looks for the jobs of the groups that are kept in the places that groups share, and judges
// what it found. At last it has read all such places.
func (l *look) shared(ctx context.Context, last bool) error {
	tenants := map[string]bool{}
	for _, g := range l.live {
		tenants[g.tenant] = true
	}
	reads := l.reads()
	if last && l.opts.only == nil {
		if err := l.others(ctx, tenants); err != nil {
			return err
		}
	}
	for _, typ := range slices.Sorted(maps.Keys(l.types)) {
		if !reads[inReady] {
			break
		}
		if err := l.ready(ctx, typ); err != nil {
			return err
		}
	}
	if reads[inStream] {
		if err := l.results(ctx); err != nil {
			return err
		}
	}
	for page := range slices.Chunk(slices.Sorted(maps.Keys(tenants)), pageSize) {
		cards, aside := make([]*redis.IntCmd, len(page)), make([]*redis.IntCmd, len(page))
		err := l.inTurn(ctx, func(p redis.Pipeliner) {
			for i, t := range page {
				cards[i], aside[i] = p.ZCard(ctx, l.p.NonReadyOf(t)), p.ZCard(ctx, l.p.SuspendedOf(t))
			}
		})
		if err != nil {
			return err
		}
		for i, t := range page {
			if !l.parked(t) {
				continue
			}
			if cards[i].Val() > 0 {
				if err := l.nonReady(ctx, t, l.p.NonReadyOf(t)); err != nil {
					return err
				}
			}
			if aside[i].Val() > 0 {
				if err := l.nonReady(ctx, t, l.p.SuspendedOf(t)); err != nil {
					return err
				}
			}
		}
	}
	err := l.judge(ctx, reads)
	clear(l.live)
	l.bytes = 0
	return err
}

// others adds the types and tenants that no group of this look has told of, and the tenants whose
// set was not read yet.
func (l *look) others(ctx context.Context, tenants map[string]bool) error {
	note := func(set map[string]bool) func([]string) error {
		return func(names []string) error {
			for _, name := range names {
				set[name] = true
			}
			return nil
		}
	}
	if err := l.members(ctx, l.p.Types(), note(l.types)); err != nil {
		return err
	}
	if err := l.members(ctx, l.p.NonReady(), note(l.tenants)); err != nil {
		return err
	}
	active := func(p redis.Pipeliner, cursor uint64) *redis.ScanCmd {
		return p.SScan(ctx, l.p.Active(), cursor, "", pageSize)
	}
	if err := l.scan(ctx, active, note(l.tenants)); err != nil {
		return err
	}
	aside := func(p redis.Pipeliner, cursor uint64) *redis.ScanCmd {
		return p.SScan(ctx, l.p.Suspended(), cursor, "", pageSize)
	}
	if err := l.scan(ctx, aside, note(l.tenants)); err != nil {
		return err
	}
	for t := range l.tenants {
		if !l.swept[l.p.NonReadyOf(t)] {
			tenants[t] = true
		}
	}
	return nil
}

// ready reads the ready stream of a type.
func (l *look) ready(ctx context.Context, typ string) error {
	key := l.p.Ready(typ)
	defer func() { l.swept[key] = true }()
	return l.stream(ctx, key, func(page []redis.XMessage) error {
		var foreign []item
		for _, e := range page {
			blob := ledger.MessageBlob(e.Values)
			d, err := ledger.ParseJob(blob)
			if err != nil {
				l.unreadable(inReady, key, e.ID)
				continue
			}
			it := item{
				place:   inReady,
				key:     key,
				id:      e.ID,
				group:   d.Group,
				ordinal: d.Ordinal,
				attempt: d.Attempt,
				typ:     d.Type,
			}
			if d.Type != typ {
				it.wrong = "of type " + d.Type
			}
			if known, _ := l.find(it); !known {
				foreign = append(foreign, it)
			}
		}
		return l.foreign(ctx, foreign)
	})
}

// results reads the results stream.
func (l *look) results(ctx context.Context) error {
	key := l.p.ResultStream()
	defer func() { l.swept[key] = true }()
	return l.stream(ctx, key, func(page []redis.XMessage) error {
		var foreign []item
		for _, e := range page {
			group, lines := text(e.Values["g"]), text(e.Values["l"])
			for line := range strings.SplitSeq(lines, "\n") {
				ordinal, ok := result(line)
				if !ok {
					l.unreadable(inStream, key, e.ID)
					continue
				}
				it := item{place: inStream, key: key, id: e.ID, group: group, ordinal: ordinal, attempt: unknown}
				if known, _ := l.find(it); !known {
					foreign = append(foreign, it)
				}
			}
		}
		return l.foreign(ctx, foreign)
	})
}

// nonReady reads what a tenant has parked, or put aside.
func (l *look) nonReady(ctx context.Context, tenant, key string) error {
	defer func() { l.swept[key] = true }()
	twice := map[job]map[string]bool{} // what lies there more than once, or was yielded by the scan more than once
	err := l.members(ctx, key, func(page []string) error {
		var foreign []item
		for _, blob := range page {
			d, err := ledger.ParseJob(blob)
			if err != nil {
				l.unreadable(inNonReady, key, "")
				continue
			}
			it := item{
				place:   inNonReady,
				key:     key,
				id:      blob,
				group:   d.Group,
				ordinal: d.Ordinal,
				attempt: d.Attempt,
				typ:     d.Type,
				tenant:  tenant,
			}
			known, again := l.find(it)
			if !known {
				foreign = append(foreign, it)
			}
			if again {
				twice[job{d.Group, d.Ordinal}] = map[string]bool{}
			}
		}
		return l.foreign(ctx, foreign)
	})
	if err != nil || len(twice) == 0 {
		return err
	}
	err = l.members(ctx, key, func(page []string) error {
		for _, blob := range page {
			if d, err := ledger.ParseJob(blob); err == nil {
				if blobs := twice[job{d.Group, d.Ordinal}]; blobs != nil {
					blobs[blob] = true
				}
			}
		}
		return nil
	})
	for j, blobs := range twice {
		if len(blobs) < 2 {
			l.live[j.group].sieve.forget(j.ordinal)
		}
	}
	return err
}

type job struct {
	group   string
	ordinal int64
}

// unreadable reports what is no job. That it is still there is not asked: nobody removes it unseen.
func (l *look) unreadable(pl place, key, id string) {
	if l.opts.only != nil {
		return
	}
	f := finding{pl.law(), "", none, "unreadable " + key + id}
	l.found.add(f, "%s can't be read", strings.TrimSpace("something in "+l.short(key)+" "+id))
	l.mend(f, l.cureLeftover(strayJob, l.shelf(pl, key)))
}

// short is a key's name without what all keys of the partition begin with.
func (l *look) short(key string) string { return strings.TrimPrefix(key, l.p.Base()) }

// find notes where a job lies, and says whether it was found at home before. It is not known when
// the states that are kept don't tell: its group has to be asked.
func (l *look) find(it item) (known, again bool) {
	g := l.live[it.group]
	if g == nil {
		return l.swept[it.key], false // an earlier batch has asked, or a later one keeps it
	}
	// Entries of cancelled jobs may stay for a while, which is asked for each.
	state := g.sieve.state(it.ordinal)
	if state == "" || state.Letter() == ledger.Cancelled || it.wrong != "" || it.tenant != "" && it.tenant != g.tenant {
		return false, false
	}
	return true, g.sieve.find(it.place, it.ordinal, it.attempt)
}

// judge reads the states of the kept groups again and reports those jobs that have not moved and
// were not found as they should.
func (l *look) judge(ctx context.Context, reads [places]bool) error {
	ids := slices.Sorted(maps.Keys(l.live))
	for len(ids) > 0 {
		n, bytes := 0, 0
		for n < len(ids) && n < pageSize/2 && (n == 0 || bytes < pageBytes) {
			bytes += len(l.live[ids[n]].sieve.base)
			n++
		}
		hashes, states := make([]*redis.SliceCmd, n), make([]*redis.StringCmd, n)
		err := l.inTurn(ctx, func(p redis.Pipeliner) {
			for i, id := range ids[:n] {
				s := &l.live[id].sieve
				hashes[i] = p.HMGet(ctx, l.p.Group(id), "at:created", "status")
				states[i] = p.GetRange(ctx, l.p.States(id), 2*s.first, 2*(s.first+s.size())-1)
			}
		})
		if err != nil {
			return err
		}
		for i, id := range ids[:n] {
			g, v := l.live[id], hashes[i].Val()
			if text(v[0]) != g.created {
				continue // another round of it, or it is gone
			}
			cancelled := text(v[1]) == string(api.StatusCancelled)
			covers := func(pl place) bool { return reads[pl] && (pl != inNonReady || l.parked(g.tenant)) }
			g.sieve.judge(states[i].Val(), covers, func(p problem) bool {
				// whoever meets a job of a cancelled group drops it
				if p.what != "missing" || p.place == inStream || !cancelled {
					l.wrong(g.id, g.tenant, g.types, p)
				}
				return true
			})
		}
		ids = ids[n:]
	}
	return nil
}
