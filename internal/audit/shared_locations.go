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

// trackedGroup is a group with jobs in places that groups share.
type trackedGroup struct {
	id, tenant, created string
	types               []string
	index               locationIndex // from the first such job to the last
}

// isShared says whether a job with a state lies in a place that groups share.
func isShared(letter ledger.Letter) bool {
	return letter == ledger.NonReady || letter == ledger.Ready || letter == ledger.InFlight || letter == ledger.Done
}

// track remembers what of a group has to be sought in shared places.
func (ps *pass) track(g *group) {
	jobs := len(g.states) / 2
	from, to := 0, jobs
	for from < jobs && !isShared(ledger.StateAt(g.states, int64(from)).Letter()) {
		from++
	}
	for to > from && !isShared(ledger.StateAt(g.states, int64(to-1)).Letter()) {
		to--
	}
	if from == to {
		return
	}
	ps.tracked[g.id] = &trackedGroup{
		id: g.id, tenant: g.tenant, created: g.hash["at:created"], types: g.types,
		index: locationIndex{first: int64(from), states: strings.Clone(g.states[2*from : 2*to])},
	}
	ps.trackedBytes += 2*(to-from) + 256
}

// checkSharedLocations looks for the jobs of the groups that are kept in the places that groups
// share, and judges what it found. At last it has read all such places.
func (ps *pass) checkSharedLocations(ctx context.Context, last bool) error {
	tenants := map[string]bool{}
	for _, g := range ps.tracked {
		tenants[g.tenant] = true
	}
	reads := ps.judgedSharedKinds()
	if last && ps.opts.only == nil {
		if err := ps.addUnlisted(ctx, tenants); err != nil {
			return err
		}
	}
	for _, typ := range slices.Sorted(maps.Keys(ps.types)) {
		if !reads[atReady] {
			break
		}
		if err := ps.readReadyStream(ctx, typ); err != nil {
			return err
		}
	}
	if reads[atResultsStream] {
		if err := ps.readResultsStream(ctx); err != nil {
			return err
		}
	}
	for page := range slices.Chunk(slices.Sorted(maps.Keys(tenants)), pageSize) {
		cards, aside := make([]*redis.IntCmd, len(page)), make([]*redis.IntCmd, len(page))
		err := ps.pipeline(ctx, func(p redis.Pipeliner) {
			for i, t := range page {
				cards[i], aside[i] = p.ZCard(ctx, ps.p.NonReadyOf(t)), p.ZCard(ctx, ps.p.SuspendedOf(t))
			}
		})
		if err != nil {
			return err
		}
		for i, t := range page {
			if !ps.readsNonReadyOf(t) {
				continue
			}
			if cards[i].Val() > 0 {
				if err := ps.readNonReady(ctx, t, ps.p.NonReadyOf(t)); err != nil {
					return err
				}
			}
			if aside[i].Val() > 0 {
				if err := ps.readNonReady(ctx, t, ps.p.SuspendedOf(t)); err != nil {
					return err
				}
			}
		}
	}
	err := ps.checkTracked(ctx, reads)
	clear(ps.tracked)
	ps.trackedBytes = 0
	return err
}

// addUnlisted adds the types and tenants that no group of this look has told of, and the tenants
// whose set was not read yet.
func (ps *pass) addUnlisted(ctx context.Context, tenants map[string]bool) error {
	note := func(set map[string]bool) func([]string) error {
		return func(names []string) error {
			for _, name := range names {
				set[name] = true
			}
			return nil
		}
	}
	if err := ps.scanMembers(ctx, ps.p.Types(), note(ps.types)); err != nil {
		return err
	}
	if err := ps.scanMembers(ctx, ps.p.NonReady(), note(ps.tenants)); err != nil {
		return err
	}
	active := func(p redis.Pipeliner, cursor uint64) *redis.ScanCmd {
		return p.SScan(ctx, ps.p.Active(), cursor, "", pageSize)
	}
	if err := ps.scan(ctx, active, note(ps.tenants)); err != nil {
		return err
	}
	aside := func(p redis.Pipeliner, cursor uint64) *redis.ScanCmd {
		return p.SScan(ctx, ps.p.Suspended(), cursor, "", pageSize)
	}
	if err := ps.scan(ctx, aside, note(ps.tenants)); err != nil {
		return err
	}
	for t := range ps.tenants {
		if !ps.readKeys[ps.p.NonReadyOf(t)] {
			tenants[t] = true
		}
	}
	return nil
}

// readReadyStream reads the ready stream of a type.
func (ps *pass) readReadyStream(ctx context.Context, typ string) error {
	key := ps.p.Ready(typ)
	defer func() { ps.readKeys[key] = true }()
	return ps.readStream(ctx, key, func(page []redis.XMessage) error {
		var untracked []foundJob
		for _, e := range page {
			blob := ledger.MessageBlob(e.Values)
			d, err := ledger.ParseJob(blob)
			if err != nil {
				ps.reportUnreadable(atReady, key, e.ID)
				continue
			}
			j := foundJob{
				kind:    atReady,
				key:     key,
				id:      e.ID,
				group:   d.Group,
				ordinal: d.Ordinal,
				attempt: d.Attempt,
				typ:     d.Type,
			}
			if d.Type != typ {
				j.fault = "of type " + d.Type
			}
			if known, _ := ps.recordFound(j); !known {
				untracked = append(untracked, j)
			}
		}
		return ps.checkUntracked(ctx, untracked)
	})
}

// readResultsStream reads the results stream.
func (ps *pass) readResultsStream(ctx context.Context) error {
	key := ps.p.ResultStream()
	defer func() { ps.readKeys[key] = true }()
	return ps.readStream(ctx, key, func(page []redis.XMessage) error {
		var untracked []foundJob
		for _, e := range page {
			group, lines := asText(e.Values["g"]), asText(e.Values["l"])
			for line := range strings.SplitSeq(lines, "\n") {
				ordinal, ok := parseResultLine(line)
				if !ok {
					ps.reportUnreadable(atResultsStream, key, e.ID)
					continue
				}
				j := foundJob{kind: atResultsStream, key: key, id: e.ID, group: group, ordinal: ordinal,
					attempt: unknownAttempt}
				if known, _ := ps.recordFound(j); !known {
					untracked = append(untracked, j)
				}
			}
		}
		return ps.checkUntracked(ctx, untracked)
	})
}

// readNonReady reads what a tenant has parked, or put aside.
func (ps *pass) readNonReady(ctx context.Context, tenant, key string) error {
	defer func() { ps.readKeys[key] = true }()
	duplicates := map[job]map[string]bool{} // what lies there more than once, or was yielded by the scan more than once
	err := ps.scanMembers(ctx, key, func(page []string) error {
		var untracked []foundJob
		for _, blob := range page {
			d, err := ledger.ParseJob(blob)
			if err != nil {
				ps.reportUnreadable(atNonReady, key, "")
				continue
			}
			found := foundJob{
				kind:    atNonReady,
				key:     key,
				id:      blob,
				group:   d.Group,
				ordinal: d.Ordinal,
				attempt: d.Attempt,
				typ:     d.Type,
				tenant:  tenant,
			}
			known, duplicate := ps.recordFound(found)
			if !known {
				untracked = append(untracked, found)
			}
			if duplicate {
				duplicates[job{d.Group, d.Ordinal}] = map[string]bool{}
			}
		}
		return ps.checkUntracked(ctx, untracked)
	})
	if err != nil || len(duplicates) == 0 {
		return err
	}
	err = ps.scanMembers(ctx, key, func(page []string) error {
		for _, blob := range page {
			if d, err := ledger.ParseJob(blob); err == nil {
				if blobs := duplicates[job{d.Group, d.Ordinal}]; blobs != nil {
					blobs[blob] = true
				}
			}
		}
		return nil
	})
	for j, blobs := range duplicates {
		if len(blobs) < 2 {
			ps.tracked[j.group].index.unrecordDuplicate(j.ordinal)
		}
	}
	return err
}

type job struct {
	group   string
	ordinal int64
}

// reportUnreadable reports what is no job. That it is still there is not asked: nobody removes it
// unseen.
func (ps *pass) reportUnreadable(kind locationKind, key, id string) {
	if ps.opts.only != nil {
		return
	}
	f := finding{kind.law(), "", noOrdinal, "unreadable " + key + id}
	ps.found.add(f, "%s can't be read", strings.TrimSpace("something in "+ps.shortKey(key)+" "+id))
	ps.addRepair(f, ps.misplacedRepair(unreadableJob, ps.locationOfKey(kind, key)))
}

// shortKey is a key's name without what all keys of the partition begin with.
func (ps *pass) shortKey(key string) string { return strings.TrimPrefix(key, ps.p.Base()) }

// recordFound notes where a job lies, and says whether it was found at home before. It is not known
// when the states that are kept don't tell: its group has to be asked.
func (ps *pass) recordFound(j foundJob) (known, duplicate bool) {
	g := ps.tracked[j.group]
	if g == nil {
		return ps.readKeys[j.key], false // an earlier batch has asked, or a later one keeps it
	}
	// Entries of cancelled jobs may stay for a while, which is asked for each.
	state := g.index.state(j.ordinal)
	if state == "" || state.Letter() == ledger.Cancelled || j.fault != "" || j.tenant != "" && j.tenant != g.tenant {
		return false, false
	}
	return true, g.index.record(j.kind, j.ordinal, j.attempt)
}

// checkTracked reads the states of the kept groups again and reports those jobs that have not moved
// and were not found as they should.
func (ps *pass) checkTracked(ctx context.Context, reads [locationKinds]bool) error {
	ids := slices.Sorted(maps.Keys(ps.tracked))
	for len(ids) > 0 {
		n, bytes := 0, 0
		for n < len(ids) && n < pageSize/2 && (n == 0 || bytes < pageBytes) {
			bytes += len(ps.tracked[ids[n]].index.states)
			n++
		}
		hashes, states := make([]*redis.SliceCmd, n), make([]*redis.StringCmd, n)
		err := ps.pipeline(ctx, func(p redis.Pipeliner) {
			for i, id := range ids[:n] {
				index := &ps.tracked[id].index
				hashes[i] = p.HMGet(ctx, ps.p.Group(id), "at:created", "status")
				states[i] = p.GetRange(ctx, ps.p.States(id), 2*index.first, 2*(index.first+index.size())-1)
			}
		})
		if err != nil {
			return err
		}
		for i, id := range ids[:n] {
			g, v := ps.tracked[id], hashes[i].Val()
			if asText(v[0]) != g.created {
				continue // another round of it, or it is gone
			}
			cancelled := asText(v[1]) == string(api.StatusCancelled)
			covers := func(kind locationKind) bool {
				return reads[kind] && (kind != atNonReady || ps.readsNonReadyOf(g.tenant))
			}
			g.index.eachProblem(states[i].Val(), covers, func(p problem) bool {
				// whoever meets a job of a cancelled group drops it
				if p.fault != "missing" || p.kind == atResultsStream || !cancelled {
					ps.reportJob(g.id, g.tenant, g.types, p)
				}
				return true
			})
		}
		ids = ids[n:]
	}
	return nil
}
