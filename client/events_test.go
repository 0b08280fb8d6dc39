package client_test

import (
	"context"
	"encoding/json"
	"fmt"
	"io"
	"net/http"
	"sync"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/bulkaction/bulkaction/api"
	"github.com/bulkaction/bulkaction/client"
)

// stage is a server of one group's events, one function a connection.
type stage struct {
	mu          sync.Mutex
	connections []func(w io.Writer, r *http.Request)
	after       []string // Last-Event-ID of each connection
}

func (s *stage) ServeHTTP(w http.ResponseWriter, r *http.Request) {
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

func breakOff() { panic(http.ErrAbortHandler) }

func brief(e api.Event) string {
	if e.Group == nil {
		return e.ID + " " + e.Type
	}
	return e.ID + " " + e.Type + " " + string(e.Group.Status)
}

func follow(ctx context.Context, a *client.API, after string) (all []string, err error) {
	for e, err := range a.Events(ctx, "g", after) {
		if err != nil {
			return all, err
		}
		all = append(all, brief(e))
	}
	return all, nil
}

func TestEventsUntilTheEnd(t *testing.T) {
	s := &stage{connections: []func(io.Writer, *http.Request){
		func(w io.Writer, _ *http.Request) {
			_, _ = io.WriteString(w, ": hello\n\nretry: 3\n\n")
			event(w, "1", "group.running", api.StatusRunning)
			// Without an id, in several lines, with line ends of the other kind; the type comes
			// from the frame.
			_, _ = io.WriteString(w, "event:group.progress\r\ndata: {\"group\":\r\ndata:{\"status\":\"RUNNING\"}}\r\n\r\n")
			event(w, "2", "group.completed", api.StatusCompleted)
			event(w, "3", "group.created", api.StatusCreated) // of another round
		},
	}}
	a, _ := serve(t, s)
	got, err := follow(t.Context(), a, "")
	require.NoError(t, err)
	require.Equal(t, []string{"1 group.running RUNNING", " group.progress RUNNING", "2 group.completed COMPLETED"}, got)
	require.Equal(t, []string{""}, s.after)
}

func TestEventsResume(t *testing.T) {
	s := &stage{connections: []func(io.Writer, *http.Request){
		func(w io.Writer, _ *http.Request) { // an orderly end
			event(w, "1", "group.running", api.StatusRunning)
			_, _ = io.WriteString(w, "retry: 1234\n\n")
		},
		func(w io.Writer, _ *http.Request) { // a broken one, in the middle of an event
			event(w, "1", "group.running", api.StatusRunning) // once more
			event(w, "2", "group.progress", api.StatusRunning)
			_, _ = io.WriteString(w, "id: 3\ndata: {}\n")
			flush(w)
			breakOff()
		},
		func(w io.Writer, _ *http.Request) { event(w, "3", "group.failed", api.StatusFailed) },
	}}
	a, w := serve(t, s)
	got, err := follow(t.Context(), a, "")
	require.NoError(t, err)
	require.Equal(t, []string{"1 group.running RUNNING", "2 group.progress RUNNING", "3 group.failed FAILED"}, got)
	require.Equal(t, []string{"", "1", "2"}, s.after)
	require.Equal(t, 1234*time.Millisecond, w.taken()[0], "as the server asks")
}

func TestEventsGoOnAfterAnID(t *testing.T) {
	s := &stage{connections: []func(io.Writer, *http.Request){
		func(w io.Writer, _ *http.Request) {
			event(w, "8", "group.aggregating", api.StatusAggregating)
			event(w, "9", "group.completed", api.StatusCompleted)
		},
	}}
	a, _ := serve(t, s)
	got, err := follow(t.Context(), a, "7")
	require.NoError(t, err)
	require.Equal(t, []string{"8 group.aggregating AGGREGATING", "9 group.completed COMPLETED"}, got, "what was missed comes before the end")
	require.Equal(t, []string{"7"}, s.after)
}

func TestEventsAfterTheEnd(t *testing.T) {
	s := &stage{connections: []func(io.Writer, *http.Request){
		func(w io.Writer, _ *http.Request) { w.(http.ResponseWriter).WriteHeader(http.StatusNoContent) },
	}}
	a, _ := serve(t, s)
	got, err := follow(t.Context(), a, "1.5")
	require.NoError(t, err)
	require.Empty(t, got, "there is nothing more to be told")
	require.Equal(t, []string{"1.5"}, s.after)
}

func TestEventsNoticeSilence(t *testing.T) {
	s := &stage{connections: []func(io.Writer, *http.Request){
		func(w io.Writer, r *http.Request) {
			event(w, "1", "group.running", api.StatusRunning)
			flush(w)
			<-r.Context().Done() // half open
		},
		func(w io.Writer, _ *http.Request) { event(w, "2", "group.completed", api.StatusCompleted) },
	}}
	a, _ := serve(t, s, client.WithSilence(50*time.Millisecond))
	got, err := follow(t.Context(), a, "")
	require.NoError(t, err)
	require.Equal(t, []string{"1 group.running RUNNING", "2 group.completed COMPLETED"}, got)
	require.Equal(t, []string{"", "1"}, s.after)
}

func TestEventsGiveUp(t *testing.T) {
	one := func(w io.Writer, _ *http.Request) { event(w, "1", "group.running", api.StatusRunning) }

	t.Run("on what is final", func(t *testing.T) {
		a, _ := serve(t, &stage{connections: []func(io.Writer, *http.Request){one}})
		got, err := follow(t.Context(), a, "")
		require.ErrorContains(t, err, "follow group g: 404 Not Found: no more connections")
		require.Len(t, got, 1)
	})
	t.Run("on what is no event", func(t *testing.T) {
		a, _ := serve(t, &stage{connections: []func(io.Writer, *http.Request){
			func(w io.Writer, _ *http.Request) { _, _ = io.WriteString(w, "id: 1\ndata: <html>\n\n") },
		}})
		_, err := follow(t.Context(), a, "")
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
		_, err := follow(t.Context(), a, "0")
		require.ErrorContains(t, err, "follow group g: 503 Service Unavailable: Redis is away")
		require.NotEmpty(t, w.taken())
	})
	t.Run("at once when there never was a connection", func(t *testing.T) {
		a, _ := serve(t, http.HandlerFunc(func(w http.ResponseWriter, _ *http.Request) { refuse(w, 503, api.Problem{}) }))
		_, err := follow(t.Context(), a, "")
		require.ErrorContains(t, err, "503 Service Unavailable")
	})
}

func TestEventsEndWithTheirConsumer(t *testing.T) {
	hang := func(w io.Writer, r *http.Request) {
		event(w, "1", "group.running", api.StatusRunning)
		flush(w)
		<-r.Context().Done()
	}
	t.Run("who leaves", func(t *testing.T) {
		a, _ := serve(t, &stage{connections: []func(io.Writer, *http.Request){hang}})
		n := 0
		for _, err := range a.Events(t.Context(), "g", "") {
			require.NoError(t, err)
			if n++; n == 1 {
				break
			}
		}
	})
	t.Run("whose context ends", func(t *testing.T) {
		a, _ := serve(t, &stage{connections: []func(io.Writer, *http.Request){hang}})
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
	s := &stage{connections: []func(io.Writer, *http.Request){
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
