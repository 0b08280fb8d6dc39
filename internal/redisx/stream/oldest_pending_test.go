package stream

import (
	"context"
	"log/slog"
	"testing"

	"github.com/stretchr/testify/require"

	"github.com/bulkaction/bulkaction/internal/redisx/call"
	"github.com/bulkaction/bulkaction/internal/testkit/redistest"
)

func TestOldestPending(t *testing.T) {
	redistest.BothAlone(t, func(t *testing.T, url string) {
		ctx := context.Background()
		c := connect(t, url)
		stream := unique("ingest")
		idle := NewConsumer(c, ConsumerConfig{Stream: stream, Group: group, Name: "idle", Log: slog.Default()})
		_, _, err := idle.OldestPending(ctx)
		require.True(t, call.IsNoGroup(err), "%v", err)

		out, consumer, _ := subscribe(t, c, stream, ConsumerConfig{})
		publishLarge(t, c, stream, 0, 2)
		first, second := receive(t, out), receive(t, out)
		if second.ID < first.ID {
			first, second = second, first
		}
		id, ok, err := consumer.OldestPending(ctx)
		require.NoError(t, err)
		require.True(t, ok)
		require.Equal(t, first.ID, id)

		// An entry stops counting as pending as soon as the handler has acknowledged it and
		// returned, although the consumer sends acknowledgements later.
		first.Ack()
		require.Eventually(t, func() bool {
			id, ok, err := consumer.OldestPending(ctx)
			return err == nil && ok && id == second.ID
		}, patience, glance)
		second.Ack()
		require.Eventually(t, func() bool {
			_, ok, err := consumer.OldestPending(ctx)
			return err == nil && !ok
		}, patience, glance)
	})
}

// TestOldestPendingFlushes: OldestPending itself sends the acknowledgements that the consumer has
// collected and not sent yet.
func TestOldestPendingFlushes(t *testing.T) {
	redistest.BothAlone(t, func(t *testing.T, url string) {
		ctx := context.Background()
		c := connect(t, url)
		stream := unique("ingest")
		idle := NewConsumer(c, ConsumerConfig{Stream: stream, Group: group, Name: "idle", Log: slog.Default()})
		require.NoError(t, idle.reader.EnsureGroup(ctx, stream))
		publish(t, c, stream, 0, 2)
		batches, err := idle.reader.Read(ctx, []string{stream}, 2, 0)
		require.NoError(t, err)
		entries := batches[0].Entries
		idle.acks.add([]string{entries[0].ID})
		id, ok, err := idle.OldestPending(ctx)
		require.NoError(t, err)
		require.True(t, ok)
		require.Equal(t, entries[1].ID, id)
	})
}

// TestOldestPendingSeesUnownedEntries: OldestPending also returns an older entry that no consumer
// owns, because it is delivered again later.
func TestOldestPendingSeesUnownedEntries(t *testing.T) {
	redistest.BothAlone(t, func(t *testing.T, url string) {
		ctx := context.Background()
		c := connect(t, url)
		me := NewConsumer(c, ConsumerConfig{Stream: "s", Group: "g", Name: "me", Log: slog.Default()})
		require.NoError(t, me.reader.EnsureGroup(ctx, "s"))
		first := add(t, c, "s", "k", "v")
		_, err := NewReader(c, "g", "gone").Read(ctx, []string{"s"}, 1, 0)
		require.NoError(t, err)
		require.NoError(t, c.Cmd.XGroupDelConsumer(ctx, "s", "g", "gone").Err())
		add(t, c, "s", "k", "v")
		_, err = me.reader.Read(ctx, []string{"s"}, 1, 0)
		require.NoError(t, err)
		id, ok, err := me.OldestPending(ctx)
		require.NoError(t, err)
		require.True(t, ok)
		require.Equal(t, first, id)
	})
}
