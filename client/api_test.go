package client_test

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"net/http"
	"net/http/httptest"
	"sync"
	"testing"
	"time"

	"github.com/stretchr/testify/require"
	"go.opentelemetry.io/otel/propagation"
	"go.opentelemetry.io/otel/trace"

	"github.com/bulkaction/bulkaction/api"
	"github.com/bulkaction/bulkaction/client"
	"github.com/bulkaction/bulkaction/internal/messages"
)

// recordedWaits replaces the client's waits between retries: it records them and does not wait.
type recordedWaits struct {
	mu   sync.Mutex
	list []time.Duration
}

func (w *recordedWaits) sleep(ctx context.Context, d time.Duration) error {
	w.mu.Lock()
	defer w.mu.Unlock()
	w.list = append(w.list, d)
	return ctx.Err()
}

func (w *recordedWaits) all() []time.Duration {
	w.mu.Lock()
	defer w.mu.Unlock()
	return append([]time.Duration{}, w.list...)
}

// serve starts a test server with the handler h. It returns a client of it whose waits between
// retries are recorded and take no time.
func serve(t *testing.T, h http.Handler, opts ...client.Option) (*client.API, *recordedWaits) {
	t.Helper()
	srv := httptest.NewServer(h)
	t.Cleanup(srv.Close)
	w := &recordedWaits{}
	return client.NewAPI(srv.URL, append([]client.Option{client.WithSleep(w.sleep)}, opts...)...), w
}

func answer(w http.ResponseWriter, status int, v any) {
	w.Header().Set("Content-Type", "application/json")
	w.WriteHeader(status)
	_ = json.NewEncoder(w).Encode(v)
}

func refuse(w http.ResponseWriter, status int, p api.Problem) {
	p.Status, p.Title = status, http.StatusText(status)
	w.Header().Set("Content-Type", "application/problem+json")
	w.WriteHeader(status)
	_ = json.NewEncoder(w).Encode(p)
}

func ptr[T any](v T) *T { return &v }

func fullGroup() client.Submission {
	at := time.Date(2030, 1, 2, 3, 4, 5, 0, time.UTC)
	return client.Submission{
		ID: "g-1", Tenant: "acme", Name: "Spring <sale> & more", Type: "SEND_EMAIL", Priority: client.PriorityHigh,
		Tags: api.Tags{"campaign": "spring=26"}, CallbackURL: "https://example.com/h?a&b",
		BasePriority: 2.5, MaxRetries: ptr(0), JobTimeout: 90 * time.Second, RunAt: &at, FailureThreshold: ptr(0.25),
		Aggregate: []client.Aggregate{{As: "cost", Op: "sum", Field: "data.cost"}, {As: "n", Op: "count"}},
		Total:     ptr(int64(2)), Seal: true,
		Jobs: []client.NewJob{
			{Payload: map[string]any{"to": "a@example.com"}},
			{Payload: json.RawMessage(`[1, "two"]`), Type: "NOOP", RunAt: &at, TraceParent: "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01"},
		},
	}
}

func TestGroupMarshalsToTheContract(t *testing.T) {
	b, err := json.Marshal(fullGroup())
	require.NoError(t, err)
	require.JSONEq(t, `{
		"id": "g-1", "tenant": "acme", "name": "Spring <sale> & more", "type": "SEND_EMAIL", "priority": "high", "base_priority": 2.5,
		"max_retries": 0, "job_timeout": "1m30s", "run_at": "2030-01-02T03:04:05Z", "failure_threshold": 0.25,
		"aggregate": [{"as": "cost", "op": "sum", "field": "data.cost"}, {"as": "n", "op": "count"}],
		"total": 2, "seal": true, "tags": {"campaign": "spring=26"}, "callback_url": "https://example.com/h?a&b",
		"jobs": [
			{"payload": {"to": "a@example.com"}},
			{"payload": [1, "two"], "type": "NOOP", "run_at": "2030-01-02T03:04:05Z",
			 "traceparent": "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01"}]}`, string(b))

	b, err = json.Marshal(client.Submission{Type: "NOOP", Jobs: []client.NewJob{{}}})
	require.NoError(t, err)
	require.JSONEq(t, `{"type": "NOOP", "jobs": [{"payload": null}]}`, string(b))
}

func TestGroupIsReadByTheServer(t *testing.T) {
	want := fullGroup()
	at := want.RunAt.AddDate(0, 0, 0)
	b, err := json.Marshal(want)
	require.NoError(t, err)
	got, err := messages.Decoder{}.DecodeSubmit(b)
	require.NoError(t, err)
	require.Equal(t, &messages.SubmitGroup{
		ID: "g-1", Tenant: "acme", Name: "Spring <sale> & more", Type: "SEND_EMAIL", Priority: messages.LaneHigh,
		Tags: api.Tags{"campaign": "spring=26"}, CallbackURL: "https://example.com/h?a&b",
		BasePriority: 2.5, MaxRetries: ptr(0), JobTimeout: messages.Duration(90 * time.Second), RunAt: &at, FailureThreshold: ptr(0.25),
		Aggregate: []messages.Aggregate{{As: "cost", Op: "sum", Field: "data.cost"}, {As: "n", Op: "count"}},
		Total:     ptr(int64(2)), Seal: true,
		Jobs: []messages.Job{
			{Payload: json.RawMessage(`{"to":"a@example.com"}`)},
			{Payload: json.RawMessage(`[1,"two"]`), Type: "NOOP", RunAt: &at, TraceParent: "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01"},
		},
	}, got)
}

func TestSubmit(t *testing.T) {
	var keys []string
	a, _ := serve(t, http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		require.Equal(t, "POST /v1/groups application/json", r.Method+" "+r.URL.Path+" "+r.Header.Get("Content-Type"))
		keys = append(keys, r.Header.Get("Idempotency-Key"))
		body, err := io.ReadAll(r.Body)
		require.NoError(t, err)
		require.JSONEq(t, `{"id": "g-1", "type": "NOOP"}`, string(body))
		answer(w, http.StatusAccepted, api.Accepted{ID: "g-1", Status: api.StatusCreated, Links: map[string]string{"self": "/v1/groups/g-1"}})
	}))
	g := client.Submission{ID: "g-1", Type: "NOOP"}

	got, err := a.Submit(t.Context(), g)
	require.NoError(t, err)
	require.Equal(t, api.Accepted{ID: "g-1", Status: api.StatusCreated, Links: map[string]string{"self": "/v1/groups/g-1"}}, got)
	_, err = a.Submit(t.Context(), g)
	require.NoError(t, err)
	_, err = a.Submit(t.Context(), g, client.WithIdempotencyKey("mine"))
	require.NoError(t, err)

	require.Len(t, keys, 3)
	require.NotEmpty(t, keys[0])
	require.NotEqual(t, keys[0], keys[1])
	require.Equal(t, "mine", keys[2])
}

// tracingTransport adds the trace of a request's context to the request, as the transports of
// OpenTelemetry do.
type tracingTransport struct{}

func (tracingTransport) RoundTrip(r *http.Request) (*http.Response, error) {
	r = r.Clone(r.Context())
	propagation.TraceContext{}.Inject(r.Context(), propagation.HeaderCarrier(r.Header))
	return http.DefaultTransport.RoundTrip(r)
}

func TestSubmitCarriesTheTrace(t *testing.T) {
	var got string
	traced := client.WithHTTPClient(&http.Client{Transport: tracingTransport{}})
	a, _ := serve(t, http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		got = r.Header.Get("traceparent")
		answer(w, http.StatusAccepted, api.Accepted{})
	}), traced)
	ctx := trace.ContextWithSpanContext(t.Context(), trace.NewSpanContext(trace.SpanContextConfig{
		TraceID: trace.TraceID{1}, SpanID: trace.SpanID{2}, TraceFlags: trace.FlagsSampled,
	}))
	_, err := a.Submit(ctx, client.Submission{Type: "NOOP"})
	require.NoError(t, err)
	require.Equal(t, "00-01000000000000000000000000000000-0200000000000000-01", got)
}

func TestIDsDoNotEscapeTheirPath(t *testing.T) {
	a, _ := serve(t, http.HandlerFunc(func(http.ResponseWriter, *http.Request) { t.Error("no request expected") }))
	for _, id := range []string{"", "a/b", "..", ".", "a b", "a?b"} {
		_, err := a.Group(t.Context(), id)
		require.ErrorContains(t, err, fmt.Sprintf("group id %q: must match", id))
		_, err = a.Cancel(t.Context(), id)
		require.Error(t, err)
		_, err = a.Append(t.Context(), id, func(func(client.NewJob) bool) {})
		require.Error(t, err)
		for _, err := range a.Results(t.Context(), id) {
			require.Error(t, err)
		}
		_, err = a.Wait(t.Context(), id)
		require.Error(t, err)
	}
}

func TestCommandsAndQueries(t *testing.T) {
	var seen []string
	mux := http.NewServeMux()
	note := func(w http.ResponseWriter, r *http.Request, v any) {
		body, _ := io.ReadAll(r.Body)
		seen = append(seen, r.Method+" "+r.URL.String()+" "+string(body))
		answer(w, http.StatusOK, v)
	}
	mux.HandleFunc("POST /v1/groups/{id}/{verb}", func(w http.ResponseWriter, r *http.Request) {
		note(w, r, api.Accepted{ID: r.PathValue("id"), Status: api.StatusRunning})
	})
	mux.HandleFunc("GET /v1/groups/{id}", func(w http.ResponseWriter, r *http.Request) {
		note(w, r, api.Group{ID: r.PathValue("id"), Counts: api.Counts{Done: 3}})
	})
	mux.HandleFunc("GET /v1/groups/{id}/jobs/{n}", func(w http.ResponseWriter, r *http.Request) {
		note(w, r, api.Job{Group: r.PathValue("id"), State: "non_ready", Waiting: "rate"})
	})
	mux.HandleFunc("GET /v1/stats", func(w http.ResponseWriter, r *http.Request) { note(w, r, api.Stats{Partitions: 4}) })
	a, _ := serve(t, mux)
	ctx := t.Context()

	got, err := a.Seal(ctx, "g", nil)
	require.NoError(t, err)
	require.Equal(t, api.Accepted{ID: "g", Status: api.StatusRunning}, got)
	_, err = a.Seal(ctx, "g", ptr(int64(12)))
	require.NoError(t, err)
	_, err = a.Cancel(ctx, "g")
	require.NoError(t, err)
	_, err = a.Retry(ctx, "g")
	require.NoError(t, err)
	g, err := a.Group(ctx, "g")
	require.NoError(t, err)
	require.Equal(t, int64(3), g.Counts.Done)
	j, err := a.Job(ctx, "g", 7)
	require.NoError(t, err)
	require.Equal(t, "rate", j.Waiting)
	s, err := a.Stats(ctx)
	require.NoError(t, err)
	require.Equal(t, 4, s.Partitions)
	require.Equal(t, []string{
		"POST /v1/groups/g/seal ", `POST /v1/groups/g/seal {"total":12}`, "POST /v1/groups/g/cancel ", "POST /v1/groups/g/retry ",
		"GET /v1/groups/g ", "GET /v1/groups/g/jobs/7 ", "GET /v1/stats ",
	}, seen)
}

func TestListsFetchPageAfterPage(t *testing.T) {
	var seen []string
	mux := http.NewServeMux()
	mux.HandleFunc("GET /v1/groups", func(w http.ResponseWriter, r *http.Request) {
		seen = append(seen, r.URL.RawQuery)
		switch r.URL.Query().Get("cursor") {
		case "":
			answer(w, 200, api.GroupList{Groups: []api.Group{{ID: "a"}, {ID: "b"}}, Cursor: "x=&y"})
		case "x=&y":
			answer(w, 200, api.GroupList{Cursor: "z"})
		case "z":
			answer(w, 200, api.GroupList{Groups: []api.Group{{ID: "c"}}})
		}
	})
	mux.HandleFunc("GET /v1/dead-letters", func(w http.ResponseWriter, r *http.Request) {
		if r.URL.Query().Get("cursor") == "" {
			answer(w, 200, api.DeadLetterList{DeadLetters: []api.DeadLetter{{Job: "g.0"}}, Cursor: "2"})
			return
		}
		refuse(w, http.StatusInternalServerError, api.Problem{})
	})
	a, _ := serve(t, mux)

	groups := a.Groups(t.Context(), client.GroupFilter{Tenant: "acme", Status: api.StatusFailed})
	for range 2 { // a caller may iterate more than once
		seen = nil
		var ids []string
		for g, err := range groups {
			require.NoError(t, err)
			ids = append(ids, g.ID)
		}
		require.Equal(t, []string{"a", "b", "c"}, ids)
		require.Equal(t, []string{"status=FAILED&tenant=acme", "cursor=x%3D%26y&status=FAILED&tenant=acme", "cursor=z&status=FAILED&tenant=acme"}, seen)
	}
	seen = nil
	for _, err := range a.Groups(t.Context(), client.GroupFilter{}) {
		require.NoError(t, err)
		break
	}
	require.Equal(t, []string{""}, seen, "no page is fetched after the caller stopped")

	var jobs []string
	var errs []error
	for d, err := range a.DeadLetters(t.Context(), client.DeadLetterFilter{}) {
		if err != nil {
			errs = append(errs, err)
			continue
		}
		jobs = append(jobs, d.Job)
	}
	require.Equal(t, []string{"g.0"}, jobs)
	require.Len(t, errs, 1)
	require.ErrorContains(t, errs[0], "list dead letters: 500 Internal Server Error")
}

func TestResultsAndFailures(t *testing.T) {
	mux := http.NewServeMux()
	mux.HandleFunc("GET /v1/groups/g/results", func(w http.ResponseWriter, _ *http.Request) {
		_, _ = io.WriteString(w, `{"ordinal":0,"duration_ms":1.5,"attempts":1,"data":{"n":12345678901234567890}}`+"\n"+`{"ordinal":1,"duration_ms":2,"attempts":2,"data":null}`+"\n")
	})
	mux.HandleFunc("GET /v1/groups/g/failures", func(w http.ResponseWriter, _ *http.Request) {
		_, _ = io.WriteString(w, `{"ordinal":4,"code":"SMTP_550","error":"no such user","attempts":4,"at":"2030-01-01T00:00:00Z"}`+"\n")
		_ = http.NewResponseController(w).Flush()
		panic(http.ErrAbortHandler)
	})
	a, _ := serve(t, mux)

	var results []api.Result
	for r, err := range a.Results(t.Context(), "g") {
		require.NoError(t, err)
		results = append(results, r)
	}
	require.Equal(t, []api.Result{
		{Ordinal: 0, DurationMS: 1.5, Attempts: 1, Data: json.RawMessage(`{"n":12345678901234567890}`)},
		{Ordinal: 1, DurationMS: 2, Attempts: 2, Data: json.RawMessage(`null`)},
	}, results)
	for _, err := range a.Results(t.Context(), "g") {
		require.NoError(t, err)
		break
	}

	var last error
	n := 0
	for f, err := range a.Failures(t.Context(), "g") {
		if err != nil {
			last = err
			continue
		}
		n++
		require.Equal(t, "SMTP_550", f.Code)
	}
	require.Equal(t, 1, n)
	require.ErrorContains(t, last, "get failures of group g: ")
	require.False(t, errors.Is(last, io.EOF), "a stream that breaks off does not look complete")
}

func TestKindsOfErrors(t *testing.T) {
	t.Parallel()
	for status, kind := range map[int]error{
		400: client.ErrInvalid, 422: client.ErrInvalid, 404: client.ErrNotFound, 409: client.ErrConflict,
		412: client.ErrChanged, 429: client.ErrTooManyRequests, 503: client.ErrUnavailable,
	} {
		err := fmt.Errorf("read: %w", &client.Error{Status: status})
		require.ErrorIs(t, err, kind)
		require.Equal(t, status == 404, errors.Is(err, client.ErrNotFound))
	}
	require.NotErrorIs(t, &client.Error{Status: 500}, client.ErrUnavailable)
}
