package groups_test

import (
	"fmt"
	"strings"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/bulkaction/bulkaction/api"
	"github.com/bulkaction/bulkaction/internal/jobs/groups"
	"github.com/bulkaction/bulkaction/internal/jobs/groups/backpressure"
	"github.com/bulkaction/bulkaction/internal/messages"
	"github.com/bulkaction/bulkaction/internal/stage/presence"
	"github.com/bulkaction/bulkaction/internal/testkit/redistest"
	"github.com/bulkaction/bulkaction/internal/testkit/stagetest"
)

func TestBacklogIsBounded(t *testing.T) {
	t.Parallel()
	url, prefix := redistest.Shared(t)
	w := stagetest.New(t, url, prefix, 3)
	w.Store = w.NewStore(groups.Config{MaxBacklog: 10})
	submit := func(id string, n int) error {
		ctx, request := backpressure.WithRequest(stagetest.Trusted(t), id, true)
		defer request.End()
		_, err := w.Store.Submit(ctx, &messages.SubmitGroup{ID: id, Type: "T", Jobs: stagetest.Numbered(n)}, now)
		return err
	}
	require.NoError(t, submit("a", 4))
	require.NoError(t, submit("b", 4)) // by the same view of the backlog
	var full *api.BackpressureError
	require.ErrorAs(t, submit("c", 4), &full)
	require.Equal(t, 10*time.Second, full.RetryAfter) // no worker has reported that it starts jobs
	require.NoError(t, submit("c", 2))
	require.ErrorAs(t, w.Store.Append(stagetest.Trusted(t), "c", stagetest.Numbered(1), "r", now), &full)
	require.ErrorIs(t, submit("d", 11), api.ErrInvalid) // more than the backlog may ever have

	// The Retry-After is the time in which workers start the jobs above the limit, plus a margin,
	// in whole seconds.
	require.NoError(t, presence.PublishWorker(stagetest.Trusted(t), w.Conn, w.Space, presence.WorkerReport{
		WorkerStatus: api.WorkerStatus{ID: "w", Types: []string{"T"}}, StartedPerSecond: map[string]float64{"T": 2}}))
	w.Await("a view with the worker's report", func() bool {
		require.ErrorAs(t, submit("d", 6), &full)
		return full.RetryAfter == 5*time.Second
	})
	w.Admit("T") // ready jobs are still in the backlog
	<-time.After(300 * time.Millisecond)
	require.ErrorAs(t, submit("d", 1), &full)

	// Jobs in flight are not in the backlog.
	for _, p := range w.Space.All() {
		w.P = p
		n, err := w.Conn.Cmd.XLen(stagetest.Trusted(t), p.Ready("T")).Result()
		require.NoError(t, err)
		w.Take("T", "c", int(n))
	}
	w.Await("an empty backlog", func() bool { return submit("d", 10) == nil })
}

func TestMemoryIsBounded(t *testing.T) {
	t.Parallel()
	const memory, piece = 64 << 20, 1 << 20
	server := redistest.Server(t, redistest.MaxMemory(memory), redistest.Args("--maxmemory-policy", "noeviction"))
	w := stagetest.New(t, server.URL(), "t:", 1)
	w.Store = w.NewStore(groups.Config{MaxMemoryRatio: 0.5})
	submitted := 0
	submit := func(s *groups.Store) error {
		submitted++
		_, err := s.Submit(stagetest.Trusted(t), &messages.SubmitGroup{ID: fmt.Sprint("g", submitted), Type: "T", Jobs: stagetest.Numbered(1)}, now)
		return err
	}
	require.NoError(t, submit(w.Store))
	for i := range memory / 2 / piece {
		require.NoError(t, w.Conn.Cmd.Set(stagetest.Trusted(t), fmt.Sprint("ballast", i), strings.Repeat("x", piece), 0).Err())
	}
	var full *api.BackpressureError
	w.Await("full memory", func() bool { return submit(w.Store) != nil })
	require.ErrorAs(t, submit(w.Store), &full)
	require.Contains(t, full.Reason, "up to 50%")

	// A store without a limit of memory use returns a BackpressureError when Redis is out of
	// memory.
	blind := w.NewStore(groups.Config{})
	var err error
	w.Await("Redis to be full", func() bool {
		for size := piece; size > 16; size /= 4 {
			for i := 0; w.Conn.Cmd.Set(stagetest.Trusted(t), fmt.Sprint("ballast-", size, "-", i), strings.Repeat("x", size), 0).Err() == nil; i++ {
			}
		}
		err = submit(blind)
		return err != nil
	})
	require.ErrorAs(t, err, &full)
	require.Equal(t, "Redis is out of memory", full.Reason)
	refused := fmt.Sprint("g", submitted)

	keys, err := w.Conn.Cmd.Keys(stagetest.Trusted(t), "ballast*").Result()
	require.NoError(t, err)
	require.NoError(t, w.Conn.Cmd.Del(stagetest.Trusted(t), keys...).Err())
	w.Await("free memory", func() bool { return submit(w.Store) == nil })
	// The submission that failed because Redis was out of memory succeeds when it is repeated.
	_, err = w.Store.Submit(stagetest.Trusted(t), &messages.SubmitGroup{ID: refused, Type: "T", Jobs: stagetest.Numbered(1)}, now)
	require.NoError(t, err)
	require.Equal(t, api.Counts{Accepted: 1, Waiting: 1}, w.Counts(refused))
}
