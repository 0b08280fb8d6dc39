package email

import (
	"context"
	"errors"
	"slices"
	"sync"
	"time"
)

var errClosed = errors.New("the processor is closed")

// pool keeps connections for reuse, and bounds how many there are. The one used last is taken
// first, so that those which the load does not need run into their idle time-out.
type pool struct {
	dial    func(context.Context) (*conn, error)
	idleFor time.Duration
	slots   chan struct{} // one for each connection in use

	mu      sync.Mutex
	closed  bool
	idle    []*conn
	closing sync.WaitGroup // connections that are saying goodbye
}

// get takes an idle connection or opens one, and waits while all are in use. reused tells which:
// the server may have hung up on an idle one since. Each connection goes back by put.
func (p *pool) get(ctx context.Context) (c *conn, reused bool, err error) {
	select {
	case p.slots <- struct{}{}:
	case <-ctx.Done():
		return nil, false, ctx.Err()
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

// put gives a connection back after use, for the next mail if it is fit for one.
func (p *pool) put(c *conn) {
	defer func() { <-p.slots }()
	switch {
	case c.broken:
		_ = c.raw.Close()
	case c.worn() || !p.keep(c):
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

// expire runs on the connection's timer.
func (p *pool) expire(c *conn) {
	p.mu.Lock()
	at := slices.Index(p.idle, c)
	if at < 0 { // taken, or closed, since the timer fired
		p.mu.Unlock()
		return
	}
	p.idle = slices.Delete(p.idle, at, at+1)
	p.closing.Add(1)
	p.mu.Unlock()
	defer p.closing.Done()
	c.quit()
}

// close ends the idle connections, and lets those in use end when they are put back.
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
