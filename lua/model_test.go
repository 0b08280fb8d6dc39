package lua_test

import (
	"cmp"
	"fmt"
	"maps"
	"slices"
	"sync/atomic"
	"testing"
	"time"

	"github.com/redis/go-redis/v9"
	"github.com/stretchr/testify/require"
	"pgregory.net/rapid"

	"github.com/bulkaction/bulkaction/internal/redistest"
	"github.com/bulkaction/bulkaction/internal/redisx/keyspace"
	"github.com/bulkaction/bulkaction/lua"
)

// Random sequences of transitions, many of them repeated or by callers that come too late. After each step everything that
// is written down twice must agree, every job must lie at exactly one place, and at last everything can be brought to an
// end with each job counted once. More of them: go test ./lua -run Model -rapid.checks 10000
func TestModel(t *testing.T) {
	for i := range 3 {
		t.Run(fmt.Sprint("redis-", i), func(t *testing.T) {
			t.Parallel()
			url, prefix := redistest.Shared(t)
			checkModel(t, client(t, url), prefix)
		})
	}
	t.Run("miniredis", func(t *testing.T) {
		t.Parallel()
		_, url := redistest.Mini(t)
		checkModel(t, client(t, url), "t:")
	})
}

func checkModel(t *testing.T, c *redis.Client, prefix string) {
	var n atomic.Int64
	rapid.Check(t, func(rt *rapid.T) {
		m := &model{
			world: newWorld(rt, c, prefix+fmtInt(n.Add(1))+":"), rt: rt,
			tenants: map[string]string{"a": "x", "b": "x", "c": "y"}, lanes: map[string]string{}, done: map[string]bool{}, requests: map[string]lua.AppendArgs{},
		}
		if rapid.Bool().Draw(rt, "by priority") {
			m.byPriority(10_000)
		}
		for _, g := range m.groups() {
			lane := rapid.SampledFrom([]string{"high", "normal", "low"}).Draw(rt, "lane")
			m.lanes[g] = lane
			if rapid.Bool().Draw(rt, "held") {
				m.create(g, m.tenants[g], "T", "lane", lane, "run_at", inAnHour())
			} else {
				m.create(g, m.tenants[g], "T", "lane", lane)
			}
		}
		rt.Repeat(map[string]func(*rapid.T){
			"append":       func(*rapid.T) { m.actAppend() },
			"append again": func(*rapid.T) { m.actAppendAgain() },
			"seal":         func(*rapid.T) { m.actSeal() },
			"admit":        func(*rapid.T) { m.actAdmit() },
			"promote":      func(*rapid.T) { m.actPromote() },
			"time passes":  func(*rapid.T) { m.timePasses() },
			"read":         func(*rapid.T) { m.actRead() },
			"start":        func(*rapid.T) { m.actStart() },
			"report":       func(*rapid.T) { m.actReport() },
			"report done":  func(*rapid.T) { m.actReportDone() },
			"crash":        func(*rapid.T) { m.actCrash() },
			"reclaim":      func(*rapid.T) { m.reclaim(m.typ(), m.upTo(2)) },
			"lose readers": func(*rapid.T) { m.c.XGroupDestroy(m.Context(), m.p.Ready(m.typ()), keyspace.GroupWorkers) },
			"reduce":       func(*rapid.T) { m.actReduce() },
			"advance":      func(*rapid.T) { m.advance(m.group()) },
			"cancel":       func(*rapid.T) { m.actCancel() },
			"sweep":        func(*rapid.T) { m.actSweep() },
			"retry":        func(*rapid.T) { m.actRetry() },
			"drain":        func(*rapid.T) { m.actDrain() },
			"pause":        func(*rapid.T) { m.actPause(lua.Pause) },
			"resume":       func(*rapid.T) { m.actPause(lua.Resume) },
			"set tenant":   func(*rapid.T) { m.actSet() },
			"":             func(*rapid.T) { m.check() },
		})
		m.finish()
	})
}

// model is a world with the workers and callers in it.
type model struct {
	*world
	rt       *rapid.T
	tenants  map[string]string // by group
	lanes    map[string]string // by group
	held     []taken           // what workers hold, started or not
	past     []taken           // the last that they held once; they may still report it
	results  []results         // what aggregators have read, reduced or not
	requests map[string]lua.AppendArgs
	done     map[string]bool // jobs whose success was taken
}

var types, owners = []string{"T", "U"}, []string{"x", "y"}

func (m *model) groups() []string        { return slices.Sorted(maps.Keys(m.tenants)) }
func (m *model) group() string           { return rapid.SampledFrom(m.groups()).Draw(m.rt, "group") }
func (m *model) typ() string             { return rapid.SampledFrom(types).Draw(m.rt, "type") }
func (m *model) upTo(n int) int          { return rapid.IntRange(0, n).Draw(m.rt, "n") }
func (m *model) chance(what string) bool { return rapid.IntRange(0, 3).Draw(m.rt, what) == 0 }

// some takes up to n random ones out of all.
func some[T any](m *model, all []T, n int) []T {
	if len(all) == 0 {
		return nil
	}
	picked := rapid.SliceOfNDistinct(rapid.IntRange(0, len(all)-1), 0, min(n, len(all)), rapid.ID[int]).Draw(m.rt, "picked")
	out := make([]T, len(picked))
	for i, at := range picked {
		out[i] = all[at]
	}
	return out
}

func (m *model) actAppend() {
	g := m.group()
	a := lua.AppendArgs{Group: g, Limit: 100, Request: fmt.Sprint("r", len(m.requests))}
	for range m.upTo(4) + 1 {
		j := lua.NewJob{Payload: []byte("1")}
		if m.chance("other type") {
			j.Type = "U"
		}
		if m.chance("large") {
			j.Payload = large
		}
		if m.chance("later") {
			j.RunAt = time.Now().Add(time.Hour)
		}
		a.Jobs = append(a.Jobs, j)
	}
	if m.chance("seal") {
		a.Mode = lua.AppendSeal
	}
	before := m.ledger(g)
	r, err := lua.Append(m.Context(), m.c, m.p, a)
	if err != nil { // sealed or cancelled
		require.Equal(m, before, m.ledger(g))
		return
	}
	if r.Duplicate { // the last of a submission was there before
		require.Equal(m, lua.AppendSeal, a.Mode)
		return
	}
	require.Equal(m, int64(len(a.Jobs)), r.N)
	m.requests[a.Request] = a
}

func (m *model) actAppendAgain() {
	for _, name := range some(m, slices.Sorted(maps.Keys(m.requests)), 1) {
		require.True(m, m.appendJobs(m.requests[name]).Duplicate)
	}
}

func (m *model) actSeal() {
	if m.chance("really") {
		_, _ = lua.Seal(m.Context(), m.c, m.p, m.group(), nil) // refused when it was cancelled
	}
}

func (m *model) limit() lua.Limit {
	if !m.chance("limited") {
		return noLimit
	}
	l := limit(int64(m.upTo(4)) + 1)
	l.Limiter = rapid.SampledFrom(limiters).Draw(m.rt, "limiter")
	l.Share = rapid.SampledFrom([]string{lua.ShareStatic, lua.ShareElastic}).Draw(m.rt, "share")
	return l
}

func (m *model) actAdmit() {
	l, most := m.limit(), m.upTo(5)+1
	r := m.admitBelow(6, m.typ(), most, l)
	require.LessOrEqual(m, r.Moved, most)
	if l.Permits > 0 {
		require.LessOrEqual(m, int64(r.Moved), l.Permits)
	}
}

func (m *model) actPromote() {
	caps := map[string]int{}
	for _, typ := range types {
		caps[typ] = m.upTo(6)
	}
	m.promoteBelow(caps, m.limit())
}

// timePasses brings the time of everything that is parked or held, and a new window.
func (m *model) timePasses() {
	first := func(key string) {
		for _, member := range m.c.ZRange(m.Context(), key, 0, -1).Val() {
			m.c.ZAdd(m.Context(), key, redis.Z{Score: 1, Member: member})
		}
	}
	for _, tenant := range owners {
		first(m.p.NonReadyOf(tenant))
		m.c.HDel(m.Context(), m.p.Tenant(tenant), "n", "s", "t")
	}
	m.c.HDel(m.Context(), m.p.Rate(), "n", "s", "t")
	for _, g := range m.groups() {
		m.c.HSet(m.Context(), m.p.Group(g), "run_at", 1)
	}
	for _, key := range []string{m.p.NonReady(), m.p.Parked("T"), m.p.Parked("U"), m.p.Scheduled()} {
		first(key)
	}
	m.schedule(10)
}

func (m *model) actRead() {
	m.held = append(m.held, m.readSome(m.typ(), rapid.SampledFrom([]string{"c1", "c2"}).Draw(m.rt, "consumer"), int64(m.upTo(4))+1)...)
}

// actStart starts some of what is held, perhaps again, and perhaps what is not held any more.
func (m *model) actStart() {
	picked := some(m, slices.Concat(m.held, m.past), 4)
	for _, typ := range types {
		batch := slices.DeleteFunc(slices.Clone(picked), func(j taken) bool { return j.Type != typ })
		if len(batch) == 0 {
			continue
		}
		m.start(typ, batch)
		for _, started := range batch {
			if started.token >= 0 {
				m.drop(started) // an earlier start of the same entry is stale now
				m.held = append(m.held, started)
			}
		}
	}
}

// drop takes an entry out of what is held.
func (m *model) drop(j taken) {
	m.held = slices.DeleteFunc(m.held, func(h taken) bool {
		if h.entry != j.entry || h.Type != j.Type {
			return false
		}
		m.past = append(m.past, h)
		return true
	})
	m.past = m.past[max(0, len(m.past)-8):]
}

func (m *model) actReport() {
	m.report(some(m, slices.Concat(m.held, m.past), 5), []lua.OutcomeKind{
		"d", "d", lua.OutcomeRetry, lua.OutcomeThrottled, lua.OutcomeFailed, lua.OutcomeReleased, lua.OutcomeUnstarted,
	})
}

func (m *model) actReportDone() { m.report(some(m, m.held, 5), []lua.OutcomeKind{"d"}) }

// report reports outcomes of random kinds, d for done, per type in one batch.
func (m *model) report(picked []taken, kinds []lua.OutcomeKind) {
	for _, typ := range types {
		byGroup, n := map[string]*lua.GroupOutcome{}, 0
		var jobs []taken
		for _, j := range picked {
			kind := rapid.SampledFrom(kinds).Draw(m.rt, "kind")
			if j.Type != typ || (j.token < 0 && kind != lua.OutcomeUnstarted) {
				continue
			}
			n++
			g := byGroup[j.Group]
			if g == nil {
				g = &lua.GroupOutcome{Group: j.Group}
				byGroup[j.Group] = g
			}
			if kind == "d" {
				g.Done = append(g.Done, done(j)[0].Done...)
				jobs = append(jobs, j)
			} else {
				g.Others = append(g.Others, other(kind, j, time.Hour)[0].Others...)
			}
		}
		var batch []lua.GroupOutcome
		for _, name := range slices.Sorted(maps.Keys(byGroup)) {
			g := byGroup[name]
			slices.SortFunc(g.Done, func(a, b lua.DoneJob) int { return cmp.Compare(a.Ordinal, b.Ordinal) })
			slices.SortFunc(g.Others, func(a, b lua.OtherJob) int { return cmp.Compare(a.Ordinal, b.Ordinal) })
			batch = append(batch, *g)
		}
		if n == 0 {
			continue
		}
		were := m.doneJobs()
		r := m.outcome(typ, batch)
		require.Equal(m, int64(n), r.Owned+r.Stale)
		for _, j := range jobs {
			if job := fmt.Sprint(j.Group, ".", j.Ordinal); m.doneJobs()[job] && !were[job] {
				require.False(m, m.done[job], "%s was done before", job)
				m.done[job], were[job] = true, true // one batch may name it twice, under an old attempt and under the new one
			}
		}
		for _, j := range picked {
			if j.Type == typ {
				m.drop(j)
			}
		}
	}
}

// actDrain brings what there is to an outcome, and the groups as far as they go, so that there are rounds to retry.
func (m *model) actDrain() {
	m.timePasses()
	m.promote(noLimit, types...)
	for _, typ := range types {
		m.admit(typ, 50, noLimit)
		run := m.read(typ, "drain")
		m.start(typ, run)
		kind := rapid.SampledFrom([]lua.OutcomeKind{"d", lua.OutcomeFailed}).Draw(m.rt, "kind")
		m.report(run, []lua.OutcomeKind{kind})
	}
	m.collectResults()
	m.reduceRest()
	for _, g := range m.groups() {
		_, _ = lua.Seal(m.Context(), m.c, m.p, g, nil) // refused when it was cancelled
		m.advance(g)
	}
}

// doneJobs are the jobs that are done by their state.
func (m *model) doneJobs() map[string]bool {
	all := map[string]bool{}
	for _, g := range m.groups() {
		for i, letter := range []byte(m.states(g)) {
			if letter == lua.Done || letter == lua.Reduced {
				all[fmt.Sprint(g, ".", i)] = true
			}
		}
	}
	return all
}

// actCrash has workers forget what they hold.
func (m *model) actCrash() {
	for _, j := range some(m, m.held, 4) {
		m.drop(j)
	}
}
