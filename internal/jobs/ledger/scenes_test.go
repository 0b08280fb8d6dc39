package ledger_test

import (
	"regexp"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/redis/go-redis/v9"
	"github.com/stretchr/testify/require"

	"github.com/bulkaction/bulkaction/internal/jobs/ledger"
	"github.com/bulkaction/bulkaction/internal/redisx/call"
	"github.com/bulkaction/bulkaction/internal/redisx/keyspace"
	"github.com/bulkaction/bulkaction/internal/testkit/limittest"
	"github.com/bulkaction/bulkaction/internal/testkit/redistest"
)

// act is a function that calls one script once.
type act func() error

// scene is a call of a script, with the state that it finds.
type scene struct {
	name      string // name of the script, and the state that it finds
	takesMore bool   // the script takes work in, so it is refused when memory is full
	prepare   func(w *world) act
}

// scenes are calls of the scripts that write data of groups, jobs, tenants and limits. Together
// they are meant to execute every write of these scripts. A scene prepares a partition and returns
// the call. Tests of common properties, such as that a script without memory is refused or
// completes, run them all.
var scenes = slices.Concat(lifeScenes, flowScenes, callbackScenes)

var lifeScenes = []scene{
	{"create", true, func(w *world) act {
		return func() error {
			_, err := ledger.Create(w.Context(), w.c, w.p, ledger.CreateArgs{Group: "g", Tenant: "acme", Type: "T", Hash: "h"})
			return err
		}
	}},
	{"append a new group with jobs", true, func(w *world) act {
		return w.appending(ledger.AppendArgs{Group: "g", Limit: 10, Request: ledger.SubmissionPrefix + "0", Mode: ledger.AppendSeal, Create: born("acme"),
			Jobs: []ledger.NewJob{{Payload: []byte("1")}, {Type: "U", Payload: large, RunAt: new(time.Now().Add(time.Hour))}},
		})
	}},
	{"append a new group of a busy tenant, with unique keys and a part of its jobs", true, func(w *world) act {
		w.fill("h", 1, "acme", "T")
		a := ledger.AppendArgs{Group: "g", Limit: 10, Request: ledger.SubmissionPrefix + "0", Create: born("acme", "unique_keys", "1"), Jobs: jobs(2)}
		a.Jobs[0].Key, a.Jobs[1].Key = "a", "a"
		return w.appending(a)
	}},
	{"append a new group with tags", true, func(w *world) act {
		w.submit(tagged("h", "a=1"))
		return w.appending(tagged("g", "a=1", "b=2"))
	}},
	{"append a new group that is sealed without jobs", true, func(w *world) act {
		return w.appending(ledger.AppendArgs{Group: "g", Mode: ledger.AppendSeal, Create: born("acme")})
	}},
	{"append a new group over the rest of a torn script", true, func(w *world) act {
		for _, key := range []string{w.p.Payloads("g"), w.p.KeyIndex("g")} {
			w.c.HSet(w.Context(), key, "0", "old")
		}
		w.c.RPush(w.Context(), w.p.Queue("g", "T"), "0|1||old", "1|1||old")
		w.c.Set(w.Context(), w.p.States("g"), "W!W!W!", 0)
		return w.appending(ledger.AppendArgs{Group: "g", Limit: 10, Mode: ledger.AppendLast, Create: born("acme"), Jobs: jobs(1)})
	}},
	{"append several types, the last of a total", true, func(w *world) act {
		w.create("g", "acme", "T", "total", "4")
		return w.appending(ledger.AppendArgs{Group: "g", Limit: 10, Request: "r", Mode: ledger.AppendLast, Jobs: []ledger.NewJob{
			{Payload: []byte("1")}, {Type: "U", Payload: []byte("2")}, {Payload: large}, {Type: "V", Payload: []byte("4"), RunAt: new(time.Now().Add(time.Hour))},
		}})
	}},
	{"append an entry of the ingest stream", true, func(w *world) act {
		w.create("g", "acme", "T")
		return w.appending(ledger.AppendArgs{Group: "g", Limit: 10, Request: ledger.EntryRequest("1700000000000-0"), Jobs: jobs(1)})
	}},
	{"append to a group with unique keys", true, func(w *world) act {
		w.create("g", "acme", "T", "unique_keys", "1")
		keyed := jobs(3)
		keyed[0].Key, keyed[1].Key, keyed[2].Key = "a", "a", "b"
		return w.appending(ledger.AppendArgs{Group: "g", Request: "r#0", Limit: 10, Jobs: keyed})
	}},
	{"append to a group that is held", true, func(w *world) act {
		w.create("g", "acme", "T", "run_at", inAnHour())
		return w.appending(ledger.AppendArgs{Group: "g", Limit: 10, Jobs: jobs(1)})
	}},
	{"append only jobs for later", true, func(w *world) act {
		w.create("g", "acme", "T")
		return w.appending(ledger.AppendArgs{Group: "g", Limit: 10, Jobs: []ledger.NewJob{{Payload: []byte("1"), RunAt: new(time.Now().Add(time.Hour))}}})
	}},
	{"seal", true, func(w *world) act {
		w.create("g", "acme", "T")
		return w.sealing("g", nil)
	}},
	{"seal with a total", true, func(w *world) act {
		w.fill("g", 2, "acme", "T")
		total := int64(2)
		return w.sealing("g", &total)
	}},
	{"schedule", false, func(w *world) act {
		w.hold("g", 2)
		return func() error {
			_, _, err := ledger.Schedule(w.Context(), w.c, w.p, 10)
			return err
		}
	}},
	{"admit", false, func(w *world) act {
		w.fill("g", 2, "acme", "T")
		return w.admitting(limit(5))
	}},
	{"admit the head of a tenant without a permit", false, func(w *world) act {
		w.spent("acme")
		return w.admitting(limit(20))
	}},
	{"admit a tenant whose permit has come", false, func(w *world) act {
		w.spent("acme")
		w.admit("T", 1, limit(20))
		w.c.ZAdd(w.Context(), w.p.RateLimited("T"), redis.Z{Score: 1, Member: "acme"})
		w.c.HSet(w.Context(), w.p.Rate(), "w", 0, "n", 1000) // the tenant returns to the queue, and admits nothing
		return w.admitting(limit(20))
	}},
	{"admit what can't be read", false, func(w *world) act {
		w.fill("g", 1, "acme", "T")
		w.c.LPush(w.Context(), w.p.Queue("g", "T"), "nonsense")
		return w.admitting(noLimit)
	}},
	{"admit after a group was cancelled elsewhere", false, func(w *world) act {
		w.fill("g", 1, "acme", "T")
		w.c.Del(w.Context(), w.p.Queue("g", "T"))
		return w.admitting(noLimit)
	}},
	{"promote", false, func(w *world) act {
		w.nonReady("g", 2)
		return w.promoting(limit(5))
	}},
	{"promote a marker", false, func(w *world) act {
		w.spent("acme")
		w.admit("T", 1, limit(20))
		w.overdue("acme")
		return w.promoting(noLimit)
	}},
	{"promote jobs of a cancelled group", false, func(w *world) act {
		w.nonReady("g", 2)
		w.cancel("g")
		return w.promoting(limit(5))
	}},
	{"promote what can't be read", false, func(w *world) act {
		w.nonReady("g", 1)
		w.c.ZAdd(w.Context(), w.p.NonReadyOf("acme"), redis.Z{Score: 1, Member: "nonsense"})
		return w.promoting(noLimit)
	}},
	{"start", false, func(w *world) act {
		w.fill("g", 2, "acme", "T")
		w.admit("T", 2, noLimit)
		return w.starting(w.read("T", "c"))
	}},
	{"start jobs of a cancelled group", false, func(w *world) act {
		w.fill("g", 1, "acme", "T")
		w.admit("T", 1, noLimit)
		jobs := w.read("T", "c")
		w.cancel("g")
		return w.starting(jobs)
	}},
	{"renew", false, func(w *world) act {
		w.fill("g", 1, "acme", "T")
		j := w.begin("T", "c1", 1)[0]
		return func() error {
			_, err := ledger.Renew(w.Context(), w.c, w.p, "T", "c2", []ledger.Held{{Entry: j.entry, Group: "g", Attempt: int(j.token)}})
			return err
		}
	}},
	{"outcome", false, func(w *world) act {
		w.create("g", "acme", "T")
		w.appendJobs(ledger.AppendArgs{Group: "g", Mode: ledger.AppendSeal, Jobs: append(jobs(5), ledger.NewJob{Payload: large})})
		run := w.begin("T", "c", 6)
		report := done(run[0], run[5])
		for i, kind := range []ledger.OutcomeKind{ledger.OutcomeRetry, ledger.OutcomeThrottled, ledger.OutcomeFailed, ledger.OutcomeReleased} {
			report[0].Others = append(report[0].Others, other(kind, run[i+1], 0)[0].Others...)
		}
		return w.reporting(report)
	}},
	{"outcome of a job that was not started", false, func(w *world) act {
		w.fill("g", 1, "acme", "T")
		w.admit("T", 1, noLimit)
		return w.reporting(other(ledger.OutcomeUnstarted, w.read("T", "c")[0], 0))
	}},
	{"outcome of deferred jobs, one of them not started", false, func(w *world) act {
		w.fill("g", 2, "acme", "T")
		report := other(ledger.OutcomeDeferred, w.begin("T", "c", 1)[0], time.Hour)
		w.admit("T", 1, noLimit)
		report[0].Others = append(report[0].Others, other(ledger.OutcomeDeferred, w.read("T", "c")[0], time.Hour)[0].Others...)
		return w.reporting(report)
	}},
	{"outcome of a done job, and of one that is retried", false, func(w *world) act {
		w.fill("g", 2, "acme", "T")
		run := w.begin("T", "c", 2)
		report := done(run[0])
		report[0].Others = other(ledger.OutcomeRetry, run[1], 0)[0].Others
		return w.reporting(report)
	}},
	{"outcome of jobs that had errors before", false, func(w *world) act {
		w.fill("g", 3, "acme", "T")
		run := w.retried("T", w.begin("T", "c", 3)...)
		report := done(run[0])
		for i, kind := range []ledger.OutcomeKind{ledger.OutcomeRetry, ledger.OutcomeFailed} {
			report[0].Others = append(report[0].Others, other(kind, run[i+1], 0)[0].Others...)
		}
		return w.reporting(report)
	}},
	{"outcome of a group's last job", false, func(w *world) act {
		w.create("g", "acme", "T")
		w.appendJobs(ledger.AppendArgs{Group: "g", Mode: ledger.AppendSeal, Jobs: jobs(1)})
		return w.reporting(done(w.begin("T", "c", 1)...))
	}},
	{"reclaim", false, func(w *world) act {
		w.fill("g", 2, "acme", "T")
		w.begin("T", "c", 1)
		w.admit("T", 1, noLimit)
		w.read("T", "c")
		return w.reclaiming(3)
	}},
	{"reclaim a job that lost too many workers", false, func(w *world) act {
		w.create("g", "acme", "T")
		w.appendJobs(ledger.AppendArgs{Group: "g", Mode: ledger.AppendSeal, Jobs: jobs(1)})
		w.begin("T", "c", 1)
		return w.reclaiming(0)
	}},
	{"reclaim what can't be read", false, func(w *world) act {
		w.c.XAdd(w.Context(), &redis.XAddArgs{Stream: w.p.Ready("T"), Values: []string{"j", "nonsense"}})
		w.consumerGroup(w.p.Ready("T"), keyspace.GroupWorkers)
		w.c.XReadGroup(w.Context(), &redis.XReadGroupArgs{Group: keyspace.GroupWorkers, Consumer: "c", Streams: []string{w.p.Ready("T"), ">"}})
		return w.reclaiming(3)
	}},
	{"reduce", false, func(w *world) act {
		w.create("g", "acme", "T")
		w.appendJobs(ledger.AppendArgs{Group: "g", Mode: ledger.AppendSeal, Jobs: jobs(2)})
		w.outcome("T", done(w.begin("T", "c", 2)...))
		return w.reducing(w.readResults(1)[0])
	}},
	{"reduce a group that is gone", false, func(w *world) act {
		w.c.XAdd(w.Context(), &redis.XAddArgs{Stream: w.p.ResultStream(), Values: []string{"g", "gone", "l", `{"ordinal":0}`, "t", ""}})
		return w.reducing(w.readResults(1)[0])
	}},
	{"advance", false, func(w *world) act {
		w.create("g", "acme", "T")
		w.seal("g")
		w.c.SAdd(w.Context(), w.p.Active(), "acme") // a state that a torn script may leave
		w.c.HSet(w.Context(), w.p.Tenant("acme"), "active", 1)
		return func() error {
			r, err := ledger.Advance(w.Context(), w.c, w.p, "g")
			if err == nil {
				err = r[0].Err
			}
			return err
		}
	}},
	{"reduce failures", false, func(w *world) act {
		w.fill("g", 1, "acme", "T", "reduce_failures", "1")
		w.seal("g")
		w.outcome("T", other(ledger.OutcomeFailed, w.begin("T", "c", 1)[0], 0))
		w.advance("g")
		return func() error {
			a := ledger.AdvanceReply{Failures: 1, Round: 1}
			return ledger.ReduceFailures(w.Context(), w.c, w.p, "g", a, []byte("state"))
		}
	}},
	{"cancel", false, func(w *world) act {
		w.create("g", "acme", "T")
		w.appendJobs(ledger.AppendArgs{Group: "g", Jobs: append(jobs(2), ledger.NewJob{Type: "U", Payload: []byte("1")})})
		return func() error { return ledger.Cancel(w.Context(), w.c, w.p, "g") }
	}},
	{"cancel a group that is held", false, func(w *world) act {
		w.hold("g", 2)
		return func() error { return ledger.Cancel(w.Context(), w.c, w.p, "g") }
	}},
	{"sweep the states", false, func(w *world) act {
		w.everywhere("g")
		w.cancel("g")
		return w.sweeping("g")
	}},
	{"sweep what is non-ready", false, func(w *world) act {
		w.everywhere("g")
		w.cancel("g")
		require.NoError(w, w.sweeping("g")())
		return w.sweeping("g")
	}},
	{"reopen", true, func(w *world) act {
		w.failed("g", 2)
		return func() error {
			_, err := ledger.Reopen(w.Context(), w.c, w.p, "g", "", ledger.RetryChoice{})
			return err
		}
	}},
	{"requeue", true, func(w *world) act {
		w.failed("g", 2)
		_, err := ledger.Reopen(w.Context(), w.c, w.p, "g", "", ledger.RetryChoice{})
		require.NoError(w, err)
		return func() error {
			_, err := ledger.Requeue(w.Context(), w.c, w.p, "g")
			return err
		}
	}},
	{"requeue jobs that had errors before", true, func(w *world) act {
		w.fill("g", 1, "acme", "T")
		w.seal("g")
		w.outcome("T", other(ledger.OutcomeFailed, w.retried("T", w.begin("T", "c", 1)...)[0], 0))
		w.advance("g")
		_, err := ledger.Reopen(w.Context(), w.c, w.p, "g", "", ledger.RetryChoice{})
		require.NoError(w, err)
		return func() error {
			_, err := ledger.Requeue(w.Context(), w.c, w.p, "g")
			return err
		}
	}},
	{"lead", false, func(w *world) act {
		return func() error {
			_, err := ledger.Lead(w.Context(), w.c, w.p, "w1", time.Minute)
			return err
		}
	}},
	{"expire", false, func(w *world) act {
		w.failed("g", 2)
		fence := w.fence()
		w.c.SAdd(w.Context(), w.p.Dirty(), "g")
		w.c.SAdd(w.Context(), w.p.Active(), "acme")
		return func() error { return ledger.Expire(w.Context(), w.c, w.p, "g", fence, false) }
	}},
	{"expire with tags", false, func(w *world) act {
		w.submit(tagged("g", "a=1", "b=2"), tagged("h", "a=1"))
		w.cancel("g")
		w.sweep("g")
		fence := w.fence()
		return func() error { return ledger.Expire(w.Context(), w.c, w.p, "g", fence, false) }
	}},
	{"expire results", false, func(w *world) act {
		w.failed("g", 2)
		fence := w.fence()
		return func() error { return ledger.Expire(w.Context(), w.c, w.p, "g", fence, true) }
	}},
	{"retire", false, func(w *world) act {
		w.failed("g", 1)
		w.c.Del(w.Context(), w.p.Ready("T"))
		return func() error {
			_, err := ledger.Retire(w.Context(), w.c, w.p, "T", time.Now().Add(time.Hour))
			return err
		}
	}},
}

// born returns the description of the group g of type T that an append creates.
func born(tenant string, fields ...string) *ledger.CreateArgs {
	f := map[string]string{"lane": "normal"}
	for i := 0; i < len(fields); i += 2 {
		f[fields[i]] = fields[i+1]
	}
	return &ledger.CreateArgs{Group: "g", Tenant: tenant, Type: "T", Hash: "h", Fields: f, Own: true}
}

// large is a payload of more than 4 KiB, which is stored outside of the blob.
var large = []byte(`"` + strings.Repeat("x", 5000) + `"`)

func inAnHour() string { return timestamp(time.Now().Add(time.Hour)) }

// hold creates a group of n jobs with a run_at in an hour. In the sorted set of scheduled groups it
// makes the group due at once; its hash keeps the later run_at.
func (w *world) hold(group string, n int) {
	w.Helper()
	w.fill(group, n, "acme", "T", "run_at", inAnHour())
	require.NoError(w, w.c.ZAdd(w.Context(), w.p.Scheduled(), redis.Z{Score: 1, Member: group}).Err())
}

// spent creates the group g with three waiting jobs of a tenant, and sets the permits that the
// tenant has spent to 1,000, in the window of the function limit: more than any limit of the tests.
func (w *world) spent(tenant string) {
	w.Helper()
	w.fill("g", 3, tenant, "T")
	require.NoError(w, w.c.HSet(w.Context(), w.p.Tenant(tenant), "w", 0, "n", 1000).Err())
}

// overdue sets the due times of a tenant's non-ready jobs to 1 ms after 1970.
func (w *world) overdue(tenant string) {
	w.Helper()
	for _, blob := range w.c.ZRange(w.Context(), w.p.NonReadyOf(tenant), 0, -1).Val() {
		require.NoError(w, w.c.ZAddXX(w.Context(), w.p.NonReadyOf(tenant), redis.Z{Score: 1, Member: blob}).Err())
	}
	require.NoError(w, w.c.ZAdd(w.Context(), w.p.NonReady(), redis.Z{Score: 1, Member: tenant}).Err())
}

// nonReady creates a group of n non-ready jobs of tenant acme and type T: a worker has released
// them, so they are due at once.
func (w *world) nonReady(group string, n int) {
	w.Helper()
	w.fill(group, n, "acme", "T")
	for _, j := range w.begin("T", "c", n) {
		require.Equal(w, ledger.OutcomeReply{Owned: 1}, w.outcome("T", other(ledger.OutcomeReleased, j, 0)))
	}
}

// failed creates a group of n jobs of type T that all failed in their second attempt; its status is
// FAILED.
func (w *world) failed(group string, n int) {
	w.Helper()
	w.nonReady(group, n)
	w.seal(group)
	w.promoteAll("T", n)
	run := w.read("T", "c")
	w.start("T", run)
	for _, j := range run {
		require.Equal(w, ledger.OutcomeReply{Owned: 1, Failed: 1}, w.outcome("T", other(ledger.OutcomeFailed, j, 0)))
	}
	w.advance(group)
	require.Equal(w, "FAILED", w.status(group))
}

// everywhere creates a group of tenant acme and type T with eight jobs: done, failed, non-ready
// after an error, in flight, ready, the marker, scheduled and waiting. It counts acme's permits as
// spent.
func (w *world) everywhere(group string) {
	w.Helper()
	w.fill(group, 6, "acme", "T")
	run := w.begin("T", "c", 4)
	w.outcome("T", done(run[0]))
	w.outcome("T", other(ledger.OutcomeFailed, run[1], 0))
	w.outcome("T", other(ledger.OutcomeRetry, run[2], time.Hour))
	w.admit("T", 1, noLimit)
	w.appendJobs(ledger.AppendArgs{Group: group, Jobs: []ledger.NewJob{{Payload: large, RunAt: new(time.Now().Add(time.Hour))}}})
	w.append(group, 1)
	require.NoError(w, w.c.HSet(w.Context(), w.p.Tenant("acme"), "w", 0, "n", 1000).Err())
	require.Equal(w, 1, w.admit("T", 1, limit(20)).NonReady)
	require.Equal(w, "DFNIRNNW", w.states(group))
}

func timestamp(t time.Time) string { return fmtInt(t.UnixMilli()) }

func (w *world) appending(a ledger.AppendArgs) act {
	return func() error {
		_, err := ledger.Append(w.Context(), w.c, w.p, a)
		return err
	}
}

func (w *world) sealing(group string, total *int64) act {
	return func() error {
		_, err := ledger.Seal(w.Context(), w.c, w.p, group, total)
		return err
	}
}

func (w *world) admitting(l limittest.Limit) act {
	w.use(l)
	return func() error {
		_, err := ledger.Admit(w.Context(), w.c, w.p, ledger.AdmitArgs{Type: "T", Most: 10, Cap: 10, Meter: l.Meter, Seed: seed, LaneWeights: [3]int{6, 3, 1}})
		return err
	}
}

func (w *world) promoting(l limittest.Limit) act {
	w.use(l)
	return func() error {
		_, err := ledger.Promote(w.Context(), w.c, w.p, ledger.PromoteArgs{Most: 10, Meter: l.Meter, Seed: seed, Caps: map[string]int{"T": 10}})
		return err
	}
}

func (w *world) starting(jobs []taken) act {
	g := ledger.StartGroup{Group: jobs[0].Group}
	for _, j := range jobs {
		g.Jobs = append(g.Jobs, ledger.StartJob{Entry: j.entry, Ordinal: j.Ordinal, Attempt: j.Attempt})
	}
	return func() error {
		_, err := ledger.Start(w.Context(), w.c, w.p, "T", []ledger.StartGroup{g})
		return err
	}
}

func (w *world) reporting(groups []ledger.GroupOutcome) act {
	return func() error {
		_, err := ledger.Outcome(w.Context(), w.c, w.p, "T", ledger.Congestion{Base: time.Hour, Cap: time.Hour}, groups)
		return err
	}
}

func (w *world) reclaiming(maxLosses int) act {
	return func() error {
		_, err := ledger.Reclaim(w.Context(), w.c, w.p, "T", 0, 100, maxLosses, false)
		return err
	}
}

func (w *world) reducing(e results) act {
	return func() error {
		r, err := ledger.Reduce(w.Context(), w.c, w.p, ledger.ReduceArgs{
			Group: e.group, Partial: "0", State: []byte("{}"), Lines: []byte(e.lines), Entries: []string{e.entry}, Ordinals: e.ordinals,
		})
		if err == nil {
			err = r[0].Err
		}
		return err
	}
}

func (w *world) sweeping(group string) act {
	return func() error {
		_, _, err := ledger.Sweep(w.Context(), w.c, w.p, group)
		return err
	}
}

// quiet removes the wake tokens of idle roles, so that a script has to push new ones.
func (w *world) quiet() {
	for _, role := range []string{"fetcher", "dispatcher", "watcher", "aggregator", "callbacks"} {
		require.NoError(w, w.c.Del(w.Context(), w.p.Wake(role)).Err())
	}
}

// TestWrongTypesChangeNothing: an error does not undo earlier writes of a script. So a script must
// notice a key of the wrong Redis type before its first write. The test spoils every key that a
// scene changes, one at a time.
func TestWrongTypesChangeNothing(t *testing.T) {
	for _, s := range scenes {
		t.Run(s.name, func(t *testing.T) {
			onRedis(t, func(w *world) {
				prefix, n := strings.TrimSuffix(w.p.Base(), "{0}:"), 0
				fresh := func() (*world, act) {
					n++
					v := newWorld(w, w.c, prefix+fmtInt(int64(n))+":")
					do := s.prepare(v)
					v.quiet()
					return v, do
				}
				v, do := fresh()
				before := v.dump()
				require.NoError(w, do())
				after := v.dump()
				changed := changes(before, after)
				require.NotEmpty(w, changed, "the scene must change something")
				for _, key := range changed {
					v, do := fresh()
					v.spoil(v.p.Base()+key, before[key]+after[key])
					spoiled := v.dump()
					err := do()
					if _, stays := after[key]; err == nil && (!stays || key == "policy") {
						continue // the script deletes or replaces this key, whatever its type
					}
					if err == nil && strings.HasPrefix(key, "rate-limited:") && strings.HasSuffix(s.name, "at its bound") {
						continue // the tenant comes back later
					}
					if err == nil && passesOver(s.name, key) {
						continue // of one callback or queue; the others go on
					}
					require.ErrorContainsf(w, err, "WRONGTYPE", "%s is of the wrong type", key)
					require.Equal(w, spoiled, v.dump(), "%s is of the wrong type", key)
				}
			})
		})
	}
}

// changes returns the keys that differ.
func changes(before, after map[string]string) []string {
	var keys []string
	for key, v := range after {
		if before[key] != v {
			keys = append(keys, key)
		}
	}
	for key := range before {
		if _, ok := after[key]; !ok {
			keys = append(keys, key)
		}
	}
	return keys
}

// spoil replaces a key by a key of another Redis type. content, as dump returns it, says which type
// the key has.
func (w *world) spoil(key, content string) {
	w.Helper()
	require.NoError(w, w.c.Del(w.Context(), key).Err())
	if strings.HasPrefix(content, "list") {
		require.NoError(w, w.c.Set(w.Context(), key, "spoiled", 0).Err())
	} else {
		require.NoError(w, w.c.RPush(w.Context(), key, "spoiled").Err())
	}
}

// TestOutOfMemory: when Redis's memory is full, scripts that take work in are refused without any
// change. All others leave the data that they leave otherwise, compared by shape.
func TestOutOfMemory(t *testing.T) {
	t.Parallel()
	server := redistest.Server(t)
	c := server.Client()
	memory := func(bytes string) { require.NoError(t, c.ConfigSet(t.Context(), "maxmemory", bytes).Err()) }
	for i, s := range scenes {
		t.Run(s.name, func(t *testing.T) { // one after the other, because they share the server's memory
			prepare := func(suffix string) (*world, act) {
				w := newWorld(t, c, fmtInt(int64(i))+suffix)
				do := s.prepare(w)
				w.quiet()
				return w, do
			}
			twin, asEver := prepare("twin:")
			require.NoError(t, asEver())

			w, do := prepare("oom:")
			before := w.dump()
			memory("1")
			err := do()
			memory("0")
			if s.takesMore {
				require.Truef(t, call.IsOOM(err), "%v", err)
				require.Equal(t, before, w.dump())
				return
			}
			require.NoError(t, err)
			require.Equal(t, shape(twin.dump()), shape(w.dump()))
		})
	}
}

var (
	snapshots = regexp.MustCompile(`snapshot:\[.*?\]`)
	numbers   = regexp.MustCompile(`[0-9.]+(e\+[0-9]+)?`)
)

// shape returns a dump without its numbers and snapshots, because most numbers are times and differ
// from run to run.
func shape(dump map[string]string) map[string]string {
	out := map[string]string{}
	for key, v := range dump {
		out[key] = numbers.ReplaceAllString(snapshots.ReplaceAllString(v, "snapshot"), "#")
	}
	return out
}
