package ledger_test

import (
	"context"
	"strings"
	"testing"
	"time"

	"github.com/redis/go-redis/v9"
	"github.com/stretchr/testify/require"

	"github.com/bulkaction/bulkaction/api"
	"github.com/bulkaction/bulkaction/internal/jobs/ledger"
	"github.com/bulkaction/bulkaction/internal/redisx"
	"github.com/bulkaction/bulkaction/internal/redisx/keyspace"
	"github.com/bulkaction/bulkaction/internal/testkit/limittest"
)

// elastic returns a limit of this number of permits with elastic shares, in a window that is longer
// than any test.
func elastic(permits int64) limittest.Limit {
	l := limit(permits)
	l.Share = ledger.ShareElastic
	return l
}

// limiters lists all limiters.
var limiters = []string{ledger.LimiterFixed, ledger.LimiterSliding, ledger.LimiterToken}

// within returns a limit of this number of permits in a window of this length, for this limiter.
func within(limiter string, window time.Duration, permits int64) limittest.Limit {
	return limittest.Limit{Meter: ledger.Meter{Limiter: limiter, Window: window}, Permits: permits}
}

// each runs a test with every limiter, on both servers.
func each(t *testing.T, story func(w *world, limiter string)) {
	t.Helper()
	for _, limiter := range limiters {
		t.Run(limiter, func(t *testing.T) { onStores(t, func(w *world) { story(w, limiter) }) })
	}
}

// partitionsOf returns n partitions of one installation, which divide one global limit.
func (w *world) partitionsOf(n int) []*world {
	w.Helper()
	space, err := keyspace.New(w.prefix, n)
	require.NoError(w, err)
	all := make([]*world, n)
	for i, p := range space.All() {
		all[i] = &world{tb: w.tb, c: w.c, p: p, prefix: w.prefix, limits: &lastLimit{}}
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
	w.fill(tenant, n, tenant, typ)
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

// bounded returns a limit with limits of the type T.
func bounded() limittest.Limit {
	l := limit(5)
	l.Types = []ledger.Limit{{Type: "T", Places: true, Total: 4}, {Type: "T", Total: 9}}
	return l
}

// perWindow returns tenant settings with an own limit of n permits in the window that the function
// limit uses.
func perWindow(n float64) ledger.TenantSettings { return rps(n / limit(1).Window.Seconds()) }

func (w *world) tenant(tenant string, l limittest.Limit) ledger.TenantState {
	w.Helper()
	s, err := ledger.Tenant(w.Context(), w.c, w.p, tenant, w.use(l))
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
func (w *world) exhaust(typ string, most int, l limittest.Limit) map[string]int64 {
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

func (w *world) pass(d time.Duration) {
	w.Helper()
	require.NoError(w, redisx.Sleep(w.Context(), d))
}

// flowScenes are the scenes (see scenes) in which limits, shares, pauses, priorities, settings of
// tenants or quotas matter.
var flowScenes = []scene{
	{"admit with borrowed permits", false, func(w *world) act {
		w.backlog("a", "T", 4)
		w.set("a", weight(0.5))
		w.c.SAdd(w.Context(), w.p.Active(), "b") // an active tenant that leaves its share
		return w.admitting(elastic(4))
	}},
	{"admit as the sliding limiter allows", false, func(w *world) act {
		w.backlog("acme", "T", 3)
		return w.admitting(within(ledger.LimiterSliding, time.Hour, 2))
	}},
	{"admit as the token limiter allows", false, func(w *world) act {
		w.backlog("acme", "T", 3)
		return w.admitting(within(ledger.LimiterToken, time.Hour, 2))
	}},
	{"admit the head of a tenant with a limit of its own", false, func(w *world) act {
		w.backlog("acme", "T", 3)
		w.set("acme", perWindow(1))
		return w.admitting(limit(20))
	}},
	{"admit by priority", false, func(w *world) act {
		w.byPriority(1)
		w.backlog("acme", "T", 3)
		return w.admitting(limit(2))
	}},
	{"admit by priority the head of a tenant without a permit", false, func(w *world) act {
		w.byPriority(1)
		w.spent("acme")
		return w.admitting(limit(20))
	}},
	{"admit of a paused tenant", false, func(w *world) act {
		w.backlog("acme", "T", 3)
		w.pause(ledger.PauseTenant, "acme")
		return w.admitting(limit(20))
	}},
	{"append to a group that is ranked", true, func(w *world) act {
		w.byPriority(1)
		w.backlog("acme", "T", 3)
		return w.appending(ledger.AppendArgs{Group: "acme", Limit: 10, Jobs: jobs(1)})
	}},
	{"append to a paused group", true, func(w *world) act {
		w.backlog("acme", "T", 3)
		w.pause(ledger.PauseGroup, "acme")
		return w.appending(ledger.AppendArgs{Group: "acme", Limit: 10, Jobs: jobs(1)})
	}},
	{"outcome of a job whose group is ranked", false, func(w *world) act {
		w.byPriority(1)
		w.backlog("acme", "T", 3)
		return w.reporting(done(w.begin("T", "c", 1)...))
	}},
	{"promote with borrowed permits", false, func(w *world) act {
		w.nonReady("g", 4)
		w.c.SAdd(w.Context(), w.p.Active(), "acme", "other")
		return w.promoting(elastic(4))
	}},
	{"promote jobs of a paused group", false, func(w *world) act {
		w.nonReady("g", 2)
		w.pause(ledger.PauseGroup, "g")
		return w.promoting(limit(5))
	}},
	{"promote jobs of a paused tenant", false, func(w *world) act {
		w.nonReady("g", 2)
		w.pause(ledger.PauseTenant, "acme")
		return w.promoting(limit(5))
	}},
	{"promote suspended jobs", false, func(w *world) act {
		w.suspended("g", 2)
		for _, blob := range w.c.ZRange(w.Context(), w.p.SuspendedOf("acme"), 0, -1).Val() {
			w.c.ZAdd(w.Context(), w.p.SuspendedOf("acme"), redis.Z{Score: 1e15, Member: blob})
		}
		w.resume(ledger.PauseGroup, "g")
		return w.promoting(limit(5))
	}},
	{"start jobs of a paused group", false, func(w *world) act {
		w.fill("g", 2, "acme", "T")
		w.admit("T", 2, noLimit)
		jobs := w.read("T", "c")
		w.pause(ledger.PauseGroup, "g")
		return w.starting(jobs)
	}},
	{"schedule beside a paused group", false, func(w *world) act {
		w.hold("g", 2)
		w.pause(ledger.PauseGroup, "g")
		return func() error {
			_, _, err := ledger.Schedule(w.Context(), w.c, w.p, 10)
			return err
		}
	}},
	{"sweep suspended jobs", false, func(w *world) act {
		w.suspended("g", 2)
		w.cancel("g")
		require.NoError(w, w.sweeping("g")())
		require.NoError(w, w.sweeping("g")())
		return w.sweeping("g")
	}},
	{"pause a group", false, func(w *world) act {
		w.backlog("g", "T", 2)
		return w.pausing(ledger.Pause, ledger.PauseGroup, "g")
	}},
	{"pause a tenant", false, func(w *world) act {
		w.backlog("acme", "T", 2)
		w.set("acme", weight(3))
		return w.pausing(ledger.Pause, ledger.PauseTenant, "acme")
	}},
	{"pause a type", false, func(w *world) act { return w.pausing(ledger.Pause, ledger.PauseType, "T") }},
	{"resume a group", false, func(w *world) act {
		w.suspended("g", 2)
		w.append("g", 1)
		return w.pausing(ledger.Resume, ledger.PauseGroup, "g")
	}},
	{"resume a tenant", false, func(w *world) act {
		w.byPriority(1)
		w.suspended("g", 2)
		w.pause(ledger.PauseTenant, "acme")
		w.fill("h", 1, "acme", "T")
		w.admit("T", 10, noLimit) // the tenant leaves the lane
		return w.pausing(ledger.Resume, ledger.PauseTenant, "acme")
	}},
	{"resume a type", false, func(w *world) act {
		w.suspended("g", 2)
		w.pause(ledger.PauseType, "T")
		return w.pausing(ledger.Resume, ledger.PauseType, "T")
	}},
	{"setting", true, func(w *world) act {
		w.byPriority(1)
		w.spent("acme")
		w.admit("T", 1, limit(20)) // it is rate-limited
		return func() error {
			rps, weight, base := 1.5, 0.5, int64(1e15)
			return ledger.SetTenant(w.Context(), w.c, w.p, "acme", ledger.TenantSettings{RPS: &rps, Weight: &weight, BasePriority: &base})
		}
	}},
	{"setting, of one of them", true, func(w *world) act {
		w.byPriority(1)
		w.spent("acme")
		return func() error {
			return ledger.ChangeTenant(w.Context(), w.c, w.p, "acme", api.TenantPatch{Weight: api.SetTo(0.5)})
		}
	}},
	{"setting, of a bound", true, func(w *world) act {
		w.backlog("acme", "T", 2)
		w.admit("T", 1, noLimit)
		return func() error {
			return ledger.ChangeTenant(w.Context(), w.c, w.p, "acme", api.TenantPatch{InFlight: api.SetTo[int64](1)})
		}
	}},
	{"admit up to bounds", false, func(w *world) act {
		w.set("acme", inFlight(1))
		w.backlog("acme", "T", 3)
		return w.admitting(bounded())
	}},
	{"promote up to bounds", false, func(w *world) act {
		w.nonReady("g", 4)
		w.set("acme", inFlight(1))
		return w.promoting(bounded())
	}},
	{"outcome of a tenant at its bound", false, func(w *world) act {
		w.set("acme", inFlight(1))
		w.backlog("acme", "T", 2)
		jobs := w.begin("T", "c", 1)
		w.admit("T", 1, noLimit) // the next job has to wait
		return w.reporting(done(jobs...))
	}},
	{"policy, to priority", true, func(w *world) act {
		w.backlog("a", "T", 2)
		return w.choosing(10_000)
	}},
	{"policy, to fair turns", false, func(w *world) act {
		w.byPriority(1)
		w.backlog("a", "T", 2)
		return func() error { return ledger.SetPolicy(w.Context(), w.c, w.p, nil) }
	}},
	{"quota", false, func(w *world) act { return w.dividing(ledger.LimiterFixed, 20) }},
	{"quota of the token limiter", false, func(w *world) act { return w.dividing(ledger.LimiterToken, 5) }},
	{"lead the division", false, func(w *world) act {
		return func() error {
			_, err := ledger.LeadRebalancing(w.Context(), w.c, w.p, "f1", time.Minute, 0)
			return err
		}
	}},
}

// readOnlyScenes are scenes of the scripts limit_state and tenant_state, which write nothing in
// them.
var readOnlyScenes = []scene{
	{"limit_state", false, func(w *world) act {
		w.backlog("acme", "T", 1)
		m := w.use(limit(5))
		return func() error {
			_, err := ledger.ReadLimits(w.Context(), w.c, w.p, m, "T")
			return err
		}
	}},
	{"tenant_state", false, func(w *world) act {
		w.backlog("acme", "T", 1)
		m := w.use(limit(5))
		return func() error {
			_, err := ledger.Tenant(w.Context(), w.c, w.p, "acme", m)
			return err
		}
	}},
}

// byPriority makes groups be chosen by the priority formula, with this ALPHA.
func (w *world) byPriority(alpha float64) {
	w.Helper()
	require.NoError(w, ledger.SetPolicy(w.Context(), w.c, w.p, &alpha))
}

// suspended creates a paused group of tenant acme with n suspended jobs of type T.
func (w *world) suspended(group string, n int) {
	w.Helper()
	w.nonReady(group, n)
	w.pause(ledger.PauseGroup, group)
	w.eventually(func() bool {
		w.promote(noLimit, "T")
		return w.c.ZCard(w.Context(), w.p.SuspendedOf("acme")).Val() == int64(n)
	})
}

// switching is the type of the functions ledger.Pause and ledger.Resume.
type switching func(context.Context, redis.Cmdable, keyspace.Partition, ledger.Pausable, string) error

func (w *world) pausing(how switching, what ledger.Pausable, id string) act {
	return func() error { return how(w.Context(), w.c, w.p, what, id) }
}

func (w *world) choosing(alpha float64) act {
	return func() error { return ledger.SetPolicy(w.Context(), w.c, w.p, &alpha) }
}

// dividing returns a call that sets the partition's quota to `to`. The global limit is 40 permits
// an hour, and the partition's quota before the call is 10.
func (w *world) dividing(limiter string, to int64) act {
	l := within(limiter, time.Hour, 40)
	w.quota(1, l, 10)
	return func() error {
		_, err := w.setParts(1, l, ledger.Increase{To: to})
		return err
	}
}
