package client_test

import (
	"context"
	"encoding/json"
	"fmt"
	"io"
	"net/http"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/bulkaction/bulkaction/api"
	"github.com/bulkaction/bulkaction/client"
)

// eventServer is a fake server of the events of one group. Each connection is served by the next
// function.
type eventServer struct {
	mu          sync.Mutex
	connections []func(w io.Writer, r *http.Request)
	after       []string // Last-Event-ID of each connection
}

func (s *eventServer) ServeHTTP(w http.ResponseWriter, r *http.Request) {
	s.mu.Lock()
	defer s.mu.Unlock()
	n := len(s.after)
	s.after = append(s.after, r.Header.Get("Last-Event-ID"))
	if n >= len(s.connections) {
		refuse(w, 404, api.Problem{Detail: "no more connections"})
		return
	}
	w.Header().Set("Content-Type", "text/event-stream")
	s.connections[n](w, r)
}

func flush(w io.Writer) { _ = http.NewResponseController(w.(http.ResponseWriter)).Flush() }

func event(w io.Writer, id, typ string, st api.Status) {
	b, _ := json.Marshal(api.Event{ID: id, Type: typ, Group: &api.Group{ID: "g", Status: st}})
	_, _ = fmt.Fprintf(w, "id: %s\nevent: %s\ndata: %s\n\n", id, typ, b)
}

func abortResponse() { panic(http.ErrAbortHandler) }

func summary(e api.Event) string {
	if e.Group == nil {
		return e.ID + " " + e.Type
	}
	return e.ID + " " + e.Type + " " + string(e.Group.Status)
}

func collectEvents(ctx context.Context, a *client.API, after string) (all []string, err error) {
	for e, err := range a.Events(ctx, "g", after) {
		if err != nil {
			return all, err
		}
		all = append(all, summary(e))
	}
	return all, nil
}

func TestEventsUntilTheEnd(t *testing.T) {
	s := &eventServer{connections: []func(io.Writer, *http.Request){
		func(w io.Writer, _ *http.Request) {
			_, _ = io.WriteString(w, ": hello\n\nretry: 3\n\n")
			event(w, "1", "group.running", api.StatusRunning)
			// This event has no id, its data is in two lines, and its lines end with CRLF. Its type
			// comes from the field event.
			_, _ = io.WriteString(w, "event:group.progress\r\ndata: {\"group\":\r\ndata:{\"status\":\"RUNNING\"}}\r\n\r\n")
			event(w, "2", "group.completed", api.StatusCompleted)
			event(w, "3", "group.created", api.StatusCreated) // of another round
		},
	}}
	a, _ := serve(t, s)
	got, err := collectEvents(t.Context(), a, "")
	require.NoError(t, err)
	require.Equal(t, []string{"1 group.running RUNNING", " group.progress RUNNING", "2 group.completed COMPLETED"}, got)
	require.Equal(t, []string{""}, s.after)
}

func TestEventsResume(t *testing.T) {
	s := &eventServer{connections: []func(io.Writer, *http.Request){
		func(w io.Writer, _ *http.Request) { // the server ends this connection in order
			event(w, "1", "group.running", api.StatusRunning)
			_, _ = io.WriteString(w, "retry: 1234\n\n")
		},
		func(w io.Writer, _ *http.Request) { // this connection breaks in the middle of an event
			event(w, "1", "group.running", api.StatusRunning) // repeated
			event(w, "2", "group.progress", api.StatusRunning)
			_, _ = io.WriteString(w, "id: 3\ndata: {}\n")
			flush(w)
			abortResponse()
		},
		func(w io.Writer, _ *http.Request) { event(w, "3", "group.failed", api.StatusFailed) },
	}}
	a, w := serve(t, s)
	got, err := collectEvents(t.Context(), a, "")
	require.NoError(t, err)
	require.Equal(t, []string{"1 group.running RUNNING", "2 group.progress RUNNING", "3 group.failed FAILED"}, got)
	require.Equal(t, []string{"", "1", "2"}, s.after)
	require.Equal(t, 1234*time.Millisecond, w.all()[0], "the client waits as the server asks")
}

func TestEventsContinueAfterAnID(t *testing.T) {
	s := &eventServer{connections: []func(io.Writer, *http.Request){
		func(w io.Writer, _ *http.Request) {
			event(w, "8", "group.aggregating", api.StatusAggregating)
			event(w, "9", "group.completed", api.StatusCompleted)
		},
	}}
	a, _ := serve(t, s)
	got, err := collectEvents(t.Context(), a, "7")
	require.NoError(t, err)
	require.Equal(t, []string{"8 group.aggregating AGGREGATING", "9 group.completed COMPLETED"}, got, "missed events come before the last one")
	require.Equal(t, []string{"7"}, s.after)
}

func TestEventsAfterTheEnd(t *testing.T) {
	s := &eventServer{connections: []func(io.Writer, *http.Request){
		func(w io.Writer, _ *http.Request) { w.(http.ResponseWriter).WriteHeader(http.StatusNoContent) },
	}}
	a, _ := serve(t, s)
	got, err := collectEvents(t.Context(), a, "1.5")
	require.NoError(t, err)
	require.Empty(t, got, "no event follows the last one")
	require.Equal(t, []string{"1.5"}, s.after)
}

func TestEventsResumeAfterSilence(t *testing.T) {
	s := &eventServer{connections: []func(io.Writer, *http.Request){
		func(w io.Writer, r *http.Request) {
			event(w, "1", "group.running", api.StatusRunning)
			flush(w)
			<-r.Context().Done() // the connection is open but silent
		},
		func(w io.Writer, _ *http.Request) { event(w, "2", "group.completed", api.StatusCompleted) },
	}}
	a, _ := serve(t, s, client.WithSilence(50*time.Millisecond))
	got, err := collectEvents(t.Context(), a, "")
	require.NoError(t, err)
	require.Equal(t, []string{"1 group.running RUNNING", "2 group.completed COMPLETED"}, got)
	require.Equal(t, []string{"", "1"}, s.after)
}

func TestEventsEndWithAnError(t *testing.T) {
	one := func(w io.Writer, _ *http.Request) { event(w, "1", "group.running", api.StatusRunning) }

	t.Run("after a final answer", func(t *testing.T) {
		a, _ := serve(t, &eventServer{connections: []func(io.Writer, *http.Request){one}})
		got, err := collectEvents(t.Context(), a, "")
		require.ErrorContains(t, err, "follow group g: 404 Not Found: no more connections")
		require.Len(t, got, 1)
	})
	t.Run("after data that is no event", func(t *testing.T) {
		a, _ := serve(t, &eventServer{connections: []func(io.Writer, *http.Request){
			func(w io.Writer, _ *http.Request) { _, _ = io.WriteString(w, "id: 1\ndata: <html>\n\n") },
		}})
		_, err := collectEvents(t.Context(), a, "")
		require.ErrorContains(t, err, `follow group g: event "1": not in the format of events`)
	})
	t.Run("after an outage", func(t *testing.T) {
		n := 0
		a, w := serve(t, http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
			if n++; n == 1 {
				one(w, r)
				return
			}
			refuse(w, 503, api.Problem{Detail: "Redis is away"})
		}), client.WithOutage(0))
		_, err := collectEvents(t.Context(), a, "0")
		require.ErrorContains(t, err, "follow group g: 503 Service Unavailable: Redis is away")
		require.NotEmpty(t, w.all())
	})
	t.Run("at once when the first connection fails", func(t *testing.T) {
		a, _ := serve(t, http.HandlerFunc(func(w http.ResponseWriter, _ *http.Request) { refuse(w, 503, api.Problem{}) }))
		_, err := collectEvents(t.Context(), a, "")
		require.ErrorContains(t, err, "503 Service Unavailable")
	})
}

func TestEventsEndWithTheirConsumer(t *testing.T) {
	hang := func(w io.Writer, r *http.Request) {
		event(w, "1", "group.running", api.StatusRunning)
		flush(w)
		<-r.Context().Done()
	}
	t.Run("that stops the iteration", func(t *testing.T) {
		a, _ := serve(t, &eventServer{connections: []func(io.Writer, *http.Request){hang}})
		n := 0
		for _, err := range a.Events(t.Context(), "g", "") {
			require.NoError(t, err)
			if n++; n == 1 {
				break
			}
		}
	})
	t.Run("whose context ends", func(t *testing.T) {
		a, _ := serve(t, &eventServer{connections: []func(io.Writer, *http.Request){hang}})
		ctx, cancel := context.WithCancel(t.Context())
		defer cancel()
		var last error
		for e, err := range a.Events(ctx, "g", "") {
			if e.ID == "1" {
				cancel()
			}
			last = err
		}
		require.ErrorIs(t, last, context.Canceled)
		require.ErrorContains(t, last, "follow group g")
	})
}

func TestWait(t *testing.T) {
	s := &eventServer{connections: []func(io.Writer, *http.Request){
		func(w io.Writer, _ *http.Request) { event(w, "1", "group.aggregating", api.StatusAggregating) },
		func(w io.Writer, _ *http.Request) { event(w, "2", "group.failed", api.StatusFailed) },
	}}
	a, _ := serve(t, s)
	g, err := a.Wait(t.Context(), "g")
	require.NoError(t, err)
	require.Equal(t, api.StatusFailed, g.Status)

	_, err = a.Wait(t.Context(), "g")
	require.ErrorContains(t, err, "404")
}

// TestWaitThatEndsEarly: when ctx ends, Wait returns the last state that it saw. If the group is
// not sealed, the error says that it can't end.
func TestWaitThatEndsEarly(t *testing.T) {
	t.Parallel()
	for name, sealed := range map[string]bool{"sealed": true, "not sealed": false} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			ctx, cancel := context.WithCancel(t.Context())
			defer cancel()
			a, _ := serve(t, &eventServer{connections: []func(io.Writer, *http.Request){func(w io.Writer, r *http.Request) {
				b, _ := json.Marshal(api.Event{ID: "1", Type: "progress", Group: &api.Group{
					ID: "g", Status: api.StatusRunning, Sealed: sealed, Counts: api.Counts{Accepted: 5},
				}})
				_, _ = fmt.Fprintf(w, "id: 1\nevent: progress\ndata: %s\n\n", b)
				flush(w)
				time.AfterFunc(50*time.Millisecond, cancel)
				<-r.Context().Done()
			}}})
			g, err := a.Wait(ctx, "g")
			require.ErrorIs(t, err, context.Canceled)
			require.EqualValues(t, 5, g.Counts.Accepted)
			require.Equal(t, !sealed, strings.Contains(err.Error(), "is not sealed"), err)
		})
	}
}
