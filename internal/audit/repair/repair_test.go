package repair_test

import (
	"fmt"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/redis/go-redis/v9"
	"github.com/stretchr/testify/require"

	"github.com/bulkaction/bulkaction/internal/audit"
	"github.com/bulkaction/bulkaction/internal/audit/repair"
	"github.com/bulkaction/bulkaction/internal/jobs/ledger"
	"github.com/bulkaction/bulkaction/internal/redisx/keyspace"
	"github.com/bulkaction/bulkaction/internal/testkit/audittest"
	"github.com/bulkaction/bulkaction/internal/testkit/redistest"
	"github.com/bulkaction/bulkaction/internal/testkit/stagetest"
)

func TestMain(m *testing.M) { audittest.Main(m) }

func run(w *audittest.World) audit.Report {
	r, err := audit.Run(w.Context(), w.Conn, w.Space, audit.Options{})
	w.OK(err)
	return r
}

// beyondRepair names the tampers (ways to damage the data) after which a violation stays, because
// the right results or times are not known.
var beyondRepair = []string{
	"one state too many", "no states", "unknown state letter",
	"reduced to done", "done to reduced", "reduced to waiting in an ended group",
	"result line gone", "result line twice", "result line of another job", "unreadable result line", "result lines deleted, not expired",
	"partial aggregate gone", "partial aggregate with a higher count", "aggregate with a higher count", "unreadable partial aggregate",
	"in the wrong partition", "failed below its threshold", "unknown status", "no time of a state", "time of a later state",
	"times out of order", "unsealed",
	"callback without data", "dead callback without data", "dead callback with a body", "callback in the queue of another endpoint",
	"empty queue of callbacks",
	// The repair leaves these duplicates alone: the scripts dequeue and reduce skip them.
	"queued job twice", "queued job in two queues, among many", "results entry twice",
}

// repairAll repairs all data of the test's Redis. It returns the report of the violations that are
// left, and the results of the repair.
func repairAll(w *audittest.World) (audit.Report, []repair.Result) {
	var all []repair.Result
	r, err := repair.Run(w.Context(), w.Conn, w.Space, audit.Options{}, func(r repair.Result) { all = append(all, r) })
	w.OK(err)
	return r, all
}

// requireRepaired repairs the damage that a tamper has done. It requires that each violation is
// repaired or has a reason why not, and that a second repair does nothing.
func requireRepaired(w *audittest.World, tamper audittest.Tamper, before audit.Report) {
	r, repairs := repairAll(w)
	require.NotEmpty(w, repairs)
	left := slices.Contains(beyondRepair, tamper.Name)
	require.Equal(w, !left, r.OK, "%v\n%v", r.Violations, repairs)
	done := 0
	for _, v := range repairs {
		if v.Done {
			done++
			continue
		}
		require.True(w, left, "%v", v)
		require.Contains(w, v.Detail, "; ", "why")
	}
	require.True(w, left || done > 0)
	require.LessOrEqual(w, len(r.Violations), len(before.Violations))
	again, repairs := repairAll(w)
	require.Equal(w, r.Violations, again.Violations)
	for _, v := range repairs {
		require.False(w, v.Done, "%v", v)
	}
}

// TestTampering: an audit finds exactly the violations that a tamper causes, and what the tamper has
// done is repaired, unless it is one of beyondRepair.
func TestTampering(t *testing.T) {
	audittest.EachTamper(t, audittest.Tampers, func(w *audittest.World, tamper audittest.Tamper) {
		want := tamper.Do(w)
		slices.Sort(want)
		found := run(w)
		require.False(w, found.OK)
		require.Equal(w, want, audittest.Summary(found.Violations), "%v", found.Violations)
		requireRepaired(w, tamper, found)
	})
}

// TestRepairOfAMovingWorld: while scripts move jobs, the test three times deletes jobs and makes
// counts wrong, and then repairs. In the end there is no violation, and only jobs that the test has
// deleted, at least one of them, have failed as LOST.
func TestRepairOfAMovingWorld(t *testing.T) {
	url, prefix := redistest.Parallel(t)
	w := audittest.New(t, url, prefix, 2)
	c := audittest.NewChurn(w, []string{"a", "b", "c", "d", "e"}, []string{"T", "U"})
	stop := c.Run(t.Context(), false)
	t.Cleanup(func() { _ = stop() })
	vanished := map[string]bool{}
	note := func(group string, ordinal int64) { vanished[fmt.Sprintf("%s.%d", group, ordinal)] = true }
	for i := range 3 {
		// At the beginning there is nothing that could vanish.
		require.Eventually(t, func() bool { return c.Moves.Load() > int64(500*(i+1)) }, time.Minute, time.Millisecond)
		for _, p := range w.Space.All() {
			for _, typ := range c.Types {
				if entries := w.C.XRevRangeN(w.Context(), p.Ready(typ), "+", "-", 1).Val(); len(entries) > 0 {
					if w.C.XDel(w.Context(), p.Ready(typ), entries[0].ID).Val() == 1 {
						d, err := ledger.ParseJob(ledger.MessageBlob(entries[0].Values))
						w.OK(err)
						note(d.Group, d.Ordinal)
					}
				}
				w.Incr(p.Load(typ), "waiting", 1)
			}
			if ids := w.C.ZRange(w.Context(), p.Open(), 0, 0).Val(); len(ids) > 0 {
				for _, typ := range c.Types {
					if ordinal, ok := ledger.QueuedOrdinal(w.C.LPop(w.Context(), p.Queue(ids[0], typ)).Val()); ok {
						note(ids[0], ordinal)
					}
				}
				w.Incr(p.Group(ids[0]), "ready", int64(i+1))
				if w.C.HLen(w.Context(), p.Group(ids[0])).Val() == 1 { // the group had expired; Incr created it again
					w.OK(w.C.Del(w.Context(), p.Group(ids[0])).Err())
				}
			}
			w.AddNonReady(p, "a", audittest.Moving("nosuch", "T", 1, 0))
		}
		repairAll(w)
	}
	require.NoError(t, stop())
	r, _ := repairAll(w)
	require.Empty(t, r.Violations)
	lost := 0
	for _, p := range w.Space.All() {
		for _, m := range w.C.XRange(w.Context(), p.DeadLetters(), "-", "+").Val() {
			if m.Values["code"] == "LOST" {
				lost++
				require.Contains(t, vanished, m.Values["job"], "a healthy job was lost")
			}
		}
	}
	require.Positive(t, lost)
	t.Logf("%d moves, %d jobs vanished, %d ended as lost", c.Moves.Load(), len(vanished), lost)
}

// TestAuditAndRepairOfACluster: in a cluster of 3 masters, audits find a lost entry of a ready
// stream and wrong owner keys, and repairs leave no violation. (Each of their transactions uses
// keys of one hash slot.)
func TestAuditAndRepairOfACluster(t *testing.T) {
	t.Parallel()
	url, _ := redistest.Cluster(t, 3)
	w := audittest.New(t, url, "c:", 16)
	audittest.Inhabit(w)
	require.Empty(t, run(w).Violations)
	n := w.JobIn("all", ledger.Ready, 0)
	w.OK(w.C.XDel(w.Context(), w.All().Ready("T"), w.Entry("T", "all", n).ID).Err())
	w.OK(w.C.Del(w.Context(), w.Space.OfGroup("many").Owner("many")).Err())
	require.Equal(t, []string{audittest.Of(audit.LawLocation, "all", n), audittest.Whole(audit.LawRegistry, "many")}, audittest.Summary(run(w).Violations))

	w.OK(w.C.Set(w.Context(), w.Space.OfGroup("empty").Owner("empty"), "nobody", 0).Err())
	w.OK(w.C.Set(w.Context(), w.Space.OfGroup("gone").Owner("gone"), "acme", 0).Err())
	r, repairs := repairAll(w)
	require.Empty(t, r.Violations)
	require.Len(t, repairs, 3)
	require.Equal(t, "globex", w.Tenant("empty"))
	w.OK(audit.CheckOwnerKeys(w.Context(), w.Conn, w.Space, &r))
	require.Equal(t, []string{audittest.Whole(audit.LawRegistry, "gone")}, audittest.Summary(r.Violations))
	repairs = nil
	w.OK(repair.OwnerKeys(w.Context(), w.Conn, w.Space, func(r repair.Result) { repairs = append(repairs, r) }))
	require.Len(t, repairs, 1)
	r = run(w)
	w.OK(audit.CheckOwnerKeys(w.Context(), w.Conn, w.Space, &r))
	require.Empty(t, r.Violations)
}

// TestTornCreate: a Redis user loses a right while it creates a group. The group does not exist then:
// a second call completes it; without one, the repair takes its id off the lists.
func TestTornCreate(t *testing.T) {
	t.Parallel()
	server := redistest.Server(t)
	admin := server.Client()
	for _, command := range []string{"zadd", "xadd", "lpush", "hset"} {
		t.Run(command, func(t *testing.T) {
			require.NoError(t, admin.Do(t.Context(), "ACL", "SETUSER", command, "on", ">secret", "~*", "&*", "+@all", "-"+command).Err())
			w := audittest.New(t, server.URL(), command+":", 1)
			torn := audittest.New(t, strings.Replace(server.URL(), "redis://", "redis://"+command+":secret@", 1), command+":", 1)
			p := w.Space.Partition(0)
			create := func(w *audittest.World, id string) error {
				w.OK(w.C.SetNX(w.Context(), w.Space.OfGroup(id).Owner(id), "acme", 0).Err())
				_, err := ledger.Create(w.Context(), w.C, p, ledger.CreateArgs{Group: id, Tenant: "acme", Type: "T", Hash: "h", Fields: map[string]string{"lane": "normal"}})
				return err
			}
			for _, id := range []string{"again", "never"} {
				require.ErrorContains(t, create(torn, id), "can't run this command")
				require.Zero(t, w.C.Exists(t.Context(), p.Group(id)).Val())
			}
			w.OK(create(w, "again"))
			w.Append("again", audittest.Jobs(2))
			w.Work(p, "T")
			if command != "zadd" { // without it nothing is written
				require.Equal(t, []string{audittest.Whole(audit.LawRegistry, "never")}, audittest.Summary(run(w).Violations))
			}
			r, _ := repairAll(w)
			require.Empty(t, r.Violations)
			require.EqualValues(t, 1, r.Groups)
		})
	}
}

// TestTornSubmit: a Redis user loses a right while it stores a group with jobs. The group does not exist
// then: a second call completes it, and no job is there twice. The audit finds what is left, and
// the repair leaves the partition clean.
func TestTornSubmit(t *testing.T) {
	t.Parallel()
	server := redistest.Server(t)
	admin := server.Client()
	for _, command := range []string{"zadd", "rpush", "hincrby", "setrange", "xadd", "lpush", "hset"} {
		t.Run(command, func(t *testing.T) {
			require.NoError(t, admin.Do(t.Context(), "ACL", "SETUSER", command, "on", ">secret", "~*", "&*", "+@all", "-"+command).Err())
			w := audittest.New(t, server.URL(), command+":", 1)
			torn := audittest.New(t, strings.Replace(server.URL(), "redis://", "redis://"+command+":secret@", 1), command+":", 1)
			p := w.Space.Partition(0)
			keyed := audittest.Jobs(2)
			keyed[0].Key, keyed[1].Key = "a", "b"
			submit := func(w *audittest.World, id string) (ledger.AppendResult, error) {
				all, err := ledger.Submit(w.Context(), w.C, p, []ledger.AppendArgs{{
					Group: id, Limit: 10, Mode: ledger.AppendSeal, Request: ledger.SubmissionPrefix + "0", Jobs: keyed,
					Create: &ledger.CreateArgs{Group: id, Tenant: "acme", Type: "T", Hash: "h", Fields: map[string]string{"lane": "normal", "unique_keys": "1"}, Own: true},
				}})
				if err != nil {
					return ledger.AppendResult{}, err
				}
				return all[0], all[0].Err
			}
			for _, id := range []string{"again", "never"} {
				_, err := submit(torn, id)
				require.ErrorContains(t, err, "can't run this command")
				require.Zero(t, w.C.Exists(t.Context(), p.Group(id)).Val())
			}
			got, err := submit(w, "again")
			w.OK(err)
			require.False(t, got.Duplicate)
			require.EqualValues(t, 2, w.C.LLen(t.Context(), p.Queue("again", "T")).Val())
			require.Equal(t, "2", w.C.HGet(t.Context(), p.Group("again"), "waiting").Val())
			if command != "zadd" { // without it nothing but the owner is written
				require.Contains(t, audittest.Summary(run(w).Violations), audittest.Whole(audit.LawRegistry, "never"))
			}
			r, _ := repairAll(w)
			require.Empty(t, r.Violations)
			w.Work(p, "T")
			r = run(w)
			require.Empty(t, r.Violations)
		})
	}
}

// TestKeyOfWrongTypeDoesNotStopARepair: a key of the wrong Redis type is still reported after the
// repair. The lost job of the group good is repaired.
func TestKeyOfWrongTypeDoesNotStopARepair(t *testing.T) {
	for _, c := range audittest.WrongTypes {
		t.Run(c.Name, func(t *testing.T) {
			redistest.Both(t, func(t *testing.T, url, prefix string) {
				t.Parallel()
				w := audittest.New(t, url, prefix, 1)
				c.Do(w)
				r, repairs := repairAll(w)
				require.True(t, c.IsReported(w, r.Violations), "%v", r.Violations)
				require.NotContains(t, audittest.Summary(r.Violations), audittest.Of(audit.LawLocation, "good", 0))
				require.NotEmpty(t, repairs)
				if c.Group != "" {
					require.Equal(t, []string{audittest.Whole(audit.LawLocation, "bad")}, audittest.Summary(r.Violations))
				}
			})
		})
	}
}

// TestRepairedSuspendedJobsReturn: a tenant with suspended jobs is missing in the list of such tenants
// while its group is resumed. After the repair the jobs go on.
func TestRepairedSuspendedJobsReturn(t *testing.T) {
	w := stagetest.Parallel(t, 1)
	ctx := stagetest.Trusted(t)
	w.Jobs("g", "T", 1)
	w.Admit("T")
	_, err := w.Store.Pause(ctx, "g")
	require.NoError(t, err)
	require.NoError(t, w.Conn.Cmd.XGroupCreateMkStream(ctx, w.P.Ready("T"), keyspace.GroupWorkers, "0").Err())
	got, err := w.Conn.Cmd.XReadGroup(ctx, &redis.XReadGroupArgs{Group: keyspace.GroupWorkers, Consumer: "c",
		Streams: []string{w.P.Ready("T"), ">"}, Count: 1, Block: -1}).Result()
	require.NoError(t, err)
	m := got[0].Messages[0]
	d, err := ledger.ParseJob(ledger.MessageBlob(m.Values))
	require.NoError(t, err)
	_, err = ledger.Start(ctx, w.Conn.Cmd, w.P, "T", []ledger.StartGroup{{Group: "g",
		Jobs: []ledger.StartJob{{Entry: m.ID, Ordinal: d.Ordinal, Attempt: d.Attempt}}}})
	require.NoError(t, err)
	tenant := w.Group("g").Tenant
	require.EqualValues(t, 1, w.Conn.Cmd.ZCard(ctx, w.P.SuspendedOf(tenant)).Val())
	require.EqualValues(t, 1, w.Conn.Cmd.SRem(ctx, w.P.Suspended(), tenant).Val())
	_, err = w.Store.Resume(ctx, "g")
	require.NoError(t, err)
	r, err := repair.Run(ctx, w.Conn, w.Space, audit.Options{}, func(repair.Result) {})
	require.NoError(t, err)
	require.True(t, r.OK)
	for range 5 {
		_, err = ledger.Promote(ctx, w.Conn.Cmd, w.P, ledger.PromoteArgs{Most: 100, Seed: "01234567", FullWait: 1000, Cap: 100})
		require.NoError(t, err)
	}
	require.Zero(t, w.Conn.Cmd.ZCard(ctx, w.P.SuspendedOf(tenant)).Val())
}
