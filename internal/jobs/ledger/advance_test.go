package ledger_test

import (
	"fmt"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/bulkaction/bulkaction/internal/jobs/ledger"
)

func TestAdvance(t *testing.T) {
	both(t, func(w *world) {
		w.create("g", "acme", "T")
		w.append("g", 2)
		step := func(n int, status string) {
			w.Helper()
			require.Equal(w, n, w.advance("g"))
			require.Equal(w, status, w.status("g"))
			require.NotContains(w, w.c.SMembers(w.Context(), w.p.Dirty()).Val(), "g")
			w.unchanged(func() { require.Zero(w, w.advance("g")) })
		}
		step(0, "CREATED") // more jobs may come
		w.seal("g")
		step(1, "DISPATCHED")
		run := w.begin("T", "c", 2)
		step(1, "RUNNING")
		w.outcome("T", done(run[0]))
		step(0, "RUNNING")
		w.outcome("T", other(ledger.OutcomeRetry, run[1], 0))
		w.promoteAll("T", 1)
		again := w.read("T", "c")
		w.start("T", again)
		w.outcome("T", done(again...))
		step(1, "AGGREGATING")
		w.reduceInto("0", w.readResults(1)[0])
		step(0, "AGGREGATING") // one result is missing
		require.Equal(w, []string{"g"}, w.c.ZRange(w.Context(), w.p.Open(), 0, -1).Val())
		w.reduceInto("1", w.readResults(1)[0])
		step(1, "COMPLETED")

		require.Equal(w, []event{{"g", "CREATED", 1}, {"g", "DISPATCHED", 1}, {"g", "RUNNING", 1}, {"g", "AGGREGATING", 1}, {"g", "COMPLETED", 1}}, w.events())
		at := int64(0)
		for _, state := range []string{"created", "dispatched", "running", "aggregating", "completed"} {
			next := number(w.c.HGet(w.Context(), w.p.Group("g"), "at:"+state).Val())
			require.GreaterOrEqual(w, next, at, state)
			at = next
		}
		require.Zero(w, w.c.Exists(w.Context(), w.p.Open()).Val())
		require.Equal(w, float64(at), w.c.ZScore(w.Context(), w.p.Ended(), "g").Val())
		require.Equal(w, map[string]string{"unfinished": "0", "ended": "2"}, w.countersOf("acme"), "the tenant's congestion starts afresh")
		require.Zero(w, w.advance("nobody"))
	})
}

// countersOf returns a tenant's hash without its start tag in the lane normal of type T, and
// without the fields that hold times.
func (w *world) countersOf(tenant string) map[string]string {
	w.Helper()
	h := w.c.HGetAll(w.Context(), w.p.Tenant(tenant)).Val()
	for _, field := range []string{"tag:T:normal", "pace", "rs", "rd"} {
		delete(h, field)
	}
	return h
}

// TestAdvanceAGroupWithoutJobs: one call of Advance moves a sealed group without jobs from CREATED
// to COMPLETED, with an event for each state.
func TestAdvanceAGroupWithoutJobs(t *testing.T) {
	both(t, func(w *world) {
		w.create("g", "acme", "T")
		w.seal("g")
		require.Equal(w, 4, w.advance("g"))
		require.Equal(w, []event{{"g", "CREATED", 1}, {"g", "DISPATCHED", 1}, {"g", "RUNNING", 1}, {"g", "AGGREGATING", 1}, {"g", "COMPLETED", 1}}, w.events())
	})
}

func TestAdvanceByThreshold(t *testing.T) {
	both(t, func(w *world) {
		for i, c := range []struct {
			threshold    string
			jobs, failed int
			want         string
		}{
			{"", 3, 0, "COMPLETED"}, {"", 3, 2, "COMPLETED"}, {"", 3, 3, "FAILED"},
			{"0.5", 4, 1, "COMPLETED"}, {"0.5", 4, 2, "FAILED"}, {"0.01", 3, 0, "COMPLETED"}, {"0.01", 3, 1, "FAILED"},
			{"0.1", 30, 3, "FAILED"}, {"0.1", 30, 2, "COMPLETED"}, {"0.3", 10, 3, "FAILED"}, {"0.07", 100, 7, "FAILED"}, {"0.29", 100, 29, "FAILED"},
		} {
			g := fmt.Sprint("g", i)
			if c.threshold == "" {
				w.create(g, "acme", "T")
			} else {
				w.create(g, "acme", "T", "failure_threshold", c.threshold)
			}
			w.append(g, c.jobs)
			w.seal(g)
			run := w.begin("T", "c", c.jobs)
			for _, j := range run[:c.failed] {
				w.outcome("T", other(ledger.OutcomeFailed, j, 0))
			}
			w.outcome("T", done(run[c.failed:]...))
			w.reduceAll()
			require.Equal(w, 4, w.advance(g))
			require.Equal(w, c.want, w.status(g), "%+v", c)
		}
	})
}

// TestAdvanceKeepsABusyTenant: when a group without jobs ends, its tenant stays active, because two
// jobs of another group of the tenant are waiting.
func TestAdvanceKeepsABusyTenant(t *testing.T) {
	both(t, func(w *world) {
		w.create("other", "acme", "U")
		w.append("other", 2)
		w.create("g", "acme", "T")
		w.seal("g")
		w.advance("g")
		require.Equal(w, []string{"acme"}, w.c.SMembers(w.Context(), w.p.Active()).Val())
		require.Equal(w, map[string]string{"active": "2", "unfinished": "2"}, w.countersOf("acme"))
	})
}

// TestAdvanceBesideAnUnsweptGroup: a group of tenant acme ends while a cancelled group of acme is
// only partly swept. The rest of the sweep deletes acme's counters active and congested; the next
// job that is appended makes acme active again.
func TestAdvanceBesideAnUnsweptGroup(t *testing.T) {
	both(t, func(w *world) {
		w.everywhere("g")
		w.cancel("g")
		require.NoError(w, w.sweeping("g")()) // its states, not its non-ready jobs
		w.create("other", "acme", "T")
		w.seal("other")
		w.advance("other")
		w.sweep("g")
		require.Equal(w, map[string]string{"n": "1000", "unfinished": "0", "w": "0", "ended": "2"}, w.countersOf("acme"), "its congestion starts afresh")
		w.create("next", "acme", "T")
		w.append("next", 1)
		require.Equal(w, []string{"acme"}, w.c.SMembers(w.Context(), w.p.Active()).Val())
	})
}

func TestAdvanceFenced(t *testing.T) {
	both(t, func(w *world) {
		w.create("g", "acme", "T")
		w.seal("g")
		advance := func(fence int64) error {
			_, err := ledger.Advance(w.Context(), w.c, w.p, "g", fence)
			return err
		}
		w.unchanged(func() { require.ErrorIs(w, advance(0), ledger.ErrFenced, "nobody leads") })
		old := w.fence()
		require.NoError(w, w.c.HSet(w.Context(), w.p.Watch(), "until", 1).Err()) // its leader lease has ended
		fence, err := ledger.Lead(w.Context(), w.c, w.p, "w2", time.Minute)
		require.NoError(w, err)
		w.unchanged(func() {
			require.ErrorIs(w, advance(old), ledger.ErrFenced)
			require.ErrorIs(w, ledger.Expire(w.Context(), w.c, w.p, "g", old, false), ledger.ErrFenced)
		})
		require.NoError(w, advance(fence))
		require.Equal(w, "COMPLETED", w.status("g"))
	})
}
