package redisproc

import (
	"fmt"
	"math/rand/v2"
	"net"
	"sync"
	"time"
)

// Proxy forwards connections to one server, from inside this process, and disturbs them like a bad
// network: it delays data, resets connections, goes silent, or drops the server's replies. It hides
// which connections have lost bytes, and so must not be used further. Its methods are safe for concurrent use.
type Proxy struct {
	target   string
	listener net.Listener
	done     chan struct{}
	working  sync.WaitGroup

	mu      sync.Mutex
	links   map[*link]struct{}
	delay   time.Duration
	silent  bool
	drop    float64
	rng     *rand.Rand
	dropped int
}

// link is a client's connection together with its connection to the server.
type link struct {
	client, server net.Conn
	torn           bool // the proxy has dropped some of its bytes: it must not be used further
}

// NewProxy starts a proxy on a free port of 127.0.0.1 that forwards to target.
func NewProxy(target string) (*Proxy, error) {
	l, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		return nil, fmt.Errorf("start proxy: %w", err)
	}
	p := &Proxy{target: target, listener: l, done: make(chan struct{}), links: map[*link]struct{}{}}
	p.working.Go(p.accept)
	return p, nil
}

// Addr returns the host:port to connect to.
func (p *Proxy) Addr() string { return p.listener.Addr().String() }

// Delay delays all data in both directions by this time, until Heal is called.
func (p *Proxy) Delay(d time.Duration) {
	p.mu.Lock()
	defer p.mu.Unlock()
	p.delay = d
}

// HalfOpen makes the proxy silent until Heal is called: it still accepts connections and data, but
// drops all data in both directions.
func (p *Proxy) HalfOpen() {
	p.mu.Lock()
	defer p.mu.Unlock()
	p.silent = true
}

// DropReplies makes the proxy, until Heal is called, drop each piece of data that the server sends
// with this probability, and then reset the connection. The client then can't know whether its
// command was executed.
func (p *Proxy) DropReplies(probability float64, rng *rand.Rand) {
	p.mu.Lock()
	defer p.mu.Unlock()
	p.drop, p.rng = probability, rng
}

// Dropped returns how many replies DropReplies has dropped so far.
func (p *Proxy) Dropped() int {
	p.mu.Lock()
	defer p.mu.Unlock()
	return p.dropped
}

// Reset resets all connections, as if the server's host had restarted.
func (p *Proxy) Reset() { p.reset(func(*link) bool { return true }) }

// Heal ends all faults. It resets connections that have lost bytes.
func (p *Proxy) Heal() {
	p.mu.Lock()
	p.delay, p.silent, p.drop = 0, false, 0
	p.mu.Unlock()
	p.reset(func(l *link) bool { return l.torn })
}

func (p *Proxy) reset(which func(*link) bool) {
	p.mu.Lock()
	defer p.mu.Unlock()
	for l := range p.links {
		if which(l) {
			l.reset()
		}
	}
}

// Close resets all connections and waits until all goroutines of the proxy have ended.
func (p *Proxy) Close() error {
	close(p.done)
	err := p.listener.Close()
	p.Reset()
	p.working.Wait()
	return err
}

func (p *Proxy) accept() {
	for {
		client, err := p.listener.Accept()
		if err != nil {
			return // the listener is closed
		}
		p.working.Go(func() { p.serve(client) })
	}
}

func (p *Proxy) serve(client net.Conn) {
	server, err := net.Dial("tcp", p.target)
	if err != nil {
		abort(client)
		return
	}
	l := &link{client: client, server: server}
	if !p.add(l) {
		return
	}
	p.working.Go(func() {
		p.pump(l, server, client, false)
		l.reset()
	})
	p.pump(l, client, server, true)
	l.reset()
	p.mu.Lock()
	defer p.mu.Unlock()
	delete(p.links, l)
}

func (p *Proxy) add(l *link) bool {
	p.mu.Lock()
	defer p.mu.Unlock()
	select {
	case <-p.done: // Close may have reset the connections before this one was added
		l.reset()
		return false
	default:
	}
	p.links[l] = struct{}{}
	return true
}

// pump copies data from one connection to the other until one of them ends.
func (p *Proxy) pump(l *link, dst, src net.Conn, replies bool) {
	buf := make([]byte, 64<<10)
	for {
		n, err := src.Read(buf)
		if err != nil {
			return
		}
		delay, pass, ok := p.fate(l, replies)
		if !ok {
			return
		}
		if delay > 0 {
			select {
			case <-time.After(delay):
			case <-p.done:
				return
			}
		}
		if !pass {
			continue
		}
		if _, err := dst.Write(buf[:n]); err != nil {
			return
		}
	}
}

// fate decides what happens to a piece of data: how long it is delayed, whether it is passed on,
// and whether the connection stays open (ok). If it drops data of a connection that stays open, it
// marks the link as torn: Heal resets it.
func (p *Proxy) fate(l *link, reply bool) (delay time.Duration, pass, ok bool) {
	p.mu.Lock()
	defer p.mu.Unlock()
	switch {
	case p.silent || l.torn: // later data must not be mistaken for the lost data
		l.torn = true
		return 0, false, true
	case reply && p.drop > 0 && p.rng.Float64() < p.drop:
		p.dropped++
		return 0, false, false
	}
	return p.delay, true, true
}

func (l *link) reset() {
	abort(l.client)
	abort(l.server)
}

// abort closes a connection so that the other side gets "connection reset".
func abort(c net.Conn) {
	if t, ok := c.(*net.TCPConn); ok {
		_ = t.SetLinger(0) // fails only if the connection is closed
	}
	_ = c.Close()
}
