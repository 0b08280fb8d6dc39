package roomapi

import (
	"context"
	"errors"
	"math/rand/v2"
	"net/http"
	"os"
	"strconv"
	"sync"
	"time"

	"github.com/bulkaction/bulkaction/api"
)

// Bounds of the random waits before a client connects again. The Retry pair is for a client that
// lost its stream: so the users of a dead broker do not all come back at the same moment. The
// Reconnect pair is for streams that a broker refuses or hands to other brokers.
const (
	shortestRetry     = 1000 * time.Millisecond
	longestRetry      = 5000 * time.Millisecond
	shortestReconnect = 3000 * time.Millisecond
	longestReconnect  = 10_000 * time.Millisecond
)

// lastEventID is the id of the frame ended. An EventSource that connects again after it sends this
// id, and the server answers 204, which makes it stop.
const lastEventID = "ended"

// Header values that all streams share, so that they need no allocation. They are never changed.
var (
	eventStream     = []string{"text/event-stream"}
	connectionClose = []string{"close"}
)

// stream serves GET …/tickets/waiting. After a status other than 200 an EventSource never connects
// again, so a temporary problem is answered with 200 and the frame reconnect.
func (a *API) stream(w http.ResponseWriter, r *http.Request) error {
	if r.Header.Get("Last-Event-ID") == lastEventID {
		w.WriteHeader(http.StatusNoContent)
		return nil
	}
	event, err := eventOf(r)
	if err != nil {
		return err
	}
	if r.ContentLength != 0 { // net/http notices the end of a client only after the body
		return newProblem(api.BadParameter, "", "this call has no body")
	}
	user, err := a.enter(w, r)
	if err != nil {
		return a.refuseStream(w, r, err)
	}
	ip := a.clients.proxies.ClientOf(r)
	if err := a.clients.connect(ip); err != nil {
		return a.refuseStream(w, r, err)
	}
	defer a.clients.disconnect(ip)
	s := NewStream()
	left, err := a.room.Connect(r.Context(), event, user, s)
	if err != nil {
		return a.refuseStream(w, r, err)
	}
	defer left()
	if err := a.pump(w, r, s); errors.Is(err, os.ErrDeadlineExceeded) {
		a.metrics.SlowReader(event)
	}
	return nil
}

// refuseStream answers a stream request with a temporary problem by the frame reconnect. It returns
// a final problem to the caller.
func (a *API) refuseStream(w http.ResponseWriter, r *http.Request, err error) error {
	if errors.Is(err, context.Canceled) && r.Context().Err() != nil {
		return nil // the client has left
	}
	p := a.refuse(r, err)
	if p.stream == "" {
		return p
	}
	beginStream(w, r)
	_, _ = w.Write(appendReconnect(nil, p.stream)) // an error means that the client has left
	return nil
}

// beginStream writes the headers of a stream. With HTTP/1 it announces that the connection will be
// closed after the last frame.
func beginStream(w http.ResponseWriter, r *http.Request) {
	h := w.Header()
	h["Content-Type"] = eventStream
	if r.ProtoMajor == 1 {
		h["Connection"] = connectionClose
	}
	h.Set("X-Accel-Buffering", "no") // a proxy must not collect frames
	w.WriteHeader(http.StatusOK)
}

// pump writes the frames of s to the client, until the last one or until the client has gone. An
// error that wraps os.ErrDeadlineExceeded means that the client did not read in time.
func (a *API) pump(w http.ResponseWriter, r *http.Request, s *Stream) error {
	ctx := r.Context()
	f := frameWriter{w: w, r: r, ctl: http.NewResponseController(w), timeout: a.writeTimeout, written: time.Now()}
	silence := time.NewTimer(a.heartbeat) // set again only when it fires: most streams are not silent
	defer silence.Stop()
	for {
		select {
		case <-s.wake:
			if end, err := f.writePending(s); end || err != nil {
				return err
			}
		case <-silence.C:
			rest := a.heartbeat - time.Since(f.written)
			if rest <= 0 {
				if err := f.writeComment(); err != nil {
					return err
				}
				rest = a.heartbeat
			}
			silence.Reset(rest)
		case <-ctx.Done():
			return ctx.Err()
		}
	}
}

// frameWriter writes frames to one client.
type frameWriter struct {
	w       http.ResponseWriter
	r       *http.Request
	ctl     *http.ResponseController
	timeout time.Duration
	begun   bool      // the answer has begun
	written time.Time // when the last frame was written
}

// buffers is the pool of buffers for frames that are being written. A stream without pending frames
// has no buffer.
var buffers = sync.Pool{New: func() any { return new(make([]byte, 0, 512)) }}

func (f *frameWriter) writePending(s *Stream) (end bool, err error) {
	buf := buffers.Get().(*[]byte)
	defer buffers.Put(buf)
	*buf, end = s.append((*buf)[:0], !f.begun)
	if len(*buf) == 0 {
		return end, nil
	}
	return end, f.write(*buf)
}

func (f *frameWriter) writeComment() error {
	var b []byte
	if !f.begun {
		b = appendRetry(b, shortestRetry, longestRetry)
	}
	return f.write(append(b, ":\n\n"...))
}

func (f *frameWriter) write(frames []byte) error {
	if !f.begun {
		f.begun = true
		beginStream(f.w, f.r)
	}
	f.written = time.Now()
	_ = f.ctl.SetWriteDeadline(f.written.Add(f.timeout)) // a test server may have no deadlines
	if _, err := f.w.Write(frames); err != nil {
		return err
	}
	return f.ctl.Flush()
}

// appendRetry appends the SSE field retry with a random time. The caller appends a frame behind it,
// which it becomes a part of.
func appendRetry(b []byte, shortest, longest time.Duration) []byte {
	ms := shortest.Milliseconds() + rand.Int64N((longest-shortest).Milliseconds()+1)
	b = append(b, "retry: "...)
	b = strconv.AppendInt(b, ms, 10)
	return append(b, '\n')
}
