package groups_test

import (
	"context"
	"fmt"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/bulkaction/bulkaction/api"
	"github.com/bulkaction/bulkaction/internal/jobs/groups"
	"github.com/bulkaction/bulkaction/internal/jobs/ledger"
	"github.com/bulkaction/bulkaction/internal/messages"
	"github.com/bulkaction/bulkaction/internal/stage/presence"
	"github.com/bulkaction/bulkaction/internal/testkit/stagetest"
)

// TestScale: how many slots are wanted by what waits, by run times and by each limit.
func TestScale(t *testing.T) {
	type limits struct {
		share                 string
		global                int64
		typeRPS, typeInFlight int64
		rps                   float64 // of acme
		inFlight              int64   // of acme
	}
	for name, c := range map[string]struct {
		limits
		jobs    int
		meanRun time.Duration
		want    int64
		bound   bool
	}{
		"nothing waits":            {jobs: 0, meanRun: time.Second},
		"no job has run yet":       {jobs: 3000, want: 1},
		"work":                     {jobs: 3000, meanRun: 200 * time.Millisecond, want: 10},
		"rounded up":               {jobs: 3001, meanRun: 200 * time.Millisecond, want: 11},
		"little work":              {jobs: 1, meanRun: time.Millisecond, want: 1},
		"own rate, quick jobs":     {jobs: 3000, meanRun: 100 * time.Millisecond, limits: limits{rps: 5}, want: 1, bound: true},
		"own rate, long jobs":      {jobs: 4000, meanRun: 2 * time.Second, limits: limits{rps: 50}, want: 100, bound: true},
		"own rate not reached":     {jobs: 30, meanRun: 2 * time.Second, limits: limits{rps: 50}, want: 1},
		"rate of all":              {jobs: 3000, meanRun: 2 * time.Second, limits: limits{global: 10}, want: 20, bound: true},
		"rate of the type":         {jobs: 3000, meanRun: 2 * time.Second, limits: limits{typeRPS: 10}, want: 20, bound: true},
		"places of the type":       {jobs: 3000, meanRun: 2 * time.Second, limits: limits{typeInFlight: 7}, want: 7, bound: true},
		"places of the tenant":     {jobs: 3000, meanRun: 2 * time.Second, limits: limits{inFlight: 8}, want: 8, bound: true},
		"static share of a tenant": {jobs: 3000, meanRun: 2 * time.Second, limits: limits{global: 10, share: "static"}, want: 20, bound: true},
	} {
		t.Run(name, func(t *testing.T) {
			w := stagetest.Parallel(t, 3)
			ctx := stagetest.Trusted(t)
			w.Store = w.NewStore(groups.Config{Meter: ledger.Meter{Window: time.Second}, Configured: api.ConfiguredLimits{RPS: c.global, Share: c.share}})
			if c.rps > 0 || c.inFlight > 0 {
				require.NoError(t, ledger.SetTenant(ctx, w.Conn.Cmd, w.Space.OfTenant("acme"), "acme", ledger.TenantSettings{RPS: orNil(c.rps), InFlight: orNil(c.inFlight)}))
			}
			_, err := ledger.SetLimits(ctx, w.Conn.Cmd, w.Space, 0, api.GlobalPatch{}, map[string]api.TypePatch{"T": {
				RPS:      api.Change[int64]{Given: c.typeRPS > 0, Value: &c.typeRPS},
				InFlight: api.Change[int64]{Given: c.typeInFlight > 0, Value: &c.typeInFlight},
			}})
			require.NoError(t, err)
			if c.jobs > 0 {
				w.Jobs("g", "T", c.jobs)
				later := time.Now().Add(time.Hour)
				w.Submit(messages.SubmitGroup{ID: "scheduled", Tenant: "acme", Type: "T", RunAt: &later, Jobs: stagetest.Numbered(100)})
			}
			for _, p := range w.Space.All() {
				require.NoError(t, w.Conn.Cmd.HSet(ctx, p.Load("T"), "est", c.meanRun.Seconds()*1000).Err())
			}
			sc, err := w.Store.Scale(ctx, []string{"T"}, time.Minute)
			require.NoError(t, err)
			require.Equal(t, c.want, sc.SlotsWanted, "%+v", sc)
			require.Equal(t, c.bound, sc.RateBound)
			require.EqualValues(t, c.jobs, sc.Runnable)
			require.Nil(t, sc.Sample)
			if c.jobs > 0 {
				require.EqualValues(t, c.jobs+100, sc.Backlog)
				require.NoError(t, w.Store.PauseType(ctx, "T"))
				sc, err = w.Store.Scale(ctx, []string{"T"}, time.Minute)
				require.NoError(t, err)
				require.Equal(t, [2]int64{}, [2]int64{sc.Runnable, sc.SlotsWanted}, "a paused type needs no slots")
			}
		})
	}
}

func orNil[T int64 | float64](n T) *T {
	if n == 0 {
		return nil
	}
	return &n
}

// TestScaleOfATenantWithoutAPermit: jobs of a tenant that has used up its permits are not runnable,
// and those that its rate lets start within the drain time want slots.
func TestScaleOfATenantWithoutAPermit(t *testing.T) {
	w := stagetest.Parallel(t, 1)
	ctx := stagetest.Trusted(t)
	w.Limit(ledger.Meter{Window: time.Hour}, 0, "")
	rps := 0.01
	require.NoError(t, ledger.SetTenant(ctx, w.Conn.Cmd, w.P, "acme", ledger.TenantSettings{RPS: &rps}))
	w.Jobs("g", "T", 200)
	require.NoError(t, w.Conn.Cmd.HSet(ctx, w.P.Load("T"), "est", 60_000).Err())
	for range 3 {
		_, err := ledger.Admit(ctx, w.Conn.Cmd, w.P, ledger.AdmitArgs{
			Type: "T", Most: 200, Cap: 1000, Meter: ledger.Meter{Window: time.Hour}, Seed: "0badcafe", LaneWeights: [3]int{6, 3, 1},
		})
		require.NoError(t, err)
	}
	sc, err := w.Store.Scale(ctx, []string{"T"}, 1000*time.Second)
	require.NoError(t, err)
	require.EqualValues(t, 36, sc.Runnable, "the jobs of a window of 0.01 a second are ready")
	require.EqualValues(t, 3, sc.SlotsWanted, "(36 + 10 jobs) · 60 s / 1,000 s")
	require.True(t, sc.RateBound)
}

// TestScaleKeepsSlotsInUse: jobs that run want their slots, and no more than there are.
func TestScaleKeepsSlotsInUse(t *testing.T) {
	w := stagetest.Parallel(t, 1)
	ctx := stagetest.Trusted(t)
	require.NoError(t, presence.PublishWorker(ctx, w.Conn, w.Space, presence.WorkerReport{WorkerStatus: api.WorkerStatus{ID: "w-1", Types: []string{"T", "U"}, Workers: 4}}))
	require.NoError(t, presence.PublishWorker(ctx, w.Conn, w.Space, presence.WorkerReport{WorkerStatus: api.WorkerStatus{ID: "w-2", Types: []string{"X"}, Workers: 9}}))
	w.Jobs("g", "T", 9)
	w.Admit("T")
	w.Take("T", "w-1", 3)
	scale := func(types ...string) [3]int64 {
		sc, err := w.Store.Scale(ctx, types, time.Minute)
		require.NoError(t, err)
		return [3]int64{sc.Runnable, sc.SlotsNow, sc.SlotsWanted}
	}
	require.Equal(t, [3]int64{6, 4, 3}, scale("T"))
	require.Equal(t, [3]int64{6, 4, 3}, scale("T", "U"), "the slots of a worker count once")
	require.Equal(t, [3]int64{0, 4, 0}, scale("U"))
	w.Take("T", "w-1", 6)
	require.Equal(t, [3]int64{0, 4, 4}, scale("T"), "jobs that a worker has prefetched have no slot")
	require.NoError(t, presence.PublishWorker(ctx, w.Conn, w.Space, presence.WorkerReport{WorkerStatus: api.WorkerStatus{ID: "w-1", Types: []string{"T", "U"}, Workers: 4}, BatchSizes: map[string]int{"T": 8}}))
	require.Equal(t, [3]int64{0, 4, 2}, scale("T"), "a batch takes one slot")
	w.Jobs("h", "T", 3000)
	require.NoError(t, w.Conn.Cmd.HSet(ctx, w.P.Load("T"), "est", 20).Err())
	rps := 1.0
	require.NoError(t, ledger.SetTenant(ctx, w.Conn.Cmd, w.P, "acme", ledger.TenantSettings{RPS: &rps}))
	require.Equal(t, [3]int64{3000, 4, 1}, scale("T"), "a burst behind a rate is over soon")
	require.NoError(t, w.Conn.Cmd.HSet(ctx, w.P.Load("T"), "est", 120_000).Err())
	require.EqualValues(t, 120, scale("T")[2])
	w.Jobs("u", "U", 3000)
	require.NoError(t, w.Conn.Cmd.HSet(ctx, w.P.Load("U"), "est", 120_000).Err())
	require.EqualValues(t, 120, scale("T", "U")[2], "a tenant's rate counts once")
}

// TestScaleWithoutPermissions: one slot is wanted while jobs wait for permissions of accounts.
func TestScaleWithoutPermissions(t *testing.T) {
	w := stagetest.Parallel(t, 1)
	ctx := stagetest.Trusted(t)
	require.NoError(t, presence.PublishWorker(ctx, w.Conn, w.Space, presence.WorkerReport{
		WorkerStatus: api.WorkerStatus{ID: "w-1", Types: []string{"T"}, Workers: 4}, PermissionsPerSecond: map[string]float64{"T": 0},
	}))
	w.Jobs("g", "T", 9)
	sc, err := w.Store.Scale(ctx, []string{"T"}, time.Minute)
	require.NoError(t, err)
	require.EqualValues(t, 1, sc.SlotsWanted)
	require.True(t, sc.RateBound)
}

// TestScaleCountsDueJobs: non-ready jobs want slots from their due time on, those of their type only.
func TestScaleCountsDueJobs(t *testing.T) {
	w := stagetest.Parallel(t, 1)
	ctx := stagetest.Trusted(t)
	soon, later := time.Now().Add(time.Second), time.Now().Add(time.Hour)
	for typ, at := range map[string]time.Time{"T": soon, "U": later} {
		g := messages.SubmitGroup{ID: typ, Tenant: "acme", Type: typ, Jobs: stagetest.Numbered(3000)}
		for i := range g.Jobs {
			g.Jobs[i].RunAt = &at
		}
		w.Submit(g)
		require.NoError(t, w.Conn.Cmd.HSet(ctx, w.P.Load(typ), "est", 2000).Err())
	}
	wanted := func(typ string) int64 {
		sc, err := w.Store.Scale(ctx, []string{typ}, time.Minute)
		require.NoError(t, err)
		return sc.SlotsWanted
	}
	require.Eventually(t, func() bool { return wanted("T") == 100 }, time.Minute, 50*time.Millisecond)
	require.Zero(t, wanted("U"))
	require.NoError(t, w.Store.PauseTenant(ctx, "acme"))
	require.Zero(t, wanted("T"))
}

// TestScaleSeesALargeTenant: the busiest tenants are always looked at, and while they are not known,
// the error has the jobs that nobody has seen.
func TestScaleSeesALargeTenant(t *testing.T) {
	w := stagetest.Parallel(t, 1)
	ctx := stagetest.Trusted(t)
	for i := range 1000 {
		n := 10
		if i == 5 {
			n = 90_000
		}
		w.Submit(messages.SubmitGroup{ID: fmt.Sprint("g", i), Tenant: fmt.Sprint("t", i), Type: "T", Jobs: stagetest.Numbered(n)})
	}
	require.NoError(t, w.Conn.Cmd.HSet(ctx, w.P.Load("T"), "est", 1000).Err())
	const jobs = 999*10 + 90_000
	scale := func() api.Scale {
		sc, err := w.Store.Scale(ctx, []string{"T"}, time.Minute)
		require.NoError(t, err)
		return sc
	}
	sc := scale()
	require.LessOrEqual(t, sc.Runnable, int64(jobs))
	require.GreaterOrEqual(t, float64(sc.Runnable)*(1+sc.Sample.Error), jobs*0.999)
	require.NoError(t, w.Store.MeasureBusiest(ctx, w.P, func(context.Context, int) error { return nil }))
	for range 5 {
		sc = scale()
		require.EqualValues(t, jobs, sc.Runnable)
		require.EqualValues(t, 1667, sc.SlotsWanted)
		require.Zero(t, sc.Sample.Error)
	}
	st, err := w.Store.Stats(ctx)
	require.NoError(t, err)
	require.EqualValues(t, jobs, st.Types[0].Runnable, "of too many tenants all jobs count")
}

// TestScaleLooksAtASample: of many tenants some are looked at, and the answer says how exact it is.
func TestScaleLooksAtASample(t *testing.T) {
	w := stagetest.Parallel(t, 1)
	ctx := stagetest.Trusted(t)
	const tenants = 1000
	for i := range tenants {
		tenant := fmt.Sprintf("t%d", i)
		w.Submit(messages.SubmitGroup{ID: "g" + tenant, Tenant: tenant, Type: "T", Jobs: stagetest.Numbered(1 + i%9)})
	}
	require.NoError(t, w.Conn.Cmd.HSet(ctx, w.P.Load("T"), "est", 1000).Err())
	sc, err := w.Store.Scale(ctx, []string{"T"}, 10*time.Second)
	require.NoError(t, err)
	require.EqualValues(t, tenants, sc.Sample.Tenants)
	require.EqualValues(t, 200, sc.Sample.LookedAt)
	require.Greater(t, sc.Sample.Error, 0.01)
	require.Less(t, sc.Sample.Error, 0.15)
	const jobs = 4996
	require.InDelta(t, jobs, sc.Runnable, 4*sc.Sample.Error*jobs, "more than 7 standard errors")
	require.InDelta(t, jobs/10, sc.SlotsWanted, 4*sc.Sample.Error*jobs/10+1)
}
