package ledger_test

import (
	"strings"
	"testing"
	"time"

	"github.com/redis/go-redis/v9"
	"github.com/stretchr/testify/require"

	"github.com/bulkaction/bulkaction/internal/jobs/ledger"
	"github.com/bulkaction/bulkaction/internal/redisx"
	"github.com/bulkaction/bulkaction/internal/redisx/keyspace"
)

// elastic returns a limit of this number of permits with elastic shares, in a window that is longer
// than any test.
func elastic(permits int64) ledger.Limit {
	l := limit(permits)
	l.Share = ledger.ShareElastic
	return l
}

// limiters lists all limiters.
var limiters = []string{ledger.LimiterFixed, ledger.LimiterSliding, ledger.LimiterToken}

// within returns a limit of this number of permits in a window of this length, for this limiter.
func within(limiter string, window time.Duration, permits int64) ledger.Limit {
	return ledger.Limit{Limiter: limiter, Window: window, Permits: permits}
}

// each runs a test with every limiter, on both servers.
func each(t *testing.T, story func(w *world, limiter string)) {
	t.Helper()
	for _, limiter := range limiters {
		t.Run(limiter, func(t *testing.T) { both(t, func(w *world) { story(w, limiter) }) })
	}
}

// partitionsOf returns n partitions of one installation, which divide one global limit.
func (w *world) partitionsOf(n int) []*world {
	w.Helper()
	space, err := keyspace.New(w.prefix, n)
	require.NoError(w, err)
	all := make([]*world, n)
	for i, p := range space.All() {
		all[i] = &world{tb: w.tb, c: w.c, p: p, prefix: w.prefix}
	}
	return all
}

// stuck sets the stored time since which a type's ready stream is full to 1 ms after 1970, so that
// the type counts as stuck.
func (w *world) stuck(typ string) {
	w.Helper()
	require.Equal(w, ledger.AdmitFull, w.admitBelow(0, typ, 1, noLimit).State)
	full := strings.Fields(w.c.HGet(w.Context(), w.p.Load(typ), "full").Val())
	require.Len(w, full, 3)
	require.NoError(w, w.c.HSet(w.Context(), w.p.Load(typ), "full", full[0]+" "+full[1]+" 1").Err())
}

// newWindow begins the next window of the global limit and of these tenants, without waiting: it
// resets the fixed limiter's counts. All rate-limited tenants of the partition may return to the
// fair queue.
func (w *world) newWindow(tenants ...string) {
	w.Helper()
	keys := []string{w.p.Rate()}
	for _, tenant := range tenants {
		keys = append(keys, w.p.Tenant(tenant))
	}
	for _, key := range keys {
		require.NoError(w, w.c.HSet(w.Context(), key, "w", -1).Err())
	}
	// A tenant may return when the time that is its score has passed: 1 ms after 1970.
	for _, typ := range w.c.ZRange(w.Context(), w.p.Types(), 0, -1).Val() {
		for _, tenant := range w.c.ZRange(w.Context(), w.p.RateLimited(typ), 0, -1).Val() {
			require.NoError(w, w.c.ZAdd(w.Context(), w.p.RateLimited(typ), redis.Z{Score: 1, Member: tenant}).Err())
		}
	}
}

// backlog creates a group with n waiting jobs. The tenant's name is also the group's id.
func (w *world) backlog(tenant, typ string, n int) {
	w.Helper()
	w.create(tenant, tenant, typ)
	w.append(tenant, n)
}

func (w *world) pause(what ledger.Pausable, id string) {
	w.Helper()
	require.NoError(w, ledger.Pause(w.Context(), w.c, w.p, what, id))
}

func (w *world) resume(what ledger.Pausable, id string) {
	w.Helper()
	require.NoError(w, ledger.Resume(w.Context(), w.c, w.p, what, id))
}

func (w *world) set(tenant string, s ledger.TenantSettings) {
	w.Helper()
	require.NoError(w, ledger.SetTenant(w.Context(), w.c, w.p, tenant, s))
}

func weight(f float64) ledger.TenantSettings { return ledger.TenantSettings{Weight: &f} }
func rps(f float64) ledger.TenantSettings    { return ledger.TenantSettings{RPS: &f} }

// perWindow returns tenant settings with an own limit of n permits in the window that the function
// limit uses.
func perWindow(n float64) ledger.TenantSettings { return rps(n / limit(1).Window.Seconds()) }

func (w *world) tenant(tenant string, l ledger.Limit) ledger.TenantState {
	w.Helper()
	s, err := ledger.Tenant(w.Context(), w.c, w.p, tenant, l)
	require.NoError(w, err)
	return s
}

// spentOf returns the permits that the fixed limiter has counted in its present window in this
// hash.
func (w *world) spentOf(key string) int64 {
	w.Helper()
	return number(w.c.HGet(w.Context(), key, "n").Val())
}

// permitsOf sums up spent permits by tenant.
func permitsOf(all ...[]ledger.Permit) map[string]int64 {
	sum := map[string]int64{}
	for _, permits := range all {
		for _, p := range permits {
			sum[p.Tenant] += p.N
		}
	}
	return sum
}

// exhaust admits jobs of a type, up to `most` in a call, until none is admitted. It reads them, so
// that the ready stream never fills up. It returns the number of permits that each tenant spent.
func (w *world) exhaust(typ string, most int, l ledger.Limit) map[string]int64 {
	w.Helper()
	var all [][]ledger.Permit
	for range 1000 {
		r := w.admit(typ, most, l)
		all = append(all, r.Permits)
		w.read(typ, "exhaust")
		if r.Moved == 0 && r.State != ledger.AdmitOK {
			return permitsOf(all...)
		}
	}
	require.FailNow(w, "it does not end")
	return nil
}

// now returns Redis's time in µs.
func (w *world) now() int64 {
	w.Helper()
	at, err := w.c.Time(w.Context()).Result()
	require.NoError(w, err)
	return at.UnixMicro()
}

// pass waits for the time d.
func (w *world) pass(d time.Duration) {
	w.Helper()
	require.NoError(w, redisx.Sleep(w.Context(), d))
}
