package wm

import (
	"context"
	"fmt"
	"slices"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/ThreeDotsLabs/watermill"
	"github.com/ThreeDotsLabs/watermill/message"
	"github.com/redis/go-redis/v9"
	"github.com/stretchr/testify/require"

	"github.com/bulkaction/bulkaction/internal/redisx"
	"github.com/bulkaction/bulkaction/internal/redisx/stream"
	"github.com/bulkaction/bulkaction/internal/testkit/redistest"
)

const group = "workers"

func subscriber(t testing.TB, c *redisx.Conn, cfg SubscriberConfig) *Subscriber {
	t.Helper()
	cfg.Group, cfg.DeleteOnAck = group, true
	if cfg.Consumer == "" {
		cfg.Consumer = unique("consumer")
	}
	if cfg.Block == 0 {
		cfg.Block = 50 * time.Millisecond
	}
	if cfg.CloseTimeout == 0 {
		cfg.CloseTimeout = patience
	}
	s, err := NewSubscriber(c, cfg)
	require.NoError(t, err)
	t.Cleanup(func() { _ = s.Close() })
	return s
}

func subscribe(t testing.TB, s *Subscriber, stream string) <-chan *message.Message {
	t.Helper()
	out, err := s.Subscribe(context.Background(), stream)
	require.NoError(t, err)
	return out
}

func receive(t testing.TB, out <-chan *message.Message) *message.Message {
	t.Helper()
	select {
	case msg, ok := <-out:
		require.True(t, ok, "the subscription has ended")
		return msg
	case <-time.After(patience):
		require.FailNow(t, "no message came")
		return nil
	}
}

// tally counts how often each message was handled.
type tally struct {
	mu   sync.Mutex
	seen map[string]int
}

func (y *tally) add(id string) (times int) {
	y.mu.Lock()
	defer y.mu.Unlock()
	if y.seen == nil {
		y.seen = map[string]int{}
	}
	y.seen[id]++
	return y.seen[id]
}

func (y *tally) size() int {
	y.mu.Lock()
	defer y.mu.Unlock()
	return len(y.seen)
}

// route runs a watermill router with one handler until the returned stop is called.
func route(t testing.TB, sub message.Subscriber, stream string, handle message.NoPublishHandlerFunc) (stop func()) {
	t.Helper()
	router, err := message.NewRouter(message.RouterConfig{CloseTimeout: patience}, watermill.NopLogger{})
	require.NoError(t, err)
	router.AddConsumerHandler("test", stream, sub, handle)
	ended := make(chan error, 1)
	go func() { ended <- router.Run(context.Background()) }()
	<-router.Running()
	stop = sync.OnceFunc(func() {
		require.NoError(t, router.Close())
		require.NoError(t, <-ended)
		require.NoError(t, sub.Close())
	})
	t.Cleanup(stop)
	return stop
}

func publish(t testing.TB, c *redisx.Conn, stream string, from, to int) {
	t.Helper()
	for batch := range slices.Chunk(make([]struct{}, to-from), 200) {
		pipe := c.Cmd.Pipeline()
		for range batch {
			pipe.XAdd(context.Background(), &redis.XAddArgs{Stream: stream, Values: []string{"type", "test", "id", fmt.Sprint("m", from), "data", "{}"}})
			from++
		}
		_, err := pipe.Exec(context.Background())
		require.NoError(t, err)
	}
}

func pending(t testing.TB, c *redisx.Conn, stream string) int64 {
	t.Helper()
	p, err := c.Cmd.XPending(context.Background(), stream, group).Result()
	require.NoError(t, err)
	return p.Count
}

// awaitEmpty waits until a stream has no entries and no pending entries.
func awaitEmpty(t testing.TB, c *redisx.Conn, stream string) {
	t.Helper()
	require.Eventually(t, func() bool {
		return c.Cmd.XLen(context.Background(), stream).Val() == 0 && pending(t, c, stream) == 0
	}, patience, glance)
}

func deliversEverything(t *testing.T, url string, n int) {
	c := connect(t, url)
	stream := unique("ingest")
	publish(t, c, stream, 0, n/2)
	var got tally
	stop := route(t, subscriber(t, c, SubscriberConfig{}), stream, func(msg *message.Message) error {
		got.add(msg.UUID)
		return nil
	})
	publish(t, c, stream, n/2, n)
	awaitEmpty(t, c, stream)
	stop()
	require.Equal(t, n, got.size())
	for id, times := range got.seen {
		require.Equal(t, 1, times, id)
	}
}

func TestSubscriberDeliversEverything(t *testing.T) {
	redistest.BothAlone(t, func(t *testing.T, url string) { deliversEverything(t, url, 5000) })
}

func TestSubscriberDeliversEverythingOfACluster(t *testing.T) {
	t.Parallel()
	url, _ := redistest.Cluster(t, 3)
	deliversEverything(t, url, 500)
}

func TestMessageCarriesItsEntry(t *testing.T) {
	redistest.BothAlone(t, func(t *testing.T, url string) {
		c := connect(t, url)
		binary := string([]byte{0, 255, '\r', '\n', 0x80})
		for what, test := range map[string]struct {
			fields   []string
			id, data string
			metadata map[string]string
		}{
			"whole": {
				fields: []string{"type", "group.seal", "data", `{"group":"g"}`, "id", "m-1", "traceparent", "00-1-2-01"},
				id:     "m-1", data: `{"group":"g"}`,
				metadata: map[string]string{"type": "group.seal", "traceparent": "00-1-2-01"},
			},
			"no data":    {fields: []string{"type", "group.seal"}, metadata: map[string]string{"type": "group.seal"}},
			"no type":    {fields: []string{"data", "{}"}, data: "{}"},
			"strange":    {fields: []string{"hello", "world"}},
			"binary":     {fields: []string{binary, binary, "data", binary, "id", binary}, id: binary, data: binary},
			"twice":      {fields: []string{"data", "1", "data", "2"}, data: "1"},
			"empty data": {fields: []string{"data", "", "", ""}},
		} {
			t.Run(what, func(t *testing.T) {
				name := unique("ingest")
				id := add(t, c, name, test.fields...)
				msg := receive(t, subscribe(t, subscriber(t, c, SubscriberConfig{}), name))
				defer msg.Ack()
				if test.id == "" {
					test.id = id
				}
				want := message.Metadata{MetadataEntryID: id}
				for k, v := range test.metadata {
					want[k] = v
				}
				require.Equal(t, test.id, msg.UUID)
				require.Equal(t, test.data, string(msg.Payload))
				require.Equal(t, want, msg.Metadata)
				entry, ok := EntryOf(msg)
				require.True(t, ok)
				require.Equal(t, stream.Entry{ID: id, Fields: test.fields}, entry)
			})
		}
	})
	_, ok := EntryOf(message.NewMessage("x", nil))
	require.False(t, ok)
}

// A nacked message is delivered again as the same entry, and delays no other message meanwhile.
func TestNackRedelivers(t *testing.T) {
	redistest.BothAlone(t, func(t *testing.T, url string) {
		c := connect(t, url)
		stream := unique("ingest")
		publish(t, c, stream, 0, 300)
		var got tally
		stop := route(t, subscriber(t, c, SubscriberConfig{RedeliverAfter: 5 * time.Millisecond}), stream, func(msg *message.Message) error {
			if times := got.add(msg.UUID); times < 4 && strings.HasSuffix(msg.UUID, "7") {
				return context.Canceled // fails the first time; the router does not log this error
			}
			return nil
		})
		awaitEmpty(t, c, stream)
		stop()
		require.Equal(t, 300, got.size())
		for id, times := range got.seen {
			require.Equal(t, map[bool]int{true: 4, false: 1}[strings.HasSuffix(id, "7")], times, id)
		}
	})
}

func TestInFlightIsBounded(t *testing.T) {
	redistest.BothAlone(t, func(t *testing.T, url string) {
		c := connect(t, url)
		stream := unique("ingest")
		publish(t, c, stream, 0, 25)
		out := subscribe(t, subscriber(t, c, SubscriberConfig{MaxInFlight: 10}), stream)
		held := make([]*message.Message, 0, 10)
		for range 10 {
			held = append(held, receive(t, out))
		}
		require.EqualValues(t, 10, pending(t, c, stream))
		for i := range 15 {
			held[i%10].Ack()
			held[i%10] = receive(t, out) // there is space only because the other message was acknowledged
			require.LessOrEqual(t, pending(t, c, stream), int64(10))
		}
		for _, msg := range held {
			msg.Ack()
		}
		awaitEmpty(t, c, stream)
	})
}

// Handlers may finish after the subscription was closed; after CloseTimeout their contexts end.
func TestMessageContextOutlivesSubscription(t *testing.T) {
	redistest.BothAlone(t, func(t *testing.T, url string) {
		c := connect(t, url)
		stream := unique("ingest")
		publish(t, c, stream, 0, 2)
		s := subscriber(t, c, SubscriberConfig{CloseTimeout: 200 * time.Millisecond})
		ctx, cancel := context.WithCancel(context.Background())
		out, err := s.Subscribe(ctx, stream)
		require.NoError(t, err)
		quick, stuck := receive(t, out), receive(t, out)
		cancel()
		_, open := <-out
		require.False(t, open)
		require.NoError(t, quick.Context().Err())
		require.True(t, quick.Ack())
		<-stuck.Context().Done()
		require.ErrorContains(t, s.Close(), "handlers of 1 messages did not end in time")
		require.EqualValues(t, 1, pending(t, c, stream))
		require.EqualValues(t, 1, c.Cmd.XLen(context.Background(), stream).Val())
	})
}

func TestSubscriberRefuses(t *testing.T) {
	redistest.BothAlone(t, func(t *testing.T, url string) {
		c := connect(t, url)
		_, err := NewSubscriber(c, SubscriberConfig{Group: group})
		require.ErrorContains(t, err, "need names")
		s := subscriber(t, c, SubscriberConfig{})
		ctx, cancel := context.WithCancel(context.Background())
		out, err := s.Subscribe(ctx, "s")
		require.NoError(t, err)
		_, err = s.Subscribe(ctx, "s")
		require.ErrorContains(t, err, "already subscribed")
		cancel()
		for range out {
		}
		require.Eventually(t, func() bool { // succeeds when the old subscription has ended
			_, err = s.Subscribe(context.Background(), "s")
			return err == nil
		}, patience, glance)
		require.NoError(t, s.Close())
		_, err = s.Subscribe(context.Background(), "s")
		require.ErrorContains(t, err, "closed")
	})
}

// BenchmarkSubscriber measures messages per second from a stream through a watermill router to a
// handler that acknowledges at once.
func BenchmarkSubscriber(b *testing.B) {
	c := connect(b, redistest.Server(b).URL())
	const n = 50_000
	var total time.Duration
	for b.Loop() {
		b.StopTimer()
		stream := unique("ingest")
		for i := 0; i < n; i += 1000 {
			publish(b, c, stream, i, i+1000)
		}
		var left sync.WaitGroup
		left.Add(n)
		b.StartTimer()
		start := time.Now()
		stop := route(b, subscriber(b, c, SubscriberConfig{}), stream, func(*message.Message) error {
			left.Done()
			return nil
		})
		left.Wait()
		awaitEmpty(b, c, stream)
		total += time.Since(start)
		b.StopTimer()
		stop()
		b.StartTimer()
	}
	b.ReportMetric(float64(b.N)*n/total.Seconds(), "messages/s")
}
