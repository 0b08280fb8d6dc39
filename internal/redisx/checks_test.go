package redisx

import (
	"context"
	"errors"
	"strings"
	"testing"
	"time"

	"github.com/alicebob/miniredis/v2"
	"github.com/alicebob/miniredis/v2/server"
	"github.com/redis/go-redis/v9"
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

func TestBackoff(t *testing.T) {
	b := Backoff{Min: 10 * time.Millisecond, Max: 100 * time.Millisecond}
	for range 2 {
		for i, ceiling := range []time.Duration{20, 40, 80, 100, 100} {
			got := b.Next()
			require.GreaterOrEqual(t, got, max(b.Min, ceiling*time.Millisecond/2), "wait %d", i)
			require.LessOrEqual(t, got, ceiling*time.Millisecond, "wait %d", i)
		}
		b.Reset()
	}
	tight := Backoff{Min: time.Second, Max: time.Second}
	require.Equal(t, time.Second, tight.Next())
}

func TestSleepEndsWithContext(t *testing.T) {
	ctx, cancel := context.WithCancel(context.Background())
	require.NoError(t, Sleep(ctx, 0))
	cancel()
	require.ErrorIs(t, Sleep(ctx, time.Hour), context.Canceled)
	require.ErrorIs(t, Sleep(ctx, 0), context.Canceled)
}

func TestRetryWhile(t *testing.T) {
	passing, final := errors.New("passing"), errors.New("final")
	retry := func(ctx context.Context, patience time.Duration, results ...error) (calls int, err error) {
		err = RetryWhile(ctx, patience, func(err error) bool { return errors.Is(err, passing) }, func(context.Context) error {
			calls++
			return results[min(calls, len(results))-1]
		})
		return calls, err
	}
	for _, tt := range []struct {
		patience time.Duration
		results  []error
		calls    int
		err      error
	}{
		{time.Hour, []error{passing, passing, nil}, 3, nil},
		{time.Hour, []error{passing, final}, 2, final},
		{0, []error{passing}, 1, passing},
	} {
		calls, err := retry(t.Context(), tt.patience, tt.results...)
		require.Equal(t, tt.err, err)
		require.Equal(t, tt.calls, calls)
	}
	ended, cancel := context.WithCancel(t.Context())
	cancel()
	calls, err := retry(ended, time.Hour, passing)
	require.Equal(t, passing, err)
	require.Equal(t, 1, calls)
}
