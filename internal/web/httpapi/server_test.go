package httpapi_test

import (
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"log/slog"
	"net"
	"net/http"
	"net/http/httptest"
	"os"
	"strings"
	"sync"
	"testing"
	"testing/synctest"
	"time"

	"github.com/stretchr/testify/require"
	"go.uber.org/goleak"

	"github.com/bulkaction/bulkaction/api"
	"github.com/bulkaction/bulkaction/internal/messages"
	"github.com/bulkaction/bulkaction/internal/testkit/apitest"
	"github.com/bulkaction/bulkaction/internal/testkit/redistest"
	"github.com/bulkaction/bulkaction/internal/web/httpapi"
)

func TestMain(m *testing.M) { goleak.VerifyTestMain(m, redistest.IgnoreServers()) }

func options(b httpapi.Backend) httpapi.Options {
	return httpapi.Options{Backend: b, Decoder: messages.Decoder{Now: time.Now}, Version: "1.2.3"}
}

// call sends a request to the handler and checks the answer against the OpenAPI document.
func call(t *testing.T, h http.Handler, method, target, body string, header ...string) *httptest.ResponseRecorder {
	t.Helper()
	var in io.Reader = http.NoBody
	if body != "" {
		in = strings.NewReader(body)
	}
	req := httptest.NewRequest(method, target, in)
	for i := 0; i < len(header); i += 2 {
		req.Header.Add(header[i], header[i+1])
	}
	rec := httptest.NewRecorder()
	h.ServeHTTP(rec, req)
	requireDocumented(t, req, rec)
	return rec
}

func decode[T any](t *testing.T, rec *httptest.ResponseRecorder) T {
	t.Helper()
	var v T
	dec := json.NewDecoder(bytes.NewReader(rec.Body.Bytes()))
	dec.DisallowUnknownFields()
	require.NoError(t, dec.Decode(&v), rec.Body.String())
	return v
}

func requireProblem(t *testing.T, rec *httptest.ResponseRecorder, status int, field string) api.Problem {
	t.Helper()
	require.Equal(t, status, rec.Code, rec.Body.String())
	require.Equal(t, "application/problem+json", rec.Header().Get("Content-Type"))
	p := decode[api.Problem](t, rec)
	require.Equal(t, status, p.Status)
	require.Equal(t, status, p.Code.Status(), p.Code)
	require.Equal(t, p.Code.URI(), p.Type)
	require.Equal(t, http.StatusText(status), p.Title)
	require.NotEmpty(t, p.Detail)
	if field != "" {
		require.NotEmpty(t, p.Fields)
		require.Equal(t, field, p.Fields[0].Field)
	}
	return p
}

// statusOfBad returns the status that a bad body must get: 422 if it is JSON or empty, otherwise
// 400.
func statusOfBad(body string) int {
	if strings.TrimSpace(body) != "" && !json.Valid([]byte(body)) {
		return http.StatusBadRequest
	}
	return http.StatusUnprocessableEntity
}

func TestEveryErrorHasItsStatus(t *testing.T) {
	for name, c := range map[string]struct {
		err        error
		status     int
		retryAfter string
	}{
		"not found":          {fmt.Errorf("cancel group g: %w", api.ErrNotFound), 404, ""},
		"conflict":           {fmt.Errorf("cancel group g: has completed: %w", api.ErrConflict), 409, ""},
		"sealed":             {fmt.Errorf("append: %w", api.ErrSealed), 409, ""},
		"invalid":            {fmt.Errorf("list: %w", api.ErrInvalid), 422, ""},
		"backpressure":       {fmt.Errorf("submit: %w", &api.BackpressureError{RetryAfter: 2100 * time.Millisecond, Reason: "backlog"}), 429, "3"},
		"short backpressure": {&api.BackpressureError{RetryAfter: time.Millisecond}, 429, "1"},
		"plain backpressure": {api.ErrBackpressure, 429, "1"},
		"unavailable":        {fmt.Errorf("dial 127.0.0.1:1: %w", api.ErrUnavailable), 503, "1"},
		"too slow":           {fmt.Errorf("submit: %w", context.DeadlineExceeded), 503, "1"},
		"unexpected":         {errors.New("WRONGTYPE secret-payload"), 500, ""},
	} {
		t.Run(name, func(t *testing.T) {
			f := apitest.NewBackend()
			f.Err = c.err
			rec := call(t, httpapi.New(options(f)), "POST", "/v1/groups/g/cancel", "")
			p := requireProblem(t, rec, c.status, "")
			require.Equal(t, c.retryAfter, rec.Header().Get("Retry-After"))
			if c.status >= 500 {
				require.NotContains(t, p.Detail, "127.0.0.1")
				require.NotContains(t, p.Detail, "secret-payload")
			} else {
				require.Equal(t, strings.TrimSuffix(c.err.Error(), ": conflict"), p.Detail)
			}
		})
	}
}

func TestRefusedRequests(t *testing.T) {
	for name, c := range map[string]struct {
		method, target, body string
		header               []string
		status               int
		field                string
	}{
		"unknown path":         {"GET", "/v1/nothing", "", nil, 404, ""},
		"trailing slash":       {"GET", "/v1/groups/", "", nil, 404, ""},
		"unknown command":      {"POST", "/v1/groups/g/rewind", "", nil, 404, ""},
		"unknown group":        {"GET", "/v1/groups/none", "", nil, 404, ""},
		"unknown results":      {"GET", "/v1/groups/none/results", "", nil, 404, ""},
		"unknown failures":     {"GET", "/v1/groups/none/failures", "", nil, 404, ""},
		"unknown events":       {"GET", "/v1/groups/none/events", "", nil, 404, ""},
		"unknown job":          {"GET", "/v1/groups/g/jobs/7", "", nil, 404, ""},
		"hostile id":           {"GET", "/v1/groups/a%2F..%2Fb", "", nil, 422, "id"},
		"dots as id":           {"GET", "/v1/groups/%2E%2E", "", nil, 422, "id"},
		"hash tag in id":       {"GET", "/v1/groups/%7Bx%7D", "", nil, 422, "id"},
		"long id":              {"GET", "/v1/groups/" + strings.Repeat("x", 129), "", nil, 422, "id"},
		"new line in id":       {"POST", "/v1/groups/a%0Ab/seal", "", nil, 422, "id"},
		"hostile id, events":   {"GET", "/v1/groups/%00/events", "", nil, 422, "id"},
		"hostile id, results":  {"GET", "/v1/groups/%00/results", "", nil, 422, "id"},
		"hostile id, failures": {"GET", "/v1/groups/%00/failures", "", nil, 422, "id"},
		"hostile id, append":   {"POST", "/v1/groups/%00/jobs", "", nil, 422, "id"},
		"hostile id, job":      {"GET", "/v1/groups/%00/jobs/1", "", nil, 422, "id"},
		"hostile id, cancel":   {"POST", "/v1/groups/%00/cancel", "", nil, 422, "id"},
		"negative ordinal":     {"GET", "/v1/groups/g/jobs/-1", "", nil, 422, "ordinal"},
		"huge ordinal":         {"GET", "/v1/groups/g/jobs/9223372036854775808", "", nil, 422, "ordinal"},
		"bad tenant":           {"GET", "/v1/groups?tenant=%7B", "", nil, 422, "tenant"},
		"bad status":           {"GET", "/v1/groups?status=SLEEPING", "", nil, 422, "status"},
		"limit 0":              {"GET", "/v1/groups?limit=0", "", nil, 422, "limit"},
		"limit 1001":           {"GET", "/v1/dead-letters?limit=1001", "", nil, 422, "limit"},
		"long cursor":          {"GET", "/v1/dead-letters?cursor=" + strings.Repeat("x", 513), "", nil, 422, "cursor"},
		"stale cursor":         {"GET", "/v1/dead-letters?cursor=stale", "", nil, 422, ""},
		"unknown parameter":    {"GET", "/v1/groups?statuss=FAILED", "", nil, 400, "statuss"},
		"repeated status":      {"GET", "/v1/groups?status=FAILED&status=RUNNING", "", nil, 400, "status"},
		"repeated limit":       {"GET", "/v1/dead-letters?limit=2&limit=2", "", nil, 400, "limit"},
		"repeated delimiter":   {"POST", "/v1/groups/g/jobs?delimiter=,&delimiter=%3B", "a\n", []string{"Content-Type", "text/csv"}, 400, "delimiter"},
		"no header row":        {"POST", "/v1/groups/g/jobs", "a@example.com\n", []string{"Content-Type", "text/csv; header=absent"}, 415, ""},
		"header of NDJSON":     {"POST", "/v1/groups/g/jobs", "{}\n", []string{"Content-Type", "application/x-ndjson; header=present"}, 415, ""},
		"parameter of a type":  {"POST", "/v1/groups", `{}`, []string{"Content-Type", httpapi.JSONType + "; version=2"}, 415, ""},
		"no parameters":        {"GET", "/v1/groups/g?verbose=1", "", nil, 400, "verbose"},
		"parameter of POST":    {"POST", "/v1/groups/g/cancel?force=1", "", nil, 400, "force"},
		"parameter of events":  {"GET", "/v1/groups/g/events?after=1.2", "", nil, 400, "after"},
		"malformed query":      {"GET", "/v1/groups?tenant=%zz", "", nil, 400, ""},
		"no content type":      {"POST", "/v1/groups", `{}`, nil, 415, ""},
		"form":                 {"POST", "/v1/groups", `{}`, []string{"Content-Type", "text/plain"}, 415, ""},
		"latin-1":              {"POST", "/v1/groups", `{}`, []string{"Content-Type", httpapi.JSONType + "; charset=latin1"}, 415, ""},
		"compressed":           {"POST", "/v1/groups", `{}`, []string{"Content-Type", httpapi.JSONType, "Content-Encoding", "gzip"}, 415, ""},
		"append as JSON":       {"POST", "/v1/groups/g/jobs", `{}`, []string{"Content-Type", httpapi.JSONType}, 415, ""},
		"seal as text":         {"POST", "/v1/groups/g/seal", `{"total":1}`, []string{"Content-Type", "text/plain"}, 415, ""},
		"malformed":            {"POST", "/v1/groups", `{"type":`, []string{"Content-Type", httpapi.JSONType}, 400, ""},
		"no type":              {"POST", "/v1/groups", `{}`, []string{"Content-Type", httpapi.JSONType}, 422, "type"},
		"bad key":              {"POST", "/v1/groups", `{"type":"T"}`, []string{"Content-Type", httpapi.JSONType, "Idempotency-Key", "a b"}, 422, "Idempotency-Key"},
		"two keys":             {"POST", "/v1/groups", `{"type":"T"}`, []string{"Content-Type", httpapi.JSONType, "Idempotency-Key", "a", "Idempotency-Key", "b"}, 422, "Idempotency-Key"},
		"empty key":            {"POST", "/v1/groups", `{"type":"T"}`, []string{"Content-Type", httpapi.JSONType, "Idempotency-Key", ""}, 422, "Idempotency-Key"},
		"bad key, append":      {"POST", "/v1/groups/g/jobs", `{}`, []string{"Content-Type", "text/csv", "Idempotency-Key", "{ }"}, 422, "Idempotency-Key"},
		"negative total":       {"POST", "/v1/groups/g/seal", `{"total":-1}`, []string{"Content-Type", httpapi.JSONType}, 422, "total"},
		"unknown seal field":   {"POST", "/v1/groups/g/seal", `{"totl":1}`, []string{"Content-Type", httpapi.JSONType}, 422, "totl"},
		"two values":           {"POST", "/v1/groups/g/seal", `{} {}`, []string{"Content-Type", httpapi.JSONType}, 400, "body"},
		"bracket behind":       {"POST", "/v1/groups/g/seal", `{}]`, []string{"Content-Type", httpapi.JSONType}, 400, "body"},
		"brace behind":         {"POST", "/v1/groups/g/cancel", `{}}`, []string{"Content-Type", httpapi.JSONType}, 400, "body"},
		"cancel with fields":   {"POST", "/v1/groups/g/cancel", `{"force":true}`, []string{"Content-Type", httpapi.JSONType}, 422, "force"},
		"other origin":         {"POST", "/v1/groups/g/cancel", "", []string{"Origin", "https://evil.example"}, 403, ""},
		"other site":           {"POST", "/v1/groups/g/cancel", "", []string{"Sec-Fetch-Site", "cross-site"}, 403, ""},
		"same id":              {"POST", "/v1/groups", `{"id":"g","type":"T"}`, []string{"Content-Type", httpapi.JSONType}, 409, ""},
		"large payload": {"POST", "/v1/groups", `{"type":"T","jobs":[{"payload":"` + strings.Repeat("x", messages.MaxPayloadBytes) + `"}]}`,
			[]string{"Content-Type", httpapi.JSONType}, 413, "jobs[0].payload"},
		"large body": {"POST", "/v1/groups", strings.Repeat(" ", messages.MaxMessageBytes+1), []string{"Content-Type", httpapi.JSONType}, 413, ""},
		"large seal": {"POST", "/v1/groups/g/seal", strings.Repeat(" ", httpapi.SmallBody+1), []string{"Content-Type", httpapi.JSONType}, 413, ""},
	} {
		t.Run(name, func(t *testing.T) {
			rec := call(t, httpapi.New(options(apitest.NewBackend().WithGroup("g"))), c.method, c.target, c.body, c.header...)
			requireProblem(t, rec, c.status, c.field)
		})
	}
}

func TestMethodNotAllowedNamesTheMethods(t *testing.T) {
	h := httpapi.New(options(apitest.NewBackend().WithGroup("g")))
	for target, allow := range map[string]string{
		"/v1/groups": "GET, HEAD, POST", "/v1/groups/g/seal": "POST", "/v1/groups/g/events": "GET", "/": "GET, HEAD",
	} {
		rec := call(t, h, "DELETE", target, "")
		requireProblem(t, rec, 405, "")
		require.Equal(t, allow, rec.Header().Get("Allow"), target)
	}
	require.Equal(t, "DELETE, GET, HEAD", call(t, h, "POST", "/v1/groups/g", "").Header().Get("Allow"))
	require.Equal(t, 200, call(t, h, "HEAD", "/v1/groups/g", "").Code)
	require.Equal(t, 405, call(t, h, "HEAD", "/v1/groups/g/events", "").Code)
}

func TestSameOriginPageMayWrite(t *testing.T) {
	h := httpapi.New(options(apitest.NewBackend().WithGroup("g")))
	require.Equal(t, 202, call(t, h, "POST", "/v1/groups/g/cancel", "", "Origin", "http://example.com").Code)
	require.Equal(t, 200, call(t, h, "GET", "/v1/groups/g", "", "Origin", "https://evil.example").Code)
}

func TestLoopbackServerServesLoopbackHostsOnly(t *testing.T) {
	get := func(addr, host string) int {
		req := httptest.NewRequest("GET", "/", nil)
		req.Host = host
		rec := httptest.NewRecorder()
		httpapi.NewServer(addr, options(apitest.NewBackend())).Handler.ServeHTTP(rec, req)
		return rec.Code
	}
	for _, addr := range []string{"127.0.0.1:8080", "localhost:0", "[::1]:8080"} {
		for _, host := range []string{"localhost", "LOCALHOST:9", "127.0.0.1", "127.0.0.1:8080", "[::1]", "[::1]:1", "[::ffff:127.0.0.1]:1"} {
			require.Equal(t, 200, get(addr, host), "%s on %s", host, addr)
		}
		for _, host := range []string{"", "evil.example", "evil.example:8080", "localhost.evil.example", "192.0.2.1", "127.0.0.1.nip.io", "[::2]:1"} {
			require.Equal(t, 421, get(addr, host), "%q on %s", host, addr)
		}
	}
	for _, addr := range []string{":8080", "0.0.0.0:8080", "192.0.2.1:80", "[::]:80"} {
		require.Equal(t, 200, get(addr, "bulk.example"), addr)
	}
}

func TestServerHasLimits(t *testing.T) {
	srv := httpapi.NewServer("127.0.0.1:0", options(apitest.NewBackend()))
	require.Equal(t, "127.0.0.1:0", srv.Addr)
	require.Positive(t, srv.ReadHeaderTimeout)
	require.Positive(t, srv.IdleTimeout)
	require.Positive(t, srv.MaxHeaderBytes)
	require.Equal(t, 100, srv.HTTP2.MaxConcurrentStreams)
	require.Zero(t, srv.ReadTimeout, "a read timeout would end streamed bodies")
	require.Zero(t, srv.WriteTimeout, "a write timeout would end streamed answers")
}

func TestHeadersOfEveryAnswer(t *testing.T) {
	h := httpapi.New(options(apitest.NewBackend()))
	rec := call(t, h, "GET", "/", "", "X-Request-Id", "abc-1")
	require.Equal(t, "abc-1", rec.Header().Get("X-Request-Id"))
	require.Equal(t, "nosniff", rec.Header().Get("X-Content-Type-Options"))
	rec = call(t, h, "GET", "/v1/none", "", "X-Request-Id", "not an id")
	require.Regexp(t, `^[0-9a-f-]{36}$`, rec.Header().Get("X-Request-Id"))
	require.Equal(t, "nosniff", rec.Header().Get("X-Content-Type-Options"))
}

func TestIndexLinksWork(t *testing.T) {
	h := httpapi.New(options(apitest.NewBackend()))
	index := decode[struct {
		Name, Version string
		Links         map[string]string
	}](t, call(t, h, "GET", "/", ""))
	require.Equal(t, "bulkaction", index.Name)
	require.Equal(t, "1.2.3", index.Version)
	for _, link := range index.Links {
		require.Equal(t, 200, call(t, h, "GET", link, "").Code, link)
	}
}

// panickingBackend is a backend that panics in Groups, and in Results after the first line.
type panickingBackend struct{ *apitest.Backend }

func (p panickingBackend) Groups(context.Context, messages.ListQuery) (api.GroupList, error) {
	panic("secret-payload")
}

func (p panickingBackend) Results(_ context.Context, _ string, yield func([]byte) error) error {
	line := bytes.Repeat([]byte("x"), httpapi.StreamBuffer)
	if err := yield(line); err != nil {
		return err
	}
	_ = line[len(line)+int(line[0])]
	return nil
}

func TestPanicIsRecoveredAndLoggedWithoutPayload(t *testing.T) {
	var log lockedBuffer
	opt := options(panickingBackend{apitest.NewBackend()})
	opt.Log = slog.New(slog.NewTextHandler(&log, &slog.HandlerOptions{Level: slog.LevelDebug}))
	srv := httptest.NewServer(httpapi.New(opt))
	defer srv.Close()

	requireProblem(t, call(t, httpapi.New(opt), "GET", "/v1/groups", ""), 500, "")
	require.Contains(t, log.String(), "handler panicked")
	require.NotContains(t, log.String(), "secret-payload")

	resp, err := srv.Client().Get(srv.URL + "/v1/groups/g/results")
	require.NoError(t, err)
	defer resp.Body.Close()
	_, err = io.ReadAll(resp.Body)
	require.Error(t, err, "an incomplete answer must not look complete")
	require.Contains(t, log.String(), "index out of range")
}

func TestAccessLogIsAtDebugLevel(t *testing.T) {
	for level, want := range map[slog.Level]string{slog.LevelDebug: "request served", slog.LevelInfo: ""} {
		var log lockedBuffer
		opt := options(apitest.NewBackend())
		opt.Log = slog.New(slog.NewTextHandler(&log, &slog.HandlerOptions{Level: level}))
		call(t, httpapi.New(opt), "POST", "/v1/groups", `{"type":"T","jobs":[{"payload":"secret-payload"}]}`, "Content-Type", httpapi.JSONType, "X-Request-Id", "r-1")
		require.NotContains(t, log.String(), "secret-payload")
		if want == "" {
			require.Empty(t, log.String())
			continue
		}
		require.Contains(t, log.String(), want)
		require.Contains(t, log.String(), "request_id=r-1 method=POST path=/v1/groups status=202")
	}
}

// lockedBuffer is a buffer to which the server's goroutines may write while the test reads it.
type lockedBuffer struct {
	mu  sync.Mutex
	buf bytes.Buffer
}

func (b *lockedBuffer) Write(p []byte) (int, error) {
	b.mu.Lock()
	defer b.mu.Unlock()
	return b.buf.Write(p)
}

func (b *lockedBuffer) String() string {
	b.mu.Lock()
	defer b.mu.Unlock()
	return b.buf.String()
}

// TestExampleOfProblems: the first JSON example in docs/problems.md is what the server answers to a
// seal with the total -1.
func TestExampleOfProblems(t *testing.T) {
	text, err := os.ReadFile("../../../docs/problems.md")
	require.NoError(t, err)
	_, example, _ := strings.Cut(string(text), "```json\n")
	example, _, _ = strings.Cut(example, "```")
	rec := call(t, httpapi.New(options(apitest.NewBackend().WithGroup("g"))), "POST", "/v1/groups/g/seal", `{"total":-1}`, "Content-Type", httpapi.JSONType)
	require.JSONEq(t, example, rec.Body.String())
}

// TestSlowBodyMayTakeLongWhileItMoves: a body of four batches with pauses of idleTimeout less 1 s
// gets 200. With pauses of idleTimeout and 1 s, it gets 408.
func TestSlowBodyMayTakeLongWhileItMoves(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		f := apitest.NewBackend().WithGroup("g")
		client := serve(t, httpapi.New(options(f)))
		post := func(pause time.Duration) (int, string) {
			in, out := io.Pipe()
			var writer sync.WaitGroup
			defer writer.Wait()
			defer in.Close()
			writer.Go(func() {
				for range 4 {
					if _, err := io.WriteString(out, numbered(httpapi.MaxBatchLines)); err != nil {
						return
					}
					<-time.After(pause)
				}
				out.Close()
			})
			resp, err := client.Post("http://localhost/v1/groups/g/jobs", ndjson, in)
			require.NoError(t, err)
			defer resp.Body.Close()
			body, err := io.ReadAll(resp.Body)
			require.NoError(t, err)
			return resp.StatusCode, string(body)
		}
		code, body := post(httpapi.IdleTimeout - time.Second)
		require.Equal(t, 200, code, body)
		require.Contains(t, body, `"accepted":2000`)

		code, body = post(httpapi.IdleTimeout + time.Second)
		require.Equal(t, 408, code, body)
		require.Contains(t, body, `"accepted":0`)
	})
}

// TestProblemDoesNotWaitForTheBody: an error that does not depend on the body (404, 405, 415, 422)
// is answered at once while the client sends no body. To cancel a group gets 408, later.
func TestProblemDoesNotWaitForTheBody(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		srv := httpapi.NewServer("127.0.0.1:0", options(apitest.NewBackend()))
		client := serveOn(t, srv.Server)
		for target, status := range map[string]int{
			"/v1/nothing": 404, "/v1/stats": 405, "/v1/groups": 415, "/v1/groups/%00/jobs": 422, "/v1/groups/g/cancel": 408,
		} {
			in, _ := io.Pipe()
			start := time.Now()
			resp, err := client.Post("http://localhost"+target, "", in)
			require.NoError(t, err)
			require.Equal(t, status, resp.StatusCode, target)
			if status != 408 {
				require.Equal(t, start, time.Now(), target)
			}
			require.NoError(t, resp.Body.Close())
			require.NoError(t, in.Close())
		}
	})
}

// TestSlowStoreIsNotCutOffByTheBodysDeadline: the read deadline of a body must not end a request
// whose body is complete but whose store is slow. A store slower than storeTimeout leads to 503.
func TestSlowStoreIsNotCutOffByTheBodysDeadline(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		f := apitest.NewBackend().WithGroup("g")
		client := serve(t, httpapi.New(options(slowStore{f, httpapi.StoreTimeout - time.Second})))
		resp, err := client.Post("http://localhost/v1/groups/g/jobs", ndjson, strings.NewReader(numbered(3*httpapi.MaxBatchLines)))
		require.NoError(t, err)
		defer resp.Body.Close()
		require.Equal(t, 200, resp.StatusCode)

		client = serve(t, httpapi.New(options(slowStore{f, httpapi.StoreTimeout + time.Second})))
		resp, err = client.Post("http://localhost/v1/groups/g/cancel", httpapi.JSONType, strings.NewReader("{}"))
		require.NoError(t, err)
		defer resp.Body.Close()
		require.Equal(t, 503, resp.StatusCode)
	})
}

type slowStore struct {
	*apitest.Backend
	delay time.Duration
}

func (s slowStore) Append(ctx context.Context, id string, jobs []messages.Job, opt httpapi.AppendOptions) error {
	<-time.After(s.delay)
	return s.Backend.Append(ctx, id, jobs, opt)
}

func (s slowStore) Cancel(ctx context.Context, _ string) (api.Accepted, error) {
	select {
	case <-ctx.Done():
		return api.Accepted{}, fmt.Errorf("cancel group: %w", ctx.Err())
	case <-time.After(s.delay):
		return api.Accepted{}, nil
	}
}

// TestStoreFinishesWhenTheClientLeaves: the store finishes a retry although its client leaves after
// one second.
func TestStoreFinishesWhenTheClientLeaves(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		stored := make(chan error, 1)
		client := serve(t, httpapi.New(options(slowRetryBackend{apitest.NewBackend(), stored})))
		ctx, cancel := context.WithTimeout(t.Context(), time.Second)
		defer cancel()
		req, err := http.NewRequestWithContext(ctx, "POST", "http://localhost/v1/groups/g/retry", nil)
		require.NoError(t, err)
		resp, err := client.Do(req)
		if err == nil {
			resp.Body.Close()
		}
		require.ErrorIs(t, err, context.DeadlineExceeded)
		require.NoError(t, <-stored)
	})
}

type slowRetryBackend struct {
	*apitest.Backend
	stored chan error
}

func (b slowRetryBackend) Retry(ctx context.Context, _ string, _ api.RetryChoice) (api.Accepted, error) {
	<-time.After(2 * time.Second)
	b.stored <- ctx.Err()
	return api.Accepted{}, nil
}

// TestClientThatDoesNotReadIsDisconnected: if a client does not read the results that it has asked
// for, writing them fails after idleTimeout.
func TestClientThatDoesNotReadIsDisconnected(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		f := apitest.NewBackend().WithGroup("g")
		ended := make(chan error, 1)
		f.OnResults = func(yield func([]byte) error) error {
			for {
				if err := yield([]byte(`{"ordinal":1,"duration_ms":1,"attempts":1,"data":null}`)); err != nil {
					ended <- err
					return err
				}
			}
		}
		client := serve(t, httpapi.New(options(f)))
		resp, err := client.Get("http://localhost/v1/groups/g/results")
		require.NoError(t, err)
		defer resp.Body.Close()
		start := time.Now()
		require.Error(t, <-ended)
		require.Equal(t, httpapi.IdleTimeout, time.Since(start))
	})
}

// TestStopEndsStreams: a stopping server ends an event stream, and answers a streamed append with
// 503, in less than a second, although their clients go on.
func TestStopEndsStreams(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		f := showingGroup(groupInStates(1, created)).WithGroup("g")
		srv := httpapi.NewServer("127.0.0.1:0", options(f))
		client := serveOn(t, srv.Server)
		events, err := client.Get("http://localhost/v1/groups/g/events")
		require.NoError(t, err)
		defer events.Body.Close()
		require.Len(t, readEvents(t, events.Body, 1), 1)

		in, out := io.Pipe()
		defer in.Close()
		answered := make(chan string, 1)
		go func() {
			resp, err := client.Post("http://localhost/v1/groups/g/jobs", ndjson, in)
			if err != nil {
				answered <- err.Error()
				return
			}
			body, _ := io.ReadAll(resp.Body)
			resp.Body.Close()
			answered <- resp.Status + string(body)
		}()
		_, err = io.WriteString(out, numbered(httpapi.MaxBatchLines+1))
		require.NoError(t, err)

		synctest.Wait() // net/http drops a request that no handler has begun

		start := time.Now()
		srv.Stop(time.Hour)
		require.Less(t, time.Since(start), time.Second)
		_, err = io.ReadAll(events.Body)
		require.Error(t, err, "a watch that the server ends must not look like the group's end")
		answer := <-answered
		require.Contains(t, answer, "503")
		require.Contains(t, answer, `"accepted":500`)
		require.NoError(t, out.Close())
	})
}

// TestStopWaitsForRequests: for a request that takes 10 s, a stopping server waits with a grace
// period of 20 s, and answers it with 503 at the end of one of 7 s.
func TestStopWaitsForRequests(t *testing.T) {
	for name, c := range map[string]struct {
		grace  time.Duration
		status int
	}{"within": {20 * time.Second, 202}, "beyond": {7 * time.Second, 503}} {
		t.Run(name, func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) {
				srv := httpapi.NewServer("127.0.0.1:0", options(slowStore{apitest.NewBackend(), 10 * time.Second}))
				client := serveOn(t, srv.Server)
				answered := make(chan int, 1)
				go func() {
					resp, err := client.Post("http://localhost/v1/groups/g/cancel", "", nil)
					if err != nil {
						answered <- 0
						return
					}
					answered <- resp.StatusCode
					resp.Body.Close()
				}()
				synctest.Wait()
				start := time.Now()
				srv.Stop(c.grace)
				require.LessOrEqual(t, time.Since(start), min(c.grace, 10*time.Second)+httpapi.AbortTimeout)
				require.Equal(t, c.status, <-answered)
			})
		})
	}
}

func TestConnectionIsReusedAfterLongStreams(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		f := apitest.NewBackend().WithGroup("g")
		srv := httpapi.NewServer("127.0.0.1:0", options(f))
		client := serveOn(t, srv.Server)
		dials := 0
		dial := client.Transport.(*http.Transport).DialContext
		client.Transport.(*http.Transport).DialContext = func(ctx context.Context, network, addr string) (net.Conn, error) {
			dials++
			return dial(ctx, network, addr)
		}
		for range 3 {
			resp, err := client.Post("http://localhost/v1/groups/g/jobs", ndjson, strings.NewReader(numbered(3)))
			require.NoError(t, err)
			_, err = io.Copy(io.Discard, resp.Body)
			require.NoError(t, err)
			require.NoError(t, resp.Body.Close())
			require.Equal(t, 200, resp.StatusCode)
			<-time.After(httpapi.IdleTimeout + httpapi.BodyTimeout) // later than every deadline of the request, before keepAliveTimeout
		}
		require.Equal(t, 1, dials)
	})
}
