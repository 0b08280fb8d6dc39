package ledger_test

import (
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/bulkaction/bulkaction/internal/jobs/ledger"
)

// retire calls ledger.Retire for a type, which retires it if it was last served before now plus
// ahead. It returns whether the type was retired.
func (w *world) retire(typ string, ahead time.Duration) bool {
	w.Helper()
	retired, err := ledger.Retire(w.Context(), w.c, w.p, typ, time.Now().Add(ahead))
	require.NoError(w, err)
	return retired
}

func TestRetire(t *testing.T) {
	both(t, func(w *world) {
		w.unchanged(func() { require.False(w, w.retire("T", time.Hour), "there is no such type") })
		w.create("g", "acme", "T")
		w.append("g", 1)
		refused := func(why string) { w.unchanged(func() { require.False(w, w.retire("T", time.Hour), why) }) }
		refused("it waits")
		w.admit("T", 1, noLimit)
		refused("it is ready")
		run := w.read("T", "c")
		w.start("T", run)
		refused("it runs")
		w.outcome("T", other(ledger.OutcomeReleased, run[0], 0))
		refused("it is non-ready")
		w.promoteAll("T", 1)
		again := w.read("T", "c")
		w.start("T", again)
		w.outcome("T", done(again...))
		w.unchanged(func() { require.False(w, w.retire("T", -time.Hour), "it was served since") })

		require.True(w, w.retire("T", time.Hour))
		require.Zero(w, w.c.Exists(w.Context(), w.p.Types(), w.p.Load("T"), w.p.Ready("T"), w.p.Fair("T"), w.p.FairLane("T", "normal"), w.p.RateLimited("T")).Val())
		w.unchanged(func() { require.False(w, w.retire("T", time.Hour)) })

		w.append("g", 1) // a new job of the type makes it known again
		w.outcome("T", done(w.begin("T", "c", 1)...))
		require.Equal(w, map[string]int64{"done": 2}, w.ledger("g"))
	})
}

func TestHaveJobs(t *testing.T) {
	both(t, func(w *world) {
		have := func() bool {
			w.Helper()
			all, err := ledger.HaveJobs(w.Context(), w.c, w.p, []string{"missing", "T"})
			require.NoError(w, err)
			require.False(w, all[0])
			return all[1]
		}
		require.False(w, have())
		w.create("g", "acme", "T")
		w.append("g", 1)
		require.True(w, have(), "it waits")
		w.admit("T", 1, noLimit)
		require.True(w, have(), "it is ready")
		run := w.read("T", "c")
		w.start("T", run)
		require.True(w, have(), "it is in flight")
		w.outcome("T", other(ledger.OutcomeRetry, run[0], time.Hour))
		require.True(w, have(), "it is non-ready")
		w.cancel("g")
		w.sweep("g")
		require.False(w, have())
		all, err := ledger.HaveJobs(w.Context(), w.c, w.p, nil)
		require.NoError(w, err)
		require.Empty(w, all)
	})
}
