// Package sse writes streams of server-sent events (text/event-stream), and limits how many streams
// a process has open. It hides how a client that does not read is disconnected, how an idle stream
// is kept open, and how a stopping server ends its streams at once.
package sse

import (
	"context"
	"errors"
	"fmt"
	"net/http"
	"sync/atomic"
	"time"
)

const (
	writeTimeout = 10 * time.Second // longest time to write one frame
	keepAlive    = 15 * time.Second // without a frame for so long, a comment is sent: proxies keep the connection
	retry        = time.Second      // a client that is disconnected connects again after this time
)

var (
	// ErrTooMany is the error of Open if the process already has Streams.Max open streams.
	ErrTooMany = errors.New("too many event streams")
	// ErrClosing means that the server stops.
	ErrClosing = errors.New("server is closing")
)

// Streams limits the open event streams of a process. The zero value allows none.
type Streams struct {
	Max  int64 // most streams at a time
	open atomic.Int64
}

// Stream is an event stream to one client. Only one goroutine may use it.
type Stream struct {
	w         http.ResponseWriter
	ctl       *http.ResponseController
	closing   context.Context //nolint:containedctx // the server's, not a call's
	keepAlive *time.Timer
	begun     bool
	release   func()
}

// Open reserves a stream for the answer w. It sends nothing yet, so the caller can still send
// another answer. The stream ends when closing ends. w must not set write deadlines itself. The
// caller must call Close.
func (s *Streams) Open(closing context.Context, w http.ResponseWriter) (*Stream, error) {
	if s.open.Add(1) > s.Max {
		s.open.Add(-1)
		return nil, ErrTooMany
	}
	st := &Stream{
		w: w, ctl: http.NewResponseController(w), closing: closing, keepAlive: time.NewTimer(keepAlive),
	}
	// When the server stops, a write that waits for a slow client ends at once.
	stop := context.AfterFunc(closing, func() { _ = st.ctl.SetWriteDeadline(time.Unix(1, 0)) })
	st.release = func() {
		stop()
		st.keepAlive.Stop()
		s.open.Add(-1)
	}
	return st, nil
}

// Close gives back the reservation of the stream. The HTTP handler ends the answer by returning.
func (st *Stream) Close() { st.release() }

// Send sends frames; before the first ones, the headers and the field retry. The write of each must
// finish within writeTimeout, otherwise Send returns an error and the client is disconnected.
func (st *Stream) Send(frames ...[]byte) error {
	if !st.begun {
		st.begun = true
		st.w.Header().Set("Content-Type", "text/event-stream")
		st.w.Header().Set("X-Accel-Buffering", "no") // a proxy must not collect frames
		st.w.WriteHeader(http.StatusOK)
		frames = append([][]byte{fmt.Appendf(nil, "retry: %d\n\n", retry.Milliseconds())}, frames...)
	}
	for _, frame := range frames {
		if err := st.write(frame); err != nil {
			return err
		}
	}
	st.keepAlive.Reset(keepAlive)
	return nil
}

func (st *Stream) write(frame []byte) error {
	_ = st.ctl.SetWriteDeadline(time.Now().Add(writeTimeout)) // a test server may have no deadlines
	if st.closing.Err() != nil {                              // only now: later, Open's function ends the write
		return ErrClosing
	}
	if _, err := st.w.Write(frame); err != nil {
		return err
	}
	return st.ctl.Flush()
}

// Wait waits until the channel changed is closed. Meanwhile it sends comments, so that proxies keep
// the connection open. It returns an error if the client disconnects or the server stops.
func (st *Stream) Wait(ctx context.Context, changed <-chan struct{}) error {
	for {
		select {
		case <-changed:
			return nil
		case <-st.keepAlive.C:
			if err := st.Send([]byte(": keep-alive\n\n")); err != nil {
				return err
			}
		case <-st.closing.Done():
			return ErrClosing
		case <-ctx.Done():
			return ctx.Err()
		}
	}
}

// Frame returns the frame of an event. data must be one line.
func Frame(id, event string, data []byte) []byte {
	return fmt.Appendf(nil, "id: %s\nevent: %s\ndata: %s\n\n", id, event, data)
}
