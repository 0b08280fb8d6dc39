package watcher_test

import (
	"context"
	"encoding/json"
	"fmt"
	"io"
	"math"
	"slices"
	"strings"
	"sync/atomic"
	"testing"
	"time"

	"github.com/ThreeDotsLabs/watermill/message"
	"github.com/redis/go-redis/v9"
	"github.com/stretchr/testify/require"
	"go.uber.org/goleak"

	"github.com/bulkaction/bulkaction/api"
	"github.com/bulkaction/bulkaction/internal/access/auth"
	"github.com/bulkaction/bulkaction/internal/jobs/aggregator"
	"github.com/bulkaction/bulkaction/internal/jobs/groups"
	"github.com/bulkaction/bulkaction/internal/jobs/ledger"
	"github.com/bulkaction/bulkaction/internal/jobs/watcher"
	"github.com/bulkaction/bulkaction/internal/messages"
	"github.com/bulkaction/bulkaction/internal/redisx/wm"
	"github.com/bulkaction/bulkaction/internal/stage"
	"github.com/bulkaction/bulkaction/internal/stage/presence"
	"github.com/bulkaction/bulkaction/internal/testkit/redistest"
	"github.com/bulkaction/bulkaction/internal/testkit/stagetest"
	"github.com/bulkaction/bulkaction/reducer"
)

func TestMain(m *testing.M) { goleak.VerifyTestMain(m, redistest.IgnoreServers()) }

// run starts a watcher with the process id id. If cfg sets no Interval, it is an hour: after a
// first pass over all open groups, the watcher advances only dirty groups.
func run(w *stagetest.World, cfg watcher.Config, id string) (stop func()) {
	w.T.Helper()
	conn := w.Connect()
	events, err := wm.NewPublisher(conn)
	require.NoError(w.T, err)
	if cfg.Interval == 0 {
		cfg.Interval = time.Hour
	}
	return w.Run(watcher.New(stage.Process{ID: id, Conn: conn, Space: w.Space, Tel: w.Tel}, cfg, w.Store, events))
}

// events returns the published events of groups, oldest first.
func events(w *stagetest.World) []api.Event {
	w.T.Helper()
	entries, err := w.Conn.Cmd.XRange(context.WithoutCancel(w.T.Context()), w.Space.Events(), "-", "+").Result()
	require.NoError(w.T, err)
	var all []api.Event
	for _, e := range entries {
		event := stagetest.Decode[api.Event](w.T, e.Values["data"].(string))
		require.Equal(w.T, event.Type, e.Values["type"])
		require.Equal(w.T, event.ID, e.Values["id"])
		all = append(all, event)
	}
	return all
}

// ids returns the ids of a group's published events, without the group's id at their beginning:
// "1.created".
func ids(w *stagetest.World, group string) []string {
	w.T.Helper()
	var all []string
	for _, e := range events(w) {
		if e.Group.ID == group {
			all = append(all, strings.TrimPrefix(e.ID, group+"."))
		}
	}
	return all
}

// awaitIDs waits until events with these ids were published for the group, and requires that there
// are no others.
func awaitIDs(w *stagetest.World, group string, want ...string) {
	w.T.Helper()
	var got []string
	w.Await("events of "+group, func() bool { got = ids(w, group); return len(got) >= len(want) })
	require.Equal(w.T, want, got)
}

func TestGroupGoesThroughItsStates(t *testing.T) {
	stagetest.Both(t, func(w *stagetest.World) {
		run(w, watcher.Config{}, "w")
		w.Jobs("g", "T", 3)
		awaitIDs(w, "g", "1.created", "1.dispatched")
		w.Admit("T")
		jobs := w.Take("T", "c", 3)
		awaitIDs(w, "g", "1.created", "1.dispatched", "1.running")
		w.Done(`{"cost":1}`, jobs[:2]...)
		w.Fail("BOOM", jobs[2])
		awaitIDs(w, "g", "1.created", "1.dispatched", "1.running", "1.aggregating")
		w.Reduce()
		awaitIDs(w, "g", "1.created", "1.dispatched", "1.running", "1.aggregating", "1.completed")

		all := events(w)
		last := all[len(all)-1]
		require.Equal(w.T, "group.completed", last.Type)
		require.Equal(w.T, api.StatusCompleted, last.Group.Status)
		require.Equal(w.T, api.Counts{Accepted: 3, Done: 2, Failed: 1}, last.Group.Counts)
		require.Equal(w.T, map[string]int64{"BOOM": 1}, last.Group.FailuresByCode)
		require.True(w.T, slices.IsSortedFunc(all, func(a, b api.Event) int { return a.At.Compare(b.At) }))
		shown := w.Group("g")
		require.Equal(w.T, shown.Timestamps, last.Group.Timestamps)
		for _, e := range all {
			require.Equal(w.T, shown.Timestamps[strings.TrimPrefix(e.Type, "group.")], e.At)
		}

		// The next round runs the failed jobs and has events of its own.
		_, err := w.Store.Retry(auth.Trust(context.WithoutCancel(w.T.Context())), "g", api.RetryChoice{})
		require.NoError(w.T, err)
		w.AwaitCounts("g", api.Counts{Accepted: 3, Done: 2, Waiting: 1})
		w.Finish("T")
		awaitIDs(w, "g", "1.created", "1.dispatched", "1.running", "1.aggregating", "1.completed",
			"2.created", "2.dispatched", "2.running", "2.aggregating", "2.completed")
		require.Equal(w.T, api.Counts{Accepted: 3, Done: 3}, w.Counts("g"))
		// The watcher removes an entry of the outbox after it has published the event.
		w.Await("the outbox to be empty", func() bool {
			return w.Conn.Cmd.XLen(context.WithoutCancel(w.T.Context()), w.P.Outbox()).Val() == 0
		})
	})
}

func TestGroupEndsAsCompletedOrFailed(t *testing.T) {
	t.Parallel()
	half := 0.5
	for name, tt := range map[string]struct {
		jobs, failed int
		threshold    *float64
		want         string
	}{
		"no jobs":           {0, 0, nil, "1.completed"},
		"some failed":       {4, 3, nil, "1.completed"},
		"all failed":        {4, 4, nil, "1.failed"},
		"below a threshold": {4, 1, &half, "1.completed"},
		"at a threshold":    {4, 2, &half, "1.failed"},
	} {
		t.Run(name, func(t *testing.T) {
			w := stagetest.Parallel(t, 1)
			w.Submit(messages.SubmitGroup{ID: "g", Tenant: "acme", Type: "T", FailureThreshold: tt.threshold, Jobs: stagetest.Numbered(tt.jobs)})
			w.Admit("T")
			if tt.jobs > 0 {
				jobs := w.Take("T", "c", tt.jobs)
				w.Fail("BOOM", jobs[:tt.failed]...)
				w.Done("null", jobs[tt.failed:]...)
				w.Reduce()
			}
			run(w, watcher.Config{}, "w")
			awaitIDs(w, "g", "1.created", "1.dispatched", "1.running", "1.aggregating", tt.want)
		})
	}
}

// TestGroupsThatEndedWithoutAWatcher: many groups have ended while no watcher ran. The first one that
// starts publishes all their events, each group's in the order of its states, while other groups
// advance, and leaves the outbox empty.
func TestGroupsThatEndedWithoutAWatcher(t *testing.T) {
	w := stagetest.Parallel(t, 1)
	const n = 400
	for i := range n {
		w.Jobs(fmt.Sprint("g", i), "T", 1)
	}
	for range n / 100 {
		w.Finish("T")
	}
	w.Jobs("other", "T", 1)
	w.Admit("T")
	w.Fail("BOOM", w.Take("T", "c", 1)...)
	run(w, watcher.Config{}, "w")
	awaitIDs(w, "other", "1.created", "1.dispatched", "1.running", "1.aggregating", "1.failed")
	w.Await("an empty outbox", func() bool { return w.Conn.Cmd.XLen(context.WithoutCancel(t.Context()), w.P.Outbox()).Val() == 0 })
	byGroup := map[string][]string{}
	for _, e := range events(w) {
		byGroup[e.Group.ID] = append(byGroup[e.Group.ID], e.Type)
		require.Equal(t, e.Type, "group."+strings.ToLower(string(e.Group.Status)))
	}
	for i := range n {
		require.Equal(t, []string{"group.created", "group.dispatched", "group.running", "group.aggregating", "group.completed"}, byGroup[fmt.Sprint("g", i)])
	}
}

// TestASpoiledGroupHoldsUpNoOther: another program has spoiled the hash of a group. The other groups
// advance.
func TestASpoiledGroupHoldsUpNoOther(t *testing.T) {
	w := stagetest.Parallel(t, 1)
	for _, id := range []string{"no-tenant", "no-number", "g"} {
		w.Jobs(id, "T", 1)
		require.NoError(t, w.Conn.Cmd.SAdd(t.Context(), w.P.Dirty(), id).Err())
	}
	require.NoError(t, w.Conn.Cmd.HDel(t.Context(), w.P.Group("no-tenant"), "tenant").Err())
	require.NoError(t, w.Conn.Cmd.HSet(t.Context(), w.P.Group("no-number"), "failed", "many").Err())
	run(w, watcher.Config{Interval: 10 * time.Millisecond}, "w")
	awaitIDs(w, "g", "1.created", "1.dispatched")
	w.Await("the group to be advanced", func() bool {
		return !w.Conn.Cmd.SIsMember(context.WithoutCancel(t.Context()), w.P.Dirty(), "g").Val()
	})
}

// TestRepeatedEventHasTheSameID: an entry of the outbox comes a second time, as after a watcher
// that died after it had published the event. The event is published again with the same id and
// content.
func TestRepeatedEventHasTheSameID(t *testing.T) {
	w := stagetest.Parallel(t, 1)
	w.Jobs("g", "T", 1)
	outbox, err := w.Conn.Cmd.XRange(t.Context(), w.P.Outbox(), "-", "+").Result()
	require.NoError(t, err)
	require.Len(t, outbox, 1)
	run(w, watcher.Config{}, "w")
	awaitIDs(w, "g", "1.created", "1.dispatched")
	require.NoError(t, w.Conn.Cmd.XAdd(t.Context(), &redis.XAddArgs{Stream: w.P.Outbox(), Values: outbox[0].Values}).Err())
	w.Finish("T")
	w.Await("the repeated events", func() bool { return len(ids(w, "g")) == 7 })
	all := events(w)
	slices.SortStableFunc(all, func(a, b api.Event) int { return strings.Compare(a.ID, b.ID) })
	i := slices.IndexFunc(all, func(e api.Event) bool { return e.ID == "g.1.created" })
	require.Equal(t, all[i], all[i+1])
}

// TestUnreadableEventStaysUntilItIsQuarantined: an unreadable entry of the outbox is removed only
// when it is quarantined. Until then it does not delay the events behind it.
func TestUnreadableEventStaysUntilItIsQuarantined(t *testing.T) {
	w := stagetest.Parallel(t, 1)
	require.NoError(t, w.Conn.Cmd.Set(t.Context(), w.P.Quarantine(), "of the wrong type", 0).Err())
	broken, err := w.Conn.Cmd.XAdd(t.Context(), &redis.XAddArgs{Stream: w.P.Outbox(), Values: []string{"x", "rubbish"}}).Result()
	require.NoError(t, err)
	w.Jobs("g", "T", 1)
	run(w, watcher.Config{}, "w")
	awaitIDs(w, "g", "1.created", "1.dispatched")
	left := func() (ids []string) {
		entries, err := w.Conn.Cmd.XRange(context.WithoutCancel(t.Context()), w.P.Outbox(), "-", "+").Result()
		require.NoError(t, err)
		for _, e := range entries {
			ids = append(ids, e.ID)
		}
		return ids
	}
	w.Await("only the unreadable entry to be left", func() bool { return slices.Equal(left(), []string{broken}) })
	require.NoError(t, w.Conn.Cmd.Del(t.Context(), w.P.Quarantine()).Err())
	w.Await("the unreadable entry to be removed", func() bool { return len(left()) == 0 })
	require.Len(t, w.Quarantined(), 1)
	require.Contains(t, w.Quarantined()[0], "rubbish")
	require.Len(t, ids(w, "g"), 2)
}

// TestOneWatcherLeads: only one of several watchers leads: each group's events are published once.
// When the leader stops, another watcher takes over.
func TestOneWatcherLeads(t *testing.T) {
	w := stagetest.Parallel(t, 1)
	const n = 30
	stops := []func(){run(w, watcher.Config{}, "a"), run(w, watcher.Config{}, "b"), run(w, watcher.Config{}, "c")}
	play := func(from int) {
		for i := range n {
			w.Jobs(fmt.Sprint("g", from+i), "T", 2)
		}
		w.Finish("T")
		for i := range n {
			awaitIDs(w, fmt.Sprint("g", from+i), "1.created", "1.dispatched", "1.running", "1.aggregating", "1.completed")
		}
	}
	play(0)
	leader := stagetest.Leader(t, w.Conn.Cmd, w.P)
	stops[leader[0]-'a']()
	play(n)
	require.NotEqual(t, leader, stagetest.Leader(t, w.Conn.Cmd, w.P))
}

// TestDeadLeaderIsFenced: a leader has died. Another watcher takes over when the leader lease ends,
// and the script expire refuses the dead leader's fencing number.
func TestDeadLeaderIsFenced(t *testing.T) {
	w := stagetest.Parallel(t, 1)
	const lease = 1500 * time.Millisecond
	fence, err := ledger.Lead(t.Context(), w.Conn.Cmd, w.P, "dead", lease)
	require.NoError(t, err)
	ends := time.Now().Add(lease)
	w.Jobs("g", "T", 1)
	run(w, watcher.Config{}, "w")
	awaitIDs(w, "g", "1.created", "1.dispatched")
	// The margin of 50 ms is for the difference between the clocks of Redis and the test.
	require.WithinRange(t, time.Now(), ends.Add(-50*time.Millisecond), ends.Add(stagetest.Patience))
	require.ErrorIs(t, ledger.Expire(t.Context(), w.Conn.Cmd, w.P, "g", fence, false), ledger.ErrFenced)
}

// TestFailuresAreReducedInEachRound: aggregates over failed or ended jobs are computed at the end
// of each round, from the jobs that are failed then: failures of an earlier round that were retried
// do not count.
func TestFailuresAreReducedInEachRound(t *testing.T) {
	stagetest.Both(t, func(w *stagetest.World) {
		w.Submit(messages.SubmitGroup{ID: "g", Tenant: "acme", Type: "T", Jobs: stagetest.Numbered(4), Aggregate: []messages.Aggregate{
			{As: "done", Op: "count"}, {As: "failed", Op: "count", Over: "failed"}, {As: "ended", Op: "count", Over: "ended"},
			{As: "codes", Op: "count_by", Field: "data.code", Over: "failed"}, {As: "ms", Op: "max", Field: "duration_ms", Over: "failed"},
		}})
		run(w, watcher.Config{}, "w")
		reduce := aggregator.Config{Block: 50 * time.Millisecond, Lease: stagetest.Patience}
		w.Run(aggregator.New(stagetest.Process(w, "a"), reduce, reducer.NewRegistry()))
		values := func() string {
			b, err := json.Marshal(w.Group("g").Aggregate)
			require.NoError(w.T, err)
			return string(b)
		}
		status := func(want api.Status) {
			w.T.Helper()
			w.Await(string(want), func() bool { return w.Group("g").Status == want })
		}
		w.Admit("T")
		jobs := w.Take("T", "c", 4)
		w.Fail("BOOM", jobs[0], jobs[1])
		w.Fail("OTHER", jobs[2])
		w.Done("null", jobs[3])
		status(api.StatusCompleted)
		counted := `"done":%d,"ended":%d,"failed":%d,"ms":null}`
		require.Equal(w.T, `{"codes":{"BOOM":2,"OTHER":1},`+fmt.Sprintf(counted, 1, 4, 3), values())

		_, err := w.Store.Retry(auth.Trust(context.WithoutCancel(w.T.Context())), "g", api.RetryChoice{})
		require.NoError(w.T, err)
		w.Await("the jobs to wait again", func() bool { return w.Counts("g").Waiting == 3 })
		require.Equal(w.T, `{"codes":{},`+fmt.Sprintf(counted, 1, 1, 0), values(), "the failures of the last round do not count")
		w.Admit("T")
		jobs = w.Take("T", "c", 3)
		w.Fail("LAST", jobs[0])
		w.Done("null", jobs[1:]...)
		status(api.StatusCompleted)
		require.Equal(w.T, `{"codes":{"LAST":1},`+fmt.Sprintf(counted, 3, 4, 1), values())
	})
}

// TestFailuresOfACancelledGroupAreReduced: jobs that failed before the cancellation are in the
// aggregates over failed and ended jobs.
func TestFailuresOfACancelledGroupAreReduced(t *testing.T) {
	stagetest.Both(t, func(w *stagetest.World) {
		w.Submit(messages.SubmitGroup{ID: "g", Tenant: "acme", Type: "T", Jobs: stagetest.Numbered(4), Aggregate: []messages.Aggregate{
			{As: "failed", Op: "count", Over: "failed"}, {As: "ended", Op: "count", Over: "ended"},
		}})
		w.Admit("T")
		jobs := w.Take("T", "c", 3)
		w.Fail("BOOM", jobs[0], jobs[1])
		w.Done("null", jobs[2])
		reduce := aggregator.Config{Block: 50 * time.Millisecond, Lease: stagetest.Patience}
		w.Run(aggregator.New(stagetest.Process(w, "a"), reduce, reducer.NewRegistry()))
		require.NoError(w.T, ledger.Cancel(context.WithoutCancel(w.T.Context()), w.Conn.Cmd, w.P, "g"))
		run(w, watcher.Config{}, "w")
		w.Await("the failures in the aggregate", func() bool {
			g := w.Group("g")
			return string(g.Aggregate["failed"]) == "2" && string(g.Aggregate["ended"]) == "3"
		})
		w.Await("the group is not dirty", func() bool {
			return w.Conn.Cmd.SCard(context.WithoutCancel(w.T.Context()), w.P.Dirty()).Val() == 0
		})
	})
}

func registryOf(t *testing.T, ops ...string) *reducer.Registry {
	registry := reducer.NewRegistry()
	for _, op := range ops {
		require.NoError(t, registry.Register(op, reducer.MapReduce(
			func(reducer.Result) (int, error) { return 1, nil }, func(a, b int) int { return a + b })))
	}
	return registry
}

// TestACancelledGroupWaitsForItsReducer: no watcher has the reducer of a cancelled group's failures
// at first.
func TestACancelledGroupWaitsForItsReducer(t *testing.T) {
	w := stagetest.Parallel(t, 1)
	lacks := w.Store
	w.Store = groups.New(groups.Config{}, w.Conn, w.Space, w.Tel, registryOf(t, "own"), nil)
	has := w.Store
	w.Submit(messages.SubmitGroup{ID: "g", Tenant: "acme", Type: "T", Jobs: stagetest.Numbered(3),
		Aggregate: []messages.Aggregate{{As: "x", Op: "own", Over: "failed"}}})
	w.Admit("T")
	w.Fail("BOOM", w.Take("T", "c", 2)...)
	require.NoError(t, ledger.Cancel(stagetest.Trusted(t), w.Conn.Cmd, w.P, "g"))
	w.Store = lacks
	stop := run(w, watcher.Config{Interval: 100 * time.Millisecond}, "lacks")
	awaitIDs(w, "g", "1.created", "1.dispatched", "1.running", "1.cancelled")
	stop()
	w.Store = has
	run(w, watcher.Config{Interval: 100 * time.Millisecond}, "has")
	w.Await("the aggregate", func() bool { return string(w.Group("g").Aggregate["x"]) == "2" })
}

// brokenScan fails the second HSCAN.
type brokenScan struct {
	redistest.NoHook
	scans *atomic.Int32
}

func (h brokenScan) ProcessHook(next redis.ProcessHook) redis.ProcessHook {
	return func(ctx context.Context, cmd redis.Cmder) error {
		if cmd.Name() == "hscan" && h.scans.Add(1) == 2 {
			cmd.SetErr(io.EOF)
			return io.EOF
		}
		return next(ctx, cmd)
	}
}

// TestFailuresAreReducedAfterAnError: the reduction of many failures of a cancelled group breaks off
// once.
func TestFailuresAreReducedAfterAnError(t *testing.T) {
	w := stagetest.Parallel(t, 1)
	w.Submit(messages.SubmitGroup{ID: "g", Tenant: "acme", Type: "T", Jobs: stagetest.Numbered(601),
		Aggregate: []messages.Aggregate{{As: "x", Op: "count", Over: "failed"}}})
	w.Admit("T")
	w.Fail("BOOM", w.Take("T", "c", 600)...)
	require.NoError(t, ledger.Cancel(stagetest.Trusted(t), w.Conn.Cmd, w.P, "g"))
	hook := brokenScan{scans: &atomic.Int32{}}
	w.Conn.Cmd.AddHook(hook)
	run(w, watcher.Config{Interval: 100 * time.Millisecond}, "w")
	w.Await("the aggregate", func() bool { return string(w.Group("g").Aggregate["x"]) == "600" })
	require.GreaterOrEqual(t, hook.scans.Load(), int32(2))
}

// TestWatchersWithHalfOfTheReducers: no watcher has both reducers of a group. They don't hand the
// partition to each other, and other groups go on.
func TestWatchersWithHalfOfTheReducers(t *testing.T) {
	w := stagetest.Parallel(t, 1)
	w.Store = groups.New(groups.Config{}, w.Conn, w.Space, w.Tel, registryOf(t, "x", "y"), nil)
	w.Submit(messages.SubmitGroup{ID: "g", Tenant: "acme", Type: "T", Jobs: stagetest.Numbered(2),
		Aggregate: []messages.Aggregate{{As: "x", Op: "x", Over: "failed"}, {As: "y", Op: "y", Over: "failed"}}})
	w.Admit("T")
	w.Fail("BOOM", w.Take("T", "c", 2)...)
	for _, op := range []string{"x", "y"} {
		w.Store = groups.New(groups.Config{}, w.Conn, w.Space, w.Tel, registryOf(t, op), nil)
		run(w, watcher.Config{Interval: 100 * time.Millisecond}, "has-"+op)
	}
	w.Await("both watchers", func() bool {
		live, err := presence.Stages(stagetest.Trusted(t), w.Conn, w.Space)
		return err == nil && len(live) == 2 && w.Group("g").Status == api.StatusAggregating
	})
	leader := stagetest.Leader(t, w.Conn.Cmd, w.P)
	for i := range 5 {
		id := fmt.Sprint("other-", i)
		w.Jobs(id, "U", 1)
		w.Await("another group's next state", func() bool { return w.Group(id).Status == api.StatusDispatched })
	}
	require.Equal(t, leader, stagetest.Leader(t, w.Conn.Cmd, w.P))
}

// TestTheLastEventHasTheAggregate: the leader lacks the reducer of a group that ends, and another
// watcher has it: that one publishes the event.
func TestTheLastEventHasTheAggregate(t *testing.T) {
	w := stagetest.Parallel(t, 1)
	registry := registryOf(t, "own")
	lacks := w.Store
	w.Store = groups.New(groups.Config{}, w.Conn, w.Space, w.Tel, registry, nil)
	w.Submit(messages.SubmitGroup{ID: "g", Tenant: "acme", Type: "T", Jobs: stagetest.Numbered(2),
		Aggregate: []messages.Aggregate{{As: "x", Op: "own"}}})
	w.Admit("T")
	jobs := w.Take("T", "c", 2)
	has := w.Store
	w.Store = lacks
	run(w, watcher.Config{Interval: 200 * time.Millisecond}, "lacks")
	w.Await("the group runs", func() bool { return w.Group("g").Status == api.StatusRunning })
	w.Store = has
	run(w, watcher.Config{Interval: 200 * time.Millisecond}, "has")
	w.Await("the second watcher", func() bool {
		ok, err := presence.HasReducers(stagetest.Trusted(t), w.Conn, w.Space, "watcher", []string{"own"})
		return err == nil && ok
	})
	w.Run(aggregator.New(stagetest.Process(w, "a"), aggregator.Config{Block: 50 * time.Millisecond, Lease: stagetest.Patience}, registry))
	w.Done("1", jobs...)
	awaitIDs(w, "g", "1.created", "1.dispatched", "1.running", "1.aggregating", "1.completed")
	all := events(w)
	last := all[len(all)-1].Group
	require.Equal(t, "2", string(last.Aggregate["x"]))
	require.Empty(t, last.AggregateErrors)
}

// TestAReducerOfFailuresThatFailsForGood: the group ends, or stays cancelled, and says why the
// aggregate is null.
func TestAReducerOfFailuresThatFailsForGood(t *testing.T) {
	w := stagetest.Parallel(t, 1)
	registry := reducer.NewRegistry()
	require.NoError(t, registry.Register("ratio", reducer.MapReduce(
		func(reducer.Result) (float64, error) { return math.NaN(), nil }, func(a, _ float64) float64 { return a })))
	w.Store = groups.New(groups.Config{}, w.Conn, w.Space, w.Tel, registry, nil)
	for _, id := range []string{"ends", "cancelled"} {
		w.Submit(messages.SubmitGroup{ID: id, Tenant: "acme", Type: "T", Jobs: stagetest.Numbered(2), Aggregate: []messages.Aggregate{
			{As: "r", Op: "ratio", Over: "failed"}, {As: "n", Op: "count", Over: "failed"},
		}})
	}
	w.Admit("T")
	for _, j := range w.Take("T", "c", 4) {
		if j.Group == "ends" || j.Ordinal == 0 {
			w.Fail("BOOM", j)
		}
	}
	require.NoError(t, ledger.Cancel(stagetest.Trusted(t), w.Conn.Cmd, w.P, "cancelled"))
	run(w, watcher.Config{}, "w")
	for id, status := range map[string]api.Status{"ends": api.StatusFailed, "cancelled": api.StatusCancelled} {
		w.Await(id, func() bool { g := w.Group(id); return g.Status == status && len(g.AggregateErrors) > 0 })
		g := w.Group(id)
		require.Contains(t, g.AggregateErrors["r"], "NaN")
		require.Equal(t, "null", string(g.Aggregate["r"]))
		require.NotEqual(t, "0", string(g.Aggregate["n"]))
	}
}

// TestAWatcherWithoutTheReducerHandsOver: the leader lacks the reducer of a group's failures, and
// another watcher has it. There are more failures than are reduced at once.
func TestAWatcherWithoutTheReducerHandsOver(t *testing.T) {
	w := stagetest.Parallel(t, 1)
	registry := registryOf(t, "own")
	lacks := w.Store
	w.Store = groups.New(groups.Config{}, w.Conn, w.Space, w.Tel, registry, nil)
	const n = 600
	w.Submit(messages.SubmitGroup{ID: "g", Tenant: "acme", Type: "T", Jobs: stagetest.Numbered(n),
		Aggregate: []messages.Aggregate{{As: "x", Op: "own", Over: "failed"}}})
	w.Admit("T")
	w.Fail("BOOM", w.Take("T", "c", n)...)
	has := w.Store
	w.Store = lacks
	run(w, watcher.Config{Interval: 200 * time.Millisecond}, "lacks")
	w.Await("the group waits", func() bool { return w.Group("g").Status == api.StatusAggregating })
	w.Store = has
	run(w, watcher.Config{Interval: 200 * time.Millisecond}, "has")
	w.Await("the end", func() bool { return w.Group("g").Status == api.StatusFailed })
	require.Equal(t, "600", string(w.Group("g").Aggregate["x"]))
}

// TestGroupThatIsNotMarkedDirtyAdvances: a group that could advance and is not marked dirty is
// found by the pass over all open groups.
func TestGroupThatIsNotMarkedDirtyAdvances(t *testing.T) {
	w := stagetest.Parallel(t, 1)
	for i := range 250 { // several pages
		w.Jobs(fmt.Sprint("g", i), "T", 1)
	}
	require.NoError(t, w.Conn.Cmd.Del(t.Context(), w.P.Dirty()).Err())
	run(w, watcher.Config{Interval: 100 * time.Millisecond}, "w")
	for i := range 250 {
		group := fmt.Sprint("g", i)
		w.Await("the dispatch of "+group, func() bool { return w.Group(group).Status == api.StatusDispatched })
	}
	w.Finish("T")
	require.NoError(t, w.Conn.Cmd.Del(t.Context(), w.P.Dirty()).Err())
	w.Await("the end of the last group", func() bool { return w.Group("g249").Status == api.StatusCompleted })
}

// TestCompletesACancellation: if the process that cancels a group dies before all its jobs are
// cancelled, the watcher cancels the rest.
func TestCompletesACancellation(t *testing.T) {
	stagetest.Both(t, func(w *stagetest.World) {
		ctx := context.WithoutCancel(w.T.Context())
		w.Jobs("g", "T", 300)
		w.Admit("T")
		w.Done("null", w.Take("T", "c", 10)...)
		require.NoError(w.T, ledger.Cancel(ctx, w.Conn.Cmd, w.P, "g"))
		run(w, watcher.Config{}, "w")
		w.AwaitCounts("g", api.Counts{Accepted: 300, Done: 10, Cancelled: 290})
		awaitIDs(w, "g", "1.created", "1.dispatched", "1.running", "1.cancelled")
		w.Await("the group among the ended ones", func() bool {
			return w.Conn.Cmd.ZScore(ctx, w.P.Ended(), "g").Err() == nil && w.Conn.Cmd.ZScore(ctx, w.P.Open(), "g").Err() != nil
		})
	})
}

// TestPublishesAGroupWithoutItsAggregate: the event of a group whose aggregate this process can't
// compute is published without the aggregate.
func TestPublishesAGroupWithoutItsAggregate(t *testing.T) {
	w := stagetest.Parallel(t, 1)
	registry := registryOf(t, "own")
	knows := groups.New(groups.Config{}, w.Conn, w.Space, w.Tel, registry, nil)
	_, err := knows.Submit(auth.Trust(t.Context()), &messages.SubmitGroup{
		ID: "g", Tenant: "acme", Type: "T", Seal: true, Aggregate: []messages.Aggregate{{As: "x", Op: "own"}}}, groups.Origin{At: time.Now()})
	require.NoError(t, err)
	run(w, watcher.Config{}, "w")
	awaitIDs(w, "g", "1.created", "1.dispatched", "1.running", "1.aggregating", "1.completed")
	require.Equal(t, "null", string(events(w)[0].Group.Aggregate["x"]))
	require.Contains(t, events(w)[0].Group.AggregateErrors["x"], `op "own" is unknown`)
	require.Equal(t, "acme", events(w)[0].Group.Tenant)
}

// failing is a publisher whose first calls fail.
type failing struct {
	message.Publisher
	left int
}

func (f *failing) Publish(topic string, m ...*message.Message) error {
	if f.left--; f.left >= 0 {
		return fmt.Errorf("publish: %w", context.DeadlineExceeded)
	}
	return f.Publisher.Publish(topic, m...)
}

func TestPublishesUntilItWorks(t *testing.T) {
	w := stagetest.Parallel(t, 1)
	publisher, err := wm.NewPublisher(w.Conn)
	require.NoError(t, err)
	w.Jobs("g", "T", 1)
	w.Run(watcher.New(stagetest.Process(w, "w"), watcher.Config{Interval: time.Hour}, w.Store, &failing{publisher, 3}))
	awaitIDs(w, "g", "1.created", "1.dispatched")
}

// TestOneWatcherShowsTheQueues: of two watchers, only one shows the gauge of the jobs in queues,
// because processes that both show it would count each job twice. The other one shows it after the
// first has stopped.
func TestOneWatcherShowsTheQueues(t *testing.T) {
	w := stagetest.Parallel(t, 4)
	w.Jobs("g", "T", 7)
	const gauge = `bulk_action_backlog{type="T"} 7`
	var stops []func()
	var shown []func() bool
	for _, id := range []string{"a", "b"} {
		measured(w)
		tel := w.Tel
		shown = append(shown, func() bool {
			w.Tel = tel
			return strings.Contains(metrics(w), gauge)
		})
		stops = append(stops, run(w, watcher.Config{}, id))
	}
	w.Await("the gauge of one process", func() bool { return shown[0]() || shown[1]() })
	first := 0
	if shown[1]() {
		first = 1
	}
	other := 1 - first
	require.False(t, shown[other](), "two processes show the same jobs")
	stops[first]()
	w.Await("the gauge of the other process", shown[other])
}

func TestJobsWithoutProcessorFail(t *testing.T) {
	w := stagetest.Parallel(t, 1)
	const timeout = time.Second
	served := func() {
		require.NoError(t, presence.PublishWorker(t.Context(), w.Conn, w.Space, presence.WorkerReport{
			WorkerStatus: api.WorkerStatus{ID: "live", Types: []string{"SERVED"}, SeenAt: time.Now()}}))
	}
	served()
	w.Jobs("served", "SERVED", 5)
	w.Jobs("unserved", "UNSERVED", 250)
	w.Admit("SERVED")
	began := time.Now()
	measured(w)
	run(w, watcher.Config{NoProcessorTimeout: timeout}, "w")
	w.Feed(stagetest.Patience, "UNSERVED")
	w.Await("the failure of the jobs", func() bool {
		served()
		return w.Counts("unserved") == api.Counts{Accepted: 250, Failed: 250}
	})
	g := w.Group("unserved")
	require.Equal(t, map[string]int64{"NO_PROCESSOR": 250}, g.FailuresByCode)
	letter := w.DeadLetters()[0]
	require.Equal(t, "NO_PROCESSOR", letter.Code)
	require.Contains(t, letter.Error, "start a worker that has a processor for it")
	w.Await("the metric", func() bool {
		return strings.Contains(metrics(w), `bulk_action_watcher_dead_letter_total{code="NO_PROCESSOR"} 250`)
	})
	require.Contains(t, metrics(w), `bulk_action_worker_dead_letter_total{reason="no_processor"} 250`)
	// The margin of 50 ms is for the difference between the clocks of Redis and the test.
	require.GreaterOrEqual(t, w.DeadLetters()[249].At.Sub(began), timeout-50*time.Millisecond)
	require.Equal(t, api.Counts{Accepted: 5, Ready: 5}, w.Counts("served"))
	awaitIDs(w, "unserved", "1.created", "1.dispatched", "1.running", "1.aggregating", "1.failed")

	// NoProcessorTimeout counts from when the type has jobs, not from when its last worker
	// disappeared.
	w.Await("a long time without jobs", func() bool { return time.Since(began) > 4*timeout })
	w.Jobs("later", "UNSERVED", 1)
	submitted := time.Now()
	w.AwaitCounts("later", api.Counts{Accepted: 1, Failed: 1})
	require.GreaterOrEqual(t, time.Since(submitted), timeout-50*time.Millisecond)
}

// afterReading is a hook of the Redis client. It calls stop after a pipeline with HGETALL was
// answered.
type afterReading struct {
	redistest.NoHook
	stop func()
}

func (h afterReading) ProcessPipelineHook(next redis.ProcessPipelineHook) redis.ProcessPipelineHook {
	return func(ctx context.Context, cmds []redis.Cmder) error {
		err := next(ctx, cmds)
		if slices.ContainsFunc(cmds, func(c redis.Cmder) bool { return c.Name() == "hgetall" }) {
			h.stop()
		}
		return err
	}
}

// TestStopBetweenReadAndEvent: a watcher that is stopped after it has read a group's details and
// before it has published the event leaves the event in the outbox: the next watcher publishes it.
func TestStopBetweenReadAndEvent(t *testing.T) {
	w := stagetest.Parallel(t, 1)
	w.Submit(messages.SubmitGroup{ID: "g", Type: "T", Jobs: stagetest.Numbered(1), Seal: true,
		Aggregate: []messages.Aggregate{{As: "n", Op: "count"}}})
	ctx, cancel := context.WithCancel(t.Context())
	defer cancel()
	conn := w.Connect()
	conn.Cmd.AddHook(afterReading{stop: cancel})
	events, err := wm.NewPublisher(conn)
	require.NoError(t, err)
	require.NoError(t, watcher.New(stage.Process{ID: "stopped", Conn: conn, Space: w.Space, Tel: w.Tel}, watcher.Config{Interval: time.Hour}, w.Store, events).Run(ctx))
	require.Error(t, ctx.Err(), "the watcher must have been stopped by the hook")
	defer run(w, watcher.Config{}, "next")()
	w.Await("the event", func() bool { return len(ids(w, "g")) > 0 })
}
