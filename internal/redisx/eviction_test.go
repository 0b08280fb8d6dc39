package redisx

import (
	"context"
	"testing"

	"github.com/stretchr/testify/require"

	"github.com/bulkaction/bulkaction/internal/redisx/call"
	"github.com/bulkaction/bulkaction/internal/testkit/redistest"
)

func TestEvictionIsRefused(t *testing.T) {
	t.Parallel()
	ctx := context.Background()
	s := redistest.Server(t)
	c := connect(t, s.URL())
	require.NoError(t, c.CheckEviction(ctx), "the default")
	for _, policy := range []string{"allkeys-lru", "volatile-ttl"} {
		require.NoError(t, c.Cmd.ConfigSet(ctx, "maxmemory-policy", policy).Err())
		err := c.CheckEviction(ctx)
		require.ErrorContains(t, err, s.Addr())
		require.ErrorContains(t, err, policy)
		require.ErrorContains(t, err, "CONFIG SET maxmemory-policy noeviction")
		require.False(t, call.IsUnavailable(err))
	}
	s.Kill()
	require.True(t, call.IsUnavailable(c.CheckEviction(ctx)), "asked again when it is back")
}

func TestEvictionOfOneOfACluster(t *testing.T) {
	t.Parallel()
	ctx := context.Background()
	url, nodes := redistest.Cluster(t, 3)
	c := connect(t, url)
	require.NoError(t, c.CheckEviction(ctx))
	require.NoError(t, nodes[1].Client().ConfigSet(ctx, "maxmemory-policy", "allkeys-random").Err())
	require.ErrorContains(t, c.CheckEviction(ctx), "redis at "+nodes[1].Addr()+" evicts keys")
}
