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
	onStores(t, func(w *world) {
		w.due("non-ready", "acme", "T", float64(time.Now().Add(time.Hour).UnixMilli()))
		w.everywhere("g")
		w.append("g", 1)
		w.fill("keep", 1, "acme", "T")
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
	onStores(t, func(w *world) {
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
	onStores(t, func(w *world) {
		w.fill("g", 3, "acme", "T", "run_at", inAnHour())
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
	onRedis(t, func(w *world) {
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
	onStores(t, func(w *world) {
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
	onStores(t, func(w *world) {
		w.fill("g", 10, "acme", "T")
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

// shared lists the keys of a partition that may remain after all groups and tenants are deleted.
var shared = []string{"outbox", "rate", "watch", "dead-letters", "results", "load:T", "load:U", "fair:T", "fair:U", "ready:T", "ready:U", "types", "wake:watcher", "wake:fetcher", "wake:dispatcher", "wake:aggregator"}

// TestExpire: a failed, a completed or a cancelled group leaves no key of its own after it has
// expired. Late calls of Admit, Promote, Sweep, Requeue and Advance create none of its hash, its
// states and its tenant's hash.
func TestExpire(t *testing.T) {
	for name, end := range map[string]func(w *world){
		"failed": func(w *world) { w.failed("g", 3) },
		"completed": func(w *world) {
			w.create("g", "acme", "T")
			w.appendJobs(ledger.AppendArgs{Group: "g", Mode: ledger.AppendSeal, Jobs: []ledger.NewJob{{Payload: large}, {Payload: []byte("1")}, {Type: "U", Payload: []byte("2")}}})
			run := w.begin("T", "c", 2)
			w.outcome("T", done(run[0]))
			w.outcome("T", other(ledger.OutcomeRetry, run[1], 0))
			w.promoteAll("T", 1)
			again := w.read("T", "c")
			w.start("T", again)
			w.outcome("T", done(again...))
			w.outcome("U", done(w.begin("U", "c", 1)...))
			w.reduceAll()
			w.advance("g")
			require.Equal(w, "COMPLETED", w.status("g"))
		},
		"cancelled": func(w *world) {
			w.everywhere("g")
			w.cancel("g")
			w.sweep("g")
			w.reduceAll()
			w.start("T", w.reread("T")) // the remaining entries of the group in the stream
			w.c.Del(w.Context(), w.p.RateLimited("T"), w.p.Rate())
			w.limits.last = ""
		},
	} {
		t.Run(name, func(t *testing.T) {
			onStores(t, func(w *world) {
				end(w)
				w.expire("g")
				var left []string
				for _, key := range w.keys() {
					key = strings.TrimPrefix(key, w.p.Base())
					require.Contains(w, shared, key)
					left = append(left, key)
				}
				require.Contains(w, left, "outbox")
				require.Zero(w, w.c.XLen(w.Context(), w.p.Ready("T")).Val())
				require.Zero(w, w.c.XLen(w.Context(), w.p.ResultStream()).Val())
				w.unchanged(func() { w.expire("g") })

				// Late calls do not create it again.
				w.admit("T", 10, noLimit)
				w.promote(noLimit, "T")
				w.sweep("g")
				w.requeue("g")
				w.advance("g")
				require.Zero(w, w.c.Exists(w.Context(), w.p.Group("g"), w.p.States("g"), w.p.Tenant("acme")).Val())
			})
		})
	}
}

func TestExpireKeepsTheTenantOfOtherGroups(t *testing.T) {
	onStores(t, func(w *world) {
		w.failed("g", 1)
		w.fill("h", 1, "acme", "T")
		w.expire("g")
		require.Equal(w, []string{"h"}, w.c.ZRange(w.Context(), w.p.GroupsOf("acme"), 0, -1).Val())
		require.Equal(w, "1", w.countersOf("acme")["active"])
		require.Equal(w, 1, w.admit("T", 1, noLimit).Moved)
	})
}

func TestExpireRefusesWhatIsOpen(t *testing.T) {
	onStores(t, func(w *world) {
		w.fill("g", 1, "acme", "T")
		w.fence()
		refused := func() {
			w.Helper()
			w.unchanged(func() { require.NoError(w, ledger.Expire(w.Context(), w.c, w.p, "g", w.fence(), false)) })
		}
		refused()
		w.cancel("g")
		refused() // refused until the group is swept
		w.sweep("g")
		w.expire("g")
		require.Zero(w, w.c.Exists(w.Context(), w.p.Group("g")).Val())
	})
}

// TestExpireResults: Expire of the results alone deletes a group's result lines, and keeps its
// counts, also when repeated. After the group has expired, that call creates no group.
func TestExpireResults(t *testing.T) {
	onStores(t, func(w *world) {
		for _, e := range w.reported("g", 2) {
			w.reduceInto("0", e)
		}
		w.advance("g")
		require.Equal(w, int64(2), w.c.LLen(w.Context(), w.p.Results("g")).Val())
		for range 2 {
			require.NoError(w, ledger.Expire(w.Context(), w.c, w.p, "g", w.fence(), true))
			require.Zero(w, w.c.Exists(w.Context(), w.p.Results("g")).Val())
			require.Equal(w, "1", w.c.HGet(w.Context(), w.p.Group("g"), "results_expired").Val())
			require.Equal(w, map[string]int64{"done": 2}, w.ledger("g"))
		}
		w.expire("g")
		require.NoError(w, ledger.Expire(w.Context(), w.c, w.p, "g", w.fence(), true))
		require.Zero(w, w.c.Exists(w.Context(), w.p.Group("g")).Val(), "it does not come back for that")
	})
}

// dropConsumer calls ledger.DropConsumer for the ready stream of type T, and returns whether the
// consumer was dropped.
func (w *world) dropConsumer(name string) bool {
	w.Helper()
	dropped, err := ledger.DropConsumer(w.Context(), w.c, w.p.Ready("T"), "workers", name, 0)
	require.NoError(w, err)
	return dropped
}

func TestDropConsumer(t *testing.T) {
	onStores(t, func(w *world) {
		_, err := ledger.DropConsumer(w.Context(), w.c, w.p.Ready("T"), "workers", "c", 0)
		require.Error(w, err, "there is no such stream")
		w.fill("g", 1, "acme", "T")
		run := w.begin("T", "c", 1)
		require.NoError(w, w.c.XGroupCreateConsumer(w.Context(), w.p.Ready("T"), "workers", "idle").Err())
		w.unchanged(func() {
			require.False(w, w.dropConsumer("c"), "its entries would be found by nobody any more")
			require.False(w, w.dropConsumer("nobody"))
			dropped, err := ledger.DropConsumer(w.Context(), w.c, w.p.Ready("T"), "workers", "idle", 1e12)
			require.NoError(w, err)
			require.False(w, dropped, "it was active a moment ago")
		})
		w.outcome("T", done(run...))
		require.True(w, w.dropConsumer("c"))
		require.False(w, w.dropConsumer("c"), "twice")
		require.True(w, w.dropConsumer("idle"))
		require.Empty(w, w.c.XInfoConsumers(w.Context(), w.p.Ready("T"), "workers").Val())
	})
}

// retire calls ledger.Retire for a type, which retires it if it was last served before now plus
// ahead. It returns whether the type was retired.
func (w *world) retire(typ string, ahead time.Duration) bool {
	w.Helper()
	retired, err := ledger.Retire(w.Context(), w.c, w.p, typ, time.Now().Add(ahead))
	require.NoError(w, err)
	return retired
}

func TestRetire(t *testing.T) {
	onStores(t, func(w *world) {
		w.unchanged(func() { require.False(w, w.retire("T", time.Hour), "there is no such type") })
		w.fill("g", 1, "acme", "T")
		refused := func(why string) { w.unchanged(func() { require.False(w, w.retire("T", time.Hour), why) }) }
		refused("it waits")
		w.admit("T", 1, noLimit)
		refused("it is ready")
		run := w.read("T", "c")
		w.start("T", run)
		refused("it runs")
		w.outcome("T", other(ledger.OutcomeReleased, run[0], 0))
		refused("it is non-ready")
		w.promoteAll("T", 1)
		again := w.read("T", "c")
		w.start("T", again)
		w.outcome("T", done(again...))
		w.unchanged(func() { require.False(w, w.retire("T", -time.Hour), "it was served since") })

		require.True(w, w.retire("T", time.Hour))
		require.Zero(w, w.c.Exists(w.Context(), w.p.Types(), w.p.Load("T"), w.p.Ready("T"), w.p.Fair("T"), w.p.FairLane("T", "normal"), w.p.RateLimited("T")).Val())
		w.unchanged(func() { require.False(w, w.retire("T", time.Hour)) })

		w.append("g", 1) // a new job of the type makes it known again
		w.outcome("T", done(w.begin("T", "c", 1)...))
		require.Equal(w, map[string]int64{"done": 2}, w.ledger("g"))
	})
}

func TestHaveJobs(t *testing.T) {
	onStores(t, func(w *world) {
		have := func() bool {
			w.Helper()
			all, err := ledger.HaveJobs(w.Context(), w.c, w.p, []string{"missing", "T"})
			require.NoError(w, err)
			require.False(w, all[0])
			return all[1]
		}
		require.False(w, have())
		w.fill("g", 1, "acme", "T")
		require.True(w, have(), "it waits")
		w.admit("T", 1, noLimit)
		require.True(w, have(), "it is ready")
		run := w.read("T", "c")
		w.start("T", run)
		require.True(w, have(), "it is in flight")
		w.outcome("T", other(ledger.OutcomeRetry, run[0], time.Hour))
		require.True(w, have(), "it is non-ready")
		w.cancel("g")
		w.sweep("g")
		require.False(w, have())
		all, err := ledger.HaveJobs(w.Context(), w.c, w.p, nil)
		require.NoError(w, err)
		require.Empty(w, all)
	})
}

func TestDeadLetters(t *testing.T) {
	onStores(t, func(w *world) {
		w.failed("g", 3)
		list := func(before string, n int) []api.DeadLetter {
			all, err := ledger.DeadLetters(w.Context(), w.c, w.p, before, "", n)
			require.NoError(w, err)
			return all
		}
		all := list("", 10)
		require.Len(w, all, 3)
		d := all[2]
		require.WithinDuration(w, time.Now(), d.At, time.Minute)
		d.EntryID, d.At = "", time.Time{}
		require.Equal(w, api.DeadLetter{
			Job: "g.0", Tenant: "acme", Group: "g", Type: "T", Code: "BOOM", Error: "it broke", Attempts: 2, Payload: []byte(`{"n":0}`),
		}, d)
		require.Equal(w, all[:1], list("", 1))
		require.Equal(w, all[1:], list(all[0].EntryID, 10))
		require.Empty(w, list(all[2].EntryID, 10))
	})
}
