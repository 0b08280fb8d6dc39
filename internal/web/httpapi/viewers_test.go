package httpapi

import (
	"context"
	"encoding/json"
	"fmt"
	"io"
	"net"
	"net/http"
	"runtime"
	"strings"
	"sync/atomic"
	"testing"
	"testing/synctest"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/bulkaction/bulkaction/api"
)

// bigGroup is a fake backend with a group that changes with each read. The field aggregate is the
// value of its only aggregate. GroupSummary leaves it out if it is larger than maxAggregate bytes.
type bigGroup struct {
	*fakeBackend
	aggregate json.RawMessage
	reads     atomic.Int64
}

func (b *bigGroup) Group(context.Context, string) (api.Group, error) {
	g := withDone(groupInStates(1, created, dispatched, running), b.reads.Add(1))
	g.Aggregate = map[string]json.RawMessage{"all": append(json.RawMessage(nil), b.aggregate...)}
	return g, nil
}

func (b *bigGroup) GroupSummary(ctx context.Context, id string, maxAggregate int64) (api.Group, bool, error) {
	if int64(len(b.aggregate)) <= maxAggregate {
		g, err := b.Group(ctx, id)
		return g, true, err
	}
	return withDone(groupInStates(1, created, dispatched, running), b.reads.Add(1)), false, nil
}

// TestClientsThatNeverRead: 500 clients that never read cost less than 100 MB and 100 reads of the
// group, with a small and with a large aggregate. They do not delay the stop of the server.
func TestClientsThatNeverRead(t *testing.T) {
	for _, size := range []int{maxEventAggregate - 100, 8_300_000} {
		t.Run(fmt.Sprint(size), func(t *testing.T) {
			f := &bigGroup{fakeBackend: newFakeBackend(), aggregate: json.RawMessage(`"` + strings.Repeat("x", size) + `"`)}
			srv := NewServer("127.0.0.1:0", options(f))
			listener, err := net.Listen("tcp", "127.0.0.1:0")
			require.NoError(t, err)
			served := make(chan error, 1)
			go func() { served <- srv.Serve(smallBuffers{listener}) }()
			runtime.GC()
			before := heapInUse()

			const clients = 500
			for range clients {
				conn, err := net.Dial("tcp", listener.Addr().String())
				require.NoError(t, err)
				defer conn.Close()
				require.NoError(t, conn.(*net.TCPConn).SetReadBuffer(4<<10))
				_, err = io.WriteString(conn, "GET /v1/groups/g/events HTTP/1.1\r\nHost: localhost\r\n\r\n")
				require.NoError(t, err)
			}
			// After this many changes, more events were sent to each client than its buffers hold.
			require.Eventually(t, func() bool { return f.reads.Load() >= 4 }, 30*time.Second, 10*time.Millisecond)
			require.Less(t, f.reads.Load(), int64(100), "one poller reads for all clients")
			runtime.GC()
			require.Less(t, heapInUse(), before+100<<20)

			srv.Stop(time.Hour) // would wait for clients that are not disconnected
			require.ErrorIs(t, <-served, http.ErrServerClosed)
		})
	}
}

// smallBuffers is a listener that gives connections small send buffers, so that a client that does
// not read soon blocks the server's writes.
type smallBuffers struct{ net.Listener }

func (l smallBuffers) Accept() (net.Conn, error) {
	conn, err := l.Listener.Accept()
	if err == nil {
		err = conn.(*net.TCPConn).SetWriteBuffer(4 << 10)
	}
	return conn, err
}

// TestSlowClientMissesNoState: a client that reads 500 bytes a second gets the events of all five
// states, and less than 60 events in all.
func TestSlowClientMissesNoState(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		f := newFakeBackend()
		start := time.Now()
		f.onGroup = func(_ context.Context, read int) (api.Group, error) {
			states := []api.Status{created, dispatched, running}
			if time.Since(start) > 30*time.Second {
				states = append(states, aggregating, completed)
			}
			return withDone(groupInStates(1, states...), int64(read%10)), nil
		}
		client := serve(t, New(options(f)))
		resp, err := client.Get("http://localhost/v1/groups/g/events") //nolint:bodyclose // it is closed below
		require.NoError(t, err)
		defer resp.Body.Close()
		slow := reader(func(p []byte) (int, error) {
			<-time.After(time.Second) // for each buffer of bufio.Scanner
			return resp.Body.Read(p[:min(len(p), 500)])
		})
		var states []string
		events := readEvents(t, slow, 1000)
		for _, e := range events {
			if e.name == "state" {
				states = append(states, e.id)
			}
		}
		require.Equal(t, []string{"1.1", "1.2", "1.3", "1.4", "1.5"}, states)
		require.Less(t, len(events), 60, "a fast client gets 150 events")
	})
}

func TestWatcherThatDoesNotReadIsDisconnected(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		f := newFakeBackend()
		f.onGroup = func(_ context.Context, read int) (api.Group, error) {
			return withDone(groupInStates(1, created), int64(read%10)), nil
		}
		resp, err := serve(t, New(options(f))).Get("http://localhost/v1/groups/g/events")
		require.NoError(t, err)
		defer resp.Body.Close()
		<-time.After(time.Minute)
		reads := f.groupReads.Load()
		require.Less(t, reads, int64(100), "10 s after the buffers are full, nobody is watching")
		<-time.After(time.Minute)
		require.Equal(t, reads, f.groupReads.Load())
	})
}

type reader func(p []byte) (int, error)

func (r reader) Read(p []byte) (int, error) { return r(p) }

func TestLargeAggregateIsLeftOut(t *testing.T) {
	f := showingGroup(groupInStates(1, created, completed))
	f.largeAggregate = true
	events, code := watchEvents(t, f, "")
	require.Equal(t, 200, code)
	for _, e := range events {
		require.Equal(t, []string{"aggregate"}, e.data.Omitted)
	}
}

func TestStreamsAreLimited(t *testing.T) {
	s := newServer(options(showingGroup(groupInStates(1, created, completed))))
	s.streams.Max = 0
	rec := call(t, s, "GET", "/v1/groups/g/events", "")
	p := requireProblem(t, rec, 429, "")
	require.Contains(t, p.Detail, "event streams")
	require.Equal(t, "5", rec.Header().Get("Retry-After"))
	s.streams.Max = 1
	for range 3 { // each gives back its stream
		require.Equal(t, 200, call(t, s, "GET", "/v1/groups/g/events", "").Code)
	}
}
