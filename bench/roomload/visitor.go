package roomload

import (
	"context"
	"errors"
	"fmt"
	"net"
	"sync"
	"time"
)

const (
	dialTimeout = 5 * time.Second
	// A stream is silent for at most BROKER_HEARTBEAT, 15 s.
	longestSilence = 40 * time.Second
	// EventSource's own delay, until the server names another.
	defaultRetry = 3 * time.Second
	reloadDelay  = 200 * time.Millisecond
	// refusedDelay is the pause after a failed connect, before the visitor tries the next broker,
	// as behind a load balancer.
	refusedDelay = 50 * time.Millisecond
)

// act is what a user does from outside of its stream.
type act int

const (
	noAct    act = iota
	reload       // ends the stream and opens another
	leave        // the session is over: the user gives the slot back
	closeTab     // ends the stream for good
	stop         // the task is over
)

// visitor simulates one user with a browser. run is its only goroutine; others may call do.
type visitor struct {
	*generator
	visit  Visit
	broker int // index of the broker that is asked next
	retry  time.Duration
	failed bool   // a broker has answered what makes a browser give up
	token  string // "": none
	// session is how long the user stays inside after receiving the token; 0: until the task
	// ends.
	session time.Duration
	buf     [readBuffer]byte

	// of the present stream
	span    Span
	hasSpan bool // it has had a frame

	mu      sync.Mutex
	conn    net.Conn // nil: none
	pending act
	actedAt int64         // of pending, or of the last one that was taken
	holds   bool          // the user has a token
	acted   chan struct{} // has an element after do
	timers  []*time.Timer // that call do
}

// do makes the user act. If run has not yet seen an earlier act, the more final of the two counts,
// or the later one of two equal ones. A user with a token does not reload the page.
func (v *visitor) do(a act) {
	v.mu.Lock()
	defer v.mu.Unlock()
	if v.pending > a || a == reload && v.holds {
		return
	}
	v.pending, v.actedAt = a, time.Now().UnixMicro()
	if v.conn != nil {
		_ = v.conn.Close() // run sees the end of the stream
	}
	select {
	case v.acted <- struct{}{}:
	default: // run has not seen the act before
	}
}

// takeAct returns what the user does, and forgets it.
func (v *visitor) takeAct() (a act) {
	v.mu.Lock()
	defer v.mu.Unlock()
	a, v.pending = v.pending, noAct
	select {
	case <-v.acted:
	default:
	}
	return a
}

// doAfter lets the user act after d.
func (v *visitor) doAfter(d time.Duration, a act) {
	v.mu.Lock()
	defer v.mu.Unlock()
	v.timers = append(v.timers, time.AfterFunc(d, func() { v.do(a) }))
}

// sleep waits for d, or until the user acts or ctx ends.
func (v *visitor) sleep(ctx context.Context, d time.Duration) act {
	timer := time.NewTimer(d)
	defer timer.Stop()
	select {
	case <-timer.C:
		return noAct
	case <-v.acted:
		return v.takeAct()
	case <-ctx.Done():
		return stop
	}
}

// run acts as the user until the user has done all that the task wants. It calls entered after the
// first answer of a broker, or when there will be none.
func (v *visitor) run(ctx context.Context, entered func()) {
	defer v.counts.ended.Add(1)
	entered = sync.OnceFunc(entered)
	defer entered()
	v.visit.Sent, v.retry = time.Now().UnixMicro(), defaultRetry
	for v.waitForNextStream(ctx, v.stream(ctx, entered)) {
	}
	v.mu.Lock()
	defer v.mu.Unlock()
	for _, t := range v.timers {
		t.Stop()
	}
}

// waitForNextStream decides what follows the end of a stream; a is the act that ended it. It waits
// and returns true if the user opens another stream. It returns false if the user has done all that
// the task wants.
func (v *visitor) waitForNextStream(ctx context.Context, a act) bool {
	for {
		delay := v.retry
		switch {
		case a == stop:
			return false
		case a == closeTab:
			v.visit.Closed = true
			if v.visit.Admitted > 0 && v.KeepOpen { // the event has on_close: release
				v.visit.Freed = v.actedAt
			}
			return false
		case a == leave:
			v.free(ctx)
			return false
		case v.failed, v.visit.Ended != "":
			return false
		case v.visit.Admitted > 0 && !v.KeepOpen: // the user is in the shop
			left := time.Hour // until the task ends
			if v.session > 0 {
				left = time.Until(time.UnixMicro(v.visit.Admitted).Add(v.session))
			}
			if a = v.sleep(ctx, left); a == noAct && v.session > 0 {
				a = leave
			}
			continue
		case a == reload:
			delay = reloadDelay
		}
		if a = v.sleep(ctx, delay); a <= reload {
			return true
		}
	}
}

// stream opens a stream at the next broker and reads it until it ends. It returns the act of the
// user that ended it; noAct: the stream ended by itself.
func (v *visitor) stream(ctx context.Context, entered func()) act {
	for {
		addr := v.Brokers[v.broker%len(v.Brokers)]
		v.broker++ // a load balancer sends the next request elsewhere
		dialer := net.Dialer{Timeout: dialTimeout}
		conn, err := dialer.DialContext(ctx, "tcp", addr)
		if err == nil {
			v.read(conn, addr, entered)
			return v.takeAct()
		}
		if a := v.sleep(ctx, refusedDelay); a > reload {
			return a
		}
	}
}

// read reads a stream until its end.
func (v *visitor) read(conn net.Conn, addr string, entered func()) {
	v.mu.Lock()
	v.conn = conn
	early := v.pending != noAct
	v.mu.Unlock()
	defer func() {
		v.mu.Lock()
		defer v.mu.Unlock()
		v.conn = nil
		_ = conn.Close() // it was only read
	}()
	if early {
		return
	}
	request := fmt.Appendf(v.buf[:0],
		"GET /events/%s/tickets/waiting HTTP/1.1\r\nHost: %s\r\nAccept: text/event-stream\r\n%s: %s\r\n\r\n",
		v.visit.Event, addr, v.Header, v.visit.User)
	if _, err := conn.Write(request); err != nil {
		return // the broker has ended
	}
	v.span, v.hasSpan = Span{Before: v.visit.Position}, false
	var p parser
	for {
		_ = conn.SetReadDeadline(time.Now().Add(longestSilence)) // fails only on a closed connection
		n, readErr := conn.Read(v.buf[:])
		at := time.Now()
		err := p.feed(v.buf[:n], func(f frame) {
			v.receive(f, at)
			entered()
		})
		if p.Retry > 0 {
			v.retry = p.Retry
		}
		if v.visit.Admitted > 0 && !v.KeepOpen && v.hasSpan { // the page goes on to the shop
			v.endSpan(true)
			return
		}
		if err != nil || readErr != nil {
			v.judgeEnd(&p, err, readErr)
			return
		}
	}
}

func (v *visitor) endSpan(own bool) {
	if !v.hasSpan {
		return
	}
	v.span.To, v.span.Own = time.Now().UnixMicro(), own
	v.visit.Streams = append(v.visit.Streams, v.span)
	v.counts.open.Add(-1)
	if v.span.Shown > 0 {
		v.counts.shown.Add(-1)
	}
}

// judgeEnd is called when the connection or the parser has ended a stream. Unless the user's act
// caused that, it reports a violation if the broker gave a wrong answer or was silent too long.
func (v *visitor) judgeEnd(p *parser, err, readErr error) {
	v.mu.Lock()
	a := v.pending
	v.mu.Unlock()
	v.endSpan(a != noAct)
	var timeout net.Error
	switch {
	case a == stop:
		v.visit.Open = v.hasSpan && v.visit.Admitted == 0
	case a != noAct:
	case p.Status != 0 && (p.Status != 200 || p.Type != "text/event-stream"):
		v.failed = true
		v.wrong.addf("user %s: a stream is answered with status %d, %s", v.visit.User, p.Status, p.Type)
	case err != nil && !errors.Is(err, errEnded):
		v.wrong.addf("user %s: %v", v.visit.User, err)
	case errors.As(readErr, &timeout) && timeout.Timeout():
		v.wrong.addf("user %s: a stream was silent for %s", v.visit.User, longestSilence)
	}
}
