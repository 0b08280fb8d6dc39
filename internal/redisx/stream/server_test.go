package stream

import (
	"context"
	"fmt"
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

var names atomic.Int64

// unique returns a name that no other test uses.
func unique(what string) string { return fmt.Sprintf("%s-%d", what, names.Add(1)) }

// calls is a hook that counts the client's successful commands that begin with the arguments begin.
// If has is not nil, it counts only those that also have this argument.
type calls struct {
	begin []any
	has   any
	n     atomic.Int64
}

func (c *calls) DialHook(next redis.DialHook) redis.DialHook { return next }

func (c *calls) ProcessHook(next redis.ProcessHook) redis.ProcessHook {
	return func(ctx context.Context, cmd redis.Cmder) error {
		err := next(ctx, cmd)
		if args := cmd.Args(); err == nil && len(args) >= len(c.begin) && slices.Equal(args[:len(c.begin)], c.begin) &&
			(c.has == nil || slices.Contains(args, c.has)) {
			c.n.Add(1)
		}
		return err
	}
}

func (c *calls) ProcessPipelineHook(next redis.ProcessPipelineHook) redis.ProcessPipelineHook {
	return next
}
