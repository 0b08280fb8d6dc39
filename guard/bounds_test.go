package guard

import (
	"fmt"
	"testing"

	"github.com/redis/go-redis/v9"
	"github.com/stretchr/testify/require"

	"github.com/bulkaction/bulkaction/internal/testkit/redistest"
)

// TestBounds: with 100 leases and 200 waiters, one call of the script wait ends at most 16 leases,
// removes at most 64 waiters, frees at most 16 members and makes at most 16 grants. Its reply next
// = 0 asks for another call.
func TestBounds(t *testing.T) {
	t.Parallel()
	server := redistest.Server(t)
	s := newScripted(t, &redis.Options{Addr: server.Addr()}, nil)
	st := &stage{T: t, s: s, now: 1_700_000_000_000_000, base: "t:guard:{pool/p}:"}
	const members, waiters = 100, 200
	args := []any{0, "sliding|1|1000|0|1|60000|1|1|3000|4000|1000|0", 1, members}
	for i := range members {
		args = append(args, fmt.Sprintf("m%03d", i), "")
	}
	st.must("declare", args...)
	for i := range members {
		require.Equal(t, "GRANTED", st.must("acquire", fmt.Sprint("x-", i), "x", "", "", 0, 0, 1000, "")[0])
	}
	for i := range waiters {
		require.Equal(t, "QUEUED", st.must("acquire", fmt.Sprint("y-", i), "y", "", "", 0, 1000, 1000, "")[0])
	}
	size := func(key string) int64 { return s.c.ZCard(t.Context(), st.base+key).Val() }
	rules := refRules{failures: 1, successes: 1, concurrency: 1}
	lawful := func() {
		_, keys := s.run(check{t}, st.now, "inspect", guardKeys(st.base), []any{0, 0})
		readStored(check{t}, st.base, keys).lawful(check{t}, func(string) refRules { return rules })
	}

	// All leases have expired, and the deadlines of all waiters have passed: each call of the
	// script wait ends at most 16 leases and removes at most 64 waiters.
	st.now += 4_000_000
	calls := 0
	for next := int64(0); next == 0; calls++ {
		leases, queue := size("leases"), size("queue")
		reply := st.must("wait", "z")
		next = reply[0].(int64)
		require.LessOrEqual(t, leases-size("leases"), int64(16), "leases that one call ends")
		require.LessOrEqual(t, queue-size("queue"), int64(64), "waiters that one call removes")
		lawful()
	}
	require.Equal(t, [3]int64{}, [3]int64{size("leases"), size("queue"), size("free")})
	require.Equal(t, int64(members), size("cooling"), "a lost lease spends its permit at its end")
	require.LessOrEqual(t, calls, members/16+2)

	// All members are due at once.
	st.now += 4_000_000
	for next := int64(0); next == 0; {
		cooling := size("cooling")
		next = st.must("wait", "z")[0].(int64)
		require.LessOrEqual(t, cooling-size("cooling"), int64(16), "members that one call frees")
		lawful()
	}
	require.Equal(t, int64(members), size("free"))

	// Many calls wait and many members become free at once: one script call makes at most 16
	// grants.
	for i := range members {
		require.Equal(t, "GRANTED", st.must("acquire", fmt.Sprint("v-", i), "v", "", "", 0, 0, 1000, "")[0])
	}
	for i := range members {
		require.Equal(t, "QUEUED", st.must("acquire", fmt.Sprint("w-", i), "w", "", "", 0, 60_000, 1000, "")[0])
	}
	st.now += 4_000_000
	served := map[string]bool{}
	for range 200 {
		ids := []any{"w"}
		for i := range members {
			if id := fmt.Sprint("w-", i); !served[id] {
				ids = append(ids, id)
			}
		}
		reply := st.must("wait", ids...)
		granted := 0
		for i, id := range ids[1:] {
			if reply[i].([]any)[0] == "GRANTED" {
				require.Equal(t, fmt.Sprint("w-", len(served)), id, "first in, first out")
				served[id.(string)] = true
				granted++
			}
		}
		require.LessOrEqual(t, granted, 16)
		lawful()
		if len(served) == members {
			break
		}
		st.now += 50_000
	}
	require.Len(t, served, members)
}
