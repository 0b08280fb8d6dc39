package stage_test

import (
	"context"
	"errors"
	"sync/atomic"
	"testing"
	"time"

	"github.com/stretchr/testify/require"
	"go.uber.org/goleak"

	"github.com/bulkaction/bulkaction/internal/redisx/keyspace"
	"github.com/bulkaction/bulkaction/internal/stage"
	"github.com/bulkaction/bulkaction/internal/testkit/redistest"
	"github.com/bulkaction/bulkaction/internal/testkit/stagetest"
)

func TestMain(m *testing.M) { goleak.VerifyTestMain(m, redistest.IgnoreServers()) }

// testLoop is a loop and its step, which a test can run like a role.
type testLoop struct {
	stage.Loop
	step stage.Step
}

func (l testLoop) Run(ctx context.Context) error { return l.Loop.Run(ctx, l.step) }

func TestLoopIsWoken(t *testing.T) {
	stagetest.Both(t, func(w *stagetest.World) {
		steps := make(chan struct{})
		w.Run(testLoop{stage.Loop{Name: "l", Conn: w.Connect(), Wake: w.P.Wake("l"), Log: w.Tel.Log}, func(ctx context.Context) (time.Duration, error) {
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
		require.Less(w.T, time.Since(began), 5*time.Second) // ten waits without tokens would take ten seconds
		stagetest.Receive(w.T, steps, "a step without a token, after the longest wait")
	})
}

func TestLoopNeverSleepsWithWork(t *testing.T) {
	t.Parallel()
	w := stagetest.Shared(t)
	const n = 1000
	done := make(chan struct{})
	var steps atomic.Int64
	w.Run(testLoop{stage.Loop{Name: "l", Conn: w.Connect(), Log: w.Tel.Log}, func(context.Context) (time.Duration, error) {
		if steps.Add(1) == n {
			close(done)
			return -1, nil
		}
		return 0, nil
	}})
	stagetest.Receive(t, done, "all steps")
}

func TestLoopGoesOnAfterErrors(t *testing.T) {
	t.Parallel()
	w := stagetest.Shared(t)
	worked := make(chan struct{})
	var steps atomic.Int64
	stop := w.Run(testLoop{stage.Loop{Name: "l", Conn: w.Connect(), Log: w.Tel.Log}, func(context.Context) (time.Duration, error) {
		if steps.Add(1) < 3 {
			return 0, errors.New("boom")
		}
		if steps.Load() == 3 {
			close(worked)
		}
		return -1, nil
	}})
	stagetest.Receive(t, worked, "a step that works")
	stop() // fails the test if Run returns an error
}

func TestRunAllEndsWithTheFirstError(t *testing.T) {
	t.Parallel()
	boom := errors.New("boom")
	err := stage.RunAll(t.Context(),
		func(ctx context.Context) error { <-ctx.Done(); return nil },
		func(context.Context) error { return boom },
	)
	require.ErrorIs(t, err, boom)
	require.NoError(t, stage.RunAll(t.Context(), func(context.Context) error { return nil }))
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
