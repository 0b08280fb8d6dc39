package roomapi

import (
	"bufio"
	"context"
	"io"
	"log/slog"
	"net"
	"net/http"
	"net/http/httptest"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/stretchr/testify/require"
	"go.uber.org/goleak"

	"github.com/bulkaction/bulkaction/api"
)

func TestMain(m *testing.M) { goleak.VerifyTestMain(m) }

// fakeRoom is a fake Room that a test controls. It has one event, sale, whose users get numbers in
// the order in which they enter.
type fakeRoom struct {
	connected chan connected // each stream that Connect has registered

	mu     sync.Mutex
	err    error // of all calls
	users  map[string]int64
	state  string // of all tickets
	mode   string
	url    string
	token  api.EntryToken
	reads  int
	leaves []string
}

type connected struct {
	user   string
	stream *Stream
	left   chan struct{} // closed when the end of the stream is reported
}

func newFakeRoom() *fakeRoom {
	return &fakeRoom{
		connected: make(chan connected, 100), users: map[string]int64{}, state: api.TicketInEntry, mode: api.ModeOpen,
		url:   "http://127.0.0.1:8081/buy",
		token: api.EntryToken{Token: "a.b.c", ExpiresAt: time.Date(2099, 1, 2, 3, 4, 5, 0, time.UTC)},
	}
}

func (f *fakeRoom) enter(event, user string, enter bool) (created bool, err error) {
	f.mu.Lock()
	defer f.mu.Unlock()
	switch {
	case f.err != nil:
		return false, f.err
	case event != "sale":
		return false, ErrUnknownEvent
	}
	_, known := f.users[user]
	if !known && !enter {
		return false, ErrNoTicket
	}
	if !known {
		f.users[user] = int64(len(f.users) + 1)
	}
	return !known, nil
}

func (f *fakeRoom) Connect(_ context.Context, event, user string, s *Stream) (func(), error) {
	if _, err := f.enter(event, user, true); err != nil {
		return nil, err
	}
	c := connected{user, s, make(chan struct{})}
	f.connected <- c
	return func() { close(c.left) }, nil
}

func (f *fakeRoom) Poll(_ context.Context, event, user string, enter bool) (api.Ticket, bool, error) {
	created, err := f.enter(event, user, enter)
	if err != nil {
		return api.Ticket{}, false, err
	}
	f.mu.Lock()
	defer f.mu.Unlock()
	t := api.Ticket{State: f.state, PollAfterMS: 2000}
	switch n, total, eta := f.users[user], int64(len(f.users)), 90.0; f.state {
	case api.TicketInEntry:
		t.Position, t.Total, t.ETASeconds = &n, &total, &eta
	case api.TicketInProgress:
		t.Token = f.token.Token
	}
	return t, created, nil
}

func (f *fakeRoom) Leave(_ context.Context, _, user string) error {
	f.mu.Lock()
	defer f.mu.Unlock()
	if f.err == nil {
		delete(f.users, user)
		f.leaves = append(f.leaves, user)
	}
	return f.err
}

func (f *fakeRoom) Token(_ context.Context, event, user string) (api.EntryToken, string, error) {
	if _, err := f.enter(event, user, false); err != nil {
		return api.EntryToken{}, "", err
	}
	f.mu.Lock()
	defer f.mu.Unlock()
	if f.state == api.TicketInEntry {
		return api.EntryToken{}, "", ErrNotReady
	}
	return f.token, f.url, nil
}

func (f *fakeRoom) Status(_ context.Context, event string) (api.EventStatus, error) {
	f.mu.Lock()
	defer f.mu.Unlock()
	f.reads++
	if event != "sale" {
		return api.EventStatus{}, ErrUnknownEvent
	}
	pace := 12.5
	return api.EventStatus{
		Status: "queueing", Mode: f.mode, Waiting: int64(len(f.users)), Slots: api.EventSlots{Capacity: 3, Used: 3},
		PacePerMinute: &pace,
	}, f.err
}

func (f *fakeRoom) JWKS() []byte { return []byte(`{"keys":[]}`) }

// number returns how many users the room has.
func (f *fakeRoom) number() int {
	f.mu.Lock()
	defer f.mu.Unlock()
	return len(f.users)
}

// options are those of a room over http.
func options(room Room) Options {
	return Options{
		Room: room, PublicURL: "http://127.0.0.1:8090", CookieKeys: func() [][]byte { return [][]byte{[]byte("first"), []byte("second")} },
		Heartbeat: time.Minute, WriteTimeout: 10 * time.Second, MaxConnections: 1000, MaxConnectionsPerIP: 1000, EnterRatePerIP: 1000,
		Log: slog.New(slog.DiscardHandler), Metrics: Metrics{SlowReader: func(string) {}, Refused: func(string, string) {}},
	}
}

// call sends one request to the API, with headers in the form "Name: value". It checks the answer
// against the OpenAPI document.
func call(t *testing.T, a *API, method, path string, headers ...string) *httptest.ResponseRecorder {
	t.Helper()
	req := httptest.NewRequest(method, path, nil)
	req.RemoteAddr = "192.0.2.1:1234"
	for _, h := range headers {
		name, value, _ := strings.Cut(h, ": ")
		req.Header.Add(name, value)
	}
	rec := httptest.NewRecorder()
	a.ServeHTTP(rec, req)
	requireDocumented(t, req, rec)
	return rec
}

// cookieOf returns the cookie that an answer sets, in the form of a header for the next request.
func cookieOf(t *testing.T, rec *httptest.ResponseRecorder, name string) string {
	t.Helper()
	for _, c := range rec.Result().Cookies() {
		if c.Name == name {
			return "Cookie: " + c.Name + "=" + c.Value
		}
	}
	require.Fail(t, "no cookie "+name, rec.Header())
	return ""
}

// serve runs the API on a loopback address.
func serve(t *testing.T, a *API, wrap func(net.Listener) net.Listener) (addr string) {
	t.Helper()
	listener, err := net.Listen("tcp", "127.0.0.1:0")
	require.NoError(t, err)
	addr = listener.Addr().String()
	if wrap != nil {
		listener = wrap(listener)
	}
	srv := &http.Server{Handler: a, MaxHeaderBytes: MaxHeaderBytes}
	served := make(chan error, 1)
	go func() { served <- srv.Serve(listener) }()
	t.Cleanup(func() {
		require.NoError(t, srv.Close())
		require.ErrorIs(t, <-served, http.ErrServerClosed)
	})
	return addr
}

// client is one connection to the API, from which a test reads a stream frame by frame.
type client struct {
	t    *testing.T
	conn net.Conn

	status int // of the answer; 0: it was not read yet
	header http.Header
	body   *bufio.Reader
}

// open sends the request for a stream of the event sale. It does not wait for the answer: the
// client reads the answer's headers when the test first reads.
func open(t *testing.T, addr string, headers ...string) *client {
	t.Helper()
	conn, err := net.Dial("tcp", addr)
	require.NoError(t, err)
	t.Cleanup(func() { _ = conn.Close() })
	_, err = io.WriteString(conn, "GET /events/sale/tickets/waiting HTTP/1.1\r\nHost: a\r\n"+strings.Join(append(headers, "", ""), "\r\n"))
	require.NoError(t, err)
	return &client{t: t, conn: conn}
}

// answer waits for the answer's headers, and returns the status.
func (c *client) answer() int {
	c.t.Helper()
	if c.status == 0 {
		resp, err := http.ReadResponse(bufio.NewReader(c.conn), nil) //nolint:bodyclose // open closes the connection
		require.NoError(c.t, err)
		c.status, c.header, c.body = resp.StatusCode, resp.Header, bufio.NewReader(resp.Body)
	}
	return c.status
}

// frame reads the next frame, up to its empty line.
func (c *client) frame() string {
	c.t.Helper()
	c.answer()
	var frame strings.Builder
	for {
		line, err := c.body.ReadString('\n')
		require.NoError(c.t, err, frame.String())
		frame.WriteString(line)
		if line == "\n" {
			return frame.String()
		}
	}
}

// end requires that the server has ended the stream and closed its connection, without another
// frame.
func (c *client) end() {
	c.t.Helper()
	rest, err := io.ReadAll(c.body)
	require.NoError(c.t, err)
	require.Empty(c.t, string(rest))
	_, err = c.conn.Read(make([]byte, 1))
	require.ErrorIs(c.t, err, io.EOF)
}
