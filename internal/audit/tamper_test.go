package audit

import (
	"slices"
	"strings"
	"testing"

	"github.com/stretchr/testify/require"

	"github.com/bulkaction/bulkaction/internal/testkit/audittest"
	"github.com/bulkaction/bulkaction/internal/testkit/redistest"
)

// An audit finds exactly the violations that a tamper causes.
func TestTampering(t *testing.T) {
	find := func(t *testing.T, url, prefix string, tamper audittest.Tamper) {
		w := audittest.New(t, url, prefix, 3)
		audittest.Inhabit(w)
		want := tamper.Do(w)
		slices.Sort(want)
		r := run(w, Options{})
		require.False(t, r.OK)
		require.Equal(t, want, audittest.Summary(r.Violations), "%v", r.Violations)
		if strings.Contains(tamper.Name, "ready") {
			again := run(w, Options{stateBytes: 1})
			require.Equal(t, r.Violations, again.Violations, "one group at a time")
		}
	}
	t.Run("redis", func(t *testing.T) {
		for _, tamper := range audittest.Tampers {
			t.Run(tamper.Name, func(t *testing.T) {
				t.Parallel()
				url, prefix := redistest.Shared(t)
				find(t, url, prefix, tamper)
			})
		}
	})
	t.Run("miniredis", func(t *testing.T) {
		for i := 0; i < len(audittest.Tampers); i += 12 { // some are enough to see that miniredis behaves as Redis does
			t.Run(audittest.Tampers[i].Name, func(t *testing.T) {
				t.Parallel()
				_, url := redistest.Mini(t)
				find(t, url, "t:", audittest.Tampers[i])
			})
		}
	})
}
