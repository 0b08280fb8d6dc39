package groups

import (
	"math"
	"strings"
	"testing"

	"github.com/stretchr/testify/require"

	"github.com/bulkaction/bulkaction/internal/jobs/ledger"
)

// FuzzParseCursor: a valid cursor, parsed and formatted again, names the same group.
func FuzzParseCursor(f *testing.F) {
	for _, seed := range []string{"", "1700000000000.group-1", "1.a.b", "-1.a", "9223372036854775807.a", "x", ".", "1.", "+5.a", "f1700000000000.g"} {
		f.Add(seed)
	}
	f.Fuzz(func(t *testing.T, cursor string) {
		list := ledger.AllGroups
		if strings.HasPrefix(cursor, "f") {
			list = ledger.FailedGroups
		}
		at, err := parseCursor(list, cursor)
		if err != nil || cursor == "" || math.Abs(at.At) > 1<<53 { // beyond, it is no ms that a score held exactly
			return
		}
		text := formatCursor(ledger.GroupRange{List: list, Before: at})
		again, err := parseCursor(list, text)
		require.NoError(t, err, "%q", text)
		require.Equal(t, at, again)
		require.False(t, at.OlderThan(again))
	})
}
