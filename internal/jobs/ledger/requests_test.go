package ledger_test

import (
	"testing"

	"github.com/redis/go-redis/v9"
	"github.com/stretchr/testify/require"

	"github.com/bulkaction/bulkaction/internal/jobs/ledger"
)

// TestQueueRequests: QueueRequests finds each of six request ids, of several forms, after its
// append and not before. Asked for all six and an unknown one, it answers false.
func TestQueueRequests(t *testing.T) {
	both(t, func(w *world) {
		stored := func(requests ...string) bool {
			var all func() bool
			_, _ = w.c.Pipelined(w.Context(), func(pipe redis.Pipeliner) error {
				all = ledger.QueueRequests(w.Context(), pipe, w.p, requests...)
				return nil
			})
			return all()
		}
		w.create("g", "acme", "T")
		var all []string
		for _, request := range []string{"a#g#1#0", "@", "@x-1", "@17", ledger.EntryRequest("1700000000000-0") + "#0", "@1-"} {
			require.False(w, stored(request), request)
			w.appendJobs(ledger.AppendArgs{Group: "g", Request: request, Jobs: jobs(1)})
			require.True(w, stored(request), request)
			all = append(all, request)
		}
		require.True(w, stored(all...))
		require.False(w, stored(append(all, "another")...))
		require.EqualValues(w, 2, w.c.ZCard(w.Context(), w.p.Entries()).Val())
	})
}
