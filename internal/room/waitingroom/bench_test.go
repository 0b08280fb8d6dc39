package waitingroom_test

import (
	"fmt"
	"strings"
	"testing"

	"github.com/redis/go-redis/v9"
	"github.com/stretchr/testify/require"

	"github.com/bulkaction/bulkaction/internal/redisx"
	"github.com/bulkaction/bulkaction/internal/redisx/keyspace"
	"github.com/bulkaction/bulkaction/internal/room/waitingroom"
	"github.com/bulkaction/bulkaction/internal/testkit/redistest"
)

// benched is an event on a private Redis.
type benched struct {
	*testing.B
	*waitingroom.Rooms
	rdb   redis.UniversalClient
	calls int
}

// benchUsers measures a call for 200 users and a call for one user; prepare returns the call.
// µs/user is the time of the whole call: building it, the round trip and the script. redis-µs/user
// is the time of the script alone, as Redis reports it.
func benchUsers(b *testing.B, prepare func(w *benched, users []waitingroom.Visitor) func() error) {
	for _, size := range []int{waitingroom.MostUsers, 1} {
		b.Run(fmt.Sprint(size), func(b *testing.B) {
			w := newBenched(b)
			step := func() func() error {
				w.calls++
				users := make([]waitingroom.Visitor, size)
				for i := range users {
					id := fmt.Sprintf("%010d-%010d", w.calls, i) // about as long as a visitor's id
					users[i] = waitingroom.Visitor{User: id, Conn: fmt.Sprintf("0000000%d.%d", i%3, w.calls)}
				}
				return prepare(w, users)
			}
			require.NoError(b, step()()) // loads the scripts into Redis's cache
			b.ReportAllocs()
			calls, script := 0, 0
			for b.Loop() {
				b.StopTimer()
				do := step()
				require.NoError(b, w.rdb.ConfigResetStat(b.Context()).Err())
				b.StartTimer()
				err := do()
				b.StopTimer()
				require.NoError(b, err)
				script += w.scriptMicros()
				calls++
				b.StartTimer()
			}
			users := float64(calls * size)
			b.ReportMetric(float64(b.Elapsed().Nanoseconds())/1e3/users, "µs/user")
			b.ReportMetric(float64(script)/users, "redis-µs/user")
			b.ReportMetric(users/b.Elapsed().Seconds(), "users/s")
		})
	}
}

func newBenched(b *testing.B) *benched {
	conn, err := redisx.Connect(b.Context(), redisx.Config{URL: redistest.Server(b).URL(), PoolMaxActive: 2})
	require.NoError(b, err)
	b.Cleanup(func() { require.NoError(b, conn.Close()) })
	space, err := keyspace.New("b:", 1)
	require.NoError(b, err)
	w := &benched{b, waitingroom.New(conn, space, nil), conn.Cmd, 0}
	_, err = w.Declare(b.Context(), event, defaults(0), waitingroom.DeclareOptions{})
	require.NoError(b, err)
	return w
}

// scriptMicros returns how long scripts have run in all since Redis's statistics were reset, in µs.
func (w *benched) scriptMicros() int {
	stats := w.rdb.Info(w.Context(), "commandstats").Val()
	_, found, _ := strings.Cut(stats, "cmdstat_evalsha:")
	var calls, micros int
	_, err := fmt.Sscanf(found, "calls=%d,usec=%d", &calls, &micros)
	require.NoError(w, err, stats)
	return micros
}

func (w *benched) capacity(n int64) {
	_, err := w.Change(w.Context(), event, waitingroom.Changes{Capacity: &n})
	require.NoError(w, err)
}

func (w *benched) enter(users []waitingroom.Visitor) error {
	reply, err := w.Enter(w.Context(), event, waitingroom.EnterNew, 0, users...)
	if err == nil && reply.Entries[0].Code != waitingroom.Entered {
		err = fmt.Errorf("the first user is %s", reply.Entries[0].Code)
	}
	return err
}

func (w *benched) promote() error {
	_, err := w.Promote(w.Context(), event)
	return err
}

// BenchmarkEnter: new users enter a queue that grows.
func BenchmarkEnter(b *testing.B) {
	benchUsers(b, func(w *benched, users []waitingroom.Visitor) func() error {
		return func() error { return w.enter(users) }
	})
}

// BenchmarkPromote promotes users of three brokers. The event has free slots for all of them.
func BenchmarkPromote(b *testing.B) {
	benchUsers(b, func(w *benched, users []waitingroom.Visitor) func() error {
		w.capacity(0)
		require.NoError(w, w.enter(users))
		w.capacity(10_000_000)
		return w.promote
	})
}

func BenchmarkClaim(b *testing.B) {
	benchUsers(b, func(w *benched, users []waitingroom.Visitor) func() error {
		w.capacity(0)
		require.NoError(w, w.enter(users))
		w.capacity(10_000_000)
		require.NoError(w, w.promote())
		return func() error {
			claims, err := w.Claim(w.Context(), event, users...)
			if err == nil && claims[0].Code != waitingroom.Claimed {
				err = fmt.Errorf("the first user is %s", claims[0].Code)
			}
			return err
		}
	})
}

// BenchmarkAudit: the audit reads 10,000 waiting users.
func BenchmarkAudit(b *testing.B) {
	w := newBenched(b)
	const users = 10_000
	for i := range users / waitingroom.MostUsers {
		var list []waitingroom.Visitor
		for j := range waitingroom.MostUsers {
			list = append(list, waitingroom.Visitor{User: fmt.Sprintf("%010d-%010d", i, j), Conn: "00000001.1"})
		}
		require.NoError(b, w.enter(list))
	}
	require.NoError(b, w.rdb.ConfigResetStat(b.Context()).Err())
	calls := 0
	for b.Loop() {
		found, err := w.Audit(b.Context(), event, nil)
		require.NoError(b, err)
		require.Empty(b, found)
		calls++
	}
	b.ReportMetric(float64(w.scriptMicros())/float64(calls*users), "redis-µs/user")
	b.ReportMetric(float64(calls*users)/b.Elapsed().Seconds(), "users/s")
}
