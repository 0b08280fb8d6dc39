package ledger_test

import (
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/bulkaction/bulkaction/internal/jobs/ledger"
)

// The test cases of the original design document, with the fixed limiter and static shares.

func TestTenPassAndTheEleventhIsRefused(t *testing.T) {
	both(t, func(w *world) {
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
	both(t, func(w *world) {
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
	both(t, func(w *world) {
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
	both(t, func(w *world) {
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
	both(t, func(w *world) {
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
	both(t, func(w *world) {
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
