package groups

import (
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/bulkaction/bulkaction/lua"
)

// A tenant's jobs may have ended faster than a limit that has been set since lets them.
func TestSpeedHoldsToTheLimits(t *testing.T) {
	t.Parallel()
	half := 0.5
	own := lua.TenantSettings{RPS: &half}
	window := lua.TenantState{Limit: 6, GlobalLimit: 20} // of 2 s
	for _, c := range []struct {
		share       string
		st          lua.TenantState
		speed, want float64
	}{
		{lua.ShareStatic, lua.TenantState{}, 100, 100},
		{lua.ShareElastic, lua.TenantState{Settings: own}, 100, 0.5},
		{lua.ShareElastic, lua.TenantState{Settings: own}, 0.25, 0.25},
		{lua.ShareStatic, window, 100, 3},
		{lua.ShareElastic, window, 100, 10},
		{lua.ShareElastic, window, 7, 7},
		{lua.ShareElastic, window, 0, 0},
	} {
		s := &Store{cfg: Config{Rate: lua.Rate{RPS: 10, Window: 2 * time.Second, Share: c.share}}}
		require.InDelta(t, c.want, s.notAbove(c.st, c.speed), 1e-9, "%+v", c)
	}
}
