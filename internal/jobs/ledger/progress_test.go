package ledger_test

import (
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/bulkaction/bulkaction/api"
	"github.com/bulkaction/bulkaction/internal/jobs/ledger"
)

func TestReadProgress(t *testing.T) {
	both(t, func(w *world) {
		read := func(groups ...string) []ledger.Progress {
			refs := make([]ledger.GroupRef, len(groups))
			for i, g := range groups {
				refs[i] = ledger.GroupRef{Partition: w.p, ID: g}
			}
			all, err := ledger.ReadProgress(w.Context(), w.c, refs)
			require.NoError(w, err)
			return all
		}
		require.Empty(w, read())

		w.create("g", "acme", "T")
		w.append("g", 6)
		w.seal("g")
		w.create("other", "beta", "T")
		run := w.begin("T", "c", 4)
		w.outcome("T", done(run[0]))
		w.outcome("T", other(ledger.OutcomeFailed, run[1], 0))
		w.outcome("T", other(ledger.OutcomeRetry, run[2], time.Hour))

		all := read("g", "missing", "other")
		require.Len(w, all, 3)
		g := all[0]
		require.Equal(w, api.Counts{Accepted: 6, Waiting: 2, NonReady: 1, InFlight: 1, Done: 1, Failed: 1}, g.Counts)
		require.EqualValues(w, 1, g.Retries)
		require.Zero(w, g.Reduced)
		require.WithinDuration(w, time.Now(), g.Created, time.Minute)
		require.False(w, g.Started.Before(g.Created))
		require.Zero(w, g.JobsEnded)
		require.Zero(w, g.Completed)
		require.Equal(w, ledger.Progress{}, all[1])
		require.Equal(w, ledger.Progress{Status: api.StatusCreated, Created: all[2].Created}, all[2])

		w.cancel("other")
		require.Equal(w, api.StatusCancelled, read("other")[0].Status)
	})
}

// TestReadProgressOfACompletedGroup: the Progress of a group that is COMPLETED has the time at
// which its last job ended and, not earlier, the time at which it became COMPLETED.
func TestReadProgressOfACompletedGroup(t *testing.T) {
	both(t, func(w *world) {
		w.create("g", "acme", "T")
		w.append("g", 3)
		w.seal("g")
		w.outcome("T", done(w.begin("T", "c", 3)...))
		w.reduceAll()
		w.advance("g")
		all, err := ledger.ReadProgress(w.Context(), w.c, []ledger.GroupRef{{Partition: w.p, ID: "g"}})
		require.NoError(w, err)
		g := all[0]
		require.Equal(w, api.StatusCompleted, g.Status)
		require.Equal(w, api.Counts{Accepted: 3, Done: 3}, g.Counts)
		require.EqualValues(w, 3, g.Reduced)
		require.False(w, g.Started.Before(g.Created))
		require.False(w, g.JobsEnded.Before(g.Started))
		require.False(w, g.Completed.Before(g.JobsEnded))
	})
}
