package httpapi_test

import (
	"errors"
	"fmt"
	"net/http"
	"net/http/httptest"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/bulkaction/bulkaction/api"
	"github.com/bulkaction/bulkaction/internal/testkit/apitest"
	"github.com/bulkaction/bulkaction/internal/web/httpapi"
)

func roomOptions(f *apitest.Rooms) httpapi.Options {
	o := options(apitest.NewBackend())
	o.Rooms = f
	return o
}

// localCall is like call, but the request comes from a loopback address, and its body is JSON.
func localCall(t *testing.T, h http.Handler, method, path, body string, header ...string) *httptest.ResponseRecorder {
	t.Helper()
	if body != "" {
		header = append(header, "Content-Type", httpapi.JSONType)
	}
	local := http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		r.RemoteAddr, r.Host = "127.0.0.1:12345", "127.0.0.1:8080"
		h.ServeHTTP(w, r)
	})
	return call(t, local, method, path, body, header...)
}

func TestRoomCallsAreForLoopbackOnly(t *testing.T) {
	f := apitest.NewRooms()
	s := httpapi.NewCalls(roomOptions(f))
	n := 0
	for _, rt := range httpapi.Routes() {
		path := strings.NewReplacer("{event}", "e", "{user}", "u").Replace(rt.Path)
		if !strings.HasPrefix(path, "/v1/events") && !strings.HasPrefix(path, "/v1/entry-tokens") {
			continue
		}
		n++
		for _, c := range []struct {
			peer, host string
			status     int
		}{
			{"192.0.2.1:1234", "127.0.0.1:8080", 403},
			{"10.0.0.7:1234", "localhost", 403},
			{"[2001:db8::1]:1234", "[::1]:8080", 403},
			{"@", "127.0.0.1", 403},
			{"127.0.0.1:1234", "evil.example", 421},
			{"127.0.0.1:1234", "127.0.0.1.evil.example:8080", 421},
			{"[::ffff:127.0.0.1]:1234", "example.com", 421},
		} {
			req := httptest.NewRequest(rt.Method, path, http.NoBody)
			req.RemoteAddr, req.Host = c.peer, c.host
			rec := httptest.NewRecorder()
			s.ServeHTTP(rec, req)
			requireProblem(t, rec, c.status, "")
			requireDocumented(t, req, rec)
		}
	}
	require.Equal(t, 12, n)
	require.Empty(t, f.Calls)
	for _, peer := range []string{"127.0.0.1:1", "127.9.9.9:1", "[::1]:1", "[::ffff:127.0.0.1]:1"} {
		req := httptest.NewRequest("GET", "http://localhost/v1/events/e", http.NoBody)
		req.RemoteAddr = peer
		rec := httptest.NewRecorder()
		s.ServeHTTP(rec, req)
		require.Equal(t, 200, rec.Code, rec.Body.String())
	}
	requireProblem(t, localCall(t, s, "POST", "/v1/events/e/pause", "", "Origin", "https://evil.example"), 403, "")
	requireProblem(t, localCall(t, s, "DELETE", "/v1/events/e", "", "Sec-Fetch-Site", "cross-site"), 403, "")
}

func TestNoRoomCallsWithoutRooms(t *testing.T) {
	h := httpapi.New(options(apitest.NewBackend()))
	requireProblem(t, localCall(t, h, "GET", "/v1/events/e", ""), 404, "")
	require.NotContains(t, localCall(t, h, "GET", "/", "").Body.String(), "/v1/events")
	require.Contains(t, localCall(t, httpapi.New(roomOptions(apitest.NewRooms())), "GET", "/", "").Body.String(), "/v1/events")
}

func TestPutEvent(t *testing.T) {
	f := apitest.NewRooms()
	h := httpapi.New(roomOptions(f))
	rec := localCall(t, h, "PUT", "/v1/events/sale-1", `{"capacity": 3}`)
	require.Equal(t, 200, rec.Code, rec.Body.String())
	require.Equal(t, `"7"`, rec.Header().Get("ETag"))
	v := decode[api.RoomEvent](t, rec)
	require.Equal(t, "sale-1", v.Event)
	require.EqualValues(t, 2, v.Over, "capacity 3, and 5 are inside")
	require.Equal(t, api.EventSettings{Capacity: new(int64(3))}, f.Set)

	all := `{"capacity": 10000000, "stock": 0, "rate": 2.5, "burst": 9, "max_waiting": 1e6, "token_ttl": "1m30s",
		"leeway": 5000, "max_session": 0, "ready": "100ms", "grace": 0, "on_close": "release", "no_show": "release", "preset": "strict",
		"mode": "paused", "return_url": "https://shop.example/buy", "retention": null}`
	require.Equal(t, 200, localCall(t, h, "PUT", "/v1/events/e", all, "If-Match", `"7"`).Code)
	d := func(d time.Duration) *api.Duration { return new(api.Duration(d)) }
	require.Equal(t, api.EventSettings{
		Capacity: new(int64(10_000_000)), Stock: new(int64(0)), Rate: new(2.5), Burst: 9, MaxWaiting: new(int64(1_000_000)),
		TokenTTL: d(90 * time.Second), Leeway: d(5 * time.Second), MaxSession: d(0), Ready: d(100 * time.Millisecond),
		Grace: d(0), OnClose: "release", NoShow: "release", Preset: "strict", Mode: "paused", ReturnURL: "https://shop.example/buy",
	}, f.Set)
	require.Equal(t, 200, localCall(t, h, "PUT", "/v1/events/e", all, "If-Match", "1764000000000").Code)
	require.Equal(t, []string{"set sale-1 0", "set e 7", "set e 1764000000000"}, f.Calls)

	for _, bad := range []string{"*", "", `"x"`, `W/"7"`, "-1", "0", `"7","8"`, "99999999999999999999"} {
		requireProblem(t, localCall(t, h, "PUT", "/v1/events/e", all, "If-Match", bad), 400, "If-Match")
	}
	require.Len(t, f.Calls, 3)
	f.Err = fmt.Errorf("change event e: %w", api.ErrChanged)
	requireProblem(t, localCall(t, h, "PUT", "/v1/events/e", all, "If-Match", "6"), 412, "")
}

func TestBadSettings(t *testing.T) {
	f := apitest.NewRooms()
	h := httpapi.New(roomOptions(f))
	for body, field := range map[string]string{
		`{}`:                                              "capacity",
		`{"capacity":null}`:                               "capacity",
		`{"capacity":-1}`:                                 "capacity",
		`{"capacity":10000001}`:                           "capacity",
		`{"capacity":1e300}`:                              "capacity",
		`{"capacity":1e999}`:                              "capacity",
		`{"capacity":-1e999}`:                             "capacity",
		`{"capacity":9223372036854775807}`:                "capacity",
		`{"capacity":-9223372036854775809}`:               "capacity",
		`{"capacity":1.5}`:                                "capacity",
		`{"capacity":"5"}`:                                "capacity",
		`{"capacity":true}`:                               "capacity",
		`{"capacity":[5]}`:                                "capacity",
		`{"Capacity":5,"capacity":5}`:                     "Capacity",
		`{"capacity":5,"capacity":6}`:                     "capacity",
		`{"capacity":5,"seats":6}`:                        "seats",
		`{"capacity":5,"stock":-1}`:                       "stock",
		`{"capacity":5,"rate":0}`:                         "rate",
		`{"capacity":5,"rate":1e999}`:                     "rate",
		`{"capacity":5,"rate":"fast"}`:                    "rate",
		`{"capacity":5,"burst":3}`:                        "burst",
		`{"capacity":5,"rate":1,"burst":-1}`:              "burst",
		`{"capacity":5,"max_waiting":1.5}`:                "max_waiting",
		`{"capacity":5,"token_ttl":"soon"}`:               "token_ttl",
		`{"capacity":5,"token_ttl":"-5m"}`:                "token_ttl",
		`{"capacity":5,"token_ttl":999}`:                  "token_ttl",
		`{"capacity":5,"token_ttl":1e30}`:                 "token_ttl",
		`{"capacity":5,"ready":"100.5ms"}`:                "ready",
		`{"capacity":5,"grace":true}`:                     "grace",
		`{"capacity":5,"retention":"999999h"}`:            "retention",
		`{"capacity":5,"on_close":"drop"}`:                "on_close",
		`{"capacity":5,"no_show":3}`:                      "no_show",
		`{"capacity":5,"mode":"OPEN"}`:                    "mode",
		`{"capacity":5,"return_url":"//x.y/"}`:            "return_url",
		`{"capacity":5,"return_url":"https://e.example"}`: "return_url",
		`[]`:              "body",
		`{"capacity":5`:   "body",
		`{"capacity":5}}`: "body",
		`null`:            "body",
	} {
		rec := localCall(t, h, "PUT", "/v1/events/e", body)
		p := requireProblem(t, rec, statusOfBad(body), field)
		require.Len(t, p.Fields, 1, body)
	}
	p := requireProblem(t, localCall(t, h, "PUT", "/v1/events/e",
		`{"capacity":"many","stock":-3,"rate":-1,"token_ttl":0,"mode":7,"on_close":"x","color":"red"}`), 422, "capacity")
	var names []string
	for _, f := range p.Fields {
		names = append(names, f.Field)
	}
	require.Equal(t, []string{"capacity", "color", "mode", "on_close", "rate", "stock", "token_ttl"}, names, "every bad field")
	i := slices.IndexFunc(p.Fields, func(f api.FieldError) bool { return f.Field == "stock" })
	require.Equal(t, "must be a whole number from 0 to 10,000,000", p.Fields[i].Problem)

	requireProblem(t, localCall(t, h, "PUT", "/v1/events/a%2Fb", `{"capacity":1}`), 422, "event")
	requireProblem(t, localCall(t, h, "PUT", "/v1/events/"+strings.Repeat("x", 129), `{"capacity":1}`), 422, "event")
	requireProblem(t, localCall(t, h, "PUT", "/v1/events/e?mode=open", `{"capacity":1}`), 400, "mode")
	requireProblem(t, localCall(t, h, "PUT", "/v1/events/e", `{"return_url":"`+strings.Repeat("x", httpapi.SmallBody)+`"}`), 413, "")
	requireProblem(t, localCall(t, h, "PATCH", "/v1/events/e", `{}`), 405, "")
	rec := call(t, http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		r.RemoteAddr, r.Host = "127.0.0.1:1", "localhost"
		h.ServeHTTP(w, r)
	}), "PUT", "/v1/events/e", `{"capacity":1}`, "Content-Type", "text/plain")
	requireProblem(t, rec, 415, "")
	require.Empty(t, f.Calls)
}

func TestManyUnknownFieldsAreCounted(t *testing.T) {
	var b strings.Builder
	for i := range 500 {
		fmt.Fprintf(&b, `,"x%d":1`, i)
	}
	p := requireProblem(t, localCall(t, httpapi.New(roomOptions(apitest.NewRooms())), "PUT", "/v1/events/e", `{"capacity":1`+b.String()+`}`), 422, "x0")
	require.Len(t, p.Fields, 100)
}

func TestEventCalls(t *testing.T) {
	f := apitest.NewRooms()
	h := httpapi.New(roomOptions(f))
	l := decode[api.RoomEventList](t, localCall(t, h, "GET", "/v1/events", ""))
	require.Len(t, l.Events, 2)
	require.Equal(t, "0-2", l.Cursor)
	require.Contains(t, localCall(t, h, "GET", "/v1/events?cursor=0-2&limit=9", "").Body.String(), `"events":[]`)
	rec := localCall(t, h, "GET", "/v1/events/e", "")
	require.Equal(t, `"7"`, rec.Header().Get("ETag"))
	require.Equal(t, "e", decode[api.RoomEvent](t, rec).Event)
	require.Equal(t, 200, localCall(t, h, "HEAD", "/v1/events/e", "").Code)
	for _, verb := range []string{"pause", "resume", "close"} {
		require.Equal(t, "e", decode[api.RoomEvent](t, localCall(t, h, "POST", "/v1/events/e/"+verb, "")).Event)
	}
	require.Equal(t, 200, localCall(t, h, "POST", "/v1/events/e/recalibrate", `{"capacity":5,"stock":0}`).Code)
	require.Equal(t, api.EventRemoval{Event: "e", Remaining: 3}, decode[api.EventRemoval](t, localCall(t, h, "DELETE", "/v1/events/e", "")))
	for user, removed := range map[string]bool{"u": true, "nobody": false} {
		got := decode[api.UserRemoval](t, localCall(t, h, "DELETE", "/v1/events/e/users/"+user, ""))
		require.Equal(t, api.UserRemoval{Event: "e", User: user, Removed: removed}, got)
	}
	require.Subset(t, f.Calls, []string{"remove u of e", "remove nobody of e"})
	require.Equal(t, []string{
		`list "" 50`, `list "0-2" 9`, "get e", "get e", "mode e paused", "mode e open", "mode e closed",
		"recalibrate e true true false", "delete e",
	}, f.Calls[:9])

	f.Calls, f.Seats = nil, true
	require.Equal(t, 200, localCall(t, h, "POST", "/v1/events/e/recalibrate", `{"from_seats":true}`).Code)
	require.Equal(t, []string{"recalibrate e false false true"}, f.Calls)
	f.Calls, f.Seats = nil, false
	for body, field := range map[string]string{
		`{}`:                       "capacity",
		`{"capacity":-1}`:          "capacity",
		`{"stock":1.5}`:            "stock",
		`{"from_seats":true}`:      "from_seats",
		`{"from_seats":"yes"}`:     "from_seats",
		`{"capacity":1,"mode":""}`: "mode",
	} {
		requireProblem(t, localCall(t, h, "POST", "/v1/events/e/recalibrate", body), 422, field)
	}
	requireProblem(t, localCall(t, h, "POST", "/v1/events/e/recalibrate", ""), 415, "")
	requireProblem(t, localCall(t, h, "POST", "/v1/events/e/pause", `{"for":"1m"}`), 422, "for")
	requireProblem(t, localCall(t, h, "DELETE", "/v1/events/e/users/a%20b", ""), 422, "user")
	requireProblem(t, localCall(t, h, "GET", "/v1/events?limit=0", ""), 422, "limit")
	requireProblem(t, localCall(t, h, "POST", "/v1/events/e/open", ""), 404, "")
	require.Empty(t, f.Calls)

	for want, err := range map[int]error{
		404: api.ErrNotFound, 409: api.ErrConflict, 502: api.ErrUpstream, 503: api.ErrUnavailable,
		429: &api.BackpressureError{Reason: "memory"}, 500: errors.New("WRONGTYPE"),
	} {
		f.Err = fmt.Errorf("event e: %w", err)
		requireProblem(t, localCall(t, h, "POST", "/v1/events/e/recalibrate", `{"capacity":1}`), want, "")
	}
}

func TestEntryTokenCalls(t *testing.T) {
	f := apitest.NewRooms()
	h := httpapi.New(roomOptions(f))
	s := decode[api.EntryTokenState](t, localCall(t, h, "POST", "/v1/entry-tokens/verify", `{"token":"t"}`))
	require.Equal(t, "u", s.User)
	require.JSONEq(t, `{"valid":false}`, localCall(t, h, "POST", "/v1/entry-tokens/verify", `{"token":"gone"}`).Body.String())
	require.JSONEq(t, `{"token":"t2","expires_at":"2001-09-09T01:46:40Z"}`,
		localCall(t, h, "POST", "/v1/entry-tokens/renew", `{"token":"t"}`).Body.String())
	require.JSONEq(t, `{"done":true}`, localCall(t, h, "POST", "/v1/entry-tokens/complete", `{"token":"t","sold":true}`).Body.String())
	require.JSONEq(t, `{"done":false}`, localCall(t, h, "POST", "/v1/entry-tokens/complete", `{"token":"gone"}`).Body.String())
	want := []string{"verify t", "verify gone", "renew t", "complete t true", "complete gone false"}
	require.Equal(t, want, f.Calls)

	for _, verb := range []string{"verify", "renew", "complete"} {
		for body, field := range map[string]string{
			`{}`:           "token",
			`{"token":""}`: "token",
			`{"token":5}`:  "token",
			`{"token":"` + strings.Repeat("x", 4097) + `"}`: "token",
			`{"token":"t","user":"u"}`:                      "user",
			`"t"`:                                           "body",
		} {
			requireProblem(t, localCall(t, h, "POST", "/v1/entry-tokens/"+verb, body), 422, field)
		}
		requireProblem(t, localCall(t, h, "GET", "/v1/entry-tokens/"+verb, ""), 405, "")
	}
	requireProblem(t, localCall(t, h, "POST", "/v1/entry-tokens/verify", `{"token":"t","sold":true}`), 422, "sold")
	requireProblem(t, localCall(t, h, "POST", "/v1/entry-tokens/complete", `{"token":"t","sold":1}`), 422, "sold")
	require.Equal(t, want, f.Calls)
	f.Err = fmt.Errorf("check entry tokens: %w", api.ErrNotConfigured)
	requireProblem(t, localCall(t, h, "POST", "/v1/entry-tokens/verify", `{"token":"t"}`), 501, "")
	f.Err = fmt.Errorf("renew: %w", api.ErrConflict)
	requireProblem(t, localCall(t, h, "POST", "/v1/entry-tokens/renew", `{"token":"t"}`), 409, "")
}
