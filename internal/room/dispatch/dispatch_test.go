package dispatch

import (
	"context"
	"testing"
	"time"

	"github.com/stretchr/testify/require"
	"go.uber.org/goleak"

	"github.com/bulkaction/bulkaction/internal/redisx"
	"github.com/bulkaction/bulkaction/internal/redisx/keyspace"
	"github.com/bulkaction/bulkaction/internal/testkit/redistest"
)

func TestMain(m *testing.M) { goleak.VerifyTestMain(m, redistest.IgnoreServers()) }

const patience = 30 * time.Second

func TestRemovedReachesTheBrokerOfTheConn(t *testing.T) {
	redistest.Both(t, func(t *testing.T, url, prefix string) {
		ctx := context.Background()
		conn, err := redisx.Connect(ctx, redisx.Config{
			URL: url, PoolMaxActive: 4, DialTimeout: patience, CommandTimeout: patience,
		})
		require.NoError(t, err)
		defer conn.Close()
		space, err := keyspace.New(prefix, 1)
		require.NoError(t, err)
		p, err := NewPublisher(conn, space)
		require.NoError(t, err)

		m := Removed{Event: "e", User: "u", Conn: "0123abcd.7", Reason: ReasonRemoved}
		require.NoError(t, p.Removed(ctx, m))
		entries := conn.Cmd.XRange(ctx, space.Dispatch("0123abcd"), "-", "+").Val()
		require.Len(t, entries, 1)
		require.Equal(t, "entry.removed", entries[0].Values["type"])
		require.JSONEq(t, `{"event":"e","user":"u","conn":"0123abcd.7","reason":"removed"}`, entries[0].Values["data"].(string))
		require.NotEmpty(t, entries[0].Values["id"])
		left := conn.Cmd.PTTL(ctx, space.Dispatch("0123abcd")).Val()
		require.Greater(t, left, StreamTTL-patience)
		require.LessOrEqual(t, left, StreamTTL)

		for _, conn := range []string{"", "7"} { // a user who polls has no conn
			m.Conn = conn
			require.NoError(t, p.Removed(ctx, m))
		}
		require.Len(t, conn.Cmd.Keys(ctx, space.Prefix()+"*").Val(), 1)
	})
}
