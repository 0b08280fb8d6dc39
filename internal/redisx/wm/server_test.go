package wm

import (
	"context"
	"slices"
	"sync/atomic"
	"testing"
	"time"

	"github.com/redis/go-redis/v9"
	"github.com/stretchr/testify/require"
	"go.uber.org/goleak"

	"github.com/bulkaction/bulkaction/internal/redisx"
	"github.com/bulkaction/bulkaction/internal/testkit/redistest"
)

// patience is the limit for events that must happen; a healthy run needs a fraction of it.
const patience = 30 * time.Second

func TestMain(m *testing.M) { goleak.VerifyTestMain(m, redistest.IgnoreServers()) }

func connect(t testing.TB, url string) *redisx.Conn {
	t.Helper()
	c, err := redisx.Connect(context.Background(), redisx.Config{URL: url, PoolMaxActive: 20, DialTimeout: patience, CommandTimeout: patience})
	require.NoError(t, err)
	t.Cleanup(func() { _ = c.Close() })
	return c
}

// calls is a hook that counts the client's successful commands that begin with the arguments begin.
type calls struct {
	begin []any
	n     atomic.Int64
}

func (c *calls) DialHook(next redis.DialHook) redis.DialHook { return next }

func (c *calls) ProcessHook(next redis.ProcessHook) redis.ProcessHook {
	return func(ctx context.Context, cmd redis.Cmder) error {
		err := next(ctx, cmd)
		if args := cmd.Args(); err == nil && len(args) >= len(c.begin) && slices.Equal(args[:len(c.begin)], c.begin) {
			c.n.Add(1)
		}
		return err
	}
}

func (c *calls) ProcessPipelineHook(next redis.ProcessPipelineHook) redis.ProcessPipelineHook {
	return next
}
