package ledger_test

import (
	"fmt"
	"testing"
	"time"

	"github.com/redis/go-redis/v9"
	"github.com/stretchr/testify/require"

	"github.com/bulkaction/bulkaction/internal/jobs/ledger"
)

func TestFindNonReady(t *testing.T) {
	both(t, func(w *world) {
		find := func(group string, ordinal int64) (ledger.NonReadyJob, bool) {
			j, found, err := ledger.FindNonReady(w.Context(), w.c, w.p, "acme", group, ordinal)
			require.NoError(w, err)
			return j, found
		}
		_, found := find("g", ledger.NextJob)
		require.False(w, found)

		at := time.UnixMilli(1_700_000_000_000)
		add := func(key, group, typ, reason string, ordinal int, due time.Time) {
			blob := fmt.Sprintf("%s|%s|1|0|0|0|0|0|0|1|%s|%d|1||{}", group, typ, reason, ordinal)
			require.NoError(w, w.c.ZAdd(w.Context(), key, redis.Z{Score: float64(due.UnixMilli()), Member: blob}).Err())
		}
		key := w.p.NonReadyOf("acme")
		for i := range 2500 { // some pages of other jobs
			add(key, "other", "T", "E", i, at)
		}
		w.c.ZAdd(w.Context(), key, redis.Z{Score: 1, Member: "g|junk"})
		add(key, "g", "T", "E", 7, at.Add(2*time.Second))
		add(key, "g", "U", "S", 12, at.Add(time.Second))
		add(key, "g", "T", "", 1, at.Add(3*time.Second)) // 12 and 7|1 contain its number
		add(w.p.SuspendedOf("acme"), "g", "T", "P", 3, at)
		for _, want := range []ledger.NonReadyJob{
			{Ordinal: 7, Type: "T", Due: at.Add(2 * time.Second), Reason: ledger.ReasonError},
			{Ordinal: 12, Type: "U", Due: at.Add(time.Second), Reason: ledger.ReasonScheduled},
			{Ordinal: 1, Type: "T", Due: at.Add(3 * time.Second)},
			{Ordinal: 3, Type: "T", Due: at, Reason: ledger.ReasonPaused},
		} {
			got, found := find("g", want.Ordinal)
			require.True(w, found)
			require.Equal(w, want, got)
		}
		first, found := find("g", ledger.NextJob)
		require.True(w, found)
		require.EqualValues(w, 3, first.Ordinal)
		_, found = find("g", 2)
		require.False(w, found)

		for due, want := range map[time.Duration]int64{0: 1, time.Millisecond: 2501, time.Second: 2501, 3 * time.Second: 2503, time.Hour: 2504} {
			n, err := ledger.DueBefore(w.Context(), w.c, w.p, "acme", at.Add(due))
			require.NoError(w, err)
			require.Equal(w, want, n, "%v", due)
		}
	})
}

func TestFindReady(t *testing.T) {
	both(t, func(w *world) {
		find := func(group string, ordinal int64) (ledger.ReadyJob, bool) {
			j, found, err := ledger.FindReady(w.Context(), w.c, w.p, []string{"T", "U"}, group, ordinal)
			require.NoError(w, err)
			return j, found
		}
		_, found := find("g", 0)
		require.False(w, found)
		w.backlog("f", "U", 600) // more than one page
		w.backlog("g", "U", 4)
		for range 4 {
			w.admit("U", 200, noLimit)
		}
		require.EqualValues(w, 604, w.c.XLen(w.Context(), w.p.Ready("U")).Val())
		before := map[int64]int64{}
		for i := range int64(4) {
			j, found := find("g", i)
			require.True(w, found)
			require.Equal(w, ledger.ReadyJob{Ordinal: i, Type: "U", Before: j.Before}, j, "no worker has served the type yet")
			before[i] = j.Before
		}
		first, found := find("g", ledger.NextJob)
		require.True(w, found)
		require.EqualValues(w, 0, first.Ordinal)
		require.Equal(w, before[0], first.Before)
		_, found = find("g", 4)
		require.False(w, found)

		read := w.readSome("U", "c", before[0]+1)
		j, found := find("g", 1)
		require.True(w, found)
		require.Equal(w, before[1]-before[0]-1, j.Before, "entries that a worker has read are not before it")
		w.start("U", read) // with job 0 of g
		first, found = find("g", ledger.NextJob)
		require.True(w, found)
		require.EqualValues(w, 1, first.Ordinal, "job 0 is in flight")
		j, found = find("g", 0)
		require.True(w, found)
		require.Zero(w, j.Before)
	})
}
