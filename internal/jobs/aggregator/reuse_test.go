package aggregator_test

import (
	"context"
	"io"
	"sync/atomic"
	"testing"
	"time"

	"github.com/redis/go-redis/v9"
	"github.com/stretchr/testify/require"

	"github.com/bulkaction/bulkaction/internal/jobs/aggregator"
	"github.com/bulkaction/bulkaction/internal/jobs/ledger"
	"github.com/bulkaction/bulkaction/internal/messages"
	"github.com/bulkaction/bulkaction/internal/testkit/stagetest"
	"github.com/bulkaction/bulkaction/reducer"
)

// cutOff is a hook of the Redis client that fails all commands outside of pipelines while on is
// set.
type cutOff struct {
	on     atomic.Bool
	failed atomic.Int64 // commands that have failed
}

func (c *cutOff) DialHook(next redis.DialHook) redis.DialHook { return next }

func (c *cutOff) ProcessPipelineHook(next redis.ProcessPipelineHook) redis.ProcessPipelineHook {
	return next
}

func (c *cutOff) ProcessHook(next redis.ProcessHook) redis.ProcessHook {
	return func(ctx context.Context, cmd redis.Cmder) error {
		if c.on.Load() {
			c.failed.Add(1)
			cmd.SetErr(io.ErrUnexpectedEOF)
			return io.ErrUnexpectedEOF
		}
		return next(ctx, cmd)
	}
}

// TestPartialOfADeletedGroupIsNotUsedAgain: an aggregator remembers a partial aggregate of the
// deleted group g, which it has written once. Another process, which uses the partial aggregate of
// the same number, writes it once for a new group g. Then the first one reduces the other half of
// the new group's jobs, and the group has the right aggregate.
func TestPartialOfADeletedGroupIsNotUsedAgain(t *testing.T) {
	t.Parallel()
	w := stagetest.Shared(t)
	ctx := t.Context()
	process, cut := stagetest.Process(w, "a"), &cutOff{}
	process.Conn.Block.AddHook(cut)
	w.Run(aggregator.New(process, config(), reducer.NewRegistry()))
	submitCosts(w, "g", 30, 30)
	awaitReduced(w, "g", 30)
	fence, err := ledger.Lead(ctx, w.Conn.Cmd, w.P, "test", time.Minute)
	require.NoError(t, err)
	_, err = ledger.Advance(ctx, w.Conn.Cmd, w.P, "g", fence)
	require.NoError(t, err)
	require.NoError(t, ledger.Expire(ctx, w.Conn.Cmd, w.P, "g", fence, false))

	cut.on.Store(true)
	w.Await("the end of its last read", func() bool { return cut.failed.Load() > 0 })
	w.Submit(messages.SubmitGroup{
		ID: "g", Tenant: "acme", Type: "T", Jobs: stagetest.Numbered(20),
		Aggregate: []messages.Aggregate{{As: "cost", Op: "sum", Field: "data.cost"}, {As: "n", Op: "count"}},
	})
	w.Admit("T")
	jobs := w.Take("T", "w", 20)
	w.Done(`{"cost":0.1}`, jobs[:10]...)
	stop := runAggregator(w, config(), "a", reducer.NewRegistry())
	w.Await("half of the jobs", func() bool {
		now, err := ledger.ReadProgress(ctx, w.Conn.Cmd, []ledger.GroupRef{{Partition: w.P, ID: "g"}})
		return err == nil && now[0].Reduced == 10
	})
	stop()
	cut.on.Store(false)
	w.Done(`{"cost":0.1}`, jobs[10:]...)
	awaitReduced(w, "g", 20)
}
