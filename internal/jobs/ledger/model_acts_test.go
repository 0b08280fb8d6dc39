package ledger_test

import (
	"cmp"
	"fmt"
	"maps"
	"slices"
	"strings"

	"github.com/redis/go-redis/v9"
	"github.com/stretchr/testify/require"
	"pgregory.net/rapid"

	"github.com/bulkaction/bulkaction/api"
	"github.com/bulkaction/bulkaction/internal/jobs/ledger"
	"github.com/bulkaction/bulkaction/internal/redisx/keyspace"
)

// actWork admits jobs and makes a worker read and start some.
func (m *model) actWork() {
	typ := m.typ()
	m.admitJobs(6, typ, 5, noLimit)
	m.work(typ)
}

// actWorkAgain reclaims jobs of a type, as if their workers were lost, and promotes them; a worker
// then reads and starts some. The earlier workers may still report these jobs.
func (m *model) actWorkAgain() {
	typ := m.typ()
	m.takeBack(typ, 3)
	m.timePasses()
	m.bringBack(map[string]int{typ: 6}, noLimit)
	m.work(typ)
}

func (m *model) work(typ string) {
	run := m.receive(typ, m.consumer(), 5)
	m.launch(typ, run)
	m.held = append(m.held, run...)
}

func (m *model) actRead() {
	m.held = append(m.held, m.receive(m.typ(), m.consumer(), int64(m.upTo(4))+1)...)
}

func (m *model) consumer() string {
	return rapid.SampledFrom([]string{"c1", "c2"}).Draw(m.rt, "consumer")
}

// receive reads jobs from a ready stream, as a worker. It compares the retries, throttles and
// losses in each blob with the reference, and records the entries in it as read.
func (m *model) receive(typ, consumer string, most int64) []taken {
	m.readers(typ)
	all := m.take(typ, consumer, most)
	for _, d := range all {
		require.Equal(m, typ, d.Type)
		j := m.reference.groups[d.Group].jobs[d.Ordinal]
		require.Equal(m, typ, j.typ)
		if j.owned(d.Attempt) {
			require.Equal(m, [3]int{j.retries, j.throttles, j.losses}, [3]int{d.Retries, d.Throttles, d.Losses}, "retries, throttles and losses of %s.%d", d.Group, d.Ordinal)
		}
		m.reference.unacked[typ][d.entry] = d
	}
	return all
}

// actLoseReaders deletes the consumer group of a ready stream: Redis will deliver all of its
// entries again.
func (m *model) actLoseReaders() {
	typ := m.typ()
	m.c.XGroupDestroy(m.Context(), m.p.Ready(typ), keyspace.GroupWorkers)
	clear(m.reference.unacked[typ])
	m.reading[typ] = false
}

// actComeBack adds a job's blob of an earlier attempt to the ready stream or to the non-ready jobs
// again, if a random past job has one. A script that a crash of Redis interrupted can leave such a
// blob.
func (m *model) actComeBack() {
	for _, j := range some(m, m.past, 1) {
		tenant := m.tenantOf(j.Group)
		if m.reference.groups[j.Group].jobs[j.Ordinal].attempt <= j.Attempt {
			return
		}
		blob := func(reason string) string {
			return fmt.Sprintf("%s|%s|%d|%d|%d|%d|%s|%d|%s|%s", j.Group, j.Type, j.Attempt, j.Retries, j.Throttles, j.Losses, j.Waits, j.SinceMS, reason, j.Queued)
		}
		m.torn = true
		if m.chance("ready") {
			require.NoError(m, m.c.XAdd(m.Context(), &redis.XAddArgs{Stream: m.p.Ready(j.Type), Values: []string{ledger.BlobField, blob("")}}).Err())
		} else if m.c.ZAdd(m.Context(), m.p.NonReadyOf(tenant), redis.Z{Score: 1, Member: blob("E")}).Val() == 1 {
			require.NoError(m, m.c.HIncrBy(m.Context(), m.p.Load(j.Type), "non_ready", 1).Err())
			require.NoError(m, m.c.HIncrBy(m.Context(), m.p.Tenant(tenant), "congested", 1).Err())
			require.NoError(m, m.c.ZAdd(m.Context(), m.p.NonReady(), redis.Z{Score: 1, Member: tenant}).Err())
		}
	}
}

// readers creates the consumer group of a type's ready stream if it does not exist.
func (m *model) readers(typ string) {
	if !m.reading[typ] {
		m.consumerGroup(m.p.Ready(typ), keyspace.GroupWorkers)
		m.reading[typ] = true
	}
}

// actStart starts up to four random jobs that workers hold or held before. Some held jobs were
// started already.
func (m *model) actStart() {
	picked := some(m, slices.Concat(m.held, m.past), 4)
	for _, typ := range types {
		batch := slices.DeleteFunc(slices.Clone(picked), func(j taken) bool { return j.Type != typ })
		m.launch(typ, batch)
		for _, started := range batch {
			if started.token >= 0 {
				m.drop(started) // the earlier start of the same entry is stale now
				m.held = append(m.held, started)
			}
		}
	}
}

// launch starts jobs of one type, in Redis and in the reference, and compares the tokens that both
// give.
func (m *model) launch(typ string, batch []taken) {
	if len(batch) == 0 {
		return
	}
	m.start(typ, batch)
	var got []int64
	for _, j := range batch {
		got = append(got, j.token)
	}
	require.Equal(m, m.reference.start(typ, batch), got, "tokens of %v", batch)
}

// drop moves a job from m.held to m.past, which holds at most the latest eight.
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

// actRenew renews the leases of jobs that workers hold or held before, and compares with the
// reference which of the leases are lost.
func (m *model) actRenew() {
	picked, consumer := some(m, slices.Concat(m.held, m.past), 4), m.consumer()
	for _, typ := range types {
		var batch []ledger.Held
		for _, j := range picked {
			if j.Type == typ {
				batch = append(batch, ledger.Held{Entry: j.entry, Group: j.Group, Ordinal: j.Ordinal, Attempt: max(j.Attempt, int(j.token))})
			}
		}
		if len(batch) == 0 {
			continue
		}
		m.readers(typ)
		lost, err := ledger.Renew(m.Context(), m.c, m.p, typ, consumer, batch)
		require.NoError(m, err)
		require.Equal(m, m.reference.renew(typ, batch), lost, "leases of %v", batch)
	}
}

// outcomeDone stands for the outcome of a job that is done.
const outcomeDone ledger.OutcomeKind = "done"

// anything lists the outcomes from which report draws at random. Frequent ones are listed more than
// once.
var anything = []ledger.OutcomeKind{
	outcomeDone, outcomeDone, ledger.OutcomeRetry, ledger.OutcomeThrottled, ledger.OutcomeDeferred, ledger.OutcomeFailed,
	ledger.OutcomeReleased, ledger.OutcomeUnstarted,
}

func (m *model) actReport()     { m.report(some(m, slices.Concat(m.held, m.past), 5), anything) }
func (m *model) actReportLate() { m.report(some(m, m.past, 5), anything) }
func (m *model) actReportDone() { m.report(some(m, m.held, 5), []ledger.OutcomeKind{outcomeDone}) }

// report reports outcomes, drawn from kinds, of the picked jobs; a job that was not started can
// only be unstarted or deferred. It sends one batch for each type, some batches twice, and compares
// the replies with the reference. The picked jobs of a type that it reports leave m.held.
func (m *model) report(picked []taken, kinds []ledger.OutcomeKind) {
	for _, typ := range types {
		byGroup := map[string]*ledger.GroupOutcome{}
		for _, j := range picked {
			kind := rapid.SampledFrom(kinds).Draw(m.rt, "kind")
			if j.Type != typ || (j.token < 0 && kind != ledger.OutcomeUnstarted && kind != ledger.OutcomeDeferred) {
				continue
			}
			g := byGroup[j.Group]
			if g == nil {
				g = &ledger.GroupOutcome{Group: j.Group}
				byGroup[j.Group] = g
			}
			if kind == outcomeDone {
				g.Done = append(g.Done, done(j)[0].Done...)
			} else {
				g.Others = append(g.Others, other(kind, j, 1<<40)[0].Others...)
			}
		}
		var batch []ledger.GroupOutcome
		for _, name := range slices.Sorted(maps.Keys(byGroup)) {
			g := byGroup[name]
			slices.SortStableFunc(g.Done, func(a, b ledger.DoneJob) int { return cmp.Compare(a.Ordinal, b.Ordinal) })
			slices.SortStableFunc(g.Others, func(a, b ledger.OtherJob) int { return cmp.Compare(a.Ordinal, b.Ordinal) })
			batch = append(batch, *g)
		}
		if batch == nil {
			continue
		}
		require.Equal(m, m.reference.outcome(typ, batch), m.outcome(typ, batch), "outcomes %+v", batch)
		if m.chance("the answer was lost") { // then the same report is repeated
			require.Equal(m, m.reference.outcome(typ, batch), m.outcome(typ, batch), "outcomes %+v once more", batch)
		}
		for _, j := range picked {
			if j.Type == typ {
				m.drop(j)
			}
		}
	}
}

// actCrash removes up to four jobs from m.held, as if their worker had crashed: nobody reports
// them.
func (m *model) actCrash() {
	for _, j := range some(m, m.held, 4) {
		m.drop(j)
	}
}

// takeBack reclaims all entries of a type that workers have read, in Redis and in the reference,
// and compares the replies. A job with more losses than `most` fails.
func (m *model) takeBack(typ string, most int) {
	require.Equal(m, m.reference.reclaim(typ, most), m.reclaim(typ, most), "what workers held of %s", typ)
}

// actReduce picks up to two entries of the results stream that were read now or earlier, and
// reduces each into one of two partial aggregates. At random it calls with an old version instead,
// or repeats the call.
func (m *model) actReduce() {
	m.results = append(m.results, m.readResults(2)...)
	for _, e := range some(m, m.results, 2) {
		partial := rapid.SampledFrom([]string{"0", "1"}).Draw(m.rt, "partial")
		if m.chance("with an old version") {
			r := m.reduce(ledger.ReduceArgs{Group: e.group, Partial: partial, Version: 1000, State: []byte("0"), Entries: []string{e.entry}, Ordinals: e.ordinals})
			require.Equal(m, ledger.ReduceVersion, r.State)
			continue
		}
		if bad := m.settle(partial, e); bad != nil { // an aggregator leaves these results out
			e.ordinals = slices.DeleteFunc(slices.Clone(e.ordinals), func(n int64) bool { return slices.Contains(bad, n) })
			e.lines = ""
			for i, n := range e.ordinals {
				e.lines += strings.Repeat("\n", min(i, 1)) + fmt.Sprintf(`{"ordinal":%d}`, n)
			}
			require.Empty(m, m.settle(partial, e))
		}
		if m.chance("the answer was lost") { // then the same call is repeated with the partial aggregate's present version
			m.settle(partial, e)
		}
	}
}

// settle reduces the results of an entry, in Redis and in the reference. If some of them may not be
// reduced, it reduces none and returns the ordinals of these jobs.
func (m *model) settle(partial string, e results) []int64 {
	bad, r := m.reference.reduce(e.group, e.ordinals), m.reduceInto(partial, e)
	require.Equal(m, bad, r.Bad, "results %+v", e)
	return bad
}

// goOn advances a group, in Redis and in the reference, and compares the numbers of transitions.
func (m *model) goOn(group string) {
	r := m.advanceReply(group)
	require.Equal(m, m.reference.groups[group].requeue || r.Unsettled, r.Unsettled, "transitions of %s", group)
	require.Equal(m, m.reference.advance(group), r.Moved, "transitions of %s", group)
}

func (m *model) actCancel() {
	if !m.chance("really") || !m.chance("yes") {
		return
	}
	g := m.group()
	b, err := m.reference.groups[g], ledger.Cancel(m.Context(), m.c, m.p, g)
	require.Equal(m, b.ended() && b.live(), err != nil, "cancel %s: %v", g, err)
	if err == nil {
		b.status, b.sealed, b.requeue, b.paused = "CANCELLED", true, false, false
	}
}

// actCancelJob cancels a random job. It must be refused if the job has started or ended, unless it was
// cancelled; otherwise only if a worker has read it, or an old entry hides its place.
func (m *model) actCancelJob() {
	g := m.group()
	b := m.reference.groups[g]
	if len(b.jobs) == 0 {
		return
	}
	ordinal := m.upTo(len(b.jobs) - 1)
	j := &b.jobs[ordinal]
	err := m.cancelling(g, int64(ordinal))()
	switch {
	case j.letter == ledger.Cancelled:
		require.NoError(m, err)
	case err != nil:
		require.ErrorIs(m, err, api.ErrConflict)
		may := b.live() && strings.IndexByte("WNR", byte(j.letter)) >= 0
		require.False(m, may && j.letter != ledger.Ready && !m.torn, "cancel %s.%d: %v", g, ordinal, err)
	default:
		require.True(m, b.live())
		require.Contains(m, "WNR", string(rune(j.letter)))
		j.letter, j.errs = ledger.Cancelled, ""
	}
}

func (m *model) actSweep() {
	g := m.group()
	_, _, err := ledger.Sweep(m.Context(), m.c, m.p, g)
	require.NoError(m, err)
	m.swept(g)
}

// swept updates the reference after a sweep: all unfinished jobs of a cancelled group
// are cancelled.
func (m *model) swept(group string) {
	if b := m.reference.groups[group]; !b.live() {
		b.settle("WNRI", ledger.Cancelled)
	}
}

func (m *model) actRetry() {
	g := m.group()
	b := m.reference.groups[g]
	by, _ := b.counts()
	round, err := m.reopen(g)
	require.Equal(m, b.requeue || (b.ended() && b.live() && by["failed"] > 0), err == nil, "retry %s: %v", g, err)
	if err != nil {
		return
	}
	if !b.requeue {
		b.status, b.requeue, b.started = "CREATED", true, false
		b.round++
	}
	require.Equal(m, b.round, round)
	if !m.chance("stop there") {
		m.requeueAll(g)
	}
}

// requeueAll runs requeue to its end, in Redis and in the reference: the failed jobs of earlier
// rounds are waiting again, without errors.
func (m *model) requeueAll(group string) {
	m.requeue(group)
	if b := m.reference.groups[group]; b.requeue {
		b.requeue = false
		b.forget("F")
		b.settle("F", ledger.Waiting)
	}
}

// actPause pauses (on) or resumes a random group, tenant or type, or does nothing.
func (m *model) actPause(on bool) {
	if m.chance("really") {
		switch rapid.SampledFrom([]ledger.Pausable{ledger.PauseGroup, ledger.PauseTenant, ledger.PauseType}).Draw(m.rt, "what") {
		case ledger.PauseGroup:
			m.halt(on, ledger.PauseGroup, m.group())
		case ledger.PauseTenant:
			m.halt(on, ledger.PauseTenant, rapid.SampledFrom(owners).Draw(m.rt, "tenant"))
		case ledger.PauseType:
			m.halt(on, ledger.PauseType, m.typ())
		}
	}
}

// halt pauses (on) or resumes (not on), in Redis and in the reference. It checks that the call for
// a group is refused if, and only if, the group has ended.
func (m *model) halt(on bool, what ledger.Pausable, id string) {
	do := ledger.Resume
	if on {
		do = ledger.Pause
	}
	err := do(m.Context(), m.c, m.p, what, id)
	if what != ledger.PauseGroup {
		require.NoError(m, err)
		m.reference.paused[string(what)+" "+id] = on
		return
	}
	b := m.reference.groups[id]
	require.Equal(m, b.ended(), err != nil, "pause or resume %s: %v", id, err)
	if err == nil {
		b.paused = on
	}
}

// actSet replaces a random tenant's settings, perhaps by none, or does nothing.
func (m *model) actSet() {
	if !m.chance("really") {
		return
	}
	var s ledger.TenantSettings
	if m.chance("weight") {
		s = weight(rapid.SampledFrom([]float64{0.001, 0.25, 1, 3, 1000}).Draw(m.rt, "weight"))
	}
	if m.chance("rps") {
		s.RPS = perWindow(float64(m.upTo(3) + 1)).RPS
	}
	if m.chance("base priority") {
		base := int64(m.upTo(100_000))
		s.BasePriority = &base
	}
	if m.chance("in flight") {
		bound := int64(m.upTo(3) + 1)
		s.InFlight = &bound
	}
	m.set(rapid.SampledFrom(owners).Draw(m.rt, "tenant"), s)
}

// freely resumes everything that is paused and removes the settings of all tenants.
func (m *model) freely() {
	for _, g := range groups {
		m.halt(false, ledger.PauseGroup, g)
	}
	for _, tenant := range owners {
		m.halt(false, ledger.PauseTenant, tenant)
		m.set(tenant, ledger.TenantSettings{})
	}
	for _, typ := range types {
		m.halt(false, ledger.PauseType, typ)
	}
}
