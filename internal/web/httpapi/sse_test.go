package httpapi_test

import (
	"bufio"
	"context"
	"encoding/json"
	"fmt"
	"io"
	"net"
	"net/http"
	"net/http/httptest"
	"runtime"
	"strings"
	"sync/atomic"
	"testing"
	"testing/synctest"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/bulkaction/bulkaction/api"
	"github.com/bulkaction/bulkaction/internal/testkit/apitest"
	"github.com/bulkaction/bulkaction/internal/web/httpapi"
)

// groupInStates returns a sealed group g in the given round. It has entered the states in turn, a
// second apart, and is in the last one.
func groupInStates(round int, states ...api.Status) api.Group {
	at := time.Date(2026, 1, 2, 3, 4, 0, 0, time.UTC)
	g := api.Group{
		ID: "g", Tenant: "g", Type: "NOOP", Priority: "normal", Round: round, Sealed: true,
		Status: states[len(states)-1], Timestamps: map[string]time.Time{},
	}
	for i, s := range states {
		g.Timestamps[strings.ToLower(string(s))] = at.Add(time.Duration(i) * time.Second)
	}
	return g
}

func withDone(g api.Group, n int64) api.Group {
	g.Counts = api.Counts{Accepted: 10, Waiting: 10 - n, Done: n}
	return g
}

const (
	created, dispatched, running = api.StatusCreated, api.StatusDispatched, api.StatusRunning
	aggregating, completed       = api.StatusAggregating, api.StatusCompleted
)

// showingGroup returns a fake backend. Each read of the group returns the next of views, and the
// last one again and again.
func showingGroup(views ...api.Group) *apitest.Backend {
	f := apitest.NewBackend()
	f.OnGroup = func(_ context.Context, read int) (api.Group, error) { return views[min(read, len(views)-1)], nil }
	return f
}

// event is a server-sent event, or a comment line, of which only comment and at are set.
type event struct {
	id, name, comment string
	data              api.Event
	at                time.Time // when it was read
}

// readEvents reads events and comments until the stream ends or it has read limit of them.
func readEvents(t *testing.T, body io.Reader, limit int) (events []event) {
	t.Helper()
	var e event
	for in := bufio.NewScanner(body); len(events) < limit && in.Scan(); {
		field, value, _ := strings.Cut(in.Text(), ": ")
		switch field {
		case "":
			if value != "" {
				e.comment = value
			}
			if e.id != "" || e.comment != "" {
				e.at = time.Now()
				events = append(events, e)
			}
			e = event{}
		case ":":
			e.comment = ":"
		case "id":
			e.id = value
		case "event":
			e.name = value
		case "data":
			requireSchema(t, "Event", []byte(value))
			require.NoError(t, json.Unmarshal([]byte(value), &e.data))
			require.Equal(t, e.id, e.data.ID)
		case "retry":
		default:
			require.Fail(t, "unknown field", in.Text())
		}
	}
	return events
}

func describe(events []event) (out []string) {
	for _, e := range events {
		id := e.id
		if e.name == "progress" { // its last part is the time
			id = id[:strings.LastIndex(id, ".")] + ".ms"
		}
		out = append(out, id+" "+e.name+" "+strings.TrimPrefix(e.data.Type, "group."))
	}
	return out
}

// watchEvents reads the events of the group g until the server ends the stream, at most 1000.
// lastID, unless empty, is sent as Last-Event-ID. It works in and outside of synctest bubbles.
func watchEvents(t *testing.T, f *apitest.Backend, lastID string) (events []event, code int) {
	t.Helper()
	req := httptest.NewRequest("GET", "/v1/groups/g/events", nil)
	if lastID != "" {
		req.Header.Set("Last-Event-ID", lastID)
	}
	rec := httptest.NewRecorder()
	httpapi.New(options(f)).ServeHTTP(rec, req)
	requireDocumented(t, req, rec)
	return readEvents(t, rec.Body, 1000), rec.Code
}

func TestEventsContainEveryState(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		events, code := watchEvents(t, showingGroup(
			withDone(groupInStates(1, created), 0),
			withDone(groupInStates(1, created, dispatched, running), 0),
			withDone(groupInStates(1, created, dispatched, running), 4),
			withDone(groupInStates(1, created, dispatched, running), 7),
			withDone(groupInStates(1, created, dispatched, running, aggregating), 10),
			withDone(groupInStates(1, created, dispatched, running, aggregating, completed), 10),
		), "")
		require.Equal(t, 200, code)
		require.Equal(t, []string{
			"1.1 state created", "1.2 state dispatched", "1.3 state running", "1.3.ms progress progress", "1.3.ms progress progress",
			"1.4 state aggregating", "1.5 state completed",
		}, describe(events))
		for i, e := range events {
			if e.name == "state" {
				require.Equal(t, strings.ToLower(string(e.data.Group.Status)), strings.TrimPrefix(e.data.Type, "group."))
				require.Equal(t, e.data.Group.Timestamps[strings.ToLower(string(e.data.Group.Status))], e.data.At, i)
			}
		}
		require.EqualValues(t, 7, events[4].data.Group.Counts.Done)
		require.EqualValues(t, 10, events[6].data.Group.Counts.Done)
	})
}

func TestEventsOfAnEndedGroup(t *testing.T) {
	all := groupInStates(1, created, dispatched, running, aggregating, completed)
	for name, c := range map[string]struct {
		group  api.Group
		lastID string
		code   int
		want   []string
	}{
		"from the beginning": {all, "", 200, []string{
			"1.1 state created", "1.2 state dispatched", "1.3 state running", "1.4 state aggregating", "1.5 state completed"}},
		"resumed":                  {all, "1.3", 200, []string{"1.4 state aggregating", "1.5 state completed"}},
		"resumed after a progress": {all, "1.3.12", 200, []string{"1.4 state aggregating", "1.5 state completed"}},
		"all seen":                 {all, "1.5", 204, nil},
		"all of the round seen":    {groupInStates(2, dispatched, completed), "2.5.1", 204, nil},
		"resumed in the next round": {groupInStates(2, dispatched, running, aggregating, completed), "1.5", 200, []string{
			"2.2 state dispatched", "2.3 state running", "2.4 state aggregating", "2.5 state completed"}},
		"of an earlier group with this id": {groupInStates(1, created, completed), "3.4", 200, []string{"1.1 state created", "1.5 state completed"}},
		"cancelled":                        {groupInStates(1, created, api.StatusCancelled), "1.1", 200, []string{"1.5 state cancelled"}},
		"failed":                           {groupInStates(1, created, running, api.StatusFailed), "1.3", 200, []string{"1.5 state failed"}},
		"of another server":                {groupInStates(1, created, completed), "x.y", 200, []string{"1.1 state created", "1.5 state completed"}},
		"hostile":                          {groupInStates(1, created, completed), "1.-1", 200, []string{"1.1 state created", "1.5 state completed"}},
	} {
		t.Run(name, func(t *testing.T) {
			events, code := watchEvents(t, showingGroup(c.group), c.lastID)
			require.Equal(t, c.code, code)
			require.Equal(t, c.want, describe(events))
		})
	}
}

// TestEventsSayWhenTheGroupWasRead: one hour after the end of a group, the events of its states,
// with or without a Last-Event-ID, have the time of the state, the present counts, and the present
// time as the time of the read.
func TestEventsSayWhenTheGroupWasRead(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		group := withDone(groupInStates(1, created, dispatched, running, aggregating, completed), 7)
		time.Sleep(time.Until(group.Timestamps["completed"].Add(time.Hour)))
		for _, after := range []string{"", "1.1"} {
			events, _ := watchEvents(t, showingGroup(group), after)
			require.NotEmpty(t, events)
			for _, e := range events {
				require.True(t, time.Now().Equal(*e.data.ReadAt), "%s", e.data.ReadAt)
				require.Equal(t, group.Timestamps[strings.TrimPrefix(e.data.Type, "group.")], e.data.At)
				require.Equal(t, group.Counts, e.data.Group.Counts)
			}
			require.EqualValues(t, events[0].data.Type, "group."+strings.ToLower(string(events[0].data.Group.Status)))
		}
	})
}

func TestResumedWatchBeginsWithTheCurrentGroup(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		now := groupInStates(1, created, dispatched, running)
		events, _ := watchEvents(t, showingGroup(now, now, groupInStates(1, created, dispatched, running, api.StatusCancelled)), "1.3.4")
		require.Equal(t, []string{"1.3.ms progress progress", "1.5 state cancelled"}, describe(events))
	})
}

func TestProgressIsRateLimited(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		eta := 1.0
		f := apitest.NewBackend()
		start := time.Now()
		f.OnGroup = func(_ context.Context, read int) (api.Group, error) {
			if time.Since(start) > 10*time.Second {
				return groupInStates(1, created, running, completed), nil
			}
			g := withDone(groupInStates(1, created, running), int64(read)%10)
			g.ETASeconds = &eta
			return g, nil
		}
		client := serve(t, httpapi.New(options(f)))
		resp, err := client.Get("http://localhost/v1/groups/g/events")
		require.NoError(t, err)
		defer resp.Body.Close()
		require.Equal(t, "text/event-stream", resp.Header.Get("Content-Type"))
		events := readEvents(t, resp.Body, 1000)
		require.Greater(t, len(events), 45)
		for i := 3; i < len(events); i++ {
			require.GreaterOrEqual(t, events[i].at.Sub(events[i-1].at), 200*time.Millisecond)
		}
	})
}

func TestQuietWatchKeepsTheConnectionOpen(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		f := apitest.NewBackend()
		start := time.Now()
		f.OnGroup = func(_ context.Context, read int) (api.Group, error) {
			eta := float64(read) // a new ETA alone is no progress
			g := groupInStates(1, created)
			g.ETASeconds = &eta
			if s := time.Since(start); s > 20*time.Second && s < 40*time.Second {
				return api.Group{}, fmt.Errorf("read group: %w", api.ErrUnavailable)
			}
			return g, nil
		}
		client := serve(t, httpapi.New(options(f)))
		resp, err := client.Get("http://localhost/v1/groups/g/events")
		require.NoError(t, err)
		defer resp.Body.Close()
		events := readEvents(t, resp.Body, 5)
		require.Equal(t, "created", strings.TrimPrefix(events[0].data.Type, "group."))
		for i, e := range events[1:] {
			require.NotEmpty(t, e.comment)
			require.LessOrEqual(t, e.at.Sub(events[i].at), 16*time.Second)
		}
		require.Less(t, f.GroupReads.Load(), int64(90), "a group that does not change is read less often")
	})
}

func TestClientThatLeavesEndsItsWatch(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		f := showingGroup(groupInStates(1, created))
		client := serve(t, httpapi.New(options(f)))
		ctx, cancel := context.WithCancel(t.Context())
		req, err := http.NewRequestWithContext(ctx, "GET", "http://localhost/v1/groups/g/events", nil)
		require.NoError(t, err)
		resp, err := client.Do(req)
		require.NoError(t, err)
		defer resp.Body.Close()
		require.Len(t, readEvents(t, resp.Body, 1), 1)
		cancel()
		synctest.Wait()
		looks := f.GroupReads.Load()
		<-time.After(time.Minute)
		require.Equal(t, looks, f.GroupReads.Load())
	})
}

func TestDeletedGroupEndsItsWatch(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		f := apitest.NewBackend()
		f.OnGroup = func(_ context.Context, read int) (api.Group, error) {
			if read > 3 {
				return api.Group{}, api.ErrNotFound
			}
			return groupInStates(1, created), nil
		}
		resp, err := serve(t, httpapi.New(options(f))).Get("http://localhost/v1/groups/g/events")
		require.NoError(t, err)
		defer resp.Body.Close()
		_, err = io.ReadAll(resp.Body)
		require.Error(t, err)
	})
}

// serve serves h on connections in memory, and returns a client. Deadlines of the connections use
// the clock of the synctest bubble.
func serve(t *testing.T, h http.Handler) *http.Client {
	t.Helper()
	return serveOn(t, &http.Server{Handler: h})
}

func serveOn(t *testing.T, srv *http.Server) *http.Client {
	t.Helper()
	ln := &pipeListener{conns: make(chan net.Conn), closed: make(chan struct{})}
	transport := &http.Transport{DialContext: ln.dial}
	served := make(chan error, 1)
	go func() { served <- srv.Serve(ln) }()
	t.Cleanup(func() {
		transport.CloseIdleConnections()
		require.NoError(t, srv.Close())
		require.ErrorIs(t, <-served, http.ErrServerClosed)
	})
	return &http.Client{Transport: transport}
}

// pipeListener is a net.Listener whose connections are in memory.
type pipeListener struct {
	conns  chan net.Conn
	closed chan struct{}
}

func (p *pipeListener) dial(ctx context.Context, _, _ string) (net.Conn, error) {
	client, server := net.Pipe()
	select {
	case p.conns <- server:
		return client, nil
	case <-p.closed:
		return nil, net.ErrClosed
	case <-ctx.Done():
		return nil, ctx.Err()
	}
}

func (p *pipeListener) Accept() (net.Conn, error) {
	select {
	case c := <-p.conns:
		return c, nil
	case <-p.closed:
		return nil, net.ErrClosed
	}
}

func (p *pipeListener) Close() error   { close(p.closed); return nil }
func (p *pipeListener) Addr() net.Addr { return &net.TCPAddr{IP: net.IPv4(127, 0, 0, 1)} }

// bigGroup is a fake backend with a group that changes with each read. The field aggregate is the
// value of its only aggregate. GroupSummary leaves it out if it is larger than maxAggregate bytes.
type bigGroup struct {
	*apitest.Backend
	aggregate json.RawMessage
	reads     atomic.Int64
}

func (b *bigGroup) Group(context.Context, string) (api.Group, error) {
	g := withDone(groupInStates(1, created, dispatched, running), b.reads.Add(1))
	g.Aggregate = map[string]json.RawMessage{"all": append(json.RawMessage(nil), b.aggregate...)}
	return g, nil
}

func (b *bigGroup) GroupSummary(ctx context.Context, id string, maxAggregate int64) (api.Group, bool, error) {
	if int64(len(b.aggregate)) <= maxAggregate {
		g, err := b.Group(ctx, id)
		return g, true, err
	}
	return withDone(groupInStates(1, created, dispatched, running), b.reads.Add(1)), false, nil
}

// TestClientsThatNeverRead: 500 clients that never read cost less than 100 MB and 100 reads of the
// group, with a small and with a large aggregate. They do not delay the stop of the server.
func TestClientsThatNeverRead(t *testing.T) {
	for _, size := range []int{httpapi.MaxEventAggregate - 100, 8_300_000} {
		t.Run(fmt.Sprint(size), func(t *testing.T) {
			f := &bigGroup{Backend: apitest.NewBackend(), aggregate: json.RawMessage(`"` + strings.Repeat("x", size) + `"`)}
			srv := httpapi.NewServer("127.0.0.1:0", options(f))
			listener, err := net.Listen("tcp", "127.0.0.1:0")
			require.NoError(t, err)
			served := make(chan error, 1)
			go func() { served <- srv.Serve(smallBuffers{listener}) }()
			runtime.GC()
			before := heapInUse()

			const clients = 500
			for range clients {
				conn, err := net.Dial("tcp", listener.Addr().String())
				require.NoError(t, err)
				defer conn.Close()
				require.NoError(t, conn.(*net.TCPConn).SetReadBuffer(4<<10))
				_, err = io.WriteString(conn, "GET /v1/groups/g/events HTTP/1.1\r\nHost: localhost\r\n\r\n")
				require.NoError(t, err)
			}
			// After this many changes, more events were sent to each client than its buffers hold.
			require.Eventually(t, func() bool { return f.reads.Load() >= 4 }, 30*time.Second, 10*time.Millisecond)
			require.Less(t, f.reads.Load(), int64(100), "one poller reads for all clients")
			runtime.GC()
			require.Less(t, heapInUse(), before+100<<20)

			srv.Stop(time.Hour) // would wait for clients that are not disconnected
			require.ErrorIs(t, <-served, http.ErrServerClosed)
		})
	}
}

// smallBuffers is a listener that gives connections small send buffers, so that a client that does
// not read soon blocks the server's writes.
type smallBuffers struct{ net.Listener }

func (l smallBuffers) Accept() (net.Conn, error) {
	conn, err := l.Listener.Accept()
	if err == nil {
		err = conn.(*net.TCPConn).SetWriteBuffer(4 << 10)
	}
	return conn, err
}

// TestSlowClientMissesNoState: a client that reads 500 bytes a second gets the events of all five
// states, and less than 60 events in all.
func TestSlowClientMissesNoState(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		f := apitest.NewBackend()
		start := time.Now()
		f.OnGroup = func(_ context.Context, read int) (api.Group, error) {
			states := []api.Status{created, dispatched, running}
			if time.Since(start) > 30*time.Second {
				states = append(states, aggregating, completed)
			}
			return withDone(groupInStates(1, states...), int64(read%10)), nil
		}
		client := serve(t, httpapi.New(options(f)))
		resp, err := client.Get("http://localhost/v1/groups/g/events") //nolint:bodyclose // it is closed below
		require.NoError(t, err)
		defer resp.Body.Close()
		slow := reader(func(p []byte) (int, error) {
			<-time.After(time.Second) // for each buffer of bufio.Scanner
			return resp.Body.Read(p[:min(len(p), 500)])
		})
		var states []string
		events := readEvents(t, slow, 1000)
		for _, e := range events {
			if e.name == "state" {
				states = append(states, e.id)
			}
		}
		require.Equal(t, []string{"1.1", "1.2", "1.3", "1.4", "1.5"}, states)
		require.Less(t, len(events), 60, "a fast client gets 150 events")
	})
}

func TestWatcherThatDoesNotReadIsDisconnected(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		f := apitest.NewBackend()
		f.OnGroup = func(_ context.Context, read int) (api.Group, error) {
			return withDone(groupInStates(1, created), int64(read%10)), nil
		}
		resp, err := serve(t, httpapi.New(options(f))).Get("http://localhost/v1/groups/g/events")
		require.NoError(t, err)
		defer resp.Body.Close()
		<-time.After(time.Minute)
		reads := f.GroupReads.Load()
		require.Less(t, reads, int64(100), "10 s after the buffers are full, nobody is watching")
		<-time.After(time.Minute)
		require.Equal(t, reads, f.GroupReads.Load())
	})
}

type reader func(p []byte) (int, error)

func (r reader) Read(p []byte) (int, error) { return r(p) }

func TestLargeAggregateIsLeftOut(t *testing.T) {
	f := showingGroup(groupInStates(1, created, completed))
	f.LargeAggregate = true
	events, code := watchEvents(t, f, "")
	require.Equal(t, 200, code)
	for _, e := range events {
		require.Equal(t, []string{"aggregate"}, e.data.Omitted)
	}
}

func TestStreamsAreLimited(t *testing.T) {
	s := httpapi.NewCalls(options(showingGroup(groupInStates(1, created, completed))))
	s.SetMostStreams(0)
	rec := call(t, s, "GET", "/v1/groups/g/events", "")
	p := requireProblem(t, rec, 429, "")
	require.Contains(t, p.Detail, "event streams")
	require.Equal(t, "5", rec.Header().Get("Retry-After"))
	s.SetMostStreams(1)
	for range 3 { // each gives back its stream
		require.Equal(t, 200, call(t, s, "GET", "/v1/groups/g/events", "").Code)
	}
}
