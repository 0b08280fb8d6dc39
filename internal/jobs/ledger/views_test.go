package ledger_test

import (
	"context"
	"fmt"
	"maps"
	"slices"
	"testing"
	"time"

	"github.com/redis/go-redis/v9"
	"github.com/stretchr/testify/require"

	"github.com/bulkaction/bulkaction/api"
	"github.com/bulkaction/bulkaction/internal/jobs/ledger"
	"github.com/bulkaction/bulkaction/internal/redisx/keyspace"
	"github.com/bulkaction/bulkaction/internal/testkit/limittest"
	"github.com/bulkaction/bulkaction/internal/testkit/redistest"
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
		c.st.Share = c.share
		require.InDelta(t, c.want, ledger.Meter{Window: 2 * time.Second}.Bound(&c.st, c.speed), 1e-9, "%+v", c)
	}
	require.Zero(t, ledger.Meter{}.PerSecond(5), "without a limit")
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
		c.st.Share = c.share
		require.Equal(t, c.want, c.st.OwnPermit(), "%+v", c)
	}
}

func TestTenants(t *testing.T) {
	onStores(t, func(w *world) {
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
	onStores(t, func(w *world) {
		settings := func() ledger.TenantSettings {
			st, err := ledger.Tenant(w.Context(), w.c, w.p, "acme", w.use(noLimit))
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
	onStores(t, func(w *world) {
		w.backlog("busy", "T", 20)
		w.backlog("acme", "T", 20)
		w.set("busy", weight(2))
		w.set("idle", weight(1))
		l := limit(60)
		for tenant, shares := range map[string][3]int64{"acme": {20, 40, 12}, "idle": {15, 34, 8}} {
			for i, set := range []ledger.TenantSettings{weight(1), weight(4), weight(0.5), perWindow(7), {}} {
				before := w.tenant(tenant, l)
				st, err := ledger.TenantWith(w.Context(), w.c, w.p, tenant, w.use(l), set)
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
		st, err := ledger.TenantWith(w.Context(), w.c, w.p, "acme", w.use(noLimit), weight(3))
		require.NoError(w, err)
		require.Zero(w, st.Limit, "without a limit there are no shares")
	})
}

// TestImplicitTenants: a tenant whose only group has the tenant's id is implicit, unless it has
// settings or is paused.
func TestImplicitTenants(t *testing.T) {
	onStores(t, func(w *world) {
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

// totals returns the totals of a type and, separately, the totals of all retired types.
func (w *world) totals(typ string) (of, retired api.JobTotals) {
	w.Helper()
	loads, err := ledger.Loads(w.Context(), w.c, w.p, []string{typ})
	require.NoError(w, err)
	st, err := ledger.ReadPartition(w.Context(), w.c, w.p)
	require.NoError(w, err)
	return loads[0].Totals, st.Retired
}

// TestTotals: the totals count each event that takes effect once, and survive the retirement of the
// type.
func TestTotals(t *testing.T) {
	onStores(t, func(w *world) {
		is := func(want api.JobTotals) {
			w.Helper()
			of, retired := w.totals("T")
			require.Equal(w, want, of)
			require.Zero(w, retired)
		}
		is(api.JobTotals{})
		w.fill("g", 4, "acme", "T")
		w.appendJobs(ledger.AppendArgs{Group: "g", Jobs: []ledger.NewJob{{Payload: []byte("1"), RunAt: new(time.Now().Add(300 * time.Millisecond))}}})
		is(api.JobTotals{Accepted: 5})
		held := w.begin("T", "c", 4)
		is(api.JobTotals{Accepted: 5, Started: 4})
		report := func() {
			w.outcome("T", done(held[0], held[1]))
			w.outcome("T", other(ledger.OutcomeRetry, held[2], 0))
			w.outcome("T", other(ledger.OutcomeFailed, held[3], 0))
		}
		report()
		is(api.JobTotals{Accepted: 5, Started: 4, Done: 2, Failed: 1, Retried: 1})
		report() // twice: all are stale
		is(api.JobTotals{Accepted: 5, Started: 4, Done: 2, Failed: 1, Retried: 1})
		w.promoteAll("T", 2)
		again := w.read("T", "c")
		w.start("T", again)
		w.outcome("T", done(again...))
		want := api.JobTotals{Accepted: 5, Started: 6, Done: 4, Failed: 1, Retried: 1}
		is(want)

		require.True(w, w.retire("T", time.Hour))
		of, retired := w.totals("T")
		require.Zero(w, of)
		require.Equal(w, want, retired)
		require.False(w, w.retire("T", time.Hour))
		w.append("g", 1)
		of, retired = w.totals("T")
		require.Equal(w, api.JobTotals{Accepted: 1}, of)
		require.Equal(w, want, retired)
	})
}

func (w *world) used(l limittest.Limit) int64 {
	w.Helper()
	st, err := ledger.ReadLimits(w.Context(), w.c, w.p, w.use(l), "")
	require.NoError(w, err)
	return st.Used
}

// TestPermitsUsed: ReadLimits counts what admit and promote spend, with every limiter, and changes
// nothing.
func TestPermitsUsed(t *testing.T) {
	each(t, func(w *world, limiter string) {
		l := within(limiter, 1000*time.Hour, 100)
		w.nonReady("g", 2)
		require.Zero(w, w.used(l))
		w.backlog("acme", "T", 20)
		require.Equal(w, 7, w.admit("T", 7, l).Moved)
		require.EqualValues(w, 7, w.used(l))
		moved := 0
		w.eventually(func() bool { moved += w.promote(l, "T").Moved; return moved == 2 })

		before := w.dump()
		require.EqualValues(w, 9, w.used(l))
		require.EqualValues(w, 9, w.used(l), "it answers again")
		require.Equal(w, before, w.dump(), "it changes nothing")
		require.Zero(w, w.used(noLimit))
	})
}

// TestPermitsUsedAboveTheQuota: with the fixed and the sliding limiter, ReadLimits reports all 10
// permits that were spent under a limit of 100, also when it is called with a limit of 4.
func TestPermitsUsedAboveTheQuota(t *testing.T) {
	each(t, func(w *world, limiter string) {
		if limiter == ledger.LimiterToken {
			return // its state is a time: with a smaller quota the same time is worth fewer permits
		}
		l := within(limiter, 1000*time.Hour, 100)
		w.backlog("acme", "T", 20)
		w.admit("T", 10, l)
		l.Permits = 4
		require.EqualValues(w, 10, w.used(l))
	})
}

func TestReadQueues(t *testing.T) {
	onStores(t, func(w *world) {
		for _, g := range []struct {
			id, tenant, typ string
			jobs            int
		}{{"a", "acme", "T", 3}, {"b", "acme", "T", 5}, {"c", "acme", "U", 1}, {"d", "globex", "T", 2}} {
			w.fill(g.id, g.jobs, g.tenant, g.typ)
		}
		w.pause(ledger.PauseType, "U")
		acme, other := ledger.TenantQueue{Type: "T", Lane: "normal", Tenant: "acme"}, ledger.TenantQueue{Type: "U", Lane: "normal", Tenant: "acme"}
		none := ledger.TenantQueue{Type: "T", Lane: "high", Tenant: "acme"}
		read := func(most int64) map[ledger.TenantQueue]ledger.QueuedGroups {
			queues, err := ledger.ReadQueues(w.Context(), w.c, w.p, []ledger.TenantQueue{acme, other, none}, most)
			require.NoError(w, err)
			return queues
		}
		require.Equal(w, map[ledger.TenantQueue]ledger.QueuedGroups{
			acme:  {Groups: []ledger.QueuedGroup{{ID: "a", Waiting: 3}, {ID: "b", Waiting: 5}}},
			other: {Groups: []ledger.QueuedGroup{{ID: "c", Waiting: 1}}, TypePaused: true},
			none:  {Groups: []ledger.QueuedGroup{}},
		}, read(10))
		require.Equal(w, []ledger.QueuedGroup{{ID: "a", Waiting: 3}}, read(1)[acme].Groups)
	})
}

func TestReadPartition(t *testing.T) {
	onStores(t, func(w *world) {
		read := func() ledger.PartitionStats {
			s, err := ledger.ReadPartition(w.Context(), w.c, w.p)
			require.NoError(w, err)
			return s
		}
		require.Equal(w, ledger.PartitionStats{Types: []string{}}, read())
		w.backlog("acme", "T", 2)
		w.backlog("globex", "U", 1)
		w.outcome("T", other(ledger.OutcomeFailed, w.begin("T", "c", 1)[0], 0))
		w.begin("U", "c", 1)
		s := read()
		require.ElementsMatch(w, []string{"T", "U"}, s.Types)
		s.Types = nil
		require.Equal(w, ledger.PartitionStats{Groups: 2, ActiveTenants: 1, DeadLetters: 1}, s)
		w.c.Set(w.Context(), w.p.Active(), "x", 0)
		_, err := ledger.ReadPartition(w.Context(), w.c, w.p)
		require.ErrorContains(w, err, "WRONGTYPE")
	})
}

// TestPausedTypes: PausedTypes returns the paused types in alphabetical order, also beside 1,500
// paused tenants, more than one page of HSCAN holds.
func TestPausedTypes(t *testing.T) {
	onStores(t, func(w *world) {
		read := func() []string {
			types, err := ledger.PausedTypes(w.Context(), w.c, w.p, nil)
			require.NoError(w, err)
			return types
		}
		require.Empty(w, read())
		for i := range 1500 {
			w.c.HSet(w.Context(), w.p.Pauses(), fmt.Sprint("t:", i), 1)
		}
		w.pause(ledger.PauseType, "U")
		w.pause(ledger.PauseType, "T")
		w.pause(ledger.PauseTenant, "y")
		require.Equal(w, []string{"T", "U"}, read())
		w.resume(ledger.PauseType, "T")
		require.Equal(w, []string{"U"}, read())
	})
}

// TestPausedTypesBesideManyTenants: beside 30,000 paused tenants PausedTypes tells correctly which
// of the given types are paused, with at most 12 Redis commands.
func TestPausedTypesBesideManyTenants(t *testing.T) {
	onRedis(t, func(w *world) {
		for batch := range 30 {
			var pauses []any
			for i := range 1000 {
				pauses = append(pauses, fmt.Sprint("t:", batch*1000+i), 1)
			}
			require.NoError(w, w.c.HSet(w.Context(), w.p.Pauses(), pauses...).Err())
		}
		w.pause(ledger.PauseType, "U")
		count := &callCounter{}
		c := redis.NewClient(w.c.(*redis.Client).Options())
		defer c.Close()
		c.AddHook(count)
		types, err := ledger.PausedTypes(w.Context(), c, w.p, []string{"T", "U"})
		require.NoError(w, err)
		require.Contains(w, types, "U")
		require.NotContains(w, types, "T")
		require.LessOrEqual(w, count.n, 12)
	})
}

// callCounter is a hook of a client. It counts the client's commands, but not those in pipelines.
type callCounter struct {
	redistest.NoHook
	n int
}

func (c *callCounter) ProcessHook(next redis.ProcessHook) redis.ProcessHook {
	return func(ctx context.Context, cmd redis.Cmder) error {
		c.n++
		return next(ctx, cmd)
	}
}

func TestLead(t *testing.T) {
	onStores(t, func(w *world) {
		lead := func(who string, lease time.Duration) int64 {
			w.Helper()
			fence, err := ledger.Lead(w.Context(), w.c, w.p, who, lease)
			require.NoError(w, err)
			return fence
		}
		over := func() { require.NoError(w, w.c.HSet(w.Context(), w.p.Watch(), "until", 1).Err()) }
		w.unchanged(func() { require.Zero(w, lead("w1", 0), "there is nothing to give up") })
		require.Equal(w, int64(1), lead("w1", time.Minute))
		require.Equal(w, int64(1), lead("w1", time.Hour), "the same leader keeps its number")
		w.unchanged(func() {
			require.Zero(w, lead("w2", time.Minute), "another leads")
			require.Zero(w, lead("w2", 0), "and can't be deposed")
		})
		over()
		require.Equal(w, int64(2), lead("w2", time.Minute), "a takeover raises the number")
		require.Zero(w, lead("w1", time.Minute))
		over()
		require.Equal(w, int64(3), lead("w2", time.Minute), "and so does a lease that was let lapse: another may have led meanwhile")
		require.Zero(w, lead("w2", 0))
		require.Equal(w, int64(4), lead("w1", time.Minute), "what was given up is free at once")
	})
}

func TestCountRenewal(t *testing.T) {
	onStores(t, func(w *world) {
		for want := range int64(3) {
			n, err := ledger.CountRenewal(w.Context(), w.c, w.p)
			require.NoError(w, err)
			require.Equal(w, want+1, n)
		}
		w.fence() // a leader's lease keeps the counter
		n, err := ledger.CountRenewal(w.Context(), w.c, w.p)
		require.NoError(w, err)
		require.EqualValues(w, 4, n)
	})
}

// TestTakeDeletedFound: TakeDeletedFound tells once that Reclaim has found a pending entry deleted.
func TestTakeDeletedFound(t *testing.T) {
	onStores(t, func(w *world) {
		take := func() bool {
			w.Helper()
			suspicious, err := ledger.TakeDeletedFound(w.Context(), w.c, w.p)
			require.NoError(w, err)
			return suspicious
		}
		require.False(w, take())
		w.fill("g", 1, "acme", "T")
		run := w.begin("T", "c", 1)
		require.NoError(w, w.c.XDel(w.Context(), w.p.Ready("T"), run[0].entry).Err())
		require.NotEmpty(w, w.reclaim("T", 1).Missing)
		require.True(w, take())
		require.False(w, take())
	})
}

// TestQueueRequests: QueueRequests finds each of six request ids, of several forms, after its
// append and not before. Asked for all six and an unknown one, it answers false.
func TestQueueRequests(t *testing.T) {
	onStores(t, func(w *world) {
		stored := func(requests ...string) bool {
			var all func() bool
			_, _ = w.c.Pipelined(w.Context(), func(pipe redis.Pipeliner) error {
				all = ledger.QueueRequests(w.Context(), pipe, w.p, requests...)
				return nil
			})
			return all()
		}
		w.create("g", "acme", "T")
		var all []string
		for _, request := range []string{"a#g#1#0", "@", "@x-1", "@17", ledger.EntryRequest("1700000000000-0") + "#0", "@1-"} {
			require.False(w, stored(request), request)
			w.appendJobs(ledger.AppendArgs{Group: "g", Request: request, Jobs: jobs(1)})
			require.True(w, stored(request), request)
			all = append(all, request)
		}
		require.True(w, stored(all...))
		require.False(w, stored(append(all, "another")...))
		require.EqualValues(w, 2, w.c.ZCard(w.Context(), w.p.Entries()).Val())
	})
}

func init() {
	// A scene must change data, and why changes nothing. So the scene also cancels the group.
	scenes = append(scenes, struct {
		name      string
		takesMore bool
		prepare   func(w *world) act
	}{"why, and a cancellation", false, func(w *world) act {
		w.fill("g", 2, "acme", "T")
		return func() error {
			if _, err := ledger.Why(w.Context(), w.c, w.p, "g", 1, 10); err != nil {
				return err
			}
			return ledger.Cancel(w.Context(), w.c, w.p, "g")
		}
	}})
}

func (w *world) why(group string, ordinal int64) ledger.WaitingJob {
	w.Helper()
	l, err := ledger.Why(w.Context(), w.c, w.p, group, ordinal, 100)
	require.NoError(w, err)
	require.WithinDuration(w, time.Now(), l.Now, time.Minute)
	l.Now = time.Time{}
	return l
}

func TestWhy(t *testing.T) {
	onStores(t, func(w *world) {
		_, err := ledger.Why(w.Context(), w.c, w.p, "g", ledger.NextJob, 100)
		require.ErrorIs(w, err, api.ErrNotFound)
		w.fill("small", 4, "acme", "T")
		w.create("g", "acme", "T")
		all := jobs(60)
		for i := 2; i < len(all); i += 3 {
			all[i].Type = "U"
		}
		w.appendJobs(ledger.AppendArgs{Group: "g", Jobs: all})
		_, err = ledger.Why(w.Context(), w.c, w.p, "g", 60, 100)
		require.ErrorIs(w, err, api.ErrNotFound)

		before := w.dump()
		look := ledger.WaitingJob{Tenant: "acme", Status: api.StatusCreated, Types: []string{"T", "U"}, Accepted: 60, State: ledger.Waiting}
		for ordinal := range int64(60) {
			want := look
			want.Ordinal, want.Type, want.Place, want.GroupsBefore, want.JobsBefore = ordinal, "T", ordinal-ordinal/3, 1, 4
			if ordinal%3 == 2 {
				want.Type, want.Place, want.GroupsBefore, want.JobsBefore = "U", ordinal/3, 0, 0
			}
			require.Equal(w, want, w.why("g", ordinal))
			require.Equal(w, want, w.why("g", ordinal), "it answers again")
		}
		want := look
		want.Type, want.GroupsBefore, want.JobsBefore = "T", 1, 4
		require.Equal(w, want, w.why("g", ledger.NextJob))
		require.Equal(w, before, w.dump(), "it changes nothing")

		// Six groups come before g, and Why may count the waiting jobs of 3 of them.
		for i := range 5 {
			group := fmt.Sprint("s", i)
			w.fill(group, 1, "acme", "T")
		}
		few, err := ledger.Why(w.Context(), w.c, w.p, "g", 0, 3)
		require.NoError(w, err)
		require.EqualValues(w, 6, few.GroupsBefore)
		require.Less(w, few.JobsBefore, int64(4+5))
	})
}

func TestWhyTellsWhatStandsInTheWay(t *testing.T) {
	onStores(t, func(w *world) {
		w.fill("g", 3, "acme", "T")
		require.Equal(w, ledger.WaitingJob{Tenant: "acme", Status: api.StatusCreated, Types: []string{"T"}, Type: "T", Accepted: 3, State: ledger.Waiting, Ordinal: 2, Place: 2}, w.why("g", 2))
		w.c.HSet(w.Context(), w.p.Group("g"), "paused", 1)
		w.c.HSet(w.Context(), w.p.Pauses(), "t:acme", 1, "y:T", 1)
		w.c.ZAdd(w.Context(), w.p.RateLimited("T"), redis.Z{Score: 1_700_000_000_000, Member: "acme"})
		w.c.ZAdd(w.Context(), w.p.Scheduled(), redis.Z{Score: 1_800_000_000_000, Member: "g"})
		l := w.why("g", 0)
		require.True(w, l.GroupPaused && l.TenantPaused && l.TypePaused)
		require.EqualValues(w, 1_700_000_000_000, l.RateLimitedUntil.UnixMilli())
		require.EqualValues(w, 1_800_000_000_000, l.HeldUntil.UnixMilli())
		w.c.HDel(w.Context(), w.p.Pauses(), "y:T")
		w.c.HSet(w.Context(), w.p.Pauses(), "t:other", 1, "y:U", 1)
		l = w.why("g", 0)
		require.True(w, l.GroupPaused && l.TenantPaused && !l.TypePaused)
	})
}

// TestWhyOutOfTheQueue: Why returns the state letter of a job that is not waiting, and the counts
// of a group without waiting jobs. Place is -1 where the search in the queue fails.
func TestWhyOutOfTheQueue(t *testing.T) {
	onStores(t, func(w *world) {
		w.fill("g", 2, "acme", "T")
		w.admit("T", 2, noLimit)
		l := w.why("g", 1)
		require.Equal(w, ledger.Ready, l.State)
		require.Equal(w, "T", l.Type)
		l = w.why("g", ledger.NextJob)
		require.Zero(w, l.State)
		require.EqualValues(w, ledger.NextJob, l.Ordinal)
		require.EqualValues(w, 2, l.Ready)

		w.fill("h", 3, "acme", "T")
		queue := w.p.Queue("h", "T") // a queue whose order does not fit, so that the search by bisection fails
		blobs := w.c.LRange(w.Context(), queue, 0, -1).Val()
		w.c.Del(w.Context(), queue)
		for _, blob := range blobs {
			w.c.LPush(w.Context(), queue, blob)
		}
		require.EqualValues(w, -1, w.why("h", 0).Place)
		require.EqualValues(w, 1, w.why("h", 1).Place)
		w.c.Del(w.Context(), queue)
		w.c.RPush(w.Context(), queue, "no job")
		require.EqualValues(w, -1, w.why("h", 0).Place)
		require.EqualValues(w, ledger.NextJob, w.why("h", ledger.NextJob).Ordinal)
	})
}
