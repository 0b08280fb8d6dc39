package ledger_test

import (
	"testing"

	"github.com/stretchr/testify/require"

	"github.com/bulkaction/bulkaction/internal/jobs/ledger"
)

func TestReadPartials(t *testing.T) {
	both(t, func(w *world) {
		w.create("g", "acme", "T", "aggregate", `[{"op":"count"}]`)
		w.append("g", 2)
		w.create("new", "beta", "U")
		w.outcome("T", done(w.begin("T", "c", 2)...))
		var reduced ledger.ReduceReply
		for _, e := range w.readResults(10) {
			reduced = w.reduceInto("3", e)
			require.Equal(w, ledger.ReduceOK, reduced.State)
		}
		require.NoError(w, w.c.Set(w.Context(), w.p.Group("wrong type"), "1", 0).Err())

		read := ledger.ReadPartials(w.Context(), w.c, w.p, "3", []string{"g", "wrong type", "missing", "new"})
		require.Len(w, read, 4)
		require.Equal(w, ledger.PartialAggregate{
			Exists: true, Tenant: "acme", Aggregates: `[{"op":"count"}]`, Version: reduced.Version, State: "2",
		}, read[0])
		require.ErrorContains(w, read[1].Err, "WRONGTYPE")
		require.Equal(w, ledger.PartialAggregate{}, read[2])
		require.Equal(w, ledger.PartialAggregate{Exists: true, Tenant: "beta"}, read[3])
		require.Zero(w, ledger.ReadPartials(w.Context(), w.c, w.p, "4", []string{"g"})[0].Version, "of another number")
		require.Empty(w, ledger.ReadPartials(w.Context(), w.c, w.p, "3", nil))
	})
}
