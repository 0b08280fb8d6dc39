package ledger_test

import (
	"fmt"
	"maps"
	"slices"
	"testing"
	"time"

	"github.com/redis/go-redis/v9"
	"github.com/stretchr/testify/require"
	"pgregory.net/rapid"

	"github.com/bulkaction/bulkaction/internal/jobs/ledger"
	"github.com/bulkaction/bulkaction/internal/testkit/rapidtest"
	"github.com/bulkaction/bulkaction/internal/testkit/redistest"
)

// TestModel runs random sequences of transitions, many of them repeated or late, and compares each
// reply and each change with a reference in memory. Every few steps all redundant data must agree,
// and every job must be at exactly one location. In the end every job and group must end, with each
// job counted once.
func TestModel(t *testing.T) {
	t.Run("redis", func(t *testing.T) {
		t.Parallel()
		rapidtest.OnRedis(t, 40, func(o *redis.Options) *redis.Client { return clientOf(t, o) }, checkModel)
	})
	t.Run("miniredis", func(t *testing.T) {
		t.Parallel()
		_, url := redistest.Mini(t)
		c := client(t, url)
		rapidtest.CheckFew(t, func(rt *rapid.T) { checkModel(rt, c) })
	})
}

func checkModel(rt *rapid.T, c *redis.Client) {
	require.NoError(rt, c.FlushDB(rt.Context()).Err())
	m := &model{
		world: newWorld(rapidtest.Quick{T: rt}, c, "t:"), rt: rt, reading: map[string]bool{}, lanes: map[string]string{}, requests: map[string]ledger.AppendArgs{},
		reference: reference{groups: map[string]*book{}, paused: map[string]bool{}, unacked: map[string]map[string]taken{"T": {}, "U": {}}, stale: map[string]int64{}, lost: map[string]int64{}},
	}
	if rapid.Bool().Draw(rt, "by priority") {
		m.byPriority(10_000)
	}
	m.fencing = m.fence()
	for g, tenant := range map[string]string{"a": "x", "b": "x", "c": "y"} {
		m.reference.groups[g] = &book{tenant: tenant, status: "CREATED", round: 1}
	}
	for _, g := range groups {
		lane := rapid.SampledFrom([]string{"high", "normal", "low"}).Draw(rt, "lane")
		m.lanes[g] = lane
		if rapid.Bool().Draw(rt, "held") {
			m.create(g, m.tenantOf(g), "T", "lane", lane, "run_at", inAnHour())
		} else {
			m.create(g, m.tenantOf(g), "T", "lane", lane)
		}
	}
	for range 2 {
		m.actAppend()
	}
	for i, name := range rapid.SliceOfN(rapid.SampledFrom(slices.Sorted(maps.Keys(acts))), 8, 22).Draw(rt, "acts") {
		acts[name](m)
		if i%8 == 7 { // a wrong state stays wrong, so it is enough to check sometimes
			m.check()
		}
	}
	m.finish()
}

// acts are the steps that TestModel draws from, by name. actWork has two names, so that it is drawn
// more often.
var acts = map[string]func(m *model){
	"work":         (*model).actWork,
	"work more":    (*model).actWork,
	"work again":   (*model).actWorkAgain,
	"append":       (*model).actAppend,
	"append again": (*model).actAppendAgain,
	"seal":         (*model).actSeal,
	"admit":        (*model).actAdmit,
	"promote":      (*model).actPromote,
	"time passes":  (*model).timePasses,
	"read":         (*model).actRead,
	"start":        (*model).actStart,
	"renew":        (*model).actRenew,
	"report":       (*model).actReport,
	"report done":  (*model).actReportDone,
	"report late":  (*model).actReportLate,
	"crash":        (*model).actCrash,
	"reclaim":      func(m *model) { m.takeBack(m.typ(), m.upTo(2)) },
	"lose readers": (*model).actLoseReaders,
	"come back":    (*model).actComeBack,
	"reduce":       (*model).actReduce,
	"advance":      func(m *model) { m.goOn(m.group()) },
	"cancel":       (*model).actCancel,
	"sweep":        (*model).actSweep,
	"retry":        (*model).actRetry,
	"drain":        (*model).actDrain,
	"pause":        func(m *model) { m.actPause(true) },
	"resume":       func(m *model) { m.actPause(false) },
	"set tenant":   (*model).actSet,
}

// model is the state of one random sequence: a partition in Redis (world), the reference for it,
// and what the workers and callers know.
type model struct {
	*world
	rt        *rapid.T
	reference reference
	fencing   int64             // the watcher's fencing number
	reading   map[string]bool   // types whose stream has a consumer group
	torn      bool              // an old entry was put back, so a job may have several entries
	lanes     map[string]string // by group
	held      []taken           // jobs that workers hold, started or not
	past      []taken           // the latest jobs that workers held before and may still report
	results   []results         // results that aggregators have read, reduced or not
	requests  map[string]ledger.AppendArgs
}

var types, owners, groups = []string{"T", "U"}, []string{"x", "y"}, []string{"a", "b", "c"}

func (m *model) tenantOf(group string) string { return m.reference.groups[group].tenant }
func (m *model) group() string                { return rapid.SampledFrom(groups).Draw(m.rt, "group") }
func (m *model) typ() string                  { return rapid.SampledFrom(types).Draw(m.rt, "type") }
func (m *model) upTo(n int) int               { return rapid.IntRange(0, n).Draw(m.rt, "n") }
func (m *model) chance(what string) bool      { return rapid.IntRange(0, 3).Draw(m.rt, what) == 0 }

// some returns up to n random elements of all.
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
	b := m.reference.groups[g]
	a := ledger.AppendArgs{Group: g, Limit: 100, Request: fmt.Sprint("r", len(m.requests))}
	var added []job
	for range m.upTo(4) + 1 {
		j, is := ledger.NewJob{Payload: []byte("1")}, job{typ: "T", letter: ledger.Waiting}
		if m.chance("other type") {
			j.Type, is.typ = "U", "U"
		}
		if m.chance("large") {
			j.Payload = large
		}
		if m.chance("later") {
			j.RunAt, is.letter = new(time.Now().Add(2*time.Hour)), ledger.NonReady
		}
		a.Jobs, added = append(a.Jobs, j), append(added, is)
	}
	if m.chance("seal") {
		a.Mode = ledger.AppendSeal
	}
	r, err := ledger.Append(m.Context(), m.c, m.p, a)
	again := a.Mode != "" && b.submitted // the last piece of the submission was appended before
	require.Equal(m, !again && (b.sealed || len(b.jobs)+len(added) > int(a.Limit)), err != nil, "append to %s: %v", g, err)
	require.Equal(m, again, r.Duplicate)
	if err != nil || again {
		return
	}
	require.Equal(m, ledger.AppendReply{First: int64(len(b.jobs)), N: int64(len(added))}, r)
	m.requests[a.Request] = a
	b.jobs = append(b.jobs, added...)
	b.submitted, b.sealed = b.submitted || a.Mode != "", b.sealed || a.Mode != ""
}

func (m *model) actAppendAgain() {
	for _, name := range some(m, slices.Sorted(maps.Keys(m.requests)), 1) {
		require.True(m, m.appendJobs(m.requests[name]).Duplicate)
	}
}

func (m *model) actSeal() {
	if m.chance("really") {
		m.end(m.group())
	}
}

// end seals a group in Redis and in the reference, and checks that this is refused if, and only if,
// the group was cancelled.
func (m *model) end(group string) {
	b := m.reference.groups[group]
	_, err := ledger.Seal(m.Context(), m.c, m.p, group, nil)
	require.Equal(m, !b.live(), err != nil, "seal %s: %v", group, err)
	b.sealed = true
}

func (m *model) limit() ledger.Limit {
	if !m.chance("limited") {
		return noLimit
	}
	l := limit(int64(m.upTo(4)) + 1)
	l.Limiter = rapid.SampledFrom(limiters).Draw(m.rt, "limiter")
	l.Share = rapid.SampledFrom([]string{ledger.ShareStatic, ledger.ShareElastic}).Draw(m.rt, "share")
	return l
}

func (m *model) actAdmit() {
	l, most := m.limit(), m.upTo(5)+1
	r := m.admitJobs(6, m.typ(), most, l)
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
	m.bringBack(caps, m.limit())
}

// admitJobs admits jobs, and copies into the reference which jobs the script chose; see moved.
func (m *model) admitJobs(limitOfReady int, typ string, most int, l ledger.Limit) ledger.AdmitReply {
	r := m.admitBelow(limitOfReady, typ, most, l)
	if r.Moved+r.NonReady > 0 {
		require.Equal(m, map[ledger.Letter]int{ledger.Ready: r.Moved, ledger.NonReady: r.NonReady}, m.moved(ledger.Waiting, typ))
	}
	return r
}

// bringBack promotes due jobs, and copies into the reference which jobs the script chose; see
// moved.
func (m *model) bringBack(caps map[string]int, l ledger.Limit) {
	if r := m.promoteBelow(caps, l); r.Moved > 0 {
		require.Equal(m, map[ledger.Letter]int{ledger.Ready: r.Moved, ledger.NonReady: 0}, m.moved(ledger.NonReady, types...))
	}
}

// moved compares the states in Redis with the reference, and copies those that differ: jobs that
// have become ready or non-ready. Each must have been in the state `from`, of a type in typ, and
// not paused. It returns the number of these jobs by new state.
func (m *model) moved(from ledger.Letter, typ ...string) map[ledger.Letter]int {
	n, pipe := map[ledger.Letter]int{ledger.Ready: 0, ledger.NonReady: 0}, m.c.Pipeline()
	var got []*redis.StringCmd
	for _, g := range groups {
		got = append(got, pipe.Get(m.Context(), m.p.States(g)))
	}
	_, _ = pipe.Exec(m.Context()) // GET of a group without jobs returns nil, which is an error here
	for i, g := range groups {
		b, states := m.reference.groups[g], got[i].Val()
		require.Len(m, states, 2*len(b.jobs), "states of %s", g)
		for o := range b.jobs {
			j, letter, mark := &b.jobs[o], ledger.Letter(states[2*o]), int(states[2*o+1])-33
			if j.letter == letter && j.attempt%90 == mark {
				continue
			}
			require.True(m, j.letter == from && slices.Contains(typ, j.typ) && b.live() && !m.reference.held(b, j.typ), "%s.%d was %c%d and became %c%d", g, o, j.letter, j.attempt, letter, mark)
			if letter == ledger.Ready {
				j.attempt++
			}
			require.Equal(m, j.attempt%90, mark, "attempt of %s.%d", g, o)
			j.letter = letter
			n[letter]++
		}
	}
	return n
}

// later is a script that lets time pass: it makes everything due that is non-ready, scheduled or
// rate-limited, and gives the spent permits back.
var later = redis.NewScript(`
for i, key in ipairs(KEYS) do
  local what = string.match(key, ':([a-z-]+)[^{}]*$')
  if what == 'tenant' or what == 'rate' then
    redis.call('HDEL', key, 'n', 's', 't')
  elseif what == 'group' then
    redis.call('HSET', key, 'run_at', 1)
  else
    for _, member in ipairs(redis.call('ZRANGE', key, 0, -1)) do redis.call('ZADD', key, 1, member) end
  end
end`)

func (m *model) timePasses() {
	keys := []string{m.p.NonReady(), m.p.RateLimited("T"), m.p.RateLimited("U"), m.p.Scheduled(), m.p.Rate()}
	for _, tenant := range owners {
		keys = append(keys, m.p.NonReadyOf(tenant), m.p.Tenant(tenant))
	}
	for _, g := range groups {
		keys = append(keys, m.p.Group(g))
	}
	if err := later.Run(m.Context(), m.c, keys).Err(); err != nil {
		require.ErrorIs(m, err, redis.Nil)
	}
	m.schedule(10)
}

// actDrain runs the jobs that may run, and reports all of a type as done or all as failed. Then it
// seals and advances the groups, so that some groups end and can be retried.
func (m *model) actDrain() {
	m.timePasses()
	m.bringBack(map[string]int{"T": 1000, "U": 1000}, noLimit)
	for _, typ := range types {
		m.admitJobs(1000, typ, 50, noLimit)
		run := m.receive(typ, "drain", 1000)
		m.launch(typ, run)
		m.report(run, []ledger.OutcomeKind{rapid.SampledFrom([]ledger.OutcomeKind{outcomeDone, ledger.OutcomeFailed}).Draw(m.rt, "kind")})
	}
	m.collectResults()
	m.reduceRest()
	for _, g := range groups {
		m.end(g)
		m.goOn(g)
	}
}
