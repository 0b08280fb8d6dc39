package aggregator_test

import (
	"context"
	"encoding/json"
	"fmt"
	"hash/crc32"
	"io"
	"math"
	"strings"
	"sync/atomic"
	"testing"
	"time"

	"github.com/redis/go-redis/v9"
	"github.com/stretchr/testify/require"
	"go.uber.org/goleak"

	"github.com/bulkaction/bulkaction/api"
	"github.com/bulkaction/bulkaction/internal/access/auth"
	"github.com/bulkaction/bulkaction/internal/jobs/aggregator"
	"github.com/bulkaction/bulkaction/internal/jobs/groups"
	"github.com/bulkaction/bulkaction/internal/jobs/ledger"
	"github.com/bulkaction/bulkaction/internal/messages"
	"github.com/bulkaction/bulkaction/internal/redisx/keyspace"
	"github.com/bulkaction/bulkaction/internal/stage"
	"github.com/bulkaction/bulkaction/internal/testkit/redistest"
	"github.com/bulkaction/bulkaction/internal/testkit/stagetest"
	"github.com/bulkaction/bulkaction/reducer"
)

func TestMain(m *testing.M) { goleak.VerifyTestMain(m, redistest.IgnoreServers()) }

func config() aggregator.Config {
	return aggregator.Config{Block: 20 * time.Millisecond, Lease: stagetest.Patience}
}

func runAggregator(w *stagetest.World, cfg aggregator.Config, id string, reducers *reducer.Registry) (stop func()) {
	w.T.Helper()
	return w.Run(aggregator.New(stagetest.Process(w, id), cfg, reducers))
}

// submitCosts submits a group of n jobs and makes them done, each with the cost 0.1. The group's
// aggregates are the sum of the costs and their number. Each results entry has up to perEntry
// results.
func submitCosts(w *stagetest.World, group string, n, perEntry int) {
	w.T.Helper()
	w.Submit(messages.SubmitGroup{
		ID: group, Tenant: "acme", Type: "T", Jobs: stagetest.Numbered(n),
		Aggregate: []messages.Aggregate{{As: "cost", Op: "sum", Field: "data.cost"}, {As: "n", Op: "count"}},
	})
	w.Admit("T")
	jobs := w.Take("T", "w", n)
	for len(jobs) > 0 {
		k := min(perEntry, len(jobs))
		w.Done(`{"cost":0.1}`, jobs[:k]...)
		jobs = jobs[k:]
	}
}

// awaitReduced waits until the n jobs of a group are reduced. It requires the right aggregate and
// counts, and each result exactly once.
func awaitReduced(w *stagetest.World, group string, n int) {
	w.T.Helper()
	ctx := context.WithoutCancel(w.T.Context())
	w.Await("all jobs to be reduced", func() bool {
		now, err := ledger.ReadProgress(ctx, w.Conn.Cmd, []ledger.GroupRef{{Partition: w.P, ID: group}})
		return err == nil && now[0].Reduced >= int64(n)
	})
	g := w.Group(group)
	require.Equal(w.T, map[string]json.RawMessage{
		"cost": json.RawMessage(strings.TrimSuffix(fmt.Sprintf("%d.%d", n/10, n%10), ".0")), "n": json.RawMessage(fmt.Sprint(n)),
	}, g.Aggregate)
	seen := map[int64]bool{}
	require.NoError(w.T, w.Store.Results(auth.Trust(ctx), group, func(line []byte) error {
		r := stagetest.Decode[api.Result](w.T, string(line))
		require.False(w.T, seen[r.Ordinal], "job %d has two results", r.Ordinal)
		seen[r.Ordinal] = true
		return nil
	}))
	require.Len(w.T, seen, n)
	require.Equal(w.T, api.Counts{Accepted: int64(n), Done: int64(n)}, g.Counts)
}

// awaitEmptyStream waits until the results stream is empty, and requires that no entry is pending.
func awaitEmptyStream(w *stagetest.World) {
	w.T.Helper()
	w.Await("an empty stream", func() bool {
		return w.Conn.Cmd.XLen(context.WithoutCancel(w.T.Context()), w.P.ResultStream()).Val() == 0
	})
	require.Zero(w.T, w.Pending(w.P.ResultStream(), keyspace.GroupAggregator))
}

func TestResultsBecomeTheAggregate(t *testing.T) {
	stagetest.Both(t, func(w *stagetest.World) {
		stop := runAggregator(w, config(), "a", reducer.NewRegistry())
		for i := range 5 {
			submitCosts(w, fmt.Sprint("g", i), 23, 7)
		}
		for i := range 5 {
			awaitReduced(w, fmt.Sprint("g", i), 23)
		}
		awaitEmptyStream(w)
		stop()
	})
}

// TestGroupsWithoutAggregates: they have no partial aggregates. Results that only seem to be of such a
// group are aggregated.
func TestGroupsWithoutAggregates(t *testing.T) {
	stagetest.Both(t, func(w *stagetest.World) {
		ctx := context.WithoutCancel(w.T.Context())
		submitCosts(w, "g", 23, 7)
		entries, err := w.Conn.Cmd.XRange(ctx, w.P.ResultStream(), "-", "+").Result()
		require.NoError(w.T, err)
		for _, e := range entries {
			require.Empty(w.T, e.Values["p"])
			require.NoError(w.T, w.Conn.Cmd.XAdd(ctx, &redis.XAddArgs{Stream: w.P.ResultStream(),
				Values: []any{"g", "g", "l", e.Values["l"], "t", "", "p", "acme"}}).Err())
			require.NoError(w.T, w.Conn.Cmd.XDel(ctx, w.P.ResultStream(), e.ID).Err())
		}
		stop := runAggregator(w, config(), "a", reducer.NewRegistry())
		w.Jobs("plain", "T", 3)
		w.Admit("T")
		w.Done("1", w.Take("T", "w", 3)...)
		awaitEmptyStream(w)
		stop()
		awaitReduced(w, "g", 23)
		require.Zero(w.T, w.Conn.Cmd.Exists(ctx, w.P.Aggregate("plain")).Val())
	})
}

// TestASpoiledGroupHoldsUpNoOther: a group whose hash lacks its tenant makes a script call fail; the
// others of the call are reduced all the same.
func TestASpoiledGroupHoldsUpNoOther(t *testing.T) {
	w := stagetest.Parallel(t, 1)
	ctx := context.WithoutCancel(t.Context())
	for _, id := range []string{"a", "spoiled", "z"} {
		w.Jobs(id, "T", 1)
	}
	w.Admit("T")
	w.Done("1", w.Take("T", "w", 3)...)
	require.NoError(t, w.Conn.Cmd.HDel(ctx, w.P.Group("spoiled"), "tenant").Err())
	runAggregator(w, config(), "a", reducer.NewRegistry())
	for _, id := range []string{"a", "z"} {
		w.Await("the end of "+id, func() bool { return w.Group(id).Status == api.StatusCompleted })
	}
	require.EqualValues(t, 1, w.Conn.Cmd.XLen(ctx, w.P.ResultStream()).Val())
}

// TestTheEndOfAGroupEndsThePause: an aggregator that waits for more results takes the wake token that
// the end of a group's jobs has left.
func TestTheEndOfAGroupEndsThePause(t *testing.T) {
	stagetest.Both(t, func(w *stagetest.World) {
		stop := runAggregator(w, config(), "a", reducer.NewRegistry())
		require.NoError(w.T, w.Conn.Cmd.LPush(w.T.Context(), w.P.Wake("aggregator"), 1).Err())
		for i := range 3 {
			submitCosts(w, fmt.Sprint("g", i), 3, 3)
			awaitReduced(w, fmt.Sprint("g", i), 3)
		}
		w.Await("the token to be taken", func() bool {
			return w.Conn.Cmd.LLen(context.WithoutCancel(w.T.Context()), w.P.Wake("aggregator")).Val() == 0
		})
		stop()
	})
}

// stopAfterRead is a hook of the Redis client. It ends the role's context as soon as the role has
// read entries.
type stopAfterRead struct {
	redistest.NoHook
	stop func()
}

func (h stopAfterRead) ProcessHook(next redis.ProcessHook) redis.ProcessHook {
	return func(ctx context.Context, cmd redis.Cmder) error {
		err := next(ctx, cmd)
		if cmd.Name() == "xreadgroup" && err == nil {
			h.stop()
		}
		return err
	}
}

// TestStopReducesWhatWasRead: an aggregator that stops reduces the entries that it has read.
// Otherwise they would wait for a lease.
func TestStopReducesWhatWasRead(t *testing.T) {
	stagetest.Both(t, func(w *stagetest.World) {
		submitCosts(w, "g", 20, 5)
		ctx, stop := context.WithCancel(context.WithoutCancel(w.T.Context()))
		defer stop()
		conn := w.Connect()
		conn.Block.AddHook(stopAfterRead{stop: stop})
		require.NoError(w.T, aggregator.New(stage.Process{ID: "a", Conn: conn, Space: w.Space, Tel: w.Tel}, config(), reducer.NewRegistry()).Run(ctx))
		require.Zero(w.T, w.Pending(w.P.ResultStream(), keyspace.GroupAggregator))
		awaitReduced(w, "g", 20)
	})
}

// TestEntriesThatNobodyOwnsAreReduced: XGROUP DELCONSUMER removes the reader of some entries, and
// XGROUP SETID skips others, so that none is in a pending list. All are reduced nevertheless.
func TestEntriesThatNobodyOwnsAreReduced(t *testing.T) {
	w := stagetest.Parallel(t, 1)
	submitCosts(w, "read", 20, 5)
	w.ReadResults("dead")
	submitCosts(w, "unread", 20, 5)
	results := w.P.ResultStream()
	require.NoError(t, w.Conn.Cmd.XGroupDelConsumer(t.Context(), results, keyspace.GroupAggregator, "dead").Err())
	require.NoError(t, w.Conn.Cmd.XGroupSetID(t.Context(), results, keyspace.GroupAggregator, "$").Err())
	cfg := config()
	cfg.Lease = 100 * time.Millisecond
	runAggregator(w, cfg, "a", reducer.NewRegistry())
	awaitReduced(w, "read", 20)
	awaitReduced(w, "unread", 20)
	awaitEmptyStream(w)

	// XGROUP SETID delivers all entries that are left again: each counts once.
	submitCosts(w, "again", 20, 5)
	require.NoError(t, w.Conn.Cmd.XGroupSetID(t.Context(), results, keyspace.GroupAggregator, "0").Err())
	awaitReduced(w, "again", 20)
	awaitEmptyStream(w)
}

// TestLargestIDInTheResultsStream: Redis adds no entry behind one with the largest possible id.
// While the aggregator runs, the stream takes entries again, and 20 later results are reduced.
func TestLargestIDInTheResultsStream(t *testing.T) {
	w := stagetest.Parallel(t, 1)
	require.NoError(t, w.Conn.Cmd.XAdd(t.Context(), &redis.XAddArgs{
		Stream: w.P.ResultStream(), ID: "18446744073709551615-18446744073709551615", Values: []string{"g", "gone", "l", `{"ordinal":1}`}}).Err())
	cfg := config()
	cfg.Lease = 100 * time.Millisecond
	runAggregator(w, cfg, "a", reducer.NewRegistry())
	w.Await("the results stream to take entries", func() bool {
		return w.Conn.Cmd.XAdd(t.Context(), &redis.XAddArgs{
			Stream: w.P.ResultStream(), Values: []string{"g", "gone", "l", `{"ordinal":1}`}}).Err() == nil
	})
	submitCosts(w, "g", 20, 5)
	awaitReduced(w, "g", 20)
	awaitEmptyStream(w)
}

// TestRepeatedEntriesCountOnce: results whose entry is added a second time count once, whether the
// entry holds them alone or together with other results.
func TestRepeatedEntriesCountOnce(t *testing.T) {
	stagetest.Both(t, func(w *stagetest.World) {
		ctx := context.WithoutCancel(w.T.Context())
		submitCosts(w, "g", 40, 10)
		entries, err := w.Conn.Cmd.XRange(ctx, w.P.ResultStream(), "-", "+").Result()
		require.NoError(w.T, err)
		require.Len(w.T, entries, 4)
		repeat := func(lines string) {
			require.NoError(w.T, w.Conn.Cmd.XAdd(ctx, &redis.XAddArgs{Stream: w.P.ResultStream(), Values: []string{"g", "g", "l", lines, "t", ""}}).Err())
		}
		var all []string
		for _, e := range entries {
			repeat(e.Values["l"].(string))
			all = append(all, e.Values["l"].(string))
		}
		repeat(strings.Join(all, "\n"))
		runAggregator(w, config(), "a", reducer.NewRegistry())
		awaitReduced(w, "g", 40)
		awaitEmptyStream(w)
		repeat(all[2])
		awaitEmptyStream(w)
		awaitReduced(w, "g", 40)
	})
}

func TestTwoAggregatorsReduceOneGroup(t *testing.T) {
	t.Parallel()
	same := map[uint32]string{} // a process name for each partial aggregate
	var pair [2]string
	for i := 0; pair[0] == ""; i++ {
		name := fmt.Sprint("a", i)
		partial := crc32.ChecksumIEEE([]byte(name)) % 16
		if same[partial] != "" {
			pair = [2]string{same[partial], name}
		}
		same[partial] = name
	}
	for name, ids := range map[string][2]string{"different partial aggregates": {same[3], same[4]}, "the same partial aggregate": pair} {
		t.Run(name, func(t *testing.T) {
			w := stagetest.Parallel(t, 1)
			submitCosts(w, "g", 1000, 3)
			// Each aggregator claims at once the entries that the other one is reducing.
			cfg := config()
			cfg.Lease = time.Millisecond
			for _, id := range ids {
				runAggregator(w, cfg, id, reducer.NewRegistry())
			}
			awaitReduced(w, "g", 1000)
			awaitEmptyStream(w)
		})
	}
}

// TestEntriesOfADeadAggregatorAreClaimed: after the lease, another aggregator reduces the entries
// that a dead one has read. An entry whose results were reduced already does not count twice.
func TestEntriesOfADeadAggregatorAreClaimed(t *testing.T) {
	stagetest.Both(t, func(w *stagetest.World) {
		ctx := context.WithoutCancel(w.T.Context())
		submitCosts(w, "g", 20, 10)
		read := w.ReadResults("dead")
		require.Len(w.T, read, 2)
		// The first entry was reduced, but its acknowledgement was lost.
		registry := reducer.NewRegistry()
		plan, err := ledger.AggregatePlan(registry, `[{"as":"cost","op":"sum","field":"data.cost"},{"as":"n","op":"count"}]`)
		require.NoError(w.T, err)
		state, args := plan.New(), ledger.ReduceArgs{Group: "g", Partial: "9", Lines: []byte(read[0].Values["l"].(string))}
		for line := range strings.SplitSeq(string(args.Lines), "\n") {
			r := stagetest.Decode[api.Result](w.T, line)
			require.NoError(w.T, state.Add(reducer.Result{Ordinal: r.Ordinal, Data: r.Data}))
			args.Ordinals = append(args.Ordinals, r.Ordinal)
		}
		args.State, err = state.Encode()
		require.NoError(w.T, err)
		r, err := ledger.Reduce(ctx, w.Conn.Cmd, w.P, args)
		require.NoError(w.T, err)
		require.Equal(w.T, ledger.ReduceOK, r[0].State)

		cfg := config()
		cfg.Lease = 200 * time.Millisecond
		runAggregator(w, cfg, "a", registry)
		awaitReduced(w, "g", 20)
		awaitEmptyStream(w)
	})
}

func TestUnreadableEntriesAreQuarantined(t *testing.T) {
	stagetest.Both(t, func(w *stagetest.World) {
		ctx := context.WithoutCancel(w.T.Context())
		submitCosts(w, "g", 4, 2)
		for _, values := range [][]string{
			{"g", "g", "l", "rubbish", "t", ""},
			{"g", "g", "l", `{"data":1}`},
			{"g", "g", "l", `{"ordinal":-1,"data":1}`},
			{"x", "y"},
		} {
			require.NoError(w.T, w.Conn.Cmd.XAdd(ctx, &redis.XAddArgs{Stream: w.P.ResultStream(), Values: values}).Err())
		}
		runAggregator(w, config(), "a", reducer.NewRegistry())
		awaitReduced(w, "g", 4)
		w.Await("four quarantined entries", func() bool { return len(w.Quarantined()) == 4 })
		awaitEmptyStream(w)
	})
}

// TestResultsOfADeletedGroupAreDropped: results of a group that no longer exists are removed from
// the stream, and leave no keys.
func TestResultsOfADeletedGroupAreDropped(t *testing.T) {
	stagetest.Both(t, func(w *stagetest.World) {
		ctx := context.WithoutCancel(w.T.Context())
		require.NoError(w.T, w.Conn.Cmd.XAdd(ctx, &redis.XAddArgs{
			Stream: w.P.ResultStream(), Values: []string{"g", "gone", "l", `{"ordinal":0,"duration_ms":1,"attempts":1,"data":1}`, "t", ""}}).Err())
		runAggregator(w, config(), "a", reducer.NewRegistry())
		awaitEmptyStream(w)
		require.Zero(w.T, w.Conn.Cmd.Exists(ctx, w.P.Aggregate("gone"), w.P.Results("gone"), w.P.States("gone"), w.P.Group("gone")).Val())
		require.Empty(w.T, w.Quarantined())
	})
}

// TestLargeResultsAreReducedInPieces: 60 results of 60 KiB become several chunks of result lines,
// each of at most a megabyte and one result.
func TestLargeResultsAreReducedInPieces(t *testing.T) {
	w := stagetest.Parallel(t, 1)
	const n = 60
	w.Jobs("g", "T", n)
	w.Admit("T")
	for _, j := range w.Take("T", "w", n) {
		w.Done(`"`+strings.Repeat("x", 60<<10)+`"`, j)
	}
	runAggregator(w, config(), "a", reducer.NewRegistry())
	awaitEmptyStream(w)
	chunks, err := w.Conn.Cmd.LRange(t.Context(), w.P.Results("g"), 0, -1).Result()
	require.NoError(t, err)
	require.Greater(t, len(chunks), 2)
	for _, c := range chunks {
		require.Less(t, len(c), 1<<20+64<<10)
	}
	require.Equal(t, n, strings.Count(strings.Join(chunks, "\n"), "\n")+1)
}

// registryWithLongest returns a registry with the reducer "longest", which returns the longest of
// the words that are the jobs' results.
func registryWithLongest(t *testing.T) *reducer.Registry {
	t.Helper()
	registry := reducer.NewRegistry()
	require.NoError(t, registry.Register("longest", reducer.MapReduce(
		func(r reducer.Result) (word string, err error) { return word, json.Unmarshal(r.Data, &word) },
		func(a, b string) string {
			if len(b) > len(a) {
				return b
			}
			return a
		},
	)))
	return registry
}

// TestOnlyAggregatorsWithTheReducerReduceTheGroup: an aggregator that lacks a group's reducer
// leaves the group's results in the stream, and reduces those of other groups.
func TestOnlyAggregatorsWithTheReducerReduceTheGroup(t *testing.T) {
	w := stagetest.Parallel(t, 1)
	registry := registryWithLongest(t)
	w.Store = groups.New(groups.Config{}, w.Conn, w.Space, w.Tel, registry, nil)
	w.Submit(messages.SubmitGroup{
		ID: "words", Tenant: "acme", Type: "T", Jobs: stagetest.Numbered(3), Aggregate: []messages.Aggregate{{As: "word", Op: "longest"}},
	})
	w.Admit("T")
	for i, j := range w.Take("T", "w", 3) {
		w.Done([]string{`"aa"`, `"a"`, `17`}[i], j) // the reducer leaves out the last one, which is not a word
	}
	cfg := config()
	cfg.Lease = 200 * time.Millisecond
	stop := runAggregator(w, cfg, "without", reducer.NewRegistry())
	submitCosts(w, "g", 10, 2)
	awaitReduced(w, "g", 10)
	require.EqualValues(t, 3, w.Conn.Cmd.XLen(t.Context(), w.P.ResultStream()).Val())
	stop()

	runAggregator(w, cfg, "with", registry)
	awaitEmptyStream(w)
	require.Equal(t, map[string]json.RawMessage{"word": json.RawMessage(`"aa"`)}, w.Group("words").Aggregate)
}

// cutOff is a hook of the Redis client that fails all commands outside of pipelines while on is
// set.
type cutOff struct {
	redistest.NoHook
	on     atomic.Bool
	failed atomic.Int64 // commands that have failed
}

func (c *cutOff) ProcessHook(next redis.ProcessHook) redis.ProcessHook {
	return func(ctx context.Context, cmd redis.Cmder) error {
		if c.on.Load() {
			c.failed.Add(1)
			cmd.SetErr(io.ErrUnexpectedEOF)
			return io.ErrUnexpectedEOF
		}
		return next(ctx, cmd)
	}
}

// TestPartialOfADeletedGroupIsNotUsedAgain: an aggregator remembers a partial aggregate of the
// deleted group g, which it has written once. Another process, which uses the partial aggregate of
// the same number, writes it once for a new group g. Then the first one reduces the other half of
// the new group's jobs, and the group has the right aggregate.
func TestPartialOfADeletedGroupIsNotUsedAgain(t *testing.T) {
	w := stagetest.Parallel(t, 1)
	ctx := t.Context()
	process, cut := stagetest.Process(w, "a"), &cutOff{}
	process.Conn.Block.AddHook(cut)
	w.Run(aggregator.New(process, config(), reducer.NewRegistry()))
	submitCosts(w, "g", 30, 30)
	awaitReduced(w, "g", 30)
	fence, err := ledger.Lead(ctx, w.Conn.Cmd, w.P, "test", time.Minute)
	require.NoError(t, err)
	_, err = ledger.Advance(ctx, w.Conn.Cmd, w.P, "g")
	require.NoError(t, err)
	require.NoError(t, ledger.Expire(ctx, w.Conn.Cmd, w.P, "g", fence, false))

	cut.on.Store(true)
	w.Await("the end of its last read", func() bool { return cut.failed.Load() > 0 })
	w.Submit(messages.SubmitGroup{
		ID: "g", Tenant: "acme", Type: "T", Jobs: stagetest.Numbered(20),
		Aggregate: []messages.Aggregate{{As: "cost", Op: "sum", Field: "data.cost"}, {As: "n", Op: "count"}},
	})
	w.Admit("T")
	jobs := w.Take("T", "w", 20)
	w.Done(`{"cost":0.1}`, jobs[:10]...)
	stop := runAggregator(w, config(), "a", reducer.NewRegistry())
	w.Await("half of the jobs", func() bool {
		now, err := ledger.ReadProgress(ctx, w.Conn.Cmd, []ledger.GroupRef{{Partition: w.P, ID: "g"}})
		return err == nil && now[0].Reduced == 10
	})
	stop()
	cut.on.Store(false)
	w.Done(`{"cost":0.1}`, jobs[10:]...)
	awaitReduced(w, "g", 20)
}

// TestResultsGoToThoseWhoHaveTheReducer: with a long lease, an aggregator that lacks a group's reducer
// and one that has it live side by side. The first one does not keep the results that it reads,
// and does not claim them again.
func TestResultsGoToThoseWhoHaveTheReducer(t *testing.T) {
	w := stagetest.Parallel(t, 1)
	registry := registryWithLongest(t)
	w.Store = groups.New(groups.Config{}, w.Conn, w.Space, w.Tel, registry, nil)
	w.Submit(messages.SubmitGroup{
		ID: "words", Tenant: "acme", Type: "T", Jobs: stagetest.Numbered(40), Aggregate: []messages.Aggregate{{As: "word", Op: "longest"}},
	})
	w.Admit("T")
	jobs := w.Take("T", "w", 40)
	runAggregator(w, config(), "without", reducer.NewRegistry())
	for _, j := range jobs[:20] {
		w.Done(`"aa"`, j)
	}
	w.Await("the results are left to others", func() bool {
		pending, err := w.Conn.Cmd.XPending(t.Context(), w.P.ResultStream(), keyspace.GroupAggregator).Result()
		return err == nil && pending.Consumers["reducers:longest"] == 20
	})
	runAggregator(w, config(), "with", registry)
	for _, j := range jobs[20:] {
		w.Done(`"aaa"`, j)
	}
	awaitEmptyStream(w)
	require.JSONEq(t, `"aaa"`, string(w.Group("words").Aggregate["word"]))
}

// TestAReducerThatFailsForGoodEndsItsAggregate: the reducer's state can't be encoded. The results
// are reduced all the same, the group's other aggregate is right, and the group says why.
func TestAReducerThatFailsForGoodEndsItsAggregate(t *testing.T) {
	w := stagetest.Parallel(t, 1)
	registry := reducer.NewRegistry()
	require.NoError(t, registry.Register("ratio", reducer.MapReduce(
		func(reducer.Result) (float64, error) { return math.NaN(), nil },
		func(a, b float64) float64 { return a / b },
	)))
	w.Store = groups.New(groups.Config{}, w.Conn, w.Space, w.Tel, registry, nil)
	w.Submit(messages.SubmitGroup{
		ID: "g", Tenant: "acme", Type: "T", Jobs: stagetest.Numbered(3),
		Aggregate: []messages.Aggregate{{As: "r", Op: "ratio"}, {As: "n", Op: "count"}},
	})
	w.Admit("T")
	for _, j := range w.Take("T", "w", 3) {
		w.Done(`1`, j)
	}
	runAggregator(w, config(), "a", registry)
	awaitEmptyStream(w)
	g := w.Group("g")
	require.Equal(t, map[string]json.RawMessage{"r": json.RawMessage("null"), "n": json.RawMessage("3")}, g.Aggregate)
	require.Contains(t, g.AggregateErrors["r"], "NaN")
}

// TestStopReducesWhatIsInTheStream: an aggregator that is stopped at once reduces the results that
// are in the stream.
func TestStopReducesWhatIsInTheStream(t *testing.T) {
	w := stagetest.Parallel(t, 1)
	submitCosts(w, "g", 10, 2)
	ctx, cancel := context.WithCancel(t.Context())
	cancel()
	require.NoError(t, aggregator.New(stagetest.Process(w, "a"), config(), reducer.NewRegistry()).Run(ctx))
	awaitReduced(w, "g", 10)
	require.Zero(t, w.Conn.Cmd.XLen(t.Context(), w.P.ResultStream()).Val())
}
