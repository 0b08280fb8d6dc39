package client_test

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
)

// lossy passes bytes on to Redis and loses as many replies to XADD as it is told, with
// their connections.
func lossy(t *testing.T, target string, lose *atomic.Int32) string {
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
	p := produce(t, lossy(t, r.Addr(), &lose))
	lose.Store(2)
	n, err := p.AppendJobs(t.Context(), "g", []client.Job{{Payload: 1}})
	require.NoError(t, err)
	require.Equal(t, 1, n)
	entries := published(t, r, ingest)
	require.Len(t, entries, 3, "two of unknown fate, and the one that was answered for")
	for _, e := range entries {
		require.Equal(t, entries[0], e)
	}

	lose.Store(100)
	n, err = p.AppendJobs(t.Context(), "g", []client.Job{{Payload: 2}})
	require.Zero(t, n)
	require.ErrorContains(t, err, "publish jobs.append of group g: ")
	require.True(t, errors.Is(err, io.EOF), "%v", err)
	require.Len(t, published(t, r, ingest), 3+4, "and no more")
}

func TestProducerTakesAnAnswerForFinal(t *testing.T) {
	r := miniredis.RunT(t)
	require.NoError(t, r.Set("wrong:ingest", "a string"))
	p := produce(t, r.Addr(), client.WithPrefix("wrong:"))
	err := p.Cancel(t.Context(), "g")
	require.ErrorContains(t, err, "look at backlog: WRONGTYPE")

	p = produce(t, r.Addr())
	require.NoError(t, p.Cancel(t.Context(), "g"))
	r.SetError("OOM command not allowed when used memory > 'maxmemory'.")
	err = p.Cancel(t.Context(), "g") // the look at the backlog is fresh
	require.ErrorIs(t, err, client.ErrBacklogFull)
	require.ErrorContains(t, err, "OOM")
	var answer redis.Error
	require.ErrorAs(t, err, &answer)

	r.SetError("")
	ctx, cancel := context.WithCancel(t.Context())
	cancel()
	require.ErrorIs(t, p.Cancel(ctx, "g"), context.Canceled)
}
