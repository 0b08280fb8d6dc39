package httpapi

import (
	"net/http/httptest"
	"net/url"
	"strings"
	"testing"

	"github.com/stretchr/testify/require"

	"github.com/bulkaction/bulkaction/api"
)

func TestListJobs(t *testing.T) {
	t.Parallel()
	f := newFakeBackend().withGroup("g")
	h := New(options(f))
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
	f := newFakeBackend().withGroup("g")
	f.onAppend = func(int) error { return &api.KeysTakenError{Jobs: []int{1, 3}} }
	rec := postJobs(t, New(options(f)), ndjson, `{"payload":1,"key":"a"}
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
	f := newFakeBackend().withGroup("g")
	h := New(options(f))
	post := func(query, body string) api.Appended {
		rec := call(t, h, "POST", "/v1/groups/g/jobs?"+query, body, "Content-Type", "text/csv")
		require.Equal(t, 200, rec.Code, rec.Body.String())
		return decode[api.Appended](t, rec)
	}
	got := post("key_column=id", "id,to\n7,a@example.com\n,b@example.com\n\"x\ty\",c@example.com\n")
	require.EqualValues(t, 2, got.Accepted)
	require.Equal(t, []api.LineError{{Line: 4, Error: "key must be 1 to 128 bytes of UTF-8 without control characters"}}, got.Rejected)
	require.Equal(t, []string{`{"id":"7","to":"a@example.com"}`, `{"id":"","to":"b@example.com"}`}, f.payloads("g"))
	require.Equal(t, "7", f.groups["g"].jobs[0].Key)

	requireProblem(t, call(t, h, "POST", "/v1/groups/g/jobs?key_column=nr", "id\n7\n", "Content-Type", "text/csv"), 422, "key_column")
	require.Equal(t, 422, call(t, h, "POST", "/v1/groups/g/jobs?key_column=id", "{}\n", "Content-Type", ndjson).Code)
}

func TestRetryChoice(t *testing.T) {
	t.Parallel()
	f := newFakeBackend().withGroup("g")
	h := New(options(f))
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
		require.Equal(t, want, f.retried, body)
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

func TestFailuresWithPayloads(t *testing.T) {
	t.Parallel()
	h := New(options(newFakeBackend().withGroup("g")))
	require.Contains(t, call(t, h, "GET", "/v1/groups/g/failures?payload=true", "").Body.String(), `"payload":{"to":"a"}`)
	require.NotContains(t, call(t, h, "GET", "/v1/groups/g/failures", "").Body.String(), "payload")
	requireProblem(t, call(t, h, "GET", "/v1/groups/g/failures?payload=yes", ""), 422, "payload")
}

func TestRejected(t *testing.T) {
	t.Parallel()
	f := newFakeBackend()
	h := New(options(f))
	for path, want := range map[string]string{
		"/v1/rejected": "rejected  50 false",
		"/v1/rejected?cursor=5-0&limit=7&data=true": "rejected 5-0 7 true",
		"/v1/rejected?data=false":                   "rejected  50 false",
	} {
		rec := call(t, h, "GET", path, "")
		require.Equal(t, 200, rec.Code)
		require.JSONEq(t, `{"rejected":[]}`, rec.Body.String())
		require.Equal(t, want, f.calls[len(f.calls)-1])
	}
	requireProblem(t, call(t, h, "GET", "/v1/rejected?data=yes", ""), 422, "data")
	requireProblem(t, call(t, h, "GET", "/v1/rejected?limit=0", ""), 422, "limit")
}
