package audit

import (
	"slices"
	"strings"
	"testing"

	"github.com/stretchr/testify/require"

	"github.com/bulkaction/bulkaction/internal/testkit/audittest"
)

// TestTampering: an audit finds exactly the violations that a tamper causes.
func TestTampering(t *testing.T) {
	audittest.EachTamper(t, func(w *audittest.World, tamper audittest.Tamper) {
		want := tamper.Do(w)
		slices.Sort(want)
		r := run(w, Options{})
		require.False(w, r.OK)
		require.Equal(w, want, audittest.Summary(r.Violations), "%v", r.Violations)
		if strings.Contains(tamper.Name, "ready") {
			again := run(w, Options{stateBytes: 1})
			require.Equal(w, r.Violations, again.Violations, "one group at a time")
		}
	})
}
