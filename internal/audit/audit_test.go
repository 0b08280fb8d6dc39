package audit

import (
	"testing"

	"github.com/stretchr/testify/require"

	"github.com/bulkaction/bulkaction/internal/redistest"
)

func TestCleanWorld(t *testing.T) {
	redistest.Both(t, func(t *testing.T, url, prefix string) {
		w := newWorld(t, url, prefix, 3)
		inhabited(w)
		r := w.audit(Options{})
		require.Empty(t, r.Violations)
		require.True(t, r.OK)
		require.EqualValues(t, 16, r.Groups)
		require.Equal(t, r, w.audit(Options{batch: 1}), "one group at a time")
	})
}
