package web

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"math/rand/v2"
	"net/http"
	"strconv"
	"sync/atomic"
	"time"
)

var (
	// ErrTooManyStreams is the error of Open if the process already has Streams.Max open streams.
	ErrTooManyStreams = errors.New("too many event streams")
	// ErrClosing means that the server stops.
	ErrClosing = errors.New("server is closing")
)

// Streams makes streams of server-sent events (text/event-stream). It hides how a client that does
// not read is disconnected, how an idle stream is kept open, and how a stopping server ends its
// streams at once.
type Streams struct {
	Max          int64         // most streams at a time
	WriteTimeout time.Duration // longest time to write one frame
	KeepAlive    time.Duration // without a frame for so long, a comment is sent: proxies keep the connection
	// A client that is disconnected connects again after a random time between these two.
	MinRetry, MaxRetry time.Duration

	open atomic.Int64
}

// NewStreams returns Streams with the times of streams that few clients have.
func NewStreams(most int64) *Streams {
	return &Streams{
		Max: most, WriteTimeout: 10 * time.Second, KeepAlive: 15 * time.Second,
		MinRetry: time.Second, MaxRetry: time.Second,
	}
}

// Stream is an event stream to one client. Only one goroutine may use it. It is no pointer, so that a
// process with many streams has them on the stacks of their goroutines.
type Stream struct {
	of      *Streams
	w       http.ResponseWriter
	ctl     *http.ResponseController
	closing context.Context //nolint:containedctx // the server's, not a call's
	stop    func() bool     // ends the watch over closing
	silence *time.Timer     // set again only when it fires: most streams are not silent
	written time.Time       // when the last frame was written
	begun   bool
}

// Open reserves a stream for the answer w. It sends nothing yet, so the caller can still send
// another answer. The stream ends when closing ends. w must not set write deadlines itself. The
// caller must call Close.
func (s *Streams) Open(closing context.Context, w http.ResponseWriter) (Stream, error) {
	if s.open.Add(1) > s.Max {
		s.open.Add(-1)
		return Stream{}, ErrTooManyStreams
	}
	st := Stream{
		of: s, w: w, ctl: http.NewResponseController(w), closing: closing,
		silence: time.NewTimer(s.KeepAlive), written: time.Now(),
	}
	if closing.Done() != nil {
		// When the server stops, a write that waits for a slow client ends at once.
		ctl := st.ctl
		st.stop = context.AfterFunc(closing, func() { _ = ctl.SetWriteDeadline(time.Unix(1, 0)) })
	}
	return st, nil
}

// Close gives back the reservation of the stream. The HTTP handler ends the answer by returning.
func (st *Stream) Close() {
	if st.stop != nil {
		st.stop()
	}
	st.silence.Stop()
	st.of.open.Add(-1)
}

// Send sends frames, which the stream does not keep; before the first one, the headers, and the
// field retry unless the frame begins with it. The write of each must finish within
// Streams.WriteTimeout, otherwise Send returns an error that wraps os.ErrDeadlineExceeded and the
// client is disconnected.
func (st *Stream) Send(frames ...[]byte) error {
	for _, frame := range frames {
		if !st.begun {
			st.begun = true
			BeginStream(st.w)
			if !bytes.HasPrefix(frame, []byte(retryField)) {
				frame = append(AppendRetry(make([]byte, 0, 16+len(frame)), st.of.MinRetry, st.of.MaxRetry), frame...)
			}
		}
		st.written = time.Now()
		_ = st.ctl.SetWriteDeadline(st.written.Add(st.of.WriteTimeout)) // a test server may have no deadlines
		if st.closing.Err() != nil {                                    // only now: later, Open's function ends the write
			return ErrClosing
		}
		if _, err := st.w.Write(frame); err != nil {
			return err
		}
		if err := st.ctl.Flush(); err != nil {
			return err
		}
	}
	return nil
}

var keepAlive = []byte(":\n\n")

// Wait waits until the channel changed is closed or has an element. Meanwhile it sends comments, so
// that proxies keep the connection open. It returns an error if the client disconnects or the
// server stops.
func (st *Stream) Wait(ctx context.Context, changed <-chan struct{}) error {
	for {
		select {
		case <-changed:
			return nil
		case <-st.silence.C:
			rest := st.of.KeepAlive - time.Since(st.written)
			if rest <= 0 {
				if err := st.Send(keepAlive); err != nil {
					return err
				}
				rest = st.of.KeepAlive
			}
			st.silence.Reset(rest)
		case <-st.closing.Done():
			return ErrClosing
		case <-ctx.Done():
			return ctx.Err()
		}
	}
}

// Header values that all streams share, so that they need no allocation. They are never changed.
var (
	eventStream = []string{"text/event-stream"}
	noBuffering = []string{"no"} // a proxy must not collect frames
)

// BeginStream writes the headers of an event stream.
func BeginStream(w http.ResponseWriter) {
	h := w.Header()
	h["Content-Type"] = eventStream
	h["X-Accel-Buffering"] = noBuffering
	w.WriteHeader(http.StatusOK)
}

const retryField = "retry: "

// AppendRetry appends the field retry with a random time between the two. The frame behind it
// becomes a part of the same event.
func AppendRetry(b []byte, shortest, longest time.Duration) []byte {
	ms := shortest.Milliseconds() + rand.Int64N((longest-shortest).Milliseconds()+1)
	b = append(b, retryField...)
	b = strconv.AppendInt(b, ms, 10)
	return append(b, '\n')
}

// Frame returns the frame of an event. data must be one line.
func Frame(id, event string, data []byte) []byte {
	return fmt.Appendf(nil, "id: %s\nevent: %s\ndata: %s\n\n", id, event, data)
}
