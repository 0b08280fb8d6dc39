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
	"github.com/bulkaction/bulkaction/internal/messages"
	"github.com/bulkaction/bulkaction/internal/testkit/redistest"
	"github.com/bulkaction/bulkaction/internal/testkit/stagetest"
	"github.com/bulkaction/bulkaction/internal/testkit/tamper"
)

func noPause(context.Context, int) error { return nil }

// TestBusiestTenants: the busiest tenants of all partitions are merged: the active ones with the
// most unfinished jobs.
func TestBusiestTenants(t *testing.T) {
	t.Parallel()
	url, prefix := redistest.Shared(t)
	w := stagetest.New(t, url, prefix, 3)
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

// TestBusiestOfManyTenants: MeasureBusiest finds the 100 busiest among 5,000 active tenants, which
// are more than one page.
func TestBusiestOfManyTenants(t *testing.T) {
	t.Parallel()
	w := stagetest.Shared(t)
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
				tamper.MakeActive(t, pipe, w.P, fmt.Sprint("t", i), int64(i))
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
