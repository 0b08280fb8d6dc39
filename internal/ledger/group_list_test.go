package ledger_test

import (
	"testing"

	"github.com/redis/go-redis/v9"
	"github.com/stretchr/testify/require"

	"github.com/bulkaction/bulkaction/internal/ledger"
)

func TestListGroups(t *testing.T) {
	both(t, func(w *world) {
		for _, g := range []ledger.CreatedGroup{{5, "a"}, {5, "b"}, {5, "c"}, {5, "d"}, {7, "e"}, {3, "f"}} {
			w.c.ZAdd(w.Context(), w.p.Groups(), redis.Z{Score: g.Created, Member: g.ID})
			if g.ID != "d" {
				w.c.ZAdd(w.Context(), w.p.GroupsOf("acme"), redis.Z{Score: g.Created, Member: g.ID})
			}
		}
		list := func(tenant string, before ledger.CreatedGroup, limit int) (ids string) {
			groups, err := ledger.ListGroups(w.Context(), w.c, w.p, tenant, before, limit)
			require.NoError(w, err)
			for _, g := range groups {
				ids += g.ID
			}
			return ids
		}
		require.Equal(w, "edcbaf", list("", ledger.Newest(), 10))
		require.Equal(w, "ecbaf", list("acme", ledger.Newest(), 10))
		require.Equal(w, "ed", list("", ledger.Newest(), 2))
		require.Equal(w, "dc", list("", ledger.CreatedGroup{Created: 7, ID: "e"}, 2))
		// b, c and d are as old as the place and fill the first page.
		require.Equal(w, "af", list("", ledger.CreatedGroup{Created: 5, ID: "b"}, 3))
		require.Equal(w, "f", list("", ledger.CreatedGroup{Created: 5, ID: "a"}, 1))
		require.Empty(w, list("", ledger.CreatedGroup{Created: 3, ID: "f"}, 1))
		require.Empty(w, list("nobody", ledger.Newest(), 1))
	})
}
