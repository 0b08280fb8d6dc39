package redisx

import (
	"context"
	"fmt"
	"testing"

	"github.com/ThreeDotsLabs/watermill/message"
	"github.com/stretchr/testify/require"
)

func TestPublisherWritesFlatEntries(t *testing.T) {
	onBoth(t, func(t *testing.T, url string) {
		ctx := context.Background()
		c := connect(t, url)
		p, err := NewPublisher(c, map[string]int64{"bounded": 100})
		require.NoError(t, err)

		whole := message.NewMessage("m-1", []byte(`{"group":"g"}`))
		whole.Metadata = message.Metadata{FieldType: "group.seal", FieldTraceParent: "00-1-2-01", "other": "left out"}
		bare := message.NewMessage("", nil)
		bare.Metadata.Set(FieldType, "audit.violation")
		require.NoError(t, p.Publish("s", whole, bare))
		entries := c.Cmd.XRange(ctx, "s", "-", "+").Val()
		require.Len(t, entries, 2)
		require.Equal(t, map[string]any{"id": "m-1", "type": "group.seal", "traceparent": "00-1-2-01", "data": `{"group":"g"}`}, entries[0].Values)
		require.Equal(t, map[string]any{"type": "audit.violation", "data": ""}, entries[1].Values)

		require.ErrorContains(t, p.Publish("s", message.NewMessage("x", nil)), "metadata type is missing")

		for i := range 1000 {
			msg := message.NewMessage(fmt.Sprint(i), nil)
			msg.Metadata.Set(FieldType, "group.running")
			require.NoError(t, p.Publish("bounded", msg))
		}
		require.Less(t, c.Cmd.XLen(ctx, "bounded").Val(), int64(500))

		// What is published is what a subscriber hands out.
		msg := receive(t, subscribe(t, subscriber(t, c, SubscriberConfig{}), "s"))
		require.Equal(t, whole.UUID, msg.UUID)
		require.Equal(t, whole.Payload, msg.Payload)
		require.Equal(t, "group.seal", msg.Metadata.Get(FieldType))
		msg.Ack()

		require.NoError(t, p.Close())
		require.Error(t, p.Publish("s", whole))
		require.NoError(t, c.Ping(ctx), "the connection is shared")
	})
}
