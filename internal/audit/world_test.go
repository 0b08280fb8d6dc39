package audit

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"slices"
	"strconv"
	"strings"
	"testing"
	"time"

	"github.com/redis/go-redis/v9"
	"github.com/stretchr/testify/require"
	"go.uber.org/goleak"

	"github.com/bulkaction/bulkaction/internal/aggregate"
	"github.com/bulkaction/bulkaction/internal/audit/read"
	"github.com/bulkaction/bulkaction/internal/ledger"
	"github.com/bulkaction/bulkaction/internal/redisx"
	"github.com/bulkaction/bulkaction/internal/redisx/keyspace"
	"github.com/bulkaction/bulkaction/internal/testkit/redistest"
	"github.com/bulkaction/bulkaction/reducer"
)

func TestMain(m *testing.M) { goleak.VerifyTestMain(m, redistest.IgnoreServers()) }

// tb is what the world needs of a test.
type tb interface {
	require.TestingT
	Context() context.Context
}

// world is the data of an installation in Redis. Its methods are the steps that the roles take; a
// step that fails fails the test.
type world struct {
	tb
	conn  *redisx.Conn
	c     redis.UniversalClient
	space keyspace.Space
	plans *reducer.Registry
}

func newWorld(t *testing.T, url, prefix string, partitions int) *world {
	space, err := keyspace.New(prefix, partitions)
	require.NoError(t, err)
	conn, err := redisx.Connect(t.Context(), redisx.Config{URL: url})
	require.NoError(t, err)
	t.Cleanup(func() { require.NoError(t, conn.Close()) })
	w := &world{tb: t, conn: conn, c: conn.Cmd, space: space, plans: reducer.NewRegistry()}
	w.ok(w.c.Set(w.Context(), space.PartitionCount(), partitions, 0).Err())
	return w
}

func (w *world) ok(err error) { require.NoError(w, err) }

func (w *world) audit(opts Options) Report {
	r, err := Run(w.Context(), w.conn, w.space, opts)
	w.ok(err)
	return r
}

// part returns the partition of a group.
func (w *world) part(group string) keyspace.Partition { return w.space.OfTenant(w.tenant(group)) }

func (w *world) tenant(group string) string {
	tenant, err := w.c.Get(w.Context(), w.space.OfGroup(group).Owner(group)).Result()
	w.ok(err)
	return tenant
}

var noLimit = ledger.Limit{Window: time.Second}

// limited returns a limit of this many permits that are never renewed.
func limited(permits int64) ledger.Limit {
	return ledger.Limit{Window: 1 << 41 * time.Millisecond, Permits: permits}
}

func (w *world) create(group, tenant, typ string, fields ...string) {
	f := map[string]string{"lane": "normal"}
	for i := 0; i+1 < len(fields); i += 2 {
		f[fields[i]] = fields[i+1]
	}
	w.ok(w.c.SetNX(w.Context(), w.space.OfGroup(group).Owner(group), tenant, 0).Err())
	_, err := ledger.Create(w.Context(), w.c, w.space.OfTenant(tenant), ledger.CreateArgs{Group: group, Tenant: tenant, Type: typ, Hash: "h", Fields: f})
	w.ok(err)
}

// jobs returns n small jobs, after the changes have been applied to each of them.
func jobs(n int, change ...func(*ledger.NewJob)) []ledger.NewJob {
	all := make([]ledger.NewJob, n)
	for i := range all {
		all[i].Payload = fmt.Appendf(nil, `{"n":%d}`, i)
		for _, c := range change {
			c(&all[i])
		}
	}
	return all
}

func large(j *ledger.NewJob) { j.Payload = []byte(`"` + strings.Repeat("x", 5000) + `"`) }

func ofType(typ string) func(*ledger.NewJob) { return func(j *ledger.NewJob) { j.Type = typ } }

func later(j *ledger.NewJob) { j.RunAt = time.Now().Add(time.Hour) }

func (w *world) append(group string, all []ledger.NewJob) {
	for some := range slices.Chunk(all, ledger.MaxAppend) {
		_, err := ledger.Append(w.Context(), w.c, w.part(group), ledger.AppendArgs{Group: group, Limit: 1e7, Jobs: some})
		w.ok(err)
	}
}

func (w *world) seal(group string) {
	_, err := ledger.Seal(w.Context(), w.c, w.part(group), group, nil)
	w.ok(err)
}

func (w *world) admit(p keyspace.Partition, typ string, most int, limit ledger.Limit) ledger.AdmitReply {
	r, err := ledger.Admit(w.Context(), w.c, p, ledger.AdmitArgs{Type: typ, Most: most, Cap: 100_000, Limit: limit, Seed: "0badcafe", LaneWeights: [3]int{6, 3, 1}})
	w.ok(err)
	return r
}

func (w *world) promote(p keyspace.Partition, types ...string) {
	caps := map[string]int{}
	for _, typ := range types {
		caps[typ] = 100_000
	}
	_, err := ledger.Promote(w.Context(), w.c, p, ledger.PromoteArgs{Most: 100, Limit: noLimit, Seed: "0badcafe", FullWait: time.Millisecond, Caps: caps})
	w.ok(err)
}

// taken is a job that a worker has read; start sets its token.
type taken struct {
	entry string
	ledger.Job
	token int64
}

func (w *world) read(p keyspace.Partition, typ, consumer string, most int64) []taken {
	w.consumers(p.Ready(typ), keyspace.GroupWorkers)
	var out []taken
	for _, m := range w.fresh(p.Ready(typ), keyspace.GroupWorkers, consumer, most) {
		d, err := ledger.ParseJob(ledger.MessageBlob(m.Values))
		w.ok(err)
		out = append(out, taken{entry: m.ID, Job: d})
	}
	return out
}

func (w *world) consumers(stream, group string) {
	if err := w.c.XGroupCreateMkStream(w.Context(), stream, group, "0").Err(); err != nil {
		require.ErrorContains(w, err, "BUSYGROUP")
	}
}

func (w *world) fresh(stream, group, consumer string, most int64) []redis.XMessage {
	r, err := w.c.XReadGroup(w.Context(), &redis.XReadGroupArgs{Group: group, Consumer: consumer, Streams: []string{stream, ">"}, Count: most, Block: -1}).Result()
	if errors.Is(err, redis.Nil) {
		return nil
	}
	w.ok(err)
	return r[0].Messages
}

// start starts jobs as a worker does, and returns those that may run.
func (w *world) start(p keyspace.Partition, typ string, jobs []taken) []taken {
	slices.SortFunc(jobs, func(a, b taken) int { return cmp.Or(cmp.Compare(a.Group, b.Group), cmp.Compare(a.Ordinal, b.Ordinal)) })
	var started []taken
	for _, j := range jobs {
		r, err := ledger.Start(w.Context(), w.c, p, typ, []ledger.StartGroup{{Group: j.Group, Jobs: []ledger.StartJob{{Entry: j.entry, Ordinal: j.Ordinal, Attempt: j.Attempt}}}})
		w.ok(err)
		if j.token = r.Tokens[0]; j.token >= 0 {
			started = append(started, j)
		}
	}
	return started
}

func (w *world) done(p keyspace.Partition, typ string, jobs ...taken) {
	for _, j := range jobs {
		line := fmt.Appendf(nil, `{"ordinal":%d,"duration_ms":1.5,"attempts":%d,"data":{"cost":2}}`, j.Ordinal, j.token)
		w.outcome(p, typ, ledger.GroupOutcome{Group: j.Group, Done: []ledger.DoneJob{{
			Entry: j.entry, Ordinal: j.Ordinal, Attempt: int(j.token), Line: line, Marked: true,
		}}})
	}
}

// back reports jobs with another outcome than done.
func (w *world) back(p keyspace.Partition, typ string, kind ledger.OutcomeKind, delay time.Duration, jobs ...taken) {
	for _, j := range jobs {
		attempt := int(j.token)
		if kind == ledger.OutcomeUnstarted {
			attempt = j.Attempt
		}
		w.outcome(p, typ, ledger.GroupOutcome{Group: j.Group, Others: []ledger.OtherJob{{
			Entry: j.entry, Ordinal: j.Ordinal, Attempt: attempt, Kind: kind, Waits: j.Waits, Queued: []byte(j.Queued), Delay: delay, Code: "BOOM", Text: "it broke",
		}}})
	}
}

func (w *world) outcome(p keyspace.Partition, typ string, g ledger.GroupOutcome) {
	_, err := ledger.Outcome(w.Context(), w.c, p, typ, ledger.Congestion{Cap: time.Hour}, []ledger.GroupOutcome{g})
	w.ok(err)
}

// reduce reads entries of the results stream and reduces them, as an aggregator does.
func (w *world) reduce(p keyspace.Partition, partial string, most int64) {
	w.consumers(p.ResultStream(), keyspace.GroupAggregator)
	for _, m := range w.fresh(p.ResultStream(), keyspace.GroupAggregator, partial, most) {
		w.reduceEntry(p, partial, m)
	}
}

func (w *world) reduceEntry(p keyspace.Partition, partial string, m redis.XMessage) {
	id, lines := m.Values["g"].(string), m.Values["l"].(string)
	for {
		have := w.c.HMGet(w.Context(), p.Aggregate(id), "version:"+partial, "partial:"+partial).Val()
		plan, err := aggregate.Plan(w.plans, w.c.HGet(w.Context(), p.Group(id), "aggregate").Val())
		w.ok(err)
		state := plan.New()
		if read.Text(have[1]) != "" {
			state, err = plan.Decode([]byte(read.Text(have[1])))
			w.ok(err)
		}
		args := ledger.ReduceArgs{Group: id, Partial: partial, Version: read.Int(have[0]), Lines: []byte(lines), Entries: []string{m.ID}}
		for line := range strings.SplitSeq(lines, "\n") {
			n, ok := read.ParseResultLine(line)
			require.True(w, ok)
			args.Ordinals = append(args.Ordinals, n)
			w.ok(state.Add(reducer.Result{Ordinal: n, Data: []byte(`{"cost":2}`)}))
		}
		args.State, err = state.Encode()
		w.ok(err)
		r, err := ledger.Reduce(w.Context(), w.c, p, args)
		w.ok(err)
		if r.State != ledger.ReduceVersion {
			require.Contains(w, []ledger.ReduceState{ledger.ReduceOK, ledger.ReduceGone}, r.State)
			return
		}
	}
}

// work runs all jobs of a type that may run, and reduces their results.
func (w *world) work(p keyspace.Partition, typ string) {
	w.admit(p, typ, 200, noLimit)
	w.done(p, typ, w.start(p, typ, w.read(p, typ, "c", 500))...)
	w.reduce(p, "0", 500)
}

func (w *world) advance(group string) {
	p := w.part(group)
	fence, err := ledger.Lead(w.Context(), w.c, p, "w", time.Hour)
	w.ok(err)
	_, err = ledger.Advance(w.Context(), w.c, p, group, fence)
	w.ok(err)
}

func (w *world) cancel(group string) { w.ok(ledger.Cancel(w.Context(), w.c, w.part(group), group)) }

func (w *world) sweep(group string) {
	for more := true; more; {
		var err error
		more, err = ledger.Sweep(w.Context(), w.c, w.part(group), group)
		w.ok(err)
	}
}

func (w *world) status(group string) string {
	return w.c.HGet(w.Context(), w.part(group).Group(group), "status").Val()
}

func (w *world) states(group string) string {
	return w.c.Get(w.Context(), w.part(group).States(group)).Val()
}

// jobIn returns the ordinal of a group's n-th job with a state letter.
func (w *world) jobIn(group string, letter ledger.Letter, n int) int64 {
	states := w.states(group)
	for at := 0; at < len(states); at += 2 {
		if ledger.Letter(states[at]) == letter {
			if n == 0 {
				return int64(at / 2)
			}
			n--
		}
	}
	require.Fail(w, "no such job", "%s has no job %d in %c: %s", group, n, letter, states)
	return 0
}

// count returns the number of a group's jobs with a state letter.
func (w *world) count(group string, letter ledger.Letter) (n int) {
	states := w.states(group)
	for at := 0; at < len(states); at += 2 {
		if ledger.Letter(states[at]) == letter {
			n++
		}
	}
	return n
}

const aggregates = `[{"as":"n","op":"count"},{"as":"cost","op":"sum","field":"data.cost"}]`

// inhabited fills a world with groups in all states and jobs at all locations. The group "all" has
// jobs at each of them.
func inhabited(w *world) {
	all, p := "all", w.space.OfTenant("acme")
	w.create(all, "acme", "T", "aggregate", aggregates)
	w.append(all, jobs(60))
	w.append(all, jobs(3, large))
	w.append(all, jobs(5, large, ofType("U")))
	w.append(all, jobs(12, ofType("U")))
	w.append(all, jobs(4, later))
	w.admit(p, "T", 40, noLimit)
	w.admit(p, "U", 8, noLimit)
	started := w.start(p, "U", w.read(p, "U", "c1", 6))
	w.done(p, "U", started[:3]...)
	started = w.start(p, "T", w.read(p, "T", "c1", 35))
	w.done(p, "T", started[:6]...)
	w.reduce(p, "0", 5)
	w.reduce(p, "7", 2)
	w.back(p, "T", ledger.OutcomeFailed, 0, started[6:9]...)
	w.back(p, "T", ledger.OutcomeRetry, time.Hour, started[9:11]...)
	w.back(p, "T", ledger.OutcomeThrottled, time.Hour, started[11:13]...)
	w.back(p, "T", ledger.OutcomeReleased, 0, started[13:15]...)
	w.promote(p, "T")
	w.start(p, "T", []taken{started[20]}) // a second time, with the same entry
	w.back(p, "T", ledger.OutcomeUnstarted, 0, w.read(p, "T", "c2", 2)...)

	// Groups that ended in all ways.
	for _, g := range []struct{ id, tenant string }{{"completed", "globex"}, {"expired", "globex"}, {"failed", "acme"}, {"retried", "acme"}, {"partly", "initech"}} {
		p := w.space.OfTenant(g.tenant)
		w.create(g.id, g.tenant, g.id, "aggregate", aggregates, "failure_threshold", "0.5")
		w.append(g.id, jobs(10))
		w.seal(g.id)
		switch g.id {
		case "failed", "retried", "partly":
			w.admit(p, g.id, 10, noLimit)
			some := w.start(p, g.id, w.read(p, g.id, "c", 10))
			n := map[string]int{"failed": 5, "retried": 8, "partly": 2}[g.id]
			w.back(p, g.id, ledger.OutcomeFailed, 0, some[:n]...)
			w.done(p, g.id, some[n:]...)
			w.reduce(p, "1", 100)
		default:
			w.work(p, g.id)
		}
		w.advance(g.id)
	}
	require.Equal(w, "COMPLETED", w.status("completed"))
	require.Equal(w, "FAILED", w.status("failed"))
	require.Equal(w, "COMPLETED", w.status("partly"))
	fence, err := ledger.Lead(w.Context(), w.c, w.part("expired"), "w", time.Hour)
	w.ok(err)
	w.ok(ledger.Expire(w.Context(), w.c, w.part("expired"), "expired", fence, true))
	_, err = ledger.Reopen(w.Context(), w.c, p, "retried", "")
	w.ok(err)
	w.create("moved", "acme", "moved")
	w.append("moved", jobs(8))
	w.seal("moved")
	w.admit(p, "moved", 10, noLimit)
	w.back(p, "moved", ledger.OutcomeFailed, 0, w.start(p, "moved", w.read(p, "moved", "c", 5))...)
	w.done(p, "moved", w.start(p, "moved", w.read(p, "moved", "c", 5))...)
	w.reduce(p, "3", 100)
	w.advance("moved")
	_, err = ledger.Reopen(w.Context(), w.c, p, "moved", "")
	w.ok(err)
	for more := true; more; {
		more, err = ledger.Requeue(w.Context(), w.c, p, "moved")
		w.ok(err)
	}

	// Cancelled groups, one swept and one not yet.
	for _, id := range []string{"cancelled", "sweeping"} {
		w.create(id, "hooli", id)
		w.append(id, jobs(20))
		w.append(id, jobs(2, later))
		p := w.part(id)
		w.admit(p, id, 10, noLimit)
		some := w.start(p, id, w.read(p, id, "c", 7))
		w.done(p, id, some[:2]...)
		w.back(p, id, ledger.OutcomeFailed, 0, some[2:3]...)
		w.back(p, id, ledger.OutcomeRetry, time.Hour, some[3:4]...)
		w.cancel(id)
	}
	w.sweep("cancelled")

	// A scheduled group, one of a rate-limited tenant, empty ones, one that is about to end, and a
	// large one.
	w.create("scheduled", "globex", "T", "run_at", strconv.FormatInt(time.Now().Add(time.Hour).UnixMilli(), 10))
	w.append("scheduled", jobs(5))
	w.create("limited", "umbrella", "limited")
	w.append("limited", jobs(10))
	neighbour := "umbrella"
	for w.space.OfTenant(neighbour) != w.space.OfTenant("umbrella") || neighbour == "umbrella" {
		neighbour += "-"
	}
	w.create("beside", neighbour, "beside")
	w.append("beside", jobs(2))
	w.admit(w.part("limited"), "limited", 10, limited(3))
	require.Equal(w, 1, w.count("limited", ledger.NonReady))
	w.create("empty", "globex", "T")
	w.create("sealed", "globex", "T")
	w.seal("sealed")
	w.advance("sealed")
	require.Equal(w, "COMPLETED", w.status("sealed"))
	w.create("ending", "globex", "ending")
	w.append("ending", jobs(2))
	w.work(w.part("ending"), "ending")
	w.seal("ending")
	w.create("many", "acme", "many")
	w.append("many", jobs(3000))
	w.admit(p, "many", 50, noLimit)

	w.admit(p, "T", 3, noLimit)
	w.done(p, "T", w.start(p, "T", w.read(p, "T", "c3", 3))...)

	for _, letter := range "WNRIDAF" {
		require.Positive(w, w.count(all, ledger.Letter(letter)), string(letter))
	}
}
