package roomapi

import (
	"errors"
	"io"
	"net"
	"net/http"
	"strings"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/bulkaction/bulkaction/api"
)

func TestStreamFromTheFirstToTheLastFrame(t *testing.T) {
	t.Parallel()
	room := newFakeRoom()
	a := New(options(room))
	c := open(t, serve(t, a, nil))
	c1 := <-room.connected
	require.Equal(t, 1, a.clients.connections())
	c1.stream.Position(Position{Position: 1, Total: 1, ETASeconds: -1, At: noon})
	c1.stream.State(api.TicketInEntry, api.ModeOpen)
	require.Regexp(t, "^retry: [1-5][0-9]{3}\nevent: state\ndata: {\"state\":\"IN_ENTRY\",\"mode\":\"open\"}\n\n$", c.frame())
	require.Equal(t, http.StatusOK, c.answer())
	require.Equal(t, "text/event-stream", c.header.Get("Content-Type"))
	require.Equal(t, "no-store", c.header.Get("Cache-Control"))
	require.Equal(t, "no", c.header.Get("X-Accel-Buffering"))
	require.Empty(t, c.header.Get("Content-Encoding"))
	require.Contains(t, c.header.Get("Set-Cookie"), "broker=")

	require.Equal(t, "event: position\ndata: {\"position\":1,\"total\":1,\"eta_seconds\":null,\"at\":\"2026-11-23T12:00:00.005Z\"}\n\n", c.frame())
	c1.stream.State(api.TicketInProgress, api.ModeOpen)
	require.Equal(t, "event: state\ndata: {\"state\":\"IN_PROGRESS\",\"mode\":\"open\"}\n\n", c.frame())
	c1.stream.Admitted(room.token, room.url)
	require.Equal(t, "event: admitted\ndata: {\"token\":\"a.b.c\",\"expires_at\":\"2099-01-02T03:04:05Z\",\"return_url\":\"http://127.0.0.1:8081/buy\"}\n\n", c.frame())
	c1.stream.Ended(EndedGone)
	require.Equal(t, "id: ended\nevent: ended\ndata: {\"reason\":\"gone\"}\n\n", c.frame())
	c.end()
	<-c1.left
}

func TestClientThatGoes(t *testing.T) {
	t.Parallel()
	room := newFakeRoom()
	a := New(options(room))
	addr := serve(t, a, nil)
	c := open(t, addr)
	s := <-room.connected
	s.stream.State(api.TicketInEntry, api.ModeOpen)
	c.frame()
	require.NoError(t, c.conn.Close())
	<-s.left
	s.stream.Ended(EndedLeft) // harms nobody

	before := open(t, addr) // goes before any frame
	s = <-room.connected
	require.NoError(t, before.conn.Close())
	<-s.left
}

func TestHeartbeat(t *testing.T) {
	t.Parallel()
	room := newFakeRoom()
	o := options(room)
	o.Heartbeat = 20 * time.Millisecond
	c := open(t, serve(t, New(o), nil))
	s := <-room.connected
	require.Regexp(t, "^retry: [1-5][0-9]{3}\n:\n\n$", c.frame(), "a proxy sees a first byte even if the state is late")
	require.Equal(t, ":\n\n", c.frame())
	s.stream.State(api.TicketInEntry, api.ModeOpen)
	for {
		if frame := c.frame(); frame != ":\n\n" {
			require.Equal(t, "event: state\ndata: {\"state\":\"IN_ENTRY\",\"mode\":\"open\"}\n\n", frame)
			break
		}
	}
	require.Equal(t, ":\n\n", c.frame())
	require.Equal(t, ":\n\n", c.frame())
}

func TestStreamAfterTheEnd(t *testing.T) {
	t.Parallel()
	room := newFakeRoom()
	a := New(options(room))
	require.Equal(t, http.StatusNoContent, call(t, a, "GET", "/events/sale/tickets/waiting", "Last-Event-ID: ended").Code)
	require.Zero(t, room.number())

	c := open(t, serve(t, a, nil), "Last-Event-ID: 7") // any other id enters
	s := <-room.connected
	s.stream.Reconnect(ReconnectDraining)
	require.Regexp(t, "^retry: [0-9]+\nevent: reconnect\ndata: {\"reason\":\"draining\"}\n\n$", c.frame())
	c.end()
	<-s.left
}

// TestTemporaryProblemsOfStreams: a temporary problem is answered with status 200 and a frame,
// because an EventSource gives up at any other status.
func TestTemporaryProblemsOfStreams(t *testing.T) {
	t.Parallel()
	for name, c := range map[string]struct {
		err  error
		want string
	}{
		"draining":      {ErrDraining, "draining"},
		"busy":          {ErrBusy, "busy"},
		"full":          {ErrFull, "busy"},
		"redis away":    {api.ErrUnavailable, "redis_away"},
		"anything else": {errors.New("lost"), "busy"},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			room := newFakeRoom()
			room.err = c.err
			var refused []string
			o := options(room)
			o.Metrics.Refused = func(event, reason string) { refused = append(refused, reason) }
			a := New(o)
			rec := call(t, a, "GET", "/events/sale/tickets/waiting")
			require.Equal(t, http.StatusOK, rec.Code)
			require.Equal(t, "no-store", rec.Header().Get("Cache-Control"))
			require.Regexp(t, "^retry: ([3-9][0-9]{3}|10000)\nevent: reconnect\ndata: {\"reason\":\""+c.want+"\"}\n\n$", rec.Body.String())
			require.Zero(t, a.clients.connections())
			if name != "anything else" {
				require.Len(t, refused, 1)
			}
		})
	}
}

func TestFinalProblemsOfStreams(t *testing.T) {
	t.Parallel()
	for err, want := range map[error]int{ErrUnknownEvent: 404, ErrClosed: 409, ErrSoldOut: 410} {
		room := newFakeRoom()
		room.err = err
		rec := call(t, New(options(room)), "GET", "/events/sale/tickets/waiting")
		require.Equal(t, want, rec.Code)
		require.Equal(t, "application/problem+json", rec.Header().Get("Content-Type"))
	}
}

func TestLimitsOfStreams(t *testing.T) {
	t.Parallel()
	for name, change := range map[string]func(*Options){
		"per IP": func(o *Options) { o.MaxConnectionsPerIP = 2 },
		"in all": func(o *Options) { o.MaxConnections = 2 },
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			room := newFakeRoom()
			o := options(room)
			change(&o)
			a := New(o)
			addr := serve(t, a, nil)
			first, second := open(t, addr), open(t, addr)
			s1, s2 := <-room.connected, <-room.connected
			require.Regexp(t, "^retry: [0-9]+\nevent: reconnect\ndata: {\"reason\":\"busy\"}\n\n$", open(t, addr).frame())
			require.NoError(t, first.conn.Close())
			require.NoError(t, second.conn.Close())
			<-s1.left
			<-s2.left
			// left is called before the stream is counted as closed.
			require.Eventually(t, func() bool { return a.clients.connections() == 0 }, 10*time.Second, time.Millisecond)
			open(t, addr)
			<-room.connected
		})
	}
}

// smallBuffers is a listener whose connections have a small write buffer, so that the server soon
// blocks if a client does not read.
type smallBuffers struct{ net.Listener }

func (l smallBuffers) Accept() (net.Conn, error) {
	c, err := l.Listener.Accept()
	if err == nil {
		err = c.(*net.TCPConn).SetWriteBuffer(4 << 10)
	}
	return c, err
}

func TestSlowReaderHarmsNobody(t *testing.T) {
	t.Parallel()
	room := newFakeRoom()
	o := options(room)
	o.WriteTimeout = 100 * time.Millisecond
	slow := make(chan string, 1)
	o.Metrics.SlowReader = func(event string) { slow <- event }
	addr := serve(t, New(o), func(l net.Listener) net.Listener { return smallBuffers{l} })

	open(t, addr) // never reads
	deaf := <-room.connected
	other := open(t, addr)
	s := <-room.connected
	s.stream.State(api.TicketInEntry, api.ModeOpen)
	other.frame()
	deaf.stream.State(api.TicketInEntry, api.ModeOpen)
	// Act as the loop of a broker: its calls never wait for the client that does not read, and the
	// other client gets its frames.
	long := strings.Repeat("x", 64<<10)
	n := int64(0)
	for done := false; !done; {
		select {
		case event := <-slow:
			require.Equal(t, "sale", event)
			done = true
		default:
			n++
			deaf.stream.Admitted(api.EntryToken{Token: long, ExpiresAt: noon}, "")
			s.stream.Position(Position{Position: n, Total: n, ETASeconds: -1, At: noon})
			require.Contains(t, other.frame(), "event: position")
		}
	}
	<-deaf.left
	s.stream.Ended(EndedLeft)
	require.Contains(t, other.frame(), "event: ended")
}

func TestStreamWithABody(t *testing.T) {
	t.Parallel()
	room := newFakeRoom()
	conn, err := net.Dial("tcp", serve(t, New(options(room)), nil))
	require.NoError(t, err)
	defer conn.Close()
	_, err = io.WriteString(conn, "GET /events/sale/tickets/waiting HTTP/1.1\r\nHost: a\r\nContent-Length: 100\r\nConnection: close\r\n\r\nx")
	require.NoError(t, err)
	c := &client{t: t, conn: conn}
	require.Equal(t, http.StatusBadRequest, c.answer())
	require.Zero(t, room.number())
}

func TestHugeCookiesAreRefused(t *testing.T) {
	t.Parallel()
	room := newFakeRoom()
	c := open(t, serve(t, New(options(room)), nil), "Cookie: a="+strings.Repeat("x", 64<<10))
	require.Equal(t, http.StatusRequestHeaderFieldsTooLarge, c.answer())
	require.Zero(t, room.number())
}

// TestManyStreams: 50 streams get 20 positions each and then the frame ended. After that no
// connection is left.
func TestManyStreams(t *testing.T) {
	t.Parallel()
	const users, rounds = 50, 20
	room := newFakeRoom()
	a := New(options(room))
	addr := serve(t, a, nil)
	clients := make([]*client, users)
	streams := make([]connected, users)
	for i := range users {
		clients[i] = open(t, addr)
		streams[i] = <-room.connected
		streams[i].stream.State(api.TicketInEntry, api.ModeOpen)
	}
	for _, c := range clients {
		require.Contains(t, c.frame(), "event: state")
	}
	for round := range int64(rounds) {
		for _, s := range streams {
			s.stream.Position(Position{Position: rounds - round, Total: users, ETASeconds: 1, At: noon})
		}
		for _, c := range clients {
			require.Contains(t, c.frame(), "event: position")
		}
	}
	for i, s := range streams {
		s.stream.Ended(EndedSoldOut)
		require.Contains(t, clients[i].frame(), "sold_out")
		clients[i].end()
		<-s.left
	}
	require.Eventually(t, func() bool { return a.clients.connections() == 0 }, 10*time.Second, time.Millisecond)
}
