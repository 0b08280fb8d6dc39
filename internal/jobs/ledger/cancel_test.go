package ledger_test

import (
	"fmt"
	"strings"
	"testing"
	"time"

	"github.com/redis/go-redis/v9"
	"github.com/stretchr/testify/require"

	"github.com/bulkaction/bulkaction/api"
	"github.com/bulkaction/bulkaction/internal/jobs/ledger"
)

func TestCancelEverywhere(t *testing.T) {
	both(t, func(w *world) {
		w.due("non-ready", "acme", "T", float64(time.Now().Add(time.Hour).UnixMilli()))
		w.everywhere("g")
		w.append("g", 1)
		w.create("keep", "acme", "T")
		w.append("keep", 1)
		run := w.reread("T")
		w.cancel("g")
		require.Equal(w, "CANCELLED", w.status("g"))
		require.NotEmpty(w, w.c.HGet(w.Context(), w.p.Group("g"), "at:cancelled").Val())
		require.Contains(w, w.events(), event{"g", "CANCELLED", 1})
		require.Contains(w, w.c.SMembers(w.Context(), w.p.Dirty()).Val(), "g")
		require.Zero(w, w.c.Exists(w.Context(), w.p.Queue("g", "T")).Val(), "nothing of it is dequeued any more")
		w.unchanged(func() { w.cancel("g") })

		w.sweep("g")
		require.Equal(w, "DFCCCCCCC", w.states("g"))
		require.Equal(w, map[string]int64{"done": 1, "failed": 1, "cancelled": 7}, w.ledger("g"))
		require.Equal(w, map[string]string{
			"waiting": "1", "non_ready": "1", "accepted": "11", "started": "5", "done": "1", "failed": "1", "retried": "2", "throttled": "1",
		}, w.c.HGetAll(w.Context(), w.p.Load("T")).Val(), "the other groups' jobs, and what has happened")
		require.Len(w, w.c.ZRange(w.Context(), w.p.NonReadyOf("acme"), 0, -1).Val(), 1)
		tenant := w.c.HGetAll(w.Context(), w.p.Tenant("acme")).Val()
		require.Equal(w, []string{"1", "1", "2"}, []string{tenant["active"], tenant["congested"], tenant["unfinished"]})
		require.Zero(w, w.c.Exists(w.Context(), w.p.Payloads("g"), w.p.Errors("g")).Val())
		require.Equal(w, []string{"g"}, w.c.ZRange(w.Context(), w.p.Ended(), 0, -1).Val())
		require.NotContains(w, w.c.ZRange(w.Context(), w.p.Open(), 0, -1).Val(), "g")
		w.unchanged(func() { require.Equal(w, 1, w.sweep("g")) })

		// Start refuses the cancelled group's jobs that are still in the ready stream, read by a
		// worker or not, and removes their entries. Reports of these jobs are stale.
		for _, j := range run {
			jobs := []taken{j}
			w.start("T", jobs)
			require.Negative(w, jobs[0].token)
			require.Equal(w, ledger.OutcomeReply{Stale: 1}, w.outcome("T", done(j)))
		}
		require.Zero(w, w.c.XLen(w.Context(), w.p.Ready("T")).Val())
		require.Equal(w, map[string]int64{"done": 1, "failed": 1, "cancelled": 7}, w.ledger("g"))
		w.reduceAll() // results of jobs that were done before still count
		require.Equal(w, "AFCCCCCCC", w.states("g"))
		require.Equal(w, map[string]int64{"waiting": 1}, w.ledger("keep"))
		require.Zero(w, w.advance("g"))
	})
}

func TestCancelRefuses(t *testing.T) {
	both(t, func(w *world) {
		require.ErrorIs(w, ledger.Cancel(w.Context(), w.c, w.p, "g"), api.ErrNotFound)
		w.failed("g", 1)
		w.create("h", "acme", "T")
		w.seal("h")
		w.advance("h")
		w.unchanged(func() {
			for group, status := range map[string]string{"g": "FAILED", "h": "COMPLETED"} {
				err := ledger.Cancel(w.Context(), w.c, w.p, group)
				require.ErrorIs(w, err, api.ErrConflict)
				require.ErrorContains(w, err, "is "+status)
			}
			w.sweep("g") // changes nothing
		})
	})
}

func TestCancelAGroupThatIsHeld(t *testing.T) {
	both(t, func(w *world) {
		w.create("g", "acme", "T", "run_at", inAnHour())
		w.append("g", 3)
		w.cancel("g")
		w.sweep("g")
		require.Equal(w, map[string]int64{"cancelled": 3}, w.ledger("g"))
		require.Zero(w, w.c.Exists(w.Context(), w.p.Scheduled(), w.p.Active()).Val())
		require.Equal(w, map[string]string{"unfinished": "0"}, w.c.HGetAll(w.Context(), w.p.Tenant("acme")).Val())
	})
}

// TestSweepManyJobs: a group with 600 non-ready and more than 2 * SweepJobs waiting jobs is swept
// in at least 3 calls. The non-ready jobs of another group of its tenant stay.
func TestSweepManyJobs(t *testing.T) {
	both(t, func(w *world) {
		const waiting, nonReady = 2*ledger.SweepJobs + 100, 600
		w.create("g", "acme", "T")
		w.create("other", "acme", "T")
		w.append("g", waiting)
		later := jobs(ledger.MaxAppend)
		for i := range later {
			later[i].RunAt = new(time.Now().Add(time.Hour))
		}
		for range nonReady / len(later) {
			w.appendJobs(ledger.AppendArgs{Group: "g", Jobs: later})
		}
		w.appendJobs(ledger.AppendArgs{Group: "other", Jobs: later})
		w.cancel("g")

		calls, n := 0, int64(0)
		for more := true; more; calls++ {
			var err error
			more, _, err = ledger.Sweep(w.Context(), w.c, w.p, "g")
			require.NoError(w, err)
			counts := w.ledger("g") // the counts agree with the states between the calls, too
			require.GreaterOrEqual(w, counts["cancelled"], n)
			n = counts["cancelled"]
		}
		require.GreaterOrEqual(w, calls, 3)
		require.Equal(w, map[string]int64{"cancelled": waiting + nonReady}, w.ledger("g"))
		require.Equal(w, map[string]int64{"non_ready": int64(len(later))}, w.ledger("other"))
		require.Equal(w, int64(len(later)), w.c.ZCard(w.Context(), w.p.NonReadyOf("acme")).Val())
		require.Equal(w, fmt.Sprint(len(later)), w.c.HGet(w.Context(), w.p.Load("T"), "non_ready").Val())
	})
}

// TestSweepManyNonReadyJobs: a cancelled group has 12,000 non-ready jobs, more than one call of
// Sweep removes. All are removed, although jobs of another group, which stay, are added between the
// calls.
func TestSweepManyNonReadyJobs(t *testing.T) {
	onRedis(t, func(w *world) {
		const nonReady = 12_000
		w.create("g", "acme", "T")
		w.create("other", "acme", "T")
		later := jobs(ledger.MaxAppend)
		for i := range later {
			later[i].RunAt = new(time.Now().Add(time.Hour))
		}
		for range nonReady / len(later) {
			w.appendJobs(ledger.AppendArgs{Group: "g", Jobs: later})
		}
		w.cancel("g")
		for calls := 0; ; calls++ {
			more, _, err := ledger.Sweep(w.Context(), w.c, w.p, "g")
			require.NoError(w, err)
			if !more {
				require.Greater(w, calls, 4)
				break
			}
			w.appendJobs(ledger.AppendArgs{Group: "other", Jobs: later[:10]})
		}
		left := w.c.ZRange(w.Context(), w.p.NonReadyOf("acme"), 0, -1).Val()
		require.Equal(w, int(w.ledger("other")["non_ready"]), len(left))
		for _, blob := range left {
			require.True(w, strings.HasPrefix(blob, "other|"))
		}
		require.Equal(w, fmt.Sprint(len(left)), w.c.HGet(w.Context(), w.p.Load("T"), "non_ready").Val())
	})
}

// TestCancelWhileRequeueing: a group that is cancelled after it was reopened, before its jobs are
// requeued, keeps them failed. Requeue then changes nothing.
func TestCancelWhileRequeueing(t *testing.T) {
	both(t, func(w *world) {
		w.failed("g", 3)
		_, err := ledger.Reopen(w.Context(), w.c, w.p, "g", "", ledger.RetryChoice{})
		require.NoError(w, err)
		w.cancel("g")
		w.sweep("g")
		w.unchanged(func() {
			w.requeue("g")
			_, err := w.reopen("g")
			require.ErrorIs(w, err, api.ErrConflict)
		})
		require.Equal(w, map[string]int64{"failed": 3}, w.ledger("g"))
		require.Equal(w, ledger.AdmitEmpty, w.admit("T", 10, noLimit).State)
	})
}

// TestCancelKeepsTheTag: a tenant whose only group is cancelled keeps its start tag, 5 after five
// admitted jobs. Admit removes an entry of the tenant in the lane, as an older version could leave
// it.
func TestCancelKeepsTheTag(t *testing.T) {
	both(t, func(w *world) {
		w.create("g", "acme", "T")
		w.append("g", 10)
		w.admit("T", 5, noLimit)
		w.cancel("g")
		require.Zero(w, w.c.Exists(w.Context(), w.p.FairLane("T", "normal"), w.p.FairTenant("T", "normal", "acme")).Val())
		life := w.c.HGet(w.Context(), w.p.Fair("T"), "gen").Val()
		require.NotEmpty(w, life)
		require.Equal(w, life+" 5", w.c.HGet(w.Context(), w.p.Tenant("acme"), "tag:T:normal").Val(), "of this life of its type")
		w.c.ZAdd(w.Context(), w.p.FairLane("T", "normal"), redis.Z{Score: 5, Member: "acme"}) // an entry that an older version has left
		require.Equal(w, ledger.AdmitEmpty, w.admit("T", 5, noLimit).State)
		require.Zero(w, w.c.Exists(w.Context(), w.p.FairLane("T", "normal")).Val())
	})
}
