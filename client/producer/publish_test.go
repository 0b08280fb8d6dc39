package producer_test

import (
	"context"
	"errors"
	"io"
	"net"
	"strings"
	"sync/atomic"
	"testing"

	"github.com/alicebob/miniredis/v2"
	"github.com/redis/go-redis/v9"
	"github.com/stretchr/testify/require"

	"github.com/bulkaction/bulkaction/client"
	"github.com/bulkaction/bulkaction/client/producer"
)

// lossyProxy starts a TCP proxy to the Redis at target and returns its own address. It drops the
// replies to XADD, together with their connections, as long as lose is above 0, and counts lose
// down.
func lossyProxy(t *testing.T, target string, lose *atomic.Int32) string {
	t.Helper()
	l, err := net.Listen("tcp", "127.0.0.1:0")
	require.NoError(t, err)
	t.Cleanup(func() { _ = l.Close() })
	go func() {
		for {
			in, err := l.Accept()
			if err != nil {
				return
			}
			go func() {
				defer func() { _ = in.Close() }()
				out, err := net.Dial("tcp", target)
				if err != nil {
					return
				}
				defer func() { _ = out.Close() }()
				var adding atomic.Bool
				go func() {
					buf := make([]byte, 64<<10)
					for {
						n, err := in.Read(buf)
						if strings.Contains(strings.ToLower(string(buf[:n])), "xadd") {
							adding.Store(true)
						}
						if _, werr := out.Write(buf[:n]); err != nil || werr != nil {
							_ = out.Close()
							return
						}
					}
				}()
				buf := make([]byte, 64<<10)
				for {
					n, err := out.Read(buf)
					if err != nil || (adding.Swap(false) && lose.Add(-1) >= 0) {
						return
					}
					if _, err := in.Write(buf[:n]); err != nil {
						return
					}
				}
			}()
		}
	}()
	return l.Addr().String()
}

func TestProducerRepeatsUnderOneIDWhenAReplyIsLost(t *testing.T) {
	r := miniredis.RunT(t)
	var lose atomic.Int32
	p := newProducer(t, lossyProxy(t, r.Addr(), &lose))
	lose.Store(2)
	n, err := p.AppendJobs(t.Context(), "g", []client.NewJob{{Payload: 1}})
	require.NoError(t, err)
	require.Equal(t, 1, n)
	entries := streamEntries(t, r, ingest)
	require.Len(t, entries, 3, "two attempts whose reply was lost, and one that was answered")
	for _, e := range entries {
		require.Equal(t, entries[0], e)
	}

	lose.Store(100)
	n, err = p.AppendJobs(t.Context(), "g", []client.NewJob{{Payload: 2}})
	require.Zero(t, n)
	require.ErrorContains(t, err, "publish jobs.append of group g: ")
	require.True(t, errors.Is(err, io.EOF), "%v", err)
	require.Len(t, streamEntries(t, r, ingest), 3+4, "four attempts, and no more")
}

func TestProducerDoesNotRetryAnAnswer(t *testing.T) {
	r := miniredis.RunT(t)
	require.NoError(t, r.Set("wrong:ingest", "a string"))
	p := newProducer(t, r.Addr(), producer.WithPrefix("wrong:"))
	err := p.Cancel(t.Context(), "g")
	require.ErrorContains(t, err, "read length of ingest stream: WRONGTYPE")

	p = newProducer(t, r.Addr())
	require.NoError(t, p.Cancel(t.Context(), "g"))
	r.SetError("OOM command not allowed when used memory > 'maxmemory'.")
	err = p.Cancel(t.Context(), "g") // the length is not read again so soon
	require.ErrorIs(t, err, producer.ErrBacklogFull)
	require.ErrorContains(t, err, "OOM")
	var answer redis.Error
	require.ErrorAs(t, err, &answer)

	r.SetError("")
	ctx, cancel := context.WithCancel(t.Context())
	cancel()
	require.ErrorIs(t, p.Cancel(ctx, "g"), context.Canceled)
}
