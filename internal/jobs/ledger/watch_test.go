package ledger_test

import (
	"testing"

	"github.com/stretchr/testify/require"

	"github.com/bulkaction/bulkaction/internal/jobs/ledger"
)

func TestCountRenewal(t *testing.T) {
	both(t, func(w *world) {
		for want := range int64(3) {
			n, err := ledger.CountRenewal(w.Context(), w.c, w.p)
			require.NoError(w, err)
			require.Equal(w, want+1, n)
		}
		w.fence() // a leader's lease keeps the counter
		n, err := ledger.CountRenewal(w.Context(), w.c, w.p)
		require.NoError(w, err)
		require.EqualValues(w, 4, n)
	})
}

// TestTakeDeletedFound: TakeDeletedFound tells once that Reclaim has found a pending entry deleted.
func TestTakeDeletedFound(t *testing.T) {
	both(t, func(w *world) {
		take := func() bool {
			w.Helper()
			suspicious, err := ledger.TakeDeletedFound(w.Context(), w.c, w.p)
			require.NoError(w, err)
			return suspicious
		}
		require.False(w, take())
		w.create("g", "acme", "T")
		w.append("g", 1)
		run := w.begin("T", "c", 1)
		require.NoError(w, w.c.XDel(w.Context(), w.p.Ready("T"), run[0].entry).Err())
		require.NotEmpty(w, w.reclaim("T", 1).Missing)
		require.True(w, take())
		require.False(w, take())
	})
}
