package wm

import (
	"context"
	"testing"
	"time"

	"github.com/ThreeDotsLabs/watermill/message"
	"github.com/stretchr/testify/require"

	"github.com/bulkaction/bulkaction/internal/redisx/call"
	"github.com/bulkaction/bulkaction/internal/redisx/stream"
	"github.com/bulkaction/bulkaction/internal/testkit/redistest"
)

// While a nacked message waits, later messages are delivered. When a subscriber closes, another
// consumer gets its undelivered messages at once.
func TestCloseHandsBack(t *testing.T) {
	redistest.BothAlone(t, func(t *testing.T, url string) {
		c := connect(t, url)
		stream := unique("ingest")
		patient := SubscriberConfig{RedeliverAfter: time.Hour, MinIdle: time.Hour}
		leaver := subscriber(t, c, patient)
		out := subscribe(t, leaver, stream)
		publish(t, c, stream, 0, 1)
		nacked := receive(t, out)
		require.True(t, nacked.Nack())
		publish(t, c, stream, 1, 100)
		for range 99 {
			msg := receive(t, out)
			require.NotEqual(t, nacked.UUID, msg.UUID)
			require.True(t, msg.Ack())
		}
		publish(t, c, stream, 100, 101)
		require.Eventually(t, func() bool { return pending(t, c, stream) == 2 }, patience, glance) // the last one was read but not received by a handler
		require.NoError(t, leaver.Close())
		require.NoError(t, leaver.Close())
		_, open := <-out
		require.False(t, open)
		require.EqualValues(t, 2, pending(t, c, stream))

		out = subscribe(t, subscriber(t, c, patient), stream)
		for _, want := range []string{"m0", "m100"} {
			msg := receive(t, out)
			require.Equal(t, want, msg.UUID)
			msg.Ack()
		}
		awaitEmpty(t, c, stream)
	})
}

func TestInFlightBoundsBytes(t *testing.T) {
	f := newInFlight(100, 1000)
	big := stream.Entry{ID: "1-0", Fields: []string{"data", string(make([]byte, 2000))}}
	require.Equal(t, 1, f.awaitRoom(context.Background(), 2000))
	require.NotNil(t, f.add(big))
	require.Nil(t, f.add(big))
	ended, cancel := context.WithCancel(context.Background())
	cancel()
	require.Zero(t, f.awaitRoom(ended, 2000))
	go f.remove([]string{"1-0", "unknown"})
	require.Equal(t, 1, f.awaitRoom(context.Background(), 2000))
	require.Zero(t, f.bytes)
}

// A slow handler keeps its message while other consumers claim abandoned ones.
func TestSlowHandlerKeepsItsMessage(t *testing.T) {
	redistest.BothAlone(t, func(t *testing.T, url string) {
		stream := unique("ingest")
		cfg := SubscriberConfig{MinIdle: 3 * time.Second}
		slow, other := connect(t, url), connect(t, url)
		renewals, claims := &calls{begin: []any{"evalsha"}, has: "slow"}, &calls{begin: []any{"xautoclaim"}}
		slow.Cmd.AddHook(renewals)
		other.Cmd.AddHook(claims)

		cfg.Consumer = "slow" // an argument of the renew script, but not of the script that deletes dead consumers: see calls.has
		out := subscribe(t, subscriber(t, slow, cfg), stream)
		publish(t, slow, stream, 0, 1)
		msg := receive(t, out)
		before := renewals.n.Load()
		require.Eventually(t, func() bool { return renewals.n.Load() >= before+4 }, patience, glance) // the handler has run longer than MinIdle
		cfg.Consumer = "thief"
		thief := subscribe(t, subscriber(t, other, cfg), stream)
		require.Eventually(t, func() bool { return claims.n.Load() >= 1 }, patience, glance)
		select {
		case stolen := <-thief:
			require.FailNow(t, "taken over", stolen.UUID)
		default:
		}
		msg.Ack()
		awaitEmpty(t, slow, stream)
	})
}

// The control of TestSlowHandlerKeepsItsMessage: when a process has lost its connection, another
// consumer claims the messages of this process.
func TestDeadConsumersMessagesAreTakenOver(t *testing.T) {
	redistest.BothAlone(t, func(t *testing.T, url string) {
		stream := unique("ingest")
		cfg := SubscriberConfig{MinIdle: 300 * time.Millisecond, CloseTimeout: time.Millisecond}
		dying, c := connect(t, url), connect(t, url)
		publish(t, c, stream, 0, 50)
		dead := subscriber(t, dying, cfg)
		out := subscribe(t, dead, stream)
		for range 50 {
			receive(t, out)
		}
		require.NoError(t, dying.Close())
		require.Error(t, dead.Close())

		var got tally
		stop := route(t, subscriber(t, c, cfg), stream, func(msg *message.Message) error {
			got.add(msg.UUID)
			return nil
		})
		awaitEmpty(t, c, stream)
		stop()
		require.Equal(t, 50, got.size())
	})
}

// When a reply of XREADGROUP is lost, its entries are pending and no process knows of them. The
// subscription claims and delivers them.
func TestLostBatchIsFound(t *testing.T) {
	redistest.BothAlone(t, func(t *testing.T, url string) {
		ctx := context.Background()
		c := connect(t, url)
		name := unique("ingest")
		me := SubscriberConfig{Consumer: "me", MinIdle: 300 * time.Millisecond}
		reader := stream.NewReader(c, group, me.Consumer)
		require.NoError(t, reader.EnsureGroup(ctx, name))
		out := subscribe(t, subscriber(t, c, me), name)
		publish(t, c, name, 0, 1)
		known := receive(t, out)

		// The test reads as the same consumer until it gets an entry before the subscription does.
		lost := 0
		for id := 1; lost < 5; id++ {
			publish(t, c, name, id, id+1)
			batches, err := reader.Read(ctx, []string{name}, 10, 0)
			require.NoError(t, err)
			for _, b := range batches {
				lost += len(b.Entries)
			}
			if batches == nil {
				receive(t, out).Ack()
			}
		}
		for range lost {
			receive(t, out).Ack()
		}
		known.Ack() // this message was renewed all the time, and delivered only once
		awaitEmpty(t, c, name)
	})
}

func TestOldestPending(t *testing.T) {
	redistest.BothAlone(t, func(t *testing.T, url string) {
		ctx := context.Background()
		c := connect(t, url)
		stream := unique("ingest")
		s := subscriber(t, c, SubscriberConfig{})
		_, _, err := s.OldestPending(ctx, stream)
		require.True(t, call.IsNoGroup(err), "%v", err)

		out := subscribe(t, s, stream)
		publish(t, c, stream, 0, 2)
		first, second := receive(t, out), receive(t, out)
		id, ok, err := s.OldestPending(ctx, stream)
		require.NoError(t, err)
		require.True(t, ok)
		require.Equal(t, first.Metadata[MetadataEntryID], id)

		// Acknowledged entries do not count as pending, although their acknowledgement is sent
		// later. The goroutine that waits for the message must see it first.
		first.Ack()
		require.Eventually(t, func() bool {
			id, ok, err := s.OldestPending(ctx, stream)
			return err == nil && ok && id == second.Metadata[MetadataEntryID]
		}, patience, glance)
		second.Ack()
		require.Eventually(t, func() bool {
			_, ok, err := s.OldestPending(ctx, stream)
			return err == nil && !ok
		}, patience, glance)
	})
}
