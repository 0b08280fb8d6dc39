package redisx

import (
	"context"
	"errors"
	"fmt"
	"slices"
	"testing"
	"time"

	"github.com/redis/go-redis/v9"
	"github.com/stretchr/testify/require"

	"github.com/bulkaction/bulkaction/internal/redisx/call"
	"github.com/bulkaction/bulkaction/internal/redisx/keyspace"
	"github.com/bulkaction/bulkaction/internal/testkit/redistest"
)

// TestNoScriptRunsOnHalfAPartition: while a hash slot migrates, some keys of a partition are on the
// source master and some on the target. A script that declares two keys, one of them missing, runs
// on neither. A script that declares a single key is redirected to the target and would see only a
// part of the data.
func TestNoScriptRunsOnHalfAPartition(t *testing.T) {
	t.Parallel()
	ctx := context.Background()
	cluster := redistest.ClusterWithReplicas(t, 2)
	c := connect(t, cluster.URL)
	space, err := keyspace.New("half:", 1)
	require.NoError(t, err)
	p := space.Partition(0)
	for i := range 25 {
		require.NoError(t, c.Cmd.Set(ctx, p.Group(fmt.Sprint(i)), i, 0).Err())
	}
	count := call.NewScript("count", `
local found = 0
for i = 0, 24 do found = found + redis.call('EXISTS', KEYS[1] .. 'group:' .. i) end
if ARGV[1] then redis.call('INCR', KEYS[1] .. 'runs') end
return found`)
	slot := cluster.SlotOf(p.Base())
	to := cluster.Masters[0]
	if cluster.MasterOf(slot) == to {
		to = cluster.Masters[1]
	}
	found, err := count.Run(ctx, c.Cmd, p.Keys(), []any{"write"})
	require.NoError(t, err)
	require.EqualValues(t, 25, found)

	var halves []int64
	cluster.MoveSlot(slot, to, func(left int) {
		_, err := count.Run(ctx, c.Cmd, p.Keys(), []any{"write"})
		require.ErrorContains(t, err, "TRYAGAIN")
		require.True(t, call.IsUnavailable(err))

		found, err := count.Run(ctx, c.Cmd, []string{p.Base()}, nil)
		require.NoError(t, err)
		halves = append(halves, found.(int64))
	})
	require.Equal(t, []any{int64(0), int64(25)}, []any{halves[0], halves[len(halves)-1]}, "the control")
	require.True(t, slices.ContainsFunc(halves, func(n int64) bool { return n > 0 && n < 25 }), "the control: %v", halves)
	found, err = count.Run(ctx, c.Cmd, p.Keys(), []any{"write"})
	require.NoError(t, err)
	require.EqualValues(t, 25, found)
	require.Equal(t, "2", c.Cmd.Get(ctx, p.Base()+"runs").Val(), "what was refused has changed nothing")
}

// TestHeirIsFoundAtOnce: a dead master redirects no command. After its replica was promoted, each
// kind of call (command, pipeline, automatic pipeline, blocking read, Ping of all masters) reaches
// the new master in less than 30 s, although go-redis would find it after a minute.
func TestHeirIsFoundAtOnce(t *testing.T) {
	t.Parallel()
	ctx := context.Background()
	cluster := redistest.ClusterWithReplicas(t, 3)
	none := func(err error) error {
		if errors.Is(err, redis.Nil) {
			return nil
		}
		return err
	}
	own := func() *redis.ClusterClient { return connect(t, cluster.URL).Cmd.(*redis.ClusterClient) } // separate clients, so that no client's reload helps another
	single, several, block, shards := own(), own(), connect(t, cluster.URL).Block, connect(t, cluster.URL)
	pipe, err := own().AutoPipeline()
	require.NoError(t, err)
	t.Cleanup(func() { _ = pipe.Close() })
	ways := map[string]func() error{
		"command": func() error { return single.Incr(ctx, "k").Err() },
		"pipeline": func() error {
			var n *redis.IntCmd // the second command: a pipeline returns the error of its first one, here a missing key
			_, _ = several.Pipelined(ctx, func(p redis.Pipeliner) error { p.Get(ctx, "{k}none"); n = p.Incr(ctx, "k"); return nil })
			return n.Err()
		},
		"gathered": func() error { return pipe.Incr(ctx, "k").Err() },
		"blocking": func() error { return none(block.BLPop(ctx, 10*time.Millisecond, "{k}none").Err()) },
		"shards":   func() error { return shards.Ping(ctx) },
	}
	for way, do := range ways {
		require.NoError(t, do(), way)
	}
	dead := cluster.MasterOf(cluster.SlotOf("k"))
	dead.Kill()
	for way, do := range ways {
		require.Error(t, do(), way)
	}
	cluster.AwaitFailover()
	for way, do := range ways { // without the hook the client would reload after a minute
		require.Eventually(t, func() bool { return do() == nil }, patience, glance, way)
	}
}

// TestClusterComesBack: after all nodes of a cluster were down, the client finds them again at the
// same addresses.
func TestClusterComesBack(t *testing.T) {
	t.Parallel()
	ctx := context.Background()
	cluster := redistest.ClusterWithReplicas(t, 2, redistest.AOF)
	c := connect(t, cluster.URL)
	require.NoError(t, c.Cmd.Set(ctx, "k", "v", 0).Err())
	require.NoError(t, c.Ping(ctx))
	nodes := append(cluster.Masters, cluster.Replicas...)
	for _, node := range nodes {
		node.Kill()
	}
	for range 3 { // the first call finds out that no node answers; later calls must give the same error
		err := c.Cmd.Get(ctx, "k").Err()
		require.True(t, call.IsUnavailable(err), "%v", err)
		require.True(t, call.IsUnavailable(c.Ping(ctx)))
	}
	for _, node := range nodes {
		node.Restart()
	}
	require.Eventually(t, func() bool { return c.Cmd.Get(ctx, "k").Val() == "v" && c.Ping(ctx) == nil }, patience, glance)
}
