package ledger_test

import (
	"context"
	"fmt"
	"testing"

	"github.com/redis/go-redis/v9"
	"github.com/stretchr/testify/require"

	"github.com/bulkaction/bulkaction/internal/jobs/ledger"
)

func TestReadPartition(t *testing.T) {
	both(t, func(w *world) {
		read := func() ledger.PartitionStats {
			s, err := ledger.ReadPartition(w.Context(), w.c, w.p)
			require.NoError(w, err)
			return s
		}
		require.Equal(w, ledger.PartitionStats{Types: []string{}}, read())
		w.backlog("acme", "T", 2)
		w.backlog("globex", "U", 1)
		w.outcome("T", other(ledger.OutcomeFailed, w.begin("T", "c", 1)[0], 0))
		w.begin("U", "c", 1)
		s := read()
		require.ElementsMatch(w, []string{"T", "U"}, s.Types)
		s.Types = nil
		require.Equal(w, ledger.PartitionStats{Groups: 2, ActiveTenants: 1, DeadLetters: 1}, s)
		w.c.Set(w.Context(), w.p.Active(), "x", 0)
		_, err := ledger.ReadPartition(w.Context(), w.c, w.p)
		require.ErrorContains(w, err, "WRONGTYPE")
	})
}

// TestPausedTypes: PausedTypes returns the paused types in alphabetical order, also beside 1,500
// paused tenants, more than one page of HSCAN holds.
func TestPausedTypes(t *testing.T) {
	both(t, func(w *world) {
		read := func() []string {
			types, err := ledger.PausedTypes(w.Context(), w.c, w.p, nil)
			require.NoError(w, err)
			return types
		}
		require.Empty(w, read())
		for i := range 1500 {
			w.c.HSet(w.Context(), w.p.Pauses(), fmt.Sprint("t:", i), 1)
		}
		w.pause(ledger.PauseType, "U")
		w.pause(ledger.PauseType, "T")
		w.pause(ledger.PauseTenant, "y")
		require.Equal(w, []string{"T", "U"}, read())
		w.resume(ledger.PauseType, "T")
		require.Equal(w, []string{"U"}, read())
	})
}

// TestPausedTypesBesideManyTenants: beside 30,000 paused tenants PausedTypes tells correctly which
// of the given types are paused, with at most 12 Redis commands.
func TestPausedTypesBesideManyTenants(t *testing.T) {
	both(t, func(w *world) {
		for batch := range 30 {
			var pauses []any
			for i := range 1000 {
				pauses = append(pauses, fmt.Sprint("t:", batch*1000+i), 1)
			}
			require.NoError(w, w.c.HSet(w.Context(), w.p.Pauses(), pauses...).Err())
		}
		w.pause(ledger.PauseType, "U")
		count := &callCounter{}
		c := redis.NewClient(w.c.(*redis.Client).Options())
		defer c.Close()
		c.AddHook(count)
		types, err := ledger.PausedTypes(w.Context(), c, w.p, []string{"T", "U"})
		require.NoError(w, err)
		require.Contains(w, types, "U")
		require.NotContains(w, types, "T")
		require.LessOrEqual(w, count.n, 12)
	})
}

// callCounter is a hook of a client. It counts the client's commands, but not those in pipelines.
type callCounter struct{ n int }

func (c *callCounter) DialHook(next redis.DialHook) redis.DialHook { return next }

func (c *callCounter) ProcessHook(next redis.ProcessHook) redis.ProcessHook {
	return func(ctx context.Context, cmd redis.Cmder) error {
		c.n++
		return next(ctx, cmd)
	}
}

func (c *callCounter) ProcessPipelineHook(next redis.ProcessPipelineHook) redis.ProcessPipelineHook {
	return next
}
