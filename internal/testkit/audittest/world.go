// Package audittest builds the data that the tests of the audit and of its repair need: a world
// with jobs in all states, movers that change it, and tampers that break its laws. It knows what an
// audit must find, but doesn't use the audit.
package audittest

import (
	"cmp"
	"context"
	"encoding/json"
	"errors"
	"flag"
	"fmt"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/redis/go-redis/v9"
	"github.com/stretchr/testify/require"
	"go.uber.org/goleak"

	"github.com/bulkaction/bulkaction/internal/jobs/ledger"
	"github.com/bulkaction/bulkaction/internal/redisx"
	"github.com/bulkaction/bulkaction/internal/redisx/keyspace"
	"github.com/bulkaction/bulkaction/internal/testkit/limittest"
	"github.com/bulkaction/bulkaction/internal/testkit/redistest"
	"github.com/bulkaction/bulkaction/reducer"
)

// Main runs the tests of a package, checks that no goroutine is left, and exits. Six tests run in
// parallel, even on fewer processors, unless -parallel is given: they mostly wait, for Redis and
// between the passes of an audit.
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

// World is the data of an installation in a test's Redis. Its methods do the steps of the roles by
// the real scripts. If a step fails, the test fails.
type World struct{ data }

// data reads and damages what is in Redis.
type data struct{ base }

// base is a connection to the Redis of a test.
type base struct {
	tb
	Conn  *redisx.Conn
	C     redis.UniversalClient // of Conn
	Space keyspace.Space
	Plans *reducer.Registry
}

// New connects to the Redis at this URL and returns a World in which only the number of partitions
// is stored. All its keys have the prefix.
func New(t testing.TB, url, prefix string, partitions int) *World {
	t.Helper()
	space, err := keyspace.New(prefix, partitions)
	require.NoError(t, err)
	space.SetLayout(ledger.Layout.Newest)
	conn, err := redisx.Connect(t.Context(), redisx.Config{URL: url})
	require.NoError(t, err)
	t.Cleanup(func() { require.NoError(t, conn.Close()) })
	w := &World{data{base{tb: t, Conn: conn, C: conn.Cmd, Space: space, Plans: reducer.NewRegistry()}}}
	w.OK(w.C.Set(w.Context(), space.PartitionCount(), partitions, 0).Err())
	return w
}

// OK fails the test on an error.
func (b *base) OK(err error) { require.NoError(b, err) }

// did fails the test for an error. It takes the results of a call that returns a value, which it
// ignores, and an error.
func (b *base) did(_ any, err error) { b.OK(err) }

func (b *base) Part(group string) keyspace.Partition { return b.Space.OfTenant(b.Tenant(group)) }

// Tenant returns the tenant that a group's owner key names.
func (b *base) Tenant(group string) string {
	tenant, err := b.C.Get(b.Context(), b.Space.OfGroup(group).Owner(group)).Result()
	b.OK(err)
	return tenant
}

// NoLimit allows everything.
var NoLimit = limittest.None

// Create writes the owner key of a group, unless it exists, and creates the group by the script
// create. fields are further names and values, in turn, of the group's hash.
func (w *World) Create(group, tenant, typ string, fields ...string) {
	f := map[string]string{"lane": "normal"}
	for i := 0; i+1 < len(fields); i += 2 {
		f[fields[i]] = fields[i+1]
	}
	w.OK(w.C.SetNX(w.Context(), w.Space.OfGroup(group).Owner(group), tenant, 0).Err())
	w.did(ledger.Create(w.Context(), w.C, w.Space.OfTenant(tenant),
		ledger.CreateArgs{Group: group, Tenant: tenant, Type: typ, Hash: "h", Fields: f}))
}

// Jobs returns n new jobs with small payloads. It applies each function of change to each job.
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

// OfType returns a function for Jobs that gives a job a type of its own.
func OfType(typ string) func(*ledger.NewJob) { return func(j *ledger.NewJob) { j.Type = typ } }

// Later makes a job start in an hour.
func Later(j *ledger.NewJob) { j.RunAt = new(time.Now().Add(time.Hour)) }

// Append adds jobs to a group.
func (w *World) Append(group string, all []ledger.NewJob) {
	for some := range slices.Chunk(all, ledger.MaxAppend) {
		w.did(ledger.Append(w.Context(), w.C, w.Part(group), ledger.AppendArgs{Group: group, Limit: 1e7, Jobs: some}))
	}
}

func (w *World) seal(group string) {
	w.did(ledger.Seal(w.Context(), w.C, w.Part(group), group, nil))
}

// Admit makes up to most waiting jobs of a type ready.
func (w *World) Admit(p keyspace.Partition, typ string, most int, limit limittest.Limit) ledger.AdmitReply {
	r, err := ledger.Admit(w.Context(), w.C, p, ledger.AdmitArgs{
		Type: typ, Most: most, Cap: 100_000, Meter: limittest.Use(w.Context(), w, w.C, p, limit), Seed: "0badcafe", LaneWeights: [3]int{6, 3, 1},
	})
	w.OK(err)
	return r
}

func (w *World) promote(p keyspace.Partition, types ...string) {
	w.did(ledger.Promote(w.Context(), w.C, p, ledger.PromoteArgs{
		Most: 100, Meter: limittest.Use(w.Context(), w, w.C, p, NoLimit), Seed: "0badcafe", FullWait: time.Millisecond, Cap: 100_000,
	}))
}

// Taken is a job that a test has read from a ready stream like a worker. Those that Start returns
// have the token of the started attempt.
type Taken struct {
	entry string
	ledger.Job
	token int64
}

// Read reads up to most jobs of a type from the ready stream, as a worker process does.
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

// Start starts jobs as a worker does, and returns those that the script allows to run. It sorts the
// slice jobs.
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
	w.did(ledger.Outcome(w.Context(), w.C, p, typ, ledger.Congestion{Cap: time.Hour}, []ledger.GroupOutcome{g}))
}

// Reduce reads up to most entries of the results stream and adds their results to a partial
// aggregate, as an aggregator does.
func (w *World) Reduce(p keyspace.Partition, partial string, most int64) {
	w.consumers(p.ResultStream(), keyspace.GroupAggregator)
	for _, m := range w.fresh(p.ResultStream(), keyspace.GroupAggregator, partial, most) {
		w.reduceEntry(p, partial, m)
	}
}

func (w *World) reduceEntry(p keyspace.Partition, partial string, m redis.XMessage) {
	id, lines := m.Values["g"].(string), m.Values["l"].(string)
	for {
		version, _ := w.C.HGet(w.Context(), p.Aggregate(id), "version:"+partial).Int64() // 0: there is none yet
		encoded := w.C.HGet(w.Context(), p.Aggregate(id), "partial:"+partial).Val()
		plan, err := ledger.AggregatePlan(w.Plans, w.C.HGet(w.Context(), p.Group(id), "aggregate").Val())
		w.OK(err)
		state := plan.New()
		if encoded != "" {
			state, err = plan.Decode([]byte(encoded))
			w.OK(err)
		}
		args := ledger.ReduceArgs{
			Group: id, Partial: partial, Version: version, Lines: []byte(lines), Entries: []string{m.ID},
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
		if r[0].State != ledger.ReduceVersion {
			require.Contains(w, []ledger.ReduceState{ledger.ReduceOK, ledger.ReduceGone}, r[0].State)
			return
		}
	}
}

// Work makes up to 200 waiting jobs of a type ready, makes up to 500 ready ones done, and reduces
// their results.
func (w *World) Work(p keyspace.Partition, typ string) {
	w.Admit(p, typ, 200, NoLimit)
	w.Done(p, typ, w.Start(p, typ, w.Read(p, typ, "c", 500))...)
	w.Reduce(p, "0", 500)
}

func (w *World) advance(group string) {
	p := w.Part(group)
	w.did(ledger.Advance(w.Context(), w.C, p, group))
}

// lead makes the watcher "w" the leader of a partition, and returns its fencing number.
func (w *World) lead(p keyspace.Partition) int64 {
	fence, err := ledger.Lead(w.Context(), w.C, p, "w", time.Hour)
	w.OK(err)
	return fence
}

// Cancel cancels a group. Its jobs end by Sweep.
func (w *World) Cancel(group string) { w.OK(ledger.Cancel(w.Context(), w.C, w.Part(group), group)) }

// Sweep completes the cancellation of a group.
func (w *World) Sweep(group string) { w.complete(sweep, w.Part(group), group) }

func sweep(ctx context.Context, c redis.Cmdable, p keyspace.Partition, group string) (more bool, err error) {
	more, _, err = ledger.Sweep(ctx, c, p, group)
	return more, err
}

// complete repeats a step until nothing is left to do.
func (w *World) complete(
	step func(context.Context, redis.Cmdable, keyspace.Partition, string) (bool, error),
	p keyspace.Partition, group string,
) {
	for more := true; more; {
		var err error
		more, err = step(w.Context(), w.C, p, group)
		w.OK(err)
	}
}

func (d *data) status(group string) string {
	return d.C.HGet(d.Context(), d.Part(group).Group(group), "status").Val()
}

func (d *data) statesOf(group string) string {
	return d.C.Get(d.Context(), d.Part(group).States(group)).Val()
}

// jobsIn returns the ordinals of a group's jobs with a state letter.
func (d *data) jobsIn(group string, letter ledger.Letter) (ordinals []int64) {
	states := d.statesOf(group)
	for i := range int64(len(states) / ledger.StateBytes) {
		if ledger.StateAt(states, i).Letter() == letter {
			ordinals = append(ordinals, i)
		}
	}
	return ordinals
}

// JobIn returns the ordinal of a group's n-th job, counted from 0, with a state letter.
func (d *data) JobIn(group string, letter ledger.Letter, n int) int64 {
	jobs := d.jobsIn(group, letter)
	require.Greater(d, len(jobs), n, "%s has too few jobs in %c: %s", group, letter, d.statesOf(group))
	return jobs[n]
}

// count returns the number of a group's jobs with a state letter.
func (d *data) count(group string, letter ledger.Letter) int { return len(d.jobsIn(group, letter)) }

func ordinalOf(line string) (n int64, ok bool) {
	var r struct{ Ordinal *int64 }
	if json.Unmarshal([]byte(line), &r) != nil || r.Ordinal == nil {
		return 0, false
	}
	return *r.Ordinal, true
}
