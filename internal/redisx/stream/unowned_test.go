package stream

import (
	"context"
	"testing"
	"time"

	"github.com/redis/go-redis/v9"
	"github.com/stretchr/testify/require"

	"github.com/bulkaction/bulkaction/internal/redisx"
	"github.com/bulkaction/bulkaction/internal/testkit/redistest"
)

// owners returns the consumer of each pending entry, by id.
func owners(t *testing.T, c *redisx.Conn) map[string]string {
	t.Helper()
	pending, err := c.Cmd.XPendingExt(context.Background(),
		&redis.XPendingExtArgs{Stream: "s", Group: "g", Start: "-", End: "+", Count: 10_000}).Result()
	require.NoError(t, err)
	all := map[string]string{}
	for _, p := range pending {
		all[p.ID] = p.Consumer
	}
	return all
}

func TestClaimUnowned(t *testing.T) {
	redistest.BothAlone(t, func(t *testing.T, url string) {
		ctx := context.Background()
		c := connect(t, url)
		r := NewReader(c, "g", "me")
		claim := func() []string {
			listed, err := Unowned(ctx, c.Cmd, "s", "g")
			require.NoError(t, err)
			ids, err := r.ClaimUnowned(ctx, "s", time.Hour)
			require.NoError(t, err)
			require.Equal(t, listed, ids)
			listed, err = Unowned(ctx, c.Cmd, "s", "g")
			require.NoError(t, err)
			require.Equal(t, listed, ids, "until another consumer claims them")
			again, err := r.ClaimUnowned(ctx, "s", time.Hour)
			require.NoError(t, err)
			require.Empty(t, again, "once")
			return ids
		}
		require.Empty(t, claim(), "no stream")
		ids := []string{add(t, c, "s", "n", "0")}
		require.Empty(t, claim(), "no group")
		require.NoError(t, r.EnsureGroup(ctx, "s"))
		require.Empty(t, claim(), "nothing was delivered")
		for range 7 {
			ids = append(ids, add(t, c, "s", "k", "v"))
		}
		read := func(consumer string, n int) {
			_, err := NewReader(c, "g", consumer).Read(ctx, []string{"s"}, n, 0)
			require.NoError(t, err)
		}

		// A consumer that owns entries is deleted: only its entries are unowned, not those of other
		// consumers, and not undelivered ones.
		read("gone", 2)
		read("me", 1)
		read("gone", 2)
		require.NoError(t, c.Cmd.XGroupDelConsumer(ctx, "s", "g", "gone").Err())
		require.Equal(t, []string{ids[0], ids[1], ids[3], ids[4]}, claim())
		require.Equal(t, map[string]string{
			ids[0]: "unowned", ids[1]: "unowned", ids[2]: "me", ids[3]: "unowned", ids[4]: "unowned",
		}, owners(t, c))
		got, _, _, err := r.Claim(ctx, "s", time.Hour, "0-0", 10)
		require.NoError(t, err)
		require.Len(t, got, 4, "they are idle for as long as asked")
		require.NoError(t, r.ack(ctx, "s", ids[0]))
		require.Empty(t, claim(), "an acknowledged entry does not come back")
	})
}

// TestClaimUnownedAfterSetID: entries that XGROUP SETID makes a group skip are unowned. Pending
// ones to which it goes back are not.
func TestClaimUnownedAfterSetID(t *testing.T) {
	t.Parallel()
	ctx := context.Background()
	c := connect(t, redistest.Server(t).URL())
	r := NewReader(c, "g", "me")
	require.NoError(t, r.EnsureGroup(ctx, "s"))
	var ids []string
	for range 4 {
		ids = append(ids, add(t, c, "s", "k", "v"))
	}
	_, err := r.Read(ctx, []string{"s"}, 2, 0)
	require.NoError(t, err)
	for setID, want := range map[string][]string{ids[0]: nil, ids[1]: nil, ids[2]: ids[2:3], "$": ids[2:]} {
		require.NoError(t, c.Cmd.XGroupSetID(ctx, "s", "g", setID).Err())
		unowned, err := Unowned(ctx, c.Cmd, "s", "g")
		require.NoError(t, err)
		require.Equal(t, want, unowned, setID)
	}

	// An entry that was deleted from the stream while it was pending is not reported as unowned:
	// Claim reports it.
	require.NoError(t, c.Cmd.XGroupSetID(ctx, "s", "g", "$").Err())
	require.NoError(t, c.Cmd.XDel(ctx, "s", ids[0], ids[3]).Err())
	claimed, err := r.ClaimUnowned(ctx, "s", 0)
	require.NoError(t, err)
	require.Equal(t, ids[2:3], claimed)
	require.Equal(t, map[string]string{ids[0]: "me", ids[1]: "me", ids[2]: "unowned"}, owners(t, c))
}

// TestClaimUnownedInPages: the search for unowned entries reads the stream page by page: pages of
// pending entries, and pages of unowned ones.
func TestClaimUnownedInPages(t *testing.T) {
	redistest.BothAlone(t, func(t *testing.T, url string) {
		ctx := context.Background()
		c := connect(t, url)
		r := NewReader(c, "g", "me")
		require.NoError(t, r.EnsureGroup(ctx, "s"))
		read := func(consumer string, n int) {
			_, err := c.Cmd.Pipelined(ctx, func(pipe redis.Pipeliner) error {
				for range n {
					pipe.XAdd(ctx, &redis.XAddArgs{Stream: "s", Values: []string{"k", "v"}})
				}
				return nil
			})
			require.NoError(t, err)
			_, err = NewReader(c, "g", consumer).Read(ctx, []string{"s"}, n, 0)
			require.NoError(t, err)
		}
		read("gone", 3*unownedPage)
		read("me", 2*pendingPage+1)
		read("gone", unownedPage)
		require.NoError(t, c.Cmd.XGroupDelConsumer(ctx, "s", "g", "gone").Err())
		ids, err := r.ClaimUnowned(ctx, "s", 0)
		require.NoError(t, err)
		require.Len(t, ids, 4*unownedPage)
		require.Len(t, owners(t, c), 4*unownedPage+2*pendingPage+1)
		listed, err := Unowned(ctx, c.Cmd, "s", "g")
		require.NoError(t, err)
		require.Equal(t, ids, listed)
	})
}

// TestConsumerHandlesUnownedEntries: a consumer with a lease of 300 ms finds and handles entries
// that were delivered and that no consumer owns.
func TestConsumerHandlesUnownedEntries(t *testing.T) {
	redistest.BothAlone(t, func(t *testing.T, url string) {
		ctx := context.Background()
		c := connect(t, url)
		stream := unique("ingest")
		out, _, _ := subscribe(t, c, stream, ConsumerConfig{Lease: 300 * time.Millisecond})
		publish(t, c, stream, 0, 1)
		receive(t, out).Ack()
		// Each entry is delivered to another consumer, and that consumer is deleted at once.
		ids := make([]string, 2)
		for i := range ids {
			gone, err := c.Cmd.TxPipelined(ctx, func(tx redis.Pipeliner) error {
				tx.XAdd(ctx, &redis.XAddArgs{Stream: stream, Values: []string{"k", "v"}})
				tx.XReadGroup(ctx, &redis.XReadGroupArgs{Group: group, Consumer: "gone", Streams: []string{stream, ">"}, Block: -1})
				tx.XGroupDelConsumer(ctx, stream, group, "gone")
				return nil
			})
			require.NoError(t, err)
			ids[i] = gone[0].(*redis.StringCmd).Val()
		}
		for _, id := range ids {
			d := receive(t, out)
			require.Equal(t, id, d.ID)
			d.Ack()
		}
		require.Eventually(t, func() bool { return c.Cmd.XLen(ctx, stream).Val() == 0 }, patience, glance)
	})
}
