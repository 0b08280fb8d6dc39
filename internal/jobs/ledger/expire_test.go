package ledger_test

import (
	"strings"
	"testing"

	"github.com/stretchr/testify/require"

	"github.com/bulkaction/bulkaction/internal/jobs/ledger"
)

// shared lists the keys of a partition that may remain after all groups and tenants are deleted.
var shared = []string{"outbox", "watch", "dead-letters", "results", "load:T", "load:U", "fair:T", "fair:U", "ready:T", "ready:U", "types", "wake:watcher", "wake:fetcher", "wake:dispatcher"}

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
		},
	} {
		t.Run(name, func(t *testing.T) {
			both(t, func(w *world) {
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
	both(t, func(w *world) {
		w.failed("g", 1)
		w.create("h", "acme", "T")
		w.append("h", 1)
		w.expire("g")
		require.Equal(w, []string{"h"}, w.c.ZRange(w.Context(), w.p.GroupsOf("acme"), 0, -1).Val())
		require.Equal(w, "1", w.countersOf("acme")["active"])
		require.Equal(w, 1, w.admit("T", 1, noLimit).Moved)
	})
}

func TestExpireRefusesWhatIsOpen(t *testing.T) {
	both(t, func(w *world) {
		w.create("g", "acme", "T")
		w.append("g", 1)
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
	both(t, func(w *world) {
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
	both(t, func(w *world) {
		_, err := ledger.DropConsumer(w.Context(), w.c, w.p.Ready("T"), "workers", "c", 0)
		require.Error(w, err, "there is no such stream")
		w.create("g", "acme", "T")
		w.append("g", 1)
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
