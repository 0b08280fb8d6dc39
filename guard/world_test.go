package guard

import (
	"context"
	"testing"
	"time"

	"github.com/redis/go-redis/v9"
	"github.com/stretchr/testify/require"
	"go.uber.org/goleak"

	"github.com/bulkaction/bulkaction/internal/testkit/redistest"
)

// patience is the longest time for which a test waits for something that must happen. A healthy run
// needs a fraction of it.
const patience = 30 * time.Second

func TestMain(m *testing.M) {
	dial := "github.com/redis/go-redis/v9/internal/pool.(*ConnPool).tryDial" // sleeps on after Close
	goleak.VerifyTestMain(m, redistest.IgnoreServers(), goleak.IgnoreAnyFunction(dial))
}

// newTestClient returns a Client that is closed with the test, and its Redis client.
func newTestClient(t *testing.T, url, prefix string, opts ...Option) (*redis.Client, *Client) {
	t.Helper()
	o, err := redis.ParseURL(url)
	require.NoError(t, err)
	o.DialerRetries = 1 // a server that is away is away
	rdb := redis.NewClient(o)
	c := New(rdb, append([]Option{Prefix(prefix)}, opts...)...)
	t.Cleanup(func() {
		ctx, cancel := context.WithTimeout(context.Background(), 50*time.Millisecond) // leases may be held
		defer cancel()
		_ = c.Close(ctx)
		_ = rdb.Close()
	})
	return rdb, c
}
