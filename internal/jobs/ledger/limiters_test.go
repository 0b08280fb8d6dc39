package ledger_test

import (
	"cmp"
	"fmt"
	"math/rand/v2"
	"slices"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/bulkaction/bulkaction/internal/jobs/ledger"
	"github.com/bulkaction/bulkaction/internal/testkit/limittest"
)

// spending is a number of permits that was spent at a time (µs, Redis's clock).
type spending struct{ at, n int64 }

// holds checks that the spendings in log, ordered by time, never exceed what the limiter allows.
func (w *world) holds(l limittest.Limit, log []spending) {
	w.Helper()
	require.Empty(w, exceeded(l, log), "%s, %d in %v: %v", l.Limiter, l.Permits, l.Window, log)
}

// exceeded describes the first place where spendings break the limiter's guarantee; "" if none
// does.
func exceeded(l limittest.Limit, log []spending) string {
	width, windows := l.Window.Microseconds(), map[int64]int64{}
	for i, s := range log {
		windows[s.at/width] += s.n
		if l.Limiter == ledger.LimiterFixed {
			if windows[s.at/width] > l.Permits {
				return fmt.Sprintf("%d in the window at %d", windows[s.at/width], s.at)
			}
			continue
		}
		sum := int64(0)
		for j := i; j >= 0; j-- {
			sum += log[j].n
			span := s.at - log[j].at
			if l.Limiter == ledger.LimiterSliding && span < width && sum > l.Permits {
				return fmt.Sprintf("%d in %d µs until %d", sum, span, s.at)
			}
			if l.Limiter == ledger.LimiterToken && float64(sum) > float64(l.Permits)*float64(span)/float64(width)+float64(l.Permits)+1e-3 {
				return fmt.Sprintf("%d in %d µs until %d", sum, span, s.at)
			}
		}
	}
	return ""
}

// TestExceeded: exceeded, which checks other tests, reports a limit that is exceeded and accepts
// one that is exactly used, for each limiter.
func TestExceeded(t *testing.T) {
	t.Parallel()
	ms := func(at, n int64) spending { return spending{1_000_000 + at*1000, n} }
	for _, c := range []struct {
		limiter string
		log     []spending
		fine    bool
	}{
		{ledger.LimiterFixed, []spending{ms(9, 10), ms(10, 10)}, true},
		{ledger.LimiterFixed, []spending{ms(10, 10), ms(19, 1)}, false},
		{ledger.LimiterSliding, []spending{ms(0, 10), ms(10, 10)}, true},
		{ledger.LimiterSliding, []spending{ms(9, 10), ms(10, 1)}, false},
		{ledger.LimiterToken, []spending{ms(0, 10), ms(5, 5), ms(10, 5)}, true},
		{ledger.LimiterToken, []spending{ms(0, 10), ms(5, 6)}, false},
	} {
		require.Equal(t, c.fine, exceeded(within(c.limiter, 10*time.Millisecond, 10), c.log) == "", "%+v", c)
	}
}

// TestLimiters: with admissions at random times the limit is never exceeded, and the next permit
// comes at the time that the script has announced.
func TestLimiters(t *testing.T) {
	each(t, func(w *world, limiter string) {
		random := rand.New(rand.NewPCG(1, uint64(len(limiter))))
		for _, l := range []limittest.Limit{within(limiter, 10*time.Millisecond, 3), within(limiter, 40*time.Millisecond, 7), within(limiter, 20*time.Millisecond, 1), within(limiter, 30*time.Millisecond, 200)} {
			v := newWorld(w, w.c, w.prefix+fmt.Sprint(l.Permits)+":")
			v.backlog("acme", "T", 600)
			var log []spending
			promised := int64(0)
			for end := v.now() + 6*l.Window.Microseconds(); v.now() < end; {
				r := v.admit("T", 1+random.IntN(5), l)
				v.read("T", "c")
				if r.Moved > 0 {
					log = append(log, spending{r.AtUS, int64(r.Moved)})
					require.GreaterOrEqual(v, r.AtUS, promised-1000, "a permit before its time")
				}
				if promised > 0 && r.AtUS >= promised {
					require.Positive(v, r.Moved, "%s: a permit was promised for %d, now it is %d", limiter, promised, r.AtUS)
				}
				promised = 0
				if r.State == ledger.AdmitLimited && r.Moved == 0 {
					promised = r.AtUS + r.Wait.Microseconds()
				}
				v.pass(time.Duration(random.Int64N(int64(l.Window) / 8)))
			}
			v.holds(l, log)
		}
	})
}

// TestLimitersWhenTheClockJumps: a limiter's stored times are 15 ms to a year in the future, as
// after the clock was set back. With the fixed and the sliding limiter, only the rest of the limit
// is given while the permits spent before count. With all, nobody is blocked for more than two
// windows.
func TestLimitersWhenTheClockJumps(t *testing.T) {
	each(t, func(w *world, limiter string) {
		l := within(limiter, 40*time.Millisecond, 6)
		for i, ahead := range []time.Duration{15 * time.Millisecond, l.Window, 3 * l.Window, time.Hour, 365 * 24 * time.Hour} {
			for _, spent := range []int64{0, 4, 6} {
				v := newWorld(w, w.c, fmt.Sprint(w.prefix, i, ".", spent, ":"))
				v.backlog("acme", "T", 100)
				v.use(l)
				start := v.now()
				at := start + ahead.Microseconds()
				var state []any
				switch limiter {
				case ledger.LimiterFixed:
					state = []any{"w", (at/1000 - at/1000%l.Window.Milliseconds()), "n", spent}
				case ledger.LimiterSliding:
					state = []any{"s", fmt.Sprintf("%016d:%010d;", at, spent), "n", spent}
				case ledger.LimiterToken:
					state = []any{"t", at + spent*l.Window.Microseconds()/l.Permits}
				}
				key := []string{v.p.Rate(), v.p.Tenant("acme")}[i%2]
				require.NoError(v, v.c.HSet(v.Context(), key, state...).Err())
				var log []spending
				first, refused := int64(0), int64(0)
				v.eventually(func() bool {
					r := v.admit("T", 10, l)
					if first == 0 {
						first = r.AtUS
					}
					if r.Moved > 0 {
						log = append(log, spending{r.AtUS, int64(r.Moved)})
					} else if len(log) == 0 {
						refused = r.AtUS
					}
					require.LessOrEqual(v, r.Wait, 2*l.Window+time.Millisecond)
					v.read("T", "c")
					return r.AtUS > start+4*l.Window.Microseconds()
				})
				v.holds(l, log)
				require.NotEmpty(v, log)
				require.Less(v, refused, first+2*l.Window.Microseconds()+1000, "stuck but for the rounding to ms, ahead by %v", ahead)
				again := int64(0)
				for _, s := range log {
					if s.at < countsUntil(l, at, first) {
						again += s.n
					}
				}
				require.LessOrEqual(v, again, l.Permits-spent, "what was spent before is spent, ahead by %v", ahead)
			}
		}
	})
}

// countsUntil returns the time (µs) until which a spending counts whose recorded time `at` lies in
// the future, because the clock was set back; first is when a script sees it for the first time. It
// returns 0 with the token limiter, for which the test does not check it.
func countsUntil(l limittest.Limit, at, first int64) int64 {
	width := l.Window.Microseconds()
	switch l.Limiter {
	case ledger.LimiterFixed:
		return min(at-at%width, first-first%width+width) + width
	case ledger.LimiterSliding:
		if at > first+width {
			at = first
		}
		return at + width
	}
	return 0
}

// TestLimitersWhenTheLimitChanges: a limit changes within a window. After 5 permits of 10 and 3 of
// 20, limits of 1 and 2 give none, and a limit of 20 gives 12; with the token limiter none, because
// the bucket keeps its permits only as far as they fit, and fills from there.
func TestLimitersWhenTheLimitChanges(t *testing.T) {
	each(t, func(w *world, limiter string) {
		w.backlog("acme", "T", 200)
		of := func(n int64) limittest.Limit { return within(limiter, limit(1).Window, n) }
		admit := func(most int, n int64) int { return w.admit("T", most, of(n)).Moved }
		require.Equal(w, 5, admit(5, 10))
		require.Equal(w, 3, admit(3, 20))
		require.Zero(w, admit(5, 1), "less than what was spent")
		require.Zero(w, admit(5, 2))
		rest := 0
		for range 5 {
			rest += admit(10, 20)
		}
		if limiter == ledger.LimiterToken {
			require.Zero(w, rest)
		} else {
			require.Equal(w, 12, rest)
		}
		require.Zero(w, admit(1, 10))
	})
}

// TestLimitersWhenTheLimiterChanges: after each change of the algorithm a tenant gets permits, and
// over two windows not more than the new limiter allows: the tenant is not blocked.
func TestLimitersWhenTheLimiterChanges(t *testing.T) {
	onStores(t, func(w *world) {
		w.backlog("acme", "T", 500)
		window := 20 * time.Millisecond
		for _, order := range [][]string{{"fixed", "sliding", "token", "fixed"}, {"token", "sliding", "fixed", "token", "fixed", "sliding"}} {
			for _, limiter := range order {
				l := within(limiter, window, 4)
				var log []spending
				w.eventually(func() bool {
					if r := w.admit("T", 10, l); r.Moved > 0 {
						log = append(log, spending{r.AtUS, int64(r.Moved)})
					}
					w.read("T", "c")
					return len(log) > 0 && log[len(log)-1].at > log[0].at+2*window.Microseconds()
				})
				w.holds(l, log)
			}
		}
	})
}

// TestLimitersOfATenantsOwn: with each limiter a tenant's own limit holds for this tenant alone,
// with and without a global limit, and ends when it is removed.
func TestLimitersOfATenantsOwn(t *testing.T) {
	each(t, func(w *world, limiter string) {
		window := 30 * time.Millisecond
		own := within(limiter, window, 3)
		w.backlog("a", "T", 300)
		w.backlog("b", "T", 0)
		w.set("a", rps(100))
		for _, l := range []limittest.Limit{within(limiter, window, 0), within(limiter, window, 1000)} {
			w.append("b", 300)
			var log []spending
			others := int64(0)
			// The loop lasts five windows; on a busy machine up to 30 s longer, until tenant b has
			// got more than 50 permits.
			end := w.now() + 5*window.Microseconds()
			latest := end + (30 * time.Second).Microseconds()
			for now := w.now(); now < end || (others <= 50 && now < latest); now = w.now() {
				r := w.admit("T", 20, l)
				got := permitsOf(r.Permits)
				p := w.promote(l, "T")
				for _, s := range []spending{{r.AtUS, got["a"]}, {p.AtUS, permitsOf(p.Permits)["a"]}} {
					if s.n > 0 {
						log = append(log, s)
					}
				}
				others += got["b"]
				w.read("T", "c")
				w.pass(time.Millisecond)
			}
			w.holds(own, log)
			require.Greater(w, len(log), 1)
			require.Greater(w, others, int64(50), "others are not held up")
		}
		w.set("a", ledger.TenantSettings{})
		w.eventually(func() bool { return permitsOf(w.admit("T", 200, noLimit).Permits)["a"] > 3 })
	})
}

// TestRateOfShortWindows: 50 permits a second are 5 in a window of 100 ms, 12 in one of 250 ms and
// 500 in one of 10 s; in one of 10 ms there is 1.
func TestRateOfShortWindows(t *testing.T) {
	t.Parallel()
	for window, want := range map[time.Duration]int64{10 * time.Millisecond: 1, 100 * time.Millisecond: 5, 250 * time.Millisecond: 12, 10 * time.Second: 500} {
		require.Equal(t, want, ledger.Meter{Window: window}.PerWindow(50), window)
	}
}

func TestRate(t *testing.T) {
	t.Parallel()
	for _, c := range []struct {
		rps        int64
		window     time.Duration
		partitions int
		perWindow  int64
		rpsOf      int64
	}{
		{0, time.Second, 3, 0, 0},
		{10_000, time.Second, 1, 10_000, 10_000},
		{10_000, 100 * time.Millisecond, 3, 1000, 3333},
		{17, time.Second, 16, 17, 1},
		{1, 10 * time.Millisecond, 1, 1, 1}, // at least one permit a window
	} {
		require.Equal(t, c.perWindow, ledger.Meter{Window: c.window}.PerWindow(c.rps), "%+v", c)
		require.Equal(t, c.rpsOf, ledger.RPSOf(c.rps, c.partitions), "%+v", c)
	}
}

// quota gives a partition `permits` of the limit, effective at once, and returns what it has.
func (w *world) quota(fence int64, l limittest.Limit, permits int64) ledger.Part {
	w.Helper()
	return w.increase(fence, l, ledger.Increase{To: permits})
}

// increase gives a partition a part of the limit, which becomes effective as terms say, and returns
// what it has.
func (w *world) increase(fence int64, l limittest.Limit, to ledger.Increase) ledger.Part {
	w.Helper()
	r, err := w.setParts(fence, l, to)
	require.NoError(w, err)
	require.False(w, r.Fenced)
	return r.Of[0]
}

func (w *world) setParts(fence int64, l limittest.Limit, to ledger.Increase) (ledger.Parts, error) {
	w.limits.last = fmt.Sprint(l) // what follows uses this part
	return ledger.SetParts(w.Context(), w.c, w.p, ledger.Order{Fence: fence}, l.Meter, []ledger.Limit{{Total: l.Permits}},
		ledger.Terms{Share: l.Share, Partitions: 4, To: []ledger.Increase{to}})
}

// part reads what a partition has of the limit. From then on, calls with a lower fence are refused.
func (w *world) part(fence int64, l limittest.Limit) ledger.Part {
	w.Helper()
	r, err := ledger.ReadParts(w.Context(), w.c, w.p, ledger.Order{Fence: fence}, l.Meter, []ledger.Limit{{Total: l.Permits}})
	require.NoError(w, err)
	require.False(w, r.Fenced)
	return r.Of[0]
}

// late says whether a call is refused because a later one has come.
func (w *world) late(at ledger.Order, l limittest.Limit) bool {
	w.Helper()
	r, err := ledger.ReadParts(w.Context(), w.c, w.p, at, l.Meter, []ledger.Limit{{Total: l.Permits}})
	require.NoError(w, err)
	return r.Fenced
}

// TestQuota: a lower quota is effective at once. Permits of the reduction that are spent already
// become free for other partitions when the window is over.
func TestQuota(t *testing.T) {
	onStores(t, func(w *world) {
		l := limit(40)
		w.backlog("acme", "T", 200)
		over := func() { // ends the window
			require.NoError(w, w.c.HSet(w.Context(), w.p.Rate(), "qf", 1).Err())
			w.newWindow("acme")
		}
		end := l.Window.Microseconds()
		has := func(total, held, from, demand, quota int64) ledger.Part {
			return ledger.Part{Total: total, Held: held, FromUS: from, Demand: demand, Quota: quota}
		}
		w.limits.last = fmt.Sprint(l)
		require.Equal(w, ledger.AdmitUnset, w.admit("T", 10, l).State, "it knows no limit yet")
		require.Equal(w, has(-1, 10, 0, 200, 10), w.quota(1, l, 10), "its first quota")
		require.Equal(w, map[string]int64{"acme": 10}, w.exhaust("T", 100, l))
		require.Equal(w, has(40, 10, end, 190, 3), w.quota(1, l, 3), "all is spent")
		w.unchanged(func() { w.quota(1, l, 3) })
		over()
		require.Equal(w, map[string]int64{"acme": 3}, w.exhaust("T", 100, l))

		terms := ledger.Increase{To: 20, NotBeforeUS: end, AtOnce: 4}
		require.Equal(w, has(40, 7, end, 187, 7), w.increase(1, l, terms))
		w.unchanged(func() { w.increase(1, l, terms) })
		require.Equal(w, map[string]int64{"acme": 4}, w.exhaust("T", 100, l), "so much at once")
		over()
		require.Equal(w, 5, w.admit("T", 5, l).Moved)
		require.Equal(w, has(40, 8, 0, 178, 8), w.quota(1, l, 8), "what was not spent can be given away now")
		require.Equal(w, has(40, 5, end, 178, 2), w.quota(1, l, 2), "a part of it")
		require.Empty(w, w.exhaust("T", 100, l))
		over()

		require.Equal(w, int64(2), w.part(2, l).Quota)
		w.unchanged(func() { require.True(w, w.late(ledger.Order{Fence: 1, Step: 9}, l), "another leads by now") })
		require.False(w, w.late(ledger.Order{Fence: 2, Step: 5}, l))
		w.unchanged(func() { require.True(w, w.late(ledger.Order{Fence: 2, Step: 4}, l), "it comes too late") })
		w.quota(3, l, 0)
		require.Empty(w, w.exhaust("T", 100, l), "it has nothing")
		w.quota(3, l, 6)
		require.Equal(w, map[string]int64{"acme": 6}, w.exhaust("T", 100, l))

		over()
		other := l
		other.Permits = 80
		require.Equal(w, has(40, 6, 0, 172, 6), w.quota(3, other, ledger.Keep), "what changes nothing records nothing")
		require.Equal(w, has(40, 20, 0, 172, 20), w.quota(3, other, 20))
		require.Equal(w, has(80, 20, 0, 172, 20), w.part(3, other))
		require.Equal(w, map[string]int64{"acme": 20}, w.exhaust("T", 100, other))
		none := l
		none.Permits = 0
		w.quota(3, none, 0)
		require.Equal(w, map[string]int64{"acme": 152}, w.exhaust("T", 100, none), "there is no limit")
		require.Equal(w, has(0, 20, end, 0, 4), w.quota(3, l, 4), "what was counted before is still held")
	})
}

// TestQuotaDemand: the demand of a partition counts only jobs that could use a permit: no paused
// jobs, no jobs that are due later, and no jobs that the workers have no capacity for.
func TestQuotaDemand(t *testing.T) {
	onStores(t, func(w *world) {
		l := limit(100)
		demand := func() int64 { return w.part(0, l).Demand }
		require.Zero(w, demand())
		w.due("due", "a", "T", 10)
		w.due("later", "b", "T", float64(time.Now().Add(time.Hour).UnixMilli()))
		w.backlog("a", "U", 5)
		require.Equal(w, int64(6), demand())
		w.pause(ledger.PauseType, "U")
		require.Equal(w, int64(1), demand())
		w.resume(ledger.PauseType, "U")
		w.stuck("U")
		require.Equal(w, int64(1), demand())
	})
}

// TestQuotaIsNeverExceeded: four partitions admit jobs while permits move between them at random.
// Together they never exceed the limit, although other processes take over the leadership, and calls
// are repeated or come too late. A leader takes permits from a partition before it gives them to
// another, and makes no change until the last one is effective.
func TestQuotaIsNeverExceeded(t *testing.T) {
	each(t, func(w *world, limiter string) {
		for run := range 3 {
			l := within(limiter, 40*time.Millisecond, 16)
			l.Share = []string{ledger.ShareElastic, ledger.ShareStatic}[run%2]
			v := newWorld(w, w.c, fmt.Sprint(w.prefix, limiter, run, ":"))
			v.divideAtRandom(l, rand.New(rand.NewPCG(uint64(run), 7)))
		}
	})
}

func (w *world) divideAtRandom(l limittest.Limit, random *rand.Rand) {
	w.Helper()
	const n = 4
	parts := w.partitionsOf(n)
	for i, p := range parts {
		p.quota(1, l, l.Permits/n)
		p.backlog(fmt.Sprint("tenant", i), "T", 400)
	}
	fence, moves := int64(1), 0
	var log []spending
	for end := w.now() + 12*l.Window.Microseconds(); w.now() < end || len(log) < 6 || moves == 0; {
		i, j := random.IntN(n), random.IntN(n)
		switch random.IntN(8) {
		case 0: // another process becomes leader
			fence++
		case 1: // the former leader calls too late
			parts[i].part(fence, l)
			r, err := parts[i].setParts(fence-1, l, ledger.Increase{To: l.Permits})
			require.NoError(w, err)
			require.True(w, r.Fenced)
		case 2, 3: // moves quota from one partition to another
			if moveAtRandom(parts, l, fence, i, j, random) {
				moves++
			}
		default:
			if r := parts[i].admit("T", 1+random.IntN(12), l); r.Moved > 0 {
				log = append(log, spending{r.AtUS, int64(r.Moved)})
				parts[i].read("T", "c")
			}
		}
		if random.IntN(4) == 0 {
			w.pass(time.Duration(random.Int64N(int64(l.Window) / 8)))
		}
	}
	slices.SortFunc(log, func(a, b spending) int { return cmp.Compare(a.at, b.at) })
	w.holds(l, log)
}

// moveAtRandom takes permits from one partition and gives the unassigned ones to another partition,
// perhaps by the same call twice, or stops in between. It does nothing and returns false if an
// earlier change is not effective yet.
func moveAtRandom(parts []*world, l limittest.Limit, fence int64, from, to int, random *rand.Rand) bool {
	free, have := l.Permits, make([]int64, len(parts))
	for i, p := range parts {
		now := p.part(fence, l)
		if now.FromUS != 0 {
			return false // a change has not become effective yet
		}
		have[i] = now.Held
		free -= now.Held
	}
	require.GreaterOrEqual(parts[0], free, int64(0), "the parts of %v", have)
	less := random.Int64N(have[from] + 1)
	taken := parts[from].quota(fence, l, less)
	if random.IntN(4) == 0 || from == to {
		return true
	}
	terms := ledger.Increase{
		To: have[to] + have[from] - less + free, NotBeforeUS: taken.FromUS, AtOnce: random.Int64N(free + have[from] - taken.Held + 1),
	}
	if l.Limiter == ledger.LimiterSliding { // the rest is free when it has fallen out of the span
		terms.To = have[to] + terms.AtOnce
	}
	for range 1 + random.IntN(2) {
		parts[to].increase(fence, l, terms)
	}
	return true
}

// The test cases of the original design document, with the fixed limiter and static shares.

func TestTenPassAndTheEleventhIsRefused(t *testing.T) {
	onStores(t, func(w *world) {
		w.backlog("a", "T", 11)
		l := limit(10)
		for range 10 {
			require.Equal(w, 1, w.admit("T", 1, l).Moved)
		}
		r := w.admit("T", 1, l)
		require.Zero(w, r.Moved)
		require.Equal(w, []ledger.Denial{{Tenant: "a", Reason: "global"}}, r.Denials)
		require.Equal(w, []int64{10, 10}, []int64{w.spentOf(w.p.Rate()), w.spentOf(w.p.Tenant("a"))}, "a refusal leaves the counts at 10/10")
		require.Equal(w, map[string]int64{"ready": 10, "waiting": 1}, w.ledger("a"))

		w.newWindow("a")
		require.Equal(w, 1, w.admit("T", 1, l).Moved)
		require.Equal(w, []int64{1, 1}, []int64{w.spentOf(w.p.Rate()), w.spentOf(w.p.Tenant("a"))}, "a new window starts at 1")
	})
}

func TestAfterFiveOfAFirstOfBMakesALimitFive(t *testing.T) {
	onStores(t, func(w *world) {
		w.backlog("a", "T", 10)
		l := limit(10)
		for range 5 {
			require.Equal(w, 1, w.admit("T", 1, l).Moved)
		}
		require.Equal(w, int64(10), w.tenant("a", l).Limit)
		w.backlog("b", "T", 5)
		require.Equal(w, []ledger.Permit{{Tenant: "b", N: 1}}, w.admit("T", 1, l).Permits)
		require.Equal(w, []int64{5, 5}, []int64{w.tenant("a", l).Limit, w.tenant("b", l).Limit})
		r := w.admit("T", 1, l)
		require.Equal(w, []ledger.Denial{{Tenant: "a", Reason: "per_group"}}, r.Denials, "its sixth is refused")
		require.Equal(w, []ledger.Permit{{Tenant: "b", N: 1}}, r.Permits)
		require.Equal(w, int64(5), w.spentOf(w.p.Tenant("a")))
		require.Equal(w, map[string]int64{"ready": 5, "waiting": 4, "non_ready": 1}, w.ledger("a"))
	})
}

func TestFiveOfAAndFiveOfBThenCIsRefusedByTheGlobalLimit(t *testing.T) {
	onStores(t, func(w *world) {
		w.backlog("a", "T", 6)
		w.backlog("b", "T", 6)
		l := limit(10)
		require.Equal(w, map[string]int64{"a": 5, "b": 5}, permitsOf(w.admit("T", 10, l).Permits))
		w.backlog("c", "U", 1)
		r := w.admit("U", 1, l)
		require.Equal(w, ledger.AdmitLimited, r.State)
		require.Equal(w, []ledger.Denial{{Tenant: "c", Reason: "global"}}, r.Denials)
		require.Equal(w, map[string]int64{"waiting": 1}, w.ledger("c"), "it keeps its place")
		require.Equal(w, []int64{10, 0}, []int64{w.spentOf(w.p.Rate()), w.spentOf(w.p.Tenant("c"))})
	})
}

func TestAFullReadyQueueOfTenRefusesTheEleventhAndLosesNothing(t *testing.T) {
	onStores(t, func(w *world) {
		w.backlog("a", "T", 11)
		l := limit(100)
		require.Equal(w, 10, w.admitBelow(10, "T", 100, l).Moved)
		w.unchanged(func() { require.Equal(w, ledger.AdmitFull, w.admitBelow(10, "T", 100, l).State) })
		require.Equal(w, map[string]int64{"ready": 10, "waiting": 1}, w.ledger("a"))
		require.Equal(w, int64(10), w.spentOf(w.p.Rate()), "what was refused has spent nothing")
		run := w.readSome("T", "c", 6)
		w.start("T", run)
		require.Equal(w, 1, w.admitBelow(10, "T", 100, l).Moved)
		require.Equal(w, "IIIIIIRRRRR", w.states("a"))
	})
}

func TestLimitFiveAndTwoTenantsTheThirdOfAGoesToNonReady(t *testing.T) {
	onStores(t, func(w *world) {
		w.backlog("a", "T", 3)
		w.backlog("b", "U", 1)
		l := limit(5)
		r := w.admit("T", 10, l)
		require.Equal(w, []int{2, 1}, []int{r.Moved, r.NonReady})
		require.Equal(w, []ledger.Denial{{Tenant: "a", Reason: "per_group"}}, r.Denials)
		require.Equal(w, map[string]int64{"ready": 2, "non_ready": 1}, w.ledger("a"))
		require.Equal(w, "RRN", w.states("a"))
	})
}

func TestDueJobsMoveOthersStay(t *testing.T) {
	onStores(t, func(w *world) {
		hour := float64(time.Now().Add(time.Hour).UnixMilli())
		w.due("due", "a", "T", 10)
		w.due("later", "a", "T", hour)
		w.due("too", "b", "T", 20)
		w.due("much-later", "b", "T", 2*hour)
		r := w.promote(limit(10), "T")
		require.Equal(w, 2, r.Moved)
		for g, want := range map[string]string{"due": "R", "too": "R", "later": "N", "much-later": "N"} {
			require.Equal(w, want, w.states(g), g)
		}
		require.Equal(w, int64(2), w.spentOf(w.p.Rate()), "a promotion spends a permit")
	})
}
