package ledger_test

import (
	"fmt"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/bulkaction/bulkaction/internal/jobs/ledger"
	"github.com/bulkaction/bulkaction/internal/testkit/limittest"
)

// TestShareLendsWhatIsLeft: beside a tenant with 2 jobs, a busy tenant gets 5 of 10 permits with
// static shares and 8 with elastic ones.
func TestShareLendsWhatIsLeft(t *testing.T) {
	onStores(t, func(w *world) {
		w.backlog("busy", "T", 100)
		w.backlog("small", "T", 2)
		require.Equal(w, map[string]int64{"busy": 5, "small": 2}, w.exhaust("T", 100, limit(10)), "static shares lend nothing")
		w.promoteNone()
		w.newWindow("busy", "small")
		w.append("small", 2)
		require.Equal(w, map[string]int64{"busy": 8, "small": 2}, w.exhaust("T", 100, elastic(10)))
		require.Equal(w, int64(10), w.spentOf(w.p.Rate()))
	})
}

// promoteNone calls promote and checks that no job was due, so that the rest of the test is about
// waiting jobs only.
func (w *world) promoteNone() {
	w.Helper()
	require.Zero(w, w.promote(limit(1000), "T", "U").Moved)
}

// TestShareComesBackInTheNextWindow: a tenant that is alone gets all 10 permits in each of three
// windows. Two tenants that get jobs then have their full shares in the next window.
func TestShareComesBackInTheNextWindow(t *testing.T) {
	onStores(t, func(w *world) {
		w.backlog("busy", "T", 200)
		l := elastic(10)
		for range 3 {
			require.Equal(w, map[string]int64{"busy": 10}, w.exhaust("T", 100, l), "alone it has all")
			w.newWindow("busy")
		}
		w.backlog("b", "T", 50)
		w.backlog("c", "T", 1)
		require.Equal(w, map[string]int64{"busy": 5, "b": 4, "c": 1}, w.served(l, "busy", "b", "c"))
		w.newWindow("busy", "b", "c")
		require.Equal(w, map[string]int64{"busy": 5, "b": 5}, w.exhaust("T", 3, l))
	})
}

// served admits until the limit is exhausted, checks that these tenants have all of its permits,
// and returns the permits of each. If the second tenant has more than 4, because it got the
// remainder of the division, served counts the surplus for the first one.
func (w *world) served(l limittest.Limit, tenants ...string) map[string]int64 {
	w.Helper()
	got := w.exhaust("T", 100, l)
	sum := int64(0)
	for _, tenant := range tenants {
		sum += got[tenant]
	}
	require.Equal(w, l.Permits, sum)
	if over := got[tenants[1]] - 4; over > 0 {
		got[tenants[0]], got[tenants[1]] = got[tenants[0]]+over, 4
	}
	return got
}

// TestShareUsesTheRemainder: three tenants together get all of 11 permits, each 3 to 5, with 1, 4,
// 7 and 10 jobs in a call.
func TestShareUsesTheRemainder(t *testing.T) {
	onStores(t, func(w *world) {
		for _, tenant := range []string{"a", "b", "c"} {
			w.backlog(tenant, "T", 20)
		}
		for most := range 4 {
			got := w.exhaust("T", 1+3*most, elastic(11))
			require.Equal(w, int64(11), got["a"]+got["b"]+got["c"], "%v", got)
			for tenant, n := range got {
				require.Contains(w, []int64{3, 4, 5}, n, tenant)
			}
			w.newWindow("a", "b", "c")
		}
	})
}

// TestShareOfATenantInSeveralLanes: a tenant with jobs in three lanes and one with jobs in one lane
// get 6 of 12 permits each. With a limit of its own of 2, the first tenant gets 2 in all.
func TestShareOfATenantInSeveralLanes(t *testing.T) {
	onStores(t, func(w *world) {
		for _, lane := range []string{"high", "normal", "low"} {
			w.fill(lane, 50, "a", "T", "lane", lane)
		}
		w.backlog("b", "T", 100)
		for window := range 4 {
			require.Equal(w, map[string]int64{"a": 6, "b": 6}, w.exhaust("T", 12, elastic(12)), "window %d", window)
			require.Equal(w, []int64{6, 6}, []int64{w.spentOf(w.p.Tenant("a")), w.spentOf(w.p.Tenant("b"))}, "window %d", window)
			w.newWindow("a", "b")
		}
		w.set("a", perWindow(2))
		require.Equal(w, map[string]int64{"a": 2, "b": 10}, w.exhaust("T", 12, elastic(12)), "a limit of its own holds at once")
	})
}

func TestShareOfATenantWithALimitOfItsOwn(t *testing.T) {
	onStores(t, func(w *world) {
		w.backlog("a", "T", 30)
		w.set("a", perWindow(3))
		require.Equal(w, map[string]int64{"a": 3}, w.exhaust("T", 100, elastic(10)), "it never borrows, whatever is left")
		w.set("a", perWindow(5))
		require.Equal(w, map[string]int64{"a": 2}, w.exhaust("T", 100, elastic(10)), "a change holds at once")
		w.set("a", ledger.TenantSettings{})
		require.Equal(w, map[string]int64{"a": 5}, w.exhaust("T", 100, elastic(10)), "and so does the default")
		w.set("a", perWindow(2))
		w.newWindow("a")
		require.Equal(w, map[string]int64{"a": 2}, w.exhaust("T", 100, limit(0)), "where there is no other limit, too")
	})
}

// TestShareReserves: a tenant with jobs of type T gets 7 of 10 permits, its own 5 and 2 borrowed,
// because 3 jobs of type U, of another tenant, are waiting.
func TestShareReserves(t *testing.T) {
	onStores(t, func(w *world) {
		w.backlog("busy", "T", 100)
		w.backlog("other", "U", 3)
		l := elastic(10)
		require.Equal(w, map[string]int64{"busy": 7}, w.exhaust("T", 100, l), "5 of its own, 2 that are lent")
		require.Equal(w, map[string]int64{"other": 3}, w.exhaust("U", 100, l))

		// No permits are reserved for a type whose ready stream has been full for a while, or that
		// is paused.
		for what, blocked := range map[string]func(){
			"stuck":  func() { w.stuck("U") },
			"paused": func() { w.pause(ledger.PauseType, "U") },
		} {
			w.newWindow("busy", "other")
			w.append("other", 3)
			blocked()
			require.Equal(w, map[string]int64{"busy": 10}, w.exhaust("T", 100, l), what)
			w.resume(ledger.PauseType, "U")
			w.newWindow("busy", "other")
			require.Len(w, w.exhaust("U", 100, l), 1)
		}
	})
}

func TestShareReservesWhatIsDue(t *testing.T) {
	onStores(t, func(w *world) {
		for i := range 4 {
			w.due(fmt.Sprint("due", i), "small", "T", float64(10+i))
		}
		l := elastic(10)
		w.backlog("small", "U", 1)
		w.stuck("U")
		w.backlog("busy", "T", 100)
		require.Equal(w, map[string]int64{"busy": 6}, w.exhaust("T", 100, l), "5 of its own, 1 that is lent")
		require.Equal(w, map[string]int64{"small": 4}, permitsOf(w.promote(l, "T").Permits))

		// Due jobs get their share, 5, while jobs of the tenant busy are waiting. In the next
		// window no jobs are waiting, so that the 7 other due jobs all get a permit.
		w.newWindow("busy", "small")
		for i := range 12 {
			w.due(fmt.Sprint("more", i), "small", "V", float64(10+i))
		}
		w.cancel("small")
		w.sweep("small")
		require.Equal(w, 5, w.promote(l, "V").Moved, "its share; what is left may be the other's")
		require.Equal(w, map[string]int64{"busy": 5}, w.exhaust("T", 100, l))
		w.newWindow("busy", "small")
		w.cancel("busy")
		w.sweep("busy")
		w.overdue("small")
		require.Equal(w, 7, w.promote(l, "V").Moved)
	})
}

// TestShareByWeight: tenants with the weights 1, 2 and 4 get 10, 20 and 40 of 70 permits, and about
// 40, 80 and 160 of 280 admissions without a limit.
func TestShareByWeight(t *testing.T) {
	onStores(t, func(w *world) {
		tenants := []string{"a", "b", "c"}
		for i, tenant := range tenants {
			w.set(tenant, weight(float64(int(1)<<i)))
			w.backlog(tenant, "T", 400)
		}
		require.Equal(w, map[string]int64{"a": 10, "b": 20, "c": 40}, w.exhaust("T", 100, limit(70)))
		require.Equal(w, []int64{10, 20, 40}, []int64{w.tenant("a", limit(70)).Limit, w.tenant("b", limit(70)).Limit, w.tenant("c", limit(70)).Limit})

		got := map[string]int64{}
		for n := 0; n < 280; {
			r := w.admit("T", 7, noLimit)
			n += r.Moved
			for tenant, k := range permitsOf(r.Permits) {
				got[tenant] += k
			}
			w.read("T", "c")
			w.newWindow(tenants...)
		}
		for i, tenant := range tenants {
			require.InDelta(w, 40<<i, got[tenant], 10, tenant)
		}

		// With the weight 1 instead of 4, c gets 10 of 40 permits at once. When the jobs of b are
		// cancelled, b's weight leaves the sum, and a and c get 20 each.
		w.set("c", weight(1))
		require.Equal(w, map[string]int64{"a": 10, "b": 20, "c": 10}, w.exhaust("T", 100, limit(40)))
		w.cancel("b")
		w.sweep("b")
		w.newWindow(tenants...)
		require.Equal(w, map[string]int64{"a": 20, "c": 20}, w.exhaust("T", 100, limit(40)))
		w.pause(ledger.PauseTenant, "c")
		require.Equal(w, int64(40), w.tenant("a", limit(40)).Limit)
		w.set("c", weight(9))
		require.Equal(w, int64(40), w.tenant("a", limit(40)).Limit, "a paused one has no part in it")
		w.resume(ledger.PauseTenant, "c")
		require.Equal(w, int64(4), w.tenant("a", limit(40)).Limit)
		for _, g := range []string{"a", "c"} {
			w.cancel(g)
			w.sweep(g)
		}
		require.Zero(w, number(w.c.HGet(w.Context(), w.p.Rate(), "xw").Val()))
		require.Zero(w, w.c.Exists(w.Context(), w.p.Active()).Val())
	})
}

// TestShareByDuration: a tenant whose jobs take 50 ms gets about 40 of 2,040 admissions beside a
// tenant whose jobs take 1 ms, as soon as the run times are known.
func TestShareByDuration(t *testing.T) {
	onRedis(t, func(w *world) {
		w.backlog("long", "T", 3000)
		w.backlog("short", "T", 3000)
		took := map[string]time.Duration{"long": 50 * time.Millisecond, "short": time.Millisecond}
		got := map[string]int{}
		run := func(rounds int) {
			for range rounds {
				require.Equal(w, 10, w.admit("T", 10, noLimit).Moved)
				jobs := w.read("T", "c")
				w.start("T", jobs)
				report := done(jobs...)
				for i := range report {
					g := &report[i]
					g.Ran = len(g.Done)
					g.Took = time.Duration(g.Ran) * took[g.Group]
					got[g.Group] += g.Ran
				}
				w.outcome("T", report)
			}
		}
		run(60) // until the run times are known
		clear(got)
		run(204)
		require.InDelta(w, 40, got["long"], 12, "%v", got)
		require.InDelta(w, 50, number(w.c.HGet(w.Context(), w.p.Tenant("long"), "est:T").Val()[:2]), 1)
	})
}

// TestShareChargesWhatIsOwed: a tenant was charged 1 ms for a job that ran 31 ms. The other 30 ms
// are charged once, when jobs are dequeued again: the tenant gets about 5 of 40 admissions.
func TestShareChargesWhatIsOwed(t *testing.T) {
	onStores(t, func(w *world) {
		w.backlog("a", "T", 100)
		w.backlog("b", "T", 100)
		jobs := w.begin("T", "c", 2)
		report := done(jobs...)
		for i := range report {
			report[i].Ran, report[i].Took = 1, time.Millisecond
		}
		report[0].Took = 31 * time.Millisecond // job of tenant a, which was charged 1 ms
		w.outcome("T", report)
		require.Equal(w, "30.000", w.c.HGet(w.Context(), w.p.Tenant("a"), "owe:T").Val())
		require.Equal(w, "0.000", w.c.HGet(w.Context(), w.p.Tenant("b"), "owe:T").Val())
		require.NoError(w, w.c.HSet(w.Context(), w.p.Tenant("a"), "est:T", 1).Err()) // from now on its jobs are short
		for range 40 {
			w.admit("T", 1, noLimit)
		}
		order := w.admitted("T", group)
		require.InDelta(w, 35, len(order)-countOf(order, 'a'), 2, order)
		require.Equal(w, "0", w.c.HGet(w.Context(), w.p.Tenant("a"), "owe:T").Val(), "it is paid once")
	})
}

func countOf(s string, of rune) (n int) {
	for _, r := range s {
		if r == of {
			n++
		}
	}
	return n
}

// TestOneMarkerATenant: a tenant whose own limit is one permit in a window never has more than one
// non-ready job, its marker, in 20 windows, and more than 10 jobs become ready.
func TestOneMarkerATenant(t *testing.T) {
	onStores(t, func(w *world) {
		w.set("acme", perWindow(1))
		w.fill("g", 200, "acme", "T")
		for range 20 {
			w.newWindow("acme")
			w.exhaust("T", 10, noLimit)
			require.LessOrEqual(w, w.ledger("g")["non_ready"], int64(1))
			w.promote(noLimit, "T")
		}
		require.Greater(w, w.ledger("g")["ready"], int64(10))
	})
}

// TestShareOfATenantThatIsDue: a tenant with no waiting job, but with a due non-ready one, counts
// as one of the tenants that share the limit.
func TestShareOfATenantThatIsDue(t *testing.T) {
	onStores(t, func(w *world) {
		w.backlog("busy", "T", 1)
		w.due("g", "a", "T", -1000)
		for _, tenant := range []string{"a", "busy"} {
			st := w.tenant(tenant, elastic(10))
			require.EqualValues(w, []int64{2, 5}, []int64{st.ActiveTenants, st.Limit}, tenant)
		}
	})
}
