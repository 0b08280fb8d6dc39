package redisx

import (
	"context"
	"strings"
	"testing"
	"time"

	"github.com/redis/go-redis/v9"
	"github.com/stretchr/testify/require"

	"github.com/bulkaction/bulkaction/internal/redisx/call"
	"github.com/bulkaction/bulkaction/internal/testkit/redistest"
)

func TestAwaitReplicas(t *testing.T) {
	t.Parallel()
	ctx := context.Background()
	master := redistest.Server(t, redistest.Args("--repl-diskless-sync-delay", "0"))
	c := connect(t, master.URL())
	require.NoError(t, c.CheckReplicas(ctx))
	nothing := func(redis.Pipeliner) {}
	have, err := c.AwaitReplicas(ctx, "k", 1, time.Millisecond, nothing)
	require.NoError(t, err)
	require.Zero(t, have)

	replica := redistest.Server(t, redistest.Args("--replicaof", strings.Replace(master.Addr(), ":", " ", 1)))
	require.Eventually(t, func() bool {
		have, err := c.AwaitReplicas(ctx, "k", 1, patience, nothing)
		return err == nil && have == 1
	}, patience, glance)

	// After AwaitReplicas, the replica also has the earlier writes of other connections.
	require.NoError(t, c.Cmd.Set(ctx, "other", "v", 0).Err())
	var there, gone *redis.StringCmd
	have, err = c.AwaitReplicas(ctx, "k", 1, patience, func(p redis.Pipeliner) { there, gone = p.Get(ctx, "other"), p.Get(ctx, "gone") })
	require.NoError(t, err)
	require.Equal(t, 1, have)
	require.Equal(t, "v", replica.Client().Get(ctx, "other").Val())
	require.Equal(t, "v", there.Val())
	require.ErrorIs(t, gone.Err(), redis.Nil)

	replica.Suspend()
	have, err = c.AwaitReplicas(ctx, "k", 1, time.Millisecond, nothing)
	require.NoError(t, err)
	require.Zero(t, have)
	replica.Resume()

	// The confirmation works even if memory is full.
	require.NoError(t, c.Cmd.ConfigSet(ctx, "maxmemory", "1").Err())
	require.True(t, call.IsOOM(c.Cmd.Set(ctx, "more", "v", 0).Err()))
	have, err = c.AwaitReplicas(ctx, "k", 1, patience, nothing)
	require.NoError(t, err)
	require.Equal(t, 1, have)
}

func TestAwaitReplicasOfACluster(t *testing.T) {
	t.Parallel()
	ctx := context.Background()
	cluster := redistest.ClusterWithReplicas(t, 2)
	c := connect(t, cluster.URL)
	require.NoError(t, c.CheckReplicas(ctx))
	for _, key := range []string{"a", "b", "c"} {
		have, err := c.AwaitReplicas(ctx, key, 1, patience, func(redis.Pipeliner) {})
		require.NoError(t, err)
		require.Equal(t, 1, have)
		require.Equal(t, "1", cluster.MasterOf(cluster.SlotOf(key)).Client().Get(ctx, key).Val(), "it is asked of the key's own master")
	}
}

func TestServerWithoutReplication(t *testing.T) {
	t.Parallel()
	_, url := redistest.Mini(t)
	c := connect(t, url)
	require.ErrorContains(t, c.CheckReplicas(context.Background()), "BULKACTION_REDIS_WAIT_REPLICAS to 0")
	require.NoError(t, c.CheckEviction(context.Background()))
}
