package ledger_test

import (
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/redis/go-redis/v9"
	"github.com/stretchr/testify/require"

	"github.com/bulkaction/bulkaction/api"
	"github.com/bulkaction/bulkaction/internal/jobs/ledger"
)

// pausables lists a group, a tenant and a type to pause, each of which contains the jobs of group
// g.
var pausables = map[ledger.Pausable]string{ledger.PauseGroup: "g", ledger.PauseTenant: "acme", ledger.PauseType: "T"}

// eachPausable runs a test for each kind that can be paused.
func eachPausable(t *testing.T, story func(w *world, what ledger.Pausable, id string)) {
	t.Helper()
	for what, id := range pausables {
		t.Run(string(what), func(t *testing.T) { onStores(t, func(w *world) { story(w, what, id) }) })
	}
}

// settle acts as fetcher, dispatcher and worker of a type, without rate limits, until no job moves
// any more. Each job that starts becomes done.
func (w *world) settle(typ string) {
	w.Helper()
	for quiet := 0; quiet < 2; {
		moved := w.admit(typ, 200, noLimit).Moved
		p := w.promote(noLimit, typ)
		run := w.read(typ, "settle")
		if len(run) > 0 {
			w.start(typ, run)
		}
		var ok []taken
		for _, j := range run {
			if j.token >= 0 {
				ok = append(ok, j)
			}
		}
		if len(ok) > 0 {
			w.outcome(typ, done(ok...))
		}
		if quiet++; moved+p.Moved+len(run) > 0 || p.Wait == 0 {
			quiet = 0
		}
	}
}

// TestPauseEverywhere: while their group, tenant or type is paused, ready, non-ready and waiting
// jobs do not start, and the job in flight finishes. After the resumption each of them becomes
// done.
func TestPauseEverywhere(t *testing.T) {
	eachPausable(t, func(w *world, what ledger.Pausable, id string) {
		w.everywhere("g") // DFNIRNNW
		w.overdueNow("acme")
		run := w.reread("T")
		running := run[slices.IndexFunc(run, func(j taken) bool { return ledger.Letter(w.states("g")[j.Ordinal]) == ledger.InFlight })]
		running.token = 1
		w.fill("other", 3, "beta", "U")

		w.pause(what, id)
		w.unchanged(func() { w.pause(what, id) })
		if what == ledger.PauseTenant {
			require.True(w, w.tenant("acme", noLimit).Paused)
		}
		w.settle("T")
		w.settle("U")
		require.Equal(w, ledger.OutcomeReply{Owned: 1}, w.outcome("T", done(running)), "what runs finishes")
		w.settle("T")
		require.Equal(w, map[string]int64{"done": 2, "failed": 1, "non_ready": 4, "waiting": 1}, w.ledger("g"))
		require.Equal(w, map[string]int64{"done": 3}, w.ledger("other"), "others go on")
		require.Equal(w, "4", w.c.HGet(w.Context(), w.p.Load("T"), "non_ready").Val())
		require.Equal(w, int64(4), w.tenant("acme", noLimit).NonReady, "also the suspended ones")
		require.Equal(w, int64(5), w.tenant("acme", noLimit).Unfinished)
		require.Zero(w, w.c.XLen(w.Context(), w.p.Ready("T")).Val())
		w.unchanged(func() {
			require.Zero(w, w.admit("T", 10, noLimit).Moved)
			require.Negative(w, w.promote(noLimit, "T").Wait, "nothing is to be done, so nobody polls")
		})
		require.Zero(w, w.c.SCard(w.Context(), w.p.Active()).Val()-w.activeBesides(what), "what is paused has no share")

		w.quiet()
		w.resume(what, id)
		require.Equal(w, int64(1), w.c.LLen(w.Context(), w.p.Wake("fetcher")).Val())
		require.Equal(w, int64(1), w.c.LLen(w.Context(), w.p.Wake("dispatcher")).Val())
		before := w.dump()
		w.resume(what, id)
		require.Equal(w, before, w.dump())
		w.settle("T")
		require.Equal(w, map[string]int64{"done": 7, "failed": 1}, w.ledger("g"))
		require.Zero(w, w.c.Exists(w.Context(), w.p.Suspended(), w.p.Resuming(), w.p.SuspendedOf("acme"), w.p.NonReady(), w.p.NonReadyOf("acme"), w.p.Pauses(), w.p.Active()).Val())
		s := w.tenant("acme", noLimit)
		require.Equal(w, []int64{0, 0, 0}, []int64{s.Wanting, s.Unfinished, s.NonReady})
		require.Equal(w, "0", w.c.HGet(w.Context(), w.p.Tenant("acme"), "congested").Val())
	})
}

// activeBesides returns how many tenants are active while something of this kind is paused, if one
// tenant has jobs: 1 for a type, otherwise 0.
func (w *world) activeBesides(what ledger.Pausable) int64 {
	if what == ledger.PauseType {
		return 1
	}
	return 0
}

// overdueNow makes a tenant's non-ready jobs due, gives its permits back, and lets it return if it
// is rate-limited.
func (w *world) overdueNow(tenant string) {
	w.Helper()
	w.overdue(tenant)
	require.NoError(w, w.c.HDel(w.Context(), w.p.Tenant(tenant), "w", "n").Err())
	for _, typ := range types {
		if w.c.ZScore(w.Context(), w.p.RateLimited(typ), tenant).Err() == nil {
			require.NoError(w, w.c.ZAdd(w.Context(), w.p.RateLimited(typ), redis.Z{Score: 1, Member: tenant}).Err())
		}
	}
}

// TestPauseWhatIsScheduled: two jobs of a scheduled group and a scheduled job do not start while
// they are paused, although their times come. After the resumption all three become done.
func TestPauseWhatIsScheduled(t *testing.T) {
	eachPausable(t, func(w *world, what ledger.Pausable, id string) {
		w.fill("g", 2, "acme", "T", "run_at", inAnHour())
		w.create("h", "acme", "T")
		w.appendJobs(ledger.AppendArgs{Group: "h", Jobs: []ledger.NewJob{{Payload: []byte("1"), RunAt: new(time.Now().Add(time.Hour))}}})
		w.pause(what, id)
		if what == ledger.PauseGroup {
			w.pause(what, "h")
		}
		come := func() { // lets their time come
			require.NoError(w, w.c.HSet(w.Context(), w.p.Group("g"), "run_at", 1).Err())
			if w.c.ZScore(w.Context(), w.p.Scheduled(), "g").Err() == nil {
				require.NoError(w, w.c.ZAdd(w.Context(), w.p.Scheduled(), redis.Z{Score: 1, Member: "g"}).Err())
			}
			w.schedule(10)
			if w.c.Exists(w.Context(), w.p.NonReadyOf("acme")).Val() > 0 {
				w.overdue("acme")
			}
			w.settle("T")
		}
		come()
		require.Equal(w, map[string]int64{"waiting": 2}, w.ledger("g"))
		require.Equal(w, map[string]int64{"non_ready": 1}, w.ledger("h"))
		w.resume(what, id)
		if what == ledger.PauseGroup {
			w.resume(what, "h")
		}
		w.settle("T")
		require.Equal(w, map[string]int64{"done": 2}, w.ledger("g"))
		require.Equal(w, map[string]int64{"done": 1}, w.ledger("h"))
		require.Zero(w, w.tenant("acme", noLimit).Wanting)
	})
}

// TestPauseAndResumeWhatIsHeld: a scheduled group that is paused and resumed before its time is as
// it was before; only wake tokens are added.
func TestPauseAndResumeWhatIsHeld(t *testing.T) {
	onStores(t, func(w *world) {
		w.fill("g", 2, "acme", "T", "run_at", inAnHour())
		before := w.dump()
		w.pause(ledger.PauseGroup, "g")
		w.resume(ledger.PauseGroup, "g")
		after := w.dump()
		for _, dump := range []map[string]string{before, after} {
			delete(dump, "wake:fetcher")
			delete(dump, "wake:dispatcher")
		}
		require.Equal(w, before, after)
		w.hold("h", 1)
		require.NoError(w, w.c.ZAdd(w.Context(), w.p.Scheduled(), redis.Z{Score: 1, Member: "g"}).Err())
		w.schedule(10)
		require.Equal(w, int64(3), w.tenant("acme", noLimit).Wanting)
	})
}

// TestPauseWhileMoreComes: jobs that are appended or requeued while their group, tenant or type is
// paused do not start before the resumption.
func TestPauseWhileMoreComes(t *testing.T) {
	eachPausable(t, func(w *world, what ledger.Pausable, id string) {
		w.failed("old", 3)
		w.fill("g", 2, "acme", "T")
		if what == ledger.PauseGroup {
			_, err := ledger.Reopen(w.Context(), w.c, w.p, "old", "", ledger.RetryChoice{})
			require.NoError(w, err)
			w.pause(what, "old")
		}
		w.pause(what, id)
		w.append("g", 3)
		if what == ledger.PauseGroup {
			w.requeue("old")
		} else {
			w.retry("old")
		}
		w.settle("T")
		require.Equal(w, map[string]int64{"waiting": 5}, w.ledger("g"))
		require.Equal(w, map[string]int64{"waiting": 3}, w.ledger("old"))
		want := map[ledger.Pausable]int64{ledger.PauseGroup: 0, ledger.PauseTenant: 8, ledger.PauseType: 8}[what]
		require.Equal(w, want, w.tenant("acme", noLimit).Wanting)
		w.resume(what, id)
		if what == ledger.PauseGroup {
			w.resume(what, "old")
		}
		require.Equal(w, int64(8), w.tenant("acme", noLimit).Wanting)
		w.settle("T")
		require.Equal(w, map[string]int64{"done": 5}, w.ledger("g"))
		require.Equal(w, map[string]int64{"done": 3}, w.ledger("old"))
		require.Zero(w, w.tenant("acme", noLimit).Wanting)
	})
}

// TestPauseAndCancel: a group that is cancelled while it, its tenant or its type is paused leaves
// no suspended or non-ready job behind, and none of its jobs starts after a resumption.
func TestPauseAndCancel(t *testing.T) {
	eachPausable(t, func(w *world, what ledger.Pausable, id string) {
		w.everywhere("g")
		w.overdueNow("acme")
		w.pause(what, id)
		w.settle("T")
		w.cancel("g")
		w.sweep("g")
		require.Equal(w, map[string]int64{"done": 1, "failed": 1, "cancelled": 6}, w.ledger("g"))
		require.Zero(w, w.c.Exists(w.Context(), w.p.SuspendedOf("acme"), w.p.NonReadyOf("acme"), w.p.Suspended(), w.p.Active(), w.p.Resuming()).Val())
		require.Equal(w, "0", w.c.HGet(w.Context(), w.p.Load("T"), "non_ready").Val())
		if what == ledger.PauseGroup {
			require.ErrorIs(w, ledger.Resume(w.Context(), w.c, w.p, what, id), api.ErrConflict)
		} else {
			w.resume(what, id)
		}
		w.settle("T")
		require.Zero(w, w.tenant("acme", noLimit).Wanting)
		require.Equal(w, map[string]int64{"done": 1, "failed": 1, "cancelled": 6}, w.ledger("g"))
	})
}

func TestPauseRefuses(t *testing.T) {
	onStores(t, func(w *world) {
		w.failed("g", 1)
		w.unchanged(func() {
			require.ErrorIs(w, ledger.Pause(w.Context(), w.c, w.p, ledger.PauseGroup, "nobody"), api.ErrNotFound)
			require.ErrorIs(w, ledger.Resume(w.Context(), w.c, w.p, ledger.PauseGroup, "nobody"), api.ErrNotFound)
			err := ledger.Pause(w.Context(), w.c, w.p, ledger.PauseGroup, "g")
			require.ErrorIs(w, err, api.ErrConflict)
			require.ErrorContains(w, err, "is FAILED")
		})
		w.pause(ledger.PauseTenant, "unknown") // a tenant that does not exist yet
		require.True(w, w.tenant("unknown", noLimit).Paused)
		w.backlog("unknown", "T", 1)
		require.Zero(w, w.admit("T", 10, noLimit).Moved)
		require.Zero(w, w.c.SCard(w.Context(), w.p.Active()).Val())
		w.resume(ledger.PauseTenant, "unknown")
		require.Equal(w, 1, w.admit("T", 10, noLimit).Moved)
	})
}

// TestPauseManyJobs: jobs of several groups are suspended, more than one call of promote moves
// back. All jobs of a group come back when it is resumed, also while jobs of another resumed group
// are still being moved back.
func TestPauseManyJobs(t *testing.T) {
	onRedis(t, func(w *world) {
		const n = 130
		groups := []string{"a", "b", "c"}
		for _, g := range groups {
			w.fill(g, n, "acme", "T")
			w.begin("T", "c", n)
		}
		require.Equal(w, 3*n, w.reclaim("T", 3).Taken)
		for _, g := range groups {
			w.pause(ledger.PauseGroup, g)
		}
		w.pause(ledger.PauseType, "T")
		w.settle("T")
		require.Equal(w, int64(3*n), w.c.ZCard(w.Context(), w.p.SuspendedOf("acme")).Val())
		require.Equal(w, "0", w.c.HGet(w.Context(), w.p.Tenant("acme"), "congested").Val())

		w.resume(ledger.PauseGroup, "b")
		w.settle("T")
		require.Equal(w, int64(3*n), w.c.ZCard(w.Context(), w.p.SuspendedOf("acme")).Val(), "the type is still paused")
		w.resume(ledger.PauseType, "T")
		w.promote(noLimit, "T") // one piece
		w.resume(ledger.PauseGroup, "a")
		w.promote(noLimit, "T")
		w.resume(ledger.PauseGroup, "c")
		w.settle("T")
		for _, g := range groups {
			require.Equal(w, strings.Repeat("D", n), w.states(g), g)
		}
		require.Zero(w, w.c.Exists(w.Context(), w.p.SuspendedOf("acme"), w.p.Suspended(), w.p.Resuming(), w.p.NonReady()).Val())
		require.Equal(w, "0", w.c.HGet(w.Context(), w.p.Tenant("acme"), "congested").Val())
	})
}

// TestPauseARateLimitedTenant: a rate-limited tenant, or its only group, is paused until after its
// next permit. After the resumption all jobs run.
func TestPauseARateLimitedTenant(t *testing.T) {
	onStores(t, func(w *world) {
		w.spent("acme")
		require.Equal(w, 1, w.admit("T", 10, limit(20)).NonReady)
		w.pause(ledger.PauseTenant, "acme")
		w.overdueNow("acme")
		w.settle("T")
		require.Equal(w, "NWW", w.states("g"))
		w.resume(ledger.PauseTenant, "acme")
		w.settle("T")
		require.Equal(w, "DDD", w.states("g"))

		w.fill("h", 3, "acme", "T")
		require.NoError(w, w.c.HSet(w.Context(), w.p.Tenant("acme"), "w", 0, "n", 1000).Err())
		require.Equal(w, 1, w.admit("T", 10, limit(20)).NonReady)
		w.pause(ledger.PauseGroup, "h")
		require.Equal(w, int64(1), w.tenant("acme", noLimit).Wanting, "its marker, until that is met")
		w.overdueNow("acme")
		w.settle("T")
		require.Zero(w, w.tenant("acme", noLimit).Wanting)
		require.Zero(w, w.c.Exists(w.Context(), w.p.Active()).Val())
		w.resume(ledger.PauseGroup, "h")
		w.settle("T")
		require.Equal(w, "DDD", w.states("h"))
	})
}
