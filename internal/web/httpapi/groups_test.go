package httpapi_test

import (
	"context"
	"encoding/json"
	"fmt"
	"io"
	"net/http"
	"net/http/httptest"
	"strings"
	"testing"
	"testing/synctest"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/bulkaction/bulkaction/api"
	"github.com/bulkaction/bulkaction/internal/access/auth"
	"github.com/bulkaction/bulkaction/internal/messages"
	"github.com/bulkaction/bulkaction/internal/testkit/apitest"
	"github.com/bulkaction/bulkaction/internal/web/httpapi"
	"github.com/bulkaction/bulkaction/internal/web/records"
)

const traceparent = "00-4bf92f3577b34da6a3ce929d0e0e4736-00f067aa0ba902b7-01"

func TestSubmit(t *testing.T) {
	f := apitest.NewBackend()
	h := httpapi.New(options(f))
	rec := call(t, h, "POST", "/v1/groups", `{"id":"promo","type":"NOOP","jobs":[{"payload":{"n":1}},{"payload":null}]}`,
		"Content-Type", "application/json; charset=UTF-8", "Traceparent", traceparent, "Idempotency-Key", "k-1")
	require.Equal(t, 202, rec.Code, rec.Body.String())
	a := decode[api.Accepted](t, rec)
	require.Equal(t, "promo", a.ID)
	require.Equal(t, api.StatusCreated, a.Status)
	require.Equal(t, "/v1/groups/promo", rec.Header().Get("Location"))
	require.Equal(t, map[string]string{"self": "/v1/groups/promo", "events": "/v1/groups/promo/events"}, a.Links)
	require.Equal(t, api.Counts{Accepted: 2, Waiting: 2}, a.Counts)
	require.Equal(t, []httpapi.SubmitOptions{{IdempotencyKey: "k-1", TraceParent: traceparent}}, f.Submits)
	require.Equal(t, []string{`{"n":1}`, `null`}, f.Payloads("promo"))

	require.Equal(t, 200, call(t, h, "GET", a.Links["self"], "").Code)
	again := call(t, h, "POST", "/v1/groups", `{"type":"NOOP"}`, "Content-Type", httpapi.JSONType, "Idempotency-Key", `"k-1"`)
	require.JSONEq(t, rec.Body.String(), again.Body.String(), "a key in quotes is the same key")
}

func TestSubmitWithoutIDGeneratesOne(t *testing.T) {
	f := apitest.NewBackend()
	h := httpapi.New(options(f))
	first := decode[api.Accepted](t, call(t, h, "POST", "/v1/groups", `{"type":"NOOP"}`, "Content-Type", httpapi.JSONType, "Traceparent", "malformed"))
	second := decode[api.Accepted](t, call(t, h, "POST", "/v1/groups", `{"type":"NOOP"}`, "Content-Type", httpapi.JSONType))
	require.NotEqual(t, first.ID, second.ID)
	require.Len(t, f.ByID, 2)
	require.Equal(t, httpapi.SubmitOptions{GeneratedID: true}, f.Submits[0], "a malformed traceparent counts as absent")
}

func TestLargeBodiesShareAMemoryBudget(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		s := httpapi.NewCalls(options(apitest.NewBackend()))
		large := `{"type":"NOOP"}` + strings.Repeat(" ", httpapi.SmallBody)
		require.True(t, s.TakeMemory())
		require.Equal(t, 202, call(t, s, "POST", "/v1/groups", `{"type":"NOOP"}`, "Content-Type", httpapi.JSONType).Code, "a small body needs no reserved memory")
		rec := call(t, s, "POST", "/v1/groups", large, "Content-Type", httpapi.JSONType)
		requireProblem(t, rec, 429, "")
		require.Equal(t, "1", rec.Header().Get("Retry-After"))

		time.AfterFunc(httpapi.BodyMemoryWait/2, func() { s.FreeMemory() })
		require.Equal(t, 202, call(t, s, "POST", "/v1/groups", large, "Content-Type", httpapi.JSONType).Code)
		require.True(t, s.TakeMemory(), "the memory is released after the request")
	})
}

func TestCommands(t *testing.T) {
	f := apitest.NewBackend().WithGroup("g")
	h := httpapi.New(options(f))
	total := int64(7)
	for _, c := range []struct{ target, body string }{
		{"/v1/groups/g/seal", ""}, {"/v1/groups/g/seal", " {} "}, {"/v1/groups/g/seal", `{"total":7}`},
		{"/v1/groups/g/cancel", ""}, {"/v1/groups/g/cancel", "{}"}, {"/v1/groups/g/retry", ""},
	} {
		rec := call(t, h, "POST", c.target, c.body, "Content-Type", httpapi.JSONType)
		require.Equal(t, 202, rec.Code, rec.Body.String())
		require.Equal(t, "/v1/groups/g", rec.Header().Get("Location"))
	}
	require.Equal(t, &total, f.SealedAt["g"])
	g := decode[api.Group](t, call(t, h, "GET", "/v1/groups/g", ""))
	require.True(t, g.Sealed)
	require.Equal(t, api.StatusCancelled, g.Status)
	require.Equal(t, 2, g.Round)
}

func TestCollectionsAreNeverNull(t *testing.T) {
	f := apitest.NewBackend().WithGroup("g")
	f.ByID["g"].View.Timestamps = nil
	h := httpapi.New(options(f))
	for _, target := range []string{"/v1/groups/g", "/v1/groups", "/v1/dead-letters", "/v1/stats"} {
		body := call(t, h, "GET", target, "").Body.String()
		require.NotContains(t, strings.ReplaceAll(body, `"eta_seconds":null`, ""), "null", target)
	}
	require.Contains(t, call(t, httpapi.New(options(apitest.NewBackend())), "GET", "/v1/groups", "").Body.String(), `"groups":[]`)
}

func TestListPassesOnItsQuery(t *testing.T) {
	f := apitest.NewBackend()
	h := httpapi.New(options(f))
	call(t, h, "GET", "/v1/groups", "")
	call(t, h, "GET", "/v1/groups?tenant=acme&status=running&cursor=c%2F1&limit=1000", "")
	call(t, h, "GET", "/v1/groups?type=MAIL&paused=false&failed_jobs=true&prefix=promo-&since=2026-01-02T15:04:05Z&tag=a=b%3Dc&tag=n=1", "")
	no, yes := false, true
	require.Equal(t, []messages.ListQuery{
		{Limit: 50}, {Tenant: "acme", Status: api.StatusRunning, Cursor: "c/1", Limit: 1000},
		{Type: "MAIL", Paused: &no, FailedJobs: &yes, Prefix: "promo-", Since: time.Date(2026, 1, 2, 15, 4, 5, 0, time.UTC), Tags: api.Tags{"a": "b=c", "n": "1"}, Limit: 50},
	}, f.Queries)
	for field, value := range map[string]string{
		"tenant": "a%20b", "status": "ODD", "type": "%7B", "paused": "maybe", "failed_jobs": "some", "prefix": "a%3A", "since": "yesterday", "limit": "0", "tag": "a%3D",
	} {
		rec := call(t, h, "GET", "/v1/groups?"+field+"="+value, "")
		require.Equal(t, 422, rec.Code, field)
		require.Contains(t, rec.Body.String(), `"field":"`+field+`"`)
	}
	for query, problem := range map[string]string{
		"tag=a=1&tag=a=2": "must name each key once", "tag=a": "must be KEY=VALUE", "tag=a%20b=1": "must be KEY=VALUE", "tag=a=%ff": "must be KEY=VALUE",
		strings.Repeat("tag=a=1&", 9): "must be given at most 8 times",
	} {
		rec := call(t, h, "GET", "/v1/groups?"+query, "")
		require.Equal(t, 422, rec.Code, query)
		require.Contains(t, rec.Body.String(), problem, query)
	}
	call(t, h, "GET", "/v1/dead-letters?limit=3", "")
	require.Equal(t, []int{3}, f.PageLimits)
}

func TestJob(t *testing.T) {
	h := httpapi.New(options(apitest.NewBackend()))
	call(t, h, "POST", "/v1/groups", `{"id":"g","type":"NOOP","jobs":[{"payload":1}]}`, "Content-Type", httpapi.JSONType)
	j := decode[api.Job](t, call(t, h, "GET", "/v1/groups/g/jobs/0", ""))
	require.Equal(t, api.Job{ID: "g.0", Group: "g", State: "waiting", Waiting: "fairness", Why: &api.Why{Reason: "fairness", Detail: "it waits"}}, j)
}

func TestResultsAndFailuresAreLines(t *testing.T) {
	const n = 5000
	f := apitest.NewBackend().WithGroup("g")
	f.OnResults = func(yield func([]byte) error) error {
		for i := range n {
			if err := yield(fmt.Appendf(nil, `{"ordinal":%d,"duration_ms":1.5,"attempts":1,"data":{"cost":2}}`, i)); err != nil {
				return err
			}
		}
		return nil
	}
	h := httpapi.New(options(f))
	rec := call(t, h, "GET", "/v1/groups/g/results", "")
	require.Equal(t, 200, rec.Code)
	require.Equal(t, "application/x-ndjson", rec.Header().Get("Content-Type"))
	lines := strings.Split(strings.TrimSuffix(rec.Body.String(), "\n"), "\n")
	require.Len(t, lines, n)
	var last api.Result
	require.NoError(t, json.Unmarshal([]byte(lines[n-1]), &last))
	require.EqualValues(t, n-1, last.Ordinal)
	requireSchema(t, "Result", []byte(lines[0]))

	lines = strings.Split(strings.TrimSuffix(call(t, h, "GET", "/v1/groups/g/failures", "").Body.String(), "\n"), "\n")
	require.Len(t, lines, 2)
	requireSchema(t, "Failure", []byte(lines[1]))

	f.OnResults = nil
	rec = call(t, h, "GET", "/v1/groups/g/results", "")
	require.Equal(t, 200, rec.Code)
	require.Empty(t, rec.Body.String())
}

func TestResultsThatFail(t *testing.T) {
	f := apitest.NewBackend().WithGroup("g")
	line := []byte(`"` + strings.Repeat("x", 1000) + `"`)
	failAfter := func(n int) func(func([]byte) error) error {
		return func(yield func([]byte) error) error {
			for range n {
				if err := yield(line); err != nil {
					return err
				}
			}
			return fmt.Errorf("read results: %w", api.ErrUnavailable)
		}
	}
	f.OnResults = failAfter(2)
	requireProblem(t, call(t, httpapi.New(options(f)), "GET", "/v1/groups/g/results", ""), 503, "")

	f.OnResults = failAfter(1000)
	srv := httptest.NewServer(httpapi.New(options(f)))
	defer srv.Close()
	resp, err := srv.Client().Get(srv.URL + "/v1/groups/g/results")
	require.NoError(t, err)
	defer resp.Body.Close()
	_, err = io.ReadAll(resp.Body)
	require.Error(t, err, "an incomplete answer must not look complete")
}

func TestDeadLetterFilters(t *testing.T) {
	f := apitest.NewBackend()
	h := httpapi.New(options(f))
	call(t, h, "GET", "/v1/dead-letters?tenant=a&group=g&type=T&code=X&since=2026-01-02T15:04:05Z&cursor=1-2&limit=7", "")
	require.Equal(t, []messages.DeadLetterQuery{{
		Tenant: "a", Group: "g", Type: "T", Code: "X", Since: time.Date(2026, 1, 2, 15, 4, 5, 0, time.UTC), Cursor: "1-2", Limit: 7,
	}}, f.Letters)
	for query, field := range map[string]string{
		"tenant=%7B": "tenant", "group=a%20b": "group", "type=:": "type", "since=yesterday": "since",
		"since=1969-01-01T00:00:00Z": "since", "code=" + strings.Repeat("x", 129): "code",
	} {
		requireProblem(t, call(t, h, "GET", "/v1/dead-letters?"+query, ""), 422, field)
	}
	require.Len(t, f.Letters, 1)
}

// fakeUI makes a console for tests. It calls what the API offers to the console, answers with "page "
// and the request's body, and panics at /ui/panic.
func fakeUI(api httpapi.Shared) http.Handler {
	return http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		if r.URL.Path == "/ui/panic" {
			panic("a fault")
		}
		who := auth.Principal{KeyID: "key_1"}
		_ = api.CountRequest(r, who)
		end, err := api.BeginAppend(r, who)
		if err != nil {
			panic(err)
		}
		defer end()
		w.Header().Set("Cache-Control", "public")
		body, _ := io.ReadAll(r.Body)
		_, _ = w.Write(append([]byte("page "), body...))
	})
}

func ask(h http.Handler, method, path, accept string) *httptest.ResponseRecorder {
	r := httptest.NewRequest(method, path, strings.NewReader("x")) //nolint:noctx // a test of the answer alone
	r.Header.Set("Accept", accept)
	w := httptest.NewRecorder()
	h.ServeHTTP(w, r)
	return w
}

// TestUI: the console's own Cache-Control is kept, and a request id is added. A panic leads to 500,
// a request from another site to 403, and another host's name to 421.
func TestUI(t *testing.T) {
	t.Parallel()
	h := httpapi.New(httpapi.Options{Backend: apitest.NewBackend(), UI: fakeUI})
	answer := ask(h, http.MethodPost, "/ui/x", "")
	require.Equal(t, "page x", answer.Body.String())
	require.Equal(t, "public", answer.Header().Get("Cache-Control"))
	require.NotEmpty(t, answer.Header().Get("X-Request-Id"))
	require.Equal(t, http.StatusInternalServerError, ask(h, http.MethodGet, "/ui/panic", "").Code)

	r := httptest.NewRequestWithContext(t.Context(), http.MethodPost, "/ui/x", nil)
	r.Header.Set("Sec-Fetch-Site", "cross-site")
	w := httptest.NewRecorder()
	h.ServeHTTP(w, r)
	require.Equal(t, http.StatusForbidden, w.Code)

	local := httpapi.NewServer("127.0.0.1:1", httpapi.Options{Backend: apitest.NewBackend(), UI: fakeUI})
	t.Cleanup(func() { local.Stop(0) })
	require.Equal(t, http.StatusMisdirectedRequest, ask(local.Handler, http.MethodGet, "/ui/x", "").Code)
}

// TestRoot: GET / leads a browser to the console with 303, and gives a program the index, and a
// browser if there is no console.
func TestRoot(t *testing.T) {
	t.Parallel()
	const browser = "text/html,application/xhtml+xml,*/*;q=0.8"
	for name, c := range map[string]struct {
		opt              httpapi.Options
		accept           string
		root, groups, ui int
	}{
		"browser":     {httpapi.Options{UI: fakeUI}, browser, 303, 200, 200},
		"program":     {httpapi.Options{UI: fakeUI}, "*/*", 200, 200, 200},
		"only the UI": {httpapi.Options{UI: fakeUI, OnlyUI: true}, browser, 303, 404, 200},
		"no UI":       {httpapi.Options{}, browser, 200, 200, 404},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			c.opt.Backend = apitest.NewBackend()
			h := httpapi.New(c.opt)
			answer := ask(h, http.MethodGet, "/", c.accept)
			require.Equal(t, c.root, answer.Code)
			if c.root == 303 {
				require.Equal(t, "/ui/", answer.Header().Get("Location"))
			}
			require.Equal(t, c.groups, ask(h, http.MethodGet, "/v1/groups", "").Code)
			require.Equal(t, c.ui, ask(h, http.MethodGet, "/ui/", "").Code)
		})
	}
}

// TestAppendAll: AppendAll stores 600 rows of CSV in two batches, and rejects line 602, which has
// two fields. For an unknown group or without the key's column it returns an error.
func TestAppendAll(t *testing.T) {
	t.Parallel()
	b := apitest.NewBackend().WithGroup("g")
	text := "to\n" + strings.Repeat("a\n", 600) + "b,c\n"
	answer, err := httpapi.AppendAll(context.Background(), b, messages.Decoder{}, httpapi.Load{Group: "g", CSV: true, Text: strings.NewReader(text)})
	require.NoError(t, err)
	require.EqualValues(t, 600, answer.Accepted)
	require.EqualValues(t, 602, answer.Rejected[0].Line)
	require.Len(t, b.Appends, 2)
	require.Len(t, b.Payloads("g"), 600)
	_, err = httpapi.AppendAll(context.Background(), b, messages.Decoder{}, httpapi.Load{Group: "unknown", Text: strings.NewReader(`{"payload":1}`)})
	require.ErrorContains(t, err, "not found")
	_, err = httpapi.AppendAll(context.Background(), b, messages.Decoder{}, httpapi.Load{Group: "g", CSV: true, Table: records.TableOptions{Key: "id"}, Text: strings.NewReader("to\n")})
	require.Error(t, err)
}
