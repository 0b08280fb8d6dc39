package ledger_test

import (
	"fmt"
	"testing"
	"time"

	"github.com/redis/go-redis/v9"
	"github.com/stretchr/testify/require"

	"github.com/bulkaction/bulkaction/internal/jobs/ledger"
)

func (w *world) schedule(most int) (int, time.Duration) {
	w.Helper()
	n, next, err := ledger.Schedule(w.Context(), w.c, w.p, most)
	require.NoError(w, err)
	return n, next
}

func TestSchedule(t *testing.T) {
	both(t, func(w *world) {
		n, next := w.schedule(10)
		require.Zero(w, n)
		require.Negative(w, next, "nothing is held")

		// A busy machine may need long until the groups are created and have their jobs.
		soon := time.Now().Add(2 * time.Second).Truncate(time.Millisecond)
		w.create("g", "acme", "T", "run_at", timestamp(soon))
		w.appendJobs(ledger.AppendArgs{Group: "g", Jobs: append(jobs(2), ledger.NewJob{Type: "U", Payload: []byte("1")})})
		w.create("h", "acme", "T", "run_at", timestamp(soon.Add(time.Hour)))
		w.append("h", 1)
		w.eventually(func() bool {
			n, next = w.schedule(10)
			return n == 1
		})
		require.False(w, time.Now().Before(soon), "not before its time")
		require.InDelta(w, time.Hour, next, float64(time.Minute))
		require.Equal(w, "3", w.c.HGet(w.Context(), w.p.Tenant("acme"), "active").Val())
		w.unchanged(func() {
			n, _ := w.schedule(10)
			require.Zero(w, n, "it is not held any more")
		})

		w.append("g", 1)
		require.Equal(w, "4", w.c.HGet(w.Context(), w.p.Tenant("acme"), "active").Val())
		require.Equal(w, 3, w.admit("T", 10, noLimit).Moved)
		require.Equal(w, 1, w.admit("U", 10, noLimit).Moved)
		require.Equal(w, map[string]int64{"ready": 4}, w.ledger("g"))
		require.Equal(w, map[string]int64{"waiting": 1}, w.ledger("h"))
	})
}

// TestScheduleAfterALateAppend: jobs that are appended between a group's run_at and the call of
// Schedule that releases it count once in the tenant's counter active.
func TestScheduleAfterALateAppend(t *testing.T) {
	both(t, func(w *world) {
		w.hold("g", 2)
		w.c.HSet(w.Context(), w.p.Group("g"), "run_at", timestamp(time.Now().Add(-time.Minute)))
		w.append("g", 1)
		require.Zero(w, w.c.Exists(w.Context(), w.p.Active()).Val())
		n, _ := w.schedule(10)
		require.Equal(w, 1, n)
		require.Equal(w, "3", w.c.HGet(w.Context(), w.p.Tenant("acme"), "active").Val())
	})
}

func TestScheduleTakesAFewAtATime(t *testing.T) {
	both(t, func(w *world) {
		for i := range 5 {
			w.hold(fmt.Sprint("g", i), 1)
		}
		for _, want := range []int{2, 2, 1, 0} {
			n, _ := w.schedule(2)
			require.Equal(w, want, n)
		}
		require.Equal(w, 5, w.admit("T", 10, noLimit).Moved)
	})
}

// TestScheduleGroupsThatEnded: Schedule removes a cancelled and an unknown group from the schedule.
// No tenant becomes active, and no job can be admitted.
func TestScheduleGroupsThatEnded(t *testing.T) {
	both(t, func(w *world) {
		w.hold("g", 1)
		w.cancel("g")
		w.c.ZAdd(w.Context(), w.p.Scheduled(), redis.Z{Score: 1, Member: "g"}, redis.Z{Score: 1, Member: "gone"}) // a state that a torn script may leave
		n, next := w.schedule(10)
		require.Equal(w, 2, n)
		require.Negative(w, next)
		require.Equal(w, ledger.AdmitEmpty, w.admit("T", 10, noLimit).State)
		require.Zero(w, w.c.Exists(w.Context(), w.p.Active(), w.p.Scheduled()).Val())
	})
}
