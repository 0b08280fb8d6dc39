package groups_test

import (
	"context"
	"fmt"
	"slices"
	"strconv"
	"strings"
	"testing"
	"time"

	"github.com/redis/go-redis/v9"
	"github.com/stretchr/testify/require"

	"github.com/bulkaction/bulkaction/api"
	"github.com/bulkaction/bulkaction/internal/access/auth"
	"github.com/bulkaction/bulkaction/internal/jobs/groups"
	"github.com/bulkaction/bulkaction/internal/jobs/ledger"
	"github.com/bulkaction/bulkaction/internal/messages"
	"github.com/bulkaction/bulkaction/internal/testkit/redistest"
	"github.com/bulkaction/bulkaction/internal/testkit/stagetest"
)

func ptr[T any](v T) *T { return &v }

func TestPauseAGroup(t *testing.T) {
	stagetest.Both(t, func(w *stagetest.World) {
		ctx := context.WithoutCancel(stagetest.Trusted(w.T))
		w.Jobs("g", "T", 3)
		for range 2 {
			a, err := w.Store.Pause(ctx, "g")
			require.NoError(w.T, err)
			require.Equal(w.T, api.Accepted{ID: "g", Status: api.StatusDispatched, Counts: api.Counts{Accepted: 3, Waiting: 3}}, a)
			require.True(w.T, w.Group("g").Paused)
		}
		w.Admit("T")
		require.Equal(w.T, api.Counts{Accepted: 3, Waiting: 3}, w.Counts("g"), "no job is admitted")
		for range 2 {
			_, err := w.Store.Resume(ctx, "g")
			require.NoError(w.T, err)
			require.False(w.T, w.Group("g").Paused)
		}
		w.Admit("T")
		require.Equal(w.T, api.Counts{Accepted: 3, Ready: 3}, w.Counts("g"))

		for _, do := range []func(context.Context, string) (api.Accepted, error){w.Store.Pause, w.Store.Resume} {
			_, err := do(ctx, "nobody")
			require.ErrorIs(w.T, err, api.ErrNotFound)
		}
		_, err := w.Store.Cancel(ctx, "g")
		require.NoError(w.T, err)
		_, err = w.Store.Pause(ctx, "g")
		require.ErrorIs(w.T, err, api.ErrConflict)
	})
}

// TestPauseAType: a type is paused in all partitions. Stats show paused types, also those without
// jobs.
func TestPauseAType(t *testing.T) {
	w := stagetest.Parallel(t, 3)
	for i := range 6 {
		w.Submit(messages.SubmitGroup{ID: fmt.Sprint("g", i), Type: "T", Jobs: stagetest.Numbered(2)})
	}
	paused := func() (types []string) {
		st, err := w.Store.Stats(stagetest.Trusted(t))
		require.NoError(t, err)
		for _, typ := range st.Types {
			if typ.Paused {
				types = append(types, fmt.Sprint(typ.Type, " ", typ.Backlog))
			}
		}
		return types
	}
	require.Empty(t, paused())
	for range 2 {
		require.NoError(t, w.Store.PauseType(stagetest.Trusted(t), "T"))
		require.NoError(t, w.Store.PauseType(stagetest.Trusted(t), "unheard-of"))
		require.NoError(t, w.Store.PauseTenant(stagetest.Trusted(t), "y"))
	}
	require.Equal(t, []string{"T 12", "unheard-of 0"}, paused())
	w.Admit("T")
	for i := range 6 {
		require.Equal(t, api.Counts{Accepted: 2, Waiting: 2}, w.Counts(fmt.Sprint("g", i)))
	}
	for range 2 {
		require.NoError(t, w.Store.ResumeType(stagetest.Trusted(t), "T"))
	}
	require.Equal(t, []string{"unheard-of 0"}, paused())
	w.Admit("T")
	for i := range 6 {
		require.Equal(t, api.Counts{Accepted: 2, Ready: 2}, w.Counts(fmt.Sprint("g", i)))
	}
}

func TestTenant(t *testing.T) {
	stagetest.Both(t, func(w *stagetest.World) {
		ctx := context.WithoutCancel(stagetest.Trusted(w.T))
		w.Limit(ledger.Meter{Limiter: "fixed", Window: time.Second}, 100, ledger.ShareStatic)
		for _, id := range []string{"acme", "nobody"} {
			_, err := w.Store.Tenant(ctx, id)
			require.ErrorIs(w.T, err, api.ErrNotFound)
		}
		later := time.Now().Add(time.Hour)
		jobs := stagetest.Numbered(5)
		jobs[4].RunAt = &later
		w.Submit(messages.SubmitGroup{ID: "g", Tenant: "acme", Type: "T", Jobs: jobs})
		w.Submit(messages.SubmitGroup{ID: "h", Tenant: "globex", Type: "T", Jobs: stagetest.Numbered(1)})
		acme, err := w.Store.Tenant(ctx, "acme")
		require.NoError(w.T, err)
		require.Equal(w.T, api.Tenant{
			ID: "acme", Weight: 1, Active: true, Unfinished: 5, NonReady: 1, ActiveTenants: 2,
			Window: api.TenantWindow{Limiter: "fixed", Share: "static", WindowMS: 1000, Limit: 50, GlobalLimit: 100},
		}, acme)

		for range 2 {
			set, err := w.Store.SetTenant(ctx, "acme", api.TenantSettings{RPS: ptr(12.0), Weight: ptr(2.5), BasePriority: ptr(int64(-7))})
			require.NoError(w.T, err)
			require.Equal(w.T, 12.0, *set.RPS)
			require.Equal(w.T, 2.5, set.Weight)
			require.EqualValues(w.T, -7, *set.BasePriority)
			require.EqualValues(w.T, 12, set.Window.Limit)
			shown, err := w.Store.Tenant(ctx, "acme")
			require.NoError(w.T, err)
			require.Equal(w.T, set, shown)
		}
		set, err := w.Store.SetTenant(ctx, "acme", api.TenantSettings{Weight: ptr(3.0)})
		require.NoError(w.T, err)
		require.Nil(w.T, set.RPS, "a setting that is not given gets its default")
		require.Nil(w.T, set.BasePriority)
		require.Equal(w.T, 3.0, set.Weight)
		preview, err := w.Store.PreviewTenant(ctx, "acme", api.TenantPatch{RPS: api.SetTo(9.0), BasePriority: api.SetTo(int64(4))})
		require.NoError(w.T, err)
		require.EqualValues(w.T, 9, preview.Window.Limit)
		require.EqualValues(w.T, 4, *preview.BasePriority)
		preview, err = w.Store.PreviewTenant(ctx, "acme", api.TenantPatch{RPS: api.SetTo(9.0)})
		require.NoError(w.T, err)
		shown, err := w.Store.Tenant(ctx, "acme")
		require.NoError(w.T, err)
		require.Equal(w.T, set, shown, "a preview changes nothing")
		for range 2 {
			set, err = w.Store.PatchTenant(ctx, "acme", api.TenantPatch{RPS: api.SetTo(9.0)})
			require.NoError(w.T, err)
			require.Equal(w.T, 9.0, *set.RPS)
			require.Equal(w.T, 3.0, set.Weight, "a patch leaves the other settings as they are")
			require.Equal(w.T, preview, set)
		}
		set, err = w.Store.PatchTenant(ctx, "acme", api.TenantPatch{RPS: api.ToDefault[float64]()})
		require.NoError(w.T, err)
		require.Nil(w.T, set.RPS)
		_, err = w.Store.PatchTenant(ctx, "nobody", api.TenantPatch{Weight: api.ToDefault[float64]()})
		require.NoError(w.T, err)
		_, err = w.Store.SetTenant(ctx, "nobody", api.TenantSettings{})
		require.NoError(w.T, err)
		_, err = w.Store.Tenant(ctx, "nobody")
		require.ErrorIs(w.T, err, api.ErrNotFound, "a tenant with default settings only is unknown")
		_, err = w.Store.PreviewTenant(ctx, "nobody", api.TenantPatch{})
		require.ErrorIs(w.T, err, api.ErrNotFound)

		for range 2 {
			require.NoError(w.T, w.Store.PauseTenant(ctx, "acme"))
			shown, err := w.Store.Tenant(ctx, "acme")
			require.NoError(w.T, err)
			require.True(w.T, shown.Paused)
			require.False(w.T, shown.Active)
		}
		w.Admit("T")
		require.EqualValues(w.T, 4, w.Counts("g").Waiting)
		require.EqualValues(w.T, 1, w.Counts("h").Ready)
		require.NoError(w.T, w.Store.ResumeTenant(ctx, "acme"))
		w.Admit("T")
		require.EqualValues(w.T, 4, w.Counts("g").Ready)
	})
}

func TestTenantsArePaged(t *testing.T) {
	w := stagetest.Parallel(t, 4)
	var want []string
	for i := range 23 {
		id := fmt.Sprintf("t%02d", i)
		want = append(want, id)
		if i%2 == 0 {
			w.Submit(messages.SubmitGroup{ID: "g" + id, Tenant: id, Type: "T", Jobs: stagetest.Numbered(i%3 + 1)})
			continue
		}
		_, err := w.Store.SetTenant(stagetest.Trusted(t), id, api.TenantSettings{Weight: ptr(2.0)})
		require.NoError(t, err)
	}
	for _, limit := range []int{1, 2, 7, 22, 23, 24} {
		var got []string
		for cursor := ""; ; {
			page, err := w.Store.Tenants(stagetest.Trusted(t), cursor, limit, true)
			require.NoError(t, err)
			require.LessOrEqual(t, len(page.Tenants), limit)
			for _, tenant := range page.Tenants {
				got = append(got, tenant.ID)
				alone, err := w.Store.Tenant(stagetest.Trusted(t), tenant.ID)
				require.NoError(t, err)
				require.Equal(t, alone, tenant)
			}
			if cursor = page.Cursor; cursor == "" {
				break
			}
			require.NotEmpty(t, page.Tenants)
		}
		require.Equal(t, want, got, "pages of %d", limit)
	}
	page, err := w.Store.Tenants(stagetest.Trusted(t), "t10x", 2, false)
	require.NoError(t, err)
	require.Equal(t, "t11", page.Tenants[0].ID, "the cursor's tenant may be gone")
	for _, cursor := range []string{"(a", "[a", "{", "a b"} {
		_, err := w.Store.Tenants(stagetest.Trusted(t), cursor, 1, false)
		var invalid *messages.ValidationError
		require.ErrorAs(t, err, &invalid, cursor)
	}
}

// counted is a hook of the Redis client. It counts the pipelines that list tenants, their commands,
// and the ids that they return.
type counted struct {
	redistest.NoHook
	pipelines, commands, ids int
}

func (c *counted) ProcessPipelineHook(next redis.ProcessPipelineHook) redis.ProcessPipelineHook {
	return func(ctx context.Context, cmds []redis.Cmder) error {
		err := next(ctx, cmds)
		if cmds[0].Name() == "zrangebylex" {
			c.pipelines++
			c.commands += len(cmds)
			for _, cmd := range cmds {
				c.ids += len(cmd.(*redis.StringSliceCmd).Val())
			}
		}
		return err
	}
}

// TestWorkOfTenantsIsBounded: Tenants reads the ids of all 256 partitions in one round trip, at
// most 15 ids a partition on average. No page misses a tenant, also if one partition has most of
// them.
func TestWorkOfTenantsIsBounded(t *testing.T) {
	t.Parallel()
	for name, place := range map[string]func(i int) int{
		"spread": func(i int) int { return i * 7919 % 256 },
		"skewed": func(i int) int { return max(0, i-500) % 256 },
	} {
		t.Run(name, func(t *testing.T) {
			w := stagetest.Parallel(t, 256)
			const tenants = 800
			var want []string
			for i := range tenants {
				id := fmt.Sprintf("t%04d", i)
				want = append(want, id)
				p := w.Space.Partition(place(i))
				require.NoError(t, ledger.SetTenant(t.Context(), w.Conn.Cmd, p, id, ledger.TenantSettings{Weight: ptr(2.0)}))
			}
			var sent counted
			w.Conn.Cmd.AddHook(&sent)
			var got []string
			for cursor := ""; ; {
				sent = counted{}
				page, err := w.Store.Tenants(stagetest.Trusted(t), cursor, 300, false)
				require.NoError(t, err)
				require.Equal(t, 1, sent.pipelines)
				require.Equal(t, 256, sent.commands)
				require.LessOrEqual(t, sent.ids, 256*15) // 1,000 tenants are 3.9 a partition; 3.9 + 4√3.9, rounded down, + 4
				for _, tenant := range page.Tenants {
					got = append(got, tenant.ID)
				}
				if cursor = page.Cursor; cursor == "" {
					break
				}
				require.NotEmpty(t, page.Tenants)
			}
			require.Equal(t, want, got)
		})
	}
}

// TestImplicitTenantsAreLeftOut: Tenants lists implicit tenants only if all is true. One call looks
// at a bounded number of tenants, so the three others come after at most 4 calls.
func TestImplicitTenantsAreLeftOut(t *testing.T) {
	w := stagetest.Parallel(t, 3)
	const implicit = 1100 // more than one call looks at
	for i := range implicit {
		id := fmt.Sprintf("g%04d", i)
		p := w.Space.OfTenant(id)
		_, err := ledger.Create(stagetest.Trusted(t), w.Conn.Cmd, p, ledger.CreateArgs{Group: id, Tenant: id, Type: "T", Hash: "h"})
		require.NoError(t, err)
	}
	w.Submit(messages.SubmitGroup{ID: "h", Tenant: "acme", Type: "T", Jobs: stagetest.Numbered(1)})
	_, err := w.Store.PatchTenant(stagetest.Trusted(t), "g0500", api.TenantPatch{Weight: api.SetTo(2.0)})
	require.NoError(t, err)
	w.Submit(messages.SubmitGroup{ID: "i", Tenant: "zeta", Type: "T", Jobs: stagetest.Numbered(1)})
	list := func(limit int, all bool) (ids []string, calls int) {
		for cursor := ""; ; {
			page, err := w.Store.Tenants(stagetest.Trusted(t), cursor, limit, all)
			require.NoError(t, err)
			require.LessOrEqual(t, len(page.Tenants), limit)
			require.True(t, page.Cursor == "" || page.Cursor > cursor, "each call gets on")
			calls++
			for _, tenant := range page.Tenants {
				ids = append(ids, tenant.ID)
			}
			if cursor = page.Cursor; cursor == "" {
				return ids, calls
			}
		}
	}
	for limit, calls := range map[int]int{1: 4, 2: 3, 50: 2, 1000: 2} {
		got, n := list(limit, false)
		require.Equal(t, []string{"acme", "g0500", "zeta"}, got, "pages of %d", limit)
		require.LessOrEqual(t, n, calls, "pages of %d", limit)
	}
	got, _ := list(1000, true)
	require.Len(t, got, implicit+2)
}

// TestETA: the ETA of a group grows with its jobs and the tenant's jobs that are served before
// them. A group has no ETA while the tenant's speed is not known, nor while the group, its type or
// its tenant is paused.
func TestETA(t *testing.T) {
	w := stagetest.Parallel(t, 1)
	w.Submit(messages.SubmitGroup{ID: "small", Tenant: "acme", Type: "T", Jobs: stagetest.Numbered(30)})
	w.Submit(messages.SubmitGroup{ID: "large", Tenant: "acme", Type: "T", Jobs: stagetest.Numbered(150)})
	w.Submit(messages.SubmitGroup{ID: "paused", Tenant: "acme", Type: "T", Jobs: stagetest.Numbered(10)})
	w.Submit(messages.SubmitGroup{ID: "still", Tenant: "globex", Type: "T", Jobs: stagetest.Numbered(10)})
	w.Submit(messages.SubmitGroup{ID: "else", Tenant: "acme", Type: "U", Jobs: stagetest.Numbered(10)})
	_, err := w.Store.Pause(stagetest.Trusted(t), "paused")
	require.NoError(t, err)
	require.Nil(t, w.Group("small").ETASeconds, "no speed is known yet")

	// The speed is measured from the first jobs that end.
	w.Submit(messages.SubmitGroup{ID: "done", Tenant: "acme", Type: "V", Jobs: stagetest.Numbered(20)})
	w.Admit("V")
	held := w.Take("V", "c", 20)
	w.Done("1", held[:5]...)
	w.Done("1", held[5:10]...)
	var tenant api.Tenant
	w.Await("a speed", func() bool {
		tenant, err = w.Store.Tenant(stagetest.Trusted(t), "acme")
		require.NoError(t, err)
		return tenant.JobsPerSecond > 0
	})
	etas := func() map[string]*float64 {
		l, err := w.Store.Groups(stagetest.Trusted(t), messages.ListQuery{Limit: 10})
		require.NoError(t, err)
		found := map[string]*float64{}
		for _, g := range l.Groups {
			found[g.ID] = g.ETASeconds
		}
		return found
	}
	got := etas()
	for _, id := range []string{"small", "large", "else", "done"} {
		require.NotNil(t, got[id], id)
	}
	require.InDelta(t, (30.0+150)/30, *got["large"] / *got["small"], 1.5, "the small group is served first")
	require.InDelta(t, 3, *got["small"] / *got["else"], 1, "no group is before the small one")
	require.Nil(t, got["paused"])
	require.Nil(t, got["still"], "no job of its tenant has ended")
	require.NoError(t, w.Store.PauseType(stagetest.Trusted(t), "T"))
	got = etas()
	require.Nil(t, got["large"])
	require.NotNil(t, got["else"])
	require.NoError(t, w.Store.PauseTenant(stagetest.Trusted(t), "acme"))
	require.False(t, slices.ContainsFunc([]string{"small", "else", "done"}, func(id string) bool { return etas()[id] != nil }))
}

func noPause(context.Context, int) error { return nil }

// TestBusiestTenants: the busiest tenants of all partitions are merged: the active ones with the
// most unfinished jobs.
func TestBusiestTenants(t *testing.T) {
	w := stagetest.Parallel(t, 3)
	const n = 130
	for i := range n { // tenant t7 has 8 jobs
		w.Submit(messages.SubmitGroup{
			ID: fmt.Sprint("g", i), Tenant: fmt.Sprint("t", i), Type: "T", Jobs: stagetest.Numbered(i + 1),
		})
	}
	require.NoError(t, w.Store.PauseTenant(stagetest.Trusted(t), "t129")) // is not active any more
	weight := 3.5
	_, err := w.Store.SetTenant(stagetest.Trusted(t), "t128", api.TenantSettings{Weight: &weight})
	require.NoError(t, err)
	list := func(ctx context.Context, limit int) api.TenantList {
		l, err := w.Store.BusiestTenants(ctx, limit)
		require.NoError(t, err)
		return l
	}
	admin := stagetest.Trusted(t)
	require.Equal(t, api.TenantList{Tenants: []api.Tenant{}}, list(admin, 100), "no watcher has looked yet")
	began := time.Now()
	looked := 0
	for _, p := range w.Space.All() {
		for range 2 { // twice: the same
			require.NoError(t, w.Store.MeasureBusiest(t.Context(), p, func(_ context.Context, n int) error {
				looked += n
				return nil
			}))
		}
	}
	require.Equal(t, 2*(n-1), looked)
	all := list(admin, 1000)
	require.Len(t, all.Tenants, groups.MaxBusiest)
	require.WithinRange(t, *all.AsOf, began.Truncate(time.Millisecond), time.Now())
	for i, got := range all.Tenants {
		require.Equal(t, fmt.Sprint("t", n-2-i), got.ID)
		require.EqualValues(t, n-1-i, got.Unfinished)
		require.True(t, got.Active)
	}
	require.Equal(t, weight, all.Tenants[0].Weight)
	require.Equal(t, all.Tenants[:2], list(admin, 2).Tenants)

	one := list(as(t, auth.Producer, "t5"), 100)
	require.Len(t, one.Tenants, 1)
	require.Equal(t, "t5", one.Tenants[0].ID, "a tenant sees only itself")
	require.Empty(t, list(as(t, auth.Reader, "none"), 100).Tenants)
	_, err = w.Store.BusiestTenants(t.Context(), 1)
	require.Error(t, err, "no principal")

	stop := context.Canceled
	require.ErrorIs(t, w.Store.MeasureBusiest(t.Context(), w.P, func(context.Context, int) error { return stop }), stop)
	require.NoError(t, w.Conn.Cmd.Set(t.Context(), w.P.Top(), "{", 0).Err())
	_, err = w.Store.BusiestTenants(admin, 1)
	require.ErrorContains(t, err, "decode the busiest tenants of partition 0")
	require.NoError(t, w.Store.MeasureBusiest(t.Context(), w.P, noPause))
	require.Equal(t, all.Tenants, list(admin, 100).Tenants, "the next search repairs it")
}

// TestTenantHistory: each search adds a point to the history of the busiest tenants, and finds the
// oldest job that may run.
func TestTenantHistory(t *testing.T) {
	w := stagetest.Parallel(t, 1)
	began := time.Now()
	for _, id := range []string{"old", "acme"} {
		w.Submit(messages.SubmitGroup{ID: id, Tenant: id, Type: "T", Jobs: stagetest.Numbered(3)})
	}
	for range 2 {
		require.NoError(t, w.Store.MeasureBusiest(t.Context(), w.P, noPause))
	}
	admin := stagetest.Trusted(t)
	st, err := w.Store.Stats(admin)
	require.NoError(t, err)
	require.WithinRange(t, *st.OldestWaiting, began.Add(-time.Second), time.Now().Add(time.Second))
	h, err := w.Store.TenantHistory(as(t, auth.Reader, "acme"), "acme", 60)
	require.NoError(t, err)
	require.Len(t, h.Points, 2)
	require.EqualValues(t, 3, h.Points[1].Unfinished)
	_, err = w.Store.TenantHistory(as(t, auth.Reader, "acme"), "old", 60)
	require.ErrorIs(t, err, api.ErrNotFound, "of another tenant")
	_, err = w.Store.TenantHistory(admin, "none", 60)
	require.ErrorIs(t, err, api.ErrNotFound)

	require.NoError(t, w.Store.PauseType(admin, "T"))
	oldest, err := ledger.OldestWaiting(admin, w.Conn.Cmd, w.P, []string{"acme"})
	require.NoError(t, err)
	require.Nil(t, oldest, "paused jobs do not wait for their turn")
}

// TestBusiestOfManyTenants: MeasureBusiest finds the 100 busiest among 5,000 active tenants, which
// are more than one page.
func TestBusiestOfManyTenants(t *testing.T) {
	w := stagetest.Parallel(t, 1)
	manyTenants(t, w, 5000)
	require.NoError(t, w.Store.MeasureBusiest(t.Context(), w.P, noPause))
	l, err := w.Store.BusiestTenants(stagetest.Trusted(t), 100)
	require.NoError(t, err)
	require.Len(t, l.Tenants, 100)
	require.Equal(t, "t4999", l.Tenants[0].ID)
	require.Equal(t, "t4900", l.Tenants[99].ID)
	require.True(t, slices.IsSortedFunc(l.Tenants, func(a, b api.Tenant) int { return int(b.Unfinished - a.Unfinished) }))
}

// manyTenants writes n active tenants, as an append does: the tenant t7 has 7 unfinished jobs.
func manyTenants(t testing.TB, w *stagetest.World, n int) {
	t.Helper()
	for from := 0; from < n; from += 1000 {
		_, err := w.Conn.Cmd.Pipelined(t.Context(), func(pipe redis.Pipeliner) error {
			for i := from; i < min(from+1000, n); i++ {
				stagetest.MakeActive(t, pipe, w.P, fmt.Sprint("t", i), int64(i))
			}
			return nil
		})
		require.NoError(t, err)
	}
}

// BenchmarkBusiestTenants measures one search among 100,000 active tenants, without the pauses. The
// watcher makes one in 20 s.
func BenchmarkBusiestTenants(b *testing.B) {
	w := stagetest.Shared(b)
	manyTenants(b, w, 100_000)
	used := func() (seconds float64) {
		for line := range strings.Lines(w.Conn.Cmd.Info(b.Context(), "cpu").Val()) {
			name, value, _ := strings.Cut(strings.TrimSpace(line), ":")
			if name == "used_cpu_user" || name == "used_cpu_sys" {
				s, err := strconv.ParseFloat(value, 64)
				require.NoError(b, err)
				seconds += s
			}
		}
		return seconds
	}
	before := used()
	for b.Loop() {
		require.NoError(b, w.Store.MeasureBusiest(b.Context(), w.P, noPause))
	}
	b.ReportMetric(1000*(used()-before)/float64(b.N), "redis-ms/op")
}

// TestCancelJob: a waiting job is cancelled, once or twice; one in flight is refused, and that of
// another tenant does not exist.
func TestCancelJob(t *testing.T) {
	stagetest.Both(t, func(w *stagetest.World) {
		ctx := context.WithoutCancel(stagetest.Trusted(w.T))
		w.Jobs("g", "T", 3)
		for range 2 {
			j, err := w.Store.CancelJob(ctx, "g", 1)
			require.NoError(w.T, err)
			require.Equal(w.T, "cancelled", j.State)
		}
		w.Admit("T")
		held := w.Take("T", "c", 2)
		_, err := w.Store.CancelJob(ctx, "g", 2)
		require.ErrorIs(w.T, err, api.ErrConflict)
		_, err = w.Store.CancelJob(ctx, "g", 3)
		require.ErrorIs(w.T, err, api.ErrNotFound)
		_, err = w.Store.CancelJob(auth.With(ctx, auth.Principal{Role: auth.Producer, Tenant: "other"}), "g", 1)
		require.ErrorIs(w.T, err, api.ErrNotFound)
		w.Done("1", held...)
		w.Reduce()
		require.Equal(w.T, api.Counts{Accepted: 3, Done: 2, Cancelled: 1}, w.Counts("g"))
	})
}
