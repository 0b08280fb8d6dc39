package lua_test

import (
	"fmt"
	"strings"

	"github.com/redis/go-redis/v9"
	"github.com/stretchr/testify/require"

	"github.com/bulkaction/bulkaction/lua"
)

// check compares everything that is written down twice.
func (m *model) check() {
	lie := map[string][]string{} // where each job lies
	note := func(place, blob string) taken {
		d, err := lua.ParseDelivered(blob)
		require.NoError(m, err, blob)
		job := fmt.Sprint(d.Group, ".", d.Ordinal)
		lie[job] = append(lie[job], place)
		return taken{Delivered: d}
	}
	waiting, nonReady := map[string]int64{}, map[string]int64{} // by type
	active, unfinished, congested := map[string]int64{}, map[string]int64{}, map[string]int64{}
	for _, tenant := range []string{"x", "y"} {
		blobs := m.c.ZRange(m.Context(), m.p.NonReadyOf(tenant), 0, -1).Val()
		for _, blob := range blobs {
			j := note("N", blob)
			require.Equal(m, tenant, m.tenants[j.Group])
			nonReady[j.Type]++
			if !strings.Contains(blob, "|S|") {
				congested[tenant]++
			}
			if strings.Contains(blob, "|R|") {
				active[tenant]++
			}
		}
		indexed := m.c.ZScore(m.Context(), m.p.NonReady(), tenant).Err() == nil
		require.Equal(m, len(blobs) > 0, indexed, "index of %s's parked jobs", tenant)
	}
	for _, typ := range types {
		for _, e := range m.c.XRange(m.Context(), m.p.Ready(typ), "-", "+").Val() {
			j := note("R", e.Values[lua.Field].(string))
			require.Equal(m, typ, j.Type)
		}
	}
	lines := m.resultLines()
	for _, g := range m.groups() {
		m.ledger(g)
		status, tenant := m.status(g), m.tenants[g]
		held := m.c.ZScore(m.Context(), m.p.Scheduled(), g).Err() == nil
		for _, typ := range types {
			queue := m.c.LRange(m.Context(), m.p.Queue(g, typ), 0, -1).Val()
			waiting[typ] += int64(len(queue))
			if !held {
				active[tenant] += int64(len(queue))
			}
			for _, blob := range queue {
				note("W", g+"|"+typ+"|0|0|0|0|0|0|0|0||"+blob)
			}
			if len(queue) > 0 && !held {
				m.inFairQueue(typ, tenant, g)
			}
		}
		failures := m.c.HGetAll(m.Context(), m.p.Failures(g)).Val()
		states := m.states(g)
		for i, letter := range []byte(states) {
			job := fmt.Sprint(g, ".", i)
			want := map[byte][]string{lua.Waiting: {"W"}, lua.NonReady: {"N"}, lua.Ready: {"R"}, lua.InFlight: {"R"}}[letter]
			if status != "CANCELLED" { // until a cancelled group is swept and read away, its jobs may lie where they were
				require.Equal(m, want, lie[job], "where %s lies, in %s", job, states)
			}
			if strings.ContainsRune("WNRI", rune(letter)) {
				unfinished[tenant]++
			}
			_, failed := failures[fmt.Sprint(i)]
			require.Equal(m, letter == lua.Failed, failed, "failure of %s", job)
			require.Equal(m, map[byte]string{lua.Done: "stream", lua.Reduced: "list"}[letter], lines[job], "results of %s", job)
			require.Equal(m, letter == lua.Done || letter == lua.Reduced, m.done[job], "success of %s", job)
		}
	}
	for _, typ := range types {
		load := m.c.HGetAll(m.Context(), m.p.Load(typ)).Val()
		require.Equal(m, []int64{waiting[typ], nonReady[typ]}, []int64{number(load["waiting"]), number(load["non_ready"])}, "load of %s", typ)
	}
	for _, tenant := range []string{"x", "y"} {
		h := m.c.HGetAll(m.Context(), m.p.Tenant(tenant)).Val()
		require.Equal(m, []int64{active[tenant], unfinished[tenant], congested[tenant]},
			[]int64{number(h["active"]), number(h["unfinished"]), number(h["congested"])}, "active, unfinished and congested of %s", tenant)
		require.Equal(m, active[tenant] > 0, m.c.SIsMember(m.Context(), m.p.Active(), tenant).Val(), "%s is active", tenant)
	}
}

// inFairQueue checks that a group with waiting jobs will be found: its tenant stands in the lane, or is parked.
func (m *model) inFairQueue(typ, tenant, group string) {
	lane := m.c.HGet(m.Context(), m.p.Group(group), "lane").Val()
	require.NoError(m, m.c.ZScore(m.Context(), m.p.FairTenant(typ, lane, tenant), group).Err(), "%s in its tenant's queue", group)
	if m.c.ZScore(m.Context(), m.p.Parked(typ), tenant).Err() == redis.Nil {
		require.NoError(m, m.c.ZScore(m.Context(), m.p.FairLane(typ, lane), tenant).Err(), "%s in the lane", tenant)
	}
}

// resultLines says where the line of each job's result lies; more than one is a failure.
func (m *model) resultLines() map[string]string {
	lines := map[string]string{}
	note := func(group, chunk, where string) {
		for line := range strings.SplitSeq(chunk, "\n") {
			job := fmt.Sprint(group, ".", m.ordinalOf(line))
			require.Empty(m, lines[job], "%s has two results", job)
			lines[job] = where
		}
	}
	for _, g := range m.groups() {
		for _, chunk := range m.c.LRange(m.Context(), m.p.Results(g), 0, -1).Val() {
			note(g, chunk, "list")
		}
	}
	// An entry may hold what was reduced already, by a caller that left the rest of it to another.
	reduced := map[string]bool{}
	for job := range lines {
		reduced[job] = true
	}
	for _, e := range m.c.XRange(m.Context(), m.p.ResultStream(), "-", "+").Val() {
		group := e.Values["g"].(string)
		for line := range strings.SplitSeq(e.Values["l"].(string), "\n") {
			if !reduced[fmt.Sprint(group, ".", m.ordinalOf(line))] {
				note(group, line, "stream")
			}
		}
	}
	return lines
}

// finish drives everything to its end, as the roles would.
func (m *model) finish() {
	m.held = nil // every worker has crashed
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
				m.report(jobs, true)
			}
		}
		for _, e := range m.c.XRange(m.Context(), m.p.ResultStream(), "-", "+").Val() {
			m.results = append(m.results, results{entry: e.ID, group: e.Values["g"].(string), lines: e.Values["l"].(string)})
		}
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

// reduceRest reduces everything that lies in the results stream, whoever has read it.
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
		require.Contains(m, append(shared, "rate", "messages", "parked:T", "parked:U"), strings.TrimPrefix(key, m.p.Base()))
	}
	require.NoError(m, m.c.Del(m.Context(), m.keys()...).Err()) // the next sequences have the memory to themselves
}
