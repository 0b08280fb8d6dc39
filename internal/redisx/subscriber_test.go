package redisx

import (
	"bytes"
	"context"
	"fmt"
	"log/slog"
	"slices"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/ThreeDotsLabs/watermill"
	"github.com/ThreeDotsLabs/watermill/message"
	"github.com/redis/go-redis/v9"
	"github.com/stretchr/testify/require"

	"github.com/bulkaction/bulkaction/internal/redistest"
)

const group = "workers"

func subscriber(t testing.TB, c *Conn, cfg SubscriberConfig) *Subscriber {
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

func publish(t testing.TB, c *Conn, stream string, from, to int) {
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

func pending(t testing.TB, c *Conn, stream string) int64 {
	t.Helper()
	p, err := c.Cmd.XPending(context.Background(), stream, group).Result()
	require.NoError(t, err)
	return p.Count
}

// awaitEmpty waits until nothing is left of a stream, neither entries nor pending ones.
func awaitEmpty(t testing.TB, c *Conn, stream string) {
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
	onBoth(t, func(t *testing.T, url string) { deliversEverything(t, url, 5000) })
}

func TestMessageCarriesItsEntry(t *testing.T) {
	onBoth(t, func(t *testing.T, url string) {
		c := connect(t, url)
		binary := string([]byte{0, 255, '\r', '\n', 0x80})
		for name, test := range map[string]struct {
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
			t.Run(name, func(t *testing.T) {
				stream := unique("ingest")
				id := add(t, c, stream, test.fields...)
				msg := receive(t, subscribe(t, subscriber(t, c, SubscriberConfig{}), stream))
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
				require.Equal(t, Entry{ID: id, Fields: test.fields}, entry)
			})
		}
	})
	_, ok := EntryOf(message.NewMessage("x", nil))
	require.False(t, ok)
}

// A nacked message waits, holds up nobody, is not lost, and comes back as the same entry.
func TestNackRedelivers(t *testing.T) {
	onBoth(t, func(t *testing.T, url string) {
		c := connect(t, url)
		stream := unique("ingest")
		publish(t, c, stream, 0, 300)
		var got tally
		stop := route(t, subscriber(t, c, SubscriberConfig{RedeliverAfter: 5 * time.Millisecond}), stream, func(msg *message.Message) error {
			if times := got.add(msg.UUID); times < 4 && strings.HasSuffix(msg.UUID, "7") {
				return context.Canceled // not yet; the router logs others
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

// While a nacked message waits, others pass. What no handler has when a subscriber closes is at once another's.
func TestCloseHandsBack(t *testing.T) {
	onBoth(t, func(t *testing.T, url string) {
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
		require.Eventually(t, func() bool { return pending(t, c, stream) == 2 }, patience, glance) // the last one was read, not received
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

func TestInFlightIsBounded(t *testing.T) {
	onBoth(t, func(t *testing.T, url string) {
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
			held[i%10] = receive(t, out) // there is room only because of the ack
			require.LessOrEqual(t, pending(t, c, stream), int64(10))
		}
		for _, msg := range held {
			msg.Ack()
		}
		awaitEmpty(t, c, stream)
	})
}

func TestInFlightBoundsBytes(t *testing.T) {
	f := newInFlight(100, 1000)
	big := Entry{ID: "1-0", Fields: []string{"data", string(make([]byte, 2000))}}
	require.Equal(t, 100, f.awaitRoom(context.Background()))
	require.NotNil(t, f.add(big))
	require.Nil(t, f.add(big))
	ended, cancel := context.WithCancel(context.Background())
	cancel()
	require.Zero(t, f.awaitRoom(ended))
	go f.remove([]string{"1-0", "unknown"})
	require.Equal(t, 100, f.awaitRoom(context.Background()))
	require.Zero(t, f.bytes)
}

// A slow handler keeps its message, when others look for abandoned ones.
func TestSlowHandlerKeepsItsMessage(t *testing.T) {
	onBoth(t, func(t *testing.T, url string) {
		stream := unique("ingest")
		cfg := SubscriberConfig{MinIdle: 3 * time.Second}
		slow, other := connect(t, url), connect(t, url)
		renewals, claims := &calls{begin: []any{"evalsha", renewScript.sha}}, &calls{begin: []any{"xautoclaim"}}
		slow.Cmd.AddHook(renewals)
		other.Cmd.AddHook(claims)

		out := subscribe(t, subscriber(t, slow, cfg), stream)
		publish(t, slow, stream, 0, 1)
		msg := receive(t, out)
		before := renewals.n.Load()
		require.Eventually(t, func() bool { return renewals.n.Load() >= before+4 }, patience, glance) // longer than MinIdle
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

// The control of the test before: what a process had when its connection died goes to another.
func TestDeadConsumersMessagesAreTakenOver(t *testing.T) {
	onBoth(t, func(t *testing.T, url string) {
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

// Entries that were delivered in a reply which got lost are pending without anyone knowing of them.
func TestLostBatchIsFound(t *testing.T) {
	onBoth(t, func(t *testing.T, url string) {
		ctx := context.Background()
		c := connect(t, url)
		stream := unique("ingest")
		me := SubscriberConfig{Consumer: "me", MinIdle: 300 * time.Millisecond}
		reader := NewReader(c, group, me.Consumer)
		require.NoError(t, reader.EnsureGroup(ctx, stream))
		out := subscribe(t, subscriber(t, c, me), stream)
		publish(t, c, stream, 0, 1)
		known := receive(t, out)

		// The same consumer reads beside the subscription, until it was the faster one.
		lost := 0
		for id := 1; lost < 5; id++ {
			publish(t, c, stream, id, id+1)
			batches, err := reader.Read(ctx, []string{stream}, 10, 0)
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
		known.Ack() // was renewed all the time, and not handed out twice
		awaitEmpty(t, c, stream)
	})
}

func TestSubscriberSurvivesFlush(t *testing.T) {
	onBoth(t, func(t *testing.T, url string) {
		c := connect(t, url)
		stream := unique("ingest")
		out := subscribe(t, subscriber(t, c, SubscriberConfig{}), stream)
		publish(t, c, stream, 0, 1)
		held := receive(t, out)
		require.NoError(t, c.Cmd.FlushAll(context.Background()).Err())
		require.Eventually(t, func() bool { // or the new entry has the old one's id
			return held.Metadata[MetadataEntryID] < fmt.Sprint(time.Now().UnixMilli())
		}, patience, time.Millisecond)
		publish(t, c, stream, 1, 2)
		msg := receive(t, out)
		require.Equal(t, "m1", msg.UUID)
		require.True(t, held.Ack())
		require.True(t, msg.Ack())
		awaitEmpty(t, c, stream)
	})
}

// A group that is created anew delivers what is in work here once more; it is not handed out twice.
func TestSubscriberSurvivesLostGroup(t *testing.T) {
	onBoth(t, func(t *testing.T, url string) {
		c := connect(t, url)
		stream := unique("ingest")
		out := subscribe(t, subscriber(t, c, SubscriberConfig{}), stream)
		publish(t, c, stream, 0, 1)
		held := receive(t, out)
		require.NoError(t, c.Cmd.XGroupDestroy(context.Background(), stream, group).Err())
		publish(t, c, stream, 1, 2)
		msg := receive(t, out)
		require.Equal(t, "m1", msg.UUID)
		held.Ack()
		msg.Ack()
		awaitEmpty(t, c, stream)
	})
}

func TestSubscriberSurvivesRestart(t *testing.T) {
	t.Parallel()
	s := redistest.Server(t, redistest.AOF)
	c := connect(t, s.URL())
	stream := unique("ingest")
	publish(t, c, stream, 0, 200)

	var log logBuffer
	var got tally
	half, resume := make(chan struct{}), make(chan struct{})
	stop := route(t, subscriber(t, c, SubscriberConfig{Logger: slog.New(slog.NewTextHandler(&log, nil))}), stream, func(msg *message.Message) error {
		got.add(msg.UUID)
		if msg.UUID == "m99" {
			close(half)
		}
		if msg.UUID >= "m2" && msg.UUID < "m3" {
			<-resume // in work during the outage
		}
		return nil
	})
	<-half
	s.Kill()
	require.Eventually(t, func() bool { return log.count("stream cannot be served") > 0 }, patience, glance)
	close(resume)
	s.Restart()
	publish(t, c, stream, 200, 300)
	awaitEmpty(t, c, stream)
	require.Eventually(t, func() bool { return log.count("stream is served again") > 0 }, patience, glance)
	stop()
	require.Equal(t, 300, got.size())
	require.Equal(t, 1, log.count("stream cannot be served"), "%s", &log)
	require.Equal(t, 1, log.count("stream is served again"), "%s", &log)
}

func TestSubscriberSurvivesFailover(t *testing.T) {
	t.Parallel()
	ctx := context.Background()
	s := redistest.Sentinel(t)
	c := connect(t, s.URL)
	stream := unique("ingest")
	var got tally
	stop := route(t, subscriber(t, c, SubscriberConfig{}), stream, func(msg *message.Message) error {
		got.add(msg.UUID)
		return nil
	})
	publish(t, c, stream, 0, 100)
	awaitEmpty(t, c, stream)
	s.Master.Kill()
	s.AwaitFailover()
	require.Eventually(t, func() bool { return c.Cmd.Set(ctx, "writable", "yes", 0).Err() == nil }, patience, glance)
	publish(t, c, stream, 100, 200)
	require.Eventually(t, func() bool { return got.size() == 200 }, patience, glance)
	require.Eventually(t, func() bool { return c.Cmd.XLen(ctx, stream).Val() == 0 }, patience, glance)
	stop()
}

type logBuffer struct {
	mu  sync.Mutex
	buf bytes.Buffer
}

func (l *logBuffer) Write(p []byte) (int, error) {
	l.mu.Lock()
	defer l.mu.Unlock()
	return l.buf.Write(p)
}

func (l *logBuffer) String() string {
	l.mu.Lock()
	defer l.mu.Unlock()
	return l.buf.String()
}

func (l *logBuffer) count(text string) int { return strings.Count(l.String(), text) }

func TestOldestPending(t *testing.T) {
	onBoth(t, func(t *testing.T, url string) {
		ctx := context.Background()
		c := connect(t, url)
		stream := unique("ingest")
		s := subscriber(t, c, SubscriberConfig{})
		_, _, err := s.OldestPending(ctx, stream)
		require.True(t, IsNoGroup(err), "%v", err)

		out := subscribe(t, s, stream)
		publish(t, c, stream, 0, 2)
		first, second := receive(t, out), receive(t, out)
		id, ok, err := s.OldestPending(ctx, stream)
		require.NoError(t, err)
		require.True(t, ok)
		require.Equal(t, first.Metadata[MetadataEntryID], id)

		// What was acknowledged before is not in the way, although acknowledgements are sent later. The
		// watching goroutine has to notice it first.
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

// Handlers may finish while the subscription drains; past CloseTimeout their contexts end.
func TestMessageContextOutlivesSubscription(t *testing.T) {
	onBoth(t, func(t *testing.T, url string) {
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
	onBoth(t, func(t *testing.T, url string) {
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
		require.Eventually(t, func() bool { // once the old one is done
			_, err = s.Subscribe(context.Background(), "s")
			return err == nil
		}, patience, glance)
		require.NoError(t, s.Close())
		_, err = s.Subscribe(context.Background(), "s")
		require.ErrorContains(t, err, "closed")
	})
}

// Renewing tells what another consumer has taken over, and does not take it back.
func TestRenewDoesNotSteal(t *testing.T) {
	onBoth(t, func(t *testing.T, url string) {
		ctx := context.Background()
		c := connect(t, url)
		sub := newSubscription(subscriber(t, c, SubscriberConfig{Consumer: "me"}), "s", func() {})
		lost, err := sub.renew(ctx, []string{"1-1"}, 0)
		require.NoError(t, err, "a group that is away")
		require.Empty(t, lost)

		require.NoError(t, sub.reader.EnsureGroup(ctx, "s"))
		publish(t, c, "s", 0, 450)
		batches, err := sub.reader.Read(ctx, []string{"s"}, 450, 0)
		require.NoError(t, err)
		entries := batches[0].Entries
		ids := make([]string, len(entries))
		for i, e := range entries {
			ids[i] = e.ID
			sub.flight.add(e)
		}
		taken, _, _, err := NewReader(c, group, "other").claim(ctx, "s", 0, "0-0", 3)
		require.NoError(t, err)
		require.Len(t, taken, 3)

		lost, err = sub.renew(ctx, append(ids, "1-1"), time.Hour)
		require.NoError(t, err)
		require.Equal(t, ids[:3], lost)
		for consumer, want := range map[string]int{"me": 447, "other": 3} {
			held, err := c.Cmd.XPendingExt(ctx, &redis.XPendingExtArgs{Stream: "s", Group: group, Start: "-", End: "+", Count: 500, Consumer: consumer}).Result()
			require.NoError(t, err)
			require.Len(t, held, want)
			require.Equal(t, consumer == "me", held[0].Idle >= time.Hour)
		}

		// A message that waits to be handed out again is left to the other one.
		require.Equal(t, 3, sub.flight.setLost(lost))
		require.Zero(t, sub.flight.setLost(lost))
		require.True(t, sub.flight.dropLost(sub.flight.byID[ids[0]]))
		require.False(t, sub.flight.dropLost(sub.flight.byID[ids[5]]))
		require.Nil(t, sub.flight.add(entries[1]), "taken back")
		require.False(t, sub.flight.dropLost(sub.flight.byID[ids[1]]))
	})
}

func TestForgetDeadConsumers(t *testing.T) {
	onBoth(t, func(t *testing.T, url string) {
		ctx := context.Background()
		c := connect(t, url)
		sub := newSubscription(subscriber(t, c, SubscriberConfig{Consumer: "me"}), "s", func() {})
		require.NoError(t, sub.forgetDead(ctx), "no stream")
		add(t, c, "s", "k", "v")
		require.NoError(t, sub.forgetDead(ctx), "no group")

		_, err := NewReader(c, group, "holder").Read(ctx, []string{"s"}, 1, 0)
		require.NoError(t, err)
		require.NoError(t, c.Cmd.XGroupCreateConsumer(ctx, "s", group, "idler").Err())
		// Its idle time begins, at miniredis, with its first command.
		require.NoError(t, c.Cmd.XClaimJustID(ctx, &redis.XClaimArgs{Stream: "s", Group: group, Consumer: "idler", Messages: []string{"1-1"}}).Err())
		consumers := func() (names []string) {
			for _, consumer := range c.Cmd.XInfoConsumers(ctx, "s", group).Val() {
				names = append(names, consumer.Name)
			}
			return names
		}
		require.NoError(t, sub.forgetDead(ctx))
		require.Equal(t, []string{"holder", "idler"}, consumers(), "not idle for long")
		require.Eventually(t, func() bool {
			n, err := forgetScript.Run(ctx, c.Cmd, "s", []any{group, 0})
			return err == nil && n == int64(1)
		}, patience, glance)
		require.Equal(t, []string{"holder"}, consumers())
		require.EqualValues(t, 1, pending(t, c, "s"))
	})
}

// BenchmarkSubscriber measures messages/s from a stream through a watermill router to a handler that acks at once.
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
