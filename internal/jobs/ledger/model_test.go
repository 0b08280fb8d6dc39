package ledger_test

import (
	"cmp"
	"fmt"
	"maps"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/redis/go-redis/v9"
	"github.com/stretchr/testify/require"
	"pgregory.net/rapid"

	"github.com/bulkaction/bulkaction/internal/jobs/ledger"
	"github.com/bulkaction/bulkaction/internal/testkit/limittest"
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
		rapidtest.CheckFew(t, func(rt *rapid.T) { checkModel(rt, c.(*redis.Client)) })
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
		fields := []string{"lane", lane}
		if rapid.Bool().Draw(rt, "held") {
			fields = append(fields, "run_at", inAnHour())
		}
		if rapid.Bool().Draw(rt, "empty") {
			m.create(g, m.tenantOf(g), "T", fields...)
		} else {
			m.bear(g, append(fields, "tags", "all=yes\nof="+g)...)
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
	"cancel job":   (*model).actCancelJob,
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

// bear creates a group with two jobs, perhaps sealed.
func (m *model) bear(g string, fields ...string) {
	b, a := m.reference.groups[g], submission(g, 2, fields...)
	a.Create.Tenant, a.Create.Own = b.tenant, false
	if m.chance("open") {
		a.Mode = ledger.AppendLast
	} else {
		b.status = "DISPATCHED"
	}
	require.Equal(m, ledger.AppendReply{N: 2}, m.appendJobs(a))
	m.requests[g] = a
	b.jobs = []job{{typ: "T", letter: ledger.Waiting}, {typ: "T", letter: ledger.Waiting}}
	b.submitted, b.sealed = true, a.Mode == ledger.AppendSeal
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

func (m *model) limit() limittest.Limit {
	l := noLimit
	if m.chance("limited") {
		l = limit(int64(m.upTo(4)) + 1)
	}
	for _, typ := range types {
		if m.chance("places of a type") {
			l.Types = append(l.Types, ledger.Limit{Type: typ, Places: true, Total: int64(m.upTo(4)) + 1})
		}
		if m.chance("rate of a type") {
			l.Types = append(l.Types, ledger.Limit{Type: typ, Total: int64(m.upTo(4)) + 1})
		}
	}
	if l.Permits == 0 {
		return l
	}
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
func (m *model) admitJobs(limitOfReady int, typ string, most int, l limittest.Limit) ledger.AdmitReply {
	defer m.inBounds(l)()
	r := m.admitBelow(limitOfReady, typ, most, l)
	if r.Moved+r.NonReady > 0 {
		require.Equal(m, map[ledger.Letter]int{ledger.Ready: r.Moved, ledger.NonReady: r.NonReady}, m.moved(ledger.Waiting, typ))
	}
	return r
}

// bringBack promotes due jobs, and copies into the reference which jobs the script chose; see
// moved.
func (m *model) bringBack(caps map[string]int, l limittest.Limit) {
	defer m.inBounds(l)()
	if r := m.promoteBelow(caps, l); r.Moved > 0 {
		require.Equal(m, map[ledger.Letter]int{ledger.Ready: r.Moved, ledger.NonReady: 0}, m.moved(ledger.NonReady, types...))
	}
}

// inBounds returns a function that checks that entries were added only below the bounds of tenants and
// types.
func (m *model) inBounds(l limittest.Limit) func() {
	entries := func() map[string]int64 {
		n := map[string]int64{}
		for _, typ := range types {
			for _, e := range m.c.XRange(m.Context(), m.p.Ready(typ), "-", "+").Val() {
				d, err := ledger.ParseJob(ledger.MessageBlob(e.Values))
				require.NoError(m, err)
				n["type "+typ]++
				n["tenant "+m.tenantOf(d.Group)]++
			}
		}
		return n
	}
	before, bounds := entries(), map[string]int64{}
	for _, limit := range l.Types {
		if limit.Places {
			bounds["type "+limit.Type] = limit.Total
		}
	}
	for _, tenant := range owners {
		if bound := number(m.c.HGet(m.Context(), m.p.Tenant(tenant), "in_flight").Val()); bound > 0 && !m.torn {
			bounds["tenant "+tenant] = bound
		}
	}
	return func() {
		after := entries()
		for of, bound := range bounds {
			require.LessOrEqual(m, after[of], max(before[of], bound), "entries of %s, bound %d, before %d", of, bound, before[of])
		}
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
	keys := []string{m.p.NonReady(), m.p.RateLimited("T"), m.p.RateLimited("U"), m.p.Scheduled(), m.p.Rate(), m.p.RateOf("T"), m.p.RateOf("U")}
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

// reference is the Go reference model of the ledger: every job as the accepted transitions have
// left it. It computes what each fenced transition must answer and change. Which jobs become ready
// is the scripts' choice: moved copies it after it has checked that the choice was allowed.
type reference struct {
	groups      map[string]*book
	paused      map[string]bool             // tenants and types
	unacked     map[string]map[string]taken // by type and entry: entries that were read, until they are deleted from the stream
	stale, lost map[string]int64            // by type: refused reports and lost leases
}

// book is a group in the reference.
type book struct {
	tenant, status                              string
	jobs                                        []job
	round                                       int
	sealed, submitted, started, requeue, paused bool
}

// job is a job of the reference model: its state and the values of its blob.
type job struct {
	typ                        string
	letter                     ledger.Letter
	attempt                    int
	retries, throttles, losses int
	errs                       string // reason and attempt of each kept error, newest first, such as "E3 A2 "
}

// note adds the error, or the deferral (reason G), with which the job's attempt has ended to the
// last errors. A new record replaces an older deferral.
func (j *job) note(reason ledger.Reason, attempt int) {
	kept := []string{fmt.Sprintf("%c%d ", reason, attempt)}
	for _, e := range strings.SplitAfter(j.errs, " ") {
		if e != "" && e[0] != byte(ledger.ReasonResource) {
			kept = append(kept, e)
		}
	}
	j.errs = strings.Join(kept[:min(len(kept), ledger.KeptErrors)], "")
}

// repeated stands for a job that a batch names for the second time: a script finds no valid attempt
// of it.
var repeated = job{letter: ledger.Ready, attempt: -1}

func (j job) is(letter ledger.Letter, attempt int) bool {
	return j.letter == letter && j.attempt >= 0 && j.attempt%90 == attempt%90
}

// owned reports whether the job is ready or in flight under this attempt, so that a report of the
// attempt may be valid.
func (j job) owned(attempt int) bool {
	return j.is(ledger.Ready, attempt) || j.is(ledger.InFlight, attempt)
}

// open reports whether the job is ready or in flight. If it is, only reclaim may remove entries of
// its other attempts.
func (j job) open() bool { return j.letter == ledger.Ready || j.letter == ledger.InFlight }

func (b *book) live() bool { return b.status != "CANCELLED" }
func (b *book) ended() bool {
	return slices.Contains([]string{"COMPLETED", "FAILED", "CANCELLED"}, b.status)
}

// states returns the string states:GROUP that the group's jobs must have in Redis.
func (b *book) states() string {
	s := make([]byte, 0, 2*len(b.jobs))
	for _, j := range b.jobs {
		s = append(s, byte(j.letter), byte(33+j.attempt%90))
	}
	return string(s)
}

// counts returns how many jobs of the model's group are in each state, by the field of the group's
// hash that counts them. Reduced jobs count as done, and also in reduced.
func (b *book) counts() (by map[string]int64, reduced int64) {
	by = map[string]int64{}
	for _, j := range b.jobs {
		by[places[j.letter]]++
		if j.letter == ledger.Reduced {
			reduced++
		}
	}
	return by, reduced
}

// batch returns the n jobs whose ordinals the function ordinal returns, as a script sees them:
// where an ordinal comes for the second time, the job is repeated.
func (b *book) batch(n int, ordinal func(i int) int64) []job {
	seen, named := make([]job, n), map[int64]bool{}
	for i := range n {
		if o := ordinal(i); named[o] {
			seen[i] = repeated
		} else {
			seen[i], named[o] = b.jobs[o], true
		}
	}
	return seen
}

// held reports whether a ready job may not start, because its group, tenant or type is paused.
func (l *reference) held(b *book, typ string) bool {
	return b.paused || l.paused["type "+typ] || l.paused["tenant "+b.tenant]
}

// start returns the tokens that Start must give to the jobs of a batch: the attempt, or negative if
// the start is refused. Tokens are in the order of the batch, which is sorted by job. It updates
// the reference.
func (l *reference) start(typ string, batch []taken) []int64 {
	var tokens []int64
	for len(batch) > 0 {
		group := batch[0].Group
		b, n := l.groups[group], 0
		for n < len(batch) && batch[n].Group == group {
			n++
		}
		begun := b.started
		for i, seen := range b.batch(n, func(i int) int64 { return batch[i].Ordinal }) {
			j, token, gone := batch[i], -1, !b.live() || !seen.open()
			switch {
			case !b.live():
				if seen.is(ledger.Ready, j.Attempt) || seen.is(ledger.Cancelled, j.Attempt) {
					token = -2
				}
			case seen.is(ledger.Ready, j.Attempt) && l.held(b, typ):
				b.jobs[j.Ordinal].letter, gone = ledger.NonReady, true
			case seen.is(ledger.Ready, j.Attempt):
				token, b.started = j.Attempt, true
			case seen.is(ledger.InFlight, j.Attempt):
				token = j.Attempt + 1
			}
			if token >= 0 {
				b.jobs[j.Ordinal].letter, b.jobs[j.Ordinal].attempt = ledger.InFlight, token
			}
			if gone {
				delete(l.unacked[typ], j.entry)
			}
			tokens = append(tokens, int64(token))
		}
		if !begun && b.started {
			l.advance(group)
		}
		batch = batch[n:]
	}
	return tokens
}

// noted has the outcomes that put an error into the record of the job in errors:GROUP, with the
// reason of that error.
var noted = map[ledger.OutcomeKind]ledger.Reason{
	ledger.OutcomeRetry:     ledger.ReasonError,
	ledger.OutcomeThrottled: ledger.ReasonThrottled,
	ledger.OutcomeDeferred:  ledger.ReasonResource,
}

// outcome returns the expected reply of the script outcome, and updates the reference.
func (l *reference) outcome(typ string, groups []ledger.GroupOutcome) ledger.OutcomeReply {
	var r ledger.OutcomeReply
	// settle moves a job of a batch to its next state, if the outcome is valid. unstarted: the
	// outcome is also valid for a job that was not started.
	settle := func(b *book, seen job, entry string, ordinal int64, attempt int, to ledger.Letter, unstarted bool) bool {
		if !b.live() || seen.attempt%90 == attempt%90 || !seen.open() {
			delete(l.unacked[typ], entry)
		}
		mine := seen.is(ledger.InFlight, attempt) || unstarted && seen.owned(attempt)
		if !b.live() || !mine {
			r.Stale++
			if b.live() {
				l.stale[typ]++
			}
			return false
		}
		r.Owned++
		j := &b.jobs[ordinal]
		switch {
		case to != ledger.Ready:
			j.letter = to
		case seen.letter == ledger.InFlight: // the start whose reply was lost has taken effect
			j.letter = ledger.NonReady
		default:
			j.letter, j.attempt = ledger.Ready, attempt+1
		}
		return true
	}
	for _, g := range groups {
		b := l.groups[g.Group]
		for i, seen := range b.batch(len(g.Done), func(i int) int64 { return g.Done[i].Ordinal }) {
			d := g.Done[i]
			if settle(b, seen, d.Entry, d.Ordinal, d.Attempt, ledger.Done, false) {
				b.jobs[d.Ordinal].errs = ""
			}
		}
		for i, seen := range b.batch(len(g.Others), func(i int) int64 { return g.Others[i].Ordinal }) {
			o, to := g.Others[i], ledger.NonReady
			switch o.Kind {
			case ledger.OutcomeFailed:
				to = ledger.Failed
			case ledger.OutcomeUnstarted:
				to = ledger.Ready
			}
			unstarted := o.Kind == ledger.OutcomeUnstarted || o.Kind == ledger.OutcomeDeferred
			if settle(b, seen, o.Entry, o.Ordinal, o.Attempt, to, unstarted) {
				j := &b.jobs[o.Ordinal]
				j.retries, j.throttles, j.losses = o.Retries, o.Throttles, o.Losses
				if reason, ok := noted[o.Kind]; ok {
					j.note(reason, o.Attempt)
				}
				if to == ledger.Failed {
					r.Failed++
					j.retries, j.throttles, j.losses = 0, 0, 0
				}
			}
		}
	}
	return r
}

// reclaim returns the expected reply of the script reclaim, for all entries that were read and are
// still in the stream, and updates the reference. A job with more losses than `most` fails.
func (l *reference) reclaim(typ string, most int) ledger.ReclaimReply {
	var r ledger.ReclaimReply
	entries := make([]taken, 0, len(l.unacked[typ]))
	for _, e := range l.unacked[typ] {
		entries = append(entries, e)
	}
	slices.SortFunc(entries, func(a, b taken) int { return compareIDs(a.entry, b.entry) })
	for _, e := range entries {
		b := l.groups[e.Group]
		j := &b.jobs[e.Ordinal]
		if !b.live() || (!j.owned(e.Attempt) && !j.is(ledger.InFlight, e.Attempt+1)) {
			r.Stale++
			continue
		}
		lost := j.letter == ledger.InFlight // only jobs in flight have lost a worker
		if lost {
			j.losses++
		}
		if j.losses > most {
			j.letter, j.retries, j.throttles, j.losses = ledger.Failed, 0, 0, 0
			r.Failed++
			continue
		}
		if lost {
			j.note(ledger.ReasonError, j.attempt)
		}
		j.letter = ledger.NonReady
		r.Taken++
	}
	clear(l.unacked[typ])
	return r
}

func compareIDs(a, b string) int {
	ams, an, _ := strings.Cut(a, "-")
	bms, bn, _ := strings.Cut(b, "-")
	return cmp.Or(cmp.Compare(number(ams), number(bms)), cmp.Compare(number(an), number(bn)))
}

// renew returns the expected reply of the script renew: the indexes of the jobs whose lease is
// lost. It counts them in l.lost.
func (l *reference) renew(typ string, jobs []ledger.Held) []int {
	lost := []int{}
	for i, h := range jobs {
		if !l.groups[h.Group].jobs[h.Ordinal].owned(h.Attempt) {
			lost = append(lost, i)
		}
	}
	l.lost[typ] += int64(len(lost))
	return lost
}

// reduce returns the ordinals of jobs that may not be reduced. If there are none, it makes all of
// the jobs reduced in the reference.
func (l *reference) reduce(group string, ordinals []int64) (bad []int64) {
	b := l.groups[group]
	for _, o := range ordinals {
		if b.jobs[o].letter != ledger.Done {
			bad = append(bad, o)
		}
	}
	if bad == nil {
		for _, o := range ordinals {
			b.jobs[o].letter = ledger.Reduced
		}
		if by, reduced := b.counts(); b.sealed && reduced == by["done"] && int64(len(b.jobs)) == by["done"]+by["failed"]+by["cancelled"] {
			l.advance(group)
		}
	}
	return bad
}

// advance moves a group of the reference to its next states and returns the number of transitions.
func (l *reference) advance(group string) (n int) {
	b := l.groups[group]
	by, reduced := b.counts()
	all := int64(len(b.jobs)) == by["done"]+by["failed"]+by["cancelled"]
	for {
		switch {
		case b.status == "CREATED" && b.sealed && !b.requeue:
			b.status = "DISPATCHED"
		case b.status == "DISPATCHED" && (b.started || all):
			b.status = "RUNNING"
		case b.status == "RUNNING" && all && !b.requeue:
			b.status = "AGGREGATING"
		case b.status == "AGGREGATING" && reduced == by["done"] && by["failed"] > 0 && by["failed"] == int64(len(b.jobs)):
			b.status, b.paused = "FAILED", false
		case b.status == "AGGREGATING" && reduced == by["done"]:
			b.status, b.paused = "COMPLETED", false
		default:
			return n
		}
		n++
	}
}

// forget removes the errors of all jobs of a group whose state letter is in `from`.
func (b *book) forget(from string) {
	for i := range b.jobs {
		if strings.IndexByte(from, byte(b.jobs[i].letter)) >= 0 {
			b.jobs[i].errs = ""
		}
	}
}

// settle sets the state of all jobs of a group whose state letter is in `from` to the letter `to`.
func (b *book) settle(from string, to ledger.Letter) {
	for i := range b.jobs {
		if strings.IndexByte(from, byte(b.jobs[i].letter)) >= 0 {
			b.jobs[i].letter = to
		}
	}
}
