package ledger_test

import (
	"fmt"
	"testing"
	"time"

	"github.com/redis/go-redis/v9"
	"github.com/stretchr/testify/require"

	"github.com/bulkaction/bulkaction/api"
	"github.com/bulkaction/bulkaction/internal/jobs/ledger"
)

func init() {
	// A scene must change data, and why changes nothing. So the scene also cancels the group.
	scenes = append(scenes, struct {
		name      string
		takesMore bool
		prepare   func(w *world) act
	}{"why, and a cancellation", false, func(w *world) act {
		w.create("g", "acme", "T")
		w.append("g", 2)
		return func() error {
			if _, err := ledger.Why(w.Context(), w.c, w.p, "g", 1, 10); err != nil {
				return err
			}
			return ledger.Cancel(w.Context(), w.c, w.p, "g")
		}
	}})
}

func (w *world) why(group string, ordinal int64) ledger.WaitingJob {
	w.Helper()
	l, err := ledger.Why(w.Context(), w.c, w.p, group, ordinal, 100)
	require.NoError(w, err)
	require.WithinDuration(w, time.Now(), l.Now, time.Minute)
	l.Now = time.Time{}
	return l
}

func TestWhy(t *testing.T) {
	both(t, func(w *world) {
		_, err := ledger.Why(w.Context(), w.c, w.p, "g", ledger.NextJob, 100)
		require.ErrorIs(w, err, api.ErrNotFound)
		w.create("small", "acme", "T")
		w.append("small", 4)
		w.create("g", "acme", "T")
		all := jobs(60)
		for i := 2; i < len(all); i += 3 {
			all[i].Type = "U"
		}
		w.appendJobs(ledger.AppendArgs{Group: "g", Jobs: all})
		_, err = ledger.Why(w.Context(), w.c, w.p, "g", 60, 100)
		require.ErrorIs(w, err, api.ErrNotFound)

		before := w.dump()
		look := ledger.WaitingJob{Tenant: "acme", Status: api.StatusCreated, Types: []string{"T", "U"}, Accepted: 60, State: ledger.Waiting}
		for ordinal := range int64(60) {
			want := look
			want.Ordinal, want.Type, want.Place, want.GroupsBefore, want.JobsBefore = ordinal, "T", ordinal-ordinal/3, 1, 4
			if ordinal%3 == 2 {
				want.Type, want.Place, want.GroupsBefore, want.JobsBefore = "U", ordinal/3, 0, 0
			}
			require.Equal(w, want, w.why("g", ordinal))
			require.Equal(w, want, w.why("g", ordinal), "it answers again")
		}
		want := look
		want.Type, want.GroupsBefore, want.JobsBefore = "T", 1, 4
		require.Equal(w, want, w.why("g", ledger.NextJob))
		require.Equal(w, before, w.dump(), "it changes nothing")

		// Six groups come before g, and Why may count the waiting jobs of 3 of them.
		for i := range 5 {
			group := fmt.Sprint("s", i)
			w.create(group, "acme", "T")
			w.append(group, 1)
		}
		few, err := ledger.Why(w.Context(), w.c, w.p, "g", 0, 3)
		require.NoError(w, err)
		require.EqualValues(w, 6, few.GroupsBefore)
		require.Less(w, few.JobsBefore, int64(4+5))
	})
}

func TestWhyTellsWhatStandsInTheWay(t *testing.T) {
	both(t, func(w *world) {
		w.create("g", "acme", "T")
		w.append("g", 3)
		require.Equal(w, ledger.WaitingJob{Tenant: "acme", Status: api.StatusCreated, Types: []string{"T"}, Type: "T", Accepted: 3, State: ledger.Waiting, Ordinal: 2, Place: 2}, w.why("g", 2))
		w.c.HSet(w.Context(), w.p.Group("g"), "paused", 1)
		w.c.HSet(w.Context(), w.p.Pauses(), "t:acme", 1, "y:T", 1)
		w.c.ZAdd(w.Context(), w.p.RateLimited("T"), redis.Z{Score: 1_700_000_000_000, Member: "acme"})
		w.c.ZAdd(w.Context(), w.p.Scheduled(), redis.Z{Score: 1_800_000_000_000, Member: "g"})
		l := w.why("g", 0)
		require.True(w, l.GroupPaused && l.TenantPaused && l.TypePaused)
		require.EqualValues(w, 1_700_000_000_000, l.RateLimitedUntil.UnixMilli())
		require.EqualValues(w, 1_800_000_000_000, l.HeldUntil.UnixMilli())
		w.c.HDel(w.Context(), w.p.Pauses(), "y:T")
		w.c.HSet(w.Context(), w.p.Pauses(), "t:other", 1, "y:U", 1)
		l = w.why("g", 0)
		require.True(w, l.GroupPaused && l.TenantPaused && !l.TypePaused)
	})
}

// TestWhyOutOfTheQueue: Why returns the state letter of a job that is not waiting, and the counts
// of a group without waiting jobs. Place is -1 where the search in the queue fails.
func TestWhyOutOfTheQueue(t *testing.T) {
	both(t, func(w *world) {
		w.create("g", "acme", "T")
		w.append("g", 2)
		w.admit("T", 2, noLimit)
		l := w.why("g", 1)
		require.Equal(w, ledger.Ready, l.State)
		require.Equal(w, "T", l.Type)
		l = w.why("g", ledger.NextJob)
		require.Zero(w, l.State)
		require.EqualValues(w, ledger.NextJob, l.Ordinal)
		require.EqualValues(w, 2, l.Ready)

		w.create("h", "acme", "T")
		w.append("h", 3)
		queue := w.p.Queue("h", "T") // a queue whose order does not fit, so that the search by bisection fails
		blobs := w.c.LRange(w.Context(), queue, 0, -1).Val()
		w.c.Del(w.Context(), queue)
		for _, blob := range blobs {
			w.c.LPush(w.Context(), queue, blob)
		}
		require.EqualValues(w, -1, w.why("h", 0).Place)
		require.EqualValues(w, 1, w.why("h", 1).Place)
		w.c.Del(w.Context(), queue)
		w.c.RPush(w.Context(), queue, "no job")
		require.EqualValues(w, -1, w.why("h", 0).Place)
		require.EqualValues(w, ledger.NextJob, w.why("h", ledger.NextJob).Ordinal)
	})
}
