package dispatcher

import (
	"strconv"
	"strings"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/bulkaction/bulkaction/internal/redisx/keyspace"
	"github.com/bulkaction/bulkaction/internal/stage/presence"
	"github.com/bulkaction/bulkaction/internal/testkit/redistest"
)

// TestUptimeIsNeverTooLong: the uptime that Redis reports counts each change of the clock's second,
// so it can be up to a second too long. serverUptime must return a lower bound.
func TestUptimeIsNeverTooLong(t *testing.T) {
	t.Parallel()
	before := time.Now()
	rdb := redistest.Server(t).Client()
	for info := "uptime_in_seconds:0\r\n"; strings.Contains(info, "uptime_in_seconds:0\r\n"); {
		<-time.After(5 * time.Millisecond)
		var err error
		info, err = rdb.Info(t.Context(), "server").Result()
		require.NoError(t, err)
		up, ok := serverUptime(info)
		require.True(t, ok)
		require.LessOrEqual(t, up, time.Since(before))
	}

	up, ok := serverUptime("# Server\r\nuptime_in_seconds:31\r\nuptime_in_days:0\r\n")
	require.True(t, ok)
	require.Equal(t, 30*time.Second, up)
	_, ok = serverUptime("# Server\r\n")
	require.False(t, ok, "the embedded server does not tell it")
}

// TestUnservedTypesTakeTurns: of many types that no worker serves, each pass looks at some, and all
// get their turn.
func TestUnservedTypesTakeTurns(t *testing.T) {
	t.Parallel()
	p := &partitionDispatcher{Dispatcher: &Dispatcher{capacity: presence.NewCapacity(nil, keyspace.Space{})}}
	types := make([]string, 120)
	for i := range types {
		types[i] = strconv.Itoa(i)
	}
	seen := map[string]bool{}
	for range 3 {
		due, page := p.dueTypes(types)
		require.LessOrEqual(t, len(due), unservedPerPass)
		require.Equal(t, due, page)
		for _, typ := range due {
			seen[typ] = true
		}
	}
	require.Len(t, seen, len(types))
	due, page := p.dueTypes(types[:unservedPerPass])
	require.Len(t, due, unservedPerPass)
	require.Empty(t, page)
}
