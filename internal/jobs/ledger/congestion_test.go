package ledger_test

import (
	"fmt"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/bulkaction/bulkaction/internal/jobs/ledger"
)

// waitsOf returns a tenant's non-ready jobs as GROUP.ORDINAL, and the wait of each from becoming
// non-ready until due, in ms. Both are ordered by due time.
func (w *world) waitsOf(tenant string) (jobs []string, waits []int64) {
	w.Helper()
	for _, z := range w.c.ZRangeWithScores(w.Context(), w.p.NonReadyOf(tenant), 0, -1).Val() {
		d, err := ledger.ParseJob(z.Member.(string))
		require.NoError(w, err)
		jobs = append(jobs, fmt.Sprint(d.Group, ".", d.Ordinal))
		waits = append(waits, int64(z.Score)-d.SinceMS)
	}
	return jobs, waits
}

// sendBack creates a group of n jobs, named like its tenant, and reports each job once as throttled
// by a downstream API.
func (w *world) sendBack(tenant string, n int, terms ledger.Congestion) {
	w.Helper()
	w.fill(tenant, n, tenant, "T")
	report := []ledger.GroupOutcome{{Group: tenant}}
	for _, j := range w.begin("T", "c", n) {
		report[0].Others = append(report[0].Others, other(ledger.OutcomeThrottled, j, 0)[0].Others...)
	}
	w.outcomeIn(terms, "T", report)
}

// TestCongestionIsCountedPerTenant: after 100 throttled jobs of one tenant, a throttled job of
// another waits only for the base, 1 s. Those of a tenant with a limit of 5 a second are 200 ms
// apart.
func TestCongestionIsCountedPerTenant(t *testing.T) {
	onStores(t, func(w *world) {
		terms := ledger.Congestion{Base: time.Second, Cap: time.Hour, RPS: 10}
		w.sendBack("flood", 100, terms)
		_, waits := w.waitsOf("flood")
		require.Len(w, waits, 100)
		require.Equal(w, []int64{1000, 1100, 1200}, waits[:3])
		require.Equal(w, int64(1000+9900), waits[99], "base + floor(99/10) s, the 10th place of that second")

		w.sendBack("small", 1, terms)
		_, waits = w.waitsOf("small")
		require.Equal(w, []int64{1000}, waits)

		w.set("slow", rps(5))
		w.sendBack("slow", 5, terms)
		jobs, waits := w.waitsOf("slow")
		require.Equal(w, []int64{1000, 1200, 1400, 1600, 1800}, waits, "by its own rate")
		require.Equal(w, []string{"slow.0", "slow.1", "slow.2", "slow.3", "slow.4"}, jobs)
	})
}

// TestCongestionOfATenantWithALimitOfItsOwn: four throttled jobs of a tenant with a limit of 0.1
// permits a second wait 10, 20, 30 and, because that is Cap, 35 s. With Flat, all wait for the
// base, 1 s, under a limit of 5 as under one of 0.1.
func TestCongestionOfATenantWithALimitOfItsOwn(t *testing.T) {
	onStores(t, func(w *world) {
		waits := func(tenant string, own float64, terms ledger.Congestion) []int64 {
			w.fill(tenant, 4, tenant, "T")
			run := w.begin("T", "c", 4)
			w.set(tenant, rps(own))
			for _, j := range run {
				w.outcomeIn(terms, "T", other(ledger.OutcomeThrottled, j, 0))
			}
			_, waits := w.waitsOf(tenant)
			return waits
		}
		terms := ledger.Congestion{Base: time.Second, Cap: 35 * time.Second, RPS: 10}
		require.Equal(w, []int64{10_000, 20_000, 30_000, 35_000}, waits("slow", 0.1, terms), "at most the cap")
		terms.Flat = true
		require.Equal(w, []int64{1000, 1000, 1000, 1000}, waits("flat", 5, terms))
		require.Equal(w, []int64{1000, 1000, 1000, 1000}, waits("flat-and-slow", 0.1, terms))
	})
}

// TestCongestionKeepsTheOrder: of 120 jobs that fail, 7 in each call of Outcome, each is due later
// than those that failed before it: 50 a second.
func TestCongestionKeepsTheOrder(t *testing.T) {
	onStores(t, func(w *world) {
		terms := ledger.Congestion{Base: 100 * time.Millisecond, Cap: time.Hour, RPS: 50}
		w.fill("g", 120, "acme", "T")
		run := w.begin("T", "c", 120)
		for some := range slices.Chunk(run, 7) {
			report := []ledger.GroupOutcome{{Group: "g"}}
			for _, j := range some {
				report[0].Others = append(report[0].Others, other(ledger.OutcomeRetry, j, 0)[0].Others...)
			}
			w.outcomeIn(terms, "T", report)
		}
		jobs, waits := w.waitsOf("acme")
		require.Len(w, jobs, 120)
		for i, job := range jobs {
			require.Equal(w, fmt.Sprint("g.", i), job)
			require.Equal(w, 100+int64(i/50)*1000+int64(i%50)*20, waits[i], job)
		}
	})
}

// TestCongestionStatistics: after four throttled jobs the statistics have their number and the sum
// and the longest of their waits. Their key has a TTL of at most KeepStats, here a minute.
func TestCongestionStatistics(t *testing.T) {
	onStores(t, func(w *world) {
		require.True(w, w.tenant("acme", noLimit).LastEvent.IsZero())
		w.sendBack("acme", 4, ledger.Congestion{Base: time.Second, Cap: time.Hour, RPS: 2, KeepStats: time.Minute})
		s := w.tenant("acme", noLimit)
		require.Equal(w, []any{int64(4), 7 * time.Second, 2500 * time.Millisecond}, []any{s.Returns, s.Waits, s.LongestWait}, "of 1, 1.5, 2 and 2.5 s")
		require.WithinDuration(w, s.Now, s.LastEvent, time.Minute)
		left := w.c.PTTL(w.Context(), w.p.Congestion("acme")).Val()
		require.Greater(w, left, 10*time.Second)
		require.LessOrEqual(w, left, time.Minute)
	})
}

func TestCongestionStatisticsEnd(t *testing.T) {
	for name, end := range map[string]func(w *world){
		"completed": func(w *world) {
			w.seal("acme")
			w.overdue("acme")
			w.settle("T")
			w.reduceAll()
			w.advance("acme")
		},
		"cancelled": func(w *world) {
			w.cancel("acme")
			w.sweep("acme")
		},
	} {
		t.Run(name, func(t *testing.T) {
			onStores(t, func(w *world) {
				w.create("another", "acme", "T")
				w.sendBack("acme", 2, ledger.Congestion{Base: time.Second, Cap: time.Hour})
				left := w.c.PTTL(w.Context(), w.p.Congestion("acme")).Val()
				require.InDelta(w, time.Hour, left, float64(time.Minute), "an hour, where nobody says")
				w.append("another", 1)
				end(w)
				if name == "completed" { // a job of another group is done as well
					require.Zero(w, w.tenant("acme", noLimit).Unfinished)
				} else {
					require.NotZero(w, w.tenant("acme", noLimit).Returns, "it has another group")
					w.cancel("another")
					w.sweep("another")
				}
				require.Zero(w, w.tenant("acme", noLimit).Returns)
				require.Zero(w, w.c.Exists(w.Context(), w.p.Congestion("acme")).Val())
				require.False(w, w.c.HExists(w.Context(), w.p.Tenant("acme"), "congested").Val())
			})
		})
	}
}

// TestCongestionASmallGroupPassesANonReadyFlood: a rate-limited tenant has 5,000 jobs. Only its
// first waiting job becomes non-ready and counts as throttled. In the next window all 20 jobs of
// its small group are admitted before 5 of its large one.
func TestCongestionASmallGroupPassesANonReadyFlood(t *testing.T) {
	onRedis(t, func(w *world) {
		const flood = 5000
		w.fill("flood", flood, "acme", "T")
		l := limit(50)
		w.backlog("other", "U", 1) // a second active tenant, so that acme's share is half
		require.Equal(w, map[string]int64{"acme": 25}, w.exhaust("T", 100, l))
		for range 5 {
			w.append("flood", 1)
			require.Zero(w, w.admit("T", 100, l).Moved)
		}
		s := w.tenant("acme", l)
		require.Equal(w, []int64{1, 1}, []int64{s.Throttles, s.NonReady}, "its head alone")
		require.False(w, s.RateLimitedUntil.IsZero())
		w.fill("small", 20, "acme", "T")
		w.newWindow("acme", "other")
		require.Equal(w, 25, w.admit("T", 100, l).Moved)
		require.Equal(w, strings.Repeat("s", 20)+strings.Repeat("f", 5), w.admitted("T", func(j taken) string { return j.Group[:1] }))
	})
}

// TestCongestionSharesWithWhatWaits: a tenant has 150 waiting and 150 due jobs. In about 13 windows
// of 20 ms at least 3 of each kind become ready, with 8 permits in a window and with 1.
func TestCongestionSharesWithWhatWaits(t *testing.T) {
	onStores(t, func(w *world) {
		for _, permits := range []int64{1, 8} {
			v := newWorld(w, w.c, fmt.Sprint(w.prefix, permits, ":"))
			v.create("back", "acme", "T")
			v.append("back", 150)
			for some := range slices.Chunk(v.begin("T", "c", 150), 50) {
				report := []ledger.GroupOutcome{{Group: "back"}}
				for _, j := range some {
					report[0].Others = append(report[0].Others, other(ledger.OutcomeReleased, j, 0)[0].Others...)
				}
				v.outcome("T", report)
			}
			v.create("wait", "acme", "T")
			v.append("wait", 150)
			l := within(ledger.LimiterFixed, 20*time.Millisecond, permits)
			var log []spending
			got, windows := map[string]int64{}, map[int64]bool{}
			note := func(name string, at int64, n int) {
				got[name] += int64(n)
				windows[at/20_000] = true
				if n > 0 {
					log = append(log, spending{at, int64(n)})
				}
			}
			v.eventually(func() bool {
				r := v.admit("T", 20, l)
				note("wait", r.AtUS, r.Moved)
				p := v.promote(l, "T")
				note("back", p.AtUS, p.Moved)
				v.read("T", "c")
				return len(windows) >= 13
			})
			v.holds(l, log)
			for name, n := range got {
				require.GreaterOrEqual(v, n, int64(3), "%s of %v in %d windows of %d", name, got, len(windows), permits)
			}
		}
	})
}

// TestCongestionSharesAFullStream: while the ready stream is nearly full, 50 rounds of Promote and
// Admit make more than 30 of 400 due jobs and more than 30 of 400 waiting jobs ready.
func TestCongestionSharesAFullStream(t *testing.T) {
	onRedis(t, func(w *world) {
		w.sendBack("back", 400, soon)
		w.fill("new", 400, "new", "T")
		w.overdue("back")
		const slots, ahead = 4, 40
		fresh, back := 0, 0
		for range 50 {
			r, err := ledger.Promote(w.Context(), w.c, w.p, ledger.PromoteArgs{Most: 100, Meter: w.use(noLimit), Seed: seed, Caps: map[string]int{"T": ahead}})
			require.NoError(w, err)
			back += r.Moved
			a, err := ledger.Admit(w.Context(), w.c, w.p, ledger.AdmitArgs{
				Type: "T", Most: 100, Cap: ahead, Slots: slots, Ahead: ahead, Meter: w.use(noLimit), Seed: seed, LaneWeights: [3]int{6, 3, 1},
			})
			require.NoError(w, err)
			fresh += a.Moved
			run := w.readSome("T", "c", slots)
			w.start("T", run)
			w.outcome("T", done(run...))
		}
		require.Greater(w, back, 30) // of more than 200; how many depends on the time between the calls
		require.Greater(w, fresh, 30)
	})
}
