package ledger_test

import (
	"cmp"
	"fmt"
	"maps"
	"slices"
	"sync/atomic"
	"testing"

	"github.com/stretchr/testify/require"
	"pgregory.net/rapid"

	"github.com/bulkaction/bulkaction/internal/jobs/ledger"
	"github.com/bulkaction/bulkaction/internal/testkit/rapidtest"
	"github.com/bulkaction/bulkaction/internal/testkit/redistest"
)

// ranked is a group in the model of the priority formula.
type ranked struct {
	id, tenant, lane      string
	createdMS, base       int64
	total, ended, waiting int64
}

// priority returns the model's priority of a group: -created_ms + base_priority + ALPHA * (-1 +
// total / max(1, total - done)), where base_priority is the group's plus its tenant's, and done
// counts all jobs that have ended.
func (g *ranked) priority(alpha float64, tenantBase int64) float64 {
	return -float64(g.createdMS) + float64(g.base) + float64(tenantBase) + alpha*(-1+float64(g.total)/float64(max(1, g.total-g.ended)))
}

// TestPriorityIsTheFormula: with the priority policy, the jobs of a lane are admitted in the order
// of the formula over the groups of all tenants, while counts of ended jobs, totals and base
// priorities change.
func TestPriorityIsTheFormula(t *testing.T) {
	url, prefix := redistest.Parallel(t)
	c := client(t, url)
	var n atomic.Int64
	rapidtest.CheckFew(t, func(rt *rapid.T) {
		m := &priorityModel{world: newWorld(rt, c, prefix+fmtInt(n.Add(1))+":"), rt: rt, groups: map[string]*ranked{}, bases: map[string]int64{}}
		m.alpha = rapid.SampledFrom([]float64{0, 1, 250, 10_000}).Draw(rt, "alpha")
		late := rapid.Bool().Draw(rt, "switch with a backlog")
		if !late {
			m.byPriority(m.alpha)
		}
		for i := range rapid.IntRange(1, 6).Draw(rt, "groups") {
			m.add(i)
		}
		if late {
			m.byPriority(m.alpha)
		}
		rt.Repeat(map[string]func(*rapid.T){
			"admit":       func(*rapid.T) { m.actAdmit() },
			"finish":      func(*rapid.T) { m.actFinish() },
			"append":      func(*rapid.T) { m.actAppend() },
			"lose worker": func(*rapid.T) { m.actLoseWorker() },
			"set tenant":  func(*rapid.T) { m.actSet() },
			"there again": func(*rapid.T) { m.byPriority(m.alpha) },
		})
		for m.left() > 0 {
			m.actAdmit()
		}
		require.Zero(m, m.c.Exists(m.Context(), m.p.FairPriority("T", "high"), m.p.FairPriority("T", "low")).Val())
	})
}

type priorityModel struct {
	*world
	rt     *rapid.T
	alpha  float64
	groups map[string]*ranked
	bases  map[string]int64 // base priority by tenant
	run    []taken
}

func (m *priorityModel) add(i int) {
	g := &ranked{id: fmt.Sprint("g", i), tenant: rapid.SampledFrom([]string{"x", "y"}).Draw(m.rt, "tenant")}
	g.lane = rapid.SampledFrom([]string{"high", "low"}).Draw(m.rt, "lane")
	g.base = rapid.Int64Range(-20, 20).Draw(m.rt, "base")
	g.waiting = rapid.Int64Range(1, 6).Draw(m.rt, "jobs")
	fields := []string{"base_priority", fmtInt(g.base), "lane", g.lane}
	if rapid.Bool().Draw(m.rt, "announced") {
		g.total = g.waiting + rapid.Int64Range(0, 10).Draw(m.rt, "to come")
		fields = append(fields, "total", fmtInt(g.total))
	}
	g.total = max(g.total, g.waiting)
	m.create(g.id, g.tenant, "T", fields...)
	// The test draws the creation time (ms): real ones would be equal or different by chance.
	g.createdMS = 1_700_000_000_000 + rapid.Int64Range(0, 30).Draw(m.rt, "ms")
	require.NoError(m, m.c.HSet(m.Context(), m.p.Group(g.id), "at:created", g.createdMS).Err())
	m.append(g.id, int(g.waiting))
	m.groups[g.id] = g
}

func (m *priorityModel) left() (n int64) {
	for _, g := range m.groups {
		n += g.waiting
	}
	return n
}

// actAdmit admits some jobs one by one: each must be of the group with the highest priority of its
// lane; among equal priorities the last name is first.
func (m *priorityModel) actAdmit() {
	for range rapid.IntRange(1, 3).Draw(m.rt, "jobs") {
		best := map[string]*ranked{} // by lane
		for _, g := range m.groups {
			b := best[g.lane]
			if g.waiting > 0 && (b == nil || cmp.Or(cmp.Compare(m.priority(g), m.priority(b)), cmp.Compare(g.id, b.id)) > 0) {
				best[g.lane] = g
			}
		}
		r := m.admit("T", 1, noLimit)
		if len(best) == 0 {
			require.Zero(m, r.Moved)
			return
		}
		require.Equal(m, 1, r.Moved)
		run := m.read("T", "c")
		require.Len(m, run, 1)
		g := m.groups[run[0].Group]
		require.Equal(m, best[g.lane].id, g.id, "%v", m.order())
		g.waiting--
		m.start("T", run)
		m.run = append(m.run, run...)
	}
}

func (m *priorityModel) priority(g *ranked) float64 { return g.priority(m.alpha, m.bases[g.tenant]) }

// order describes all groups of the model with their priorities, for messages of failed tests.
func (m *priorityModel) order() []string {
	var all []string
	for id, g := range m.groups {
		all = append(all, fmt.Sprintf("%s: %s, %f (%d waiting)", id, g.lane, m.priority(g), g.waiting))
	}
	slices.Sort(all)
	return all
}

func (m *priorityModel) actFinish() {
	for range min(len(m.run), rapid.IntRange(1, 3).Draw(m.rt, "outcomes")) {
		j := m.run[0]
		m.run = m.run[1:]
		if rapid.IntRange(0, 4).Draw(m.rt, "fails") == 0 {
			m.outcome("T", other(ledger.OutcomeFailed, j, 0))
		} else {
			m.outcome("T", done(j))
		}
		m.groups[j.Group].ended++
	}
}

// actLoseWorker reclaims all jobs in flight. No losses are allowed, so all of them fail.
func (m *priorityModel) actLoseWorker() {
	require.Equal(m, len(m.run), m.reclaim("T", 0).Failed)
	for _, j := range m.run {
		m.groups[j.Group].ended++
	}
	m.run = nil
}

func (m *priorityModel) actAppend() {
	id := rapid.SampledFrom(slices.Sorted(maps.Keys(m.groups))).Draw(m.rt, "group")
	g, n := m.groups[id], int64(rapid.IntRange(1, 4).Draw(m.rt, "jobs"))
	_, err := ledger.Append(m.Context(), m.c, m.p, ledger.AppendArgs{Group: id, Limit: 1000, Jobs: jobs(int(n))})
	if err != nil { // more jobs than the announced total
		return
	}
	g.waiting += n
	g.total = max(g.total, number(m.c.HGet(m.Context(), m.p.Group(id), "accepted").Val()))
}

func (m *priorityModel) actSet() {
	tenant, base := rapid.SampledFrom([]string{"x", "y"}).Draw(m.rt, "tenant"), rapid.Int64Range(-40, 40).Draw(m.rt, "base")
	m.set(tenant, ledger.TenantSettings{BasePriority: &base})
	m.bases[tenant] = base
}

// TestPriorityRisesWithWhatIsDone: with ALPHA 10,000, a group with 9 of 10 jobs done passes a group
// without ended jobs that is a minute older.
func TestPriorityRisesWithWhatIsDone(t *testing.T) {
	onStores(t, func(w *world) {
		w.byPriority(10_000)
		for i, g := range []string{"old", "new"} {
			w.create(g, g, "T")
			require.NoError(w, w.c.HSet(w.Context(), w.p.Group(g), "at:created", 1_700_000_000_000+60_000*i).Err())
			w.append(g, 10)
		}
		for range 3 {
			w.admit("T", 1, noLimit)
		}
		require.Equal(w, "oldoldold", w.admitted("T", group), "the older one goes first")
		// By the formula, the group new gains 10,000 * (-1 + 10 / (10 - 9)) = 90,000 ms with 9 of
		// 10 jobs done, more than the 60,000 ms by which the group old is older.
		require.NoError(w, w.c.HSet(w.Context(), w.p.Group("new"), "done", 8).Err())
		w.outcome("T", done(func() taken {
			w.pause(ledger.PauseGroup, "old")
			defer w.resume(ledger.PauseGroup, "old")
			return w.begin("T", "c", 1)[0]
		}()))
		require.Equal(w, 1, w.admit("T", 1, noLimit).Moved)
		require.Equal(w, "new", w.admitted("T", group))
	})
}

// TestPriorityFallsInTheNextRound: all four jobs of a group have failed. After a retry the group's
// score in the fair queue is the priority of a group without ended jobs.
func TestPriorityFallsInTheNextRound(t *testing.T) {
	onStores(t, func(w *world) {
		w.byPriority(10_000)
		w.fill("g", 4, "a", "T")
		w.seal("g")
		for _, j := range w.begin("T", "c", 4) {
			w.outcome("T", other(ledger.OutcomeFailed, j, 0))
		}
		w.advance("g")
		require.Equal(w, "FAILED", w.status("g"))
		w.retry("g")
		created := number(w.c.HGet(w.Context(), w.p.Group("g"), "at:created").Val())
		want := (&ranked{createdMS: created, total: 4}).priority(10_000, 0)
		require.Equal(w, want, w.c.ZScore(w.Context(), w.p.FairPriority("T", "normal"), "g").Val())
	})
}

// TestPriorityIsSwitchedWithABacklog: the policy can be switched to priority and back while more
// groups wait than one script call ranks; all jobs are admitted.
func TestPriorityIsSwitchedWithABacklog(t *testing.T) {
	onRedis(t, func(w *world) {
		const groups = 450
		for i := range groups {
			g := fmt.Sprintf("g%03d", i)
			w.create(g, fmt.Sprint("t", i%5), "T")
			require.NoError(w, w.c.HSet(w.Context(), w.p.Group(g), "at:created", 1_700_000_000_000+i).Err())
			w.append(g, 1)
		}
		w.pause(ledger.PauseGroup, "g007")
		w.byPriority(10_000)
		w.unchanged(func() { w.byPriority(10_000) })
		require.Equal(w, int64(groups-1), w.c.ZCard(w.Context(), w.p.FairPriority("T", "normal")).Val())
		require.Equal(w, 100, w.admit("T", 100, noLimit).Moved)
		var first []string
		for _, j := range w.read("T", "c") {
			first = append(first, j.Group)
		}
		require.True(w, slices.IsSorted(first), "the oldest go first")
		require.Equal(w, "g100", first[99])
		w.resume(ledger.PauseGroup, "g007")
		w.admit("T", 1, noLimit)
		require.Equal(w, "g007", w.admitted("T", group))
		w.pause(ledger.PauseTenant, "t0")
		require.Equal(w, 49, w.admit("T", 49, noLimit).Moved)
		require.NotContains(w, w.admitted("T", func(j taken) string { return j.Group[3:] }), "0", "of a paused tenant")
		w.resume(ledger.PauseTenant, "t0")

		require.NoError(w, ledger.SetPolicy(w.Context(), w.c, w.p, nil))
		require.Zero(w, w.c.Exists(w.Context(), w.p.FairPriority("T", "normal"), w.p.Policy()).Val())
		w.unchanged(func() { require.NoError(w, ledger.SetPolicy(w.Context(), w.c, w.p, nil)) })
		left := groups - 150
		for moved := 1; moved > 0; left -= moved {
			moved = w.admit("T", 100, noLimit).Moved
			w.read("T", "c")
		}
		require.Zero(w, left)
		require.Zero(w, w.c.Exists(w.Context(), w.p.FairLane("T", "normal")).Val())
	})
}

// TestPriorityAfterARankingThatWasCutShort: after a ranking of groups that did not come to its end,
// SetPolicy with the same alpha ranks the rest.
func TestPriorityAfterARankingThatWasCutShort(t *testing.T) {
	onStores(t, func(w *world) {
		w.backlog("a", "T", 1)
		w.byPriority(5)
		require.NoError(w, w.c.Del(w.Context(), w.p.FairPriority("T", "normal")).Err())
		require.NoError(w, w.c.HSet(w.Context(), w.p.Rate(), "ranked", "?").Err())
		w.byPriority(5)
		require.Equal(w, 1, w.admit("T", 1, noLimit).Moved)
	})
}

// TestPriorityWithLimits: with the priority policy, a tenant of three groups with a limit of 2 gets
// at most 2 permits in each window, and its groups are served in their order. Groups of other
// tenants are not held up.
func TestPriorityWithLimits(t *testing.T) {
	onStores(t, func(w *world) {
		w.byPriority(10_000)
		w.set("a", perWindow(2))
		for i, g := range []string{"a1", "a2", "b1", "a3"} {
			w.create(g, g[:1], "T")
			require.NoError(w, w.c.HSet(w.Context(), w.p.Group(g), "at:created", 1_700_000_000_000+i).Err())
			w.append(g, 2)
		}
		require.Equal(w, map[string]int64{"a": 2, "b": 2}, w.exhaust("T", 1, elastic(10)))
		require.Equal(w, []string{"RR", "NW", "RR", "WW"}, []string{w.states("a1"), w.states("a2"), w.states("b1"), w.states("a3")})
		require.Equal(w, "1", w.c.HGet(w.Context(), w.p.Congestion("a"), "throttles").Val())
		w.newWindow("a")
		require.Equal(w, map[string]int64{"a": 2}, w.exhaust("T", 1, elastic(10)))
		require.Equal(w, []string{"NR", "RW"}, []string{w.states("a2"), w.states("a3")})
		w.newWindow("a")
		require.Equal(w, map[string]int64{"a": 1}, w.exhaust("T", 1, elastic(10)))
		w.newWindow("a")
		w.fill("c1", 20, "c", "T")
		require.Equal(w, []ledger.Permit{{Tenant: "c", N: 10}}, w.admit("T", 100, elastic(10)).Permits, "one tenant may have all")
	})
}

// TestPriorityLooksAtFewGroups: 500 groups of a paused tenant are ranked. Each call of Admit takes
// at most 200 of them from the order, admits nothing, and asks for the next call until none is
// left.
func TestPriorityLooksAtFewGroups(t *testing.T) {
	onRedis(t, func(w *world) {
		w.byPriority(1)
		const groups = 500
		for i := range groups {
			id := fmt.Sprint("g", i)
			w.fill(id, 1, "paused", "T")
		}
		require.NoError(w, ledger.Pause(w.Context(), w.c, w.p, ledger.PauseTenant, "paused"))
		order := w.p.FairPriority("T", "normal")
		for left := int64(groups); left > 0; {
			r := w.admit("T", 1, noLimit)
			require.Zero(w, r.Moved)
			now := w.c.ZCard(w.Context(), order).Val()
			require.LessOrEqual(w, left-now, int64(200))
			require.Less(w, now, left)
			if left = now; left > 0 {
				require.Equal(w, ledger.AdmitOK, r.State, "the fetcher calls again at once")
			}
		}
	})
}
