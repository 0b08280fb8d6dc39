package ledger_test

import (
	"fmt"
	"math/rand/v2"
	"slices"
	"testing"
	"time"

	"github.com/redis/go-redis/v9"
	"github.com/stretchr/testify/require"

	"github.com/bulkaction/bulkaction/internal/jobs/ledger"
	"github.com/bulkaction/bulkaction/internal/redisx/keyspace"
	"github.com/bulkaction/bulkaction/internal/testkit/limittest"
)

// with returns a limit with these limits of types besides.
func with(l limittest.Limit, types ...ledger.Limit) limittest.Limit {
	l.Types = types
	return l
}

// rateOf and placesOf are limits of a type: permits in a window, and jobs in flight.
func rateOf(typ string, permits int64) ledger.Limit { return ledger.Limit{Type: typ, Total: permits} }
func placesOf(typ string, n int64) ledger.Limit {
	return ledger.Limit{Type: typ, Places: true, Total: n}
}

func inFlight(n int64) ledger.TenantSettings { return ledger.TenantSettings{InFlight: &n} }

// entriesOf counts the entries that a tenant's jobs have in ready streams. It checks that a tenant
// with a bound has the same number in its field places.
func (w *world) entriesOf(tenant string) int64 {
	w.Helper()
	n := int64(0)
	for _, typ := range w.c.ZRange(w.Context(), w.p.Types(), 0, -1).Val() {
		for _, m := range w.c.XRange(w.Context(), w.p.Ready(typ), "-", "+").Val() {
			j, err := ledger.ParseJob(ledger.MessageBlob(m.Values))
			require.NoError(w, err)
			if w.c.HGet(w.Context(), w.p.Group(j.Group), "tenant").Val() == tenant {
				n++
			}
		}
	}
	h := w.c.HMGet(w.Context(), w.p.Tenant(tenant), "in_flight", "places").Val()
	if h[0] != nil {
		require.Equal(w, n, number(h[1]), "places of %s", tenant)
	}
	return n
}

// woken says whether the fetcher has been woken since quiet was called.
func (w *world) woken() bool { return w.c.LLen(w.Context(), w.p.Wake("fetcher")).Val() == 1 }

// TestBoundOfATenant: a tenant with a bound of two gets no third job ready, also of another type. When
// one of the two ends its attempt, in whatever way, its place is free once, also if the report is
// repeated, and the tenant comes back at once.
func TestBoundOfATenant(t *testing.T) {
	kinds := map[ledger.OutcomeKind]string{
		ledger.OutcomeFailed: "failed", ledger.OutcomeRetry: "retried", ledger.OutcomeThrottled: "throttled",
		ledger.OutcomeReleased: "released", ledger.OutcomeDeferred: "deferred", ledger.OutcomeUnstarted: "unstarted",
	}
	story := func(name string, start bool, report func(taken) []ledger.GroupOutcome, left int64) {
		t.Run(name, func(t *testing.T) {
			onStores(t, func(w *world) {
				w.set("acme", inFlight(2))
				w.fill("g", 6, "acme", "T")
				w.fill("h", 6, "acme", "U")
				w.fill("other", 3, "beta", "T")
				r := w.admit("T", 10, noLimit)
				require.Equal(w, map[string]int64{"acme": 2, "beta": 3}, permitsOf(r.Permits))
				require.Equal(w, []ledger.Denial{{Tenant: "acme", Reason: "in_flight"}}, r.Denials)
				require.Zero(w, w.admit("U", 10, noLimit).Moved)
				var mine []taken
				for _, j := range w.read("T", "c") {
					if j.Group == "g" {
						mine = append(mine, j)
					}
				}
				if start {
					w.start("T", mine)
				}
				require.Equal(w, int64(2), w.entriesOf("acme"))
				w.quiet()
				done := report(mine[0])
				require.Equal(w, int64(1), int64(w.outcome("T", done).Owned))
				require.Equal(w, left, w.entriesOf("acme"))
				w.outcome("T", done)
				require.Equal(w, left, w.entriesOf("acme"), "its report came twice")
				if left < 2 {
					require.True(w, w.woken())
				}
				if name == "released" {
					require.Equal(w, 1, w.promote(noLimit, "T").Moved, "it is due at once")
				} else {
					require.Equal(w, int(2-left), w.admit("U", 10, noLimit).Moved)
				}
				require.Zero(w, w.admit("T", 10, noLimit).Moved)
				w.outcome("T", done)
				require.Equal(w, int64(2), w.entriesOf("acme"), "its report came late")
			})
		})
	}
	story("done", true, func(j taken) []ledger.GroupOutcome { return done(j) }, 1)
	for kind, name := range kinds {
		left := int64(1)
		if kind == ledger.OutcomeUnstarted {
			left = 2 // it is ready again
		}
		if kind != ledger.OutcomeUnstarted {
			story(name, true, func(j taken) []ledger.GroupOutcome { return other(kind, j, time.Hour) }, left)
		}
		if kind == ledger.OutcomeUnstarted || kind == ledger.OutcomeDeferred {
			story(name+" before its start", false, func(j taken) []ledger.GroupOutcome { return other(kind, j, time.Hour) }, left)
		}
	}
}

// TestBoundOfATenantWhenAnEntryIsRemoved: each script that removes an entry frees its place once,
// also if it is called twice.
func TestBoundOfATenantWhenAnEntryIsRemoved(t *testing.T) {
	onStores(t, func(w *world) {
		for name, c := range map[string]struct {
			start  bool
			remove func(v *world, jobs []taken)
		}{
			"reclaim of jobs in flight": {true, func(v *world, _ []taken) { require.EqualValues(v, 2, v.reclaim("T", 5).Taken) }},
			"reclaim of ready jobs":     {false, func(v *world, _ []taken) { require.EqualValues(v, 2, v.reclaim("T", 5).Taken) }},
			"reclaim that ends them":    {true, func(v *world, _ []taken) { require.EqualValues(v, 2, v.reclaim("T", 0).Failed) }},
			"reclaim of a cancelled group": {true, func(v *world, _ []taken) {
				v.cancel("g")
				require.EqualValues(v, 2, v.reclaim("T", 5).Stale)
			}},
			"stale reports": {true, func(v *world, jobs []taken) {
				require.EqualValues(v, 2, v.reclaim("T", 5).Taken)
				require.EqualValues(v, 2, v.outcome("T", done(jobs...)).Stale)
			}},
			"stale reports, of jobs that run again": {true, func(v *world, jobs []taken) {
				require.EqualValues(v, 2, v.reclaim("T", 5).Taken)
				v.promoteAll("T", 2)
				require.EqualValues(v, 2, v.outcome("T", done(jobs...)).Stale)
				require.Equal(v, int64(2), v.entriesOf("acme"))
				again := v.read("T", "d")
				v.start("T", again)
				v.outcome("T", done(again...))
				v.outcome("T", done(jobs...))
			}},
			"reports of a cancelled group": {true, func(v *world, jobs []taken) {
				v.cancel("g")
				require.EqualValues(v, 2, v.outcome("T", done(jobs...)).Stale)
				v.outcome("T", other(ledger.OutcomeRetry, jobs[0], 0))
			}},
			"start of a cancelled group": {false, func(v *world, jobs []taken) {
				v.cancel("g")
				v.start("T", jobs)
			}},
			"start of a paused group": {false, func(v *world, jobs []taken) {
				v.pause(ledger.PauseGroup, "g")
				v.start("T", jobs)
			}},
			"start of a paused type": {false, func(v *world, jobs []taken) {
				v.pause(ledger.PauseType, "T")
				v.start("T", jobs)
				v.resume(ledger.PauseType, "T")
			}},
			"lose": {true, func(v *world, jobs []taken) {
				v.c.Del(v.Context(), v.p.Ready("T"))
				require.Equal(v, 2, v.lose("g", "T", v.stateOf("g", 0), v.stateOf("g", 1)))
				require.Zero(v, v.lose("g", "T", v.stateOf("g", 0)))
			}},
			"repair_misplaced": {true, func(v *world, jobs []taken) {
				v.c.SetRange(v.Context(), v.p.States("g"), 0, "D\"D\"")
				for range 2 {
					for _, j := range jobs {
						_, err := ledger.RepairMisplaced(v.Context(), v.c, v.p, ledger.Misplaced{Location: "ready", Owner: "T", Item: j.entry})
						require.NoError(v, err)
					}
				}
			}},
		} {
			v := newWorld(w, w.c, w.prefix+name+":")
			v.set("acme", inFlight(2))
			v.fill("g", 3, "acme", "T")
			v.fill("h", 6, "acme", "T")
			require.Equal(v, 2, v.admit("T", 10, noLimit).Moved, name)
			jobs := v.read("T", "c")
			if c.start {
				v.start("T", jobs)
			}
			v.quiet()
			c.remove(v, jobs)
			require.Zero(v, v.entriesOf("acme"), name)
			require.True(v, v.woken(), name)
			if !c.start {
				v.start("T", jobs) // its reply was lost
				require.Zero(v, v.entriesOf("acme"), name)
			}
			v.eventually(func() bool {
				v.admit("T", 10, noLimit)
				v.promote(noLimit, "T")
				return v.entriesOf("acme") == 2
			})
		}
	})
}

// TestBoundOfATenantIsChanged: a bound counts the jobs that are in flight when it begins; a lower one
// waits until enough of them have ended; after a higher one, or none, waiting and due jobs go on at once.
func TestBoundOfATenantIsChanged(t *testing.T) {
	onStores(t, func(w *world) {
		w.fill("g", 40, "acme", "T")
		run := w.begin("T", "c", 5)
		w.set("acme", inFlight(3))
		require.Equal(w, int64(5), w.entriesOf("acme"))
		require.Zero(w, w.admit("T", 10, noLimit).Moved)
		w.outcome("T", other(ledger.OutcomeRetry, run[0], 0))
		w.outcome("T", other(ledger.OutcomeRetry, run[1], 0))
		require.Equal(w, int64(3), w.entriesOf("acme"))
		require.Zero(w, w.admit("T", 10, noLimit).Moved)
		p := w.promote(noLimit, "T")
		require.Equal(w, []ledger.Denial{{Tenant: "acme", Reason: "in_flight"}}, p.Denials)
		require.Zero(w, p.Moved)
		require.Positive(w, p.Wait, "it does not look again at once")
		w.set("acme", inFlight(4))
		require.Equal(w, 1, w.promote(noLimit, "T").Moved, "due jobs go on at once")
		require.Zero(w, w.admit("T", 10, noLimit).Moved)
		w.promote(noLimit, "T")
		w.quiet()
		w.set("acme", ledger.TenantSettings{})
		require.True(w, w.woken())
		require.Equal(w, []any{nil, nil}, w.c.HMGet(w.Context(), w.p.Tenant("acme"), "places", "held").Val())
		require.Equal(w, 1, w.promote(noLimit, "T").Moved, "and without a bound")
		require.Equal(w, 10, w.admit("T", 10, noLimit).Moved)
		w.set("acme", inFlight(20))
		require.Equal(w, int64(15), w.entriesOf("acme"))
		require.Equal(w, 5, w.admit("T", 10, noLimit).Moved)
	})
}

// TestBoundOfATenantAndExpire: a cancelled group stays while a job of it runs that counts. A tenant
// with a bound is kept.
func TestBoundOfATenantAndExpire(t *testing.T) {
	onStores(t, func(w *world) {
		w.set("acme", inFlight(2))
		w.fill("g", 3, "acme", "T")
		run := w.begin2("T")
		w.cancel("g")
		w.sweep("g")
		fence := w.fence()
		open := func() {
			w.unchanged(func() { require.NoError(w, ledger.Expire(w.Context(), w.c, w.p, "g", fence, false)) })
		}
		open()
		w.outcome("T", done(run[0]))
		require.Equal(w, int64(1), w.entriesOf("acme"))
		open()
		w.outcome("T", done(run[1]))
		w.expire("g")
		require.Empty(w, w.status("g"))
		require.Zero(w, w.entriesOf("acme"))
		require.Equal(w, int64(1), w.c.Exists(w.Context(), w.p.Tenant("acme")).Val())
		w.set("acme", ledger.TenantSettings{})
		require.Zero(w, w.c.Exists(w.Context(), w.p.Tenant("acme")).Val())
	})
}

// begin2 admits what may be admitted; a worker reads and starts it.
func (w *world) begin2(typ string) []taken {
	w.Helper()
	w.admit(typ, 100, noLimit)
	jobs := w.read(typ, "c")
	w.start(typ, jobs)
	return jobs
}

// TestBounds: tenants and types with bounds live through everything that happens to jobs, in random
// order. No step adds an entry beyond a bound, places always agree with the streams, and in the end
// all jobs have ended.
func TestBounds(t *testing.T) {
	onStores(t, func(w *world) {
		for seed := range uint64(2) {
			v := newWorld(w, w.c, fmt.Sprint(w.prefix, seed, ":"))
			if seed%2 == 1 {
				v.byPriority(1)
			}
			v.live(rand.New(rand.NewPCG(seed, 43)))
		}
	})
}

func (w *world) live(random *rand.Rand) {
	w.Helper()
	types, lanes, bounds := []string{"T", "U"}, []string{"high", "normal", "low"}, map[string]int64{}
	l := with(noLimit, placesOf("T", 5))
	bounds["T"] = 5
	for i := range 8 {
		tenant := []string{"a", "b"}[i%2]
		w.create(fmt.Sprint("g", i), tenant, "T", "lane", lanes[i%3])
		all := jobs(5 + random.IntN(20))
		for j := range all {
			all[j].Type = types[random.IntN(2)]
		}
		w.appendJobs(ledger.AppendArgs{Group: fmt.Sprint("g", i), Mode: ledger.AppendSeal, Jobs: all})
	}
	admit := func(typ string, n int) {
		_, err := ledger.Admit(w.Context(), w.c, w.p, ledger.AdmitArgs{
			Type: typ, Most: n, Cap: 100, Slots: random.IntN(2) * 20, Ahead: 20, Unserved: random.IntN(10) == 0,
			Meter: w.use(l), Seed: seed, LaneWeights: [3]int{6, 3, 1},
		})
		require.NoError(w, err)
	}
	have := map[string]int64{}
	check := func(step string) {
		for _, typ := range types {
			n := w.c.XLen(w.Context(), w.p.Ready(typ)).Val()
			if bound, ok := bounds[typ]; ok {
				require.LessOrEqual(w, n, max(bound, have[typ]), "%s: type %s", step, typ)
			}
			have[typ] = n
		}
		for _, tenant := range []string{"a", "b"} {
			n := w.entriesOf(tenant)
			if bound, ok := bounds[tenant]; ok {
				require.LessOrEqual(w, n, max(bound, have[tenant]), "%s: tenant %s", step, tenant)
			}
			have[tenant] = n
		}
	}
	var held []taken
	reports := map[int][]ledger.GroupOutcome{}
	report := func(groups []ledger.GroupOutcome, typ string) { w.outcome(typ, groups) }
	paused := false
	step := func(calm bool) string {
		typ := types[random.IntN(2)]
		what := random.IntN(20)
		if calm {
			what = random.IntN(8)
		}
		switch {
		case what < 2:
			admit(typ, 1+random.IntN(10))
			return "admit"
		case what < 4:
			caps := map[string]int{"T": 100, "U": 100}
			if !calm && random.IntN(5) == 0 {
				delete(caps, typ)
			}
			w.promoteBelow(caps, l)
			return "promote"
		case what < 6:
			run := w.readSome(typ, "c", 1+random.Int64N(6))
			if len(run) > 0 && (calm || random.IntN(4) > 0) {
				w.start(typ, run)
				if !calm && random.IntN(4) == 0 {
					w.start(typ, slices.Clone(run))
				}
			}
			held = append(held, run...)
			return "start"
		case what < 8 && len(held) > 0:
			i := random.IntN(len(held))
			j := held[i]
			held = slices.Delete(held, i, i+1)
			kind := []ledger.OutcomeKind{
				ledger.OutcomeRetry, ledger.OutcomeThrottled, ledger.OutcomeFailed, ledger.OutcomeReleased, ledger.OutcomeDeferred,
			}[random.IntN(5)]
			groups := done(j)
			switch {
			case j.token < 0 && random.IntN(2) == 0:
				groups = other(ledger.OutcomeUnstarted, j, 0)
			case j.token < 0:
				groups = other(ledger.OutcomeDeferred, j, 0)
			case !calm && random.IntN(3) == 0:
				groups = other(kind, j, 0)
			}
			report(groups, j.Type)
			reports[len(reports)] = groups
			if random.IntN(3) == 0 {
				report(groups, j.Type)
			}
			return fmt.Sprint("outcome ", groups)
		case what == 8 && len(reports) > 0:
			groups := reports[random.IntN(len(reports))]
			report(groups, "T")
			return fmt.Sprint("late outcome ", groups)
		case what < 11:
			_, err := ledger.Reclaim(w.Context(), w.c, w.p, typ, 0, 1+random.IntN(5), 2, random.IntN(3) == 0)
			require.NoError(w, err)
			return "reclaim"
		case what == 11:
			bounds["T"] = random.Int64N(8)
			l = with(noLimit, placesOf("T", bounds["T"]))
			w.use(l)
			return fmt.Sprint("bound of T ", bounds["T"])
		case what == 12:
			delete(bounds, "T")
			l = noLimit
			w.use(l)
			return "no bound of T"
		case what == 13:
			bounds["a"] = 1 + random.Int64N(5)
			w.set("a", inFlight(bounds["a"]))
			return "bound of a"
		case what == 14:
			delete(bounds, "a")
			w.set("a", ledger.TenantSettings{})
			return "no bound of a"
		case what == 15 && random.IntN(4) == 0:
			g := fmt.Sprint("g", random.IntN(8))
			if ledger.Cancel(w.Context(), w.c, w.p, g) == nil {
				return "cancel"
			}
		case what == 16:
			pausable := []ledger.Pausable{ledger.PauseGroup, ledger.PauseTenant, ledger.PauseType}[random.IntN(3)]
			id := map[ledger.Pausable]string{ledger.PauseGroup: "g1", ledger.PauseTenant: "a", ledger.PauseType: "U"}[pausable]
			if err := ledger.Pause(w.Context(), w.c, w.p, pausable, id); err == nil {
				paused = true
				return fmt.Sprint("pause ", pausable)
			}
		case what == 17 && paused:
			for pausable, id := range map[ledger.Pausable]string{ledger.PauseGroup: "g1", ledger.PauseTenant: "a", ledger.PauseType: "U"} {
				_ = ledger.Resume(w.Context(), w.c, w.p, pausable, id)
			}
			return "resume"
		}
		return "nothing"
	}
	for range 120 {
		check(step(false))
	}
	for pausable, id := range map[ledger.Pausable]string{ledger.PauseGroup: "g1", ledger.PauseTenant: "a", ledger.PauseType: "U"} {
		_ = ledger.Resume(w.Context(), w.c, w.p, pausable, id)
	}
	bounds["T"], bounds["a"] = 3, 3
	l = with(noLimit, placesOf("T", 3))
	w.use(l)
	w.set("a", inFlight(3))
	check("calm")
	w.eventually(func() bool {
		for range 20 {
			check(step(true))
		}
		for _, typ := range types {
			if len(held) == 0 {
				w.reclaim(typ, 100)
			}
		}
		check("reclaim")
		ended := 0
		for i := range 8 {
			h := w.c.HMGet(w.Context(), w.p.Group(fmt.Sprint("g", i)), "status", "accepted", "done", "failed").Val()
			if h[0] == "CANCELLED" || number(h[1]) == number(h[2])+number(h[3]) {
				ended++
			}
		}
		return ended == 8
	})
}

// TestRateOfAType: with each limiter the rate of a type is never exceeded, by admit and promote
// together, and a type without one goes on.
func TestRateOfAType(t *testing.T) {
	each(t, func(w *world, limiter string) {
		for i, share := range []string{ledger.ShareStatic, ledger.ShareElastic} {
			v := newWorld(w, w.c, fmt.Sprint(w.prefix, i, ":"))
			own := within(limiter, 40*time.Millisecond, 7)
			l := with(within(limiter, 40*time.Millisecond, 100), rateOf("T", 7))
			l.Share = share
			v.fill("g", 400, "acme", "T")
			v.fill("h", 5000, "beta", "U")
			random := rand.New(rand.NewPCG(43, uint64(i)))
			var log []spending
			others, retried, fresh := 0, 0, 0
			var began int64
			for end := v.now() + 8*own.Window.Microseconds(); v.now() < end || retried < 5 || fresh < 5 || others <= 100; {
				var at int64
				switch random.IntN(3) {
				case 0:
					at = v.admit("T", 1+random.IntN(20), l).AtUS
				case 1:
					at = v.promote(l, "T", "U").AtUS
				case 2:
					v.admit("U", 1+random.IntN(20), l)
				}
				if began == 0 {
					began = at
				}
				others += len(v.read("U", "c"))
				run := v.read("T", "c")
				if len(run) > 0 {
					log = append(log, spending{at, int64(len(run))})
					v.start("T", run)
				}
				for _, j := range run {
					if j.Attempt > 1 {
						retried++
					} else {
						fresh++
					}
					if random.IntN(2) == 0 {
						v.outcome("T", other(ledger.OutcomeRetry, j, 0))
					} else {
						v.outcome("T", done(j))
					}
				}
				v.pass(time.Duration(random.Int64N(int64(own.Window) / 16)))
			}
			v.holds(own, log)
		}
	})
}

// TestBlockedDueJobsHideNoOthers: 1,500 due jobs of a type without permits or places do not keep a
// due job of another type of the tenant.
func TestBlockedDueJobsHideNoOthers(t *testing.T) {
	for name, of := range map[string]ledger.Limit{"rate": rateOf("T", 0), "places": placesOf("T", 0)} {
		for _, share := range []string{ledger.ShareStatic, ledger.ShareElastic} {
			t.Run(name+" "+share, func(t *testing.T) {
				onRedis(t, func(w *world) {
					w.fill("g", 1500, "acme", "T")
					for range 15 {
						for _, j := range w.begin("T", "c", 100) {
							w.outcome("T", other(ledger.OutcomeReleased, j, 0))
						}
					}
					w.due("h", "acme", "U", float64(time.Now().UnixMilli()))
					w.fill("waits", 1000, "acme", "T")
					w.fill("too", 1000, "acme", "U")
					l := with(limit(400), of)
					l.Share = share
					calls := 0
					w.eventually(func() bool {
						calls++
						w.promote(l, "T", "U")
						return w.states("h") == "R"
					})
					require.LessOrEqual(w, calls, 20)
					r := w.admit("T", 10, l)
					require.Zero(w, r.Moved)
					require.Equal(w, 10, w.admit("U", 10, l).Moved)
				})
			})
		}
	}
}

// TestBlockedJobsClaimNoPermits: jobs that lack a permit or a place of their type keep no permits of
// the partition from others, whether they wait or are due.
func TestBlockedJobsClaimNoPermits(t *testing.T) {
	for name, of := range map[string]ledger.Limit{"rate": rateOf("T", 0), "places": placesOf("T", 0)} {
		t.Run(name, func(t *testing.T) {
			onStores(t, func(w *world) {
				l := with(elastic(10), of)
				w.fill("g", 20, "acme", "T")
				for _, j := range w.begin("T", "c", 5) {
					w.outcome("T", other(ledger.OutcomeReleased, j, 0))
				}
				w.fill("h", 20, "beta", "U")
				w.promote(l, "T", "U")
				spent := int64(0)
				w.eventually(func() bool {
					w.promote(l, "T", "U")
					spent += permitsOf(w.admit("U", 10, l).Permits)["beta"]
					return spent == 10
				})
			})
		})
	}
}

// TestDueJobsBesideBlockedWaitingOnes: a tenant's due jobs leave no permits to its waiting jobs that
// lack a permit of their type.
func TestDueJobsBesideBlockedWaitingOnes(t *testing.T) {
	onStores(t, func(w *world) {
		for i := range 10 {
			w.due(fmt.Sprint("u", i), "acme", "U", float64(i+1))
		}
		w.fill("g", 50, "acme", "T")
		require.Equal(w, 8, w.promote(with(limit(8), rateOf("T", 0)), "T", "U").Moved)
	})
}

// TestDueAndWaitingJobsShareALimit: neither the due nor the waiting jobs of a type with a bound or a
// rate, or of a tenant with a bound, keep the others from it.
func TestDueAndWaitingJobsShareALimit(t *testing.T) {
	for _, c := range []struct {
		name   string
		bound  int64
		tenant bool
		first  string
	}{
		{"type, admit first", 1, false, "admit"}, {"type, admit first", 4, false, "admit"}, {"type, promote first", 4, false, "promote"},
		{"tenant, admit first", 1, true, "admit"}, {"tenant, admit first", 4, true, "admit"}, {"tenant, promote first", 4, true, "promote"},
	} {
		t.Run(fmt.Sprint(c.name, " ", c.bound), func(t *testing.T) {
			onStores(t, func(w *world) {
				l := noLimit
				if c.tenant {
					w.set("acme", inFlight(c.bound))
				} else {
					l = with(noLimit, placesOf("T", c.bound))
				}
				w.fill("g", 4000, "acme", "T")
				fresh, again := 0, 0
				w.eventually(func() bool {
					if c.first == "promote" {
						w.promote(l, "T")
					}
					w.admit("T", 100, l)
					w.promote(l, "T")
					run := w.read("T", "c")
					w.start("T", run)
					for _, j := range run {
						if j.Attempt > 1 {
							again++
						} else {
							fresh++
						}
						w.outcome("T", other(ledger.OutcomeRetry, j, 0))
					}
					return fresh >= 20 && again >= 20
				})
			})
		})
	}
}

// TestUnservedTypeHoldsNoPlaces: no job of a type without workers becomes ready if it would hold a
// place of its type or its tenant. What has become ready before goes back when the type has no workers
// for a lease, without a loss; what holds no place stays.
func TestUnservedTypeHoldsNoPlaces(t *testing.T) {
	unserved := func(w *world, typ string, l limittest.Limit) ledger.AdmitReply {
		r, err := ledger.Admit(w.Context(), w.c, w.p, ledger.AdmitArgs{
			Type: typ, Most: 100, Cap: 100, Unserved: true, Meter: w.use(l), Seed: seed, LaneWeights: [3]int{6, 3, 1},
		})
		require.NoError(w, err)
		return r
	}
	onStores(t, func(w *world) {
		for _, tenant := range []bool{false, true} {
			v := newWorld(w, w.c, fmt.Sprint(w.prefix, tenant, ":"))
			l := noLimit
			v.fill("free", 5, "beta", "dead")
			if tenant {
				v.set("acme", inFlight(20))
			} else {
				l = with(noLimit, placesOf("dead", 20))
			}
			v.fill("g", 50, "acme", "dead")
			v.fill("h", 30, "acme", "T")
			for range 3 {
				r := unserved(v, "dead", l)
				if tenant {
					require.Zero(v, permitsOf(r.Permits)["acme"])
				} else {
					require.Zero(v, r.Moved)
				}
			}
			require.Zero(v, v.ledger("g")["ready"])
			require.Equal(v, 20, v.admit("T", 20, l).Moved)
			v.outcome("T", done(v.startAll("T")...))

			// A worker comes, and goes.
			v.admit("dead", 100, l)
			require.Positive(v, v.ledger("g")["ready"])
			read := v.readSome("dead", "c", 2)
			r, err := ledger.Reclaim(v.Context(), v.c, v.p, "dead", time.Hour, 100, 5, false)
			require.NoError(v, err)
			require.Zero(v, r.Taken)
			for range 3 {
				_, err = ledger.Reclaim(v.Context(), v.c, v.p, "dead", time.Hour, 7, 5, true)
				require.NoError(v, err)
			}
			for {
				r, err = ledger.Reclaim(v.Context(), v.c, v.p, "dead", time.Hour, 100, 5, true)
				require.NoError(v, err)
				if r.Taken == 0 {
					break
				}
			}
			mine := int64(0)
			for _, j := range read {
				if j.Group == "g" {
					mine++
				}
			}
			require.Equal(v, mine, v.ledger("g")["ready"], "only what a worker has read is left")
			if tenant {
				require.Equal(v, int64(5), v.ledger("free")["ready"], "it holds no place")
				require.Equal(v, mine, v.entriesOf("acme"))
			}
			require.Zero(v, v.promote(l, "T").Moved)
			for _, blob := range v.c.ZRange(v.Context(), v.p.NonReadyOf("acme"), 0, -1).Val() {
				j, err := ledger.ParseJob(blob)
				require.NoError(v, err)
				require.Zero(v, j.Losses)
			}
			require.Equal(v, 10, v.admit("T", 20, l).Moved, "another type goes on")
		}
	})
}

func init() {
	limited := with(within(ledger.LimiterFixed, time.Hour, 20), rateOf("T", 2), placesOf("T", 3))
	bounded := func(w *world) {
		w.set("acme", inFlight(2))
		w.fill("g", 3, "acme", "T")
	}
	scenes = append(scenes,
		scene{"admit within the limits of a type", false, func(w *world) act {
			w.fill("g", 3, "acme", "T")
			return w.admitting(limited)
		}},
		scene{"admit without a permit of the type", false, func(w *world) act {
			w.fill("g", 3, "acme", "T")
			w.admit("T", 10, limited)
			return w.admitting(limited)
		}},
		scene{"admit to a bound of the tenant", false, func(w *world) act {
			bounded(w)
			return w.admitting(noLimit)
		}},
		scene{"promote within the limits of a type", false, func(w *world) act {
			w.nonReady("g", 3)
			return w.promoting(limited)
		}},
		scene{"promote to a bound of the tenant", false, func(w *world) act {
			w.nonReady("g", 3)
			w.set("acme", inFlight(2))
			return w.promoting(noLimit)
		}},
		scene{"outcome of jobs that hold places", false, func(w *world) act {
			bounded(w)
			return w.reporting(done(w.begin("T", "c", 2)...))
		}},
		scene{"outcome of stale jobs that hold places", false, func(w *world) act {
			bounded(w)
			run := w.begin("T", "c", 2)
			w.cancel("g")
			return w.reporting(done(run...))
		}},
		scene{"reclaim of jobs that hold places", false, func(w *world) act {
			bounded(w)
			w.begin("T", "c", 2)
			return w.reclaiming(3)
		}},
		scene{"reclaim of an unserved type", false, func(w *world) act {
			bounded(w)
			w.begin("T", "c", 1)
			w.admit("T", 1, noLimit)
			return func() error {
				_, err := ledger.Reclaim(w.Context(), w.c, w.p, "T", time.Hour, 10, 3, true)
				return err
			}
		}},
		scene{"lose jobs that hold places", false, func(w *world) act {
			bounded(w)
			w.begin("T", "c", 2)
			w.c.Del(w.Context(), w.p.Ready("T"))
			return w.losing("g", "T", w.stateOf("g", 0), w.stateOf("g", 1))
		}},
		scene{"setting, of a bound", true, func(w *world) act {
			bounded(w)
			w.admit("T", 10, noLimit)
			return func() error { return ledger.SetTenant(w.Context(), w.c, w.p, "acme", inFlight(3)) }
		}},
		scene{"quota of a type", false, func(w *world) act {
			w.fill("g", 3, "acme", "T")
			w.use(with(limit(20), rateOf("T", 2), placesOf("T", 3)))
			limits := []ledger.Limit{{Total: 30}, rateOf("T", 4), placesOf("T", 5)}
			return func() error {
				_, err := ledger.SetParts(w.Context(), w.c, w.p, ledger.Order{}, limit(1).Meter, limits,
					ledger.Terms{Partitions: 1, To: []ledger.Increase{{To: 30}, {To: 4}, {To: 5}}})
				return err
			}
		}},
	)
}

// startAll reads and starts all ready jobs of a type.
func (w *world) startAll(typ string) []taken {
	w.Helper()
	jobs := w.read(typ, "c")
	w.start(typ, jobs)
	return jobs
}

// TestUnservedTypeBehindOthers: entries that hold a place are found behind many that hold none.
func TestUnservedTypeBehindOthers(t *testing.T) {
	onStores(t, func(w *world) {
		w.fill("free", 50, "beta", "dead")
		require.Equal(w, 50, w.admit("dead", 100, noLimit).Moved)
		w.set("acme", inFlight(5))
		w.fill("g", 5, "acme", "dead")
		require.Equal(w, 5, w.admit("dead", 100, noLimit).Moved)
		w.consumerGroup(w.p.Ready("dead"), keyspace.GroupWorkers)
		r, err := ledger.Reclaim(w.Context(), w.c, w.p, "dead", time.Hour, 10, 5, true)
		require.NoError(w, err)
		require.Equal(w, 5, r.Taken)
		require.Zero(w, w.entriesOf("acme"))
	})
}

// TestJobsOfAnUnservedTypeAreNotLookedAtOften: due jobs that lack a worker wait a while.
func TestJobsOfAnUnservedTypeAreNotLookedAtOften(t *testing.T) {
	onStores(t, func(w *world) {
		w.due("g", "acme", "dead", 1)
		w.set("acme", inFlight(5))
		r := w.promote(noLimit, "T")
		require.Equal(w, []int{0, 1}, []int{r.Moved, r.Skipped})
		require.Greater(w, r.Wait, 500*time.Millisecond)
		require.EqualValues(w, 1, w.c.ZCard(w.Context(), w.p.NonReadyOf("acme")).Val())
	})
}

// TestPlacesOfATypeWakeTheFetcher: a place that becomes free wakes the fetcher, and the next job takes
// it; also after the bound was lowered below what runs, or ended.
func TestPlacesOfATypeWakeTheFetcher(t *testing.T) {
	onStores(t, func(w *world) {
		l := with(noLimit, placesOf("T", 3))
		w.fill("g", 40, "acme", "T")
		r := w.admit("T", 10, l)
		require.Equal(w, 3, r.Moved)
		require.Equal(w, []ledger.Denial{{Reason: "in_flight"}}, w.admit("T", 10, l).Denials)
		run := w.startAll("T")
		w.quiet()
		w.outcome("T", done(run[0]))
		require.True(w, w.woken())
		require.Equal(w, 1, w.admit("T", 10, l).Moved)
		lower := with(noLimit, placesOf("T", 1))
		w.outcome("T", done(run[1]))
		require.Zero(w, w.admit("T", 10, lower).Moved)
		w.quiet()
		w.outcome("T", done(run[2]))
		require.False(w, w.woken(), "one is in flight")
		require.Zero(w, w.admit("T", 10, lower).Moved)
		w.outcome("T", done(w.startAll("T")...))
		require.True(w, w.woken())
		require.Equal(w, 1, w.admit("T", 10, lower).Moved)
		require.Equal(w, 10, w.admit("T", 10, noLimit).Moved, "without a bound")
	})
}

// TestRaiseLooksAtOnce: with windows that never end, a higher limit lets waiting, due and rate-limited
// jobs go on at once, for each limiter and each scope.
func TestRaiseLooksAtOnce(t *testing.T) {
	each(t, func(w *world, limiter string) {
		of := func(n int64) limittest.Limit { return within(limiter, time.Hour, n) }
		set := func(v *world, l limittest.Limit, wake bool) {
			limits := append([]ledger.Limit{{Total: l.Permits}}, l.Types...)
			terms := ledger.Terms{Partitions: 1, Wake: wake}
			for _, limit := range limits {
				terms.To = append(terms.To, ledger.Increase{To: limit.Total})
			}
			_, err := ledger.SetParts(v.Context(), v.c, v.p, ledger.Order{}, l.Meter, limits, terms)
			require.NoError(v, err)
			v.limits.last = fmt.Sprint(l)
		}
		for name, c := range map[string]struct{ low, high limittest.Limit }{
			"global":          {of(4), of(40)},
			"global, to none": {of(4), of(0)},
			"type":            {with(of(0), rateOf("T", 4)), with(of(0), rateOf("T", 40))},
			"type, to none":   {with(of(0), rateOf("T", 4)), of(0)},
			"places":          {with(of(0), placesOf("T", 4)), with(of(0), placesOf("T", 40))},
		} {
			v := newWorld(w, w.c, w.prefix+name+":")
			v.fill("g", 8, "acme", "T")
			set(v, c.low, false)
			run := func() []taken { return v.startAll("T") }
			require.Equal(v, 4, v.admit("T", 10, c.low).Moved, name)
			for _, j := range run() {
				v.outcome("T", other(ledger.OutcomeRetry, j, 0))
			}
			if name == "places" {
				for range 4 { // somebody else's
					v.c.XAdd(v.Context(), &redis.XAddArgs{Stream: v.p.Ready("T"), Values: []string{"j", "x"}})
				}
			}
			v.pass(5 * time.Millisecond)
			require.Zero(v, v.admit("T", 10, c.low).Moved, name)
			v.pass(25 * time.Millisecond)
			require.Zero(v, v.promote(c.low, "T").Moved, name)
			v.quiet()
			set(v, c.high, true)
			require.True(v, v.woken(), name)
			moved := 0
			if limiter == ledger.LimiterToken && (name == "global" || name == "type") {
				continue // the bucket fills from here
			}
			v.eventually(func() bool { // a blocked due job waits for up to a second
				moved += v.admit("T", 10, c.high).Moved
				moved += v.promote(c.high, "T").Moved
				return moved == 8
			})
		}
	})
}
