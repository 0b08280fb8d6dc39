package audit

import (
	"context"
	"errors"
	"maps"
	"slices"
	"strings"

	"github.com/redis/go-redis/v9"

	"github.com/bulkaction/bulkaction/internal/audit/read"
	"github.com/bulkaction/bulkaction/internal/jobs/ledger"
	"github.com/bulkaction/bulkaction/internal/redisx/keyspace"
	"github.com/bulkaction/bulkaction/internal/redisx/stream"
)

// sharedLocations is the part of a pass that compares the locations that groups share (non-ready
// sets, ready streams, the results stream) with the states of the groups.
type sharedLocations struct {
	*scope
	tracked map[string]*trackedGroup // by id; cleared after each reading of the locations
	bytes   int                      // about how many bytes the states of the tracked groups take
	wasRead map[read.Location]bool   // locations that this pass has read at least once
}

// sharedKinds is the set of the kinds of location that groups share.
var sharedKinds = kindSet{atNonReady: true, atReady: true, atResultsStream: true}

// isShared reports whether the job with the i-th of these states belongs in a location that groups
// share.
func isShared(states string, i int64) bool {
	l := letters[ledger.StateAt(states, i).Letter()]
	return l.placed && sharedKinds[l.home]
}

// track keeps in memory the states of a group from the first to the last job that is in a shared
// location. When the tracked groups take too much memory, it checks the shared locations at once.
func (sl *sharedLocations) track(ctx context.Context, g *group) error {
	from, to := int64(0), g.size()
	for from < to && !isShared(g.States, from) {
		from++
	}
	for to > from && !isShared(g.States, to-1) {
		to--
	}
	if from < to {
		states := strings.Clone(g.States[ledger.StateBytes*from : ledger.StateBytes*to])
		tracked := g.tracked(from, states)
		sl.tracked[g.ID] = &tracked
		sl.bytes += len(states) + 256
	}
	if sl.bytes < sl.opts.stateBytes {
		return nil
	}
	return sl.check(ctx, false)
}

// judgedKinds returns which kinds of location this pass reads and judges. A pass over candidates
// reads the ready streams and the results stream only if a tracked group has a job there, and the
// non-ready sets only if the candidates name tenants.
func (sl *sharedLocations) judgedKinds() (judged kindSet) {
	if sl.full() {
		return sharedKinds
	}
	for _, g := range sl.tracked {
		for i := range g.index.size() {
			if isShared(g.index.states, i) {
				judged[letters[ledger.StateAt(g.index.states, i).Letter()].home] = true
			}
		}
	}
	judged[atNonReady] = len(sl.opts.only.Tenants) > 0
	return judged
}

// readsNonReadyOf reports whether this pass reads the non-ready and suspended jobs of a tenant.
func (sl *sharedLocations) readsNonReadyOf(tenant string) bool {
	return sl.full() || slices.Contains(sl.opts.only.Tenants, tenant)
}

// check reads the shared locations, compares their jobs with the states of the tracked groups, and
// then stops tracking these groups. In a full audit, the call with last set also reads the shared
// locations in which no known group has a job.
func (sl *sharedLocations) check(ctx context.Context, last bool) error {
	tenants := map[string]bool{}
	for _, g := range sl.tracked {
		tenants[g.Tenant] = sl.readsNonReadyOf(g.Tenant)
	}
	judged := sl.judgedKinds()
	if last && sl.full() {
		if err := sl.addUnlisted(ctx, tenants); err != nil {
			return err
		}
	}
	maps.DeleteFunc(tenants, func(_ string, reads bool) bool { return !reads })
	var locations []read.Location
	for _, kind := range []locationKind{atReady, atResultsStream} {
		if judged[kind] {
			locations = append(locations, sl.locationsOf(kind, read.Header{}, "")...)
		}
	}
	for _, at := range locations {
		if err := sl.read(ctx, at); err != nil {
			return err
		}
	}
	for page := range slices.Chunk(slices.Sorted(maps.Keys(tenants)), read.PageSize) {
		lengths, err := read.Ask(ctx, sl.Pipeline, len(page), page,
			func(p redis.Pipeliner, tenant string) func() [2]int64 {
				return read.QueueNonReady(ctx, p, sl.p, tenant)
			})
		if err != nil {
			return err
		}
		for i, tenant := range page {
			for j, at := range read.NonReadyOf(tenant) {
				if lengths[i]()[j] == 0 {
					continue
				}
				if err := sl.read(ctx, at); err != nil {
					return err
				}
			}
		}
	}
	err := sl.checkTracked(ctx, judged)
	clear(sl.tracked)
	sl.bytes = 0
	return err
}

// addUnlisted adds to this pass the tenants and types that are on a list of the partition, but that
// no group of the pass has named. To the argument tenants it adds those whose non-ready and
// suspended jobs the pass has not read yet.
func (sl *sharedLocations) addUnlisted(ctx context.Context, tenants map[string]bool) error {
	for _, list := range []struct {
		key   string
		scan  func(context.Context, string, func(string) error) error
		names map[string]bool
	}{
		{sl.p.Types(), sl.ScanMembers, sl.types},
		{sl.p.Tenants(), sl.ScanMembers, sl.tenants},
		{sl.p.NonReady(), sl.ScanMembers, sl.tenants},
		{sl.p.Active(), sl.ScanSet, sl.tenants},
		{sl.p.Suspended(), sl.ScanSet, sl.tenants},
	} {
		err := list.scan(ctx, list.key, func(name string) error {
			list.names[name] = true
			return nil
		})
		if err != nil {
			return err
		}
	}
	for t := range sl.tenants {
		if !sl.wasRead[read.NonReadyOf(t)[0]] {
			tenants[t] = true
		}
	}
	return nil
}

// read reads one shared location and records its jobs. Jobs whose states the pass does not keep are
// checked by asking Redis. A scan may yield a member of a sorted set twice: a second scan decides
// which jobs really have two members.
func (sl *sharedLocations) read(ctx context.Context, at read.Location) error {
	defer func() { sl.wasRead[at] = true }()
	var untracked []foundJob
	repeated := map[read.Job]map[string]bool{} // jobs that were yielded more than once, and their members
	err := sl.Elements(ctx, sl.p, at, 0, func(e read.Element) error {
		j := newFoundJob(e, at)
		if !e.Readable {
			sl.reportUnreadable(j)
			return nil
		}
		known, duplicate := sl.record(j)
		if duplicate && j.kind == atNonReady {
			repeated[e.Job] = map[string]bool{}
		}
		if !known {
			untracked = append(untracked, j)
		}
		if len(untracked) < read.PageSize/2 {
			return nil
		}
		page := untracked
		untracked = nil
		return sl.checkUntracked(ctx, page)
	})
	if err == nil {
		err = sl.checkUntracked(ctx, untracked)
	}
	if err != nil || len(repeated) == 0 {
		return err
	}
	err = sl.Elements(ctx, sl.p, at, 0, func(e read.Element) error {
		if members := repeated[e.Job]; members != nil {
			members[e.ID] = true
		}
		return nil
	})
	for j, members := range repeated {
		if len(members) < 2 {
			sl.tracked[j.Group].index.unrecordDuplicate(j.Ordinal)
		}
	}
	return err
}

// reportUnreadable reports an element that can't be read as a job, but not in a pass over
// candidates. It needs no second check, because only a role that also reports such an element
// removes it.
func (sl *sharedLocations) reportUnreadable(j foundJob) {
	if sl.full() {
		key := j.at.Key(sl.p)
		sl.found.add(newFinding(j.kind.law(), "", "", "unreadable "+key+j.entry, "%s can't be read",
			strings.TrimSpace("something in "+sl.shortKey(key)+" "+j.entry)).quarantinedAt(j.at))
	}
}

// shortKey returns a key of the partition without the prefix that all its keys have.
func (sl *sharedLocations) shortKey(key string) string { return strings.TrimPrefix(key, sl.p.Base()) }

// record records a found job in the index of its group. Known is false if the job can't be judged
// by the states that are kept: the caller then asks Redis about it (see checkUntracked). Duplicate
// is true if the job was found at its right location before.
func (sl *sharedLocations) record(j foundJob) (known, duplicate bool) {
	g := sl.tracked[j.Group]
	if g == nil {
		// The group is not tracked at this time. If this location was read before, the group's jobs
		// in it were judged then; else a later reading of it judges them.
		return sl.wasRead[j.at], false
	}
	// A cancelled job may stay at some locations for a while, so its state alone does not decide:
	// checkUntracked asks Redis for the group too.
	state, ofAnother := g.index.state(j.Ordinal), j.tenant != "" && j.tenant != g.Tenant
	if state == "" || state.Letter() == ledger.Cancelled || j.fault != "" || ofAnother {
		return false, false
	}
	return true, g.index.record(j.kind, j.Ordinal, j.Attempt)
}

// checkTracked reads the states of the tracked groups again, and reports the missing, duplicated
// and misplaced ones among the jobs whose state has not changed. judged says which kinds of
// location were read.
func (sl *sharedLocations) checkTracked(ctx context.Context, judged kindSet) error {
	var groups []*trackedGroup
	for _, id := range slices.Sorted(maps.Keys(sl.tracked)) {
		groups = append(groups, sl.tracked[id])
	}
	// The cost is given as jobs, but a job's state has two bytes: a batch may read up to twice
	// PageBytes.
	cost := func(g *trackedGroup) (int, int64) { return 2, g.index.size() }
	for batch := range read.Batches(groups, cost) {
		readings, err := read.Ask(ctx, sl.Pipeline, len(batch), batch,
			func(p redis.Pipeliner, g *trackedGroup) func() reading {
				return sl.queueReading(ctx, p, g.ID, g.index.first, g.index.first+g.index.size()-1)
			})
		if err != nil {
			return err
		}
		for i, g := range batch {
			ofGroup := judged
			ofGroup[atNonReady] = judged[atNonReady] && sl.readsNonReadyOf(g.Tenant)
			sl.reportProblems(g, readings[i](), ofGroup)
		}
	}
	return nil
}

// checkDeliveries reports the unowned entries of the ready streams, of the results stream and, in
// partition 0, of the ingest stream. It also reports each of these streams whose last id is in the
// future.
func (s *scope) checkDeliveries(ctx context.Context) error {
	groups := map[string]string{s.p.ResultStream(): keyspace.GroupAggregator}
	for typ := range s.types {
		groups[s.p.Ready(typ)] = keyspace.GroupWorkers
	}
	if s.p.Index() == 0 {
		groups[s.space.Ingest()] = keyspace.GroupIngest
	}
	for _, key := range slices.Sorted(maps.Keys(groups)) {
		ids, err := stream.Unowned(ctx, s.Cmd, key, groups[key])
		if err != nil && !read.IsWrongType(err) { // a key of the wrong type breaks another law
			return err
		}
		for _, id := range ids {
			s.found.add(newFinding(LawDelivery, "", "", "unowned "+key+" "+id,
				"entry %s of %s was delivered, but no consumer owns it", id, key))
		}
		var refused redis.Error // there is no such stream
		about, err := s.Cmd.XInfoStream(ctx, key).Result()
		if err != nil && !errors.As(err, &refused) {
			return err
		}
		if err == nil && stream.InFuture(about.LastGeneratedID) {
			s.found.add(newFinding(LawDelivery, "", "", "future "+key,
				"the last id of %s is %s, in the future: behind the largest id it takes no entries", key,
				about.LastGeneratedID))
		}
	}
	return nil
}
