package ledger_test

import (
	"errors"
	"slices"
	"testing"

	"github.com/stretchr/testify/require"

	"github.com/bulkaction/bulkaction/internal/jobs/ledger"
)

func TestResultsAndFailures(t *testing.T) {
	both(t, func(w *world) {
		w.c.RPush(w.Context(), w.p.Results("g"), "1\n2", "3", "4", "5", "6", "7", "8", "9", "10", "11\n12", "13") // two pages
		var lines []string
		require.NoError(w, ledger.Results(w.Context(), w.c, w.p, "g", func(line []byte) error {
			lines = append(lines, string(line))
			return nil
		}))
		require.Equal(w, []string{"1", "2", "3", "4", "5", "6", "7", "8", "9", "10", "11", "12", "13"}, lines)

		const n = 150 // more than one page
		w.failed("f", n)
		var ordinals, want []int64
		require.NoError(w, ledger.Failures(w.Context(), w.c, w.p, "f", func(e ledger.JobError) error {
			require.Equal(w, "BOOM", e.Code)
			ordinals = append(ordinals, e.Ordinal)
			return nil
		}))
		for i := range int64(n) {
			want = append(want, i)
		}
		slices.Sort(ordinals)
		require.Equal(w, want, ordinals)

		stop := errors.New("enough")
		require.ErrorIs(w, ledger.Results(w.Context(), w.c, w.p, "g", func([]byte) error { return stop }), stop)
		require.ErrorIs(w, ledger.Failures(w.Context(), w.c, w.p, "f", func(ledger.JobError) error { return stop }), stop)
		w.c.HSet(w.Context(), w.p.Failures("f"), "0", "no JSON")
		require.ErrorContains(w, ledger.Failures(w.Context(), w.c, w.p, "f", func(ledger.JobError) error { return nil }), "failures of group f: read error record")

		for _, ordinal := range []string{"-1", "268435456", "9223372036854775807"} { // another program wrote it
			w.c.HSet(w.Context(), w.p.Failures("f"), "0", `{"ordinal":`+ordinal+`}`)
			require.ErrorContains(w, ledger.Failures(w.Context(), w.c, w.p, "f", func(ledger.JobError) error { return nil }), "failures of group f: no job has the ordinal "+ordinal)
		}
	})
}
