package ledger_test

import (
	"testing"

	"github.com/redis/go-redis/v9"
	"github.com/stretchr/testify/require"

	"github.com/bulkaction/bulkaction/internal/jobs/ledger"
	"github.com/bulkaction/bulkaction/internal/redisx/keyspace"
)

func init() {
	drop := func(name string, prepare func(w *world) ledger.Misplaced) scene {
		return scene{"repair_misplaced " + name, false, func(w *world) act {
			l := prepare(w)
			return func() error {
				_, err := ledger.RepairMisplaced(w.Context(), w.c, w.p, l)
				return err
			}
		}}
	}
	scenes = append(scenes,
		scene{"repair", false, func(w *world) act {
			w.everywhere("g")
			w.seal("g")
			w.c.HIncrBy(w.Context(), w.p.Group("g"), "done", 1)
			w.c.ZRem(w.Context(), w.p.Groups(), "g")
			w.c.ZAdd(w.Context(), w.p.Ended(), redis.Z{Member: "g"})
			w.c.Del(w.Context(), w.p.Dirty())
			return w.repairing("g", map[string]int64{"done": -1, "code:BOOM": -1})
		}},
		scene{"repair a group that is gone", false, func(w *world) act {
			w.c.ZAdd(w.Context(), w.p.Groups(), redis.Z{Member: "g"})
			w.c.ZAdd(w.Context(), w.p.Open(), redis.Z{Member: "g"})
			return w.repairing("g", nil)
		}},
		scene{"repair_counter", false, func(w *world) act {
			w.create("g", "acme", "T")
			w.append("g", 2)
			w.c.SRem(w.Context(), w.p.Active(), "acme")
			w.c.HIncrBy(w.Context(), w.p.Tenant("acme"), "active", 3)
			return func() error {
				_, err := ledger.RepairCounter(w.Context(), w.c, w.p, ledger.Counter{Tenant: true, Of: "acme", Name: "active", Have: 5, Want: 2})
				return err
			}
		}},
		drop("in a queue", func(w *world) ledger.Misplaced {
			w.create("g", "acme", "T")
			w.append("g", 1)
			w.c.RPush(w.Context(), w.p.Queue("g", "T"), "nonsense")
			return ledger.Misplaced{Location: "queue", Owner: "g", Type: "T", Item: "nonsense"}
		}),
		drop("among what is non-ready", func(w *world) ledger.Misplaced {
			w.nonReady("g", 1)
			w.c.ZAdd(w.Context(), w.p.NonReadyOf("acme"), redis.Z{Score: 1, Member: "nonsense"})
			return ledger.Misplaced{Location: "non-ready", Owner: "acme", Item: "nonsense"}
		}),
		drop("in a ready stream", func(w *world) ledger.Misplaced {
			id := w.c.XAdd(w.Context(), &redis.XAddArgs{Stream: w.p.Ready("T"), Values: []string{"k", "v"}}).Val()
			w.consumerGroup(w.p.Ready("T"), keyspace.GroupWorkers)
			return ledger.Misplaced{Location: "ready", Owner: "T", Item: id}
		}),
		drop("in results", func(w *world) ledger.Misplaced {
			id := w.c.XAdd(w.Context(), &redis.XAddArgs{Stream: w.p.ResultStream(), Values: []string{"k", "v"}}).Val()
			return ledger.Misplaced{Location: "results", Item: id}
		}),
		drop("among failures", func(w *world) ledger.Misplaced {
			w.create("g", "acme", "T")
			w.append("g", 1)
			w.c.HSet(w.Context(), w.p.Failures("g"), "0", "nonsense")
			return ledger.Misplaced{Location: "failures", Owner: "g", Item: "0"}
		}))
}

func (w *world) repairing(group string, differences map[string]int64) act {
	return func() error {
		_, err := ledger.RepairGroup(w.Context(), w.c, w.p, group, "acme", 0, differences)
		return err
	}
}

// TestRepairGroup: RepairGroup repairs the counts and lists of a group, although a job was appended
// after the recount. The same call again changes nothing.
func TestRepairGroup(t *testing.T) {
	both(t, func(w *world) {
		w.everywhere("g")
		want := w.ledger("g")
		w.c.HIncrBy(w.Context(), w.p.Group("g"), "done", 2)
		w.c.HIncrBy(w.Context(), w.p.Codes("g"), "ODD", 1)
		w.c.Del(w.Context(), w.p.Open(), w.p.Groups(), w.p.GroupsOf("acme"))
		differences := map[string]int64{"done": -2, "code:ODD": -1}
		w.append("g", 1) // that it moves meanwhile does not matter
		want["waiting"]++
		did, err := ledger.RepairGroup(w.Context(), w.c, w.p, "g", "acme", 0, differences)
		require.NoError(w, err)
		require.True(w, did)
		require.Equal(w, want, w.ledger("g"))
		require.Equal(w, map[string]string{"BOOM": "1"}, w.c.HGetAll(w.Context(), w.p.Codes("g")).Val())
		for _, list := range []string{w.p.Open(), w.p.Groups(), w.p.GroupsOf("acme")} {
			require.Equal(w, []string{"g"}, w.c.ZRange(w.Context(), list, 0, -1).Val(), list)
		}
		w.unchanged(func() {
			did, err := ledger.RepairGroup(w.Context(), w.c, w.p, "g", "acme", 0, differences)
			require.NoError(w, err)
			require.False(w, did)
		})
	})
}

func TestRepairCounter(t *testing.T) {
	both(t, func(w *world) {
		w.create("g", "acme", "T")
		w.append("g", 3)
		repair := func(n ledger.Counter) bool {
			did, err := ledger.RepairCounter(w.Context(), w.c, w.p, n)
			require.NoError(w, err)
			return did
		}
		w.unchanged(func() {
			require.False(w, repair(ledger.Counter{Of: "T", Name: "waiting", Have: 2, Want: 1}), "it has moved")
		})
		require.True(w, repair(ledger.Counter{Of: "T", Name: "waiting", Have: 3, Want: 0}))
		require.False(w, w.c.HExists(w.Context(), w.p.Load("T"), "waiting").Val())
		require.True(w, repair(ledger.Counter{Tenant: true, Of: "acme", Name: "active", Have: 3, Want: 0}))
		require.Zero(w, w.c.SCard(w.Context(), w.p.Active()).Val())
		require.True(w, repair(ledger.Counter{Tenant: true, Of: "acme", Name: "active", Want: 3}))
		require.Equal(w, int64(1), w.c.SCard(w.Context(), w.p.Active()).Val())
		require.Equal(w, 3, w.admit("T", 10, noLimit).Moved)
	})
}

// TestRepairMisplacedSparesJobs: RepairMisplaced never quarantines a job at the right location, nor
// one of two elements of a job unless both exist.
func TestRepairMisplacedSparesJobs(t *testing.T) {
	both(t, func(w *world) {
		w.everywhere("g")
		w.c.XGroupCreateMkStream(w.Context(), w.p.ResultStream(), keyspace.GroupAggregator, "0")
		spare := func(l ledger.Misplaced) {
			w.unchanged(func() {
				did, err := ledger.RepairMisplaced(w.Context(), w.c, w.p, l)
				require.NoError(w, err)
				require.False(w, did, "%v", l)
			})
		}
		drop := func(l ledger.Misplaced) {
			did, err := ledger.RepairMisplaced(w.Context(), w.c, w.p, l)
			require.NoError(w, err)
			require.True(w, did, "%v", l)
			spare(l)
		}
		for _, blob := range w.c.LRange(w.Context(), w.p.Queue("g", "T"), 0, -1).Val() {
			spare(ledger.Misplaced{Location: "queue", Owner: "g", Type: "T", Item: blob})
		}
		spare(ledger.Misplaced{Location: "queue", Owner: "g", Type: "T", Item: "nonsense"})
		nonReady := w.c.ZRange(w.Context(), w.p.NonReadyOf("acme"), 0, -1).Val()
		for _, blob := range nonReady {
			spare(ledger.Misplaced{Location: "non-ready", Owner: "acme", Item: blob})
			spare(ledger.Misplaced{Location: "non-ready", Owner: "acme", Item: blob, Twin: nonReady[0] + "?"})
		}
		ready := w.c.XRange(w.Context(), w.p.Ready("T"), "-", "+").Val()
		require.Len(w, ready, 2)
		for _, e := range ready {
			spare(ledger.Misplaced{Location: "ready", Owner: "T", Item: e.ID})
			spare(ledger.Misplaced{Location: "ready", Owner: "T", Item: e.ID, Twin: "1-1"})
			spare(ledger.Misplaced{Location: "ready", Owner: "T", Item: e.ID, Twin: e.ID})
		}
		spare(ledger.Misplaced{Location: "ready", Owner: "T", Item: ready[0].ID, Twin: ready[1].ID})
		for _, e := range w.c.XRange(w.Context(), w.p.ResultStream(), "-", "+").Val() {
			spare(ledger.Misplaced{Location: "results", Item: e.ID})
		}
		spare(ledger.Misplaced{Location: "failures", Owner: "g", Item: "1"})
		before := w.ledger("g")

		twin := w.c.XAdd(w.Context(), &redis.XAddArgs{Stream: w.p.Ready("T"), Values: ready[0].Values}).Val()
		drop(ledger.Misplaced{Location: "ready", Owner: "T", Item: twin, Twin: ready[0].ID})
		w.c.ZAdd(w.Context(), w.p.NonReadyOf("acme"), redis.Z{Score: 1, Member: nonReady[0] + " "})
		drop(ledger.Misplaced{Location: "non-ready", Owner: "acme", Item: nonReady[0] + " ", Twin: nonReady[0]})
		w.c.ZAdd(w.Context(), w.p.NonReadyOf("nobody"), redis.Z{Score: 1, Member: nonReady[0]})
		drop(ledger.Misplaced{Location: "non-ready", Owner: "nobody", Item: nonReady[0]})
		require.Equal(w, before, w.ledger("g"))
		require.EqualValues(w, 3, w.c.LLen(w.Context(), w.p.Quarantine()).Val())

		// Without the string states:GROUP nobody can tell the states of the group's jobs, so
		// RepairMisplaced leaves their elements.
		w.c.Del(w.Context(), w.p.States("g"))
		spare(ledger.Misplaced{Location: "ready", Owner: "T", Item: ready[0].ID})
		spare(ledger.Misplaced{Location: "non-ready", Owner: "acme", Item: nonReady[0]})
		spare(ledger.Misplaced{Location: "queue", Owner: "g", Type: "T", Item: w.c.LIndex(w.Context(), w.p.Queue("g", "T"), 0).Val()})
		spare(ledger.Misplaced{Location: "failures", Owner: "g", Item: "1"})
	})
}
