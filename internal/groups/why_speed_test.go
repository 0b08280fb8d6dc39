package groups

import (
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/bulkaction/bulkaction/internal/ledger"
)

// A tenant's jobs may have ended faster than a limit that has been set since lets them.
func TestSpeedHoldsToTheLimits(t *testing.T) {
	t.Parallel()
	half := 0.5
	own := ledger.TenantSettings{RPS: &half}
	window := ledger.TenantState{Limit: 6, GlobalLimit: 20} // of 2 s
	for _, c := range []struct {
		share       string
		st          ledger.TenantState
		speed, want float64
	}{
		{ledger.ShareStatic, ledger.TenantState{}, 100, 100},
		{ledger.ShareElastic, ledger.TenantState{Settings: own}, 100, 0.5},
		{ledger.ShareElastic, ledger.TenantState{Settings: own}, 0.25, 0.25},
		{ledger.ShareStatic, window, 100, 3},
		{ledger.ShareElastic, window, 100, 10},
		{ledger.ShareElastic, window, 7, 7},
		{ledger.ShareElastic, window, 0, 0},
	} {
		s := &Store{cfg: Config{Rate: ledger.Rate{RPS: 10, Window: 2 * time.Second, Share: c.share}}}
		require.InDelta(t, c.want, s.notAbove(c.st, c.speed), 1e-9, "%+v", c)
	}
}
