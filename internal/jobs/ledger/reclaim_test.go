package ledger_test

import (
	"encoding/json"
	"testing"
	"time"

	"github.com/redis/go-redis/v9"
	"github.com/stretchr/testify/require"

	"github.com/bulkaction/bulkaction/internal/jobs/ledger"
	"github.com/bulkaction/bulkaction/internal/redisx/keyspace"
)

func TestReclaim(t *testing.T) {
	both(t, func(w *world) {
		require.Equal(w, ledger.ReclaimReply{}, w.reclaim("T", 3), "nobody has read yet")
		w.create("g", "acme", "T")
		w.append("g", 3)
		require.Equal(w, 3, w.admit("T", 3, noLimit).Moved)
		run := w.readSome("T", "c", 2)
		w.start("T", run[:1])
		require.Equal(w, "IRR", w.states("g"))

		// Only pending entries are reclaimed, and their jobs are due at once. A job counts a loss
		// only if the lost worker had started it.
		require.Equal(w, ledger.ReclaimReply{Taken: 2}, w.reclaim("T", 3))
		require.Equal(w, "NNR", w.states("g"))
		require.Equal(w, map[string]int64{"non_ready": 2, "ready": 1}, w.ledger("g"))
		require.Equal(w, int64(1), w.c.XLen(w.Context(), w.p.Ready("T")).Val())
		require.Equal(w, "2", w.c.HGet(w.Context(), w.p.Tenant("acme"), "congested").Val())
		var on map[string]any
		require.NoError(w, json.Unmarshal([]byte(w.c.HGet(w.Context(), w.p.Errors("g"), "0").Val()), &on))
		require.Equal(w, "WORKER_LOST", on["code"])
		require.False(w, w.c.HExists(w.Context(), w.p.Errors("g"), "1").Val())
		w.unchanged(func() { require.Equal(w, ledger.ReclaimReply{}, w.reclaim("T", 3)) })

		require.Equal(w, ledger.OutcomeReply{Stale: 1}, w.outcome("T", done(run[0])), "the lost worker comes late")
		require.Equal(w, "1", w.c.HGet(w.Context(), w.p.Load("T"), "stale").Val(), "and is counted")
		w.promoteAll("T", 2)
		again := w.read("T", "d")
		require.Len(w, again, 3)
		for _, j := range again {
			want := map[int64][2]int{0: {2, 1}, 1: {2, 0}, 2: {1, 0}}[j.Ordinal]
			require.Equal(w, want, [2]int{j.Attempt, j.Losses}, "attempt and losses of job %d", j.Ordinal)
		}
		w.start("T", again)
		require.Equal(w, ledger.OutcomeReply{Owned: 3}, w.outcome("T", done(again...)))
	})
}

// TestReclaimOnlyWhatIsIdle: Reclaim with a lease of 50 ms takes back the job whose entry was idle
// for that long, and not the one that a worker renews.
func TestReclaimOnlyWhatIsIdle(t *testing.T) {
	both(t, func(w *world) {
		w.create("g", "acme", "T")
		w.append("g", 2)
		run := w.begin("T", "c", 2)
		reclaim := func(lease time.Duration) int {
			r, err := ledger.Reclaim(w.Context(), w.c, w.p, "T", lease, 100, 3)
			require.NoError(w, err)
			return r.Taken
		}
		require.Zero(w, reclaim(time.Hour))
		w.eventually(func() bool { return w.idle(run[1].entry) > 50*time.Millisecond })
		w.renew("c", run[0])
		w.eventually(func() bool {
			w.renew("c", run[0])
			return reclaim(50*time.Millisecond) == 1
		})
		require.Equal(w, "IN", w.states("g"))
	})
}

func TestReclaimTakesAFewAtATime(t *testing.T) {
	both(t, func(w *world) {
		w.create("g", "acme", "T")
		w.append("g", 5)
		w.begin("T", "c", 5)
		for _, want := range []int{2, 2, 1, 0} {
			r, err := ledger.Reclaim(w.Context(), w.c, w.p, "T", 0, 2, 3)
			require.NoError(w, err)
			require.Equal(w, want, r.Taken)
			w.ledger("g")
		}
	})
}

func TestReclaimFailsWhatKillsItsWorkers(t *testing.T) {
	both(t, func(w *world) {
		w.create("g", "acme", "T")
		w.append("g", 1)
		w.seal("g")
		w.begin("T", "c", 1)
		for range 2 {
			require.Equal(w, ledger.ReclaimReply{Taken: 1}, w.reclaim("T", 2))
			w.promoteAll("T", 1)
			w.start("T", w.read("T", "c"))
		}
		w.c.Del(w.Context(), w.p.Dirty())
		require.Equal(w, ledger.ReclaimReply{Failed: 1}, w.reclaim("T", 2))
		require.Equal(w, map[string]int64{"failed": 1}, w.ledger("g"))
		require.Equal(w, map[string]string{"WORKER_LOST": "1"}, w.c.HGetAll(w.Context(), w.p.Codes("g")).Val())
		require.Equal(w, int64(1), w.c.XLen(w.Context(), w.p.DeadLetters()).Val())
		require.True(w, w.c.HExists(w.Context(), w.p.Failures("g"), "0").Val())
		require.Equal(w, "E2 E1 ", errorsIn(w.c.HGet(w.Context(), w.p.Errors("g"), "0").Val()), "the errors before the last one stay")
		require.Equal(w, "0", w.c.HGet(w.Context(), w.p.Tenant("acme"), "unfinished").Val())
		require.Equal(w, []string{"g"}, w.c.SMembers(w.Context(), w.p.Dirty()).Val())
		require.Zero(w, w.c.XLen(w.Context(), w.p.Ready("T")).Val())
	})
}

// TestReclaimReportsDeletedEntries: if another program has deleted a pending entry from the ready
// stream, the reply names this entry as missing, once, and the watcher is woken.
func TestReclaimReportsDeletedEntries(t *testing.T) {
	both(t, func(w *world) {
		w.create("g", "acme", "T")
		w.append("g", 2)
		run := w.begin("T", "c", 2)
		w.c.XDel(w.Context(), w.p.Ready("T"), run[0].entry)
		r := w.reclaim("T", 3)
		require.Equal(w, ledger.ReclaimReply{Taken: 1, Missing: []string{run[0].entry}}, r)
		require.Equal(w, "1", w.c.HGet(w.Context(), w.p.Watch(), "suspicious").Val(), "the watcher is to look for its job")
		require.EqualValues(w, 1, w.c.LLen(w.Context(), w.p.Wake("watcher")).Val())
		require.Equal(w, ledger.ReclaimReply{}, w.reclaim("T", 3), "once")
		w.ledger("g")
	})
}

// TestReclaimGarbage: Reclaim removes pending entries that can't be read as a job, a second entry
// of a job, and those of a cancelled or deleted group.
func TestReclaimGarbage(t *testing.T) {
	both(t, func(w *world) {
		w.create("g", "acme", "T")
		w.append("g", 1)
		w.create("cancelled", "beta", "T")
		w.append("cancelled", 1)
		require.Equal(w, 2, w.admit("T", 2, noLimit).Moved)
		blob := ledger.MessageBlob(w.c.XRange(w.Context(), w.p.Ready("T"), "-", "+").Val()[0].Values)
		for _, values := range [][]any{{"j", "nonsense"}, {"x", "", "y", ""}, {"j", blob}, {"j", "gone|T|1|0|0|0|0|0|0|1||0|1||1"}} {
			w.c.XAdd(w.Context(), &redis.XAddArgs{Stream: w.p.Ready("T"), Values: values})
		}
		w.cancel("cancelled")
		w.consumerGroup(w.p.Ready("T"), keyspace.GroupWorkers)
		w.c.XReadGroup(w.Context(), &redis.XReadGroupArgs{Group: keyspace.GroupWorkers, Consumer: "c", Streams: []string{w.p.Ready("T"), ">"}, Count: 10})
		require.Equal(w, ledger.ReclaimReply{Taken: 1, Stale: 5}, w.reclaim("T", 3))
		require.Equal(w, []string{"ready:T x  y ", "ready:T nonsense"}, w.c.LRange(w.Context(), w.p.Quarantine(), 0, 1).Val())
		require.Zero(w, w.c.XLen(w.Context(), w.p.Ready("T")).Val())
		require.Empty(w, w.pending(w.p.Ready("T")))
		require.Equal(w, map[string]int64{"non_ready": 1}, w.ledger("g"))
	})
}
