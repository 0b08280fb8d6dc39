package httpapi

import (
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"log/slog"
	"net/http"
	"net/http/httptest"
	"os"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/getkin/kin-openapi/openapi3filter"
	"github.com/stretchr/testify/require"
	"go.uber.org/goleak"

	"github.com/bulkaction/bulkaction/api"
	"github.com/bulkaction/bulkaction/internal/messages"
	"github.com/bulkaction/bulkaction/internal/testkit/redistest"
)

func TestMain(m *testing.M) {
	openapi3filter.RegisterBodyDecoder("application/x-ndjson", openapi3filter.PlainBodyDecoder)
	openapi3filter.RegisterBodyDecoder("text/event-stream", openapi3filter.PlainBodyDecoder)
	goleak.VerifyTestMain(m, redistest.IgnoreServers())
}

func options(b Backend) Options {
	return Options{Backend: b, Decoder: messages.Decoder{Now: time.Now}, Version: "1.2.3"}
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
			f := newFakeBackend()
			f.err = c.err
			rec := call(t, New(options(f)), "POST", "/v1/groups/g/cancel", "")
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
		"no parameters":        {"GET", "/v1/groups/g?verbose=1", "", nil, 400, "verbose"},
		"parameter of POST":    {"POST", "/v1/groups/g/cancel?force=1", "", nil, 400, "force"},
		"parameter of events":  {"GET", "/v1/groups/g/events?after=1.2", "", nil, 400, "after"},
		"malformed query":      {"GET", "/v1/groups?tenant=%zz", "", nil, 400, ""},
		"no content type":      {"POST", "/v1/groups", `{}`, nil, 415, ""},
		"form":                 {"POST", "/v1/groups", `{}`, []string{"Content-Type", "text/plain"}, 415, ""},
		"latin-1":              {"POST", "/v1/groups", `{}`, []string{"Content-Type", jsonType + "; charset=latin1"}, 415, ""},
		"compressed":           {"POST", "/v1/groups", `{}`, []string{"Content-Type", jsonType, "Content-Encoding", "gzip"}, 415, ""},
		"append as JSON":       {"POST", "/v1/groups/g/jobs", `{}`, []string{"Content-Type", jsonType}, 415, ""},
		"seal as text":         {"POST", "/v1/groups/g/seal", `{"total":1}`, []string{"Content-Type", "text/plain"}, 415, ""},
		"malformed":            {"POST", "/v1/groups", `{"type":`, []string{"Content-Type", jsonType}, 400, ""},
		"no type":              {"POST", "/v1/groups", `{}`, []string{"Content-Type", jsonType}, 422, "type"},
		"bad key":              {"POST", "/v1/groups", `{"type":"T"}`, []string{"Content-Type", jsonType, "Idempotency-Key", "a b"}, 422, "Idempotency-Key"},
		"two keys":             {"POST", "/v1/groups", `{"type":"T"}`, []string{"Content-Type", jsonType, "Idempotency-Key", "a", "Idempotency-Key", "b"}, 422, "Idempotency-Key"},
		"empty key":            {"POST", "/v1/groups", `{"type":"T"}`, []string{"Content-Type", jsonType, "Idempotency-Key", ""}, 422, "Idempotency-Key"},
		"bad key, append":      {"POST", "/v1/groups/g/jobs", `{}`, []string{"Content-Type", "text/csv", "Idempotency-Key", "{ }"}, 422, "Idempotency-Key"},
		"negative total":       {"POST", "/v1/groups/g/seal", `{"total":-1}`, []string{"Content-Type", jsonType}, 422, "total"},
		"unknown seal field":   {"POST", "/v1/groups/g/seal", `{"totl":1}`, []string{"Content-Type", jsonType}, 422, "totl"},
		"two values":           {"POST", "/v1/groups/g/seal", `{} {}`, []string{"Content-Type", jsonType}, 400, "body"},
		"bracket behind":       {"POST", "/v1/groups/g/seal", `{}]`, []string{"Content-Type", jsonType}, 400, "body"},
		"brace behind":         {"POST", "/v1/groups/g/cancel", `{}}`, []string{"Content-Type", jsonType}, 400, "body"},
		"cancel with fields":   {"POST", "/v1/groups/g/cancel", `{"force":true}`, []string{"Content-Type", jsonType}, 422, "force"},
		"other origin":         {"POST", "/v1/groups/g/cancel", "", []string{"Origin", "https://evil.example"}, 403, ""},
		"other site":           {"POST", "/v1/groups/g/cancel", "", []string{"Sec-Fetch-Site", "cross-site"}, 403, ""},
		"same id":              {"POST", "/v1/groups", `{"id":"g","type":"T"}`, []string{"Content-Type", jsonType}, 409, ""},
		"large payload": {"POST", "/v1/groups", `{"type":"T","jobs":[{"payload":"` + strings.Repeat("x", messages.MaxPayloadBytes) + `"}]}`,
			[]string{"Content-Type", jsonType}, 413, "jobs[0].payload"},
		"large body": {"POST", "/v1/groups", strings.Repeat(" ", messages.MaxMessageBytes+1), []string{"Content-Type", jsonType}, 413, ""},
		"large seal": {"POST", "/v1/groups/g/seal", strings.Repeat(" ", smallBody+1), []string{"Content-Type", jsonType}, 413, ""},
	} {
		t.Run(name, func(t *testing.T) {
			rec := call(t, New(options(newFakeBackend().withGroup("g"))), c.method, c.target, c.body, c.header...)
			requireProblem(t, rec, c.status, c.field)
		})
	}
}

func TestMethodNotAllowedNamesTheMethods(t *testing.T) {
	h := New(options(newFakeBackend().withGroup("g")))
	for target, allow := range map[string]string{
		"/v1/groups": "GET, HEAD, POST", "/v1/groups/g": "GET, HEAD", "/v1/groups/g/seal": "POST", "/v1/groups/g/events": "GET", "/": "GET, HEAD",
	} {
		rec := call(t, h, "DELETE", target, "")
		requireProblem(t, rec, 405, "")
		require.Equal(t, allow, rec.Header().Get("Allow"), target)
	}
	require.Equal(t, 200, call(t, h, "HEAD", "/v1/groups/g", "").Code)
	require.Equal(t, 405, call(t, h, "HEAD", "/v1/groups/g/events", "").Code)
}

func TestSameOriginPageMayWrite(t *testing.T) {
	h := New(options(newFakeBackend().withGroup("g")))
	require.Equal(t, 202, call(t, h, "POST", "/v1/groups/g/cancel", "", "Origin", "http://example.com").Code)
	require.Equal(t, 200, call(t, h, "GET", "/v1/groups/g", "", "Origin", "https://evil.example").Code)
}

func TestLoopbackServerServesLoopbackHostsOnly(t *testing.T) {
	get := func(addr, host string) int {
		req := httptest.NewRequest("GET", "/", nil)
		req.Host = host
		rec := httptest.NewRecorder()
		NewServer(addr, options(newFakeBackend())).Handler.ServeHTTP(rec, req)
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
	srv := NewServer("127.0.0.1:0", options(newFakeBackend()))
	require.Equal(t, "127.0.0.1:0", srv.Addr)
	require.Positive(t, srv.ReadHeaderTimeout)
	require.Positive(t, srv.IdleTimeout)
	require.Positive(t, srv.MaxHeaderBytes)
	require.Equal(t, 100, srv.HTTP2.MaxConcurrentStreams)
	require.Zero(t, srv.ReadTimeout, "a read timeout would end streamed bodies")
	require.Zero(t, srv.WriteTimeout, "a write timeout would end streamed answers")
}

func TestHeadersOfEveryAnswer(t *testing.T) {
	h := New(options(newFakeBackend()))
	rec := call(t, h, "GET", "/", "", "X-Request-Id", "abc-1")
	require.Equal(t, "abc-1", rec.Header().Get("X-Request-Id"))
	require.Equal(t, "nosniff", rec.Header().Get("X-Content-Type-Options"))
	rec = call(t, h, "GET", "/v1/none", "", "X-Request-Id", "not an id")
	require.Regexp(t, `^[0-9a-f-]{36}$`, rec.Header().Get("X-Request-Id"))
	require.Equal(t, "nosniff", rec.Header().Get("X-Content-Type-Options"))
}

func TestIndexLinksWork(t *testing.T) {
	h := New(options(newFakeBackend()))
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
type panickingBackend struct{ *fakeBackend }

func (p panickingBackend) Groups(context.Context, ListQuery) (api.GroupList, error) {
	panic("secret-payload")
}

func (p panickingBackend) Results(_ context.Context, _ string, yield func([]byte) error) error {
	line := bytes.Repeat([]byte("x"), streamBuffer)
	if err := yield(line); err != nil {
		return err
	}
	_ = line[len(line)+int(line[0])]
	return nil
}

func TestPanicIsRecoveredAndLoggedWithoutPayload(t *testing.T) {
	var log lockedBuffer
	opt := options(panickingBackend{newFakeBackend()})
	opt.Log = slog.New(slog.NewTextHandler(&log, &slog.HandlerOptions{Level: slog.LevelDebug}))
	srv := httptest.NewServer(New(opt))
	defer srv.Close()

	requireProblem(t, call(t, New(opt), "GET", "/v1/groups", ""), 500, "")
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
		opt := options(newFakeBackend())
		opt.Log = slog.New(slog.NewTextHandler(&log, &slog.HandlerOptions{Level: level}))
		call(t, New(opt), "POST", "/v1/groups", `{"type":"T","jobs":[{"payload":"secret-payload"}]}`, "Content-Type", jsonType, "X-Request-Id", "r-1")
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
	rec := call(t, New(options(newFakeBackend().withGroup("g"))), "POST", "/v1/groups/g/seal", `{"total":-1}`, "Content-Type", jsonType)
	require.JSONEq(t, example, rec.Body.String())
}
