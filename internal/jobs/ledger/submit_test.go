package ledger_test

import (
	"fmt"
	"strings"
	"testing"

	"github.com/redis/go-redis/v9"
	"github.com/stretchr/testify/require"

	"github.com/bulkaction/bulkaction/api"
	"github.com/bulkaction/bulkaction/internal/jobs/ledger"
	"github.com/bulkaction/bulkaction/internal/redisx/call"
	"github.com/bulkaction/bulkaction/internal/testkit/redistest"
)

// submission returns a sealed group of n jobs, of tenant acme and type T.
func submission(group string, n int, fields ...string) ledger.AppendArgs {
	a := ledger.AppendArgs{Group: group, Limit: 1000, Request: ledger.SubmissionPrefix + "0", Mode: ledger.AppendSeal, Jobs: jobs(n), Create: born("acme", fields...)}
	a.Create.Group = group
	return a
}

func (w *world) submit(all ...ledger.AppendArgs) []ledger.AppendResult {
	w.Helper()
	results, err := ledger.Submit(w.Context(), w.c, w.p, all)
	require.NoError(w, err)
	require.Len(w, results, len(all))
	return results
}

// TestSubmit: a new group that is sealed with its jobs is DISPATCHED, and not dirty; both of its events
// are in the outbox. Twice, and among others, it is a duplicate.
func TestSubmit(t *testing.T) {
	onStores(t, func(w *world) {
		a := submission("g", 2, "total", "2")
		r := w.submit(a)[0]
		require.Equal(w, ledger.AppendResult{AppendReply: ledger.AppendReply{N: 2}, Status: api.StatusCreated}, r)
		g := w.c.HGetAll(w.Context(), w.p.Group("g")).Val()
		at := g["at:created"]
		require.Equal(w, map[string]string{
			"id": "g", "tenant": "acme", "type": "T", "hash": "h", "status": "DISPATCHED", "round": "1", "lane": "normal", "total": "2",
			"at:created": at, "at:dispatched": at, "accepted": "2", "waiting": "2", "types": "T", "pieces": "1", "submitted": "1", "sealed": "1",
		}, g)
		require.Equal(w, []event{{"g", "CREATED", 1}, {"g", "DISPATCHED", 1}}, w.events())
		require.Zero(w, w.c.Exists(w.Context(), w.p.Dirty()).Val())
		require.Equal(w, "acme", w.c.Get(w.Context(), w.p.Owner("g")).Val())
		require.Equal(w, []string{`0||{"n":0}`, `1||{"n":1}`}, w.queue("g", "T"))
		require.Equal(w, map[string]int64{"waiting": 2}, w.ledger("g"))
		for _, role := range []string{"watcher", "fetcher"} {
			require.EqualValues(w, 1, w.c.LLen(w.Context(), w.p.Wake(role)).Val(), role)
		}
		w.unchanged(func() {
			for _, again := range w.submit(a, a) {
				require.Equal(w, ledger.AppendResult{AppendReply: ledger.AppendReply{Duplicate: true}, Status: api.StatusDispatched}, again)
			}
		})
		w.reduced("T", "g")
		require.Equal(w, "COMPLETED", w.status("g"))
	})
}

// reduced runs a group's jobs to their end.
func (w *world) reduced(typ, group string) {
	w.Helper()
	w.outcome(typ, done(w.begin(typ, "c", 2)...))
	for _, e := range w.readResults(10) {
		require.NoError(w, w.reducing(e)())
	}
	w.advance(group)
}

// TestSubmitStates: whether a new group is sealed and dirty, and its state, by what its submission
// says.
func TestSubmitStates(t *testing.T) {
	onStores(t, func(w *world) {
		w.submit(submission("open", 0), func() ledger.AppendArgs {
			a := submission("part", 1)
			a.Mode = ledger.AppendLast
			return a
		}(), func() ledger.AppendArgs {
			a := submission("announced", 2, "total", "2")
			a.Mode = ledger.AppendLast
			return a
		}(), func() ledger.AppendArgs {
			a := submission("announced-more", 2, "total", "3")
			a.Mode = ledger.AppendLast
			return a
		}(), submission("later", 1, "run_at", inAnHour()))
		state := map[string]string{}
		for _, g := range []string{"open", "part", "announced", "announced-more", "later"} {
			v := w.c.HMGet(w.Context(), w.p.Group(g), "status", "sealed").Val()
			state[g] = fmt.Sprint(v...) + fmt.Sprint(w.c.SIsMember(w.Context(), w.p.Dirty(), g).Val())
		}
		require.Equal(w, map[string]string{
			"open": "CREATED1true", "part": "CREATED<nil>false", "announced": "DISPATCHED1false", "announced-more": "CREATED<nil>false",
			"later": "DISPATCHED1false",
		}, state)
		require.EqualValues(w, 1, w.c.ZCard(w.Context(), w.p.Scheduled()).Val())
	})
}

// TestSubmitMany: of one call's groups some are refused, each for a reason of its own. The others are
// stored, and a second call changes nothing.
func TestSubmitMany(t *testing.T) {
	onStores(t, func(w *world) {
		w.submit(submission("known", 1), submission("other", 1), submission("closed", 1))
		require.NoError(w, w.c.Set(w.Context(), w.p.Owner("taken"), "globex", 0).Err())
		spoiled := []string{w.p.States("spoiled-states"), w.p.Queue("spoiled-queue", "T"), w.p.Group("spoiled-hash"), w.p.Owner("spoiled-owner")}
		for _, key := range spoiled[:1] {
			require.NoError(w, w.c.RPush(w.Context(), key, "x").Err())
		}
		require.NoError(w, w.c.Set(w.Context(), spoiled[1], "x", 0).Err())
		require.NoError(w, w.c.Set(w.Context(), spoiled[2], "x", 0).Err())
		require.NoError(w, w.c.RPush(w.Context(), spoiled[3], "x").Err())

		other, large, total := submission("other", 1), submission("large", 3), submission("total", 3, "total", "2")
		other.Create.Hash, large.Limit = "another", 2
		keyed, away := submission("keyed", 2, "unique_keys", "1"), submission("away", 1)
		keyed.Jobs[0].Key, keyed.Jobs[1].Key = "a", "a"
		away.Create.Own = false // the store has registered its owner in another partition
		gap := ledger.AppendArgs{Group: "known", Limit: 10, Request: ledger.SubmissionPrefix + "2", Jobs: jobs(1)}
		calls := []ledger.AppendArgs{
			submission("known", 1), submission("first", 1), other, submission("taken", 1), submission("spoiled-states", 1),
			submission("spoiled-queue", 1), submission("spoiled-hash", 1), submission("spoiled-owner", 1), large, total, keyed, away, gap,
			{Group: "closed", Limit: 10, Jobs: jobs(1)}, {Group: "nobody", Limit: 10, Jobs: jobs(1)}, submission("first", 1), submission("last", 2),
		}
		check := func(again bool) {
			r := w.submit(calls...)
			for i, g := range calls {
				switch g.Group {
				case "first", "keyed", "away", "last":
					require.NoError(w, r[i].Err, g.Group)
					require.Equal(w, again || i == 15, r[i].Duplicate, g.Group)
				case "spoiled-states", "spoiled-queue", "spoiled-hash", "spoiled-owner":
					var wrong redis.Error
					require.ErrorAs(w, r[i].Err, &wrong)
					require.Contains(w, r[i].Err.Error(), "WRONGTYPE")
				}
			}
			require.True(w, r[0].Duplicate)
			require.ErrorIs(w, r[2].Err, api.ErrConflict)
			require.ErrorIs(w, r[3].Err, api.ErrConflict)
			require.NotContains(w, r[3].Err.Error(), "globex")
			require.ErrorContains(w, r[8].Err, "at most 2 jobs, 0 are there")
			require.ErrorContains(w, r[9].Err, "2 jobs were announced, 0 are there, 3 more are too many")
			require.Equal(w, []int{1}, r[10].Skipped)
			require.ErrorIs(w, r[12].Err, ledger.ErrGap)
			require.ErrorIs(w, r[13].Err, api.ErrSealed)
			require.ErrorIs(w, r[14].Err, api.ErrNotFound)
		}
		check(false)
		w.unchanged(func() { check(true) })
		require.ElementsMatch(w, []string{"known", "other", "closed", "first", "keyed", "away", "last"}, w.c.ZRange(w.Context(), w.p.Groups(), 0, -1).Val())
		require.Zero(w, w.c.Exists(w.Context(), w.p.Owner("away"), w.p.Owner("large"), w.p.Group("large"), w.p.Group("total")).Val())
		require.Equal(w, map[string]int64{"waiting": 2}, w.ledger("last"))
		require.EqualValues(w, 7, w.c.XLen(w.Context(), w.p.Outbox()).Val())
	})
}

// TestSubmitWithoutMemory: when Redis's memory is full, all groups of a call are refused together.
// Repeated, they are stored.
func TestSubmitWithoutMemory(t *testing.T) {
	t.Parallel()
	w := newWorld(t, client(t, redistest.Server(t).URL()), "t:")
	all := []ledger.AppendArgs{submission("a", 1), submission("b", 1), {Group: "old", Limit: 10, Jobs: jobs(1)}}
	w.create("old", "acme", "T")
	w.unchanged(func() {
		require.NoError(t, w.c.ConfigSet(t.Context(), "maxmemory", "1").Err())
		_, err := ledger.Submit(t.Context(), w.c, w.p, all)
		require.NoError(t, w.c.ConfigSet(t.Context(), "maxmemory", "0").Err())
		require.True(t, call.IsOOM(err), err)
	})
	for _, r := range w.submit(all...) {
		require.Equal(t, []any{int64(1), error(nil)}, []any{r.N, r.Err})
	}
}

// TestSubmitCommands: how many commands a new group of one job costs Redis, alone and beside others.
func TestSubmitCommands(t *testing.T) {
	t.Parallel()
	w := newWorld(t, client(t, redistest.Server(t).URL()), "t:")
	count := func(n int, fresh string) int {
		require.NoError(t, w.c.ConfigResetStat(t.Context()).Err())
		var all []ledger.AppendArgs
		for i := range n {
			all = append(all, submission(fmt.Sprint(fresh, i), 1))
		}
		for _, r := range w.submit(all...) {
			require.NoError(t, r.Err)
		}
		calls := 0
		for line := range strings.Lines(w.c.Info(t.Context(), "commandstats").Val()) {
			name, rest, _ := strings.Cut(line, ":calls=")
			if n, _, ok := strings.Cut(rest, ","); ok && !strings.Contains(name, "config") && !strings.Contains(name, "eval") && !strings.Contains(name, "info") {
				calls += int(number(n))
			}
		}
		return calls
	}
	count(1, "first") // the script's text, and the first group of its tenant and type
	require.LessOrEqual(t, count(1, "lone"), 38)
	require.LessOrEqual(t, count(32, "many"), 32*19)
}
