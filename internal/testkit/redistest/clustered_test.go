package redistest_test

import (
	"context"
	"fmt"
	"strings"
	"testing"
	"time"

	"github.com/redis/go-redis/v9"
	"github.com/stretchr/testify/require"

	"github.com/bulkaction/bulkaction/internal/testkit/redistest"
)

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
