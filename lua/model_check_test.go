package lua_test

import (
	"errors"
	"fmt"
	"math"
	"strconv"
	"strings"

	"github.com/redis/go-redis/v9"
	"github.com/stretchr/testify/require"

	"github.com/bulkaction/bulkaction/lua"
)

// sight is everything that one look finds, by group, type or tenant.
type sight struct {
	group, failures, load, tenant                            map[string]*redis.MapStringStringCmd
	states                                                   map[string]*redis.StringCmd
	queue, results, parked, aside                            map[string]*redis.StringSliceCmd
	scheduled, inTenant, inLane, tenantParked, tenantIndexed map[string]*redis.FloatCmd
	inOver, inOrder                                          map[string]*redis.FloatCmd
	policy                                                   *redis.StringCmd
	rate                                                     *redis.MapStringStringCmd
	active                                                   map[string]*redis.BoolCmd
	ready                                                    map[string]*redis.XMessageSliceCmd
	resultStream                                             *redis.XMessageSliceCmd
}

// look reads it all in one round trip.
func (m *model) look() *sight {
	ctx, pipe := m.Context(), m.c.Pipeline()
	s := &sight{
		group: map[string]*redis.MapStringStringCmd{}, failures: map[string]*redis.MapStringStringCmd{}, load: map[string]*redis.MapStringStringCmd{},
		tenant: map[string]*redis.MapStringStringCmd{}, states: map[string]*redis.StringCmd{}, queue: map[string]*redis.StringSliceCmd{},
		results: map[string]*redis.StringSliceCmd{}, parked: map[string]*redis.StringSliceCmd{}, scheduled: map[string]*redis.FloatCmd{},
		inTenant: map[string]*redis.FloatCmd{}, inLane: map[string]*redis.FloatCmd{}, tenantParked: map[string]*redis.FloatCmd{},
		tenantIndexed: map[string]*redis.FloatCmd{}, active: map[string]*redis.BoolCmd{}, ready: map[string]*redis.XMessageSliceCmd{},
		resultStream: pipe.XRange(ctx, m.p.ResultStream(), "-", "+"), aside: map[string]*redis.StringSliceCmd{},
		inOver: map[string]*redis.FloatCmd{}, inOrder: map[string]*redis.FloatCmd{}, policy: pipe.Get(ctx, m.p.Policy()), rate: pipe.HGetAll(ctx, m.p.Rate()),
	}
	for g, tenant := range m.tenants {
		s.group[g], s.states[g], s.failures[g] = pipe.HGetAll(ctx, m.p.Group(g)), pipe.Get(ctx, m.p.States(g)), pipe.HGetAll(ctx, m.p.Failures(g))
		s.results[g], s.scheduled[g] = pipe.LRange(ctx, m.p.Results(g), 0, -1), pipe.ZScore(ctx, m.p.Scheduled(), g)
		for _, typ := range types {
			s.queue[g+typ] = pipe.LRange(ctx, m.p.Queue(g, typ), 0, -1)
			s.inTenant[g+typ], s.inLane[g+typ] = pipe.ZScore(ctx, m.p.FairTenant(typ, m.lanes[g], tenant), g), pipe.ZScore(ctx, m.p.FairLane(typ, m.lanes[g]), tenant)
			s.tenantParked[g+typ] = pipe.ZScore(ctx, m.p.Parked(typ), tenant)
			s.inOver[g+typ], s.inOrder[g+typ] = pipe.ZScore(ctx, m.p.FairOver(typ, m.lanes[g]), tenant), pipe.ZScore(ctx, m.p.FairPriority(typ), g)
		}
	}
	for _, tenant := range owners {
		s.aside[tenant] = pipe.ZRange(ctx, m.p.PausedOf(tenant), 0, -1)
		s.parked[tenant], s.tenantIndexed[tenant] = pipe.ZRange(ctx, m.p.NonReadyOf(tenant), 0, -1), pipe.ZScore(ctx, m.p.NonReady(), tenant)
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

// check compares everything that is written down twice.
func (m *model) check() {
	s, lie := m.look(), map[string][]string{} // where each job lies
	note := func(place, blob string) lua.Delivered {
		d, err := lua.ParseDelivered(blob)
		require.NoError(m, err, blob)
		job := fmt.Sprint(d.Group, ".", d.Ordinal)
		lie[job] = append(lie[job], place)
		return d
	}
	waiting, nonReady := map[string]int64{}, map[string]int64{} // by type
	extra := int64(0)
	active, unfinished, congested := map[string]int64{}, map[string]int64{}, map[string]int64{}
	for tenant, blobs := range s.parked {
		for _, blob := range blobs.Val() {
			d := note("N", blob)
			require.Equal(m, tenant, m.tenants[d.Group])
			nonReady[d.Type]++
			if !strings.Contains(blob, "|S|") && !strings.Contains(blob, "|P|") {
				congested[tenant]++
			}
			if strings.Contains(blob, "|R|") {
				active[tenant]++
			}
		}
		if s.tenant[tenant].Val()["paused"] == "" {
			require.Equal(m, len(blobs.Val()) > 0, s.tenantIndexed[tenant].Err() == nil, "index of %s's parked jobs", tenant)
		}
		for _, blob := range s.aside[tenant].Val() { // of what is or was paused
			nonReady[note("N", blob).Type]++
		}
	}
	for typ, entries := range s.ready {
		for _, e := range entries.Val() {
			require.Equal(m, typ, note("R", e.Values[lua.Field].(string)).Type)
		}
	}
	lines := m.resultLines(s)
	for g, tenant := range m.tenants {
		h, states, held := s.group[g].Val(), letters(s.states[g].Val()), s.scheduled[g].Err() == nil
		m.balance(h, states)
		for _, typ := range types {
			queue := s.queue[g+typ].Val()
			waiting[typ] += int64(len(queue))
			for _, blob := range queue {
				note("W", g+"|"+typ+"|0|0|0|0|0|0|0|0||"+blob)
			}
			if len(queue) > 0 && !held && h["paused"] == "" {
				active[tenant] += int64(len(queue))
				m.standsInLine(s, g, typ)
			} else {
				require.Error(m, s.inOrder[g+typ].Err(), "%s has nothing that may run, so it has no place in the order", g)
			}
		}
		for i, letter := range []byte(states) {
			job := fmt.Sprint(g, ".", i)
			want := map[byte][]string{lua.Waiting: {"W"}, lua.NonReady: {"N"}, lua.Ready: {"R"}, lua.InFlight: {"R"}}[letter]
			if h["status"] != "CANCELLED" { // until a cancelled group is swept and read away, its jobs may lie where they were
				require.Equal(m, want, lie[job], "where %s lies, in %s", job, states)
			}
			if strings.ContainsRune("WNRI", rune(letter)) {
				unfinished[tenant]++
			}
			_, failed := s.failures[g].Val()[fmt.Sprint(i)]
			require.Equal(m, letter == lua.Failed, failed, "failure of %s", job)
			require.Equal(m, map[byte]string{lua.Done: "stream", lua.Reduced: "list"}[letter], lines[job], "results of %s", job)
			require.Equal(m, letter == lua.Done || letter == lua.Reduced, m.done[job], "success of %s", job)
		}
	}
	for typ, load := range s.load {
		require.Equal(m, []int64{waiting[typ], nonReady[typ]}, []int64{number(load.Val()["waiting"]), number(load.Val()["non_ready"])}, "load of %s", typ)
	}
	for tenant, counters := range s.tenant {
		h := counters.Val()
		require.Equal(m, []int64{active[tenant], unfinished[tenant], congested[tenant]},
			[]int64{number(h["active"]), number(h["unfinished"]), number(h["congested"])}, "active, unfinished and congested of %s", tenant)
		require.Equal(m, active[tenant] > 0 && h["paused"] == "", s.active[tenant].Val(), "%s is active", tenant)
		if weight, err := strconv.ParseFloat(h["weight"], 64); err == nil && s.active[tenant].Val() {
			extra += int64(math.Floor((weight-1)*1000 + 0.5))
		}
	}
	require.Equal(m, extra, number(s.rate.Val()["xw"]), "what active tenants weigh beyond 1")
}

// standsInLine checks the places of a group that waits and of its tenant.
func (m *model) standsInLine(s *sight, g, typ string) {
	tenant := m.tenants[g]
	require.NoError(m, s.inTenant[g+typ].Err(), "%s waits, so it stands in its tenant's queue", g)
	if s.tenantParked[g+typ].Err() == nil || s.tenant[tenant].Val()["paused"] != "" {
		return
	}
	if s.policy.Err() == nil {
		require.NoError(m, s.inOrder[g+typ].Err(), "%s is not parked, so it has a place in the order", g)
		return
	}
	require.True(m, (s.inLane[g+typ].Err() == nil) != (s.inOver[g+typ].Err() == nil), "%s is not parked, so it stands in the lane, with permits of its own or without", tenant)
}

// resultLines says where the line of each job's result lies; more than one is a failure.
func (m *model) resultLines(s *sight) map[string]string {
	lines := map[string]string{}
	each := func(group, chunk string, f func(job string)) {
		for line := range strings.SplitSeq(chunk, "\n") {
			f(fmt.Sprint(group, ".", m.ordinalOf(line)))
		}
	}
	for g, chunks := range s.results {
		for _, chunk := range chunks.Val() {
			each(g, chunk, func(job string) {
				require.Empty(m, lines[job], "%s has two results", job)
				lines[job] = "list"
			})
		}
	}
	for _, e := range s.resultStream.Val() {
		each(e.Values["g"].(string), e.Values["l"].(string), func(job string) {
			require.NotEqual(m, "stream", lines[job], "%s has two results", job)
			if lines[job] == "" { // or else the rest of the entry was left to another
				lines[job] = "stream"
			}
		})
	}
	return lines
}

// finish drives everything to its end, as the roles would.
func (m *model) finish() {
	m.held = nil // every worker has crashed
	m.freely()
	for _, g := range m.groups() {
		if m.status(g) != "CANCELLED" {
			m.seal(g)
		}
	}
	open := m.groups()
	for round := 0; len(open) > 0; round++ {
		require.Less(m, round, 200, "it comes to an end")
		m.timePasses()
		for _, typ := range types {
			m.reclaim(typ, 100)
			m.admit(typ, 50, noLimit)
		}
		m.promote(noLimit, types...)
		for _, typ := range types {
			if jobs := m.read(typ, "last"); len(jobs) > 0 {
				m.start(typ, jobs)
				m.report(jobs, []lua.OutcomeKind{"d"})
			}
		}
		m.collectResults()
		m.reduceRest()
		var still []string
		for _, g := range open {
			m.sweep(g)
			m.requeue(g)
			m.advance(g)
			if s := m.status(g); s != "COMPLETED" && s != "FAILED" && s != "CANCELLED" {
				still = append(still, g)
			}
		}
		m.check()
		open = still
	}
	for _, g := range m.groups() {
		m.sweep(g)
		ledger := m.ledger(g)
		require.Equal(m, int64(len(m.states(g))), ledger["done"]+ledger["failed"]+ledger["cancelled"], "%s: %v", g, ledger)
		require.Equal(m, m.aggregated(g), ledger["done"], "the aggregate of %s", g)
	}
	m.check()
	m.nothingLeft()
}

// collectResults takes over everything that lies in the results stream, whoever has read it.
func (m *model) collectResults() {
	m.results = nil
	for _, e := range m.c.XRange(m.Context(), m.p.ResultStream(), "-", "+").Val() {
		m.results = append(m.results, results{entry: e.ID, group: e.Values["g"].(string), lines: e.Values["l"].(string)})
	}
}

// reduceRest reduces what was collected, as far as it was not before.
func (m *model) reduceRest() {
	for _, e := range m.results {
		e.ordinals = nil
		states := m.states(e.group)
		var kept []string
		for line := range strings.SplitSeq(e.lines, "\n") {
			if n := m.ordinalOf(line); states[n] == lua.Done {
				e.ordinals, kept = append(e.ordinals, n), append(kept, line)
			}
		}
		e.lines = strings.Join(kept, "\n")
		require.Equal(m, lua.ReduceOK, m.reduceInto("0", e).State)
	}
	m.results = nil
}

// aggregated is what both slots have counted.
func (m *model) aggregated(group string) int64 {
	h := m.c.HGetAll(m.Context(), m.p.Aggregate(group)).Val()
	return number(h["slot:0"]) + number(h["slot:1"])
}

// nothingLeft expires the groups and finds only what is shared, empty.
func (m *model) nothingLeft() {
	for _, typ := range types {
		m.reclaim(typ, 0) // entries of cancelled groups that somebody holds
		if jobs := m.read(typ, "last"); len(jobs) > 0 {
			m.start(typ, jobs) // and those that nobody has read
		}
		require.Zero(m, m.c.XLen(m.Context(), m.p.Ready(typ)).Val())
		require.Empty(m, m.pending(m.p.Ready(typ)))
	}
	require.Zero(m, m.c.XLen(m.Context(), m.p.ResultStream()).Val())
	for _, g := range m.groups() {
		m.expire(g)
	}
	for _, key := range m.keys() {
		require.Contains(m, append(shared, "rate", "messages", "parked:T", "parked:U", "policy"), strings.TrimPrefix(key, m.p.Base()))
	}
	require.NoError(m, m.c.Del(m.Context(), m.keys()...).Err()) // the next sequences have the memory to themselves
}
