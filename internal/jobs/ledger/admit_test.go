package ledger_test

import (
	"fmt"
	"maps"
	"slices"
	"strings"
	"sync/atomic"
	"testing"
	"time"

	"github.com/stretchr/testify/require"
	"golang.org/x/sync/errgroup"

	"github.com/bulkaction/bulkaction/internal/jobs/ledger"
	"github.com/bulkaction/bulkaction/internal/testkit/limittest"
)

func TestAdmit(t *testing.T) {
	onStores(t, func(w *world) {
		require.Equal(w, ledger.AdmitReply{State: ledger.AdmitEmpty, Wait: -time.Millisecond, Permits: []ledger.Permit{}, Denials: []ledger.Denial{}}, w.atSomeTime(w.admit("T", 10, noLimit)))
		w.fill("g", 3, "acme", "T")
		r := w.admit("T", 2, noLimit)
		require.Equal(w, ledger.AdmitReply{State: ledger.AdmitOK, Moved: 2, Wait: -time.Millisecond, Permits: []ledger.Permit{{Tenant: "acme", N: 2}}, Denials: []ledger.Denial{}}, w.atSomeTime(r))
		require.Equal(w, "RRW", w.states("g"))
		require.Equal(w, map[string]int64{"ready": 2, "waiting": 1}, w.ledger("g"))
		require.Equal(w, "1", w.c.HGet(w.Context(), w.p.Load("T"), "waiting").Val())
		require.Equal(w, "1", w.c.HGet(w.Context(), w.p.Tenant("acme"), "active").Val())

		// A second call that may take 2 jobs takes the last one, and a third call finds none.
		require.Equal(w, 1, w.admit("T", 2, noLimit).Moved)
		require.Zero(w, w.c.Exists(w.Context(), w.p.Active(), w.p.Queue("g", "T"), w.p.FairLane("T", "normal"), w.p.FairTenant("T", "normal", "acme")).Val())
		w.unchanged(func() { require.Equal(w, ledger.AdmitEmpty, w.admit("T", 2, noLimit).State) })

		got := w.read("T", "c")
		require.Len(w, got, 3)
		for i, j := range got {
			require.Equal(w, fmt.Sprintf(`{"n":%d}`, i), j.Payload)
			require.Equal(w, []any{"g", "T", int64(i), 1, 0, 0, 0}, []any{j.Group, j.Type, j.Ordinal, j.Attempt, j.Retries, j.Throttles, j.Losses})
			require.WithinDuration(w, j.Accepted, time.UnixMilli(j.SinceMS), time.Minute)
		}
	})
}

// atSomeTime checks that a reply has Redis's time, and removes it, so that the rest
// can be compared.
func (w *world) atSomeTime(r ledger.AdmitReply) ledger.AdmitReply {
	w.Helper()
	require.WithinDuration(w, time.Now(), time.UnixMicro(r.AtUS), time.Minute)
	r.AtUS = 0
	return r
}

// admitted reads those jobs of a type that nobody has read from the ready stream yet. It returns
// by(job) of each, for example its group, joined in the order of the stream.
func (w *world) admitted(typ string, by func(taken) string) string {
	w.Helper()
	var order []string
	for _, j := range w.read(typ, "order") {
		order = append(order, by(j))
	}
	return strings.Join(order, "")
}

func group(j taken) string { return j.Group }

func TestAdmitTenantsTakeTurns(t *testing.T) {
	onStores(t, func(w *world) {
		w.create("a", "a", "T")
		w.create("b", "b", "T")
		w.append("a", 100)
		require.Equal(w, 1, w.admit("T", 1, noLimit).Moved)
		w.append("b", 3)
		for range 8 {
			w.admit("T", 1, noLimit)
		}
		require.Equal(w, "abababaaa", w.admitted("T", group), "a flood delays another tenant by its share alone")

		// In one large batch, too, both tenants get their share.
		w.append("b", 50)
		w.admit("T", 40, noLimit)
		batch := w.admitted("T", group)
		require.Equal(w, 40, len(batch))
		require.InDelta(w, 20, strings.Count(batch, "b"), 1)
	})
}

// TestAdmitTenantThatComesBack: tenant b has no jobs while 200 jobs of tenant a are admitted. Of
// the next 120 admissions b gets at most 86, and about half of the last 60: it is not compensated.
func TestAdmitTenantThatComesBack(t *testing.T) {
	onStores(t, func(w *world) {
		for _, g := range []string{"a", "b"} {
			w.create(g, g, "T")
		}
		w.append("b", 1)
		w.admit("T", 1, noLimit)
		w.append("a", 400)
		for range 4 {
			require.Equal(w, 50, w.admit("T", 50, noLimit).Moved)
		}
		w.append("b", 120)
		w.admitted("T", group)
		for range 120 {
			w.admit("T", 1, noLimit)
		}
		order := w.admitted("T", group)
		require.InDelta(w, 60, strings.Count(order[60:], "b")*2, 10, order)
		require.LessOrEqual(w, strings.Count(order, "b"), 50+70/2+1, order)
	})
}

// TestAdmitTenantAfterItsTypeWasRetired: 1,000 jobs of tenant a are admitted, then the type is
// retired. When it is used again, a gets 75 to 125 of 200 admissions beside the new tenant b.
func TestAdmitTenantAfterItsTypeWasRetired(t *testing.T) {
	onStores(t, func(w *world) {
		for _, g := range []string{"a", "b"} {
			w.create(g, g, "T")
		}
		w.append("a", 1000)
		for range 20 {
			w.admit("T", 50, noLimit)
		}
		w.c.Del(w.Context(), w.p.Ready("T"))
		retired, err := ledger.Retire(w.Context(), w.c, w.p, "T", time.Now().Add(time.Minute))
		require.NoError(w, err)
		require.True(w, retired)
		w.append("b", 200)
		w.append("a", 200)
		for range 200 {
			w.admit("T", 1, noLimit)
		}
		order := w.admitted("T", group)
		require.InDelta(w, 100, strings.Count(order, "a"), 25, order)
	})
}

// TestAdmitLanesByWeight: of 1,000 admissions the lanes high, normal and low, with the weights 6, 3
// and 1, get 600, 300 and 100 (give or take 20), with the fair and with the priority policy.
func TestAdmitLanesByWeight(t *testing.T) {
	t.Run("fair", func(t *testing.T) { onStores(t, lanesByWeight) })
	t.Run("priority", func(t *testing.T) {
		onStores(t, func(w *world) {
			w.byPriority(10_000)
			lanesByWeight(w)
		})
	})
}

func lanesByWeight(w *world) {
	for _, lane := range []string{"high", "normal", "low"} {
		w.create(lane[:1], "tenant-"+lane, "T", "lane", lane)
		w.append(lane[:1], 1000)
	}
	order := ""
	for len(order) < 1000 {
		w.admit("T", 10, noLimit)
		order += w.admitted("T", group)
		w.c.Del(w.Context(), w.p.Ready("T"))
	}
	for lane, want := range map[string]float64{"h": 600, "n": 300, "l": 100} {
		require.InDelta(w, want, strings.Count(order, lane), 20, lane)
	}
	for at := 0; at+200 <= len(order); at += 200 {
		require.Contains(w, order[at:at+200], "l", "no lane starves")
	}
}

// TestAdmitLanesShareWhatIsUnused: while only the lane low has jobs, one call admits all 50 of
// them. After that the lane normal gets jobs, and more than 10 of the next 20 admissions.
func TestAdmitLanesShareWhatIsUnused(t *testing.T) {
	onStores(t, func(w *world) {
		w.fill("l", 50, "a", "T", "lane", "low")
		require.Equal(w, 50, w.admit("T", 50, noLimit).Moved)
		w.fill("n", 20, "a", "T")
		w.append("l", 20)
		w.read("T", "c")
		w.admit("T", 20, noLimit)
		order := w.admitted("T", group)
		require.Greater(w, strings.Count(order, "n"), 10, "and it does not pay for that later: %s", order)
	})
}

func TestAdmitSmallGroupPassesAHugeOne(t *testing.T) {
	onStores(t, func(w *world) {
		w.fill("h", 1000, "acme", "T")
		w.admit("T", 5, noLimit)
		w.fill("s", 3, "acme", "T")
		w.admit("T", 5, noLimit)
		require.Equal(w, "hhhhhssshh", w.admitted("T", group))
	})
}

func TestAdmitKeepsTheReadyStreamShort(t *testing.T) {
	onStores(t, func(w *world) {
		w.fill("g", 100, "acme", "T")
		require.Equal(w, 7, w.admitBelow(7, "T", 50, noLimit).Moved)
		w.unchanged(func() {
			r := w.atSomeTime(w.admitBelow(7, "T", 50, noLimit))
			require.Equal(w, ledger.AdmitReply{State: ledger.AdmitFull, Wait: -time.Millisecond, Permits: []ledger.Permit{}, Denials: []ledger.Denial{}}, r)
		})
		// Cap bounds the undelivered entries: when a worker has read 3 of 7, 3 more are admitted.
		// Starting and ending the jobs of those 3 gives no further capacity.
		run := w.readSome("T", "c", 3)
		require.Equal(w, 3, w.admitBelow(7, "T", 50, noLimit).Moved)
		w.start("T", run)
		w.outcome("T", done(run...))
		require.Equal(w, ledger.AdmitFull, w.admitBelow(7, "T", 50, noLimit).State)
		require.Equal(w, 3, w.admitBelow(10, "T", 50, noLimit).Moved)
		require.Len(w, w.read("T", "c"), 10)
	})
}

// TestAdmitNeverExceedsTheLimit: two goroutines admit and promote at the same time, with 7 permits
// in 100 ms and 3 tenants. In each aligned window, by Redis's time, at most 6 jobs become ready.
func TestAdmitNeverExceedsTheLimit(t *testing.T) {
	onStores(t, func(w *world) {
		const permits, window = 7, 100 * time.Millisecond
		for _, g := range []string{"a", "b", "c"} {
			w.fill(g, 100, g, "T")
		}
		l := limittest.Limit{Meter: ledger.Meter{Window: window}, Permits: permits}
		var callers errgroup.Group
		var moved atomic.Int64
		for range 2 {
			callers.Go(func() error {
				for moved.Load() < 6*6 {
					a, err := ledger.Admit(w.Context(), w.c, w.p, ledger.AdmitArgs{Type: "T", Most: 5, Cap: 1000, Meter: w.use(l), Seed: seed, LaneWeights: [3]int{6, 3, 1}})
					if err != nil {
						return err
					}
					p, err := ledger.Promote(w.Context(), w.c, w.p, ledger.PromoteArgs{Most: 5, Meter: w.use(l), Seed: seed, Caps: map[string]int{"T": 1000}})
					if err != nil {
						return err
					}
					moved.Add(int64(a.Moved + p.Moved))
				}
				return nil
			})
		}
		require.NoError(w, callers.Wait())
		windows := map[int64]int{}
		for _, j := range w.read("T", "c") {
			windows[j.SinceMS/window.Milliseconds()]++
		}
		require.GreaterOrEqual(w, len(windows), 6)
		for at, n := range windows {
			require.LessOrEqual(w, n, 6, "window %d: each of three tenants may have 2", at)
		}
	})
}

func TestAdmitSharesPermits(t *testing.T) {
	onStores(t, func(w *world) {
		for _, c := range []struct{ tenants, permits, each, all int }{
			{1, 10, 10, 10}, {3, 10, 3, 9}, {4, 8, 2, 8}, {5, 3, 1, 3},
		} {
			t := fmt.Sprintf("T%d", c.tenants)
			for i := range c.tenants {
				g := fmt.Sprintf("%s-%d", t, i)
				w.fill(g, 20, g, t)
			}
			moved, by := 0, map[string]int64{}
			for range c.tenants + 1 {
				r := w.admit(t, 100, limit(int64(c.permits)))
				moved += r.Moved
				for _, p := range r.Permits {
					by[p.Tenant] += p.N
				}
			}
			require.Equal(w, c.all, moved, "%+v", c)
			for tenant, n := range by {
				require.LessOrEqual(w, n, int64(c.each), tenant)
			}
			for i := range c.tenants {
				w.cancel(fmt.Sprintf("%s-%d", t, i)) // so that the next case begins without active tenants
				w.sweep(fmt.Sprintf("%s-%d", t, i))
			}
			require.Empty(w, w.c.SMembers(w.Context(), w.p.Active()).Val())
			w.c.Del(w.Context(), w.p.Rate())
			w.limits.last = ""
		}
	})
}

func TestAdmitGlobalLimit(t *testing.T) {
	onStores(t, func(w *world) {
		w.fill("g", 5, "acme", "T")
		l := limit(2)
		r := w.admit("T", 5, l)
		require.Equal(w, 2, r.Moved)
		require.Equal(w, ledger.AdmitLimited, r.State)
		require.Equal(w, []ledger.Denial{{Tenant: "acme", Reason: "global"}}, r.Denials)
		require.InDelta(w, l.Window-time.Duration(time.Now().UnixMilli())*time.Millisecond, r.Wait, float64(time.Minute), "until the next window")
		before := w.c.HMGet(w.Context(), w.p.Rate(), "w", "n").Val()
		r = w.admit("T", 5, l)
		require.Zero(w, r.Moved+r.NonReady)
		require.Equal(w, ledger.AdmitLimited, r.State)
		require.Equal(w, before, w.c.HMGet(w.Context(), w.p.Rate(), "w", "n").Val(), "a refusal spends nothing")
		require.Equal(w, map[string]int64{"waiting": 3, "ready": 2}, w.ledger("g"))
	})
}

// TestAdmitRateLimitsATenant: a tenant with jobs in the lanes normal and high has spent its
// permits, so it leaves both lanes. One waiting job of it becomes non-ready, as its marker, and is
// due when the next window begins.
func TestAdmitRateLimitsATenant(t *testing.T) {
	onStores(t, func(w *world) {
		w.create("g", "acme", "T")
		w.create("high", "acme", "T", "lane", "high")
		w.create("other", "beta", "T")
		w.append("g", 5)
		w.append("high", 5)
		w.append("other", 1)
		l := limittest.Limit{Meter: ledger.Meter{Window: 500 * time.Millisecond}, Permits: 8} // 4 each
		var r ledger.AdmitReply
		w.eventually(func() bool { // in one window
			r = w.admit("T", 100, l)
			return r.NonReady == 1 || w.ledger("high")["waiting"] == 0
		})
		require.Equal(w, ledger.AdmitOK, r.State)
		require.Equal(w, []ledger.Denial{{Tenant: "acme", Reason: "per_group"}}, r.Denials)
		require.Equal(w, 1, r.NonReady)

		marker := w.c.ZRangeWithScores(w.Context(), w.p.NonReadyOf("acme"), 0, -1).Val()
		require.Len(w, marker, 1, "exactly one")
		due := time.UnixMilli(int64(marker[0].Score))
		require.Zero(w, due.UnixMilli()%l.Window.Milliseconds(), "due when the next window begins")
		require.Contains(w, marker[0].Member.(string), "|R|")
		limited := w.c.ZRangeWithScores(w.Context(), w.p.RateLimited("T"), 0, -1).Val()
		require.Len(w, limited, 1)
		require.Equal(w, []any{"acme", marker[0].Score}, []any{limited[0].Member, limited[0].Score})
		require.Zero(w, w.c.Exists(w.Context(), w.p.FairLane("T", "normal"), w.p.FairLane("T", "high")).Val(), "nobody stands in the lanes")
		throttled := w.c.HGet(w.Context(), w.p.Group("g"), "throttles").Val() + w.c.HGet(w.Context(), w.p.Group("high"), "throttles").Val()
		require.Equal(w, "1", throttled)

		w.append("g", 1)
		require.Zero(w, w.c.Exists(w.Context(), w.p.FairLane("T", "normal")).Val(), "new jobs wait with the others")

		// When the next window has begun, calls without a limit admit the tenant's waiting jobs and
		// promote the marker.
		w.eventually(func() bool { return w.admit("T", 100, noLimit).Moved > 0 })
		require.False(w, time.Now().Before(due))
		require.Zero(w, w.c.Exists(w.Context(), w.p.RateLimited("T")).Val())
		w.promoteAll("T", 1)
		require.Equal(w, map[string]int64{"ready": 6}, w.ledger("g"))
		require.Equal(w, map[string]int64{"ready": 5}, w.ledger("high"))
		for _, j := range w.read("T", "c") {
			if _, rate, _ := j.Waited(); rate > 0 {
				require.LessOrEqual(w, rate, 20*time.Second)
			}
		}
	})
}

func TestAdmitWaitsForTheNextPermit(t *testing.T) {
	onStores(t, func(w *world) {
		w.spent("acme")
		l := limit(20)
		require.Equal(w, 1, w.admit("T", 10, l).NonReady)
		r := w.admit("T", 10, l)
		require.Equal(w, ledger.AdmitEmpty, r.State)
		require.InDelta(w, l.Window-time.Duration(time.Now().UnixMilli())*time.Millisecond, r.Wait, float64(time.Minute))
		require.Zero(w, r.NonReady, "it gets one marker")
		require.Equal(w, map[string]int64{"non_ready": 1, "waiting": 2}, w.ledger("g"))
	})
}

func TestAdmitQuarantinesWhatCantBeRead(t *testing.T) {
	onStores(t, func(w *world) {
		w.fill("g", 1, "acme", "T")
		w.fill("h", 1, "beta", "T")
		w.c.LPush(w.Context(), w.p.Queue("g", "T"), "nonsense|x", strings.Repeat("y", 5000))
		w.c.RPush(w.Context(), w.p.Queue("g", "T"), w.c.LIndex(w.Context(), w.p.Queue("g", "T"), -1).Val()) // the same job twice
		moved := 0
		w.eventually(func() bool {
			moved += w.admit("T", 1, noLimit).Moved
			return w.c.Exists(w.Context(), w.p.Queue("g", "T"), w.p.Queue("h", "T")).Val() == 0
		})
		require.Equal(w, 2, moved)
		require.Equal(w, map[string]int64{"ready": 1}, w.ledger("g"))
		require.Equal(w, map[string]int64{"ready": 1}, w.ledger("h"))
		require.Equal(w, []string{"queue:g:T nonsense|x", "queue:g:T " + strings.Repeat("y", 1024)}, w.c.LRange(w.Context(), w.p.Quarantine(), 0, -1).Val())
		require.Equal(w, ledger.AdmitEmpty, w.admit("T", 1, noLimit).State)
	})
}

// admitFor admits up to `most` jobs of type T for workers with `slots` slots. The ready stream may
// hold slots + ahead jobs.
func (w *world) admitFor(slots, ahead, most int) ledger.AdmitReply {
	w.Helper()
	r, err := ledger.Admit(w.Context(), w.c, w.p, ledger.AdmitArgs{
		Type: "T", Most: most, Cap: 1000, Slots: slots, Ahead: ahead, Meter: w.use(noLimit), Seed: seed, LaneWeights: [3]int{6, 3, 1},
	})
	require.NoError(w, err)
	return r
}

// TestAdmitForSoManyWorkers: with 5 worker slots and 4 jobs ahead, the ready stream holds at most 9
// jobs, started or not. After 3 of them are done, the fetcher is woken and can admit 3 more.
func TestAdmitForSoManyWorkers(t *testing.T) {
	onStores(t, func(w *world) {
		w.fill("g", 100, "acme", "T")
		require.Equal(w, 9, w.admitFor(5, 4, 50).Moved)
		require.Equal(w, ledger.AdmitFull, w.admitFor(5, 4, 50).State)
		run := w.readSome("T", "c", 5)
		w.start("T", run)
		require.Equal(w, ledger.AdmitFull, w.admitFor(5, 4, 50).State, "what runs counts")
		w.quiet()
		w.outcome("T", done(run[:3]...))
		require.Equal(w, int64(1), w.c.LLen(w.Context(), w.p.Wake("fetcher")).Val(), "the fetcher is told that there is room")
		require.Equal(w, 3, w.admitFor(5, 4, 50).Moved)
		require.Equal(w, map[string]int64{"done": 3, "in_flight": 2, "ready": 7, "waiting": 88}, w.ledger("g"))
	})
}

// TestAdmitMintsSpans: after its admission, the trace context of a sampled job names the span of
// the admission; a job without a trace context gets none.
func TestAdmitMintsSpans(t *testing.T) {
	onStores(t, func(w *world) {
		w.create("g", "acme", "T")
		parent := "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01"
		w.appendJobs(ledger.AppendArgs{Group: "g", Jobs: []ledger.NewJob{
			{Payload: []byte(`1`), TraceParent: parent}, {Payload: []byte(`2`)}, {Payload: []byte(`"|"`), TraceParent: parent},
		}})
		traced := w.admit("T", 10, noLimit).Traced
		require.Len(w, traced, 2)
		run := w.read("T", "c")
		for i, tr := range traced {
			j := run[2*i]
			since := time.UnixMilli(j.SinceMS)
			require.Equal(w, fmt.Sprintf("0badcafe%08x", i+1), tr.SpanID)
			require.Equal(w, strings.Replace(parent, "b7ad6b7169203331", tr.SpanID, 1), j.Trace)
			require.Equal(w, ledger.AdmitTrace{TracedJob: ledger.TracedJob{Group: "g", Tenant: "acme", Ordinal: int64(2 * i), Parent: parent, SpanID: tr.SpanID}, Now: since, Fairness: since.Sub(j.Accepted)}, tr)
		}
		require.Empty(w, run[1].Trace)
		require.Equal(w, []string{"1", "2", `"|"`}, []string{run[0].Payload, run[1].Payload, run[2].Payload})
	})
}

// TestAdmitEverything: 435 jobs of 30 groups, which belong to 7 tenants and are in all three lanes,
// are admitted exactly once each, and the counts agree.
func TestAdmitEverything(t *testing.T) {
	onStores(t, func(w *world) {
		var groups []string
		for i := range 30 {
			g := fmt.Sprintf("g%d", i)
			w.fill(g, i, fmt.Sprintf("t%d", i%7), "T", "lane", []string{"high", "normal", "low"}[i%3])
			groups = append(groups, g)
		}
		seen := map[string]int{}
		for moved := true; moved; {
			moved = w.admit("T", 37, noLimit).Moved > 0
			for _, j := range w.read("T", "c") {
				seen[fmt.Sprint(j.Group, ".", j.Ordinal)]++
			}
		}
		require.Len(w, seen, 29*30/2)
		for i, g := range groups {
			require.Equal(w, strings.Repeat("R", i), w.states(g))
			w.ledger(g)
		}
		require.Equal(w, 1, slices.Max(slices.Collect(maps.Values(seen))), "none twice")
	})
}

// TestDequeueInNoOrder: a queue holds 12 of a group's 40 jobs, not sorted by ordinal, as after a
// requeue. Admit makes these 12 ready in their order, each with its own ordinal and payload.
func TestDequeueInNoOrder(t *testing.T) {
	onStores(t, func(w *world) {
		w.fill("g", 40, "acme", "T")
		queue := w.p.Queue("g", "T")
		blobs := w.c.LRange(w.Context(), queue, 0, -1).Val()
		order := []int{15, 26, 17, 9, 10, 20, 31, 22, 33, 24, 5, 16}
		for i, ordinal := range order {
			w.c.LSet(w.Context(), queue, int64(i), blobs[ordinal])
		}
		w.c.LTrim(w.Context(), queue, 0, int64(len(order)-1))
		require.Equal(w, len(order), w.admit("T", 40, noLimit).Moved)
		for i, j := range w.read("T", "c") {
			require.EqualValues(w, order[i], j.Ordinal)
			require.Equal(w, fmt.Sprintf(`{"n":%d}`, order[i]), j.Payload)
		}
		states := w.states("g")
		for i := range 40 {
			want := byte('W')
			for _, ordinal := range order {
				if ordinal == i {
					want = 'R'
				}
			}
			require.Equal(w, string(want), states[i:i+1], "job %d", i)
		}
	})
}
