package redisx

import (
	"context"
	"testing"
	"time"

	"github.com/stretchr/testify/require"
	"go.uber.org/goleak"

	"github.com/bulkaction/bulkaction/internal/testkit/redistest"
)

const (
	patience = 30 * time.Second // limit for events that must happen; a healthy run needs a fraction of it
	glance   = 10 * time.Millisecond
)

func TestMain(m *testing.M) { goleak.VerifyTestMain(m, redistest.IgnoreServers()) }

func connect(t testing.TB, url string) *Conn {
	t.Helper()
	c, err := Connect(context.Background(), Config{URL: url, PoolMaxActive: 20, DialTimeout: patience, CommandTimeout: patience})
	require.NoError(t, err)
	t.Cleanup(func() { _ = c.Close() })
	return c
}
