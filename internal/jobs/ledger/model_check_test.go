package ledger_test

import (
	"errors"
	"fmt"
	"math"
	"slices"
	"strconv"
	"strings"

	"github.com/redis/go-redis/v9"
	"github.com/stretchr/testify/require"

	"github.com/bulkaction/bulkaction/internal/jobs/ledger"
	"github.com/bulkaction/bulkaction/internal/redisx/keyspace"
)

// sight is the replies of one pipeline that reads all data that check compares. Keys of the maps
// are groups, types, tenants, or a group followed by a type.
type sight struct {
	group, load, tenant, errs                                     map[string]*redis.MapStringStringCmd
	states                                                        map[string]*redis.StringCmd
	queue, results, nonReady, suspended, failures                 map[string]*redis.StringSliceCmd
	scheduled, inTenant, inLane, tenantRateLimited, tenantIndexed map[string]*redis.FloatCmd
	inOver, inOrder                                               map[string]*redis.FloatCmd
	policy                                                        *redis.StringCmd
	rate                                                          *redis.MapStringStringCmd
	active                                                        map[string]*redis.BoolCmd
	ready                                                         map[string]*redis.XMessageSliceCmd
	resultStream                                                  *redis.XMessageSliceCmd
}

// look reads all data that check compares, in one round trip.
func (m *model) look() *sight {
	ctx, pipe := m.Context(), m.c.Pipeline()
	s := &sight{
		group: map[string]*redis.MapStringStringCmd{}, failures: map[string]*redis.StringSliceCmd{}, load: map[string]*redis.MapStringStringCmd{},
		tenant: map[string]*redis.MapStringStringCmd{}, states: map[string]*redis.StringCmd{}, queue: map[string]*redis.StringSliceCmd{},
		results: map[string]*redis.StringSliceCmd{}, nonReady: map[string]*redis.StringSliceCmd{}, scheduled: map[string]*redis.FloatCmd{},
		inTenant: map[string]*redis.FloatCmd{}, inLane: map[string]*redis.FloatCmd{}, tenantRateLimited: map[string]*redis.FloatCmd{},
		tenantIndexed: map[string]*redis.FloatCmd{}, active: map[string]*redis.BoolCmd{}, ready: map[string]*redis.XMessageSliceCmd{},
		errs:         map[string]*redis.MapStringStringCmd{},
		resultStream: pipe.XRange(ctx, m.p.ResultStream(), "-", "+"), suspended: map[string]*redis.StringSliceCmd{},
		inOver: map[string]*redis.FloatCmd{}, inOrder: map[string]*redis.FloatCmd{}, policy: pipe.Get(ctx, m.p.Policy()), rate: pipe.HGetAll(ctx, m.p.Rate()),
	}
	for _, g := range groups {
		tenant := m.tenantOf(g)
		s.group[g], s.states[g], s.failures[g] = pipe.HGetAll(ctx, m.p.Group(g)), pipe.Get(ctx, m.p.States(g)), pipe.HKeys(ctx, m.p.Failures(g))
		s.errs[g] = pipe.HGetAll(ctx, m.p.Errors(g))
		s.results[g], s.scheduled[g] = pipe.LRange(ctx, m.p.Results(g), 0, -1), pipe.ZScore(ctx, m.p.Scheduled(), g)
		for _, typ := range types {
			s.queue[g+typ] = pipe.LRange(ctx, m.p.Queue(g, typ), 0, -1)
			s.inTenant[g+typ], s.inLane[g+typ] = pipe.ZScore(ctx, m.p.FairTenant(typ, m.lanes[g], tenant), g), pipe.ZScore(ctx, m.p.FairLane(typ, m.lanes[g]), tenant)
			s.tenantRateLimited[g+typ] = pipe.ZScore(ctx, m.p.RateLimited(typ), tenant)
			s.inOver[g+typ], s.inOrder[g+typ] = pipe.ZScore(ctx, m.p.FairOver(typ, m.lanes[g]), tenant), pipe.ZScore(ctx, m.p.FairPriority(typ, m.lanes[g]), g)
		}
	}
	for _, tenant := range owners {
		s.suspended[tenant] = pipe.ZRange(ctx, m.p.SuspendedOf(tenant), 0, -1)
		s.nonReady[tenant], s.tenantIndexed[tenant] = pipe.ZRange(ctx, m.p.NonReadyOf(tenant), 0, -1), pipe.ZScore(ctx, m.p.NonReady(), tenant)
		s.tenant[tenant], s.active[tenant] = pipe.HGetAll(ctx, m.p.Tenant(tenant)), pipe.SIsMember(ctx, m.p.Active(), tenant)
	}
	for _, typ := range types {
		s.ready[typ], s.load[typ] = pipe.XRange(ctx, m.p.Ready(typ), "-", "+"), pipe.HGetAll(ctx, m.p.Load(typ))
	}
	_, err := pipe.Exec(ctx)
	if !errors.Is(err, redis.Nil) {
		require.NoError(m, err)
	}
	return s
}

// equal does the same as require.Equal, faster: it is called many thousand times.
func equal[T comparable](m *model, want, got T, format string, args ...any) {
	if want != got {
		require.Equal(m, want, got, append([]any{format}, args...)...)
	}
}

// totals counts the jobs that check has found, by tenant or type; entries are those of ready streams.
type totals struct{ active, unfinished, congested, waiting, nonReady, entries map[string]int64 }

// check compares Redis with the reference: states, counts, results, and all redundant data, such as
// indexes and counters. Each job must be at the location that fits its state.
func (m *model) check() {
	s := m.look()
	n := totals{map[string]int64{}, map[string]int64{}, map[string]int64{}, map[string]int64{}, map[string]int64{}, map[string]int64{}}
	lie := map[string][]string{} // where each job lies, by group and ordinal
	for _, g := range groups {
		lie[g] = make([]string, len(m.reference.groups[g].jobs))
	}
	note := func(place, blob string) (ledger.Job, string) {
		d, err := ledger.ParseJob(blob)
		require.NoError(m, err, blob)
		lie[d.Group][d.Ordinal] += place
		return d, m.tenantOf(d.Group)
	}
	for _, tenant := range owners {
		blobs := s.nonReady[tenant].Val()
		for _, blob := range blobs {
			d, of := note("N", blob)
			if at := &lie[d.Group][d.Ordinal]; m.torn && !m.reference.groups[d.Group].jobs[d.Ordinal].is(ledger.NonReady, d.Attempt) {
				*at = strings.TrimSuffix(*at, "N")
			}
			equal(m, tenant, of, "owner of %s", blob)
			n.nonReady[d.Type]++
			if !slices.Contains([]ledger.Reason{ledger.ReasonScheduled, ledger.ReasonPaused, ledger.ReasonResource}, d.Reason) {
				n.congested[tenant]++
			}
			if strings.Contains(blob, "|R|") {
				n.active[tenant]++
			}
		}
		equal(m, m.reference.paused["tenant "+tenant], s.tenant[tenant].Val()["paused"] != "", "whether %s is paused", tenant)
		if s.tenant[tenant].Val()["paused"] == "" {
			equal(m, len(blobs) > 0, s.tenantIndexed[tenant].Err() == nil, "index of %s's non-ready jobs", tenant)
		}
		for _, blob := range s.suspended[tenant].Val() { // suspended jobs of what is or was paused
			d, _ := note("N", blob)
			n.nonReady[d.Type]++
		}
	}
	for typ, entries := range s.ready {
		for _, e := range entries.Val() {
			d, tenant := note("R", ledger.MessageBlob(e.Values))
			n.entries[tenant]++
			equal(m, typ, d.Type, "type in its stream")
			j := m.reference.groups[d.Group].jobs[d.Ordinal]
			if at := &lie[d.Group][d.Ordinal]; m.torn && (*at == "RR" || (!j.owned(d.Attempt) && !j.is(ledger.InFlight, d.Attempt+1))) {
				*at = strings.TrimSuffix(*at, "R")
			}
		}
	}
	lines := m.resultLines(s)
	for _, g := range groups {
		m.checkGroup(s, g, lie[g], lines[g], n)
	}
	for typ, load := range s.load {
		h := load.Val()
		equal(m, [4]int64{n.waiting[typ], n.nonReady[typ], m.reference.stale[typ], m.reference.lost[typ]},
			[4]int64{number(h["waiting"]), number(h["non_ready"]), number(h["stale"]), number(h["lost"])}, "load of %s", typ)
	}
	extra := int64(0)
	for _, tenant := range owners {
		h, is := s.tenant[tenant].Val(), s.active[tenant].Val()
		equal(m, [3]int64{n.active[tenant], n.unfinished[tenant], n.congested[tenant]},
			[3]int64{number(h["active"]), number(h["unfinished"]), number(h["congested"])}, "active, unfinished and congested of %s", tenant)
		equal(m, n.active[tenant] > 0 && h["paused"] == "", is, "whether %s is active", tenant)
		if h["in_flight"] == "" {
			n.entries[tenant] = 0
		}
		if !m.torn { // an entry that was put back counts nowhere
			equal(m, n.entries[tenant], number(h["places"]), "places of %s", tenant)
		}
		if weight, err := strconv.ParseFloat(h["weight"], 64); err == nil && is {
			extra += int64(math.Floor((weight-1)*1000 + 0.5))
		}
	}
	equal(m, extra, number(s.rate.Val()["xw"]), "what active tenants weigh beyond 1")
}

// lies is the location of a job (queue W, non-ready N, ready stream R) by its state letter,
// recorded the location of its result line.
var (
	lies     = map[ledger.Letter]string{ledger.Waiting: "W", ledger.NonReady: "N", ledger.Ready: "R", ledger.InFlight: "R"}
	recorded = map[ledger.Letter]string{ledger.Done: "stream", ledger.Reduced: "list"}
)

func (m *model) checkGroup(s *sight, g string, lie []string, lines map[int64]string, n totals) {
	b, h := m.reference.groups[g], s.group[g].Val()
	equal(m, b.states(), s.states[g].Val(), "states of %s", g)
	equal(m, b.status, h["status"], "status of %s", g)
	equal(m, [3]bool{b.sealed, b.paused, b.requeue}, [3]bool{h["sealed"] != "", h["paused"] != "", h["requeue"] != ""}, "whether %s is sealed, paused and to be requeued", g)
	by, reduced := b.counts()
	for _, place := range places {
		equal(m, by[place], number(h[place]), "%s jobs of %s", place, g)
	}
	equal(m, [2]int64{int64(len(b.jobs)), reduced}, [2]int64{number(h["accepted"]), number(h["reduced"])}, "accepted and reduced jobs of %s", g)
	for _, typ := range types {
		queue := s.queue[g+typ].Val()
		n.waiting[typ] += int64(len(queue))
		for _, blob := range queue {
			ordinal, _, _ := strings.Cut(blob, "|")
			equal(m, typ, b.jobs[number(ordinal)].typ, "type of %s.%s", g, ordinal)
			lie[number(ordinal)] += "W"
		}
		if len(queue) > 0 && s.scheduled[g].Err() != nil && !b.paused {
			n.active[b.tenant] += int64(len(queue))
			m.standsInLine(s, g, typ)
		} else {
			equal(m, false, s.inOrder[g+typ].Err() == nil, "%s has nothing that may run, so it has no place in the order", g)
		}
	}
	failures := s.failures[g].Val()
	equal(m, by["failed"], int64(len(failures)), "failures of %s", g)
	for o, j := range b.jobs {
		if b.live() { // until a cancelled group is swept, its jobs may stay where they were
			equal(m, lies[j.letter], lie[o], "where %s.%d lies", g, o)
		}
		if strings.IndexByte("WNRI", byte(j.letter)) >= 0 {
			n.unfinished[b.tenant]++
		}
		equal(m, j.letter == ledger.Failed, slices.Contains(failures, fmtInt(int64(o))), "failure of %s.%d", g, o)
		equal(m, recorded[j.letter], lines[int64(o)], "results of %s.%d", g, o)
		if record := s.errs[g].Val()[fmtInt(int64(o))]; b.live() || record != "" { // the last step of sweep deletes them
			equal(m, j.errs, errorsIn(record), "errors of %s.%d", g, o)
		}
	}
}

// errorsIn returns the reason and the attempt of each error of a record, in the format of job.errs
// in the reference.
func errorsIn(record string) string {
	b := strings.Builder{}
	for _, e := range jobErrors(record) {
		fmt.Fprintf(&b, "%s%d ", e.Reason, e.Attempts)
	}
	return b.String()
}

// standsInLine checks that a group with waiting jobs, and its tenant, have the right entries in the
// fair queue.
func (m *model) standsInLine(s *sight, g, typ string) {
	tenant := m.tenantOf(g)
	require.NoError(m, s.inTenant[g+typ].Err(), "%s waits, so it stands in its tenant's queue", g)
	if s.tenantRateLimited[g+typ].Err() == nil || s.tenant[tenant].Val()["paused"] != "" {
		return
	}
	if s.policy.Err() == nil {
		require.NoError(m, s.inOrder[g+typ].Err(), "%s is not rate-limited, so it has a place in the order", g)
		return
	}
	require.True(m, (s.inLane[g+typ].Err() == nil) != (s.inOver[g+typ].Err() == nil), "%s is not rate-limited, so it is in the lane, with permits of its own or without", tenant)
}

// resultLines returns where each job's result line is, by group and ordinal: in the list, or else
// in the stream. The test fails if a job has two lines in one of them.
func (m *model) resultLines(s *sight) map[string]map[int64]string {
	lines := map[string]map[int64]string{}
	each := func(group, chunk string, f func(of map[int64]string, job int64)) {
		if lines[group] == nil {
			lines[group] = map[int64]string{}
		}
		for line := range strings.SplitSeq(chunk, "\n") {
			f(lines[group], m.ordinalOf(line))
		}
	}
	for g, chunks := range s.results {
		for _, chunk := range chunks.Val() {
			each(g, chunk, func(of map[int64]string, job int64) {
				equal(m, "", of[job], "%s.%d has two results", g, job)
				of[job] = "list"
			})
		}
	}
	for _, e := range s.resultStream.Val() {
		g := e.Values["g"].(string)
		each(g, e.Values["l"].(string), func(of map[int64]string, job int64) {
			equal(m, false, of[job] == "stream", "%s.%d has two results", g, job)
			if of[job] == "" { // otherwise the rest of the entry was left to another aggregator
				of[job] = "stream"
			}
		})
	}
	return lines
}

// finish ends all pauses and settings and seals the groups. Then it acts as all roles until every
// job and group has ended. It checks the data before and after that.
func (m *model) finish() {
	m.check()
	m.held = nil // every worker crashes
	m.freely()
	for _, g := range groups {
		m.end(g)
	}
	for round, open := 0, true; open; round++ {
		require.Less(m, round, 200, "it comes to an end")
		m.timePasses()
		for _, typ := range types {
			m.takeBack(typ, 100)
			m.admitJobs(1000, typ, 50, noLimit)
		}
		m.bringBack(map[string]int{"T": 1000, "U": 1000}, noLimit)
		for _, typ := range types {
			jobs := m.receive(typ, "last", 1000)
			m.launch(typ, jobs)
			m.report(jobs, []ledger.OutcomeKind{outcomeDone})
		}
		m.collectResults()
		m.reduceRest()
		open = false
		for _, g := range groups {
			b := m.reference.groups[g]
			if !b.live() {
				m.sweep(g)
				m.swept(g)
			}
			if b.requeue {
				m.requeueAll(g)
			}
			m.goOn(g)
			open = open || !b.ended()
		}
	}
	m.check()
	m.nothingLeft()
}

// collectResults reads all entries of the results stream into m.results, including those that other
// aggregators have read.
func (m *model) collectResults() {
	m.results = nil
	for _, e := range m.c.XRange(m.Context(), m.p.ResultStream(), "-", "+").Val() {
		m.results = append(m.results, results{entry: e.ID, group: e.Values["g"].(string), lines: e.Values["l"].(string)})
	}
}

// reduceRest reduces those of the collected results whose jobs are not reduced yet.
func (m *model) reduceRest() {
	for _, e := range m.results {
		e.ordinals = nil
		var kept []string
		for line := range strings.SplitSeq(e.lines, "\n") {
			if n := m.ordinalOf(line); m.reference.groups[e.group].jobs[n].letter == ledger.Done {
				e.ordinals, kept = append(e.ordinals, n), append(kept, line)
			}
		}
		e.lines = strings.Join(kept, "\n")
		require.Empty(m, m.settle("0", e))
	}
	m.results = nil
}

// nothingLeft removes the remaining ready entries as workers do, and expires the groups. It checks
// that every job was counted once, that the streams are empty, and that only the keys in shared,
// and those of limits, requests and the policy, remain.
func (m *model) nothingLeft() {
	for _, typ := range types {
		m.takeBack(typ, 0)                          // entries of cancelled groups that a consumer holds
		m.launch(typ, m.receive(typ, "last", 1000)) // and entries that no consumer has read
	}
	var streams []*redis.IntCmd
	var pending []*redis.XPendingCmd
	var aggregates []*redis.MapStringStringCmd
	pipe := m.c.Pipeline()
	for _, typ := range types {
		streams = append(streams, pipe.XLen(m.Context(), m.p.Ready(typ)))
		pending = append(pending, pipe.XPending(m.Context(), m.p.Ready(typ), keyspace.GroupWorkers))
	}
	streams = append(streams, pipe.XLen(m.Context(), m.p.ResultStream()))
	for _, g := range groups {
		aggregates = append(aggregates, pipe.HGetAll(m.Context(), m.p.Aggregate(g)))
	}
	_, err := pipe.Exec(m.Context())
	require.NoError(m, err)
	for i, s := range streams {
		equal(m, 0, s.Val(), "entries in stream %d", i)
	}
	for i, p := range pending {
		equal(m, 0, p.Val().Count, "pending entries of %s", types[i])
	}
	for i, g := range groups {
		by, _ := m.reference.groups[g].counts()
		equal(m, int64(len(m.reference.groups[g].jobs)), by["done"]+by["failed"]+by["cancelled"], "ended jobs of %s", g)
		h := aggregates[i].Val()
		equal(m, by["done"], number(h["partial:0"])+number(h["partial:1"]), "the aggregate of %s", g)
		require.NoError(m, ledger.Expire(m.Context(), m.c, m.p, g, m.fencing, false))
	}
	for _, key := range m.keys() {
		require.Contains(m, append(shared, "rate", "messages", "rate-limited:T", "rate-limited:U", "policy"), strings.TrimPrefix(key, m.p.Base()))
	}
}
