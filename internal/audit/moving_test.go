package audit

import (
	"strings"
	"testing"

	"github.com/stretchr/testify/require"

	"github.com/bulkaction/bulkaction/internal/testkit/audittest"
	"github.com/bulkaction/bulkaction/internal/testkit/redistest"
)

// TestAuditOfAMovingWorld: while all scripts move jobs, an audit reports no false violation, and it
// reports one that the test has caused.
func TestAuditOfAMovingWorld(t *testing.T) {
	audits, size := map[string]int{"redis": 6, "miniredis": 3}, map[string]int{"redis": 600, "miniredis": 100}
	redistest.Both(t, func(t *testing.T, url, prefix string) {
		t.Parallel()
		_, server, _ := strings.Cut(t.Name(), "/")
		w := audittest.New(t, url, prefix, 2)
		c := audittest.NewChurn(w, []string{"a", "b", "c", "d", "e"}, []string{"T", "U"})
		for i, tenant := range c.Tenants { // more than one page
			id := "g" + tenant
			w.Create(id, tenant, c.Types[i%2])
			w.Append(id, audittest.Jobs(size[server], audittest.OfType(c.Types[i%2])))
			w.Append(id, audittest.Jobs(size[server], audittest.Later))
		}
		stop := c.Run(t.Context(), server == "miniredis") // miniredis doesn't share its time fairly among connections
		t.Cleanup(func() { _ = stop() })
		for i := 0; i < audits[server] || c.Moves.Load() < 250; i++ {
			r := run(w, Options{stateBytes: []int{0, 1000}[i%2]})
			require.Empty(t, r.Violations, "audit %d", i)
		}

		p := w.Space.OfTenant("a")
		w.Create("broken", "a", "V")
		w.Append("broken", audittest.Jobs(3))
		w.OK(w.C.LPop(w.Context(), p.Queue("broken", "V")).Err())
		for range 3 {
			require.Contains(t, audittest.Summary(run(w, Options{}).Violations), audittest.Of(LawLocation, "broken", 0))
		}
		require.NoError(t, stop())
		require.Equal(t, []string{audittest.Of(LawLocation, "broken", 0)}, audittest.Summary(run(w, Options{}).Violations))
		t.Logf("%d moves", c.Moves.Load())
	})
}
