package ledger_test

import (
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/bulkaction/bulkaction/internal/jobs/ledger"
)

func TestLead(t *testing.T) {
	both(t, func(w *world) {
		lead := func(who string, lease time.Duration) int64 {
			w.Helper()
			fence, err := ledger.Lead(w.Context(), w.c, w.p, who, lease)
			require.NoError(w, err)
			return fence
		}
		over := func() { require.NoError(w, w.c.HSet(w.Context(), w.p.Watch(), "until", 1).Err()) }
		w.unchanged(func() { require.Zero(w, lead("w1", 0), "there is nothing to give up") })
		require.Equal(w, int64(1), lead("w1", time.Minute))
		require.Equal(w, int64(1), lead("w1", time.Hour), "the same leader keeps its number")
		w.unchanged(func() {
			require.Zero(w, lead("w2", time.Minute), "another leads")
			require.Zero(w, lead("w2", 0), "and can't be deposed")
		})
		over()
		require.Equal(w, int64(2), lead("w2", time.Minute), "a takeover raises the number")
		require.Zero(w, lead("w1", time.Minute))
		over()
		require.Equal(w, int64(3), lead("w2", time.Minute), "and so does a lease that was let lapse: another may have led meanwhile")
		require.Zero(w, lead("w2", 0))
		require.Equal(w, int64(4), lead("w1", time.Minute), "what was given up is free at once")
	})
}
