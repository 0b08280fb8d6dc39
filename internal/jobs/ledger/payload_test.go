package ledger_test

import (
	"testing"

	"github.com/stretchr/testify/require"

	"github.com/bulkaction/bulkaction/internal/jobs/ledger"
)

func TestPayloads(t *testing.T) {
	both(t, func(w *world) {
		w.create("g", "acme", "T")
		w.appendJobs(ledger.AppendArgs{Group: "g", Jobs: []ledger.NewJob{{Payload: []byte("1")}, {Payload: large}}})
		payloads, err := ledger.Payloads(w.Context(), w.c, w.p, []ledger.JobRef{{Group: "g", Ordinal: 7}, {Group: "g", Ordinal: 1}, {Group: "missing"}})
		require.NoError(w, err)
		require.Equal(w, []string{"", string(large), ""}, payloads)

		require.NoError(w, w.c.Set(w.Context(), w.p.Payloads("text"), "1", 0).Err())
		_, err = ledger.Payloads(w.Context(), w.c, w.p, []ledger.JobRef{{Group: "missing"}, {Group: "text"}})
		require.ErrorContains(w, err, "WRONGTYPE", "the reply before it, which has found nothing, does not hide the error")
	})
}
