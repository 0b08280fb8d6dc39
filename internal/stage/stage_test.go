package stage_test

import (
	"context"
	"errors"
	"fmt"
	"strings"
	"sync/atomic"
	"testing"
	"time"

	"github.com/redis/go-redis/v9"
	"github.com/stretchr/testify/require"
	"go.uber.org/goleak"

	"github.com/bulkaction/bulkaction/api"
	"github.com/bulkaction/bulkaction/internal/redistest"
	"github.com/bulkaction/bulkaction/internal/redisx/keyspace"
	"github.com/bulkaction/bulkaction/internal/stage"
	"github.com/bulkaction/bulkaction/internal/stagetest"
)

func TestMain(m *testing.M) { goleak.VerifyTestMain(m, redistest.IgnoreServers()) }

// loop runs a loop until the test is done with it.
type loop struct {
	stage.Loop
	step stage.Step
}

func (l loop) Run(ctx context.Context) error { return l.Loop.Run(ctx, l.step) }

func TestLoopIsWoken(t *testing.T) {
	stagetest.Both(t, func(w *stagetest.World) {
		steps := make(chan struct{})
		w.Run(loop{stage.Loop{Name: "l", Conn: w.Connect(), Wake: w.P.Wake("l"), Log: w.Tel.Log}, func(ctx context.Context) (time.Duration, error) {
			select {
			case steps <- struct{}{}:
			case <-ctx.Done():
			}
			return -1, nil
		}})
		<-steps
		began := time.Now()
		for range 10 {
			require.NoError(w.T, w.Conn.Cmd.LPush(context.WithoutCancel(w.T.Context()), w.P.Wake("l"), "1").Err())
			stagetest.Receive(w.T, steps, "a step")
		}
		require.Less(w.T, time.Since(began), 5*time.Second) // ten times the longest wait is ten seconds
		stagetest.Receive(w.T, steps, "a step without a token, after the longest wait")
	})
}

func TestLoopNeverSleepsWithWork(t *testing.T) {
	t.Parallel()
	w := stagetest.Shared(t)
	const n = 1000
	done := make(chan struct{})
	var steps atomic.Int64
	w.Run(loop{stage.Loop{Name: "l", Conn: w.Connect(), Log: w.Tel.Log}, func(context.Context) (time.Duration, error) {
		if steps.Add(1) == n {
			close(done)
			return -1, nil
		}
		return 0, nil
	}})
	stagetest.Receive(t, done, "all steps")
}

func TestLoopOutlivesErrors(t *testing.T) {
	t.Parallel()
	w := stagetest.Shared(t)
	worked := make(chan struct{})
	var steps atomic.Int64
	stop := w.Run(loop{stage.Loop{Name: "l", Conn: w.Connect(), Log: w.Tel.Log}, func(context.Context) (time.Duration, error) {
		if steps.Add(1) < 3 {
			return 0, errors.New("boom")
		}
		if steps.Load() == 3 {
			close(worked)
		}
		return -1, nil
	}})
	stagetest.Receive(t, worked, "a step that works")
	stop() // the end is no error
}

func TestGroup(t *testing.T) {
	t.Parallel()
	boom := errors.New("boom")
	err := stage.Group(t.Context(),
		func(ctx context.Context) error { <-ctx.Done(); return nil },
		func(context.Context) error { return boom },
	)
	require.ErrorIs(t, err, boom)
	require.NoError(t, stage.Group(t.Context(), func(context.Context) error { return nil }))
}

func TestCheckPartitions(t *testing.T) {
	stagetest.Both(t, func(w *stagetest.World) {
		ctx := context.WithoutCancel(w.T.Context())
		four, err := keyspace.New("layout:", 4)
		require.NoError(w.T, err)
		eight, err := keyspace.New("layout:", 8)
		require.NoError(w.T, err)
		require.NoError(w.T, w.Conn.Cmd.Del(ctx, four.PartitionCount()).Err())
		require.NoError(w.T, stage.CheckPartitions(ctx, w.Conn, four))
		require.NoError(w.T, stage.CheckPartitions(ctx, w.Conn, four))
		err = stage.CheckPartitions(ctx, w.Conn, eight)
		require.ErrorContains(w.T, err, "BULKACTION_PARTITIONS is 8, but the data in Redis is laid out in 4 partitions")
		require.NoError(w.T, w.Conn.Cmd.Del(ctx, four.PartitionCount()).Err())
	})
}

func TestStatus(t *testing.T) {
	stagetest.Both(t, func(w *stagetest.World) {
		ctx := context.WithoutCancel(w.T.Context())
		// By Redis's clock: those of hosts differ.
		report := func(id string, age time.Duration) {
			r := stage.WorkerReport{WorkerStatus: api.WorkerStatus{ID: id, Types: []string{"T"}, Workers: 3}}
			require.NoError(w.T, stage.PublishWorker(ctx, w.Conn, w.Space, r))
			shown, err := w.Conn.Cmd.HGet(ctx, w.Space.Workers(), id).Result()
			require.NoError(w.T, err)
			ms, text, _ := strings.Cut(shown, " ")
			at := time.UnixMilli(stagetest.Decode[int64](w.T, ms)).Add(-age)
			require.WithinDuration(w.T, time.Now().Add(-age), at, stagetest.Patience)
			require.NoError(w.T, w.Conn.Cmd.HSet(ctx, w.Space.Workers(), id, fmt.Sprintf("%d %s", at.UnixMilli(), text)).Err())
		}
		report("live", 0)
		report("silent", 2*stage.StatusTTL)
		report("gone", time.Hour)
		require.NoError(w.T, w.Conn.Cmd.HSet(ctx, w.Space.Workers(), "rubbish", "{").Err())

		ids := func() (ids []string) {
			all, err := stage.Workers(ctx, w.Conn, w.Space)
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
		stage.Withdraw(ended, w.Conn, w.Space, "live")
		require.Empty(w.T, ids())
	})
}

func TestCapacity(t *testing.T) {
	t.Parallel()
	url, prefix := redistest.Shared(t)
	w := stagetest.New(t, url, prefix, 2)
	c := stage.NewCapacity(w.Conn, w.Space)
	require.Equal(t, stage.Room{Cap: 50}, c.Room("T", 50, 1000)) // before anything is known
	for id, rate := range map[string]float64{"a": 1000, "b": 3000} {
		require.NoError(t, stage.PublishWorker(t.Context(), w.Conn, w.Space, stage.WorkerReport{
			WorkerStatus:     api.WorkerStatus{ID: id, Types: []string{"T", "SLOW"}, Workers: 60, SeenAt: time.Now()},
			StartedPerSecond: map[string]float64{"T": rate}, RunMS: map[string]float64{"SLOW": 600},
		}))
	}
	require.NoError(t, c.Refresh(t.Context()))
	require.Equal(t, stage.Room{Cap: 200, Ahead: 200}, c.Room("T", 50, 1000)) // a tenth of a second's 4,000, for one of two partitions
	require.Equal(t, stage.Room{Cap: 1, Ahead: 1}, c.Room("SLOW", 50, 1000))  // 120 workers need one in 5 ms
	require.Equal(t, stage.Room{Cap: 50}, c.Room("NOBODY", 50, 1000))
	require.Equal(t, stage.Room{Cap: 100, Ahead: 100}, c.Room("T", 50, 100))
}

// With one partition the room counts what runs, so that slow jobs are handed out one by one as workers become free. What a worker
// that has gone still holds takes nobody's place.
func TestCapacityOfOnePartition(t *testing.T) {
	t.Parallel()
	url, prefix := redistest.Shared(t)
	w := stagetest.New(t, url, prefix, 1)
	c := stage.NewCapacity(w.Conn, w.Space)
	publish := func(id string, types ...string) {
		require.NoError(t, stage.PublishWorker(t.Context(), w.Conn, w.Space, stage.WorkerReport{
			WorkerStatus: api.WorkerStatus{ID: id, Types: types, Workers: 10, SeenAt: time.Now()},
			RunMS:        map[string]float64{"T": 20, "SLOW": 600},
		}))
		require.NoError(t, c.Refresh(t.Context()))
	}
	publish("a", "T", "SLOW", "NEW")
	publish("b", "T")
	require.Equal(t, stage.Room{Cap: 50, Slots: 20, Ahead: 5}, c.Room("T", 50, 1000))
	require.Equal(t, stage.Room{Cap: 50, Slots: 10}, c.Room("SLOW", 50, 1000))
	require.Equal(t, stage.Room{Cap: 50, Slots: 10, Ahead: 50}, c.Room("NEW", 50, 1000))

	key := w.P.Ready("T")
	require.NoError(t, w.Conn.Cmd.XGroupCreateMkStream(t.Context(), key, keyspace.GroupWorkers, "0").Err())
	for range 3 {
		require.NoError(t, w.Conn.Cmd.XAdd(t.Context(), &redis.XAddArgs{Stream: key, Values: []string{"j", ""}}).Err())
	}
	require.NoError(t, w.Conn.Cmd.XReadGroup(t.Context(), &redis.XReadGroupArgs{Group: keyspace.GroupWorkers, Consumer: "b", Streams: []string{key, ">"}}).Err())
	publish("b") // it shuts down
	require.Equal(t, stage.Room{Cap: 50, Slots: 13, Ahead: 2}, c.Room("T", 50, 1000))
}
