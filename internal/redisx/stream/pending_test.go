package stream

import (
	"context"
	"testing"
	"time"

	"github.com/redis/go-redis/v9"
	"github.com/stretchr/testify/require"

	"github.com/bulkaction/bulkaction/internal/testkit/redistest"
)

// TestRenewDoesNotSteal: Renew reports entries that another consumer has claimed, and does not
// claim them back.
func TestRenewDoesNotSteal(t *testing.T) {
	redistest.BothAlone(t, func(t *testing.T, url string) {
		ctx := context.Background()
		c := connect(t, url)
		r := NewReader(c, "g", "me")
		lost, err := r.Renew(ctx, "s", []string{"1-1"}, 0)
		require.NoError(t, err, "a group that is away")
		require.Empty(t, lost)

		require.NoError(t, r.EnsureGroup(ctx, "s"))
		for range 450 {
			add(t, c, "s", "k", "v")
		}
		batches, err := r.Read(ctx, []string{"s"}, 450, 0)
		require.NoError(t, err)
		entries := batches[0].Entries
		ids := make([]string, len(entries))
		for i, e := range entries {
			ids[i] = e.ID
		}
		taken, _, _, err := NewReader(c, "g", "other").Claim(ctx, "s", 0, "0-0", 3)
		require.NoError(t, err)
		require.Len(t, taken, 3)

		lost, err = r.Renew(ctx, "s", append(ids, "1-1"), time.Hour)
		require.NoError(t, err)
		require.Equal(t, ids[:3], lost)
		for consumer, want := range map[string]int{"me": 447, "other": 3} {
			held, err := c.Cmd.XPendingExt(ctx, &redis.XPendingExtArgs{Stream: "s", Group: "g", Start: "-", End: "+", Count: 500, Consumer: consumer}).Result()
			require.NoError(t, err)
			require.Len(t, held, want)
			require.Equal(t, consumer == "me", held[0].Idle >= time.Hour)
		}
	})
}

func TestForgetDeadConsumers(t *testing.T) {
	redistest.BothAlone(t, func(t *testing.T, url string) {
		ctx := context.Background()
		c := connect(t, url)
		r := NewReader(c, "g", "me")
		forgotten := func(age time.Duration) int64 {
			n, err := r.ForgetDead(ctx, "s", age)
			require.NoError(t, err)
			return n
		}
		require.Zero(t, forgotten(0), "no stream")
		add(t, c, "s", "k", "v")
		require.Zero(t, forgotten(0), "no group")

		_, err := NewReader(c, "g", "holder").Read(ctx, []string{"s"}, 1, 0)
		require.NoError(t, err)
		require.NoError(t, c.Cmd.XGroupCreateConsumer(ctx, "s", "g", "idler").Err())
		// In miniredis a consumer's idle time begins with its first command.
		require.NoError(t, c.Cmd.XClaimJustID(ctx, &redis.XClaimArgs{Stream: "s", Group: "g", Consumer: "idler", Messages: []string{"1-1"}}).Err())
		consumers := func() (names []string) {
			for _, consumer := range c.Cmd.XInfoConsumers(ctx, "s", "g").Val() {
				names = append(names, consumer.Name)
			}
			return names
		}
		require.Zero(t, forgotten(time.Hour))
		require.Equal(t, []string{"holder", "idler"}, consumers(), "not idle for long")
		require.Eventually(t, func() bool { return forgotten(0) == 1 }, patience, glance)
		require.Equal(t, []string{"holder"}, consumers())
		require.EqualValues(t, 1, c.Cmd.XPending(ctx, "s", "g").Val().Count)
	})
}
