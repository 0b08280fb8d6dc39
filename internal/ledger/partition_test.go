package ledger_test

import (
	"fmt"
	"testing"

	"github.com/stretchr/testify/require"

	"github.com/bulkaction/bulkaction/internal/ledger"
)

func TestReadPartition(t *testing.T) {
	both(t, func(w *world) {
		read := func() ledger.PartitionStats {
			s, err := ledger.ReadPartition(w.Context(), w.c, w.p)
			require.NoError(w, err)
			return s
		}
		require.Equal(w, ledger.PartitionStats{Types: []string{}}, read())
		w.backlog("acme", "T", 2)
		w.backlog("globex", "U", 1)
		w.outcome("T", other(ledger.OutcomeFailed, w.begin("T", "c", 1)[0], 0))
		w.begin("U", "c", 1)
		s := read()
		require.ElementsMatch(w, []string{"T", "U"}, s.Types)
		s.Types = nil
		require.Equal(w, ledger.PartitionStats{Groups: 2, ActiveTenants: 1, DeadLetters: 1}, s)
		w.c.Set(w.Context(), w.p.Active(), "x", 0)
		_, err := ledger.ReadPartition(w.Context(), w.c, w.p)
		require.ErrorContains(w, err, "WRONGTYPE")
	})
}

// More tenants are paused than one page of HSCAN holds.
func TestPausedTypes(t *testing.T) {
	both(t, func(w *world) {
		read := func() []string {
			types, err := ledger.PausedTypes(w.Context(), w.c, w.p)
			require.NoError(w, err)
			return types
		}
		require.Empty(w, read())
		for i := range 1500 {
			w.c.HSet(w.Context(), w.p.Pauses(), fmt.Sprint("t:", i), 1)
		}
		w.pause(ledger.PauseType, "U")
		w.pause(ledger.PauseType, "T")
		w.pause(ledger.PauseTenant, "y")
		require.Equal(w, []string{"T", "U"}, read())
		w.resume(ledger.PauseType, "T")
		require.Equal(w, []string{"U"}, read())
	})
}
