package watcher_test

import (
	"context"
	"slices"
	"testing"
	"time"

	"github.com/redis/go-redis/v9"
	"github.com/stretchr/testify/require"

	"github.com/bulkaction/bulkaction/internal/jobs/watcher"
	"github.com/bulkaction/bulkaction/internal/messages"
	"github.com/bulkaction/bulkaction/internal/redisx/wm"
	"github.com/bulkaction/bulkaction/internal/stage"
	"github.com/bulkaction/bulkaction/internal/testkit/stagetest"
)

// afterReading is a hook of the Redis client. It calls stop after a pipeline with HGETALL was
// answered.
type afterReading struct{ stop func() }

func (afterReading) DialHook(next redis.DialHook) redis.DialHook          { return next }
func (afterReading) ProcessHook(next redis.ProcessHook) redis.ProcessHook { return next }
func (h afterReading) ProcessPipelineHook(next redis.ProcessPipelineHook) redis.ProcessPipelineHook {
	return func(ctx context.Context, cmds []redis.Cmder) error {
		err := next(ctx, cmds)
		if slices.ContainsFunc(cmds, func(c redis.Cmder) bool { return c.Name() == "hgetall" }) {
			h.stop()
		}
		return err
	}
}

// TestStopBetweenReadAndEvent: a watcher that is stopped after it has read a group's details and
// before it has published the event leaves the event in the outbox: the next watcher publishes it.
func TestStopBetweenReadAndEvent(t *testing.T) {
	t.Parallel()
	w := stagetest.Shared(t)
	w.Submit(messages.SubmitGroup{ID: "g", Type: "T", Jobs: stagetest.Numbered(1), Seal: true})
	ctx, cancel := context.WithCancel(t.Context())
	defer cancel()
	conn := w.Connect()
	conn.Cmd.AddHook(afterReading{cancel})
	events, err := wm.NewPublisher(conn)
	require.NoError(t, err)
	require.NoError(t, watcher.New(stage.Process{ID: "stopped", Conn: conn, Space: w.Space, Tel: w.Tel}, watcher.Config{Interval: time.Hour}, w.Store, events).Run(ctx))
	require.Error(t, ctx.Err(), "the watcher must have been stopped by the hook")
	defer run(w, watcher.Config{}, "next")()
	w.Await("the event", func() bool { return len(ids(w, "g")) > 0 })
}
