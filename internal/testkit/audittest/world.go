// Package audittest builds the data that the tests of the audit and of its repair need: a world
// with jobs at all locations, movers that change it, and tampers that break its laws. It knows what
// an audit must find, but doesn't use the audit.
package audittest

import (
	"cmp"
	"context"
	"encoding/json"
	"errors"
	"flag"
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
	"github.com/bulkaction/bulkaction/internal/ledger"
	"github.com/bulkaction/bulkaction/internal/redisx"
	"github.com/bulkaction/bulkaction/internal/redisx/keyspace"
	"github.com/bulkaction/bulkaction/internal/testkit/redistest"
	"github.com/bulkaction/bulkaction/reducer"
)

// Main runs the tests of a package. Six of them run in parallel, on however few processors: most of
// the time they wait, for Redis and between the passes of an audit.
func Main(m *testing.M) {
	flag.Parse()
	if f := flag.Lookup("test.parallel"); f.Value.String() == f.DefValue {
		_ = f.Value.Set("6") // a number never fails
	}
	goleak.VerifyTestMain(m, redistest.IgnoreServers())
}

// tb is what the world needs of a test.
type tb interface {
	require.TestingT
	Context() context.Context
}

// World is the data of an installation in Redis. Its methods are the steps that the roles take; a
// step that fails fails the test.
type World struct {
	tb
	Conn  *redisx.Conn
	C     redis.UniversalClient // of Conn
	Space keyspace.Space
	Plans *reducer.Registry
}

// New returns an empty world in the Redis at this URL. Its keys have the prefix.
func New(t testing.TB, url, prefix string, partitions int) *World {
	t.Helper()
	space, err := keyspace.New(prefix, partitions)
	require.NoError(t, err)
	conn, err := redisx.Connect(t.Context(), redisx.Config{URL: url})
	require.NoError(t, err)
	t.Cleanup(func() { require.NoError(t, conn.Close()) })
	w := &World{tb: t, Conn: conn, C: conn.Cmd, Space: space, Plans: reducer.NewRegistry()}
	w.OK(w.C.Set(w.Context(), space.PartitionCount(), partitions, 0).Err())
	return w
}

// OK fails the test on an error.
func (w *World) OK(err error) { require.NoError(w, err) }

// Part returns the partition of a group.
func (w *World) Part(group string) keyspace.Partition { return w.Space.OfTenant(w.Tenant(group)) }

// Tenant returns the tenant that a group's owner key names.
func (w *World) Tenant(group string) string {
	tenant, err := w.C.Get(w.Context(), w.Space.OfGroup(group).Owner(group)).Result()
	w.OK(err)
	return tenant
}

// NoLimit is a limit that allows everything.
var NoLimit = ledger.Limit{Window: time.Second}

// limited returns a limit of this many permits that are never renewed.
func limited(permits int64) ledger.Limit {
	return ledger.Limit{Window: 1 << 41 * time.Millisecond, Permits: permits}
}

// Create creates a group. Fields are names and values of its hash.
func (w *World) Create(group, tenant, typ string, fields ...string) {
	f := map[string]string{"lane": "normal"}
	for i := 0; i+1 < len(fields); i += 2 {
		f[fields[i]] = fields[i+1]
	}
	w.OK(w.C.SetNX(w.Context(), w.Space.OfGroup(group).Owner(group), tenant, 0).Err())
	_, err := ledger.Create(w.Context(), w.C, w.Space.OfTenant(tenant),
		ledger.CreateArgs{Group: group, Tenant: tenant, Type: typ, Hash: "h", Fields: f})
	w.OK(err)
}

// Jobs returns n small jobs, after the changes have been applied to each of them.
func Jobs(n int, change ...func(*ledger.NewJob)) []ledger.NewJob {
	all := make([]ledger.NewJob, n)
	for i := range all {
		all[i].Payload = fmt.Appendf(nil, `{"n":%d}`, i)
		for _, c := range change {
			c(&all[i])
		}
	}
	return all
}

// large gives a job a payload that is stored apart.
func large(j *ledger.NewJob) { j.Payload = []byte(`"` + strings.Repeat("x", 5000) + `"`) }

// OfType gives a job a type of its own.
func OfType(typ string) func(*ledger.NewJob) { return func(j *ledger.NewJob) { j.Type = typ } }

// Later makes a job start in an hour.
func Later(j *ledger.NewJob) { j.RunAt = time.Now().Add(time.Hour) }

// Append adds jobs to a group.
func (w *World) Append(group string, all []ledger.NewJob) {
	for some := range slices.Chunk(all, ledger.MaxAppend) {
		_, err := ledger.Append(w.Context(), w.C, w.Part(group),
			ledger.AppendArgs{Group: group, Limit: 1e7, Jobs: some})
		w.OK(err)
	}
}

func (w *World) seal(group string) {
	_, err := ledger.Seal(w.Context(), w.C, w.Part(group), group, nil)
	w.OK(err)
}

// Admit makes up to most waiting jobs of a type ready.
func (w *World) Admit(p keyspace.Partition, typ string, most int, limit ledger.Limit) ledger.AdmitReply {
	r, err := ledger.Admit(w.Context(), w.C, p, ledger.AdmitArgs{
		Type: typ, Most: most, Cap: 100_000, Limit: limit, Seed: "0badcafe", LaneWeights: [3]int{6, 3, 1},
	})
	w.OK(err)
	return r
}

func (w *World) promote(p keyspace.Partition, types ...string) {
	caps := map[string]int{}
	for _, typ := range types {
		caps[typ] = 100_000
	}
	_, err := ledger.Promote(w.Context(), w.C, p, ledger.PromoteArgs{
		Most: 100, Limit: NoLimit, Seed: "0badcafe", FullWait: time.Millisecond, Caps: caps,
	})
	w.OK(err)
}

// Taken is a job that a worker has read; Start sets its token.
type Taken struct {
	entry string
	ledger.Job
	token int64
}

// Read reads up to most jobs of a type as a worker process does.
func (w *World) Read(p keyspace.Partition, typ, consumer string, most int64) []Taken {
	w.consumers(p.Ready(typ), keyspace.GroupWorkers)
	var out []Taken
	for _, m := range w.fresh(p.Ready(typ), keyspace.GroupWorkers, consumer, most) {
		d, err := ledger.ParseJob(ledger.MessageBlob(m.Values))
		w.OK(err)
		out = append(out, Taken{entry: m.ID, Job: d})
	}
	return out
}

func (w *World) consumers(stream, group string) {
	if err := w.C.XGroupCreateMkStream(w.Context(), stream, group, "0").Err(); err != nil {
		require.ErrorContains(w, err, "BUSYGROUP")
	}
}

func (w *World) fresh(stream, group, consumer string, most int64) []redis.XMessage {
	r, err := w.C.XReadGroup(w.Context(), &redis.XReadGroupArgs{
		Group: group, Consumer: consumer, Streams: []string{stream, ">"}, Count: most, Block: -1,
	}).Result()
	if errors.Is(err, redis.Nil) {
		return nil
	}
	w.OK(err)
	return r[0].Messages
}

// Start starts jobs as a worker does, and returns those that may run.
func (w *World) Start(p keyspace.Partition, typ string, jobs []Taken) []Taken {
	slices.SortFunc(jobs, func(a, b Taken) int {
		return cmp.Or(cmp.Compare(a.Group, b.Group), cmp.Compare(a.Ordinal, b.Ordinal))
	})
	var started []Taken
	for _, j := range jobs {
		r, err := ledger.Start(w.Context(), w.C, p, typ, []ledger.StartGroup{{
			Group: j.Group,
			Jobs:  []ledger.StartJob{{Entry: j.entry, Ordinal: j.Ordinal, Attempt: j.Attempt}},
		}})
		w.OK(err)
		if j.token = r.Tokens[0]; j.token >= 0 {
			started = append(started, j)
		}
	}
	return started
}

// Done reports jobs as done.
func (w *World) Done(p keyspace.Partition, typ string, jobs ...Taken) {
	for _, j := range jobs {
		line := fmt.Appendf(nil, `{"ordinal":%d,"duration_ms":1.5,"attempts":%d,"data":{"cost":2}}`, j.Ordinal, j.token)
		w.reportOutcome(p, typ, ledger.GroupOutcome{Group: j.Group, Done: []ledger.DoneJob{{
			Entry: j.entry, Ordinal: j.Ordinal, Attempt: int(j.token), Line: line, Marked: true,
		}}})
	}
}

// back reports jobs with another outcome than done.
func (w *World) back(p keyspace.Partition, typ string, kind ledger.OutcomeKind, delay time.Duration, jobs ...Taken) {
	for _, j := range jobs {
		attempt := int(j.token)
		if kind == ledger.OutcomeUnstarted {
			attempt = j.Attempt
		}
		w.reportOutcome(p, typ, ledger.GroupOutcome{Group: j.Group, Others: []ledger.OtherJob{{
			Entry: j.entry, Ordinal: j.Ordinal, Attempt: attempt, Kind: kind, Waits: j.Waits,
			Queued: []byte(j.Queued), Delay: delay, Code: "BOOM", Text: "it broke",
		}}})
	}
}

func (w *World) reportOutcome(p keyspace.Partition, typ string, g ledger.GroupOutcome) {
	_, err := ledger.Outcome(w.Context(), w.C, p, typ, ledger.Congestion{Cap: time.Hour}, []ledger.GroupOutcome{g})
	w.OK(err)
}

// Reduce reads entries of the results stream and reduces them, as an aggregator does.
func (w *World) Reduce(p keyspace.Partition, partial string, most int64) {
	w.consumers(p.ResultStream(), keyspace.GroupAggregator)
	for _, m := range w.fresh(p.ResultStream(), keyspace.GroupAggregator, partial, most) {
		w.reduceEntry(p, partial, m)
	}
}

func (w *World) reduceEntry(p keyspace.Partition, partial string, m redis.XMessage) {
	id, lines := m.Values["g"].(string), m.Values["l"].(string)
	for {
		have := w.C.HMGet(w.Context(), p.Aggregate(id), "version:"+partial, "partial:"+partial).Val()
		plan, err := aggregate.Plan(w.Plans, w.C.HGet(w.Context(), p.Group(id), "aggregate").Val())
		w.OK(err)
		state := plan.New()
		if text(have[1]) != "" {
			state, err = plan.Decode([]byte(text(have[1])))
			w.OK(err)
		}
		args := ledger.ReduceArgs{
			Group: id, Partial: partial, Version: number(have[0]), Lines: []byte(lines), Entries: []string{m.ID},
		}
		for line := range strings.SplitSeq(lines, "\n") {
			n, ok := ordinalOf(line)
			require.True(w, ok)
			args.Ordinals = append(args.Ordinals, n)
			w.OK(state.Add(reducer.Result{Ordinal: n, Data: []byte(`{"cost":2}`)}))
		}
		args.State, err = state.Encode()
		w.OK(err)
		r, err := ledger.Reduce(w.Context(), w.C, p, args)
		w.OK(err)
		if r.State != ledger.ReduceVersion {
			require.Contains(w, []ledger.ReduceState{ledger.ReduceOK, ledger.ReduceGone}, r.State)
			return
		}
	}
}

// Work runs all jobs of a type that may run, and reduces their results.
func (w *World) Work(p keyspace.Partition, typ string) {
	w.Admit(p, typ, 200, NoLimit)
	w.Done(p, typ, w.Start(p, typ, w.Read(p, typ, "c", 500))...)
	w.Reduce(p, "0", 500)
}

func (w *World) advance(group string) {
	p := w.Part(group)
	fence, err := ledger.Lead(w.Context(), w.C, p, "w", time.Hour)
	w.OK(err)
	_, err = ledger.Advance(w.Context(), w.C, p, group, fence)
	w.OK(err)
}

// Cancel cancels a group.
func (w *World) Cancel(group string) { w.OK(ledger.Cancel(w.Context(), w.C, w.Part(group), group)) }

// Sweep completes the cancellation of a group.
func (w *World) Sweep(group string) {
	for more := true; more; {
		var err error
		more, err = ledger.Sweep(w.Context(), w.C, w.Part(group), group)
		w.OK(err)
	}
}

func (w *World) status(group string) string {
	return w.C.HGet(w.Context(), w.Part(group).Group(group), "status").Val()
}

func (w *World) statesOf(group string) string {
	return w.C.Get(w.Context(), w.Part(group).States(group)).Val()
}

// JobIn returns the ordinal of a group's n-th job with a state letter.
func (w *World) JobIn(group string, letter ledger.Letter, n int) int64 {
	states := w.statesOf(group)
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
func (w *World) count(group string, letter ledger.Letter) (n int) {
	states := w.statesOf(group)
	for at := 0; at < len(states); at += 2 {
		if ledger.Letter(states[at]) == letter {
			n++
		}
	}
	return n
}

const aggregates = `[{"as":"n","op":"count"},{"as":"cost","op":"sum","field":"data.cost"}]`

// Inhabit fills a world with groups in all states and jobs at all locations. The group "all" has
// jobs at each of them.
func Inhabit(w *World) {
	all, p := "all", w.Space.OfTenant("acme")
	w.Create(all, "acme", "T", "aggregate", aggregates)
	w.Append(all, Jobs(60))
	w.Append(all, Jobs(3, large))
	w.Append(all, Jobs(5, large, OfType("U")))
	w.Append(all, Jobs(12, OfType("U")))
	w.Append(all, Jobs(4, Later))
	w.Admit(p, "T", 40, NoLimit)
	w.Admit(p, "U", 8, NoLimit)
	started := w.Start(p, "U", w.Read(p, "U", "c1", 6))
	w.Done(p, "U", started[:3]...)
	started = w.Start(p, "T", w.Read(p, "T", "c1", 35))
	w.Done(p, "T", started[:6]...)
	w.Reduce(p, "0", 5)
	w.Reduce(p, "7", 2)
	w.back(p, "T", ledger.OutcomeFailed, 0, started[6:9]...)
	w.back(p, "T", ledger.OutcomeRetry, time.Hour, started[9:11]...)
	w.back(p, "T", ledger.OutcomeThrottled, time.Hour, started[11:13]...)
	w.back(p, "T", ledger.OutcomeReleased, 0, started[13:15]...)
	w.promote(p, "T")
	w.Start(p, "T", []Taken{started[20]}) // a second time, with the same entry
	w.back(p, "T", ledger.OutcomeUnstarted, 0, w.Read(p, "T", "c2", 2)...)

	// Groups that ended in all ways.
	for _, g := range []struct{ id, tenant string }{
		{"completed", "globex"}, {"expired", "globex"}, {"failed", "acme"}, {"retried", "acme"},
		{"partly", "initech"},
	} {
		p := w.Space.OfTenant(g.tenant)
		w.Create(g.id, g.tenant, g.id, "aggregate", aggregates, "failure_threshold", "0.5")
		w.Append(g.id, Jobs(10))
		w.seal(g.id)
		switch g.id {
		case "failed", "retried", "partly":
			w.Admit(p, g.id, 10, NoLimit)
			some := w.Start(p, g.id, w.Read(p, g.id, "c", 10))
			n := map[string]int{"failed": 5, "retried": 8, "partly": 2}[g.id]
			w.back(p, g.id, ledger.OutcomeFailed, 0, some[:n]...)
			w.Done(p, g.id, some[n:]...)
			w.Reduce(p, "1", 100)
		default:
			w.Work(p, g.id)
		}
		w.advance(g.id)
	}
	require.Equal(w, "COMPLETED", w.status("completed"))
	require.Equal(w, "FAILED", w.status("failed"))
	require.Equal(w, "COMPLETED", w.status("partly"))
	fence, err := ledger.Lead(w.Context(), w.C, w.Part("expired"), "w", time.Hour)
	w.OK(err)
	w.OK(ledger.Expire(w.Context(), w.C, w.Part("expired"), "expired", fence, true))
	_, err = ledger.Reopen(w.Context(), w.C, p, "retried", "")
	w.OK(err)
	w.Create("moved", "acme", "moved")
	w.Append("moved", Jobs(8))
	w.seal("moved")
	w.Admit(p, "moved", 10, NoLimit)
	w.back(p, "moved", ledger.OutcomeFailed, 0, w.Start(p, "moved", w.Read(p, "moved", "c", 5))...)
	w.Done(p, "moved", w.Start(p, "moved", w.Read(p, "moved", "c", 5))...)
	w.Reduce(p, "3", 100)
	w.advance("moved")
	_, err = ledger.Reopen(w.Context(), w.C, p, "moved", "")
	w.OK(err)
	for more := true; more; {
		more, err = ledger.Requeue(w.Context(), w.C, p, "moved")
		w.OK(err)
	}

	// Cancelled groups, one swept and one not yet.
	for _, id := range []string{"cancelled", "sweeping"} {
		w.Create(id, "hooli", id)
		w.Append(id, Jobs(20))
		w.Append(id, Jobs(2, Later))
		p := w.Part(id)
		w.Admit(p, id, 10, NoLimit)
		some := w.Start(p, id, w.Read(p, id, "c", 7))
		w.Done(p, id, some[:2]...)
		w.back(p, id, ledger.OutcomeFailed, 0, some[2:3]...)
		w.back(p, id, ledger.OutcomeRetry, time.Hour, some[3:4]...)
		w.Cancel(id)
	}
	w.Sweep("cancelled")

	// A scheduled group, one of a rate-limited tenant, empty ones, one that is about to end, and a
	// large one.
	w.Create("scheduled", "globex", "T", "run_at", strconv.FormatInt(time.Now().Add(time.Hour).UnixMilli(), 10))
	w.Append("scheduled", Jobs(5))
	w.Create("limited", "umbrella", "limited")
	w.Append("limited", Jobs(10))
	neighbour := "umbrella"
	for w.Space.OfTenant(neighbour) != w.Space.OfTenant("umbrella") || neighbour == "umbrella" {
		neighbour += "-"
	}
	w.Create("beside", neighbour, "beside")
	w.Append("beside", Jobs(2))
	w.Admit(w.Part("limited"), "limited", 10, limited(3))
	require.Equal(w, 1, w.count("limited", ledger.NonReady))
	w.Create("empty", "globex", "T")
	w.Create("sealed", "globex", "T")
	w.seal("sealed")
	w.advance("sealed")
	require.Equal(w, "COMPLETED", w.status("sealed"))
	w.Create("ending", "globex", "ending")
	w.Append("ending", Jobs(2))
	w.Work(w.Part("ending"), "ending")
	w.seal("ending")
	w.Create("many", "acme", "many")
	w.Append("many", Jobs(1200)) // more than two pages
	w.Admit(p, "many", 50, NoLimit)

	w.Admit(p, "T", 3, NoLimit)
	w.Done(p, "T", w.Start(p, "T", w.Read(p, "T", "c3", 3))...)

	for _, letter := range "WNRIDAF" {
		require.Positive(w, w.count(all, ledger.Letter(letter)), string(letter))
	}
}

// ordinalOf returns the ordinal of a result line.
func ordinalOf(line string) (n int64, ok bool) {
	var r struct{ Ordinal *int64 }
	if json.Unmarshal([]byte(line), &r) != nil || r.Ordinal == nil {
		return 0, false
	}
	return *r.Ordinal, true
}

// text returns a value of a Redis reply as a string; "" if it is missing.
func text(v any) string { s, _ := v.(string); return s }

// number returns a value of a Redis reply as a number; 0 if it is missing.
func number(v any) int64 {
	n, _ := strconv.ParseInt(text(v), 10, 64)
	return n
}
