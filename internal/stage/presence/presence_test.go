package presence_test

import (
	"context"
	"fmt"
	"strings"
	"testing"
	"time"

	"github.com/redis/go-redis/v9"
	"github.com/stretchr/testify/require"
	"go.uber.org/goleak"

	"github.com/bulkaction/bulkaction/api"
	"github.com/bulkaction/bulkaction/internal/redisx/keyspace"
	"github.com/bulkaction/bulkaction/internal/stage/presence"
	"github.com/bulkaction/bulkaction/internal/testkit/redistest"
	"github.com/bulkaction/bulkaction/internal/testkit/stagetest"
)

func TestMain(m *testing.M) { goleak.VerifyTestMain(m, redistest.IgnoreServers()) }

func TestStatusOfDeadProcessesIsIgnored(t *testing.T) {
	stagetest.Both(t, func(w *stagetest.World) {
		ctx := context.WithoutCancel(w.T.Context())
		// report stores a heartbeat of this age by the clock of Redis. That clock decides, because
		// the clocks of hosts differ.
		report := func(id string, age time.Duration) {
			r := presence.WorkerReport{WorkerStatus: api.WorkerStatus{ID: id, Types: []string{"T"}, Workers: 3}}
			require.NoError(w.T, presence.PublishWorker(ctx, w.Conn, w.Space, r))
			shown, err := w.Conn.Cmd.HGet(ctx, w.Space.Workers(), id).Result()
			require.NoError(w.T, err)
			ms, text, _ := strings.Cut(shown, " ")
			at := time.UnixMilli(stagetest.Decode[int64](w.T, ms)).Add(-age)
			require.WithinDuration(w.T, time.Now().Add(-age), at, stagetest.Patience)
			require.NoError(w.T, w.Conn.Cmd.HSet(ctx, w.Space.Workers(), id, fmt.Sprintf("%d %s", at.UnixMilli(), text)).Err())
		}
		report("live", 0)
		report("silent", 2*presence.TTL)
		report("gone", time.Hour)
		require.NoError(w.T, w.Conn.Cmd.HSet(ctx, w.Space.Workers(), "unreadable", "{").Err())

		ids := func() (ids []string) {
			all, err := presence.Workers(ctx, w.Conn, w.Space)
			require.NoError(w.T, err)
			for _, r := range all {
				ids = append(ids, r.ID)
			}
			return ids
		}
		require.Equal(w.T, []string{"live"}, ids())
		kept, err := w.Conn.Cmd.HKeys(ctx, w.Space.Workers()).Result()
		require.NoError(w.T, err)
		require.ElementsMatch(w.T, []string{"live", "silent"}, kept)

		ended, cancel := context.WithCancel(ctx)
		cancel()
		presence.Withdraw(ended, w.Conn, w.Space, "live")
		require.Empty(w.T, ids())
	})
}

func TestReadyBound(t *testing.T) {
	w := stagetest.Parallel(t, 2)
	c := presence.NewCapacity(w.Conn, w.Space)
	require.Equal(t, presence.ReadyBound{Cap: 50}, c.ReadyBound("T", 50, 1000)) // before the first Refresh
	for id, rate := range map[string]float64{"a": 1000, "b": 3000} {
		require.NoError(t, presence.PublishWorker(t.Context(), w.Conn, w.Space, presence.WorkerReport{
			WorkerStatus:     api.WorkerStatus{ID: id, Types: []string{"T", "SLOW"}, Workers: 60, SeenAt: time.Now()},
			StartedPerSecond: map[string]float64{"T": rate}, RunMS: map[string]float64{"SLOW": 600},
		}))
	}
	require.NoError(t, c.Refresh(t.Context()))
	require.Equal(t, presence.ReadyBound{Cap: 200, Ahead: 200}, c.ReadyBound("T", 50, 1000)) // of 4,000 starts a second: a tenth, for one of two partitions
	require.Equal(t, presence.ReadyBound{Cap: 1, Ahead: 1}, c.ReadyBound("SLOW", 50, 1000))  // 120 slots need one job in 5 ms
	require.Equal(t, presence.ReadyBound{Cap: 50}, c.ReadyBound("NO_WORKER", 50, 1000))
	require.Equal(t, presence.ReadyBound{Cap: 100, Ahead: 100}, c.ReadyBound("T", 50, 100))
}

// TestReadyBoundOfOnePartition: for jobs of 20 ms, of 600 ms and of an unknown time, the bound has
// the slots of the workers that serve the type, and another Ahead. Three jobs that a worker holds
// that no longer serves their type are added to the slots.
func TestReadyBoundOfOnePartition(t *testing.T) {
	w := stagetest.Parallel(t, 1)
	c := presence.NewCapacity(w.Conn, w.Space)
	publish := func(id string, types ...string) {
		require.NoError(t, presence.PublishWorker(t.Context(), w.Conn, w.Space, presence.WorkerReport{
			WorkerStatus: api.WorkerStatus{ID: id, Types: types, Workers: 10, SeenAt: time.Now()},
			RunMS:        map[string]float64{"T": 20, "SLOW": 600},
		}))
		require.NoError(t, c.Refresh(t.Context()))
	}
	publish("a", "T", "SLOW", "NEW")
	publish("b", "T")
	require.Equal(t, presence.ReadyBound{Cap: 50, Slots: 20, Ahead: 5}, c.ReadyBound("T", 50, 1000))
	require.Equal(t, presence.ReadyBound{Cap: 50, Slots: 10}, c.ReadyBound("SLOW", 50, 1000))
	require.Equal(t, presence.ReadyBound{Cap: 50, Slots: 10, Ahead: 50}, c.ReadyBound("NEW", 50, 1000))

	key := w.P.Ready("T")
	require.NoError(t, w.Conn.Cmd.XGroupCreateMkStream(t.Context(), key, keyspace.GroupWorkers, "0").Err())
	for range 3 {
		require.NoError(t, w.Conn.Cmd.XAdd(t.Context(), &redis.XAddArgs{Stream: key, Values: []string{"j", ""}}).Err())
	}
	require.NoError(t, w.Conn.Cmd.XReadGroup(t.Context(), &redis.XReadGroupArgs{Group: keyspace.GroupWorkers, Consumer: "b", Streams: []string{key, ">"}}).Err())
	publish("b") // b stops, and serves no type any more
	require.Equal(t, presence.ReadyBound{Cap: 50, Slots: 13, Ahead: 2}, c.ReadyBound("T", 50, 1000))
}

// TestReadyBoundOfBatches: a slot counts as the jobs of one call, and one call more may be ready.
func TestReadyBoundOfBatches(t *testing.T) {
	w := stagetest.Parallel(t, 1)
	c := presence.NewCapacity(w.Conn, w.Space)
	for _, id := range []string{"a", "b"} {
		require.NoError(t, presence.PublishWorker(t.Context(), w.Conn, w.Space, presence.WorkerReport{
			WorkerStatus: api.WorkerStatus{ID: id, Types: []string{"T", "NEW"}, Workers: 2, SeenAt: time.Now()},
			RunMS:        map[string]float64{"T": 20}, BatchSizes: map[string]int{"T": 100, "NEW": 100},
		}))
	}
	require.NoError(t, c.Refresh(t.Context()))
	require.Equal(t, presence.ReadyBound{Cap: 400, Slots: 400, Ahead: 100}, c.ReadyBound("T", 50, 1000))
	require.Equal(t, presence.ReadyBound{Cap: 400, Slots: 400, Ahead: 400}, c.ReadyBound("NEW", 50, 1000))
}

// TestReadyBoundOfAGatedType: the ready stream holds at most as many jobs as there are permissions
// in a second, divided by the number of partitions, and at least one.
func TestReadyBoundOfAGatedType(t *testing.T) {
	t.Parallel()
	for _, partitions := range []int{1, 2} {
		url, prefix := redistest.Shared(t)
		w := stagetest.New(t, url, prefix, partitions)
		c := presence.NewCapacity(w.Conn, w.Space)
		for id, permissions := range map[string]float64{"a": 20, "b": 10} { // b has not yet seen new accounts
			require.NoError(t, presence.PublishWorker(t.Context(), w.Conn, w.Space, presence.WorkerReport{
				WorkerStatus:         api.WorkerStatus{ID: id, Types: []string{"MANY", "FEW", "OPEN"}, Workers: 10, SeenAt: time.Now()},
				PermissionsPerSecond: map[string]float64{"MANY": permissions, "FEW": 0.1},
			}))
		}
		require.NoError(t, c.Refresh(t.Context()))
		n := 20 / partitions
		require.Equal(t, presence.ReadyBound{Cap: n, Ahead: n}, c.ReadyBound("MANY", 50, 1000))
		require.Equal(t, presence.ReadyBound{Cap: 1, Ahead: 1}, c.ReadyBound("FEW", 50, 1000))
		require.Equal(t, 50, c.ReadyBound("OPEN", 50, 1000).Cap)
	}
}

func TestDelays(t *testing.T) {
	t.Parallel()
	var d presence.Delays
	_, ok := d.Quantile(0.5)
	require.False(t, ok)
	before := d
	for _, ms := range []int64{-5, 0, 1, 3, 1000, 1 << 40} {
		d.Add(time.Duration(ms) * time.Millisecond)
	}
	require.Equal(t, presence.Delays{0: 2, 1: 1, 2: 1, 10: 1, 23: 1}, d)
	require.Equal(t, d, d.Since(before))
	require.Equal(t, before, d.Since(d))
	require.Equal(t, before, before.Since(d), "another process")
	for q, want := range map[float64]float64{0.1: 0.3, 0.5: 2, 4.5 / 6: 768, 1: 1 << 23} {
		got, ok := d.Quantile(q)
		require.True(t, ok)
		require.InDelta(t, want, got, want/100, q)
	}
}
