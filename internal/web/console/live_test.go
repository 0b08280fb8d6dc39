package console

import (
	"bufio"
	"context"
	"encoding/json"
	"fmt"
	"net/http"
	"net/http/httptest"
	"strings"
	"testing"
	"time"

	"github.com/stretchr/testify/require"
	"go.uber.org/goleak"

	"github.com/bulkaction/bulkaction/api"
	"github.com/bulkaction/bulkaction/internal/access/auth"
)

func (w *testConsole) server() string {
	s := httptest.NewServer(w.console)
	w.Cleanup(s.Close)
	return s.URL
}

// stream is an event stream of a test.
type stream struct {
	*testing.T
	status int
	header http.Header
	lines  *bufio.Scanner
	close  func()
}

func (w *testConsole) follow(server, topic, cookie string) *stream {
	w.Helper()
	ctx, cancel := context.WithCancel(w.Context())
	r, err := http.NewRequestWithContext(ctx, http.MethodGet, server+"/ui/events?topics="+topic, nil)
	require.NoError(w, err)
	if cookie != "" {
		r.AddCookie(&http.Cookie{Name: "bulkaction", Value: cookie})
	}
	answer, err := http.DefaultTransport.RoundTrip(r) //nolint:bodyclose // the stream's close does that
	require.NoError(w, err)
	s := &stream{w.T, answer.StatusCode, answer.Header, bufio.NewScanner(answer.Body), func() {
		cancel()
		_ = answer.Body.Close()
	}}
	s.lines.Buffer(nil, 1<<20)
	w.Cleanup(s.close)
	return s
}

// next returns the next event of the stream; ok is false at the end of the stream.
func (s *stream) next() (event string, data map[string]string, ok bool) {
	s.Helper()
	for s.lines.Scan() {
		if name, found := strings.CutPrefix(s.lines.Text(), "event: "); found {
			event = name
		}
		if text, found := strings.CutPrefix(s.lines.Text(), "data: "); found {
			require.NoError(s, json.Unmarshal([]byte(text), &data))
			return event, data, true
		}
	}
	return "", nil, false
}

// until reads events until one is as the test wants it.
func (s *stream) until(want func(event string, data map[string]string) bool) {
	s.Helper()
	for {
		event, data, ok := s.next()
		require.True(s, ok, "the stream has ended")
		if want(event, data) {
			return
		}
	}
}

// TestStream: the stream of a group begins with all live regions of its page, with the text that
// the page has. Then it sends a new status, an outage, all regions after the outage, and the
// deletion of the group, which ends it.
func TestStream(t *testing.T) {
	w := parallel(t)
	server := w.server()
	s := w.follow(server, "group:running-1", "")
	require.Equal(t, "text/event-stream", s.header.Get("Content-Type"))
	require.Equal(t, "no", s.header.Get("X-Accel-Buffering"))
	event, data, ok := s.next()
	require.True(t, ok)
	require.Equal(t, "regions", event)
	page := w.get("/ui/groups/running-1").Body.String()
	d := parse(t, page)
	regions := 0
	for _, n := range d.all("") {
		for _, a := range n.Attr {
			if a.Key == "data-live" {
				regions++
				require.Contains(t, page, data[attribute(n, "id")])
			}
		}
	}
	require.Len(t, data, regions)
	require.NotEmpty(t, data["state"])
	require.Contains(t, data["actions"], "/ui/groups/running-1/cancel")

	w.backend.set(func() {
		g := w.backend.groups["running-1"]
		g.Status, g.Paused = api.StatusCompleted, false
		w.backend.groups["running-1"] = g
	})
	s.until(func(_ string, data map[string]string) bool { return strings.Contains(data["state"], "COMPLETED") })
	w.backend.set(func() { w.backend.err = api.ErrUnavailable })
	s.until(func(event string, _ map[string]string) bool { return event == "away" })
	w.backend.set(func() { w.backend.err = nil })
	s.until(func(event string, data map[string]string) bool { return event == "regions" && len(data) == regions })
	w.backend.set(func() { delete(w.backend.groups, "running-1") })
	s.until(func(event string, _ map[string]string) bool { return event == "gone" })
	_, _, ok = s.next()
	require.False(t, ok, "the stream of a group that was deleted ends")
}

func TestTopics(t *testing.T) {
	w := parallel(t)
	server := w.server()
	for topic, want := range map[string]int{
		"overview": 200, "groups:": 200, "groups:status%3DFAILED": 200, "group:failed-1": 200,
		"": 404, "odd": 404, "overview:x": 404, "group:unknown": 404, "group:": 404, "group:a%20b": 404, "groups:status%3Dodd": 404, "groups:%25zz": 404,
	} {
		s := w.follow(server, topic, "")
		require.Equal(t, want, s.status, topic)
		if want == 200 {
			event, data, _ := s.next()
			require.Equal(t, "regions", event, topic)
			require.NotEmpty(t, data)
		}
		s.close()
	}
}

// TestStreamsAreOfTheirReaders: in the stream of groups, an operator sees and can tick a group of
// another tenant, a reader can't tick it, and a key of a tenant does not see it. A stream gets 401
// without a session, 403 without the right, and 404 for a foreign group.
func TestStreamsAreOfTheirReaders(t *testing.T) {
	w := parallelAs(t, auth.Principal{})
	server := w.server()
	login := func(p auth.Principal) string { token, _ := w.sessions.Create(t.Context(), p); return token }
	require.Equal(t, http.StatusUnauthorized, w.follow(server, "group:failed-1", "").status)
	require.Equal(t, http.StatusNotFound, w.follow(server, "group:failed-1", login(globex)).status)
	require.Equal(t, http.StatusForbidden, w.follow(server, "groups:", login(metrics)).status)

	all := w.follow(server, "groups:", login(operator))
	_, data, _ := all.next()
	require.Contains(t, data["rows"], "other-1")
	require.Contains(t, data["rows"], "tick-other-1")
	mine := w.follow(server, "groups:", login(acme))
	_, data, _ = mine.next()
	require.NotContains(t, data["rows"], "other-1")
	require.Contains(t, data["rows"], "failed-1")
	look := w.follow(server, "groups:", login(reader))
	_, data, _ = look.next()
	require.NotContains(t, data["rows"], "tick-other-1", "a reader has nothing to tick")
	theirs := w.follow(server, "overview", login(globex))
	_, data, _ = theirs.next()
	require.NotContains(t, fmt.Sprint(data), "Workers busy")
	require.NotContains(t, fmt.Sprint(data), "failed-1")
}

// TestReadersShareReads: for 50 readers of a group, the shared poller reads it at most three times
// and once more each 500 ms. After the last reader has left, no topic is followed.
func TestReadersShareReads(t *testing.T) {
	w := parallel(t)
	server := w.server()
	reads := func() int {
		w.backend.mu.Lock()
		defer w.backend.mu.Unlock()
		return w.backend.reads
	}
	began := time.Now()
	var all []*stream
	for range 50 {
		s := w.follow(server, "group:failed-1", "")
		all = append(all, s)
	}
	for _, s := range all {
		_, _, ok := s.next()
		require.True(t, ok)
	}
	// The handler reads the group once for each reader, to check that it exists for this reader.
	// The other reads are the shared poller's.
	require.LessOrEqual(t, reads()-len(all), 3+int(time.Since(began)/(500*time.Millisecond)))
	for _, s := range all {
		s.close()
	}
	require.Eventually(t, func() bool {
		w.console.live.mu.Lock()
		defer w.console.live.mu.Unlock()
		return len(w.console.live.followed) == 0
	}, 30*time.Second, time.Millisecond)
}

// TestStreamLimits: a key has at most maxOwnStreams open streams, a process follows at most
// maxGroupTopics groups and lists, and has at most streams.Max streams. A stream beyond a limit is
// refused, by HTTP with 429.
func TestStreamLimits(t *testing.T) {
	w := parallelAs(t, auth.Principal{})
	server := w.server()
	token, _ := w.sessions.Create(t.Context(), operator)
	var open []*stream
	for range maxOwnStreams {
		s := w.follow(server, "overview", token)
		require.Equal(t, http.StatusOK, s.status)
		open = append(open, s)
	}
	refused := w.follow(server, "overview", token)
	require.Equal(t, http.StatusTooManyRequests, refused.status)
	require.Equal(t, "5", refused.header.Get("Retry-After"))
	other, _ := w.sessions.Create(t.Context(), admin)
	require.Equal(t, http.StatusOK, w.follow(server, "overview", other).status)
	open[0].close()
	require.Eventually(t, func() bool {
		s := w.follow(server, "overview", token)
		defer s.close()
		return s.status == http.StatusOK
	}, 30*time.Second, 10*time.Millisecond)

	l := newLive(newTestConsole(t).console)
	enter := func(class string) (func(), error) {
		return l.enter(subscription{topic: topic{group: true}, class: class})
	}
	var leave []func()
	for i := range maxGroupTopics {
		f, err := enter(fmt.Sprint("group:", i))
		require.NoError(t, err)
		leave = append(leave, f)
	}
	_, err := enter("group:one-more")
	require.ErrorContains(t, err, "200 groups")
	again, err := enter("group:7")
	require.NoError(t, err, "a group that is followed already")
	again()
	for _, list := range []string{"groups:prefix%3Da", "guards:", "rooms:"} { // each may read many keys of Redis
		answered := httptest.NewRecorder()
		r := httptest.NewRequestWithContext(t.Context(), http.MethodGet, "http://localhost/ui/events?topics="+list, nil)
		r.RemoteAddr = "127.0.0.1:1234"
		l.serve(answered, r)
		require.Equal(t, http.StatusTooManyRequests, answered.Code, list)
	}
	leave[3]()
	_, err = enter("group:one-more")
	require.NoError(t, err)
	l.streams.Max = 0
	answered := httptest.NewRecorder()
	l.serve(answered, httptest.NewRequestWithContext(t.Context(), http.MethodGet, "/ui/events?topics=overview", nil))
	require.Equal(t, http.StatusTooManyRequests, answered.Code)
}

// TestStreamsEnd: a stream ends when its API key is revoked, when its session ends, and when the
// server stops.
func TestStreamsEnd(t *testing.T) {
	t.Parallel()
	for name, end := range map[string]func(w *testConsole, token string){
		"key":     func(w *testConsole, _ string) { w.keys.revoke("operator") },
		"session": func(w *testConsole, token string) { _ = w.sessions.End(w.Context(), token) },
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			w := as(t, auth.Principal{})
			token, _ := w.sessions.Create(t.Context(), operator)
			s := w.follow(w.server(), "overview", token)
			_, _, ok := s.next()
			require.True(t, ok)
			end(w, token)
			for ok {
				_, _, ok = s.next()
			}
		})
	}
	closing, stop := context.WithCancel(t.Context())
	w := newTestConsole(t)
	w.console.Closing = closing
	s := w.follow(w.server(), "overview", "")
	_, _, ok := s.next()
	require.True(t, ok)
	stop()
	for ok {
		_, _, ok = s.next()
	}
}

// TestListsOfGroupsAreReadSeldom: three reads in a row ask the backend three times for the
// unfiltered first page of groups, and once for a list with a filter or a cursor. Two readers of
// the tenant acme and one of globex follow two topics.
func TestListsOfGroupsAreReadSeldom(t *testing.T) {
	w := parallel(t)
	for arg, want := range map[string]int{"": 3, "status=FAILED": 1, "cursor=next": 1} {
		w.backend.queries = nil
		read, err := groupPages{w.backend}.openList(t.Context(), arg)
		require.NoError(t, err)
		for range 3 {
			_, err := read(auth.With(t.Context(), admin))
			require.NoError(t, err)
		}
		require.Len(t, w.backend.queries, want, arg)
	}
	w = as(t, auth.Principal{})
	server := w.server()
	for _, p := range []auth.Principal{acme, globex, acme} {
		token, _ := w.sessions.Create(t.Context(), p)
		require.Equal(t, http.StatusOK, w.follow(server, "groups:", token).status)
	}
	w.console.live.mu.Lock()
	defer w.console.live.mu.Unlock()
	require.Len(t, w.console.live.followed, 2)
}

func TestMain(m *testing.M) { goleak.VerifyTestMain(m) }
