package repair

import (
	"testing"

	"github.com/stretchr/testify/require"

	"github.com/bulkaction/bulkaction/internal/audit"
)

// TestEachKindHasARepair: the table repairs has an action for each kind of repair that a finding
// can have.
func TestEachKindHasARepair(t *testing.T) {
	t.Parallel()
	require.NotContains(t, repairs, audit.NoRepair)
	for kind := audit.NoRepair + 1; kind <= audit.Quarantine; kind++ {
		require.Contains(t, repairs, kind)
	}
	require.Len(t, repairs, int(audit.Quarantine))
}
