package lua_test

import (
	"regexp"
	"strings"
	"testing"
	"time"

	"github.com/redis/go-redis/v9"
	"github.com/stretchr/testify/require"

	"github.com/bulkaction/bulkaction/internal/redistest"
	"github.com/bulkaction/bulkaction/internal/redisx"
	"github.com/bulkaction/bulkaction/internal/redisx/keyspace"
	"github.com/bulkaction/bulkaction/lua"
)

// act is one call of one script.
type act func() error

// scenes bring every script to every one of its writes: each prepares a partition and returns the call.
var scenes = []struct {
	name      string // of the script, and what it comes upon
	takesMore bool   // it lets work in, so it is refused when memory is full
	prepare   func(w *world) act
}{
	{"create", true, func(w *world) act {
		return func() error {
			_, err := lua.Create(w.Context(), w.c, w.p, lua.CreateArgs{Group: "g", Tenant: "acme", Type: "T", Hash: "h"})
			return err
		}
	}},
	{"append several types, the last of a total", true, func(w *world) act {
		w.create("g", "acme", "T", "total", "4")
		return w.appending(lua.AppendArgs{Group: "g", Limit: 10, Request: "r", Mode: lua.AppendLast, Jobs: []lua.NewJob{
			{Payload: []byte("1")}, {Type: "U", Payload: []byte("2")}, {Payload: large}, {Type: "V", Payload: []byte("4"), RunAt: time.Now().Add(time.Hour)},
		}})
	}},
	{"append an entry of the ingest stream", true, func(w *world) act {
		w.create("g", "acme", "T")
		return w.appending(lua.AppendArgs{Group: "g", Limit: 10, Request: lua.EntryRequest("1700000000000-0"), Jobs: jobs(1)})
	}},
	{"append to a group that is held", true, func(w *world) act {
		w.create("g", "acme", "T", "run_at", inAnHour())
		return w.appending(lua.AppendArgs{Group: "g", Limit: 10, Jobs: jobs(1)})
	}},
	{"append only jobs for later", true, func(w *world) act {
		w.create("g", "acme", "T")
		return w.appending(lua.AppendArgs{Group: "g", Limit: 10, Jobs: []lua.NewJob{{Payload: []byte("1"), RunAt: time.Now().Add(time.Hour)}}})
	}},
	{"seal", true, func(w *world) act {
		w.create("g", "acme", "T")
		return w.sealing("g", nil)
	}},
	{"seal with a total", true, func(w *world) act {
		w.create("g", "acme", "T")
		w.append("g", 2)
		total := int64(2)
		return w.sealing("g", &total)
	}},
	{"schedule", false, func(w *world) act {
		w.hold("g", 2)
		return func() error {
			_, _, err := lua.Schedule(w.Context(), w.c, w.p, 10)
			return err
		}
	}},
	{"admit", false, func(w *world) act {
		w.create("g", "acme", "T")
		w.append("g", 2)
		return w.admitting(limit(5))
	}},
	{"admit the head of a tenant without a permit", false, func(w *world) act {
		w.spent("acme")
		return w.admitting(limit(20))
	}},
	{"admit a tenant whose permit has come", false, func(w *world) act {
		w.spent("acme")
		w.admit("T", 1, limit(20))
		w.c.ZAdd(w.Context(), w.p.Parked("T"), redis.Z{Score: 1, Member: "acme"})
		w.c.HSet(w.Context(), w.p.Rate(), "w", 0, "n", 1000) // it takes its place in the queue again, and no more than that
		return w.admitting(limit(20))
	}},
	{"admit what can't be read", false, func(w *world) act {
		w.create("g", "acme", "T")
		w.append("g", 1)
		w.c.LPush(w.Context(), w.p.Queue("g", "T"), "nonsense")
		return w.admitting(noLimit)
	}},
	{"admit after a group was cancelled elsewhere", false, func(w *world) act {
		w.create("g", "acme", "T")
		w.append("g", 1)
		w.c.Del(w.Context(), w.p.Queue("g", "T"))
		return w.admitting(noLimit)
	}},
	{"promote", false, func(w *world) act {
		w.parked("g", 2)
		return w.promoting(limit(5))
	}},
	{"promote a marker", false, func(w *world) act {
		w.spent("acme")
		w.admit("T", 1, limit(20))
		w.overdue("acme")
		return w.promoting(noLimit)
	}},
	{"promote jobs of a cancelled group", false, func(w *world) act {
		w.parked("g", 2)
		w.cancel("g")
		return w.promoting(limit(5))
	}},
	{"promote what can't be read", false, func(w *world) act {
		w.parked("g", 1)
		w.c.ZAdd(w.Context(), w.p.NonReadyOf("acme"), redis.Z{Score: 1, Member: "nonsense"})
		return w.promoting(noLimit)
	}},
	{"start", false, func(w *world) act {
		w.create("g", "acme", "T")
		w.append("g", 2)
		w.admit("T", 2, noLimit)
		return w.starting(w.read("T", "c"))
	}},
	{"start jobs of a cancelled group", false, func(w *world) act {
		w.create("g", "acme", "T")
		w.append("g", 1)
		w.admit("T", 1, noLimit)
		jobs := w.read("T", "c")
		w.cancel("g")
		return w.starting(jobs)
	}},
	{"renew", false, func(w *world) act {
		w.create("g", "acme", "T")
		w.append("g", 1)
		j := w.begin("T", "c1", 1)[0]
		return func() error {
			_, err := lua.Renew(w.Context(), w.c, w.p, "T", "c2", []lua.Held{{Entry: j.entry, Group: "g", Attempt: int(j.token)}})
			return err
		}
	}},
	{"outcome", false, func(w *world) act {
		w.create("g", "acme", "T")
		w.appendJobs(lua.AppendArgs{Group: "g", Mode: lua.AppendSeal, Jobs: append(jobs(5), lua.NewJob{Payload: large})})
		run := w.begin("T", "c", 6)
		report := done(run[0], run[5])
		for i, kind := range []lua.OutcomeKind{lua.OutcomeRetry, lua.OutcomeThrottled, lua.OutcomeFailed, lua.OutcomeReleased} {
			report[0].Others = append(report[0].Others, other(kind, run[i+1], 0)[0].Others...)
		}
		return w.reporting(report)
	}},
	{"outcome of a job that was not started", false, func(w *world) act {
		w.create("g", "acme", "T")
		w.append("g", 1)
		w.admit("T", 1, noLimit)
		return w.reporting(other(lua.OutcomeUnstarted, w.read("T", "c")[0], 0))
	}},
	{"outcome of a group's last job", false, func(w *world) act {
		w.create("g", "acme", "T")
		w.appendJobs(lua.AppendArgs{Group: "g", Mode: lua.AppendSeal, Jobs: jobs(1)})
		return w.reporting(done(w.begin("T", "c", 1)...))
	}},
	{"reclaim", false, func(w *world) act {
		w.create("g", "acme", "T")
		w.append("g", 2)
		w.begin("T", "c", 1)
		w.admit("T", 1, noLimit)
		w.read("T", "c")
		return w.reclaiming(3)
	}},
	{"reclaim a job that lost too many workers", false, func(w *world) act {
		w.create("g", "acme", "T")
		w.appendJobs(lua.AppendArgs{Group: "g", Mode: lua.AppendSeal, Jobs: jobs(1)})
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
		w.appendJobs(lua.AppendArgs{Group: "g", Mode: lua.AppendSeal, Jobs: jobs(2)})
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
		fence := w.fence()
		w.c.SAdd(w.Context(), w.p.Active(), "acme") // as a torn script may have left it
		w.c.HSet(w.Context(), w.p.Tenant("acme"), "active", 1)
		return func() error {
			_, err := lua.Advance(w.Context(), w.c, w.p, "g", fence)
			return err
		}
	}},
	{"cancel", false, func(w *world) act {
		w.create("g", "acme", "T")
		w.appendJobs(lua.AppendArgs{Group: "g", Jobs: append(jobs(2), lua.NewJob{Type: "U", Payload: []byte("1")})})
		return func() error { return lua.Cancel(w.Context(), w.c, w.p, "g") }
	}},
	{"cancel a group that is held", false, func(w *world) act {
		w.hold("g", 2)
		return func() error { return lua.Cancel(w.Context(), w.c, w.p, "g") }
	}},
	{"sweep the states", false, func(w *world) act {
		w.everywhere("g")
		w.cancel("g")
		return w.sweeping("g")
	}},
	{"sweep what is parked", false, func(w *world) act {
		w.everywhere("g")
		w.cancel("g")
		require.NoError(w, w.sweeping("g")())
		return w.sweeping("g")
	}},
	{"reopen", true, func(w *world) act {
		w.failed("g", 2)
		return func() error {
			_, err := lua.Reopen(w.Context(), w.c, w.p, "g")
			return err
		}
	}},
	{"requeue", true, func(w *world) act {
		w.failed("g", 2)
		_, err := lua.Reopen(w.Context(), w.c, w.p, "g")
		require.NoError(w, err)
		return func() error {
			_, err := lua.Requeue(w.Context(), w.c, w.p, "g")
			return err
		}
	}},
	{"lead", false, func(w *world) act {
		return func() error {
			_, err := lua.Lead(w.Context(), w.c, w.p, "w1", time.Minute)
			return err
		}
	}},
	{"expire", false, func(w *world) act {
		w.failed("g", 2)
		fence := w.fence()
		w.c.SAdd(w.Context(), w.p.Attention(), "g")
		w.c.SAdd(w.Context(), w.p.Active(), "acme")
		return func() error { return lua.Expire(w.Context(), w.c, w.p, "g", fence, false) }
	}},
	{"expire results", false, func(w *world) act {
		w.failed("g", 2)
		fence := w.fence()
		return func() error { return lua.Expire(w.Context(), w.c, w.p, "g", fence, true) }
	}},
	{"retire", false, func(w *world) act {
		w.failed("g", 1)
		w.c.Del(w.Context(), w.p.Ready("T"))
		return func() error {
			_, err := lua.Retire(w.Context(), w.c, w.p, "T", time.Now().Add(time.Hour))
			return err
		}
	}},
}

// large is a payload that does not travel with its job.
var large = []byte(`"` + strings.Repeat("x", 5000) + `"`)

func inAnHour() string { return timestamp(time.Now().Add(time.Hour)) }

// hold makes a group of n jobs that is held until a time, which has come.
func (w *world) hold(group string, n int) {
	w.Helper()
	w.create(group, "acme", "T", "run_at", inAnHour())
	w.append(group, n)
	require.NoError(w, w.c.ZAdd(w.Context(), w.p.Scheduled(), redis.Z{Score: 1, Member: group}).Err())
}

// spent makes a group of a tenant that has used a huge share of the window's permits.
func (w *world) spent(tenant string) {
	w.Helper()
	w.create("g", tenant, "T")
	w.append("g", 3)
	require.NoError(w, w.c.HSet(w.Context(), w.p.Tenant(tenant), "w", 0, "n", 1000).Err())
}

// overdue moves a tenant's parked jobs to the beginning of time.
func (w *world) overdue(tenant string) {
	w.Helper()
	for _, blob := range w.c.ZRange(w.Context(), w.p.NonReadyOf(tenant), 0, -1).Val() {
		require.NoError(w, w.c.ZAddXX(w.Context(), w.p.NonReadyOf(tenant), redis.Z{Score: 1, Member: blob}).Err())
	}
	require.NoError(w, w.c.ZAdd(w.Context(), w.p.NonReady(), redis.Z{Score: 1, Member: tenant}).Err())
}

// parked makes a group of n jobs that a worker has handed back.
func (w *world) parked(group string, n int) {
	w.Helper()
	w.create(group, "acme", "T")
	w.append(group, n)
	for _, j := range w.begin("T", "c", n) {
		require.Equal(w, lua.OutcomeReply{Owned: 1}, w.outcome("T", other(lua.OutcomeReleased, j, 0)))
	}
}

// failed makes a group of n jobs that has ended: all of them have failed, at their second attempt.
func (w *world) failed(group string, n int) {
	w.Helper()
	w.parked(group, n)
	w.seal(group)
	w.promoteAll("T", n)
	run := w.read("T", "c")
	w.start("T", run)
	for _, j := range run {
		require.Equal(w, lua.OutcomeReply{Owned: 1}, w.outcome("T", other(lua.OutcomeFailed, j, 0)))
	}
	w.advance(group)
	require.Equal(w, "FAILED", w.status(group))
}

// everywhere makes a group with a job at every place: waiting, parked for each reason, ready, in flight, done and failed.
func (w *world) everywhere(group string) {
	w.Helper()
	w.create(group, "acme", "T")
	w.append(group, 6)
	run := w.begin("T", "c", 4)
	w.outcome("T", done(run[0]))
	w.outcome("T", other(lua.OutcomeFailed, run[1], 0))
	w.outcome("T", other(lua.OutcomeRetry, run[2], time.Hour))
	w.admit("T", 1, noLimit)
	w.appendJobs(lua.AppendArgs{Group: group, Jobs: []lua.NewJob{{Payload: large, RunAt: time.Now().Add(time.Hour)}}})
	w.append(group, 1)
	require.NoError(w, w.c.HSet(w.Context(), w.p.Tenant("acme"), "w", 0, "n", 1000).Err())
	require.Equal(w, 1, w.admit("T", 1, limit(20)).Parked)
	require.Equal(w, "DFNIRNNW", w.states(group))
}

func timestamp(t time.Time) string { return fmtInt(t.UnixMilli()) }

func (w *world) appending(a lua.AppendArgs) act {
	return func() error {
		_, err := lua.Append(w.Context(), w.c, w.p, a)
		return err
	}
}

func (w *world) sealing(group string, total *int64) act {
	return func() error {
		_, err := lua.Seal(w.Context(), w.c, w.p, group, total)
		return err
	}
}

func (w *world) admitting(l lua.Limit) act {
	return func() error {
		_, err := lua.Admit(w.Context(), w.c, w.p, lua.AdmitArgs{Type: "T", Most: 10, Cap: 10, Limit: l, Seed: seed, LaneWeights: [3]int{6, 3, 1}})
		return err
	}
}

func (w *world) promoting(l lua.Limit) act {
	return func() error {
		_, err := lua.Promote(w.Context(), w.c, w.p, lua.PromoteArgs{Most: 10, Limit: l, Seed: seed, Caps: map[string]int{"T": 10}})
		return err
	}
}

func (w *world) starting(jobs []taken) act {
	g := lua.StartGroup{Group: jobs[0].Group}
	for _, j := range jobs {
		g.Jobs = append(g.Jobs, lua.StartJob{Entry: j.entry, Ordinal: j.Ordinal, Attempt: j.Attempt})
	}
	return func() error {
		_, err := lua.Start(w.Context(), w.c, w.p, "T", []lua.StartGroup{g})
		return err
	}
}

func (w *world) reporting(groups []lua.GroupOutcome) act {
	return func() error {
		_, err := lua.Outcome(w.Context(), w.c, w.p, "T", lua.Congestion{Base: time.Hour, Cap: time.Hour}, groups)
		return err
	}
}

func (w *world) reclaiming(maxLosses int) act {
	return func() error {
		_, err := lua.Reclaim(w.Context(), w.c, w.p, "T", 0, 100, maxLosses)
		return err
	}
}

func (w *world) reducing(e results) act {
	return func() error {
		_, err := lua.Reduce(w.Context(), w.c, w.p, lua.ReduceArgs{
			Group: e.group, Slot: "0", State: []byte("{}"), Lines: []byte(e.lines), Entries: []string{e.entry}, Ordinals: e.ordinals,
		})
		return err
	}
}

func (w *world) sweeping(group string) act {
	return func() error {
		_, err := lua.Sweep(w.Context(), w.c, w.p, group)
		return err
	}
}

// quiet takes the tokens away that scripts leave for idle roles, so that a script has to leave new ones.
func (w *world) quiet() {
	for _, role := range []string{"fetcher", "dispatcher", "watcher"} {
		require.NoError(w, w.c.Del(w.Context(), w.p.Wake(role)).Err())
	}
}

// An error does not undo what a script wrote before it, so that a key of the wrong type must be noticed before the first
// write: every key that a scene changes is spoiled in turn.
func TestWrongTypesChangeNothing(t *testing.T) {
	for _, s := range scenes {
		t.Run(s.name, func(t *testing.T) {
			both(t, func(w *world) {
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
					if _, stays := after[key]; err == nil && !stays {
						continue // it was to be deleted, whatever it is
					}
					require.Truef(w, redisx.IsWrongType(err), "%s is of the wrong type, the script says %v", key, err)
					require.Equal(w, spoiled, v.dump(), "%s is of the wrong type", key)
				}
			})
		})
	}
}

// changes are the keys that differ.
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

// spoil replaces a key by one of another type than content has.
func (w *world) spoil(key, content string) {
	w.Helper()
	require.NoError(w, w.c.Del(w.Context(), key).Err())
	if strings.HasPrefix(content, "list") {
		require.NoError(w, w.c.Set(w.Context(), key, "spoiled", 0).Err())
	} else {
		require.NoError(w, w.c.RPush(w.Context(), key, "spoiled").Err())
	}
}

// When Redis is out of memory, what lets work in is refused as a whole, and what works it off goes through as ever.
func TestOutOfMemory(t *testing.T) {
	t.Parallel()
	server := redistest.Server(t)
	c := server.Client()
	memory := func(bytes string) { require.NoError(t, c.ConfigSet(t.Context(), "maxmemory", bytes).Err()) }
	for i, s := range scenes {
		t.Run(s.name, func(t *testing.T) { // one after the other: they share the memory
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
				require.Truef(t, redisx.IsOOM(err), "%v", err)
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

// shape is a dump without its numbers, most of which are times.
func shape(dump map[string]string) map[string]string {
	out := map[string]string{}
	for key, v := range dump {
		out[key] = numbers.ReplaceAllString(snapshots.ReplaceAllString(v, "snapshot"), "#")
	}
	return out
}
