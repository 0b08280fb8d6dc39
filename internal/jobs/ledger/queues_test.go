package ledger_test

import (
	"testing"

	"github.com/stretchr/testify/require"

	"github.com/bulkaction/bulkaction/internal/jobs/ledger"
)

func TestReadQueues(t *testing.T) {
	both(t, func(w *world) {
		for _, g := range []struct {
			id, tenant, typ string
			jobs            int
		}{{"a", "acme", "T", 3}, {"b", "acme", "T", 5}, {"c", "acme", "U", 1}, {"d", "globex", "T", 2}} {
			w.create(g.id, g.tenant, g.typ)
			w.append(g.id, g.jobs)
		}
		w.pause(ledger.PauseType, "U")
		acme, other := ledger.TenantQueue{Type: "T", Lane: "normal", Tenant: "acme"}, ledger.TenantQueue{Type: "U", Lane: "normal", Tenant: "acme"}
		none := ledger.TenantQueue{Type: "T", Lane: "high", Tenant: "acme"}
		read := func(most int64) map[ledger.TenantQueue]ledger.QueuedGroups {
			queues, err := ledger.ReadQueues(w.Context(), w.c, w.p, []ledger.TenantQueue{acme, other, none}, most)
			require.NoError(w, err)
			return queues
		}
		require.Equal(w, map[ledger.TenantQueue]ledger.QueuedGroups{
			acme:  {Groups: []ledger.QueuedGroup{{ID: "a", Waiting: 3}, {ID: "b", Waiting: 5}}},
			other: {Groups: []ledger.QueuedGroup{{ID: "c", Waiting: 1}}, TypePaused: true},
			none:  {Groups: []ledger.QueuedGroup{}},
		}, read(10))
		require.Equal(w, []ledger.QueuedGroup{{ID: "a", Waiting: 3}}, read(1)[acme].Groups)
	})
}
