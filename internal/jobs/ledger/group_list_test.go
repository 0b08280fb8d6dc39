package ledger_test

import (
	"testing"
	"time"

	"github.com/redis/go-redis/v9"
	"github.com/stretchr/testify/require"

	"github.com/bulkaction/bulkaction/api"
	"github.com/bulkaction/bulkaction/internal/jobs/ledger"
)

func TestListGroups(t *testing.T) {
	both(t, func(w *world) {
		for _, g := range []ledger.ListedGroup{{5, "a"}, {5, "b"}, {5, "c"}, {5, "d"}, {7, "e"}, {3, "f"}} {
			w.c.ZAdd(w.Context(), w.p.Groups(), redis.Z{Score: g.At, Member: g.ID})
			if g.ID != "d" {
				w.c.ZAdd(w.Context(), w.p.GroupsOf("acme"), redis.Z{Score: g.At, Member: g.ID})
			}
		}
		list := func(tenant string, before ledger.ListedGroup, limit int) (ids string) {
			groups, err := ledger.ListGroups(w.Context(), w.c, w.p, ledger.GroupRange{Tenant: tenant, Before: before}, limit)
			require.NoError(w, err)
			for _, g := range groups {
				ids += g.ID
			}
			return ids
		}
		require.Equal(w, "edcbaf", list("", ledger.Newest(), 10))
		require.Equal(w, "ecbaf", list("acme", ledger.Newest(), 10))
		require.Equal(w, "ed", list("", ledger.Newest(), 2))
		require.Equal(w, "dc", list("", ledger.ListedGroup{At: 7, ID: "e"}, 2))
		// b, c and d are as old as the place and fill the first page.
		require.Equal(w, "af", list("", ledger.ListedGroup{At: 5, ID: "b"}, 3))
		require.Equal(w, "f", list("", ledger.ListedGroup{At: 5, ID: "a"}, 1))
		require.Empty(w, list("", ledger.ListedGroup{At: 3, ID: "f"}, 1))
		require.Empty(w, list("nobody", ledger.Newest(), 1))

		since, err := ledger.ListGroups(w.Context(), w.c, w.p, ledger.GroupRange{Before: ledger.Newest(), Since: time.UnixMilli(5)}, 10)
		require.NoError(w, err)
		require.Len(w, since, 5, "f is older")
	})
}

// TestListWith: ListWith names a list with all groups of the status, for every status: also while a
// cancelled group is not swept yet, and after a retry.
func TestListWith(t *testing.T) {
	both(t, func(w *world) {
		w.failed("failed", 2)
		w.failed("again", 2)
		_, err := w.reopen("again")
		require.NoError(w, err)
		w.create("completed", "acme", "T")
		w.seal("completed")
		w.advance("completed")
		w.create("cancelled", "acme", "T")
		w.append("cancelled", 1)
		w.cancel("cancelled")
		w.create("open", "acme", "T")
		for status, ids := range map[string][]string{
			"FAILED": {"failed"}, "CREATED": {"open", "again"}, "COMPLETED": {"completed"}, "CANCELLED": {"cancelled"},
			"RUNNING": nil, "DISPATCHED": nil, "AGGREGATING": nil,
		} {
			found, err := ledger.ListGroups(w.Context(), w.c, w.p, ledger.GroupRange{List: ledger.ListWith(api.Status(status)), Before: ledger.Newest()}, 100)
			require.NoError(w, err)
			var with []string
			for _, g := range found {
				if w.status(g.ID) == status {
					with = append(with, g.ID)
				}
			}
			require.ElementsMatch(w, ids, with, status)
		}
		at, _ := w.c.ZScore(w.Context(), w.p.Failed(), "failed").Result()
		require.Equal(w, number(w.c.HGet(w.Context(), w.p.Group("failed"), "at:failed").Val()), int64(at))
		require.Equal(w, []string{"failed"}, w.c.ZRange(w.Context(), w.p.Failed(), 0, -1).Val(), "only failed groups")
	})
}
