package ledger_test

import (
	"errors"
	"fmt"
	"slices"
	"strings"
	"testing"

	"github.com/redis/go-redis/v9"
	"github.com/stretchr/testify/require"

	"github.com/bulkaction/bulkaction/internal/jobs/ledger"
	"github.com/bulkaction/bulkaction/internal/messages"
	"github.com/bulkaction/bulkaction/internal/redisx/keyspace"
	"github.com/bulkaction/bulkaction/reducer"
)

// reported creates a sealed group of n done jobs. Each job is reported in a call of its own. It
// returns their results as read from the stream: one entry a job.
func (w *world) reported(group string, n int) []results {
	w.Helper()
	w.fill(group, n, "acme", "T")
	w.seal(group)
	for _, j := range w.begin("T", "c", n) {
		w.outcome("T", done(j))
	}
	return w.readResults(1000)
}

func (w *world) reduce(a ledger.ReduceArgs) ledger.ReduceReply {
	w.Helper()
	r, err := ledger.Reduce(w.Context(), w.c, w.p, a)
	require.NoError(w, err)
	require.NoError(w, r[0].Err)
	return r[0]
}

func TestReduce(t *testing.T) {
	onStores(t, func(w *world) {
		e := w.reported("g", 3)
		w.c.Del(w.Context(), w.p.Dirty())
		a := ledger.ReduceArgs{
			Group: "g", Partial: "7", State: []byte(`{"n":2}`), Lines: []byte(e[0].lines + "\n" + e[2].lines), Entries: []string{e[0].entry, e[2].entry}, Ordinals: []int64{0, 2},
		}
		began := w.now()
		r := w.reduce(a)
		require.Equal(w, ledger.ReduceReply{State: ledger.ReduceOK, Version: r.Version}, r)
		require.GreaterOrEqual(w, r.Version, began, "the time of the write")
		require.Equal(w, "ADA", w.states("g"))
		require.Equal(w, map[string]int64{"done": 3}, w.ledger("g"))
		require.Equal(w, map[string]string{"partial:7": `{"n":2}`, "version:7": fmt.Sprint(r.Version)},
			w.c.HGetAll(w.Context(), w.p.Aggregate("g")).Val())
		require.Equal(w, []string{string(a.Lines)}, w.c.LRange(w.Context(), w.p.Results("g"), 0, -1).Val())
		require.Equal(w, []string{"a " + e[1].entry}, w.pending(w.p.ResultStream()))
		require.Zero(w, w.c.Exists(w.Context(), w.p.Dirty()).Val(), "one result is missing yet")

		// The same call again has an old version and is refused. With the new version it is
		// refused, too, because its jobs are already reduced.
		w.unchanged(func() {
			require.Equal(w, ledger.ReduceReply{State: ledger.ReduceVersion, Version: r.Version}, w.reduce(a))
			a.Version = r.Version
			require.Equal(w, ledger.ReduceReply{State: ledger.ReduceBad, Bad: []int64{0, 2}}, w.reduce(a))
		})

		// A batch is reduced as a whole or not at all: the caller must leave out bad results.
		b := ledger.ReduceArgs{Group: "g", Partial: "0", State: []byte(`{"n":1}`), Lines: []byte(e[1].lines), Entries: []string{e[1].entry}, Ordinals: []int64{0, 1}}
		w.unchanged(func() { require.Equal(w, ledger.ReduceReply{State: ledger.ReduceBad, Bad: []int64{0}}, w.reduce(b)) })
		b.Ordinals = []int64{1}
		require.Equal(w, ledger.ReduceOK, w.reduce(b).State)
		require.Equal(w, "AAA", w.states("g"))
		w.ledger("g")
		require.Equal(w, "COMPLETED", w.status("g"), "the last one ends the group")
		require.Empty(w, w.c.SMembers(w.Context(), w.p.Dirty()).Val())
		require.Zero(w, w.c.XLen(w.Context(), w.p.ResultStream()).Val())
	})
}

// TestReduceAfterALoss: a partial aggregate is deleted, as by a failover, and begun again. A call
// with its version from before the loss is refused.
func TestReduceAfterALoss(t *testing.T) {
	onStores(t, func(w *world) {
		e := w.reported("g", 3)
		lost := w.reduceInto("0", e[0])
		require.NoError(w, w.c.Del(w.Context(), w.p.Aggregate("g")).Err())
		now := w.reduceInto("0", e[1])
		w.unchanged(func() {
			late := ledger.ReduceArgs{Group: "g", Partial: "0", Version: lost.Version, State: []byte("2"), Entries: []string{e[2].entry}, Ordinals: e[2].ordinals}
			require.Equal(w, ledger.ReduceReply{State: ledger.ReduceVersion, Version: now.Version}, w.reduce(late))
		})
	})
}

// TestReduceNothing: a call with an entry and no jobs, as for an entry whose results are all
// reduced, answers the version that it found. It leaves the partial aggregate and the result lines.
func TestReduceNothing(t *testing.T) {
	onStores(t, func(w *world) {
		e := w.reported("g", 1)
		r := w.reduceInto("0", e[0])
		require.Equal(w, r, w.reduce(ledger.ReduceArgs{Group: "g", Partial: "0", Version: r.Version, Entries: []string{e[0].entry}}))
		require.Equal(w, map[string]string{"partial:0": "1", "version:0": fmt.Sprint(r.Version)},
			w.c.HGetAll(w.Context(), w.p.Aggregate("g")).Val())
		require.Equal(w, int64(1), w.c.LLen(w.Context(), w.p.Results("g")).Val())
	})
}

// TestReduceWhatIsNotDone: Reduce refuses a call that names a job that is not done or is already
// reduced, or names a job twice.
func TestReduceWhatIsNotDone(t *testing.T) {
	onStores(t, func(w *world) {
		w.everywhere("g") // DFNIRNNW
		bad := ledger.ReduceArgs{Group: "g", Partial: "0", Ordinals: []int64{0, 1, 2, 3, 4, 5, 6, 7, 8}}
		w.unchanged(func() {
			require.Equal(w, ledger.ReduceReply{State: ledger.ReduceBad, Bad: bad.Ordinals[1:]}, w.reduce(bad))
			bad.Ordinals = []int64{0, 0}
			require.Equal(w, ledger.ReduceReply{State: ledger.ReduceBad, Bad: []int64{0}}, w.reduce(bad), "a job that is named twice")
		})
		once := ledger.ReduceArgs{Group: "g", Partial: "0", Ordinals: []int64{0}}
		r := w.reduce(once)
		require.Equal(w, ledger.ReduceOK, r.State)
		once.Version = r.Version
		w.unchanged(func() {
			require.Equal(w, ledger.ReduceReply{State: ledger.ReduceBad, Bad: []int64{0}}, w.reduce(once), "a job that is reduced")
		})
	})
}

func TestReduceAGroupThatIsGone(t *testing.T) {
	onStores(t, func(w *world) {
		e := w.reported("g", 2)
		w.cancel("g")
		w.sweep("g")
		require.Equal(w, ledger.ReduceOK, w.reduceInto("0", e[0]).State, "what was done before the end still counts")
		w.expire("g")
		require.Equal(w, ledger.ReduceReply{State: ledger.ReduceGone}, w.reduceInto("0", e[1]))
		require.Empty(w, w.pending(w.p.ResultStream()))
		require.Zero(w, w.c.XLen(w.Context(), w.p.ResultStream()).Val())
		require.Zero(w, w.c.Exists(w.Context(), w.p.Aggregate("g"), w.p.Results("g"), w.p.States("g")).Val())
		w.unchanged(func() { require.Equal(w, ledger.ReduceGone, w.reduceInto("0", e[1]).State) })
	})
}

// results is an entry of the results stream that an aggregator has read.
type results struct {
	entry, group, lines string
	ordinals            []int64
}

func (w *world) readResults(most int64) []results {
	w.Helper()
	w.consumerGroup(w.p.ResultStream(), keyspace.GroupAggregator)
	r, err := w.c.XReadGroup(w.Context(), &redis.XReadGroupArgs{
		Group: keyspace.GroupAggregator, Consumer: "a", Streams: []string{w.p.ResultStream(), ">"}, Count: most, Block: -1,
	}).Result()
	if errors.Is(err, redis.Nil) {
		return nil
	}
	require.NoError(w, err)
	var out []results
	for _, m := range r[0].Messages {
		e := results{entry: m.ID, group: m.Values["g"].(string), lines: m.Values["l"].(string)}
		for line := range strings.SplitSeq(e.lines, "\n") {
			e.ordinals = append(e.ordinals, w.ordinalOf(line))
		}
		out = append(out, e)
	}
	return out
}

func (w *world) ordinalOf(line string) int64 {
	w.Helper()
	var n int64
	_, err := fmt.Sscanf(line, `{"ordinal":%d`, &n)
	require.NoError(w, err, line)
	return n
}

// reduceInto reduces an entry of the results stream into a partial aggregate. The state of the
// partial aggregate is the number of jobs in it.
func (w *world) reduceInto(partial string, e results) ledger.ReduceReply {
	w.Helper()
	have := w.c.HMGet(w.Context(), w.p.Aggregate(e.group), "version:"+partial, "partial:"+partial).Val()
	return w.reduce(ledger.ReduceArgs{
		Group: e.group, Partial: partial, Version: number(have[0]), State: fmt.Append(nil, number(have[1])+int64(len(e.ordinals))),
		Lines: []byte(e.lines), Entries: []string{e.entry}, Ordinals: e.ordinals,
	})
}

// reduceAll reads all unread entries of the results stream and reduces them into the partial
// aggregate 0 of their groups, like an aggregator.
func (w *world) reduceAll() {
	w.Helper()
	for batch := w.readResults(100); len(batch) > 0; batch = w.readResults(100) {
		for _, e := range batch {
			require.Equal(w, ledger.ReduceOK, w.reduceInto("0", e).State)
		}
	}
}

// TestReduceFailures: the aggregate of a round's failures is stored before the group ends, and
// deleted with the next round.
func TestReduceFailures(t *testing.T) {
	onStores(t, func(w *world) {
		w.fill("g", 2, "acme", "T", "reduce_failures", "1")
		w.seal("g")
		run := w.begin("T", "c", 2)
		w.outcome("T", other(ledger.OutcomeFailed, run[0], 0))
		w.outcome("T", done(run[1]))
		w.reduceAll()
		reduce := func(a ledger.AdvanceReply) {
			require.NoError(w, ledger.ReduceFailures(w.Context(), w.c, w.p, "g", a, []byte("state")))
		}
		require.Contains(w, w.c.SMembers(w.Context(), w.p.Dirty()).Val(), "g")
		r := w.advanceReply("g")
		require.Equal(w, ledger.AdvanceReply{Failures: 1, Round: 1}, r)
		require.Equal(w, "AGGREGATING", w.status("g"))
		for _, other := range []ledger.AdvanceReply{{Failures: 2, Round: 1}, {Failures: 1, Round: 2}} {
			w.unchanged(func() { reduce(other) })
		}
		reduce(r)
		w.unchanged(func() { reduce(r) })
		require.Equal(w, "state", w.c.HGet(w.Context(), w.p.Aggregate("g"), "partial:failed").Val())
		require.Equal(w, ledger.AdvanceReply{Moved: 1, Round: 1}, w.advanceReply("g"))
		require.Equal(w, "COMPLETED", w.status("g"))

		_, err := ledger.Reopen(w.Context(), w.c, w.p, "g", "", ledger.RetryChoice{})
		require.NoError(w, err)
		require.False(w, w.c.HExists(w.Context(), w.p.Aggregate("g"), "partial:failed").Val())
		w.unchanged(func() { reduce(r) })
	})
}

// TestAggregatePlanIsWhatWasEncoded: the plan of a sum and a count, encoded and compiled again, reduces the
// costs 2 and 3 to the sum 5 and the count 2.
func TestAggregatePlanIsWhatWasEncoded(t *testing.T) {
	t.Parallel()
	registry := reducer.NewRegistry()
	encoded, err := ledger.EncodeAggregates(registry, []messages.Aggregate{
		{As: "cost", Op: "sum", Field: "data.cost"}, {As: `a "name"`, Op: "count"},
	})
	require.NoError(t, err)
	plan, err := ledger.AggregatePlan(registry, encoded)
	require.NoError(t, err)
	state := plan.New()
	for _, data := range []string{`{"cost":2}`, `{"cost":3}`} {
		require.NoError(t, state.Add(reducer.Result{Data: []byte(data)}))
	}
	values, err := state.Values()
	require.NoError(t, err)
	require.Len(t, values, 2)
	require.JSONEq(t, "5", string(values["cost"]))
	require.JSONEq(t, "2", string(values[`a "name"`]))
}

func TestNoAggregates(t *testing.T) {
	t.Parallel()
	registry := reducer.NewRegistry()
	encoded, err := ledger.EncodeAggregates(registry, nil)
	require.NoError(t, err)
	require.Empty(t, encoded)
	plan, err := ledger.AggregatePlan(registry, encoded)
	require.NoError(t, err)
	values, err := plan.New().Values()
	require.NoError(t, err)
	require.Empty(t, values)
}

func TestAggregateErrors(t *testing.T) {
	t.Parallel()
	registry := reducer.NewRegistry()
	_, err := ledger.EncodeAggregates(registry, []messages.Aggregate{{As: "x", Op: "no such operation"}})
	require.ErrorContains(t, err, "no such operation")
	_, err = ledger.AggregatePlan(registry, "not JSON")
	require.ErrorContains(t, err, "read aggregates")
	// A process that lacks the reducer of an aggregate can show it, but not add to it.
	plan, err := ledger.AggregatePlan(registry, `[{"as":"x","op":"custom"}]`)
	require.NoError(t, err)
	require.Equal(t, []string{"custom"}, plan.Missing())
	_, err = ledger.WorkPlan(registry, `[{"as":"x","op":"custom"},{"as":"n","op":"count"}]`)
	require.Equal(t, &ledger.MissingReducerError{Ops: []string{"count", "custom"}, Missing: []string{"custom"}}, err)
}

// TestReduceMany: one call reduces results of many groups. A group that is deleted, of a wrong type,
// cancelled, in conflict or has other results reduced harms none of the others, and only what has not
// succeeded is left in the stream.
func TestReduceMany(t *testing.T) {
	onStores(t, func(w *world) {
		byGroup := map[string]results{}
		names := []string{"ends", "goes on", "spoiled", "gone", "cancelled", "reduced", "newer", "plain"}
		for _, g := range names {
			w.fill(g, 2, "acme", "T")
			w.seal(g)
		}
		for _, j := range w.begin("T", "c", 2*len(names)) {
			if j.Group == "goes on" && j.Ordinal == 1 {
				continue
			}
			w.outcome("T", done(j))
		}
		for _, e := range w.readResults(100) {
			all := byGroup[e.group]
			all.group, all.ordinals = e.group, append(all.ordinals, e.ordinals...)
			all.lines, all.entry = strings.TrimPrefix(all.lines+"\n"+e.lines, "\n"), strings.TrimSpace(all.entry+" "+e.entry)
			byGroup[e.group] = all
		}
		require.NoError(w, w.c.Set(w.Context(), w.p.Results("spoiled"), "x", 0).Err())
		require.NoError(w, w.c.Del(w.Context(), w.p.Group("gone")).Err())
		w.cancel("cancelled")
		require.NoError(w, w.c.SetRange(w.Context(), w.p.States("reduced"), 0, "A").Err())
		require.NoError(w, w.c.HSet(w.Context(), w.p.Aggregate("newer"), "version:0", 7).Err())
		var args []ledger.ReduceArgs
		for _, g := range names {
			e := byGroup[g]
			a := ledger.ReduceArgs{Group: g, Partial: "0", State: []byte("s"), Lines: []byte(e.lines), Entries: strings.Fields(e.entry), Ordinals: e.ordinals}
			if g == "plain" {
				a.State = nil
			}
			args = append(args, a)
		}
		replies, err := ledger.Reduce(w.Context(), w.c, w.p, args...)
		require.NoError(w, err)
		var states []ledger.ReduceState
		for _, r := range replies {
			states = append(states, r.State)
		}
		require.Equal(w, []ledger.ReduceState{"OK", "OK", "ERR", "GONE", "OK", "BAD", "VERSION", "OK"}, states)
		require.ErrorContains(w, replies[2].Err, "reduce results of group spoiled: ")
		require.Equal(w, []int64{0}, replies[5].Bad)
		require.EqualValues(w, 7, replies[6].Version)
		for g, status := range map[string]string{
			"ends": "COMPLETED", "goes on": "RUNNING", "spoiled": "RUNNING", "cancelled": "CANCELLED", "reduced": "RUNNING", "newer": "RUNNING", "plain": "COMPLETED",
		} {
			require.Equal(w, status, w.status(g), g)
		}
		require.Zero(w, w.c.Exists(w.Context(), w.p.Aggregate("plain")).Val())
		require.Contains(w, w.c.SMembers(w.Context(), w.p.Dirty()).Val(), "cancelled", "the watcher sweeps it")
		left := slices.Concat(strings.Fields(byGroup["spoiled"].entry), strings.Fields(byGroup["reduced"].entry), strings.Fields(byGroup["newer"].entry))
		var pending []string
		for _, p := range w.pending(w.p.ResultStream()) {
			pending = append(pending, strings.Fields(p)[1])
		}
		require.ElementsMatch(w, left, pending)

		// The whole call again changes nothing of what has succeeded.
		replies, err = ledger.Reduce(w.Context(), w.c, w.p, args...)
		require.NoError(w, err)
		require.Equal(w, ledger.ReduceVersion, replies[0].State)
		require.Equal(w, ledger.ReduceReply{State: ledger.ReduceBad, Bad: []int64{0, 1}}, replies[7])
		require.Equal(w, "AA", w.states("plain"))
	})
}

// TestReduceLeavesToTheWatcher: reduce does not end a group whose failures must be reduced, nor one
// that requeue has not settled. It marks them dirty.
func TestReduceLeavesToTheWatcher(t *testing.T) {
	onStores(t, func(w *world) {
		w.fill("failures", 2, "acme", "T", "reduce_failures", "1")
		w.fill("reopened", 2, "acme", "T")
		for _, g := range []string{"failures", "reopened"} {
			w.seal(g)
		}
		run := w.begin("T", "c", 4)
		for i, j := range run {
			if i%2 == 0 {
				w.outcome("T", other(ledger.OutcomeFailed, j, 0))
			} else {
				w.outcome("T", done(j))
			}
		}
		entries := w.readResults(10)
		w.c.HSet(w.Context(), w.p.Group("reopened"), "status", "CREATED", "requeue", "0", "round", "2")
		w.c.Del(w.Context(), w.p.Dirty())
		w.quiet()
		for _, e := range entries {
			require.Equal(w, ledger.ReduceOK, w.reduceInto("0", e).State)
		}
		require.Equal(w, []string{"AGGREGATING", "CREATED"}, []string{w.status("failures"), w.status("reopened")})
		require.ElementsMatch(w, []string{"failures", "reopened"}, w.c.SMembers(w.Context(), w.p.Dirty()).Val())
		require.EqualValues(w, 1, w.c.LLen(w.Context(), w.p.Wake("watcher")).Val())
	})
}

// TestEventsOfOneCallShareAnEntry: a group makes five transitions in four calls.
func TestEventsOfOneCallShareAnEntry(t *testing.T) {
	onStores(t, func(w *world) {
		w.fill("g", 1, "acme", "T")
		w.seal("g")
		w.advance("g")
		w.outcome("T", done(w.begin("T", "c", 1)...))
		w.reduceAll()
		require.Equal(w, []event{{"g", "CREATED", 1}, {"g", "DISPATCHED", 1}, {"g", "RUNNING", 1}, {"g", "AGGREGATING", 1}, {"g", "COMPLETED", 1}}, w.events())
		require.EqualValues(w, 4, w.c.XLen(w.Context(), w.p.Outbox()).Val())
	})
}
