package ledger_test

import (
	"testing"

	"github.com/stretchr/testify/require"

	"github.com/bulkaction/bulkaction/api"
	"github.com/bulkaction/bulkaction/internal/jobs/ledger"
	"github.com/bulkaction/bulkaction/internal/redisx/keyspace"
)

func init() {
	for name, ordinal := range map[string]int64{
		"non-ready after an error": 2, "ready": 4, "marker": 5, "scheduled": 6, "waiting": 7,
	} {
		scenes = append(scenes, scene{"cancel a job: " + name, false, func(w *world) act {
			w.everywhere("g")
			w.seal("g")
			return w.cancelling("g", ordinal)
		}})
	}
	scenes = append(scenes, scene{"cancel a job: suspended", false, func(w *world) act {
		w.suspended("g", 1)
		return w.cancelling("g", 0)
	}})
}

func (w *world) cancelling(group string, ordinal int64) act {
	return func() error {
		_, err := ledger.CancelJob(w.Context(), w.c, w.p, group, ordinal)
		return err
	}
}

// TestCancelJob: CancelJob ends waiting, non-ready and ready jobs, and corrects the group's counts
// and the tenant's counters. It refuses the others. A second call changes nothing, and the group
// can end.
func TestCancelJob(t *testing.T) {
	onStores(t, func(w *world) {
		w.everywhere("g") // DFNIRNNW
		w.seal("g")
		for _, ordinal := range []int64{2, 4, 5, 6, 7} {
			require.NoError(w, w.cancelling("g", ordinal)(), "%d", ordinal)
			w.unchanged(func() { require.NoError(w, w.cancelling("g", ordinal)()) })
		}
		require.Equal(w, "DFCICCCC", w.states("g"))
		for ordinal, text := range map[int64]string{0: "has ended", 1: "has ended", 3: "in flight"} {
			w.unchanged(func() {
				err := w.cancelling("g", ordinal)()
				require.ErrorIs(w, err, api.ErrConflict)
				require.ErrorContains(w, err, text)
			})
		}
		require.ErrorIs(w, w.cancelling("g", 8)(), api.ErrNotFound)
		require.ErrorIs(w, w.cancelling("nosuch", 0)(), api.ErrNotFound)

		now := w.ledger("g")
		require.EqualValues(w, 5, now["cancelled"])
		for _, place := range []string{"waiting", "non_ready", "ready"} {
			require.Zero(w, now[place], place)
			require.Contains(w, []string{"", "0"}, w.c.HGet(w.Context(), w.p.Load("T"), place).Val(), place)
		}
		counters := w.countersOf("acme")
		require.Equal(w, "1", counters["unfinished"])
		for _, name := range []string{"active", "congested"} {
			require.Contains(w, []string{"", "0"}, counters[name], name)
		}
		require.False(w, w.c.SIsMember(w.Context(), w.p.Active(), "acme").Val())
		require.Zero(w, w.c.ZCard(w.Context(), w.p.NonReady()).Val())
		require.Zero(w, w.c.HLen(w.Context(), w.p.Payloads("g")).Val())
		require.Zero(w, w.c.LLen(w.Context(), w.p.Queue("g", "T")).Val())
		require.Equal(w, ledger.AdmitEmpty, w.admit("T", 10, noLimit).State)
	})
}

// TestCancelJobEndsTheGroup: a group whose last jobs are cancelled one by one is COMPLETED, also if
// they were of many, paused, or read by a worker that has not started them; and others still run.
func TestCancelJobEndsTheGroup(t *testing.T) {
	onStores(t, func(w *world) {
		w.fill("g", 5, "acme", "T")
		w.seal("g")
		require.NoError(w, w.cancelling("g", 3)())
		require.NoError(w, w.cancelling("g", 1)())
		w.admit("T", 1, noLimit)
		w.consumerGroup(w.p.Ready("T"), keyspace.GroupWorkers)
		read := w.take("T", "c", 1)
		require.ErrorContains(w, w.cancelling("g", 0)(), "in flight")
		w.start("T", read)
		w.outcome("T", other(ledger.OutcomeFailed, read[0], 0))
		w.pause(ledger.PauseGroup, "g")
		require.NoError(w, w.cancelling("g", 4)())
		w.resume(ledger.PauseGroup, "g")
		require.NoError(w, w.cancelling("g", 2)())
		require.Equal(w, "FCCCC", w.states("g"))
		require.Equal(w, []string{"g"}, w.c.SMembers(w.Context(), w.p.Dirty()).Val())
		w.advance("g")
		require.Equal(w, "COMPLETED", w.status("g"))

		_, err := w.reopen("g")
		require.NoError(w, err)
		for {
			more, err := ledger.Requeue(w.Context(), w.c, w.p, "g")
			require.NoError(w, err)
			if !more {
				break
			}
		}
		require.Equal(w, "WCCCC", w.states("g"))
		require.NoError(w, w.cancelling("g", 0)())
		w.advance("g")
		require.Equal(w, "COMPLETED", w.status("g"))
		require.EqualValues(w, 5, w.ledger("g")["cancelled"])
	})
}

// TestCancelSuspendedJob: a suspended job leaves its set, and the tenant the list of those with one.
func TestCancelSuspendedJob(t *testing.T) {
	onStores(t, func(w *world) {
		w.suspended("g", 2)
		require.NoError(w, w.cancelling("g", 0)())
		require.NoError(w, w.cancelling("g", 1)())
		require.Equal(w, "CC", w.states("g"))
		require.Empty(w, w.c.SMembers(w.Context(), w.p.Suspended()).Val())
	})
}
