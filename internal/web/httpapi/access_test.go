package httpapi_test

import (
	"context"
	"errors"
	"io"
	"net/http"
	"net/netip"
	"strings"
	"sync/atomic"
	"testing"
	"testing/synctest"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/bulkaction/bulkaction/api"
	"github.com/bulkaction/bulkaction/internal/access/activity"
	"github.com/bulkaction/bulkaction/internal/access/apikey"
	"github.com/bulkaction/bulkaction/internal/access/auth"
	"github.com/bulkaction/bulkaction/internal/testkit/apitest"
	"github.com/bulkaction/bulkaction/internal/web/httpapi"
)

// fakeKeys knows one key, "good", until it is revoked.
type fakeKeys struct {
	principal auth.Principal
	revoked   atomic.Bool
	err       error // of every check
	from      netip.Addr
}

func (k *fakeKeys) Authenticate(_ context.Context, token string, client netip.Addr) (auth.Principal, error) {
	k.from = client
	if k.err == nil && (token != "good" || k.revoked.Load()) {
		return auth.Principal{}, apikey.ErrInvalid
	}
	return k.principal, k.err
}

func (k *fakeKeys) Still(p auth.Principal) bool { return p == k.principal && !k.revoked.Load() }

func keyOptions(b httpapi.Backend, k *fakeKeys) httpapi.Options {
	o := options(b)
	o.Keys = k
	return o
}

// TestScopes: the function Scopes returns the scopes of all calls that need a key, also of calls
// that a server offers only with certain options.
func TestScopes(t *testing.T) {
	want := map[string]auth.Scope{}
	for _, rt := range httpapi.Routes() {
		if rt.Scope != httpapi.Open {
			want[rt.Method+" "+rt.Path] = rt.Scope
		}
	}
	require.Equal(t, want, httpapi.Scopes())
}

func TestAnswersToKeys(t *testing.T) {
	k := &fakeKeys{principal: auth.Principal{KeyID: "key_a", Role: auth.Reader, Tenant: "acme"}}
	h := httpapi.New(keyOptions(apitest.NewBackend().WithGroup("g"), k))
	require.Equal(t, 200, call(t, h, "GET", "/v1/groups/g", "", "Authorization", "bearer good").Code)
	require.Equal(t, "192.0.2.1", k.from.String())
	for _, header := range [][]string{
		nil, {"Authorization", "good"}, {"Authorization", "Basic good"}, {"X-Api-Key", "good"},
		{"Authorization", "Bearer good", "Authorization", "Bearer good"}, {"Authorization", "Bearer other"},
	} {
		rec := call(t, h, "GET", "/v1/groups/g", "", header...)
		require.Equal(t, api.Unauthenticated, requireProblem(t, rec, 401, "").Code)
		require.Equal(t, "Bearer", rec.Header().Get("WWW-Authenticate"))
	}
	requireProblem(t, call(t, h, "GET", "/v1/groups/g?access_token=good", ""), 401, "")
	rec := call(t, h, "POST", "/v1/groups/g/cancel", "", "Authorization", "Bearer good")
	require.Equal(t, api.NotAllowed, requireProblem(t, rec, 403, "").Code)
	require.Equal(t, 404, call(t, h, "GET", "/v1/none", "").Code)
	require.Equal(t, 405, call(t, h, "POST", "/v1/stats", "").Code)
	require.Equal(t, 200, call(t, h, "GET", "/", "").Code)

	k.err = apikey.ErrUnavailable
	rec = call(t, h, "GET", "/v1/groups/g", "", "Authorization", "Bearer good")
	require.Equal(t, api.StoreUnavailable, requireProblem(t, rec, 503, "").Code)
	k.err = &apikey.TooManyFailuresError{RetryAfter: 6 * time.Second}
	rec = call(t, h, "GET", "/v1/groups/g", "", "Authorization", "Bearer good")
	require.Equal(t, api.TooManyFailures, requireProblem(t, rec, 429, "").Code)
	require.Equal(t, "6", rec.Header().Get("Retry-After"))
}

// TestRoomCallsWithKeys: from another host, the verification of an entry token gets 403 if the API
// asks for no keys, and 200 with a key of the role service. The list of events gets 403 with this
// key.
func TestRoomCallsWithKeys(t *testing.T) {
	k := &fakeKeys{principal: auth.Principal{KeyID: "key_s", Role: auth.Service}}
	o := roomOptions(apitest.NewRooms())
	h := httpapi.New(o)
	require.Equal(t, 403, call(t, h, "POST", "/v1/entry-tokens/verify", `{"token":"t"}`, "Content-Type", httpapi.JSONType).Code)
	o.Keys = k
	h = httpapi.New(o)
	rec := call(t, h, "POST", "/v1/entry-tokens/verify", `{"token":"t"}`, "Content-Type", httpapi.JSONType, "Authorization", "Bearer good")
	require.Equal(t, 200, rec.Code, rec.Body.String())
	rec = call(t, h, "GET", "/v1/events", "", "Authorization", "Bearer good")
	require.Equal(t, api.NotAllowed, requireProblem(t, rec, 403, "").Code)
}

// TestRevokedKeyEndsStreams: a stream of events or results lasts while its key is valid, and ends
// within stillInterval and 1 s of the revocation. With the 7 s until Authenticator.Still says so
// (see package apikey), that may be at most 10 s.
func TestRevokedKeyEndsStreams(t *testing.T) {
	require.LessOrEqual(t, 7*time.Second+httpapi.StillInterval, 10*time.Second)
	endless := apitest.NewBackend().WithGroup("g")
	endless.OnResults = func(write func([]byte) error) error {
		for {
			if err := write([]byte(`{}`)); err != nil {
				return err
			}
			<-time.After(time.Second)
		}
	}
	for _, path := range []string{"/v1/groups/g/events", "/v1/groups/g/results"} {
		synctest.Test(t, func(t *testing.T) {
			k := &fakeKeys{principal: auth.Principal{KeyID: "key_a", Role: auth.Admin}}
			client := serve(t, httpapi.New(keyOptions(endless, k)))
			req, err := http.NewRequestWithContext(t.Context(), "GET", "http://localhost"+path, nil)
			require.NoError(t, err)
			req.Header.Set("Authorization", "Bearer good")
			resp, err := client.Do(req)
			require.NoError(t, err)
			defer resp.Body.Close()
			require.Equal(t, 200, resp.StatusCode)
			start := time.Now()
			go func() {
				<-time.After(time.Minute)
				k.revoked.Store(true)
			}()
			_, _ = io.Copy(io.Discard, resp.Body)
			took := time.Since(start)
			require.GreaterOrEqual(t, took, time.Minute, "a valid key keeps its stream")
			require.LessOrEqual(t, took, time.Minute+httpapi.StillInterval+time.Second)
		})
	}
}

// TestRevokedKeyEndsAppends: if the key is revoked after the first batch of a streamed body, the
// answer is 401, and only the 500 jobs of this batch are stored.
func TestRevokedKeyEndsAppends(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		f := apitest.NewBackend().WithGroup("g")
		k := &fakeKeys{principal: auth.Principal{KeyID: "key_a", Role: auth.Admin}}
		client := serve(t, httpapi.New(keyOptions(f, k)))
		in, out := io.Pipe()
		go func() {
			_, _ = io.WriteString(out, numbered(httpapi.MaxBatchLines+1)) // the first batch is stored when the next one begins
			<-time.After(time.Second)
			k.revoked.Store(true)
			<-time.After(2 * httpapi.StillInterval)
			_, _ = io.WriteString(out, numbered(httpapi.MaxBatchLines+1))
			out.Close()
		}()
		req, err := http.NewRequestWithContext(t.Context(), "POST", "http://localhost/v1/groups/g/jobs", in)
		require.NoError(t, err)
		req.Header.Set("Authorization", "Bearer good")
		req.Header.Set("Content-Type", ndjson)
		resp, err := client.Do(req)
		require.NoError(t, err)
		defer resp.Body.Close()
		body, err := io.ReadAll(resp.Body)
		require.NoError(t, err)
		require.Equal(t, 401, resp.StatusCode, string(body))
		require.Contains(t, string(body), `"accepted":500`)
		require.Len(t, f.Payloads("g"), httpapi.MaxBatchLines)
	})
}

// fakeActivity is an activity log in memory.
type fakeActivity struct {
	err     error // of every call
	entries []api.Activity
	queries []activity.Query
}

func (f *fakeActivity) Do(ctx context.Context, e api.Activity, do func(context.Context) error) error {
	if f.err != nil {
		return f.err
	}
	f.entries = append(f.entries, e)
	return do(ctx)
}

func (f *fakeActivity) Read(_ context.Context, q activity.Query) (api.ActivityList, error) {
	f.queries = append(f.queries, q)
	return api.ActivityList{Activity: f.entries, Scanned: len(f.entries)}, f.err
}

// changes lists the calls that the activity log must record; of those on members of guards, one.
// Each value has the request's body, and the beginning of the expected entry: action, object, state
// before and state after.
var changes = map[string][]string{
	"POST /v1/groups/g/seal":                        {`{"total":3}`, `group.seal g {"sealed":false} {"sealed":true,"total":3}`},
	"POST /v1/groups/g/cancel":                      {``, `group.cancel g {"status":"CREATED"} `},
	"POST /v1/groups/g/jobs/0/cancel":               {``, `job.cancel g.0  `},
	"POST /v1/groups/g/retry":                       {`{"codes":["X"]}`, `group.retry g {"status":"CREATED"} {"codes":["X"]}`},
	"POST /v1/groups/g/pause":                       {``, `group.pause g {"paused":false} {"paused":true}`},
	"POST /v1/groups/g/resume":                      {``, `group.resume g {"paused":false} {"paused":false}`},
	"POST /v1/tenants/t/pause":                      {``, `tenant.pause t  {"paused":true}`},
	"POST /v1/tenants/t/resume":                     {``, `tenant.resume t  {"paused":false}`},
	"POST /v1/types/T/pause":                        {``, `type.pause T  {"paused":true}`},
	"POST /v1/types/T/resume":                       {``, `type.resume T  {"paused":false}`},
	"PUT /v1/tenants/t":                             {`{"rps":5}`, `tenant.set t  {"rps":5`},
	"PATCH /v1/tenants/t":                           {`{"rps":null}`, `tenant.set t  {"rps":null}`},
	"PATCH /v1/limits":                              {`{"global":{"rps":5,"share":null}}`, `limits.set global {"rps":10000,"share":"elastic","default_backoff":"1s","max_backoff":"1m0s"} {"rps":5,"share":null}`},
	"PATCH /v1/types/T":                             {`{"rps":5,"in_flight":null}`, `type.set T {"in_flight":null,"rps":null} {"rps":5,"in_flight":null}`},
	"POST /v1/operations":                           {`{"do":"cancel","filter":{"tenant":"t"}}`, `operation.start `},
	"POST /v1/operations/op-1/pause":                {``, `operation.pause op-1 {"state":"RUNNING","matched":30,"changed":20,"skipped":10} `},
	"POST /v1/operations/op-1/resume":               {``, `operation.resume op-1 {"state":"RUNNING"`},
	"POST /v1/operations/op-1/cancel":               {``, `operation.cancel op-1 {"state":"RUNNING"`},
	"PUT /v1/tenants/acme/callback":                 {`{"url":"https://a:b@example.com/x?key=k","events":["group.failed"]}`, `callback.set acme {"url":"https://example.com/hook","events":["group.completed","group.failed","group.cancelled"]} {"url":"https://example.com/x","events":["group.failed"]}`},
	"DELETE /v1/tenants/acme/callback":              {``, `callback.delete acme {"url":"https://example.com/hook","events":["group.completed"`},
	"POST /v1/tenants/acme/callback/secret/rotate":  {``, `callback.rotate acme {"version":2} `},
	"POST /v1/callbacks/g.1.completed/redeliver":    {``, `callback.redeliver g.1.completed  `},
	"POST /v1/callbacks/redeliver":                  {`{"tenant":"acme"}`, `callback.redeliver acme  `},
	"PUT /v1/workers/w":                             {`{"workers":2}`, `worker.resize w  {"workers":2}`},
	"POST /v1/guards/pool%2Fsmtp/members/a/disable": {``, `guard.disable a@pool/smtp  `},
	"PUT /v1/events/e":                              {`{"capacity":3}`, `event.set e {`},
	"POST /v1/events/e/pause":                       {``, `event.mode e {"mode":"open"} {"mode":"paused"}`},
	"POST /v1/events/e/resume":                      {``, `event.mode e {"mode":"open"} {"mode":"open"}`},
	"POST /v1/events/e/close":                       {``, `event.mode e {"mode":"open"} {"mode":"closed"}`},
	"POST /v1/events/e/recalibrate":                 {`{"capacity":3}`, `event.recalibrate e {`},
	"DELETE /v1/events/e":                           {``, `event.delete e {"mode":"open"} `},
	"DELETE /v1/events/e/users/u":                   {``, `user.remove u@e  `},
	"DELETE /v1/groups/g":                           {``, `group.delete g {"status":"CREATED"} `},
	"POST /v1/tenants/acme/erase":                   {`{"key":"bob@example.com"}`, `tenant.erase acme  `},
	"POST /v1/keys":                                 {`{"role":"admin","name":"ann"}`, `key.create ann  {"name":"ann","role":"admin"`},
	"DELETE /v1/keys/key_a":                         {``, `key.revoke key_a  `},
}

// TestChangesAreRecordedFirst: each call of the list changes is carried out, and makes one entry.
// If the activity log returns an error, the answer is 500, and the call is not carried out.
func TestChangesAreRecordedFirst(t *testing.T) {
	for target, c := range changes {
		method, path, _ := strings.Cut(target, " ")
		send := func(log *fakeActivity) (status int, calls []string) {
			backend, rooms := apitest.NewBackend().WithGroup("g"), apitest.NewRooms()
			o := options(backend)
			keys := &fakeKeyStore{keys: []apikey.Record{{ID: "key_a", Role: auth.Admin}}}
			o.Rooms, o.Activity, o.KeyStore = rooms, log, keys
			rec := localCall(t, httpapi.New(o), method, path, c[0])
			for _, call := range append(backend.Calls, rooms.Calls...) {
				if !strings.HasPrefix(call, "get ") {
					calls = append(calls, call)
				}
			}
			g := backend.ByID["g"].View
			if g.Paused || g.Sealed || g.Round != 1 || g.Status != api.StatusCreated || len(backend.Settings) > 0 ||
				len(keys.keys) != 1 {
				calls = append(calls, "changed")
			}
			return rec.Code, calls
		}
		log := &fakeActivity{}
		code, calls := send(log)
		require.Less(t, code, 300, target)
		require.Len(t, log.entries, 1, target)
		if target != "POST /v1/groups/g/resume" { // it changes nothing that the fake shows
			require.NotEmpty(t, calls, target)
		}
		e := log.entries[0]
		got := e.Action + " " + e.Object + " " + string(e.Before) + " " + string(e.After)
		require.True(t, strings.HasPrefix(got, c[1]), "%s: %s", target, got)

		code, calls = send(&fakeActivity{err: errors.New("no space")})
		require.Equal(t, 500, code, target)
		require.Empty(t, calls, target)
	}
}

// TestEveryChangeIsRecorded: the list changes, which TestChangesAreRecordedFirst uses, has every
// call of the API that is no GET, except submissions, appends and the calls on entry tokens.
func TestEveryChangeIsRecorded(t *testing.T) {
	recorded := []string{
		"POST /v1/groups", "POST /v1/groups/{id}/jobs", "POST /v1/entry-tokens/verify", "POST /v1/entry-tokens/renew",
		"POST /v1/entry-tokens/complete", // these are the daily traffic
	}
	var all []string
	for _, rt := range httpapi.Routes() {
		call := rt.Method + " " + rt.Path
		if rt.Method != "GET" && (!strings.Contains(call, "/members/") || strings.HasSuffix(call, "/disable")) {
			all = append(all, call)
		}
	}
	for target := range changes {
		recorded = append(recorded, strings.NewReplacer("/groups/g/", "/groups/{id}/", "DELETE /v1/groups/g", "DELETE /v1/groups/{id}", "jobs/0/", "jobs/{ordinal}/", "/tenants/acme", "/tenants/{id}", "/tenants/t", "/tenants/{id}",
			"/g.1.completed/", "/{callback}/",
			"/types/T", "/types/{type}", "/workers/w", "/workers/{id}", "pool%2Fsmtp", "{name}", "/members/a", "/members/{id}",
			"/events/e", "/events/{event}", "/users/u", "/users/{user}", "/keys/key_a", "/keys/{id}",
			"/operations/op-1", "/operations/{id}").Replace(target))
	}
	require.ElementsMatch(t, all, recorded)
}

// TestUnknownGroupsAreNotRecorded: to cancel a group that does not exist is answered with 404, and
// is not recorded; so are changes of callbacks that do not exist.
func TestUnknownGroupsAreNotRecorded(t *testing.T) {
	log := &fakeActivity{}
	o := options(apitest.NewBackend())
	o.Activity = log
	for _, target := range []string{
		"POST /v1/groups/none/cancel", "POST /v1/callbacks/none.1.failed/redeliver", "DELETE /v1/tenants/none/callback",
	} {
		method, path, _ := strings.Cut(target, " ")
		requireProblem(t, call(t, httpapi.New(o), method, path, ""), 404, "")
	}
	require.Empty(t, log.entries)
}

func TestActivityIsListed(t *testing.T) {
	log := &fakeActivity{entries: []api.Activity{{
		ID: "1-0", At: time.Unix(1e9, 0).UTC(), Actor: "key_a", Role: "admin", Via: api.ViaAPI, IP: "192.0.2.1", RequestID: "r",
		Action: "group.pause", Object: "g", Tenant: "t", Before: []byte(`{"paused":false}`), After: []byte(`{}`), Outcome: "failed: x",
	}}}
	o := options(apitest.NewBackend())
	o.Activity = log
	h := httpapi.New(o)
	rec := call(t, h, "GET", "/v1/activity?actor=key_a&tenant=t&since=2026-01-02T15:04:05Z&cursor=1-2&limit=7", "")
	require.Equal(t, 200, rec.Code, rec.Body.String())
	require.Equal(t, log.entries, decode[api.ActivityList](t, rec).Activity)
	since := time.Date(2026, 1, 2, 15, 4, 5, 0, time.UTC)
	require.Equal(t, []activity.Query{{Actor: "key_a", Tenant: "t", Since: since, Cursor: "1-2", Limit: 7}}, log.queries)
	for query, field := range map[string]string{
		"since=yesterday": "since", "since=1815-01-01T00:00:00Z": "since", "cursor=x": "cursor", "limit=0": "limit", "tenant=a%2Fb": "tenant",
	} {
		requireProblem(t, call(t, h, "GET", "/v1/activity?"+query, ""), 422, field)
	}
}
