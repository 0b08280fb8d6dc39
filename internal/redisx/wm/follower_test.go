package wm

import (
	"bytes"
	"context"
	"fmt"
	"log/slog"
	"runtime"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/bulkaction/bulkaction/internal/testkit/redistest"
)

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
