package presence_test

import (
	"testing"
	"time"

	"github.com/redis/go-redis/v9"
	"github.com/stretchr/testify/require"

	"github.com/bulkaction/bulkaction/api"
	"github.com/bulkaction/bulkaction/internal/presence"
	"github.com/bulkaction/bulkaction/internal/redisx/keyspace"
	"github.com/bulkaction/bulkaction/internal/testkit/redistest"
	"github.com/bulkaction/bulkaction/internal/testkit/stagetest"
)

func TestReadyBound(t *testing.T) {
	t.Parallel()
	url, prefix := redistest.Shared(t)
	w := stagetest.New(t, url, prefix, 2)
	c := presence.NewCapacity(w.Conn, w.Space)
	require.Equal(t, presence.ReadyBound{Cap: 50}, c.ReadyBound("T", 50, 1000)) // before anything is known
	for id, rate := range map[string]float64{"a": 1000, "b": 3000} {
		require.NoError(t, presence.PublishWorker(t.Context(), w.Conn, w.Space, presence.WorkerReport{
			WorkerStatus:     api.WorkerStatus{ID: id, Types: []string{"T", "SLOW"}, Workers: 60, SeenAt: time.Now()},
			StartedPerSecond: map[string]float64{"T": rate}, RunMS: map[string]float64{"SLOW": 600},
		}))
	}
	require.NoError(t, c.Refresh(t.Context()))
	require.Equal(t, presence.ReadyBound{Cap: 200, Ahead: 200}, c.ReadyBound("T", 50, 1000)) // a tenth of a second's 4,000, for one of two partitions
	require.Equal(t, presence.ReadyBound{Cap: 1, Ahead: 1}, c.ReadyBound("SLOW", 50, 1000))  // 120 workers need one in 5 ms
	require.Equal(t, presence.ReadyBound{Cap: 50}, c.ReadyBound("NOBODY", 50, 1000))
	require.Equal(t, presence.ReadyBound{Cap: 100, Ahead: 100}, c.ReadyBound("T", 50, 100))
}

// With one partition the room counts what runs, so that slow jobs are handed out one by one as
// workers become free. What a worker that has gone still holds takes nobody's place.
func TestReadyBoundOfOnePartition(t *testing.T) {
	t.Parallel()
	url, prefix := redistest.Shared(t)
	w := stagetest.New(t, url, prefix, 1)
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
	publish("b") // it shuts down
	require.Equal(t, presence.ReadyBound{Cap: 50, Slots: 13, Ahead: 2}, c.ReadyBound("T", 50, 1000))
}
