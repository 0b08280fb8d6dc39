package groups_test

import (
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/bulkaction/bulkaction/api"
	"github.com/bulkaction/bulkaction/internal/jobs/groups"
	"github.com/bulkaction/bulkaction/internal/jobs/ledger"
	"github.com/bulkaction/bulkaction/internal/messages"
	"github.com/bulkaction/bulkaction/internal/testkit/redistest"
	"github.com/bulkaction/bulkaction/internal/testkit/stagetest"
)

// hourly gives w a store with a global limit of 3,600 permits an hour. The function that it returns
// admits jobs of type T in the partition w.P until no permit is left for them.
func hourly(w *stagetest.World, share string, partitions int) func() {
	w.T.Helper()
	rate := ledger.Rate{RPS: 1, Window: time.Hour, Limiter: ledger.LimiterFixed, Share: share}
	w.Store = w.NewStore(groups.Config{Rate: rate, Limiter: rate.Limiter, LimiterMode: rate.Share})
	return func() {
		w.T.Helper()
		for moved := 1; moved > 0; {
			r, err := ledger.Admit(stagetest.Trusted(w.T), w.Conn.Cmd, w.P, ledger.AdmitArgs{
				Type: "T", Most: 200, Cap: 1 << 30, Limit: rate.Of(w.P.Index(), partitions), Seed: "0badcafe", LaneWeights: [3]int{6, 3, 1}})
			require.NoError(w.T, err)
			moved = int(r.Moved)
		}
	}
}

func TestWhyShare(t *testing.T) {
	t.Parallel()
	for _, share := range []string{ledger.ShareStatic, ledger.ShareElastic} {
		w := stagetest.Shared(t)
		spend := hourly(w, share, 1)
		w.Submit(messages.SubmitGroup{ID: "h", Tenant: "globex", Type: "U", Jobs: stagetest.Numbered(3600)}) // it leaves its share
		w.Submit(messages.SubmitGroup{ID: "g", Tenant: "acme", Type: "T", Jobs: stagetest.Numbered(3700)})
		require.Equal(t, api.WhyFairness, job(w, "g", 3699).Waiting, "its share is not used yet")
		spend()
		require.EqualValues(t, 1800, w.Counts("g").Ready)
		j := job(w, "g", 3699)
		require.Equal(t, api.WhyRate, j.Waiting, j.Why.Detail)
		require.Equal(t, "share", j.Why.Limit.Scope)
		require.EqualValues(t, 1800, j.Why.Limit.PerWindow)
		require.True(t, j.Until.After(time.Now()))
		require.Contains(t, j.Why.Detail, "Its tenant acme has used up its share of 0.5 a second among 2 active tenants: the next permit comes at 2")
		require.Equal(t, api.WhyFairness, job(w, "h", 0).Waiting)

		rps := 0.25
		require.NoError(t, ledger.SetTenant(stagetest.Trusted(t), w.Conn.Cmd, w.P, "acme", ledger.TenantSettings{RPS: &rps}))
		j = job(w, "g", 3699)
		require.Equal(t, api.WhyRate, j.Waiting, j.Why.Detail)
		require.Equal(t, "tenant", j.Why.Limit.Scope)
		require.Contains(t, j.Why.Detail, "Its tenant acme has used up its own limit of 0.25 a second: the next")
	}
}

// TestWhyPartOfTheLimit: one of two partitions has half of the global limit: 1,800 permits an hour.
// The explanation of a job names them, and the limit of all partitions.
func TestWhyPartOfTheLimit(t *testing.T) {
	t.Parallel()
	url, prefix := redistest.Shared(t)
	w := stagetest.New(t, url, prefix, 2)
	spend := hourly(w, ledger.ShareElastic, 2)
	w.P = w.Space.OfTenant("acme")
	w.Submit(messages.SubmitGroup{ID: "g", Tenant: "acme", Type: "T", Jobs: stagetest.Numbered(1900)})
	spend()
	require.EqualValues(t, 1800, w.Counts("g").Ready)
	j := job(w, "g", 1899)
	require.Equal(t, api.WhyRate, j.Waiting, j.Why.Detail)
	require.Equal(t, "global", j.Why.Limit.Scope)
	require.EqualValues(t, 1800, j.Why.Limit.PerWindow)
	require.InDelta(t, 1, j.Why.Limit.RPS, 0.001, "of all partitions")
	require.Contains(t, j.Why.Detail, "The limit is 1 a second for all tenants; its partition has 1800 of a window's 3600, all used: the next permit comes at 2")
}
