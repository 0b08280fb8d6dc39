package wm

import (
	"context"
	"fmt"
	"testing"

	"github.com/ThreeDotsLabs/watermill/message"
	"github.com/stretchr/testify/require"

	"github.com/bulkaction/bulkaction/client/stream"
	"github.com/bulkaction/bulkaction/internal/redisx/call"
	"github.com/bulkaction/bulkaction/internal/testkit/redistest"
)

func TestPublisherWritesFlatEntries(t *testing.T) {
	redistest.BothAlone(t, func(t *testing.T, url string) {
		ctx := context.Background()
		c := connect(t, url)
		p, err := NewPublisher(c)
		require.NoError(t, err)

		whole := message.NewMessage("m-1", []byte(`{"group":"g"}`))
		whole.Metadata = message.Metadata{stream.FieldType: "group.seal", stream.FieldTraceParent: "00-1-2-01", "other": "left out"}
		bare := message.NewMessage("", nil)
		bare.Metadata.Set(stream.FieldType, "audit.violation")
		require.NoError(t, p.Publish("s", whole, bare))
		entries := c.Cmd.XRange(ctx, "s", "-", "+").Val()
		require.Len(t, entries, 2)
		require.Equal(t, map[string]any{"id": "m-1", "type": "group.seal", "traceparent": "00-1-2-01", "data": `{"group":"g"}`}, entries[0].Values)
		require.Equal(t, map[string]any{"type": "audit.violation", "data": ""}, entries[1].Values)

		require.ErrorContains(t, p.Publish("s", message.NewMessage("x", nil)), "metadata type is missing")

		require.NoError(t, p.Close())
		require.Error(t, p.Publish("s", whole))
		require.NoError(t, c.Ping(ctx), "the connection is shared")
	})
}

// TestPublisherSendsTogether: 100 messages of one call are published in order, and without an XADD
// for each. A call without messages publishes nothing.
func TestPublisherSendsTogether(t *testing.T) {
	redistest.BothAlone(t, func(t *testing.T, url string) {
		ctx := context.Background()
		c := connect(t, url)
		single := &calls{begin: []any{"xadd"}}
		c.Cmd.AddHook(single)
		p, err := NewPublisher(c)
		require.NoError(t, err)
		var msgs []*message.Message
		for i := range 100 {
			msgs = append(msgs, running(fmt.Sprint(i)))
		}
		require.NoError(t, p.Publish("s"))
		require.NoError(t, p.Publish("s", msgs...))
		require.Zero(t, single.n.Load())
		entries := c.Cmd.XRange(ctx, "s", "-", "+").Val()
		require.Len(t, entries, len(msgs))
		for i, e := range entries {
			require.Equal(t, msgs[i].UUID, e.Values["id"])
		}

		// If one message of a call is invalid, no message of the call is published, not even those
		// before it.
		err = p.Publish("t", running("fine"), message.NewMessage("typeless", nil))
		require.ErrorContains(t, err, "typeless")
		require.ErrorContains(t, err, "metadata type is missing")
		require.NoError(t, c.Cmd.Set(ctx, "u", "of the wrong type", 0).Err())
		err = p.Publish("u", running("first"), running("second"))
		require.ErrorContains(t, err, "publish message first to stream u")
		require.ErrorContains(t, err, "WRONGTYPE")
		require.Zero(t, c.Cmd.Exists(ctx, "t").Val())

		require.NoError(t, p.Close())
		require.Error(t, p.Publish("s", msgs...))
	})
}

func TestPublisherFindsMemoryFull(t *testing.T) {
	t.Parallel()
	ctx := context.Background()
	c := connect(t, redistest.Server(t).URL())
	p, err := NewPublisher(c)
	require.NoError(t, err)
	require.NoError(t, c.Cmd.ConfigSet(ctx, "maxmemory", "1").Err())
	require.True(t, call.IsOOM(p.Publish("s", running("first"), running("second"))))
}

func running(id string) *message.Message {
	return NewMessage(id, "group.running", nil)
}

func BenchmarkPublish(b *testing.B) {
	c := connect(b, redistest.Server(b).URL())
	p, err := NewPublisher(c)
	require.NoError(b, err)
	var msgs []*message.Message
	for i := range 20 {
		msgs = append(msgs, running(fmt.Sprint(i)))
	}
	b.ReportAllocs()
	for b.Loop() {
		require.NoError(b, p.Publish("s", msgs...))
	}
	b.ReportMetric(float64(b.N*len(msgs))/b.Elapsed().Seconds(), "messages/s")
}
