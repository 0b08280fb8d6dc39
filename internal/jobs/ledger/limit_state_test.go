package ledger_test

import (
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/bulkaction/bulkaction/internal/jobs/ledger"
)

func (w *world) used(l ledger.Limit) int64 {
	w.Helper()
	n, err := ledger.PermitsUsed(w.Context(), w.c, w.p, l)
	require.NoError(w, err)
	return n
}

// TestPermitsUsed: PermitsUsed counts what admit and promote spend, with every limiter, and changes
// nothing.
func TestPermitsUsed(t *testing.T) {
	each(t, func(w *world, limiter string) {
		l := within(limiter, 1000*time.Hour, 100)
		w.nonReady("g", 2)
		require.Zero(w, w.used(l))
		w.backlog("acme", "T", 20)
		require.Equal(w, 7, w.admit("T", 7, l).Moved)
		require.EqualValues(w, 7, w.used(l))
		moved := 0
		w.eventually(func() bool { moved += w.promote(l, "T").Moved; return moved == 2 })

		before := w.dump()
		require.EqualValues(w, 9, w.used(l))
		require.EqualValues(w, 9, w.used(l), "it answers again")
		require.Equal(w, before, w.dump(), "it changes nothing")
		require.Zero(w, w.used(noLimit))
	})
}

// TestPermitsUsedAboveTheQuota: with the fixed and the sliding limiter, PermitsUsed reports all 10
// permits that were spent under a limit of 100, also when it is called with a limit of 4.
func TestPermitsUsedAboveTheQuota(t *testing.T) {
	each(t, func(w *world, limiter string) {
		if limiter == ledger.LimiterToken {
			return // its state is a time: with a smaller quota the same time is worth fewer permits
		}
		l := within(limiter, 1000*time.Hour, 100)
		w.backlog("acme", "T", 20)
		w.admit("T", 10, l)
		l.Permits = 4
		require.EqualValues(w, 10, w.used(l))
	})
}
