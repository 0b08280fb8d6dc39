package push

import (
	"errors"
	"net/http"
	"sync/atomic"
)

// sendAttempts is how often a request is sent at most. It is sent again if it got no answer because
// its connection ended or the server refused another stream.
const sendAttempts = 2

// connection sends all requests to one server over one connection of HTTP/2. Requests above the
// server's limit of streams wait. A connection that has ended is replaced.
//
// [http.Transport] opens further connections above the limit. With StrictMaxConcurrentRequests it
// deadlocks: each waiting request has reserved a stream, and reserved streams count as used
// (golang/go#70809). Requests on a [http.ClientConn] reserve nothing.
type connection struct {
	transport *http.Transport
	address   string // host:port
	current   atomic.Pointer[http.ClientConn]
	// opening is a lock: a request that opens a connection holds it until it has got its answer.
	// That request is sent alone, because only the answer tells the server's limit of streams, and
	// APNs allows one stream until it has got a valid token.
	opening chan struct{}
}

func newConnection(transport *http.Transport, address string) *connection {
	return &connection{transport: transport, address: address, opening: make(chan struct{}, 1)}
}

// RoundTrip sends r, which must have GetBody.
func (c *connection) RoundTrip(r *http.Request) (*http.Response, error) {
	for attempt := 1; ; attempt++ {
		response, again, err := c.send(r)
		if err == nil || !again || attempt == sendAttempts || r.Context().Err() != nil {
			return response, err
		}
		body, err := r.GetBody()
		if err != nil {
			return nil, err
		}
		r = r.WithContext(r.Context()) // a copy
		r.Body = body
	}
}

// send sends r once. again says that the caller should send r once more.
func (c *connection) send(r *http.Request) (response *http.Response, again bool, err error) {
	conn := c.usable()
	if conn == nil {
		select {
		case c.opening <- struct{}{}:
		case <-r.Context().Done():
			return nil, false, r.Context().Err()
		}
		if conn = c.usable(); conn == nil {
			defer func() { <-c.opening }()
			return c.open(r)
		}
		<-c.opening // another request opened a connection meanwhile
	}
	response, err = conn.RoundTrip(r)
	if err == nil || r.Context().Err() != nil {
		return response, false, err
	}
	reset, again := isReset(err)
	if !reset {
		c.drop(conn)
	}
	return nil, again, err
}

// open opens a connection and sends r on it. Other requests may use the connection only after the
// answer to r. again says that the caller should send r once more.
func (c *connection) open(r *http.Request) (response *http.Response, again bool, err error) {
	conn, err := c.transport.NewClientConn(r.Context(), "https", c.address)
	if err != nil {
		return nil, false, err
	}
	response, err = conn.RoundTrip(r)
	if err != nil {
		_ = conn.Close()
		_, again = isReset(err)
		return nil, again, err
	}
	c.current.Store(conn)
	return response, false, nil
}

// usable returns the connection, or nil if there is none or it was closed.
func (c *connection) usable() *http.ClientConn {
	conn := c.current.Load()
	if conn == nil || conn.Err() != nil {
		return nil
	}
	return conn
}

// drop stops the use of a connection for further requests, and closes it after its last answer.
func (c *connection) drop(conn *http.ClientConn) {
	c.current.CompareAndSwap(conn, nil)
	conn.SetStateHook(closeUnused)
	closeUnused(conn)
}

func closeUnused(conn *http.ClientConn) {
	if conn.InFlight() == 0 {
		_ = conn.Close()
	}
}

// close closes the connection after its last answer. A later request opens another one.
func (c *connection) close() {
	if conn := c.current.Load(); conn != nil {
		c.drop(conn)
	}
}

// refusedStream is the code of HTTP/2 with which a server resets a stream that it has not processed
// (RFC 9113, 8.7).
const refusedStream = 7

// streamError is the error that has ended one stream of an HTTP/2 connection. [errors.As] fills it
// from the error of net/http, whose type has the same fields and is not exported.
type streamError struct {
	StreamID uint32
	Code     uint32
	Cause    error
}

func (streamError) Error() string { return "the stream was reset" }

// isReset classifies the error of a request. reset: it ended only the request's stream, not the
// connection. again: the request should be sent again, because the connection ended, or because the
// server refused the stream before it processed the request.
func isReset(err error) (reset, again bool) {
	var stream streamError
	reset = errors.As(err, &stream)
	return reset, !reset || stream.Code == refusedStream
}
