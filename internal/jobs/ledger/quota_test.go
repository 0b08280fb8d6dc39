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
)

// quota sets a partition's quota to `permits`, effective at once, and returns it. If permits is -1,
// it leaves the quota as it is, and only stores the fencing number `fence`: smaller ones are
// refused.
func (w *world) quota(fence int64, l ledger.Limit, permits int64) ledger.Quota {
	w.Helper()
	return w.increase(fence, l, permits, ledger.Increase{})
}

// increase sets a partition's quota to `permits`, which becomes effective as terms say, and returns
// it.
func (w *world) increase(fence int64, l ledger.Limit, permits int64, terms ledger.Increase) ledger.Quota {
	w.Helper()
	p, err := ledger.SetQuota(w.Context(), w.c, w.p, fence, l, permits, terms)
	require.NoError(w, err)
	return p
}

// TestQuota: a lower quota is effective at once. Permits of the reduction that are spent already
// become free for other partitions when the window is over.
func TestQuota(t *testing.T) {
	both(t, func(w *world) {
		l := limit(40)
		l.Part, l.Tag = 10, "40 of 4"
		w.backlog("acme", "T", 200)
		over := func() { // ends the window
			require.NoError(w, w.c.HSet(w.Context(), w.p.Rate(), "qf", 1).Err())
			w.newWindow("acme")
		}
		end := l.Window.Microseconds()
		require.Equal(w, ledger.Quota{Effective: 10, Demand: 200, Active: 1}, w.quota(1, l, -1), "its first quota")
		require.Equal(w, map[string]int64{"acme": 10}, w.exhaust("T", 100, l))
		require.Equal(w, ledger.Quota{Effective: 3, FromUS: end, Demand: 190, Active: 1}, w.quota(1, l, 3), "all is spent")
		w.unchanged(func() { w.quota(1, l, 3) })
		over()
		require.Equal(w, map[string]int64{"acme": 3}, w.exhaust("T", 100, l))

		terms := ledger.Increase{NotBeforeUS: end, AtOnce: 4}
		require.Equal(w, ledger.Quota{Effective: 7, FromUS: end, Demand: 187, Active: 1}, w.increase(1, l, 20, terms))
		w.unchanged(func() { w.increase(1, l, 20, terms) })
		require.Equal(w, map[string]int64{"acme": 4}, w.exhaust("T", 100, l), "so much at once")
		over()
		require.Equal(w, 5, w.admit("T", 5, l).Moved)
		require.Equal(w, ledger.Quota{Effective: 8, Freed: 12, Demand: 178, Active: 1}, w.quota(1, l, 8), "what was not spent can be given away now")
		require.Equal(w, ledger.Quota{Effective: 2, Freed: 3, FromUS: end, Demand: 178, Active: 1}, w.quota(1, l, 2), "a part of it")
		require.Empty(w, w.exhaust("T", 100, l))
		over()

		require.Equal(w, int64(2), w.quota(2, l, -1).Effective)
		w.unchanged(func() { require.True(w, w.quota(1, l, 40).Fenced, "another rebalances by now") })
		w.quota(2, l, 0)
		require.Empty(w, w.exhaust("T", 100, l), "it has nothing")
		w.quota(2, l, 6)
		require.Equal(w, map[string]int64{"acme": 6}, w.exhaust("T", 100, l))

		other := l // another limit starts with equal quotas
		other.Permits, other.Part, other.Tag = 80, 20, "80 of 4"
		over()
		require.Equal(w, map[string]int64{"acme": 20}, w.exhaust("T", 100, other))
	})
}

// TestQuotaDemand: the demand of a partition counts only jobs that could use a permit: no paused
// jobs, no jobs that are due later, and no jobs that the workers have no capacity for.
func TestQuotaDemand(t *testing.T) {
	both(t, func(w *world) {
		l := ledger.Rate{RPS: 100, Window: time.Second}.Of(0, 2)
		demand := func() int64 { return w.quota(1, l, -1).Demand }
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
// Together they never exceed the limit, although other processes take over rebalancing, and calls
// are repeated or come too late. A rebalancer takes permits from a partition before it gives them
// to another, and makes no change until the last one is effective.
func TestQuotaIsNeverExceeded(t *testing.T) {
	each(t, func(w *world, limiter string) {
		for run := range 3 {
			rate := ledger.Rate{RPS: 400, Window: 40 * time.Millisecond, Limiter: limiter, Share: []string{ledger.ShareElastic, ledger.ShareStatic}[run%2]}
			v := newWorld(w, w.c, fmt.Sprint(w.prefix, limiter, run, ":"))
			v.divideAtRandom(rate, rand.New(rand.NewPCG(uint64(run), 7)))
		}
	})
}

func (w *world) divideAtRandom(rate ledger.Rate, random *rand.Rand) {
	w.Helper()
	const n = 4
	parts := w.partitionsOf(n)
	for i, p := range parts {
		p.backlog(fmt.Sprint("tenant", i), "T", 400)
	}
	of := func(i int) ledger.Limit { return rate.Of(i, n) }
	fence, moves := int64(1), 0
	var log []spending
	for end := w.now() + 12*rate.Window.Microseconds(); w.now() < end || len(log) < 6 || moves == 0; {
		i, j := random.IntN(n), random.IntN(n)
		switch random.IntN(8) {
		case 0: // another process becomes leader
			fence++
		case 1: // the former leader calls too late
			parts[i].quota(fence, of(i), -1)
			require.True(w, parts[i].quota(fence-1, of(i), rate.PerWindow()).Fenced)
		case 2, 3: // moves quota from one partition to another
			if moveAtRandom(parts, of, fence, i, j, random) {
				moves++
			}
		default:
			if r := parts[i].admit("T", 1+random.IntN(12), of(i)); r.Moved > 0 {
				log = append(log, spending{r.AtUS, int64(r.Moved)})
				parts[i].read("T", "c")
			}
		}
		if random.IntN(4) == 0 {
			w.pass(time.Duration(random.Int64N(int64(rate.Window) / 8)))
		}
	}
	slices.SortFunc(log, func(a, b spending) int { return cmp.Compare(a.at, b.at) })
	w.holds(of(0), log)
}

// moveAtRandom takes permits from one partition and gives the unassigned ones to another partition,
// perhaps by the same call twice, or stops in between. It does nothing and returns false if an
// earlier change is not effective yet.
func moveAtRandom(parts []*world, of func(int) ledger.Limit, fence int64, from, to int, random *rand.Rand) bool {
	free, have := of(0).Permits, make([]int64, len(parts))
	for i, p := range parts {
		now := p.quota(fence, of(i), -1)
		if now.FromUS != 0 {
			return false // a change has not become effective yet
		}
		have[i] = now.Effective
		free -= now.Effective
	}
	require.GreaterOrEqual(parts[0], free, int64(0), "the parts of %v", have)
	less := random.Int64N(have[from] + 1)
	taken := parts[from].quota(fence, of(from), less)
	if random.IntN(4) == 0 || from == to {
		return true
	}
	terms := ledger.Increase{NotBeforeUS: taken.FromUS, AtOnce: random.Int64N(free + taken.Freed + 1)}
	all := have[to] + have[from] - less + free
	if of(0).Limiter == ledger.LimiterSliding { // the rest is free when it has fallen out of the span
		all = have[to] + terms.AtOnce
	}
	for range 1 + random.IntN(2) {
		parts[to].increase(fence, of(to), all, terms)
	}
	return true
}
