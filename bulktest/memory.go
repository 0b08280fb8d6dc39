package bulktest

import (
	"context"
	"net"
	"sync"
	"sync/atomic"
	"time"
)

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
