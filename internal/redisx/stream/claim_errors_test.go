package stream

import (
	"context"
	"io"
	"sync"
	"testing"
	"time"

	"github.com/redis/go-redis/v9"
	"github.com/stretchr/testify/require"

	"github.com/bulkaction/bulkaction/internal/testkit/redistest"
)

// failingReads is a go-redis hook that fails one XREADGROUP in each interval `every`, with the
// error of a broken connection and without sending it.
type failingReads struct {
	every time.Duration

	mu   sync.Mutex
	last time.Time
}

func (*failingReads) DialHook(next redis.DialHook) redis.DialHook { return next }

func (*failingReads) ProcessPipelineHook(next redis.ProcessPipelineHook) redis.ProcessPipelineHook {
	return next
}

func (f *failingReads) ProcessHook(next redis.ProcessHook) redis.ProcessHook {
	return func(ctx context.Context, cmd redis.Cmder) error {
		if cmd.Name() == "xreadgroup" {
			f.mu.Lock()
			defer f.mu.Unlock()
			if time.Since(f.last) > f.every {
				f.last = time.Now()
				cmd.SetErr(io.ErrUnexpectedEOF)
				return io.ErrUnexpectedEOF
			}
		}
		return next(ctx, cmd)
	}
}

// TestErrorsNowAndThenDoNotStopClaims: a consumer whose reads fail now and then still claims the
// entries of a dead one.
func TestErrorsNowAndThenDoNotStopClaims(t *testing.T) {
	t.Parallel()
	s := redistest.Server(t)
	c, other := connect(t, s.URL()), connect(t, s.URL())
	stream := unique("ingest")
	dead := NewReader(other, group, "dead")
	require.NoError(t, dead.EnsureGroup(t.Context(), stream))
	publish(t, other, stream, 0, 1)
	batches, err := dead.Read(t.Context(), []string{stream}, 1, 0)
	require.NoError(t, err)
	require.Len(t, batches, 1)

	const lease = time.Second
	c.Block.AddHook(&failingReads{every: lease / 2})
	out, _, _ := subscribe(t, c, stream, ConsumerConfig{Lease: lease})
	d := receive(t, out)
	require.Equal(t, "m0", d.Get("id"))
	d.Ack()
	awaitEmpty(t, other, stream)
}
