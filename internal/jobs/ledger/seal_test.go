package ledger_test

import (
	"testing"

	"github.com/stretchr/testify/require"

	"github.com/bulkaction/bulkaction/api"
	"github.com/bulkaction/bulkaction/internal/jobs/ledger"
)

func TestSeal(t *testing.T) {
	both(t, func(w *world) {
		w.create("g", "acme", "T")
		w.append("g", 2)
		w.seal("g")
		require.Equal(w, "1", w.c.HGet(w.Context(), w.p.Group("g"), "sealed").Val())
		require.Equal(w, []string{"g"}, w.c.SMembers(w.Context(), w.p.Dirty()).Val())
		w.unchanged(func() {
			w.seal("g")
			w.sealWith("g", 2, true, nil)
			w.sealWith("g", 3, false, api.ErrConflict)
			w.sealWith("g", 1, false, api.ErrConflict)
		})
	})
}

func TestSealUnknown(t *testing.T) {
	both(t, func(w *world) {
		w.unchanged(func() {
			_, err := ledger.Seal(w.Context(), w.c, w.p, "g", nil)
			require.ErrorIs(w, err, api.ErrNotFound)
		})
	})
}

func TestSealCancelled(t *testing.T) {
	both(t, func(w *world) {
		w.create("g", "acme", "T")
		w.append("g", 1)
		w.cancel("g")
		w.unchanged(func() {
			_, err := ledger.Seal(w.Context(), w.c, w.p, "g", nil)
			require.ErrorIs(w, err, api.ErrConflict)
			w.sealWith("g", 1, false, api.ErrConflict)
		})
	})
}

// TestSealWithATotalBeforeTheJobs: for a group with 1 job a total of 3 is announced. Other totals,
// and a Seal without one, are refused; the append of 2 more jobs seals the group.
func TestSealWithATotalBeforeTheJobs(t *testing.T) {
	both(t, func(w *world) {
		w.create("g", "acme", "T")
		w.append("g", 1)
		w.sealWith("g", 3, false, nil)
		w.unchanged(func() {
			w.sealWith("g", 3, false, nil)             // again
			w.sealWith("g", 4, false, api.ErrConflict) // another total
			w.sealWith("g", 0, false, api.ErrConflict) // fewer than the group has
			_, err := ledger.Seal(w.Context(), w.c, w.p, "g", nil)
			require.ErrorIs(w, err, api.ErrConflict, "less than announced")
		})
		w.append("g", 2)
		w.unchanged(func() {
			w.seal("g")
			w.sealWith("g", 3, true, nil)
		})
		require.Equal(w, "1", w.c.HGet(w.Context(), w.p.Group("g"), "sealed").Val())
	})
}

func TestSealATotalThatIsThere(t *testing.T) {
	both(t, func(w *world) {
		w.create("g", "acme", "T")
		w.append("g", 2)
		w.unchanged(func() { w.sealWith("g", 1, false, api.ErrConflict) })
		w.sealWith("g", 2, true, nil)

		w.create("announced", "acme", "T", "total", "2")
		w.unchanged(func() {
			w.sealWith("announced", 3, false, api.ErrConflict)
			w.sealWith("announced", 2, false, nil)
		})
		w.create("empty", "acme", "T", "total", "0")
		w.seal("empty")
	})
}

// sealWith calls Seal with a total. It checks that Seal returns the values sealed, which says
// whether the group is sealed now, and want.
func (w *world) sealWith(group string, total int64, sealed bool, want error) {
	w.Helper()
	got, err := ledger.Seal(w.Context(), w.c, w.p, group, &total)
	require.ErrorIs(w, err, want)
	require.Equal(w, sealed, got)
}
