package redisproc

import (
	"context"
	"net"
	"os"
	"path/filepath"
	"testing"

	"github.com/redis/go-redis/v9"
	"github.com/stretchr/testify/require"
	"go.uber.org/goleak"
)

func TestMain(m *testing.M) { goleak.VerifyTestMain(m) }

func run(t *testing.T, opts Options) *Server {
	t.Helper()
	s, err := Start(t.Context(), opts)
	require.NoError(t, err)
	t.Cleanup(func() { require.NoError(t, s.Close()) })
	return s
}

func client(t *testing.T, s *Server) *redis.Client {
	t.Helper()
	opts, err := redis.ParseURL(s.URL())
	require.NoError(t, err)
	opts.MaxRetries = -1
	c := redis.NewClient(opts)
	t.Cleanup(func() { _ = c.Close() })
	return c
}

func TestStartAndClose(t *testing.T) {
	s := run(t, Options{MaxMemory: 32 << 20, Args: []string{"--databases", "3"}})
	require.True(t, s.Running())
	require.Equal(t, map[string]string{"maxmemory": "33554432", "databases": "3", "save": "", "appendonly": "no"},
		config(t, client(t, s), "maxmemory", "databases", "save", "appendonly"))
	require.Contains(t, s.Log(), "Ready to accept connections")

	require.NoError(t, s.Close())
	require.False(t, s.Running())
	require.NoDirExists(t, s.Dir())
	_, err := net.Dial("tcp", s.Addr())
	require.Error(t, err)
	require.NoError(t, s.Close())
	require.ErrorIs(t, s.Restart(t.Context()), os.ErrClosed)
}

func config(t *testing.T, c *redis.Client, names ...string) map[string]string {
	t.Helper()
	all := map[string]string{}
	for _, name := range names {
		got, err := c.ConfigGet(t.Context(), name).Result()
		require.NoError(t, err)
		all[name] = got[name]
	}
	return all
}

func TestKillAndRestart(t *testing.T) {
	for name, tc := range map[string]struct {
		aof  bool
		want int64
	}{
		"with an append-only file": {aof: true, want: 1},
		"without":                  {aof: false, want: 0},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			s := run(t, Options{Dir: t.TempDir(), AOF: tc.aof})
			pid, addr := s.PID(), s.Addr()
			require.NoError(t, client(t, s).Set(t.Context(), "k", "v", 0).Err())

			s.Kill()
			require.False(t, s.Running())
			require.NoError(t, s.Restart(t.Context()))

			require.NotEqual(t, pid, s.PID())
			require.Equal(t, addr, s.Addr())
			got, err := client(t, s).Exists(t.Context(), "k").Result()
			require.NoError(t, err)
			require.Equal(t, tc.want, got)
		})
	}
}

func TestRestartWhereThePortIsTaken(t *testing.T) {
	s := run(t, Options{})
	s.Kill()
	l, err := net.Listen("tcp", s.Addr())
	require.NoError(t, err)
	defer l.Close()
	require.ErrorIs(t, s.Restart(t.Context()), errPortTaken)
	require.False(t, s.Running())
}

// TestProbeTellsServersApart: probe accepts a server under its process id. Under another id it says
// that the port is taken, as if another server answered there.
func TestProbeTellsServersApart(t *testing.T) {
	s := run(t, Options{})
	require.NoError(t, probe(t.Context(), s.Addr(), s.PID()))
	require.ErrorIs(t, probe(t.Context(), s.Addr(), s.PID()+1), errPortTaken)
}

func TestStartFails(t *testing.T) {
	t.Run("without a binary", func(t *testing.T) {
		t.Setenv(EnvBinary, filepath.Join(t.TempDir(), "absent"))
		_, err := Start(t.Context(), Options{})
		require.ErrorIs(t, err, ErrNoBinary)
		require.ErrorContains(t, err, "make deps")
	})
	t.Run("with a wrong argument, which the log explains", func(t *testing.T) {
		_, err := Start(t.Context(), Options{Args: []string{"--no-such-directive", "1"}})
		require.ErrorContains(t, err, "no-such-directive")
	})
	t.Run("when its folder does not exist", func(t *testing.T) {
		_, err := Start(t.Context(), Options{Dir: filepath.Join(t.TempDir(), "absent")})
		require.ErrorIs(t, err, os.ErrNotExist)
	})
	t.Run("when the caller gives up", func(t *testing.T) {
		ctx, cancel := context.WithCancel(t.Context())
		cancel()
		_, err := Start(ctx, Options{})
		require.ErrorIs(t, err, context.Canceled)
	})
}
