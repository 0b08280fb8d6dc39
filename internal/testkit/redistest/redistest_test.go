package redistest_test

import (
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
