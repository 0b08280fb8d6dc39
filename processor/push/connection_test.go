package push

import (
	"bytes"
	"context"
	"crypto/tls"
	"encoding/binary"
	"io"
	"net"
	"net/http"
	"net/http/httptest"
	"net/url"
	"runtime"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/bulkaction/bulkaction/processor"
	"github.com/bulkaction/bulkaction/processor/credential"
)

// startStreams starts a fake of APNs that allows limit streams on a connection, and a processor
// with one account at it. handler answers the requests.
func startStreams(t *testing.T, limit int, handler http.HandlerFunc) (*service, *Processor) {
	s := serveStreams(t, limit, &service{concurrent: handler})
	return s, start(t, config(t, newFolder(t), apnsYAML(s.URL)))
}

// sendAll sends this many pushes at the same time. The test ends unless all of them succeed.
func sendAll(t *testing.T, p *Processor, pushes int) {
	var running sync.WaitGroup
	errs := make([]error, pushes)
	for i := range pushes {
		running.Go(func() { _, errs[i] = processor.Run(t.Context(), p, job(int64(i), toApple)) })
	}
	running.Wait()
	for _, err := range errs {
		require.NoError(t, err)
	}
}

func apnsConnection(p *Processor) *connection { return account(p, APNs).(*apnsAccount).connection }

func TestRequestsAboveTheLimitOfStreamsShareOneConnection(t *testing.T) {
	const limit, pushes = 10, 100
	var calls, running, most atomic.Int64
	full := make(chan struct{})
	s, p := startStreams(t, limit, func(http.ResponseWriter, *http.Request) {
		now := running.Add(1)
		defer running.Add(-1)
		for known := most.Load(); now > known && !most.CompareAndSwap(known, now); known = most.Load() {
		}
		if calls.Add(1) == 1 {
			return // the first request is alone
		}
		if now == limit {
			select {
			case <-full:
			default:
				close(full)
			}
		}
		<-full
	})
	sendAll(t, p, pushes)
	connections, _ := s.counts()
	require.EqualValues(t, pushes, calls.Load())
	require.EqualValues(t, limit, most.Load(), "all streams are used")
	require.Equal(t, 1, connections)
}

// TestAConnectionThatTheServerClosesIsReplaced: of 100 pushes at the same time, the 30th is
// answered with GOAWAY. All succeed, over two connections, and none is sent twice. A connection has
// 1 or 10 streams.
func TestAConnectionThatTheServerClosesIsReplaced(t *testing.T) {
	for name, limit := range map[string]int{"one stream": 1, "ten streams": 10} {
		t.Run(name, func(t *testing.T) {
			var calls atomic.Int64
			s, p := startStreams(t, limit, func(w http.ResponseWriter, _ *http.Request) {
				if calls.Add(1) == 30 {
					w.Header().Set("Connection", "close") // GOAWAY
				}
			})
			sendAll(t, p, 100)
			connections, _ := s.counts()
			require.EqualValues(t, 100, calls.Load(), "no push is sent twice")
			require.Equal(t, 2, connections)
		})
	}
}

func TestABrokenConnectionIsReplaced(t *testing.T) {
	s, p, _ := startAPNs(t)
	for want := range 3 {
		_, err := processor.Run(t.Context(), p, job(1, toApple))
		require.NoError(t, err)
		connections, _ := s.counts()
		require.Equal(t, want+1, connections)
		s.CloseClientConnections()
	}
}

// waitingForStream says whether a request of this process waits for a stream of an HTTP/2
// connection. It looks for that in the stack traces.
func waitingForStream() bool {
	stacks := make([]byte, 1<<20)
	return bytes.Contains(stacks[:runtime.Stack(stacks, true)], []byte("awaitOpenSlotForStream"))
}

func TestAJobThatEndsDoesNotWaitForAStream(t *testing.T) {
	var calls atomic.Int64
	begun, finish := make(chan struct{}), make(chan struct{})
	s, p := startStreams(t, 1, func(http.ResponseWriter, *http.Request) {
		if calls.Add(1) <= 2 {
			begun <- struct{}{}
			<-finish
		}
	})
	send := func(ctx context.Context) error {
		_, err := processor.Run(ctx, p, job(1, toApple))
		return err
	}
	var running sync.WaitGroup
	for _, waiting := range []func() bool{
		func() bool { return true }, // the first request opens the connection: the others wait for it
		waitingForStream,            // the second one has the only stream
	} {
		var occupant error
		running.Go(func() { occupant = send(t.Context()) })
		<-begun
		ctx, cancel := context.WithCancel(t.Context())
		errs := make(chan error, 3)
		for range cap(errs) {
			go func() { errs <- send(ctx) }()
		}
		require.Eventually(t, waiting, 10*time.Second, time.Millisecond)
		cancel()
		for range cap(errs) {
			require.ErrorIs(t, <-errs, context.Canceled)
		}
		finish <- struct{}{}
		running.Wait()
		require.NoError(t, occupant)
	}
	require.NoError(t, send(t.Context()))
	connections, _ := s.counts()
	require.Equal(t, 1, connections)
	require.EqualValues(t, 3, calls.Load())
}

func TestAResetStreamLeavesTheConnection(t *testing.T) {
	s, p, o := startAPNs(t)
	reset := func() {
		s.set(func(int, http.ResponseWriter, request) { panic(http.ErrAbortHandler) })
		_, err := processor.Run(t.Context(), p, job(1, toApple))
		require.Equal(t, CodeUnreachable, processor.Classify(err).Code)
		require.Equal(t, credential.Failure, o.last(t).Kind)
		_, calls := s.counts()
		require.Equal(t, 1, calls, "APNs may have accepted the push")
		s.set(status(http.StatusOK, ""))
	}
	reset()
	sendAll(t, p, 1)
	before, _ := s.counts()
	reset()
	sendAll(t, p, 1)
	after, _ := s.counts()
	require.Equal(t, before, after)
}

// frame returns a frame of HTTP/2 (RFC 9113, 6). The functions below return frames of one kind.
func frame(kind, flags byte, stream uint32, payload ...byte) []byte {
	header := []byte{0, 0, byte(len(payload)), kind, flags, 0, 0, 0, 0}
	binary.BigEndian.PutUint32(header[5:], stream)
	return append(header, payload...)
}

const headersFrame = 0x1

func settings() []byte               { return frame(0x4, 0, 0) }
func accept(stream uint32) []byte    { return frame(headersFrame, 0x5, stream, 0x88) } // status 200, the end
func refuse(stream uint32) []byte    { return frame(0x3, 0, stream, 0, 0, 0, refusedStream) }
func goAway(processed uint32) []byte { return frame(0x7, 0, 0, 0, 0, 0, byte(processed), 0, 0, 0, 0) }

// serveFrames starts a fake HTTP/2 server that answers each request with the raw frames that answer
// returns.
func serveFrames(t *testing.T, answer func(connection int, stream uint32) []byte) (url string) {
	certificates := httptest.NewUnstartedServer(nil)
	certificates.StartTLS()
	defer certificates.Close()
	listener, err := tls.Listen("tcp", "127.0.0.1:0", &tls.Config{
		Certificates: certificates.TLS.Certificates, NextProtos: []string{"h2"},
	})
	require.NoError(t, err)
	var running sync.WaitGroup
	t.Cleanup(func() {
		_ = listener.Close()
		running.Wait()
	})
	serveConnection := func(number int, conn net.Conn) {
		defer conn.Close()
		_, err := io.ReadFull(conn, make([]byte, len("PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n")))
		if err == nil {
			_, err = conn.Write(settings())
		}
		for header := make([]byte, 9); err == nil; {
			if _, err = io.ReadFull(conn, header); err != nil {
				return
			}
			length := binary.BigEndian.Uint32(header) >> 8
			if _, err = io.CopyN(io.Discard, conn, int64(length)); err == nil && header[3] == headersFrame {
				_, err = conn.Write(answer(number, binary.BigEndian.Uint32(header[5:])))
			}
		}
	}
	running.Go(func() {
		for number := 1; ; number++ {
			conn, err := listener.Accept()
			if err != nil {
				return
			}
			running.Go(func() { serveConnection(number, conn) })
		}
	})
	return "https://" + listener.Addr().String()
}

func TestPushesThatTheServerHasNotProcessedAreSentAgain(t *testing.T) {
	type call struct {
		connection int
		stream     uint32
	}
	for name, tt := range map[string]struct {
		answer func(stream uint32) []byte // to stream 3 of connection 1
		second call                       // where the push is sent again
	}{
		"refused stream": {refuse, call{1, 5}},
		"GOAWAY":         {func(stream uint32) []byte { return goAway(stream - 2) }, call{2, 1}},
	} {
		t.Run(name, func(t *testing.T) {
			var mu sync.Mutex
			var calls []call
			server := serveFrames(t, func(connection int, stream uint32) []byte {
				mu.Lock()
				defer mu.Unlock()
				calls = append(calls, call{connection, stream})
				if connection == 1 && stream == 3 {
					return tt.answer(stream)
				}
				return accept(stream)
			})
			o := &outcomes{}
			p := start(t, config(t, newFolder(t), apnsYAML(server)), WithChoice(o.choice))
			for range 2 {
				_, err := processor.Run(t.Context(), p, job(1, toApple))
				require.NoError(t, err)
				require.Equal(t, credential.Success, o.last(t).Kind)
			}
			mu.Lock()
			defer mu.Unlock()
			require.Equal(t, []call{{1, 1}, {1, 3}, tt.second}, calls)
			require.NoError(t, p.Close())
		})
	}
}

func TestAServerThatRefusesAllStreams(t *testing.T) {
	var calls atomic.Int64
	p := start(t, config(t, newFolder(t), apnsYAML(serveFrames(t, func(_ int, stream uint32) []byte {
		calls.Add(1)
		return refuse(stream)
	}))))
	_, err := processor.Run(t.Context(), p, job(1, toApple))
	require.Equal(t, CodeUnreachable, processor.Classify(err).Code)
	require.EqualValues(t, sendAttempts, calls.Load())
}

func TestClosingAConnectionWaitsForItsAnswers(t *testing.T) {
	var calls atomic.Int64
	begun, finish := make(chan struct{}), make(chan struct{})
	_, p := startStreams(t, 0, func(http.ResponseWriter, *http.Request) {
		if calls.Add(1) == 2 {
			close(begun)
			<-finish
		}
	})
	sendAll(t, p, 1)
	conn := apnsConnection(p).current.Load()
	var running sync.WaitGroup
	running.Go(func() { sendAll(t, p, 1) })
	<-begun
	require.NoError(t, p.Close())
	require.NoError(t, conn.Err())
	close(finish)
	running.Wait()
	require.Eventually(t, func() bool { return conn.Err() != nil }, 10*time.Second, time.Millisecond)
}

func TestAPNsByAProxy(t *testing.T) {
	s, p, _ := startAPNs(t)
	tunnels := make(chan string, 10)
	var running sync.WaitGroup
	proxy := httptest.NewServer(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		server, err := net.Dial("tcp", r.Host)
		if err != nil {
			return
		}
		client, _, err := w.(http.Hijacker).Hijack()
		if err != nil {
			return
		}
		_, _ = io.WriteString(client, "HTTP/1.1 200 OK\r\n\r\n")
		for _, ends := range [][2]net.Conn{{server, client}, {client, server}} {
			running.Go(func() {
				_, _ = io.Copy(ends[0], ends[1])
				_ = ends[0].Close()
			})
		}
		tunnels <- r.Method + " " + r.Host
	}))
	defer running.Wait()
	defer proxy.Close()
	address, err := url.Parse(proxy.URL)
	require.NoError(t, err)
	apnsConnection(p).transport.Proxy = http.ProxyURL(address)
	sendAll(t, p, 20)
	require.Equal(t, "CONNECT "+s.Listener.Addr().String(), <-tunnels)
	require.Empty(t, tunnels)
	require.NoError(t, p.Close())
}
