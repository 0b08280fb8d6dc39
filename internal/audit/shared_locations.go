package audit

import (
	"context"
	"maps"
	"slices"
	"strings"

	"github.com/redis/go-redis/v9"

	"github.com/bulkaction/bulkaction/api"
	"github.com/bulkaction/bulkaction/internal/audit/read"
	"github.com/bulkaction/bulkaction/internal/ledger"
)

// trackedGroup is a group with jobs in locations that groups share (non-ready sets, ready streams,
// the results stream). Its states are kept until these locations have been read.
type trackedGroup struct {
	id, tenant, created string // created is the field at:created, which identifies this group and round
	types               []string
	index               locationIndex // from its first such job to the last
}

// isShared reports whether a job with this state letter is in a location that groups share.
func isShared(letter ledger.Letter) bool {
	return letter == ledger.NonReady || letter == ledger.Ready || letter == ledger.InFlight || letter == ledger.Done
}

// track keeps the states of a group that has jobs in shared locations, from the first such job to
// the last one.
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

// checkSharedLocations reads the shared locations, compares what they hold with the states of the
// tracked groups, and stops tracking these. The call with last set also reads those shared
// locations in which no known group has a job.
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
	for page := range slices.Chunk(slices.Sorted(maps.Keys(tenants)), read.PageSize) {
		nonReady, suspended := make([]*redis.IntCmd, len(page)), make([]*redis.IntCmd, len(page))
		err := ps.Pipeline(ctx, func(p redis.Pipeliner) {
			for i, t := range page {
				nonReady[i], suspended[i] = p.ZCard(ctx, ps.p.NonReadyOf(t)), p.ZCard(ctx, ps.p.SuspendedOf(t))
			}
		})
		if err != nil {
			return err
		}
		for i, t := range page {
			if !ps.readsNonReadyOf(t) {
				continue
			}
			if nonReady[i].Val() > 0 {
				if err := ps.readNonReady(ctx, t, ps.p.NonReadyOf(t)); err != nil {
					return err
				}
			}
			if suspended[i].Val() > 0 {
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

// addUnlisted adds the tenants and types that no group of this pass has named, but which have keys.
// To tenants, whose non-ready and suspended jobs are to be read next, it adds those whose jobs this
// pass has not read yet.
func (ps *pass) addUnlisted(ctx context.Context, tenants map[string]bool) error {
	addTo := func(set map[string]bool) func([]string) error {
		return func(names []string) error {
			for _, name := range names {
				set[name] = true
			}
			return nil
		}
	}
	if err := ps.ScanMembers(ctx, ps.p.Types(), addTo(ps.types)); err != nil {
		return err
	}
	if err := ps.ScanMembers(ctx, ps.p.NonReady(), addTo(ps.tenants)); err != nil {
		return err
	}
	active := func(p redis.Pipeliner, cursor uint64) *redis.ScanCmd {
		return p.SScan(ctx, ps.p.Active(), cursor, "", read.PageSize)
	}
	if err := ps.Scan(ctx, active, addTo(ps.tenants)); err != nil {
		return err
	}
	suspended := func(p redis.Pipeliner, cursor uint64) *redis.ScanCmd {
		return p.SScan(ctx, ps.p.Suspended(), cursor, "", read.PageSize)
	}
	if err := ps.Scan(ctx, suspended, addTo(ps.tenants)); err != nil {
		return err
	}
	for t := range ps.tenants {
		if !ps.readKeys[ps.p.NonReadyOf(t)] {
			tenants[t] = true
		}
	}
	return nil
}

// readReadyStream records the jobs in the ready stream of a type.
func (ps *pass) readReadyStream(ctx context.Context, typ string) error {
	key := ps.p.Ready(typ)
	defer func() { ps.readKeys[key] = true }()
	return ps.ReadStream(ctx, key, func(page []redis.XMessage) error {
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

// readResultsStream records the jobs whose results are in the results stream.
func (ps *pass) readResultsStream(ctx context.Context) error {
	key := ps.p.ResultStream()
	defer func() { ps.readKeys[key] = true }()
	return ps.ReadStream(ctx, key, func(page []redis.XMessage) error {
		var untracked []foundJob
		for _, e := range page {
			group, lines := read.Text(e.Values["g"]), read.Text(e.Values["l"])
			for line := range strings.SplitSeq(lines, "\n") {
				ordinal, ok := read.ParseResultLine(line)
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

// readNonReady records the jobs in a sorted set of a tenant: its non-ready jobs or its suspended
// ones. Since a scan may yield a member twice, a second scan decides which jobs really have two.
func (ps *pass) readNonReady(ctx context.Context, tenant, key string) error {
	defer func() { ps.readKeys[key] = true }()
	duplicates := map[Job]map[string]bool{} // jobs that were yielded more than once, and their members
	err := ps.ScanMembers(ctx, key, func(page []string) error {
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
				duplicates[Job{d.Group, d.Ordinal}] = map[string]bool{}
			}
		}
		return ps.checkUntracked(ctx, untracked)
	})
	if err != nil || len(duplicates) == 0 {
		return err
	}
	err = ps.ScanMembers(ctx, key, func(page []string) error {
		for _, blob := range page {
			if d, err := ledger.ParseJob(blob); err == nil {
				if blobs := duplicates[Job{d.Group, d.Ordinal}]; blobs != nil {
					blobs[blob] = true
				}
			}
		}
		return nil
	})
	for j, blobs := range duplicates {
		if len(blobs) < 2 {
			ps.tracked[j.Group].index.unrecordDuplicate(j.Ordinal)
		}
	}
	return err
}

// reportUnreadable reports an element of a shared location that is no job. It need not be looked at
// again, since only a role that reports it removes it.
func (ps *pass) reportUnreadable(kind locationKind, key, id string) {
	if ps.opts.only != nil {
		return
	}
	f := finding{kind.law(), "", noOrdinal, "unreadable " + key + id}
	ps.found.add(f, "%s can't be read", strings.TrimSpace("something in "+ps.shortKey(key)+" "+id))
	ps.addMisplaced(f, Job{}, ps.locationOfKey(kind, key))
}

// shortKey returns a key of the partition without the prefix that all its keys have.
func (ps *pass) shortKey(key string) string { return strings.TrimPrefix(key, ps.p.Base()) }

// recordFound records a found job in the index of its group. Known is false if the job can't be
// judged by the states that are kept: the caller then asks Redis about it (see checkUntracked).
// Duplicate is true if the job was found at its right location before.
func (ps *pass) recordFound(j foundJob) (known, duplicate bool) {
	g := ps.tracked[j.group]
	if g == nil {
		// The group is not tracked now. If this key was read before, its jobs were judged then, or
		// are judged when a later reading tracks the group.
		return ps.readKeys[j.key], false
	}
	// A cancelled job may stay at some locations for a while, so it needs more than its state.
	state := g.index.state(j.ordinal)
	if state == "" || state.Letter() == ledger.Cancelled || j.fault != "" || j.tenant != "" && j.tenant != g.tenant {
		return false, false
	}
	return true, g.index.record(j.kind, j.ordinal, j.attempt)
}

// checkTracked reads the states of the tracked groups again, and reports the problems of those jobs
// that have not moved. Reads says which kinds of location were read.
func (ps *pass) checkTracked(ctx context.Context, reads [locationKinds]bool) error {
	ids := slices.Sorted(maps.Keys(ps.tracked))
	for len(ids) > 0 {
		n, bytes := 0, 0
		for n < len(ids) && n < read.PageSize/2 && (n == 0 || bytes < read.PageBytes) {
			bytes += len(ps.tracked[ids[n]].index.states)
			n++
		}
		hashes, states := make([]*redis.SliceCmd, n), make([]*redis.StringCmd, n)
		err := ps.Pipeline(ctx, func(p redis.Pipeliner) {
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
			if read.Text(v[0]) != g.created {
				continue // the group was deleted, or created again
			}
			cancelled := read.Text(v[1]) == string(api.StatusCancelled)
			covers := func(kind locationKind) bool {
				return reads[kind] && (kind != atNonReady || ps.readsNonReadyOf(g.tenant))
			}
			g.index.eachProblem(states[i].Val(), covers, func(p problem) bool {
				// A role that reads a job of a cancelled group removes it, so it may be missing.
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
