package ledger_test

import (
	"testing"

	"github.com/stretchr/testify/require"

	"github.com/bulkaction/bulkaction/api"
	"github.com/bulkaction/bulkaction/internal/jobs/ledger"
)

func TestStatuses(t *testing.T) {
	both(t, func(w *world) {
		w.create("a", "acme", "T")
		w.create("b", "acme", "T")
		w.cancel("b")
		statuses, err := ledger.Statuses(w.Context(), w.c, w.p, []string{"b", "missing", "a"})
		require.NoError(w, err)
		require.Equal(w, []api.Status{api.StatusCancelled, "", api.StatusCreated}, statuses)
		statuses, err = ledger.Statuses(w.Context(), w.c, w.p, nil)
		require.NoError(w, err)
		require.Empty(w, statuses)

		require.NoError(w, w.c.Set(w.Context(), w.p.Group("list"), "1", 0).Err())
		_, err = ledger.Statuses(w.Context(), w.c, w.p, []string{"missing", "list"})
		require.ErrorContains(w, err, "WRONGTYPE")
	})
}

func TestTenantOf(t *testing.T) {
	both(t, func(w *world) {
		w.create("g", "acme", "T")
		tenant, err := ledger.TenantOf(w.Context(), w.c, w.p, "g")
		require.NoError(w, err)
		require.Equal(w, "acme", tenant)
		tenant, err = ledger.TenantOf(w.Context(), w.c, w.p, "missing")
		require.NoError(w, err)
		require.Empty(w, tenant)
	})
}
