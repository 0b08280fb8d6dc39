package roomapi

import (
	"context"
	"encoding/json"
	"errors"
	"log/slog"
	"math"
	"net/http"
	"net/http/httptest"
	"strings"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/bulkaction/bulkaction/api"
)

func TestLifeOfATicket(t *testing.T) {
	t.Parallel()
	room := newFakeRoom()
	a := New(options(room))
	rec := call(t, a, "POST", ticketPath)
	cookie := cookieOf(t, rec, "broker")
	require.JSONEq(t, `{"state":"IN_ENTRY","position":1,"total":1,"eta_seconds":90,"poll_after_ms":2000,
		"stream":"http://127.0.0.1:8090/events/sale/tickets/waiting"}`, rec.Body.String())
	require.Equal(t, "no-store", rec.Header().Get("Cache-Control"))
	rec = call(t, a, "POST", ticketPath+"/token", cookie)
	require.Equal(t, http.StatusConflict, rec.Code)

	room.state = api.TicketReady
	require.JSONEq(t, `{"state":"READY","position":null,"total":null,"eta_seconds":null,"poll_after_ms":2000,
		"stream":"http://127.0.0.1:8090/events/sale/tickets/waiting"}`, call(t, a, "GET", ticketPath, cookie).Body.String())
	rec = call(t, a, "POST", ticketPath+"/token", cookie)
	require.Equal(t, http.StatusOK, rec.Code)
	require.JSONEq(t, `{"token":"a.b.c","expires_at":"2099-01-02T03:04:05Z"}`, rec.Body.String())
	set := rec.Header().Get("Set-Cookie")
	require.Regexp(t, `^entry\.sale=a\.b\.c; Path=/; Expires=Fri, 02 Jan 2099 03:04:05 GMT; Max-Age=[0-9]+; HttpOnly; SameSite=Lax$`, set)

	room.state = api.TicketInProgress
	require.Contains(t, call(t, a, "GET", ticketPath, cookie).Body.String(), `"token":"a.b.c"`)
	for range 2 {
		rec = call(t, a, "DELETE", ticketPath, cookie)
		require.Equal(t, http.StatusNoContent, rec.Code)
		require.Equal(t, "entry.sale=; Path=/; Max-Age=0; HttpOnly; SameSite=Lax", rec.Header().Get("Set-Cookie"))
	}
	require.Equal(t, http.StatusNoContent, call(t, a, "POST", ticketPath+"/leave", cookie).Code)
	require.Len(t, room.leaves, 3)
	require.Equal(t, http.StatusNotFound, call(t, a, "GET", ticketPath, cookie).Code)
}

func TestWithoutIdentity(t *testing.T) {
	t.Parallel()
	room := newFakeRoom()
	a := New(options(room))
	require.Equal(t, http.StatusNotFound, call(t, a, "GET", ticketPath).Code)
	require.Equal(t, http.StatusNotFound, call(t, a, "POST", ticketPath+"/token").Code)
	require.Equal(t, http.StatusNoContent, call(t, a, "DELETE", ticketPath).Code)
	require.Equal(t, http.StatusNoContent, call(t, a, "POST", ticketPath+"/leave").Code)
	require.Empty(t, room.leaves)
}

func TestBadInput(t *testing.T) {
	t.Parallel()
	a := New(options(newFakeRoom()))
	for name, c := range map[string]struct {
		method, path string
		want         int
		detail       string
	}{
		"unknown event":        {"POST", "/events/other/ticket", 404, "there is no such event"},
		"unknown event, state": {"GET", "/events/other", 404, "there is no such event"},
		"unknown event, SSE":   {"GET", "/events/other/tickets/waiting", 404, "there is no such event"},
		"event with a brace":   {"POST", "/events/a%7Bb%7D/ticket", 422, "event must be 1 to 128 letters"},
		"event with a slash":   {"GET", "/events/a%2Fb", 422, "event must be 1 to 128 letters"},
		"event with zero":      {"GET", "/events/a%00b/wait", 422, "event must be 1 to 128 letters"},
		"long event":           {"GET", "/events/" + strings.Repeat("x", 129) + "/tickets/waiting", 422, "event must be 1 to 128 letters"},
		"long event, leave":    {"DELETE", "/events/" + strings.Repeat("x", 129) + "/ticket", 422, "event must be 1 to 128 letters"},
		"long event, token":    {"POST", "/events/" + strings.Repeat("x", 129) + "/ticket/token", 422, "event must be 1 to 128 letters"},
		"no path":              {"GET", "/", 404, "no such path"},
		"admin path":           {"GET", "/metrics", 404, "no such path"},
		"pprof":                {"GET", "/debug/pprof/", 404, "no such path"},
		"operators' path":      {"PUT", "/v1/events/sale", 404, "no such path"},
		"method of the state":  {"POST", "/events/sale", 405, "this path accepts GET, HEAD"},
		"method of the ticket": {"PUT", ticketPath, 405, "this path accepts DELETE, GET, HEAD, POST"},
		"method of the stream": {"POST", "/events/sale/tickets/waiting", 405, "this path accepts GET"},
		"preflight":            {"OPTIONS", ticketPath, 405, "this path accepts"},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			rec := call(t, a, c.method, c.path)
			require.Equal(t, c.want, rec.Code)
			require.Equal(t, "application/problem+json", rec.Header().Get("Content-Type"))
			require.Equal(t, "nosniff", rec.Header().Get("X-Content-Type-Options"))
			var p api.Problem
			require.NoError(t, json.Unmarshal(rec.Body.Bytes(), &p))
			require.Equal(t, c.want, p.Status)
			require.Contains(t, p.Detail, c.detail)
			require.Equal(t, c.want == 405, rec.Header().Get("Allow") != "")
		})
	}
}

func TestErrorsOfTheRoom(t *testing.T) {
	t.Parallel()
	for err, want := range map[error]int{
		ErrClosed: 409, ErrSoldOut: 410, ErrFull: 429, ErrBusy: 503, ErrDraining: 503, api.ErrUnavailable: 503,
		context.DeadlineExceeded: 503, errors.New("secret host"): 500,
	} {
		var logs strings.Builder
		room := newFakeRoom()
		o := options(room)
		o.Log = slog.New(slog.NewTextHandler(&logs, nil))
		a := New(o)
		cookie := cookieOf(t, call(t, a, "POST", ticketPath), "broker")
		room.err = err
		for _, c := range [][2]string{
			{"POST", ticketPath}, {"GET", ticketPath}, {"DELETE", ticketPath}, {"POST", ticketPath + "/token"}, {"GET", "/events/sale"},
		} {
			rec := call(t, a, c[0], c[1], cookie)
			require.Equal(t, want, rec.Code, "%s %s: %v", c[0], c[1], err)
			require.Equal(t, want == 429 || want == 503, rec.Header().Get("Retry-After") != "")
			require.NotContains(t, rec.Body.String(), "secret")
		}
		require.Equal(t, want == 500, strings.Contains(logs.String(), "secret host"), logs.String())
		for user := range room.users {
			require.NotContains(t, logs.String(), user)
		}
	}
}

func TestPanicsAreLogged(t *testing.T) {
	t.Parallel()
	var logs strings.Builder
	room := newFakeRoom()
	room.users = nil // a write to it panics
	o := options(room)
	o.Log = slog.New(slog.NewTextHandler(&logs, nil))
	require.PanicsWithValue(t, http.ErrAbortHandler, func() {
		New(o).ServeHTTP(httptest.NewRecorder(), httptest.NewRequest("POST", ticketPath, nil))
	})
	require.Contains(t, logs.String(), "assignment to entry in nil map")
}

func TestStatusIsCached(t *testing.T) {
	t.Parallel()
	room := newFakeRoom()
	a := New(options(room))
	now := time.Now()
	a.statuses.answers.Now = func() time.Time { return now }
	for range 10 {
		rec := call(t, a, "GET", "/events/sale", "Origin: https://any.example", "Sec-Fetch-Site: cross-site")
		require.Equal(t, http.StatusOK, rec.Code)
		require.Equal(t, "*", rec.Header().Get("Access-Control-Allow-Origin"))
		require.Equal(t, "public, max-age=1", rec.Header().Get("Cache-Control"))
		require.JSONEq(t, `{"status":"queueing","mode":"open","waiting":0,"away":0,"slots":{"capacity":3,"used":3,"free":0},
			"pace_per_minute":12.5,"eta_seconds":null}`, rec.Body.String())
		require.Equal(t, http.StatusNotFound, call(t, a, "GET", "/events/other").Code)
	}
	require.Equal(t, 2, room.reads, "also that there is no such event")
	now = now.Add(statusAge)
	require.Equal(t, http.StatusOK, call(t, a, "GET", "/events/sale").Code)
	require.Equal(t, 3, room.reads)
	require.Zero(t, room.number())
}

func TestStatusesAreBounded(t *testing.T) {
	t.Parallel()
	s := newStatuses(func(context.Context, string) (api.EventStatus, error) { return api.EventStatus{}, ErrUnknownEvent })
	now := time.Now()
	s.answers.Now = func() time.Time { return now }
	for range 3 {
		for i := range maxStatuses + 10 {
			require.ErrorIs(t, s.of(t.Context(), string(rune('a'+i))).err, ErrUnknownEvent)
		}
		require.Len(t, s.answers.All(), maxStatuses)
		now = now.Add(statusAge)
	}
	_ = s.of(t.Context(), "later")
	require.Len(t, s.answers.All(), 1)
}

func TestKeysAreServed(t *testing.T) {
	t.Parallel()
	rec := call(t, New(options(newFakeRoom())), "GET", "/.well-known/jwks.json")
	require.JSONEq(t, `{"keys":[]}`, rec.Body.String())
	require.Equal(t, "public, max-age=300", rec.Header().Get("Cache-Control"))
}

var noon = time.Date(2026, 11, 23, 12, 0, 0, 5_999_999, time.UTC)

// frames returns what the stream would write now.
func frames(s *Stream) string {
	b, _ := s.append(nil)
	return string(b)
}

func TestFrames(t *testing.T) {
	t.Parallel()
	s := NewStream()
	s.State(api.TicketInEntry, api.ModeOpen)
	require.Equal(t, "event: state\ndata: {\"state\":\"IN_ENTRY\",\"mode\":\"open\"}\n\n", frames(s))
	s.Position(Position{Position: 3, Total: 1000, ETASeconds: -1, At: noon})
	require.Equal(t, "event: position\ndata: {\"position\":3,\"total\":1000,\"eta_seconds\":null,\"at\":\"2026-11-23T12:00:00.005Z\"}\n\n", frames(s))
	s.Position(Position{Position: 3, Total: 1000, ETASeconds: 12.3456, At: noon.In(time.FixedZone("KST", 9*3600))})
	require.Equal(t, "event: position\ndata: {\"position\":3,\"total\":1000,\"eta_seconds\":12.3,\"at\":\"2026-11-23T12:00:00.005Z\"}\n\n", frames(s))
	s.Admitted(api.EntryToken{Token: "a.b.c", ExpiresAt: noon.Truncate(time.Second)}, "https://shop.example/?a=1&b=2")
	require.Equal(t, "event: admitted\ndata: {\"token\":\"a.b.c\",\"expires_at\":\"2026-11-23T12:00:00Z\",\"return_url\":\"https://shop.example/?a=1\\u0026b=2\"}\n\n", frames(s))
	s.Ended(EndedLeft)
	require.Equal(t, "id: ended\nevent: ended\ndata: {\"reason\":\"left\"}\n\n", frames(s))

	s = NewStream()
	s.Reconnect(ReconnectDraining)
	require.Regexp(t, "^retry: ([3-9][0-9]{3}|10000)\nevent: reconnect\ndata: {\"reason\":\"draining\"}\n\n$", frames(s))
}

func TestOrderOfFrames(t *testing.T) {
	t.Parallel()
	token := api.EntryToken{Token: "a", ExpiresAt: noon}
	at := func(n int64) Position { return Position{Position: n, Total: 9, ETASeconds: -1, At: noon} }
	for name, c := range map[string]struct {
		do   func(s *Stream)
		want []string // the beginnings of the frames
		end  bool
	}{
		"nothing":                            {func(*Stream) {}, nil, false},
		"a position waits for the state":     {func(s *Stream) { s.Position(at(2)) }, nil, false},
		"the state first":                    {func(s *Stream) { s.Position(at(2)); s.State("a", "b") }, []string{"state", `position {"position":2`}, false},
		"a newer position replaces":          {func(s *Stream) { s.State("a", "b"); s.Position(at(2)); s.Position(at(1)) }, []string{"state", `position {"position":1`}, false},
		"a newer state replaces":             {func(s *Stream) { s.State("a", "b"); s.State("c", "d") }, []string{`state {"state":"c","mode":"d"}`}, false},
		"a position replaces nothing else":   {func(s *Stream) { s.State("a", "b"); s.Admitted(token, ""); s.Position(at(1)) }, []string{"state", "admitted"}, false},
		"no position beside the token":       {func(s *Stream) { s.State("a", "b"); s.Position(at(1)); s.Admitted(token, "") }, []string{"state", "admitted"}, false},
		"the token before the end":           {func(s *Stream) { s.State("a", "b"); s.Admitted(token, ""); s.Ended("gone") }, []string{"state", "admitted", `ended {"reason":"gone"}`}, true},
		"the first end counts":               {func(s *Stream) { s.Ended("left"); s.Reconnect("busy"); s.Ended("gone"); s.State("a", "b") }, []string{`ended {"reason":"left"}`}, true},
		"no position before the end":         {func(s *Stream) { s.State("a", "b"); s.Position(at(1)); s.Ended("closed") }, []string{"state", "ended"}, true},
		"the token before reconnect":         {func(s *Stream) { s.Admitted(token, ""); s.Reconnect("draining") }, []string{"admitted", "reconnect"}, true},
		"reconnect is not replaced by ended": {func(s *Stream) { s.Reconnect("draining"); s.Ended("gone") }, []string{"reconnect"}, true},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			s := NewStream()
			c.do(s)
			b, end := s.append(nil)
			require.Equal(t, c.end, end)
			var got []string
			for _, frame := range strings.SplitAfter(string(b), "\n\n") {
				if _, event, ok := strings.Cut(strings.TrimSpace(frame), "event: "); ok {
					got = append(got, strings.Replace(event, "\ndata: ", " ", 1))
				}
			}
			require.Len(t, got, len(c.want), "%q", b)
			for i, want := range c.want {
				require.True(t, strings.HasPrefix(got[i], want), "%q: %s", got[i], want)
			}
			require.Empty(t, frames(s), "each frame is written once")
		})
	}
}

func TestUnchangedFramesAreNotSent(t *testing.T) {
	t.Parallel()
	s := NewStream()
	s.State("a", "b")
	s.Position(Position{Position: 2, Total: 9, ETASeconds: 10, At: noon})
	require.NotEmpty(t, frames(s))
	s.State("a", "b")
	s.Position(Position{Position: 2, Total: 9, ETASeconds: 10.04, At: noon.Add(time.Second)})
	require.Empty(t, frames(s))
	s.Position(Position{Position: 2, Total: 8, ETASeconds: 10, At: noon})
	require.NotEmpty(t, frames(s))
}

func TestETAOfAnyNumber(t *testing.T) {
	t.Parallel()
	for eta, want := range map[float64]string{
		0: "0", 0.04: "0", 59.95: "60", 1e9: "1000000000", -0.1: "null", math.Inf(1): "null", math.Inf(-1): "null", math.NaN(): "null",
	} {
		s := NewStream()
		s.State("a", "b")
		_ = frames(s)
		s.Position(Position{Position: 1, Total: 1, ETASeconds: eta, At: noon})
		require.Contains(t, frames(s), `"eta_seconds":`+want+`,`, "%v", eta)
	}
}

func TestRetryIsRandom(t *testing.T) {
	t.Parallel()
	seen, a := map[string]bool{}, New(options(newFakeRoom()))
	for range 50 {
		s := NewStream()
		s.State("a", "b")
		s.Ended(EndedLeft)
		rec := httptest.NewRecorder()
		require.NoError(t, a.pump(rec, httptest.NewRequestWithContext(t.Context(), "GET", "/", nil), s))
		first, _, _ := strings.Cut(rec.Body.String(), "\n")
		require.Regexp(t, "^retry: ([1-4][0-9]{3}|5000)$", first)
		seen[first] = true
	}
	require.Greater(t, len(seen), 10)
}

// BenchmarkPositionFrame makes position frames in one buffer, which should cost no allocation.
func BenchmarkPositionFrame(b *testing.B) {
	s := NewStream()
	s.State("IN_ENTRY", "open")
	buf, _ := s.append(make([]byte, 0, 512))
	b.ReportAllocs()
	for n := int64(0); b.Loop(); n++ {
		s.Position(Position{Position: n, Total: 123456, ETASeconds: float64(n), At: noon})
		buf, _ = s.append(buf[:0])
	}
}
