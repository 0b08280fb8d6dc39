package stream_test

import (
	"context"
	"encoding/json"
	"fmt"
	"testing"
	"time"

	"github.com/ThreeDotsLabs/watermill/message"
	"github.com/redis/go-redis/v9"
	"github.com/stretchr/testify/require"
	"go.uber.org/goleak"

	"github.com/bulkaction/bulkaction/api"
	"github.com/bulkaction/bulkaction/client/stream"
	"github.com/bulkaction/bulkaction/internal/redisx"
	"github.com/bulkaction/bulkaction/internal/redisx/wm"
	"github.com/bulkaction/bulkaction/internal/testkit/redistest"
)

const patience = 30 * time.Second

func TestMain(m *testing.M) {
	// A goroutine of watermill's subscriber runs for up to a second after Close, until it notices
	// that its connections are closed.
	goleak.VerifyTestMain(m, redistest.IgnoreServers(),
		goleak.IgnoreAnyFunction("github.com/ThreeDotsLabs/watermill-redisstream/pkg/redisstream.(*Subscriber).read"))
}

const events = "bulk-action:events"

// world is an installation whose events the test publishes.
type world struct {
	testing.TB
	url       string
	conn      *redisx.Conn
	publisher message.Publisher
}

func newWorld(t testing.TB) *world {
	url := redistest.Server(t).URL()
	conn, err := redisx.Connect(t.Context(), redisx.Config{URL: url})
	require.NoError(t, err)
	t.Cleanup(func() { _ = conn.Close() })
	p, err := wm.NewPublisher(conn)
	require.NoError(t, err)
	return &world{t, url, conn, p}
}

func (w *world) subscribe(cfg stream.Config) <-chan *message.Message {
	w.Helper()
	s, err := stream.NewSubscriber(w.Context(), w.url, cfg)
	require.NoError(w, err)
	w.Cleanup(func() { require.NoError(w, s.Close()) })
	require.Equal(w, events, s.Events())
	out, err := s.Subscribe(context.WithoutCancel(w.Context()), s.Events())
	require.NoError(w, err)
	return out
}

// publish publishes the event of a group.
func (w *world) publish(id string) {
	w.Helper()
	data, err := json.Marshal(api.Event{ID: id, Type: "group.running", Group: &api.Group{ID: id}})
	require.NoError(w, err)
	msg := message.NewMessage(id, data)
	msg.Metadata = message.Metadata{stream.FieldType: "group.running", stream.FieldTraceParent: "00-1-2-01"}
	require.NoError(w, w.publisher.Publish(events, msg))
}

func (w *world) receive(out <-chan *message.Message) *message.Message {
	w.Helper()
	select {
	case msg, ok := <-out:
		require.True(w, ok, "the subscription has ended")
		return msg
	case <-time.After(patience):
		require.FailNow(w, "no message came")
		return nil
	}
}

func (w *world) receiveEvent(out <-chan *message.Message, id string) {
	w.Helper()
	msg := w.receive(out)
	e, err := stream.Event(msg)
	require.NoError(w, err)
	require.Equal(w, id, e.ID)
	require.Equal(w, id, e.Group.ID)
	require.Equal(w, id, msg.UUID)
	require.Equal(w, "00-1-2-01", msg.Metadata.Get(stream.FieldTraceParent))
	require.True(w, msg.Ack())
}

// TestBadEntriesDoNotEndTheSubscription: entries of the stream that are no events are delivered, so
// that the program can see them, and do not end the subscription.
func TestBadEntriesDoNotEndTheSubscription(t *testing.T) {
	t.Parallel()
	w := newWorld(t)
	for _, group := range []string{"", "followers"} {
		out := w.subscribe(stream.Config{Group: group})
		bad := [][]string{{"hello", "world"}, {"type", "group.running"}, {"type", "group.running", "data", "{"}, {"data", `{"type":"x"}`}, {"", ""}}
		for _, fields := range bad {
			require.NoError(t, w.conn.Cmd.XAdd(t.Context(), &redis.XAddArgs{Stream: events, Values: fields}).Err())
		}
		w.publish("after")
		for range bad {
			msg := w.receive(out)
			_, err := stream.Event(msg)
			require.ErrorContains(t, err, "decode event")
			msg.Ack()
		}
		w.receiveEvent(out, "after")
		require.NoError(t, w.conn.Cmd.Del(t.Context(), events).Err())
	}
}

// TestSubscribers: without a consumer group, each of two subscribers gets every event since it was
// created. The subscriber of a new group also gets the events from before, and acknowledges them.
func TestSubscribers(t *testing.T) {
	t.Parallel()
	w := newWorld(t)
	w.publish("before")
	one, other := w.subscribe(stream.Config{}), w.subscribe(stream.Config{})
	for i := range 20 {
		w.publish(fmt.Sprint("e", i))
	}
	for i := range 20 {
		w.receiveEvent(one, fmt.Sprint("e", i))
		w.receiveEvent(other, fmt.Sprint("e", i))
	}
	shared := w.subscribe(stream.Config{Group: "shared"})
	w.receiveEvent(shared, "before")
	for i := range 20 {
		w.receiveEvent(shared, fmt.Sprint("e", i))
	}
	require.Eventually(t, func() bool { return w.conn.Cmd.XPending(t.Context(), events, "shared").Val().Count == 0 }, patience, time.Millisecond)
}

// TestSubscriptionGoesOn: a nacked message is delivered again. A subscription survives that Redis
// loses all data.
func TestSubscriptionGoesOn(t *testing.T) {
	t.Parallel()
	w := newWorld(t)
	out := w.subscribe(stream.Config{Group: "g"})
	w.publish("twice")
	require.True(t, w.receive(out).Nack())
	w.receiveEvent(out, "twice")
	require.NoError(t, w.conn.Cmd.FlushAll(t.Context()).Err())
	w.publish("later")
	w.receiveEvent(out, "later")
}

func TestMarshallerNeedsAType(t *testing.T) {
	_, err := stream.Marshaller{}.Marshal("", message.NewMessage("x", nil))
	require.ErrorContains(t, err, "metadata type is missing")
}
