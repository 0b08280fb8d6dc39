package stream

import (
	"context"
	"testing"
	"time"

	"github.com/redis/go-redis/v9"
	"github.com/stretchr/testify/require"
	"go.uber.org/goleak"

	"github.com/bulkaction/bulkaction/internal/redisx"
	"github.com/bulkaction/bulkaction/internal/testkit/redistest"
)

const (
	patience = 30 * time.Second // limit for events that must happen; a healthy run needs a fraction of it
	glance   = 10 * time.Millisecond
)

func TestMain(m *testing.M) { goleak.VerifyTestMain(m, redistest.IgnoreServers()) }

func connect(t testing.TB, url string) *redisx.Conn {
	t.Helper()
	c, err := redisx.Connect(context.Background(), redisx.Config{URL: url, PoolMaxActive: 20, DialTimeout: patience, CommandTimeout: patience})
	require.NoError(t, err)
	t.Cleanup(func() { _ = c.Close() })
	return c
}

func add(t testing.TB, c *redisx.Conn, stream string, fields ...string) string {
	t.Helper()
	id, err := c.Cmd.XAdd(context.Background(), &redis.XAddArgs{Stream: stream, Values: fields}).Result()
	require.NoError(t, err)
	return id
}
