package stream

import (
	"context"
	"log/slog"
	"testing"

	"github.com/redis/go-redis/v9"
	"github.com/stretchr/testify/require"

	"github.com/bulkaction/bulkaction/internal/testkit/redistest"
)

const largestID = "18446744073709551615-18446744073709551615"

// TestConsumerRecoversFromTheLargestID: an entry with the largest possible id blocks its stream. It
// is handled once, under another id, and the stream takes further entries.
func TestConsumerRecoversFromTheLargestID(t *testing.T) {
	t.Parallel()
	ctx := context.Background()
	c := connect(t, redistest.Server(t).URL())
	stream := unique("ingest")
	out, _, _ := subscribe(t, c, stream, ConsumerConfig{})
	for range 2 { // the id can be used again
		ordinary := add(t, c, stream, "k", "ordinary")
		d := receive(t, out)
		require.Equal(t, ordinary, d.ID)
		// The last id is the second largest possible one, so Redis gives the next entry the largest
		// one. Then it refuses all further entries, until the consumer has moved that entry to
		// another id.
		require.NoError(t, c.Cmd.XAdd(ctx, &redis.XAddArgs{
			Stream: stream, ID: "18446744073709551615-18446744073709551614", Values: []string{"k", "first"}}).Err())
		_ = c.Cmd.XAdd(ctx, &redis.XAddArgs{Stream: stream, Values: []string{"k", "second"}}) // refused if it comes late
		d.Ack()
		seen := receive(t, out)
		require.Equal(t, "first", seen.Get("k"))
		require.False(t, InFuture(seen.ID))
		seen.Ack()
		var id string
		require.Eventually(t, func() bool {
			var err error
			id, err = c.Cmd.XAdd(ctx, &redis.XAddArgs{Stream: stream, Values: []string{"k", "last"}}).Result()
			return err == nil
		}, patience, glance)
		require.False(t, InFuture(id))
		for seen.Get("k") != "last" {
			seen = receive(t, out)
			require.False(t, InFuture(seen.ID))
			seen.Ack()
		}
		require.Eventually(t, func() bool {
			select { // the entry with the largest id may come after the last one
			case seen := <-out:
				seen.Ack()
			default:
			}
			return c.Cmd.XLen(ctx, stream).Val() == 0
		}, patience, glance)
	}
}

func TestRenumber(t *testing.T) {
	t.Parallel()
	ctx := context.Background()
	c := connect(t, redistest.Server(t).URL())
	r := NewReader(c, "g", "me")
	require.NoError(t, renumber(ctx, c.Cmd, "s", slog.Default()), "no stream")
	require.NoError(t, r.EnsureGroup(ctx, "s"))
	exact := func() {
		t.Helper()
		require.NoError(t, renumber(ctx, c.Cmd, "s", slog.Default()))
	}
	exact()
	kept := add(t, c, "s", "k", "kept")
	before := c.Cmd.XInfoStream(ctx, "s").Val()
	exact()
	require.Equal(t, before, c.Cmd.XInfoStream(ctx, "s").Val(), "nothing is in the future")

	_, err := c.Cmd.XAdd(ctx, &redis.XAddArgs{Stream: "s", ID: largestID, Values: []string{"k", "v", "k", "w"}}).Result()
	require.NoError(t, err)
	_, err = r.Read(ctx, []string{"s"}, 10, 0)
	require.NoError(t, err)
	require.ErrorContains(t, c.Cmd.XAdd(ctx, &redis.XAddArgs{Stream: "s", Values: []string{"k", "v"}}).Err(), "exhausted")
	exact()
	require.Equal(t, map[string]string{kept: "me"}, owners(t, c))
	batches, err := r.Read(ctx, []string{"s"}, 10, 0)
	require.NoError(t, err)
	require.Len(t, batches[0].Entries, 1)
	require.Equal(t, []string{"k", "v", "k", "w"}, batches[0].Entries[0].Fields)

	// The entry is gone, its id is not.
	require.NoError(t, c.Cmd.XAdd(ctx, &redis.XAddArgs{Stream: "s", ID: largestID, Values: []string{"k", "v"}}).Err())
	require.NoError(t, c.Cmd.XDel(ctx, "s", largestID).Err())
	exact()
	require.False(t, InFuture(add(t, c, "s", "k", "v")))
	require.EqualValues(t, 3, c.Cmd.XLen(ctx, "s").Val())
}
