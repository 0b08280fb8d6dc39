package httpapi_test

import (
	"context"
	"fmt"
	"net/http/httptest"
	"net/url"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/bulkaction/bulkaction/api"
	"github.com/bulkaction/bulkaction/guard"
	"github.com/bulkaction/bulkaction/internal/access/apikey"
	"github.com/bulkaction/bulkaction/internal/access/auth"
	"github.com/bulkaction/bulkaction/internal/testkit/apitest"
	"github.com/bulkaction/bulkaction/internal/web/httpapi"
)

func TestFailurePages(t *testing.T) {
	f := apitest.NewBackend().WithGroup("g")
	h := httpapi.New(options(f))
	first := call(t, h, "GET", "/v1/groups/g/failures?limit=1&code=A%26B&payload=true", "")
	require.Equal(t, 200, first.Code)
	require.Equal(t, 1, strings.Count(first.Body.String(), "\n"))
	require.Equal(t, "application/x-ndjson", first.Header().Get("Content-Type"))
	link := first.Header().Get("Link")
	require.Equal(t, `</v1/groups/g/failures?code=A%26B&cursor=1&limit=1&payload=true>; rel="next"`, link)
	next, _, _ := strings.Cut(strings.TrimPrefix(link, "<"), ">")
	last := call(t, h, "GET", next, "")
	require.Contains(t, last.Body.String(), `"ordinal":1`)
	require.Empty(t, last.Header().Get("Link"))
	require.Empty(t, call(t, h, "GET", "/v1/groups/g/failures", "").Header().Get("Link"))
	require.Equal(t, []string{
		"failures {Code:A&B Payloads:true Cursor: Limit:1}", "failures {Code:A&B Payloads:true Cursor:1 Limit:1}",
		"failures {Code: Payloads:false Cursor: Limit:0}",
	}, f.Calls)
	for field, value := range map[string]string{"code": strings.Repeat("x", 129), "limit": "0", "cursor": strings.Repeat("1", 513), "payload": "x"} {
		rec := call(t, h, "GET", "/v1/groups/g/failures?"+field+"="+value, "")
		require.Equal(t, 422, rec.Code, field)
		require.Contains(t, rec.Body.String(), `"field":"`+field+`"`)
	}
	require.Equal(t, 404, call(t, h, "GET", "/v1/groups/none/failures?limit=1", "").Code)
}

func TestSummaryAndMap(t *testing.T) {
	f := apitest.NewBackend().WithGroup("g")
	h := httpapi.New(options(f))
	sum := decode[api.FailureSummary](t, call(t, h, "GET", "/v1/groups/g/failures/summary", ""))
	require.Equal(t, "no mailbox <n>", sum.Codes[0].Fingerprints[0].Text)
	m := decode[api.JobMap](t, call(t, h, "GET", "/v1/groups/g/map", ""))
	require.EqualValues(t, 2, m.Jobs)
	call(t, h, "GET", "/v1/groups/g/map?buckets=1000", "")
	require.Equal(t, []string{"map 500", "map 1000"}, f.Calls)
	for _, buckets := range []string{"0", "1001", "x", "-1"} {
		rec := call(t, h, "GET", "/v1/groups/g/map?buckets="+buckets, "")
		require.Equal(t, 422, rec.Code, buckets)
		require.Contains(t, rec.Body.String(), `"field":"buckets"`)
	}
}

func TestGuards(t *testing.T) {
	f := apitest.NewBackend()
	h := httpapi.New(options(f))
	l := decode[api.GuardList](t, call(t, h, "GET", "/v1/guards", ""))
	require.Equal(t, "pool/smtp", l.Guards[0].Name)
	require.Equal(t, "0.5.", l.Cursor)
	call(t, h, "GET", "/v1/guards?kind=key&cursor=0.7.&limit=9", "")
	require.Equal(t, []string{"guards   50", "guards key 0.7. 9"}, f.Calls)
	requireProblem(t, call(t, h, "GET", "/v1/guards?kind=pools", ""), 422, "kind")
	requireProblem(t, call(t, h, "GET", "/v1/guards?kind=pool%2Fx", ""), 422, "kind")
	requireProblem(t, call(t, h, "GET", "/v1/guards?limit=0", ""), 422, "limit")
	requireProblem(t, call(t, h, "GET", "/v1/guards?keys=1", ""), 400, "keys")

	for path, name := range map[string]string{
		"smtp": "pool/smtp", "pool%2Fsmtp": "pool/smtp", "lock%2Fa.b": "lock/a.b", "key%2Fhosts%2Fexample.org": "key/hosts/example.org",
	} {
		v := decode[api.Guard](t, call(t, h, "GET", "/v1/guards/"+path, ""))
		require.Equal(t, name, v.Name)
		require.Equal(t, "cooling", v.Members[0].State)
	}
	v := decode[api.Guard](t, call(t, h, "GET", "/v1/guards/limiter%2Fapi?keys=true", ""))
	require.Equal(t, []string{"user-1", "user-2"}, v.Keys)
	require.True(t, v.MoreKeys)
	require.Empty(t, decode[api.Guard](t, call(t, h, "GET", "/v1/guards/limiter%2Fapi", "")).Keys, "only if asked for")
	requireProblem(t, call(t, h, "GET", "/v1/guards/smtp?keys=true", ""), 422, "keys")
	requireProblem(t, call(t, h, "GET", "/v1/guards/limiter%2Fapi?keys=9", ""), 422, "keys")
	health := decode[api.GuardHealth](t, call(t, h, "GET", "/v1/guards/health", ""))
	require.True(t, health.Healthy)
	require.Equal(t, "pool/smtp", health.Guards[0].Name)
	requireProblem(t, call(t, h, "GET", "/v1/guards/none", ""), 404, "")
	for _, bad := range []string{"a%20b", "pools%2Fa", "pool%2F", "pool%2Fa%2Fb", "key%2Fa", "%2Fa", strings.Repeat("x", 129)} {
		requireProblem(t, call(t, h, "GET", "/v1/guards/"+bad, ""), 400, "name")
	}
	requireProblem(t, call(t, h, "GET", "/v1/guards/pool/smtp", ""), 404, "")
	f.Err = api.ErrUnavailable
	requireProblem(t, call(t, h, "GET", "/v1/guards", ""), 503, "")
	requireProblem(t, call(t, h, "GET", "/v1/guards/smtp", ""), 503, "")
}

func TestControlOfGuards(t *testing.T) {
	f := apitest.NewBackend()
	h := httpapi.New(options(f))
	var want []string
	for _, do := range guard.Actions {
		path := "/v1/guards/semaphore%2Fs/members/1/" + string(do)
		rec := call(t, h, "POST", path, "")
		require.Equal(t, 202, rec.Code, rec.Body.String())
		require.Equal(t, api.GuardAction{Guard: "semaphore/s", Member: "1", Action: string(do)}, decode[api.GuardAction](t, rec))
		want = append(want, string(do)+" 1 of semaphore/s")
		requireProblem(t, call(t, h, "GET", path, ""), 405, "")
	}
	require.Equal(t, want, f.Calls)
	requireProblem(t, call(t, h, "POST", "/v1/guards/a%20b/members/a/open", ""), 400, "name")
	requireProblem(t, call(t, h, "POST", "/v1/guards/p/members/a%2Fb/open", ""), 400, "id")
	requireProblem(t, call(t, h, "POST", "/v1/guards/p/members/a/open", `{"for":1}`, "Content-Type", httpapi.JSONType), 422, "for")
	requireProblem(t, call(t, h, "POST", "/v1/guards/p/members/a/stop", ""), 404, "")
	requireProblem(t, call(t, h, "POST", "/v1/guards/p/members/a/open", "", "Origin", "https://evil.example"), 403, "")
	require.Equal(t, want, f.Calls, "a refused request must not reach the backend")
	f.Err = fmt.Errorf("guard p: member x: %w", api.ErrNotFound)
	requireProblem(t, call(t, h, "POST", "/v1/guards/p/members/x/disable", ""), 404, "")
	f.Err = fmt.Errorf("guard p: member a has no circuit breaker: %w", api.ErrConflict)
	requireProblem(t, call(t, h, "POST", "/v1/guards/p/members/a/open", ""), 409, "")
}

func TestListJobs(t *testing.T) {
	t.Parallel()
	f := apitest.NewBackend().WithGroup("g")
	h := httpapi.New(options(f))
	lines := `{"payload":1,"key":"a"}` + "\n" + `{"payload":2,"key":"b|ü"}` + "\n" + `{"payload":3}` + "\n"
	require.Equal(t, 200, postJobs(t, h, ndjson, lines).Code)
	list := func(query string) api.JobList {
		rec := call(t, h, "GET", "/v1/groups/g/jobs?"+query, "")
		require.Equal(t, 200, rec.Code, rec.Body.String())
		return decode[api.JobList](t, rec)
	}
	require.Len(t, list("").Jobs, 3)
	page := list("limit=2&state=waiting")
	require.Len(t, page.Jobs, 2)
	require.Equal(t, "2", page.Cursor)
	found := list("key=" + url.QueryEscape("b|ü")).Jobs
	require.Len(t, found, 1)
	require.EqualValues(t, 1, found[0].Ordinal)
	require.Equal(t, `{"jobs":[]}`, strings.TrimSpace(call(t, h, "GET", "/v1/groups/g/jobs?key=x", "").Body.String()))

	for query, field := range map[string]string{
		"state=running": "state", "key=": "key", "key=" + strings.Repeat("k", 129): "key", "key=%00": "key", "limit=0": "limit",
	} {
		requireProblem(t, call(t, h, "GET", "/v1/groups/g/jobs?"+query, ""), 422, field)
	}
	require.Equal(t, 400, call(t, h, "GET", "/v1/groups/g/jobs?keys=a", "").Code)
	require.Equal(t, 404, call(t, h, "GET", "/v1/groups/none/jobs", "").Code)
}

// TestLinesWithTakenKeysAreRejected: if the store answers that the keys of the second and fourth
// job are taken, lines 2 and 6 are rejected for that, and line 3 for not being JSON. The answer
// counts two accepted jobs.
func TestLinesWithTakenKeysAreRejected(t *testing.T) {
	t.Parallel()
	f := apitest.NewBackend().WithGroup("g")
	f.OnAppend = func(int) error { return &api.KeysTakenError{Jobs: []int{1, 3}} }
	rec := postJobs(t, httpapi.New(options(f)), ndjson, `{"payload":1,"key":"a"}
{"payload":2,"key":"a"}
nonsense
{"payload":3,"key":"b"}

{"payload":4,"key":"b"}
`)
	require.Equal(t, 200, rec.Code, rec.Body.String())
	got := decode[api.Appended](t, rec)
	require.EqualValues(t, 2, got.Accepted)
	require.EqualValues(t, 3, got.RejectedTotal)
	at := map[int64]string{}
	for _, l := range got.Rejected {
		at[l.Line] = l.Error
	}
	require.Len(t, at, 3)
	require.Contains(t, at[2], "another job of the group has it")
	require.Contains(t, at[6], "another job of the group has it")
	require.NotContains(t, at[3], "another job")
}

func TestCSVKeyColumn(t *testing.T) {
	t.Parallel()
	f := apitest.NewBackend().WithGroup("g")
	h := httpapi.New(options(f))
	post := func(query, body string) api.Appended {
		rec := call(t, h, "POST", "/v1/groups/g/jobs?"+query, body, "Content-Type", "text/csv")
		require.Equal(t, 200, rec.Code, rec.Body.String())
		return decode[api.Appended](t, rec)
	}
	got := post("key_column=id", "id,to\n7,a@example.com\n,b@example.com\n\"x\ty\",c@example.com\n")
	require.EqualValues(t, 2, got.Accepted)
	require.Equal(t, []api.LineError{{Line: 4, Error: "key must be 1 to 128 bytes of UTF-8 without control characters"}}, got.Rejected)
	require.Equal(t, []string{`{"id":"7","to":"a@example.com"}`, `{"id":"","to":"b@example.com"}`}, f.Payloads("g"))
	require.Equal(t, "7", f.ByID["g"].Jobs[0].Key)

	requireProblem(t, call(t, h, "POST", "/v1/groups/g/jobs?key_column=nr", "id\n7\n", "Content-Type", "text/csv"), 422, "key_column")
	require.Equal(t, 422, call(t, h, "POST", "/v1/groups/g/jobs?key_column=id", "{}\n", "Content-Type", ndjson).Code)
}

func TestRetryChoice(t *testing.T) {
	t.Parallel()
	f := apitest.NewBackend().WithGroup("g")
	h := httpapi.New(options(f))
	retry := func(body string) *httptest.ResponseRecorder {
		return call(t, h, "POST", "/v1/groups/g/retry", body, "Content-Type", "application/json")
	}
	for body, want := range map[string]api.RetryChoice{
		"":                                 {},
		"{}":                               {},
		`{"codes":["A","B"]}`:              {Codes: []string{"A", "B"}},
		`{"jobs":[0,7]}`:                   {Jobs: []int64{0, 7}},
		`{"codes":["A"],"jobs":[9999999]}`: {Codes: []string{"A"}, Jobs: []int64{9999999}},
	} {
		require.NotEqual(t, 422, retry(body).Code, body)
		require.Equal(t, want, f.Retried, body)
	}
	for body, field := range map[string]string{
		`{"codes":[]}`:        "codes",
		`{"jobs":[]}`:         "jobs",
		`{"codes":[""]}`:      "codes[0]",
		`{"jobs":[1,-1]}`:     "jobs[1]",
		`{"jobs":[10000000]}`: "jobs[0]",
		`{"codes":["` + strings.Repeat("x", 129) + `"]}`:     "codes[0]",
		`{"codes":["A"` + strings.Repeat(`,"A"`, 100) + `]}`: "codes",
		`{"jobs":[1` + strings.Repeat(`,1`, 1000) + `]}`:     "jobs",
	} {
		requireProblem(t, retry(body), 422, field)
	}
	require.GreaterOrEqual(t, retry(`{"jobs":"1"}`).Code, 400)
}

// fakeKeyStore is a store of API keys in memory.
type fakeKeyStore struct {
	keys []apikey.Record
	err  error
}

func (f *fakeKeyStore) List(context.Context) ([]apikey.Record, []error, error) {
	return slices.Clone(f.keys), nil, f.err
}

func (f *fakeKeyStore) Create(_ context.Context, r apikey.Request) (apikey.NewKey, error) {
	if f.err != nil {
		return apikey.NewKey{}, f.err
	}
	k, err := r.New(auth.SHA256, time.Date(2026, 1, 2, 3, 4, 5, 0, time.UTC))
	f.keys = append(f.keys, k.Record)
	return k, err
}

func (f *fakeKeyStore) Revoke(_ context.Context, id string) error {
	n := len(f.keys)
	f.keys = slices.DeleteFunc(f.keys, func(k apikey.Record) bool { return k.ID == id })
	if len(f.keys) == n {
		return fmt.Errorf("revoke API key %s: %w", id, apikey.ErrNoKey)
	}
	return f.err
}

func TestKeys(t *testing.T) {
	store, log := &fakeKeyStore{}, &fakeActivity{}
	o := options(apitest.NewBackend())
	o.KeyStore, o.Activity = store, log
	h := httpapi.New(o)
	require.JSONEq(t, `{"keys":[]}`, call(t, h, "GET", "/v1/keys", "").Body.String())
	rec := call(t, h, "POST", "/v1/keys", `{"role":"producer","tenant":"acme","name":"shop","payloads":false,"expires_in_seconds":3600}`, "Content-Type", httpapi.JSONType)
	require.Equal(t, 201, rec.Code, rec.Body.String())
	created := decode[api.NewKey](t, rec)
	require.Regexp(t, auth.TokenPattern, created.Secret)
	require.Equal(t, api.Key{
		ID: auth.SHA256(created.Secret).KeyID(), Role: "producer", Tenant: "acme", Name: "shop", CreatedAt: created.CreatedAt,
		ExpiresAt: new(created.CreatedAt.Add(time.Hour)),
	}, created.Key)
	list := call(t, h, "GET", "/v1/keys", "")
	require.Equal(t, []api.Key{created.Key}, decode[api.KeyList](t, list).Keys)
	require.NotContains(t, list.Body.String(), created.Secret)
	require.JSONEq(t, `{"id":"`+created.ID+`","revoked":true}`, call(t, h, "DELETE", "/v1/keys/"+created.ID, "").Body.String())
	requireProblem(t, call(t, h, "DELETE", "/v1/keys/"+created.ID, ""), 404, "")
	var actions []string
	for _, e := range log.entries {
		actions = append(actions, e.Action+" "+e.Object+" "+string(e.After))
		require.NotContains(t, string(e.After), created.Secret)
	}
	require.Equal(t, []string{
		`key.create shop {"lifetime":"1h0m0s","name":"shop","payloads":false,"role":"producer","tenant":"acme"}`,
		"key.revoke " + created.ID + " ", "key.revoke " + created.ID + " ",
	}, actions[:3])

	for body, field := range map[string]string{
		`{"role":"x"}`: "role", `{"role":"producer"}`: "tenant", `{"role":"admin","tenant":"a"}`: "tenant", `{"role":"reader","tenant":"*"}`: "tenant",
		`{"role":"admin","name":"\u0000"}`: "name", `{"role":"admin","expires_in_seconds":59}`: "expires_in_seconds",
		`{"role":"admin","expires_in_seconds":-1}`: "expires_in_seconds", `{"role":"admin","expires_in_seconds":99999999999}`: "expires_in_seconds",
		`{"role":"admin","more":1}`: "more", `{"role":7}`: "role",
	} {
		requireProblem(t, call(t, h, "POST", "/v1/keys", body, "Content-Type", httpapi.JSONType), 422, field)
	}
	requireProblem(t, call(t, h, "POST", "/v1/keys", `{`, "Content-Type", httpapi.JSONType), 400, "body")
	require.Empty(t, store.keys)
	store.err = apikey.ErrFull
	requireProblem(t, call(t, h, "POST", "/v1/keys", `{"role":"admin"}`, "Content-Type", httpapi.JSONType), 409, "")
	store.err = api.ErrUnavailable
	requireProblem(t, call(t, h, "GET", "/v1/keys", ""), 503, "")
}

func TestPagesOfKeys(t *testing.T) {
	store := &fakeKeyStore{}
	for i := range 7 {
		at := time.Date(2026, 1, 2, 3, 4, i/3, 0, time.UTC) // some have the same time
		store.keys = append(store.keys, apikey.Record{ID: fmt.Sprint("key_", i), Role: auth.Admin, CreatedAt: at})
	}
	o := options(apitest.NewBackend())
	o.KeyStore = store
	h := httpapi.New(o)
	var got []string
	for cursor := ""; ; {
		page := decode[api.KeyList](t, call(t, h, "GET", "/v1/keys?limit=2&cursor="+url.QueryEscape(cursor), ""))
		for _, k := range page.Keys {
			got = append(got, k.ID)
		}
		if cursor = page.Cursor; cursor == "" {
			break
		}
	}
	require.Equal(t, []string{"key_0", "key_1", "key_2", "key_3", "key_4", "key_5", "key_6"}, got)
	requireProblem(t, call(t, h, "GET", "/v1/keys?cursor=x", ""), 422, "cursor")
}

// TestNoKeyStore: an API that asks for no keys answers 409 to the calls that list, create and
// revoke keys.
func TestNoKeyStore(t *testing.T) {
	h := httpapi.New(options(apitest.NewBackend()))
	requireProblem(t, call(t, h, "GET", "/v1/keys", ""), 409, "")
	requireProblem(t, call(t, h, "POST", "/v1/keys", `{"role":"admin"}`, "Content-Type", httpapi.JSONType), 409, "")
	requireProblem(t, call(t, h, "DELETE", "/v1/keys/key_a", ""), 409, "")
}

func TestRejected(t *testing.T) {
	t.Parallel()
	f := apitest.NewBackend()
	h := httpapi.New(options(f))
	for path, want := range map[string]string{
		"/v1/rejected": "rejected  50 false",
		"/v1/rejected?cursor=5-0&limit=7&data=true": "rejected 5-0 7 true",
		"/v1/rejected?data=false":                   "rejected  50 false",
	} {
		rec := call(t, h, "GET", path, "")
		require.Equal(t, 200, rec.Code)
		require.JSONEq(t, `{"rejected":[]}`, rec.Body.String())
		require.Equal(t, want, f.Calls[len(f.Calls)-1])
	}
	requireProblem(t, call(t, h, "GET", "/v1/rejected?data=yes", ""), 422, "data")
	requireProblem(t, call(t, h, "GET", "/v1/rejected?limit=0", ""), 422, "limit")
}
