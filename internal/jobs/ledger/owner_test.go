package ledger_test

import (
	"testing"

	"github.com/redis/go-redis/v9"
	"github.com/stretchr/testify/require"

	"github.com/bulkaction/bulkaction/api"
	"github.com/bulkaction/bulkaction/internal/jobs/ledger"
)

func TestOwner(t *testing.T) {
	both(t, func(w *world) {
		_, err := ledger.GroupOwner(w.Context(), w.c, w.p, "g")
		require.ErrorIs(w, err, api.ErrNotFound)
		for _, tenant := range []string{"acme", "acme", "globex"} {
			owner, err := ledger.RegisterOwner(w.Context(), w.c, w.p, "g", tenant)
			require.NoError(w, err)
			require.Equal(w, "acme", owner)
		}
		owner, err := ledger.GroupOwner(w.Context(), w.c, w.p, "g")
		require.NoError(w, err)
		require.Equal(w, "acme", owner)
		var first, none func() string
		_, _ = w.c.Pipelined(w.Context(), func(pipe redis.Pipeliner) error {
			first, none = ledger.QueueOwner(w.Context(), pipe, w.p, "g"), ledger.QueueOwner(w.Context(), pipe, w.p, "h")
			return nil
		})
		require.Equal(w, "acme", first())
		require.Empty(w, none())
	})
}
