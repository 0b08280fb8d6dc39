package wm

import (
	"bytes"
	"context"
	"fmt"
	"log/slog"
	"runtime"
	"slices"
	"sync/atomic"
	"testing"
	"time"

	"github.com/ThreeDotsLabs/watermill/message"
	"github.com/redis/go-redis/v9"
	"github.com/stretchr/testify/require"
	"go.uber.org/goleak"

	"github.com/bulkaction/bulkaction/client/stream"
	"github.com/bulkaction/bulkaction/internal/redisx"
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

// TestFollower: a follower gets all of 20 messages of a stream, and deletes from the stream those
// that it has read, but for the last one.
func TestFollower(t *testing.T) {
	redistest.BothAlone(t, func(t *testing.T, url string) {
		ctx, cancel := context.WithCancel(context.Background())
		defer cancel()
		c := connect(t, url)
		p, err := NewPublisher(c)
		require.NoError(t, err)
		require.NoError(t, p.Publish("s", running("0"), running("1")))

		f, err := NewFollower(c, slog.New(slog.DiscardHandler))
		require.NoError(t, err)
		msgs, err := f.Subscribe(ctx, "s")
		require.NoError(t, err)
		seen := map[string]bool{}
		for i := range 20 {
			if i >= 2 {
				require.NoError(t, p.Publish("s", running(fmt.Sprint(i))))
			}
			for !seen[fmt.Sprint(i)] {
				msg := <-msgs
				seen[msg.UUID] = true
				msg.Ack()
			}
		}
		require.Eventually(t, func() bool { return c.Cmd.XLen(ctx, "s").Val() == 1 }, 5*time.Second, 10*time.Millisecond)
		require.NoError(t, f.Close())
		// watermill's Close does not wait for its reader
		require.Eventually(t, func() bool {
			stacks := make([]byte, 1<<20)
			return !bytes.Contains(stacks[:runtime.Stack(stacks, true)], []byte("redisstream.(*Subscriber).read"))
		}, 10*time.Second, 20*time.Millisecond)
		require.NoError(t, c.Ping(context.Background()), "the connection is shared")
	})
}

// patience is the limit for events that must happen; a healthy run needs a fraction of it.
const patience = 30 * time.Second

func TestMain(m *testing.M) { goleak.VerifyTestMain(m, redistest.IgnoreServers()) }

func connect(t testing.TB, url string) *redisx.Conn {
	t.Helper()
	c, err := redisx.Connect(context.Background(), redisx.Config{URL: url, PoolMaxActive: 20, DialTimeout: patience, CommandTimeout: patience})
	require.NoError(t, err)
	t.Cleanup(func() { _ = c.Close() })
	return c
}

// calls is a hook that counts the client's successful commands that begin with the arguments begin.
type calls struct {
	redistest.NoHook
	begin []any
	n     atomic.Int64
}

func (c *calls) ProcessHook(next redis.ProcessHook) redis.ProcessHook {
	return func(ctx context.Context, cmd redis.Cmder) error {
		err := next(ctx, cmd)
		if args := cmd.Args(); err == nil && len(args) >= len(c.begin) && slices.Equal(args[:len(c.begin)], c.begin) {
			c.n.Add(1)
		}
		return err
	}
}
