package redistest_test

import (
	"context"
	"os"
	"runtime"
	"strconv"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/redis/go-redis/v9"
	"github.com/stretchr/testify/require"
	"go.uber.org/goleak"

	"github.com/bulkaction/bulkaction/internal/testkit/redisproc"
	"github.com/bulkaction/bulkaction/internal/testkit/redistest"
)

func TestMain(m *testing.M) { goleak.VerifyTestMain(m, redistest.IgnoreServers()) }

func TestServerSurvivesKillWithAOF(t *testing.T) {
	t.Parallel()
	r := redistest.Server(t, redistest.AOF)
	c := r.Client()
	require.NoError(t, c.Set(t.Context(), "k", "v", 0).Err())

	r.Kill()
	require.Error(t, c.Get(t.Context(), "k").Err())
	r.Restart()
	require.Equal(t, "v", c.Get(t.Context(), "k").Val())
}

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

func TestServerOptions(t *testing.T) {
	t.Parallel()
	r := redistest.Server(t, redistest.MaxMemory(1<<20), redistest.Args("--databases", "2", "--maxclients", "77"))
	require.ErrorContains(t, r.Client().Set(t.Context(), "k", strings.Repeat("x", 2<<20), 0).Err(), "OOM")
	require.Equal(t, map[string]string{"maxclients": "77"}, r.Client().ConfigGet(t.Context(), "maxclients").Val())
}

func TestSuspendAndResume(t *testing.T) {
	t.Parallel()
	r := redistest.Server(t)
	c := r.Client()
	require.NoError(t, c.Ping(t.Context()).Err())

	r.Suspend()
	answer := make(chan error, 1)
	go func() { answer <- c.Incr(context.WithoutCancel(t.Context()), "n").Err() }()
	require.True(t, stopped(t, r.PID()))
	require.Empty(t, answer)

	r.Resume()
	require.NoError(t, <-answer)
}

// stopped reports whether the process is suspended (by SIGSTOP), by /proc. On systems other than
// Linux it returns true.
func stopped(t *testing.T, pid int) bool {
	t.Helper()
	if runtime.GOOS != "linux" {
		return true
	}
	stat, err := os.ReadFile("/proc/" + strconv.Itoa(pid) + "/stat")
	require.NoError(t, err)
	return strings.Contains(string(stat), ") T ")
}

func TestServerWithoutBinary(t *testing.T) {
	t.Setenv(redisproc.EnvBinary, "/no/such/redis-server")
	said := fatal(t, func(t testing.TB) { redistest.Server(t) })
	require.Contains(t, said, "run `make deps`")
}

// fatalTB is a testing.TB that records a fatal failure.
type fatalTB struct {
	testing.TB
	said string
}

func (f *fatalTB) Fatal(args ...any) {
	f.said = args[0].(error).Error()
	runtime.Goexit()
}

// fatal runs fn on a testing.TB of its own, and returns the message with which fn has failed it
// fatally; "" if fn has not.
func fatal(t *testing.T, fn func(testing.TB)) string {
	t.Helper()
	f := &fatalTB{TB: t}
	var wg sync.WaitGroup
	wg.Go(func() { fn(f) })
	wg.Wait()
	return f.said
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

func TestClusterHoldsEverySlot(t *testing.T) {
	t.Parallel()
	url, nodes := redistest.Cluster(t, 3)
	require.Len(t, nodes, 3)
	list, ok := strings.CutPrefix(url, "redis://")
	require.True(t, ok)

	c := redis.NewClusterClient(&redis.ClusterOptions{Addrs: strings.Split(list, ","), MaxRetries: -1})
	defer func() { require.NoError(t, c.Close()) }()
	masters := map[string]bool{}
	for i := range 60 {
		key := "k" + strconv.Itoa(i)
		require.NoError(t, c.Set(t.Context(), key, i, 0).Err())
		node, err := c.MasterForKey(t.Context(), key)
		require.NoError(t, err)
		masters[node.Options().Addr] = true
	}
	require.Len(t, masters, 3)
}

func TestSentinelPromotesTheReplica(t *testing.T) {
	t.Parallel()
	s := redistest.Sentinel(t)
	rest, ok := strings.CutPrefix(s.URL, "redis-sentinel://")
	require.True(t, ok)
	addr, master, _ := strings.Cut(rest, "/")

	c := redis.NewFailoverClient(&redis.FailoverOptions{MasterName: master, SentinelAddrs: []string{addr}, MaxRetries: -1})
	defer func() { require.NoError(t, c.Close()) }()
	require.NoError(t, c.Set(t.Context(), "k", "v", 0).Err())
	require.NoError(t, c.Do(t.Context(), "wait", 1, 10_000).Err())

	s.Master.Kill()
	s.AwaitFailover()
	require.Equal(t, "v", s.Replica.Client().Get(t.Context(), "k").Val())
	require.NoError(t, s.Replica.Client().Set(t.Context(), "k", "w", 0).Err())
}
