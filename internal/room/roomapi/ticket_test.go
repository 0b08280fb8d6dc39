package roomapi

import (
	"context"
	"encoding/json"
	"errors"
	"log/slog"
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
