package redisx

import (
	"context"
	"testing"

	"github.com/alicebob/miniredis/v2"
	"github.com/alicebob/miniredis/v2/server"
	"github.com/stretchr/testify/require"

	"github.com/bulkaction/bulkaction/internal/redisx/call"
	"github.com/bulkaction/bulkaction/internal/testkit/redistest"
)

func TestVersions(t *testing.T) {
	t.Parallel()
	for version, old := range map[string]bool{
		"6.2.14": true, "6.9": true, "5.0.3": true, "7.0.0": false, "7.0.15": false, "7.4.1": false, "8.0": false, "10.1.2": false,
		"": false, "unstable": false, "255.255.255": false,
	} {
		require.Equal(t, old, isOld(version), version)
	}
}

func TestVersionIsAccepted(t *testing.T) {
	t.Parallel()
	s := redistest.Server(t)
	c := connect(t, s.URL())
	require.NoError(t, c.CheckVersion(t.Context()))
	version, err := call.ServerVersion(t.Context(), c.Cmd)
	require.NoError(t, err)
	require.Regexp(t, `^\d+\.\d+\.\d+$`, version)
	s.Kill()
	require.True(t, call.IsUnavailable(c.CheckVersion(t.Context())), "asked again when it is back")

	embedded := connect(t, "redis://"+miniredis.RunT(t).Addr()+"/0")
	require.NoError(t, embedded.CheckVersion(t.Context()), "it does not report a version")
}

func TestOldVersionIsRefused(t *testing.T) {
	t.Parallel()
	old, err := server.NewServer("127.0.0.1:0")
	require.NoError(t, err)
	t.Cleanup(old.Close)
	require.NoError(t, old.Register("PING", func(p *server.Peer, _ string, _ []string) { p.WriteInline("PONG") }))
	require.NoError(t, old.Register("INFO", func(p *server.Peer, _ string, _ []string) {
		p.WriteBulk("# Server\r\nredis_version:6.2.14\r\nredis_mode:standalone\r\n")
	}))
	c := connect(t, "redis://"+old.Addr().String()+"/0")
	err = c.CheckVersion(t.Context())
	require.ErrorContains(t, err, "redis at "+old.Addr().String()+" has version 6.2.14; bulkaction is tested with 7.0 and later")
	require.ErrorContains(t, err, "upgrade Redis, or name another one with BULKACTION_REDIS_URL")
	require.False(t, call.IsUnavailable(err), "the process ends")
}

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
