package redisx_test

import (
	"context"
	"net"
	"testing"

	"github.com/alicebob/miniredis/v2"
	"github.com/stretchr/testify/require"

	"github.com/bulkaction/bulkaction/internal/redisx"
	"github.com/bulkaction/bulkaction/internal/redisx/call"
)

// TestServeInMemory: a server inside the process is reached by its registered address until it is
// removed.
func TestServeInMemory(t *testing.T) {
	t.Parallel()
	mini := miniredis.NewMiniRedis()
	t.Cleanup(mini.Close)
	dial := func(context.Context, string, string) (net.Conn, error) { return mini.Dial() }
	ping := func() error {
		conn, err := redisx.Connect(t.Context(), redisx.Config{URL: "redis://in-memory.invalid:6379"})
		require.NoError(t, err)
		defer conn.Close()
		return conn.Ping(t.Context())
	}
	remove := redisx.ServeInMemory("in-memory.invalid:6379", dial)
	require.NoError(t, ping())
	remove()
	require.True(t, call.IsUnavailable(ping()))
}
