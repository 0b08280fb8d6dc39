package ledger_test

import (
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/bulkaction/bulkaction/api"
	"github.com/bulkaction/bulkaction/internal/jobs/ledger"
)

func TestDeadLetters(t *testing.T) {
	both(t, func(w *world) {
		w.failed("g", 3)
		list := func(before string, n int) []api.DeadLetter {
			all, err := ledger.DeadLetters(w.Context(), w.c, w.p, before, "", n)
			require.NoError(w, err)
			return all
		}
		all := list("", 10)
		require.Len(w, all, 3)
		d := all[2]
		require.WithinDuration(w, time.Now(), d.At, time.Minute)
		d.EntryID, d.At = "", time.Time{}
		require.Equal(w, api.DeadLetter{
			Job: "g.0", Tenant: "acme", Group: "g", Type: "T", Code: "BOOM", Error: "it broke", Attempts: 2, Payload: []byte(`{"n":0}`),
		}, d)
		require.Equal(w, all[:1], list("", 1))
		require.Equal(w, all[1:], list(all[0].EntryID, 10))
		require.Empty(w, list(all[2].EntryID, 10))
	})
}
