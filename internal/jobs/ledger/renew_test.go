package ledger_test

import (
	"slices"
	"testing"
	"time"

	"github.com/redis/go-redis/v9"
	"github.com/stretchr/testify/require"

	"github.com/bulkaction/bulkaction/internal/jobs/ledger"
	"github.com/bulkaction/bulkaction/internal/redisx/keyspace"
)

func (w *world) renew(consumer string, jobs ...taken) []int {
	w.Helper()
	held := make([]ledger.Held, len(jobs))
	for i, j := range jobs {
		held[i] = ledger.Held{Entry: j.entry, Group: j.Group, Ordinal: j.Ordinal, Attempt: max(j.Attempt, int(j.token))}
	}
	lost, err := ledger.Renew(w.Context(), w.c, w.p, "T", consumer, held)
	require.NoError(w, err)
	return lost
}

func TestRenew(t *testing.T) {
	both(t, func(w *world) {
		w.create("g", "acme", "T")
		w.append("g", 6)
		w.create("h", "acme", "T")
		w.append("h", 1)
		require.Equal(w, 7, w.admit("T", 10, noLimit).Moved)
		run := w.read("T", "c")
		slices.SortFunc(run, byJob)
		prefetched, started, ended, back, again, retried, cancelled := run[0], run[1:2], run[2:3], run[3:4], run[4:5], run[5:6], run[6]
		for _, jobs := range [][]taken{started, ended, back, again, again, retried} {
			w.start("T", jobs)
		}
		w.outcome("T", done(ended[0]))
		w.outcome("T", other(ledger.OutcomeRetry, back[0], time.Hour))
		stale := again[0]
		stale.token = 1 // the token of the first of two starts
		w.outcome("T", other(ledger.OutcomeReleased, retried[0], 0))
		w.promoteAll("T", 1)
		w.cancel("h")
		w.sweep("h")

		w.eventually(func() bool { return w.idle(started[0].entry) > 20*time.Millisecond })
		for range 2 { // the same call twice
			began := time.Now()
			require.Equal(w, []int{2, 3, 5, 6, 7}, w.renew("c", prefetched, started[0], ended[0], back[0], again[0], stale, retried[0], cancelled))
			for _, j := range []taken{prefetched, started[0], again[0]} {
				idle := w.idle(j.entry)
				require.LessOrEqual(w, idle, time.Since(began)+2*time.Millisecond, "the lease begins anew")
			}
		}
		require.Empty(w, w.renew("c"), "nothing is held")

		// If another consumer has claimed an entry, a Renew by the worker that holds the job's
		// attempt takes the entry back.
		require.NoError(w, w.c.XClaim(w.Context(), &redis.XClaimArgs{
			Stream: w.p.Ready("T"), Group: keyspace.GroupWorkers, Consumer: "thief", Messages: []string{started[0].entry},
		}).Err())
		require.Empty(w, w.renew("c", started[0]))
		require.Contains(w, w.pending(w.p.Ready("T")), "c "+started[0].entry)
	})
}

// idle returns the time since a pending entry of type T's ready stream was read, or its lease was
// last renewed.
func (w *world) idle(entry string) time.Duration {
	w.Helper()
	p, err := w.c.XPendingExt(w.Context(), &redis.XPendingExtArgs{
		Stream: w.p.Ready("T"), Group: keyspace.GroupWorkers, Start: entry, End: entry, Count: 1,
	}).Result()
	require.NoError(w, err)
	require.Len(w, p, 1)
	return p[0].Idle
}
