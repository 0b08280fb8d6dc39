package groups

import (
	"math"
	"testing"

	"github.com/stretchr/testify/require"
)

// A cursor that is accepted names one place, and the place has this cursor.
func FuzzParseCursor(f *testing.F) {
	for _, seed := range []string{"", "1700000000000.group-1", "1.a.b", "-1.a", "9223372036854775807.a", "x", ".", "1.", "+5.a"} {
		f.Add(seed)
	}
	f.Fuzz(func(t *testing.T, cursor string) {
		at, err := parseCursor(cursor)
		if err != nil || cursor == "" || math.Abs(at.Created) > 1<<53 { // beyond, it is no ms that a score held exactly
			return
		}
		again, err := parseCursor(formatCursor(at))
		require.NoError(t, err, "%q", formatCursor(at))
		require.Equal(t, at, again)
		require.False(t, at.OlderThan(again))
	})
}
