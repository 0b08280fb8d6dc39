package roomapi

import (
	"context"
	"errors"
	"net/http"
	"os"
	"sync"
	"time"

	"github.com/bulkaction/bulkaction/api"
	"github.com/bulkaction/bulkaction/internal/web"
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

// connectionClose is a header value that all streams share, so that it needs no allocation.
var connectionClose = []string{"close"}

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
	willClose(w, r)
	web.BeginStream(w)
	_, _ = w.Write(appendReconnect(nil, p.stream)) // an error means that the client has left
	return nil
}

// willClose announces with HTTP/1 that the connection will be closed after the last frame.
func willClose(w http.ResponseWriter, r *http.Request) {
	if r.ProtoMajor == 1 {
		w.Header()["Connection"] = connectionClose
	}
}

// pump writes the frames of s to the client, until the last one or until the client has gone. An
// error that wraps os.ErrDeadlineExceeded means that the client did not read in time.
func (a *API) pump(w http.ResponseWriter, r *http.Request, s *Stream) error {
	willClose(w, r)
	ctx := r.Context()
	stream, err := a.streams.Open(context.Background(), w) // the broker ends streams by frames
	if err != nil {
		return err
	}
	defer stream.Close()
	for {
		if err := stream.Wait(ctx, s.wake); err != nil {
			return err
		}
		if end, err := writePending(&stream, s); end || err != nil {
			return err
		}
	}
}

// buffers is the pool of buffers for frames that are being written. A stream without pending frames
// has no buffer.
var buffers = sync.Pool{New: func() any { return new(make([]byte, 0, 512)) }}

func writePending(stream *web.Stream, s *Stream) (end bool, err error) {
	buf := buffers.Get().(*[]byte)
	defer buffers.Put(buf)
	*buf, end = s.append((*buf)[:0])
	if len(*buf) == 0 {
		return end, nil
	}
	return end, stream.Send(*buf)
}
