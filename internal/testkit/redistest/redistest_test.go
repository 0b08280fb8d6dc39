package redistest_test

import (
	"context"
	"fmt"
	"strings"
	"testing"
	"time"

	"github.com/redis/go-redis/v9"
	"github.com/stretchr/testify/require"
	"go.uber.org/goleak"

	"github.com/bulkaction/bulkaction/internal/testkit/redistest"
)

func TestMain(m *testing.M) { goleak.VerifyTestMain(m, redistest.IgnoreServers()) }

func TestRestore(t *testing.T) {
	t.Parallel()
	r := redistest.Server(t)
	c := r.Client()
	require.NoError(t, c.Set(t.Context(), "k", "old", 0).Err())
	snapshot := r.Backup()
	require.NoError(t, c.Set(t.Context(), "k", "new", 0).Err())

	r.Restore(snapshot)
	require.Equal(t, "old", c.Get(t.Context(), "k").Val())
}

func TestSharedIsOneServerWithAPrefixEach(t *testing.T) {
	t.Parallel()
	url1, prefix1 := redistest.Shared(t)
	url2, prefix2 := redistest.Shared(t)
	require.Equal(t, url1, url2)
	require.NotEqual(t, prefix1, prefix2)
	require.Regexp(t, `^t[0-9a-f]{8}:$`, prefix1)
}

// TestBoth: Both runs a test as the subtests redis and then miniredis. On both servers a key with a
// lifetime of 30 ms expires as time passes.
func TestBoth(t *testing.T) {
	var servers []string
	redistest.Both(t, func(t *testing.T, url, prefix string) {
		opts, err := redis.ParseURL(url)
		require.NoError(t, err)
		c := redis.NewClient(opts)
		defer func() { require.NoError(t, c.Close()) }()

		require.NoError(t, c.Set(t.Context(), prefix+"k", "v", 30*time.Millisecond).Err())
		require.Eventually(t, func() bool { return c.Exists(t.Context(), prefix+"k").Val() == 0 }, 10*time.Second, time.Millisecond)
		servers = append(servers, t.Name())
	})
	require.Equal(t, []string{"TestBoth/redis", "TestBoth/miniredis"}, servers)
}

func clusterClient(t *testing.T, url string) *redis.ClusterClient {
	list, ok := strings.CutPrefix(url, "redis://")
	require.True(t, ok)
	c := redis.NewClusterClient(&redis.ClusterOptions{Addrs: strings.Split(list, ","), MaxRetries: -1})
	t.Cleanup(func() { _ = c.Close() })
	return c
}

func TestClusterMovesASlot(t *testing.T) {
	t.Parallel()
	ctx := context.Background()
	c := redistest.ClusterWithReplicas(t, 2)
	cmd := clusterClient(t, c.URL)
	for i := range 25 {
		require.NoError(t, cmd.Set(ctx, fmt.Sprint("{x}", i), i, 0).Err())
	}
	slot := c.SlotOf("{x}")
	from := c.MasterOf(slot)
	to := c.Masters[0]
	if from == to {
		to = c.Masters[1]
	}
	var left []int
	c.MoveSlot(slot, to, func(n int) {
		left = append(left, n)
		for i := range 25 { // through ASK redirects, whichever node has the key
			require.Equal(t, fmt.Sprint(i), cmd.Get(ctx, fmt.Sprint("{x}", i)).Val())
		}
	})
	require.Equal(t, []int{25, 15, 5, 0}, left)
	require.Equal(t, to, c.MasterOf(slot))
	require.EqualValues(t, 25, to.Client().DBSize(ctx).Val())
	require.EqualValues(t, 0, from.Client().DBSize(ctx).Val())
}

func TestClusterReplacesAMaster(t *testing.T) {
	t.Parallel()
	ctx := context.Background()
	c := redistest.ClusterWithReplicas(t, 3)
	cmd := clusterClient(t, c.URL)
	slot := c.SlotOf("k")
	dead := c.MasterOf(slot)
	require.NoError(t, cmd.Set(ctx, "k", "v", 0).Err())
	require.EqualValues(t, 1, dead.Client().Do(ctx, "wait", 1, 10_000).Val())

	dead.Kill()
	c.AwaitFailover()
	heir := c.MasterOf(slot)
	require.Contains(t, c.Replicas, heir)
	require.Equal(t, "v", heir.Client().Get(ctx, "k").Val())

	dead.Restart()
	c.AwaitWhole()
	require.Equal(t, heir, c.MasterOf(slot))
	heir.Kill()
	c.AwaitFailover()
	require.Equal(t, dead, c.MasterOf(slot))
	require.Equal(t, "v", dead.Client().Get(ctx, "k").Val())
}

func TestSentinelAgainAndAgain(t *testing.T) {
	t.Parallel()
	ctx := context.Background()
	s := redistest.Sentinel(t)
	for i, r := range []*redistest.Redis{s.Master, s.Replica, s.Master} {
		other := s.Replica
		if r == s.Replica {
			other = s.Master
		}
		c := r.Client()
		// Sentinel closes the client connections of a server whose role (master or replica) it
		// changes.
		require.Eventually(t, func() bool {
			return c.Set(ctx, "k", i, 0).Err() == nil && c.Do(ctx, "wait", 1, 10_000).Val() == int64(1)
		},
			10*time.Second, 10*time.Millisecond)
		r.Kill()
		s.AwaitMaster(other)
		require.Equal(t, fmt.Sprint(i), other.Client().Get(ctx, "k").Val())
		s.Rejoin(r)
	}
}
