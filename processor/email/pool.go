package email

import (
	"context"
	"errors"
	"fmt"
	"slices"
	"sync"
	"time"
)

var (
	errClosed = errors.New("the processor is closed")
	errBusy   = errors.New("wait for a connection") // all are in use
)

// pool keeps idle SMTP connections for reuse and bounds the number of connections. It reuses the
// most recently used connection first, so that connections that are not needed reach their idle
// timeout.
type pool struct {
	dial    func(context.Context) (*conn, error)
	idleFor time.Duration
	slots   chan struct{} // one element for each connection that is in use or being opened

	mu      sync.Mutex
	closed  bool
	idle    []*conn
	closing sync.WaitGroup // connections on which QUIT is being sent
}

// get returns an idle connection, or opens a new one if none is idle. While MaxConnections are in
// use, it waits for one, at most until ctx ends. It fails if the pool is closed. reused says that
// the connection was idle: the server may have closed it since. The caller must give each
// connection back with put.
func (p *pool) get(ctx context.Context) (c *conn, reused bool, err error) {
	select {
	case p.slots <- struct{}{}:
	case <-ctx.Done():
		return nil, false, fmt.Errorf("%w: %w", errBusy, ctx.Err())
	}
	c, err = p.takeIdle()
	if c != nil {
		return c, true, nil
	}
	if err == nil {
		c, err = p.dial(ctx)
	}
	if err != nil {
		<-p.slots
		return nil, false, err
	}
	return c, false, nil
}

func (p *pool) takeIdle() (*conn, error) {
	p.mu.Lock()
	defer p.mu.Unlock()
	if p.closed {
		return nil, errClosed
	}
	if len(p.idle) == 0 {
		return nil, nil
	}
	last := len(p.idle) - 1
	c := p.idle[last]
	p.idle = p.idle[:last]
	c.expiry.Stop()
	return c, nil
}

// put gives a connection back to the pool for the next mail. It closes the connection instead if it
// is broken or has sent MaxMessagesPerConnection mails, or if the pool is closed.
func (p *pool) put(c *conn) {
	defer func() { <-p.slots }()
	switch {
	case c.broken:
		_ = c.raw.Close()
	case c.atLimit() || !p.keep(c):
		c.quit()
	}
}

func (p *pool) keep(c *conn) bool {
	p.mu.Lock()
	defer p.mu.Unlock()
	if p.closed {
		return false
	}
	p.idle = append(p.idle, c)
	if c.expiry == nil {
		c.expiry = time.AfterFunc(p.idleFor, func() { p.expire(c) })
	} else {
		c.expiry.Reset(p.idleFor)
	}
	return true
}

// expire closes a connection whose idle timeout has passed. The connection's timer calls it.
func (p *pool) expire(c *conn) {
	p.mu.Lock()
	at := slices.Index(p.idle, c)
	if at < 0 { // the connection was taken or closed after the timer had fired
		p.mu.Unlock()
		return
	}
	p.idle = slices.Delete(p.idle, at, at+1)
	p.closing.Add(1)
	p.mu.Unlock()
	defer p.closing.Done()
	c.quit()
}

// close closes the idle connections and waits until they are closed. Connections in use are closed
// when put takes them back.
func (p *pool) close() {
	p.mu.Lock()
	p.closed = true
	idle := p.idle
	p.idle = nil
	p.mu.Unlock()
	for _, c := range idle {
		c.expiry.Stop()
		p.closing.Go(c.quit)
	}
	p.closing.Wait()
}
