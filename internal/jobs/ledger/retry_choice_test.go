package ledger_test

import (
	"testing"

	"github.com/stretchr/testify/require"

	"github.com/bulkaction/bulkaction/api"
	"github.com/bulkaction/bulkaction/internal/jobs/ledger"
)

// TestRetryChoice: a retry that chooses an error code and a job requeues 3 of 6 failed jobs and
// deletes their dead letters. The others stay failed until a retry without a choice.
func TestRetryChoice(t *testing.T) {
	both(t, func(w *world) {
		w.create("g", "acme", "T")
		w.append("g", 6)
		w.seal("g")
		w.admit("T", 6, noLimit)
		run := w.read("T", "c")
		w.start("T", run)
		for i, code := range []string{"A", "A", "B", "C", "C", "C"} {
			o := other(ledger.OutcomeFailed, run[i], 0)
			o[0].Others[0].Code = code
			w.outcome("T", o)
		}
		w.advance("g")
		choose := func(request string, c ledger.RetryChoice) error {
			_, err := ledger.Reopen(w.Context(), w.c, w.p, "g", request, c)
			return err
		}
		letters := func() (jobs []string) {
			for _, m := range w.c.XRange(w.Context(), w.p.DeadLetters(), "-", "+").Val() {
				jobs = append(jobs, m.Values["job"].(string))
			}
			return jobs
		}
		require.Len(w, letters(), 6)

		require.ErrorIs(w, choose("", ledger.RetryChoice{Codes: []string{"X"}, Jobs: []int64{6, 99}}), api.ErrConflict)
		chosen := ledger.RetryChoice{Codes: []string{"A", "X"}, Jobs: []int64{3}}
		require.NoError(w, choose("r", chosen))
		require.NoError(w, choose("r", chosen), "the same request")
		require.NoError(w, choose("", chosen), "the same choice")
		require.ErrorContains(w, choose("", ledger.RetryChoice{}), "a retry of other jobs has just begun")
		w.requeue("g")
		require.Equal(w, map[string]int64{"waiting": 3, "failed": 3}, w.ledger("g"))
		require.ElementsMatch(w, []string{"g.2", "g.4", "g.5"}, letters())
		codes := w.c.HGetAll(w.Context(), w.p.Codes("g")).Val()
		require.Equal(w, []string{"0", "1", "2"}, []string{codes["A"], codes["B"], codes["C"]})

		// One of the three requeued jobs fails again; the other two are done. Then a retry without
		// a choice runs all failed jobs.
		w.admit("T", 6, noLimit)
		again := w.read("T", "c")
		require.Len(w, again, 3)
		w.start("T", again)
		w.outcome("T", other(ledger.OutcomeFailed, again[0], 0))
		w.outcome("T", done(again[1:]...))
		require.Len(w, letters(), 4)
		w.reduceAll()
		w.advance("g")
		require.NoError(w, choose("s", ledger.RetryChoice{}))
		w.requeue("g")
		require.Equal(w, int64(4), w.ledger("g")["waiting"])
		require.Empty(w, letters())
	})
}
