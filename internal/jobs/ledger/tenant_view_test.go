package ledger_test

import (
	"maps"
	"slices"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/bulkaction/bulkaction/api"
	"github.com/bulkaction/bulkaction/internal/jobs/ledger"
	"github.com/bulkaction/bulkaction/internal/redisx/keyspace"
)

// TestSpeedHoldsToTheLimits: Bound limits a measured speed to the tenant's limits: jobs may have
// ended faster before a limit was set.
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
		rate := ledger.Rate{RPS: 10, Window: 2 * time.Second, Share: c.share}
		require.InDelta(t, c.want, rate.Bound(c.st, c.speed), 1e-9, "%+v", c)
	}
	require.Zero(t, ledger.Rate{}.PerSecond(5), "without a limit")
}

// TestOwnPermit: OwnPermit returns the later of NextPermit and RateLimitedUntil. With elastic
// shares and without an own limit only RateLimitedUntil counts, because the tenant may borrow.
func TestOwnPermit(t *testing.T) {
	t.Parallel()
	rps := 1.0
	at := func(s int64) time.Time { return time.Unix(s, 0) }
	for _, c := range []struct {
		share string
		st    ledger.TenantState
		want  time.Time
	}{
		{ledger.ShareStatic, ledger.TenantState{NextPermit: at(5)}, at(5)},
		{ledger.ShareStatic, ledger.TenantState{NextPermit: at(5), RateLimitedUntil: at(7)}, at(7)},
		{ledger.ShareElastic, ledger.TenantState{NextPermit: at(5)}, time.Time{}},
		{ledger.ShareElastic, ledger.TenantState{NextPermit: at(5), RateLimitedUntil: at(3)}, at(3)},
		{ledger.ShareElastic, ledger.TenantState{NextPermit: at(5), RateLimitedUntil: at(3), Settings: ledger.TenantSettings{RPS: &rps}}, at(5)},
	} {
		require.Equal(t, c.want, ledger.Rate{Share: c.share}.OwnPermit(c.st), "%+v", c)
	}
}

func TestTenants(t *testing.T) {
	both(t, func(w *world) {
		for _, tenant := range []string{"b", "a", "d", "c"} {
			w.backlog(tenant, "T", 1)
		}
		list := func(after string, n int) []string {
			found, more, err := ledger.Tenants(w.Context(), w.c, []keyspace.Partition{w.p}, after, n)
			require.NoError(w, err)
			require.Equal(w, len(found) == n, more)
			var ids []string
			for _, t := range found {
				require.Equal(w, w.p, t.Partition)
				ids = append(ids, t.ID)
			}
			return ids
		}
		require.Equal(w, []string{"a", "b", "c", "d"}, list("", 10))
		require.Equal(w, []string{"a", "b"}, list("", 2))
		require.Equal(w, []string{"c", "d"}, list("b", 2))
		require.Equal(w, []string{"c", "d"}, list("bb", 10))
		require.Empty(w, list("d", 2))
	})
}

// TestChangeTenant: 12 concurrent calls, with four patches three times each, set three settings:
// all take effect. After patches to the defaults the tenant is forgotten.
func TestChangeTenant(t *testing.T) {
	both(t, func(w *world) {
		settings := func() ledger.TenantSettings {
			st, err := ledger.Tenant(w.Context(), w.c, w.p, "acme", noLimit)
			require.NoError(w, err)
			return st.Settings
		}
		change := func(p api.TenantPatch) error { return ledger.ChangeTenant(w.Context(), w.c, w.p, "acme", p) }
		rps, weight, base := 1.5, 0.5, int64(-1e15)
		changed := make(chan error)
		for _, p := range []api.TenantPatch{
			{RPS: api.SetTo(rps)}, {Weight: api.SetTo(weight)}, {BasePriority: api.SetTo(base)}, {},
		} {
			for range 3 {
				go func() { changed <- change(p) }()
			}
		}
		for range 12 {
			require.NoError(w, <-changed)
		}
		require.Equal(w, ledger.TenantSettings{RPS: &rps, Weight: &weight, BasePriority: &base}, settings())

		require.NoError(w, change(api.TenantPatch{Weight: api.ToDefault[float64]()}))
		require.Equal(w, ledger.TenantSettings{RPS: &rps, BasePriority: &base}, settings())
		require.NoError(w, change(api.TenantPatch{RPS: api.ToDefault[float64](), BasePriority: api.ToDefault[int64]()}))
		ids, _, err := ledger.Tenants(w.Context(), w.c, []keyspace.Partition{w.p}, "", 10)
		require.NoError(w, err)
		require.Empty(w, ids, "a tenant with default settings only is forgotten")
	})
}

// TestPreviewOfSettings: TenantWith predicts the limit that an active or idle tenant has after it
// got the settings, and changes nothing.
func TestPreviewOfSettings(t *testing.T) {
	both(t, func(w *world) {
		w.backlog("busy", "T", 20)
		w.backlog("acme", "T", 20)
		w.set("busy", weight(2))
		w.set("idle", weight(1))
		l := limit(60)
		for tenant, shares := range map[string][3]int64{"acme": {20, 40, 12}, "idle": {15, 34, 8}} {
			for i, set := range []ledger.TenantSettings{weight(1), weight(4), weight(0.5), perWindow(7), {}} {
				before := w.tenant(tenant, l)
				st, err := ledger.TenantWith(w.Context(), w.c, w.p, tenant, l, set)
				require.NoError(w, err)
				require.Equal(w, before.Limit, w.tenant(tenant, l).Limit, "the preview has changed nothing")
				require.Equal(w, before.Settings, w.tenant(tenant, l).Settings)
				if i < len(shares) {
					require.Equal(w, shares[i], st.Limit, "%s %d", tenant, i)
				}
				w.set(tenant, set)
				after := w.tenant(tenant, l)
				require.Equal(w, after.Limit, st.Limit, "%s %d", tenant, i)
				require.Equal(w, after.Settings, st.Settings)
				require.Equal(w, after.Unfinished, st.Unfinished)
				w.set(tenant, weight(1))
			}
		}
		st, err := ledger.TenantWith(w.Context(), w.c, w.p, "acme", noLimit, weight(3))
		require.NoError(w, err)
		require.Zero(w, st.Limit, "without a limit there are no shares")
	})
}

// TestImplicitTenants: a tenant whose only group has the tenant's id is implicit, unless it has
// settings or is paused.
func TestImplicitTenants(t *testing.T) {
	both(t, func(w *world) {
		for group, tenant := range map[string]string{
			"own": "own", "limited": "limited", "paused": "paused",
			"g":     "other",                    // its only group has another id
			"twice": "twice", "second": "twice", // the tenant of a group, and named by another group
		} {
			w.create(group, tenant, "T")
		}
		require.NoError(w, ledger.ChangeTenant(w.Context(), w.c, w.p, "limited", api.TenantPatch{RPS: api.SetTo(1.0)}))
		w.pause(ledger.PauseTenant, "paused")
		want := map[string]bool{"own": true, "limited": false, "paused": false, "other": false, "twice": false, "gone": false}
		implicit := func() map[string]bool {
			var refs []ledger.TenantRef
			for _, id := range slices.Sorted(maps.Keys(want)) {
				refs = append(refs, ledger.TenantRef{Partition: w.p, ID: id})
			}
			found, err := ledger.ImplicitTenants(w.Context(), w.c, refs)
			require.NoError(w, err)
			got := map[string]bool{}
			for i, ref := range refs {
				got[ref.ID] = found[i]
			}
			return got
		}
		require.Equal(w, want, implicit())
		change := api.TenantPatch{RPS: api.ToDefault[float64]()}
		require.NoError(w, ledger.ChangeTenant(w.Context(), w.c, w.p, "limited", change))
		require.NoError(w, ledger.Resume(w.Context(), w.c, w.p, ledger.PauseTenant, "paused"))
		want["limited"], want["paused"] = true, true
		require.Equal(w, want, implicit())
	})
}
