package bulktest

import (
	"context"
	"fmt"
	"log/slog"
	"maps"
	"net"
	"net/http"
	"slices"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/alicebob/miniredis/v2"

	"github.com/bulkaction/bulkaction/client"
	"github.com/bulkaction/bulkaction/internal/process/roles"
	"github.com/bulkaction/bulkaction/internal/redisx"
	"github.com/bulkaction/bulkaction/processor"
	"github.com/bulkaction/bulkaction/run"
)

// System is an installation of bulkaction inside a test: all roles, the API, and an embedded Redis.
// Only the goroutine that runs the test may call Submit, Wait and Sleep.
type System struct {
	// API is a client of the installation's HTTP API.
	API *client.API
	// RedisURL is the address of the embedded Redis, for package client/producer and package
	// client/stream. Only this process can connect to it: the connections are in memory.
	RedisURL string

	t       *testing.T
	config  run.Config
	procs   []processor.Runner
	watch   *watchdog
	redis   *miniredis.Miniredis
	http    *http.Transport
	started bool        // OnStart was called
	ending  atomic.Bool // the next stop is the last one

	mu       sync.Mutex
	listener *listener     // of the API; nil while the roles are stopped
	up       chan struct{} // closed when the API listens
	cancel   context.CancelFunc
	done     chan error // receives what Run of the roles has returned
}

// redisAddresses is a counter: each embedded Redis of this process gets an address with its own
// number.
var redisAddresses atomic.Int64

// startSystem starts the embedded Redis and the roles. They are stopped before the test ends.
func startSystem(t *testing.T, c run.Config, procs []processor.Runner, w *watchdog) *System {
	t.Helper()
	addr := fmt.Sprintf("bulktest-%d.invalid:6379", redisAddresses.Add(1))
	s := &System{
		RedisURL: "redis://" + addr, t: t, config: c, procs: procs, watch: w, redis: miniredis.NewMiniRedis(),
		up: make(chan struct{}),
	}
	s.redis.ClockTTL(true)
	t.Cleanup(redisx.ServeInMemory(addr, s.DialRedis))
	s.http = &http.Transport{DialContext: s.dialAPI}
	s.API = client.NewAPI("http://127.0.0.1:8080", client.WithHTTPClient(&http.Client{Transport: s.http}))
	t.Cleanup(s.close)
	s.start()
	return s
}

// DialRedis connects to the embedded Redis. It is a Dialer for options of go-redis, such as those
// of a client for package guard.
func (s *System) DialRedis(context.Context, string, string) (net.Conn, error) {
	conn, err := s.redis.Dial()
	if err != nil {
		return nil, fmt.Errorf("dial embedded redis: %w", err)
	}
	return buffered(conn, &s.watch.activity), nil
}

// dialAPI connects to the API in memory. While the roles are stopped, it waits for their next
// start.
func (s *System) dialAPI(ctx context.Context, _, _ string) (net.Conn, error) {
	for {
		s.mu.Lock()
		l, up := s.listener, s.up
		s.mu.Unlock()
		if l != nil {
			return l.dial(ctx)
		}
		select {
		case <-up:
		case <-ctx.Done():
			return nil, ctx.Err()
		}
	}
}

// start starts the roles and waits until the API listens.
func (s *System) start() {
	s.t.Helper()
	c := s.config
	c.RedisURL, c.Settings = s.RedisURL, maps.Clone(c.Settings)
	c.Middleware = append(slices.Clone(c.Middleware), s.watch.calls.watch)
	c.BatchMiddleware = append(slices.Clone(c.BatchMiddleware), s.watch.calls.watchBatch)
	if c.Logger == nil {
		c.Logger = slog.New(slog.NewTextHandler(s.watch.output, &slog.HandlerOptions{Level: slog.LevelWarn}))
	}
	if c.OnStart != nil && s.started {
		c.OnStart = nil
	}
	if stop := c.OnStop; stop != nil {
		c.OnStop = func(ctx context.Context) error {
			if !s.ending.Load() {
				return nil
			}
			return stop(ctx)
		}
	}
	s.started = true
	l, listening := newListener(), make(chan struct{})
	c.Listening = func(addr string) {
		if s.config.Listening != nil {
			s.config.Listening(addr)
		}
		close(listening)
	}
	ctx, cancel := context.WithCancel(context.Background())
	ctx = roles.WithHooks(ctx, roles.Hooks{
		Listen: func(context.Context, string) (net.Listener, error) { return l, nil },
	})
	s.cancel, s.done = cancel, make(chan error, 1)
	go func() { s.done <- run.NewAll(c, s.procs...).Run(ctx) }()
	select {
	case <-listening:
		s.mu.Lock()
		defer s.mu.Unlock()
		s.listener = l
		close(s.up)
	case err := <-s.done:
		cancel()
		s.cancel = nil
		s.t.Fatalf("bulktest: run: %v", err)
	}
}

// stop stops the roles.
func (s *System) stop() {
	s.t.Helper()
	if s.cancel == nil {
		return
	}
	s.mu.Lock()
	if s.listener != nil {
		s.listener, s.up = nil, make(chan struct{})
	}
	s.mu.Unlock()
	s.http.CloseIdleConnections()
	s.cancel()
	s.cancel = nil
	if err := <-s.done; err != nil {
		s.t.Errorf("bulktest: run: %v", err)
	}
}

// close stops the roles and the embedded Redis. The test fails if processors have not returned by
// then; the message names them.
func (s *System) close() {
	s.ending.Store(true)
	s.stop()
	s.redis.Close()
	if running := s.watch.calls.report(); running != "" {
		s.t.Errorf("bulktest: processors ignore the end of their contexts: the roles have stopped, and they have not "+
			"returned. %s", running)
	}
}

// listener is a net.Listener without a network.
type listener struct {
	conns chan net.Conn
	done  chan struct{}
	once  sync.Once
}

func newListener() *listener {
	return &listener{conns: make(chan net.Conn), done: make(chan struct{})}
}

func (l *listener) Accept() (net.Conn, error) {
	select {
	case c := <-l.conns:
		return c, nil
	case <-l.done:
		return nil, net.ErrClosed
	}
}

func (l *listener) Close() error { l.once.Do(func() { close(l.done) }); return nil }

func (l *listener) Addr() net.Addr { return &net.TCPAddr{IP: net.IPv4(127, 0, 0, 1), Port: 8080} }

// dial returns a connection in memory to the server that accepts from this listener. After Close
// the error is net.ErrClosed.
func (l *listener) dial(ctx context.Context) (net.Conn, error) {
	c, s := net.Pipe()
	select {
	case l.conns <- s:
		return c, nil
	case <-l.done:
		return nil, net.ErrClosed
	case <-ctx.Done():
		return nil, ctx.Err()
	}
}

// redisConn is a client's connection in memory to the embedded Redis. It buffers replies, as many
// as there are. A pipe has no buffer: a client that still writes a pipeline, and a server that
// already writes the first reply, would wait for each other forever.
type redisConn struct {
	net.Conn          // requests
	replies  net.Conn // the end from which the client reads

	mu     sync.Mutex
	filled sync.Cond // buffer or ended has changed
	buffer [][]byte
	ended  bool
}

// buffered wraps the client's end of a pipe to the embedded Redis, so that replies are buffered. It
// counts reads of replies in activity.
func buffered(conn net.Conn, activity *atomic.Int64) net.Conn {
	read, write := net.Pipe()
	c := &redisConn{Conn: conn, replies: read}
	c.filled.L = &c.mu
	go c.fill(activity)
	go c.empty(write)
	return c
}

// fill moves the server's replies into the buffer until the connection ends.
func (c *redisConn) fill(activity *atomic.Int64) {
	for {
		b := make([]byte, 4<<10)
		n, err := c.Conn.Read(b)
		activity.Add(1)
		c.mu.Lock()
		if n > 0 {
			c.buffer = append(c.buffer, b[:n])
		}
		c.ended = c.ended || err != nil
		c.filled.Signal()
		c.mu.Unlock()
		if err != nil {
			return
		}
	}
}

// empty writes what is in the buffer to the client until the connection ends.
func (c *redisConn) empty(to net.Conn) {
	defer to.Close()
	for {
		c.mu.Lock()
		for len(c.buffer) == 0 && !c.ended {
			c.filled.Wait()
		}
		waiting := c.buffer
		c.buffer = nil
		c.mu.Unlock()
		if len(waiting) == 0 {
			return
		}
		for _, b := range waiting {
			if _, err := to.Write(b); err != nil {
				return
			}
		}
	}
}

func (c *redisConn) Read(b []byte) (int, error) { return c.replies.Read(b) }

func (c *redisConn) SetReadDeadline(t time.Time) error { return c.replies.SetReadDeadline(t) }

func (c *redisConn) SetDeadline(t time.Time) error {
	if err := c.replies.SetReadDeadline(t); err != nil {
		return err
	}
	return c.Conn.SetWriteDeadline(t)
}

func (c *redisConn) Close() error {
	_ = c.replies.Close() // a pipe's Close has no error
	return c.Conn.Close()
}
