package ledger_test

import (
	"testing"

	"github.com/stretchr/testify/require"

	"github.com/bulkaction/bulkaction/internal/jobs/ledger"
)

// TestUnsettled: Unsettled returns a group from its cancellation until the last sweep, and from its
// reopening until the last requeueing.
func TestUnsettled(t *testing.T) {
	both(t, func(w *world) {
		unsettled := func() map[string]bool {
			w.Helper()
			groups, err := ledger.Unsettled(w.Context(), w.c, w.p, []string{"cancelled", "reopened", "open", "missing", "wrong type"})
			require.NoError(w, err)
			return groups
		}
		require.NoError(w, w.c.Set(w.Context(), w.p.Group("wrong type"), "1", 0).Err())
		w.create("open", "acme", "U")
		w.failed("reopened", 2)
		w.create("cancelled", "acme", "U")
		w.append("cancelled", 1)
		require.Empty(w, unsettled())

		w.cancel("cancelled")
		_, err := w.reopen("reopened")
		require.NoError(w, err)
		require.Equal(w, map[string]bool{"cancelled": true, "reopened": true}, unsettled())

		w.sweep("cancelled")
		w.requeue("reopened")
		require.Empty(w, unsettled())
	})
}
