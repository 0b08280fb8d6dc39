package ledger_test

import (
	"testing"

	"github.com/stretchr/testify/require"

	"github.com/bulkaction/bulkaction/internal/jobs/ledger"
)

func TestLifeOfAGroup(t *testing.T) {
	both(t, func(w *world) {
		w.create("g", "acme", "T")
		require.Equal(w, "CREATED", w.status("g"))
		w.append("g", 5)
		w.append("g", 5)
		require.Equal(w, map[string]int64{"waiting": 10}, w.ledger("g"))
		w.seal("g")
		w.advance("g")
		require.Equal(w, "DISPATCHED", w.status("g"))

		r := w.admit("T", 4, noLimit)
		require.Equal(w, ledger.AdmitOK, r.State)
		require.Equal(w, 4, r.Moved)
		require.Equal(w, []ledger.Permit{{Tenant: "acme", N: 4}}, r.Permits)
		r = w.admit("T", 100, noLimit)
		require.Equal(w, 6, r.Moved)
		r = w.admit("T", 100, noLimit)
		require.Equal(w, ledger.AdmitEmpty, r.State)
		require.Equal(w, map[string]int64{"ready": 10}, w.ledger("g"))

		jobs := w.read("T", "c1")
		require.Len(w, jobs, 10)
		w.start("T", jobs)
		require.Equal(w, map[string]int64{"in_flight": 10}, w.ledger("g"))
		require.Equal(w, "acme", jobs[0].terms.Tenant)
		w.advance("g")
		require.Equal(w, "RUNNING", w.status("g"))

		require.Equal(w, ledger.OutcomeReply{Owned: 6}, w.outcome("T", done(jobs[:6]...)))
		require.Equal(w, ledger.OutcomeReply{Stale: 6}, w.outcome("T", done(jobs[:6]...)), "the same outcome again changes nothing")
		require.Equal(w, ledger.OutcomeReply{Owned: 1}, w.outcome("T", other(ledger.OutcomeRetry, jobs[6], 0)))
		require.Equal(w, ledger.OutcomeReply{Owned: 1, Failed: 1}, w.outcome("T", other(ledger.OutcomeFailed, jobs[7], 0)))
		require.Equal(w, ledger.OutcomeReply{Owned: 1}, w.outcome("T", other(ledger.OutcomeReleased, jobs[8], 0)))
		require.Equal(w, ledger.OutcomeReply{Owned: 1}, w.outcome("T", done(jobs[9])))
		require.Equal(w, map[string]int64{"done": 7, "failed": 1, "non_ready": 2}, w.ledger("g"))
		require.Equal(w, int64(0), w.c.XLen(w.Context(), w.p.Ready("T")).Val())

		w.promoteAll("T", 2)
		again := w.read("T", "c1")
		w.start("T", again)
		require.Equal(w, 2, again[0].Attempt)
		require.Equal(w, ledger.OutcomeReply{Owned: 2}, w.outcome("T", done(again...)))
		w.advance("g")
		require.Equal(w, "AGGREGATING", w.status("g"))
		w.reduceAll()
		w.advance("g")
		require.Equal(w, "COMPLETED", w.status("g"))
		require.Equal(w, int64(1), w.c.XLen(w.Context(), w.p.DeadLetters()).Val())
		require.Equal(w, "1", w.c.HGet(w.Context(), w.p.Codes("g"), "BOOM").Val())
		require.Equal(w, int64(0), w.c.SCard(w.Context(), w.p.Active()).Val())

		// The next round runs only the failed jobs.
		round, err := ledger.Reopen(w.Context(), w.c, w.p, "g", "", ledger.RetryChoice{})
		require.NoError(w, err)
		require.Equal(w, 2, round)
		more, err := ledger.Requeue(w.Context(), w.c, w.p, "g")
		require.NoError(w, err)
		require.False(w, more)
		require.Equal(w, map[string]int64{"done": 9, "waiting": 1}, w.ledger("g"))
		require.Equal(w, 1, w.admit("T", 10, noLimit).Moved)
		last := w.read("T", "c2")
		w.start("T", last)
		w.outcome("T", done(last...))
		w.reduceAll()
		w.advance("g")
		require.Equal(w, "COMPLETED", w.status("g"))
		require.Equal(w, map[string]int64{"done": 10}, w.ledger("g"))
	})
}
