package ledger_test

import (
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/bulkaction/bulkaction/api"
	"github.com/bulkaction/bulkaction/internal/jobs/ledger"
)

// totals returns the totals of a type and, separately, the totals of all retired types.
func (w *world) totals(typ string) (of, retired api.JobTotals) {
	w.Helper()
	loads, err := ledger.Loads(w.Context(), w.c, w.p, []string{typ})
	require.NoError(w, err)
	st, err := ledger.ReadPartition(w.Context(), w.c, w.p)
	require.NoError(w, err)
	return loads[0].Totals, st.Retired
}

// TestTotals: the totals count each event that takes effect once, and survive the retirement of the
// type.
func TestTotals(t *testing.T) {
	both(t, func(w *world) {
		is := func(want api.JobTotals) {
			w.Helper()
			of, retired := w.totals("T")
			require.Equal(w, want, of)
			require.Zero(w, retired)
		}
		is(api.JobTotals{})
		w.create("g", "acme", "T")
		w.append("g", 4)
		w.appendJobs(ledger.AppendArgs{Group: "g", Jobs: []ledger.NewJob{{Payload: []byte("1"), RunAt: new(time.Now().Add(300 * time.Millisecond))}}})
		is(api.JobTotals{Accepted: 5})
		held := w.begin("T", "c", 4)
		is(api.JobTotals{Accepted: 5, Started: 4})
		report := func() {
			w.outcome("T", done(held[0], held[1]))
			w.outcome("T", other(ledger.OutcomeRetry, held[2], 0))
			w.outcome("T", other(ledger.OutcomeFailed, held[3], 0))
		}
		report()
		is(api.JobTotals{Accepted: 5, Started: 4, Done: 2, Failed: 1, Retried: 1})
		report() // twice: all are stale
		is(api.JobTotals{Accepted: 5, Started: 4, Done: 2, Failed: 1, Retried: 1})
		w.promoteAll("T", 2)
		again := w.read("T", "c")
		w.start("T", again)
		w.outcome("T", done(again...))
		want := api.JobTotals{Accepted: 5, Started: 6, Done: 4, Failed: 1, Retried: 1}
		is(want)

		require.True(w, w.retire("T", time.Hour))
		of, retired := w.totals("T")
		require.Zero(w, of)
		require.Equal(w, want, retired)
		require.False(w, w.retire("T", time.Hour))
		w.append("g", 1)
		of, retired = w.totals("T")
		require.Equal(w, api.JobTotals{Accepted: 1}, of)
		require.Equal(w, want, retired)
	})
}
