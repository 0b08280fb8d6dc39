package client_test

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"net"
	"net/http"
	"net/http/httptest"
	"sync"
	"testing"
	"time"

	"github.com/stretchr/testify/require"
	"go.opentelemetry.io/otel/trace"

	"github.com/bulkaction/bulkaction/api"
	"github.com/bulkaction/bulkaction/client"
	"github.com/bulkaction/bulkaction/internal/messages"
)

// waits records what a client would have waited.
type waits struct {
	mu   sync.Mutex
	list []time.Duration
}

func (w *waits) sleep(ctx context.Context, d time.Duration) error {
	w.mu.Lock()
	defer w.mu.Unlock()
	w.list = append(w.list, d)
	return ctx.Err()
}

func (w *waits) taken() []time.Duration {
	w.mu.Lock()
	defer w.mu.Unlock()
	return append([]time.Duration{}, w.list...)
}

// serve starts a server and returns a client of it that doesn't really wait.
func serve(t *testing.T, h http.Handler, opts ...client.Option) (*client.API, *waits) {
	t.Helper()
	srv := httptest.NewServer(h)
	t.Cleanup(srv.Close)
	w := &waits{}
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

func fullGroup() client.Group {
	at := time.Date(2030, 1, 2, 3, 4, 5, 0, time.UTC)
	return client.Group{
		ID: "g-1", Tenant: "acme", Name: "Spring <sale> & more", Type: "SEND_EMAIL", Priority: client.PriorityHigh,
		BasePriority: 2.5, MaxRetries: ptr(0), JobTimeout: 90 * time.Second, RunAt: &at, FailureThreshold: ptr(0.25),
		Aggregate:   []client.Aggregate{{As: "cost", Op: "sum", Field: "data.cost"}, {As: "n", Op: "count"}},
		CallbackURL: "https://example.com/done", Total: ptr(int64(2)), Seal: true,
		Jobs: []client.Job{
			{Payload: map[string]any{"to": "a@example.com"}},
			{Payload: json.RawMessage(`[1, "<two>"]`), Type: "NOOP", RunAt: &at, TraceParent: "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01"},
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
		"callback_url": "https://example.com/done", "total": 2, "seal": true,
		"jobs": [
			{"payload": {"to": "a@example.com"}},
			{"payload": [1, "<two>"], "type": "NOOP", "run_at": "2030-01-02T03:04:05Z",
			 "traceparent": "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01"}]}`, string(b))

	b, err = json.Marshal(client.Group{Type: "NOOP", Jobs: []client.Job{{}}})
	require.NoError(t, err)
	require.JSONEq(t, `{"type": "NOOP", "jobs": [{"payload": null}]}`, string(b))
}

func TestGroupHasTheFieldsThatTheServerReads(t *testing.T) {
	b, err := json.Marshal(fullGroup())
	require.NoError(t, err)
	var sent, read map[string]any
	require.NoError(t, json.Unmarshal(b, &sent))

	var server messages.SubmitGroup
	delete(sent, "job_timeout") // in a notation of its own
	b, err = json.Marshal(sent)
	require.NoError(t, err)
	require.NoError(t, json.Unmarshal(b, &server))
	b, err = json.Marshal(server)
	require.NoError(t, err)
	require.NoError(t, json.Unmarshal(b, &read))
	delete(read, "job_timeout")
	require.Equal(t, sent, read)
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
	g := client.Group{ID: "g-1", Type: "NOOP"}

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

func TestSubmitCarriesTheTrace(t *testing.T) {
	var got string
	a, _ := serve(t, http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		got = r.Header.Get("traceparent")
		answer(w, http.StatusAccepted, api.Accepted{})
	}))
	ctx := trace.ContextWithSpanContext(t.Context(), trace.NewSpanContext(trace.SpanContextConfig{
		TraceID: trace.TraceID{1}, SpanID: trace.SpanID{2}, TraceFlags: trace.FlagsSampled,
	}))
	_, err := a.Submit(ctx, client.Group{Type: "NOOP"})
	require.NoError(t, err)
	require.Equal(t, "00-01000000000000000000000000000000-0200000000000000-01", got)
}

// flaky answers as its steps say, then with success.
type flaky struct {
	mu    sync.Mutex
	steps []func(http.ResponseWriter)
	keys  []string
}

func (f *flaky) ServeHTTP(w http.ResponseWriter, r *http.Request) {
	f.mu.Lock()
	defer f.mu.Unlock()
	n := len(f.keys)
	f.keys = append(f.keys, r.Header.Get("Idempotency-Key"))
	if n < len(f.steps) {
		f.steps[n](w)
		return
	}
	answer(w, http.StatusAccepted, api.Accepted{ID: "g"})
}

func status(code int, after string) func(http.ResponseWriter) {
	return func(w http.ResponseWriter) {
		if after != "" {
			w.Header().Set("Retry-After", after)
		}
		refuse(w, code, api.Problem{Detail: "not now"})
	}
}

func hangUp(http.ResponseWriter) { panic(http.ErrAbortHandler) }

func TestRepetition(t *testing.T) {
	submit := func(ctx context.Context, a *client.API) error {
		_, err := a.Submit(ctx, client.Group{Type: "NOOP"})
		return err
	}
	retry := func(ctx context.Context, a *client.API) error {
		_, err := a.Retry(ctx, "g")
		return err
	}
	seal := func(ctx context.Context, a *client.API) error {
		_, err := a.Seal(ctx, "g", nil)
		return err
	}
	type steps = []func(http.ResponseWriter)
	for _, c := range []struct {
		name  string
		call  func(context.Context, *client.API) error
		steps steps
		calls int
		waits []time.Duration // -1: a backoff
		err   string
	}{
		{"waits as told", submit, steps{status(429, "7"), status(503, "2")}, 3, []time.Duration{7 * time.Second, 2 * time.Second}, ""},
		{"backs off when not told", submit, steps{status(503, ""), status(502, ""), status(504, "")}, 4, []time.Duration{-1, -1, -1}, ""},
		{"survives a broken connection", submit, steps{hangUp}, 2, []time.Duration{-1}, ""},
		{"gives up in the end", submit, steps{status(503, "1"), status(503, "1"), status(503, "1"), status(503, "9")}, 4,
			[]time.Duration{time.Second, time.Second, time.Second}, "submit group: 503 Service Unavailable: not now (try again in 9s)"},
		{"does not wait for ever", submit, steps{status(429, "3600")}, 1, nil, "submit group: 429 Too Many Requests: not now (try again in 1h0m0s)"},
		{"not what is wrong", submit, steps{status(422, "")}, 1, nil, "submit group: 422 Unprocessable Entity: not now"},
		{"seal is repeatable", seal, steps{hangUp, status(503, "1")}, 3, []time.Duration{-1, time.Second}, ""},
		{"retry when refused", retry, steps{status(429, "1")}, 2, []time.Duration{time.Second}, ""},
		{"retry not when unknown", retry, steps{status(503, "1")}, 1, nil, "retry group g: 503 Service Unavailable: not now (try again in 1s)"},
	} {
		t.Run(c.name, func(t *testing.T) {
			t.Parallel()
			f := &flaky{steps: c.steps}
			a, w := serve(t, f)
			err := c.call(t.Context(), a)
			if c.err == "" {
				require.NoError(t, err)
			} else {
				require.EqualError(t, err, c.err)
			}
			require.Len(t, f.keys, c.calls)
			for _, k := range f.keys {
				require.Equal(t, f.keys[0], k, "all attempts are one request")
			}
			got := w.taken()
			require.Len(t, got, len(c.waits))
			for i, want := range c.waits {
				if want < 0 {
					require.Positive(t, got[i])
					require.LessOrEqual(t, got[i], 5*time.Second)
					continue
				}
				require.Equal(t, want, got[i])
			}
		})
	}
}

func TestRepetitionStopsWithContext(t *testing.T) {
	f := &flaky{steps: []func(http.ResponseWriter){status(503, "1"), status(503, "1")}}
	ctx, cancel := context.WithCancel(t.Context())
	a, _ := serve(t, f, client.WithSleep(func(ctx context.Context, _ time.Duration) error {
		cancel()
		return ctx.Err()
	}))
	_, err := a.Group(ctx, "g")
	require.ErrorIs(t, err, context.Canceled)
	require.ErrorContains(t, err, "503 Service Unavailable", "the answer is not hidden")
	require.Len(t, f.keys, 1)
}

func TestRepetitionDoesNotOutwaitADeadline(t *testing.T) {
	f := &flaky{steps: []func(http.ResponseWriter){status(503, "20")}}
	a, w := serve(t, f)
	ctx, cancel := context.WithTimeout(t.Context(), 10*time.Second)
	defer cancel()
	_, err := a.Group(ctx, "g")
	require.ErrorContains(t, err, "503 Service Unavailable")
	require.Empty(t, w.taken())
}

func TestErrorHoldsTheProblem(t *testing.T) {
	a, _ := serve(t, http.HandlerFunc(func(w http.ResponseWriter, _ *http.Request) {
		refuse(w, http.StatusUnprocessableEntity, api.Problem{Detail: "2 fields are wrong", Fields: []api.FieldError{
			{Field: "tenant", Problem: "must match ^[A-Za-z0-9._-]{1,128}$"},
			{Field: "jobs[3].payload", Problem: "is missing"},
		}})
	}))
	_, err := a.Submit(t.Context(), client.Group{Type: "NOOP"})
	var e *client.Error
	require.ErrorAs(t, err, &e)
	require.Equal(t, 422, e.Status)
	require.Len(t, e.Problem.Fields, 2)
	require.EqualError(t, err, "submit group: 422 Unprocessable Entity: 2 fields are wrong: "+
		"tenant: must match ^[A-Za-z0-9._-]{1,128}$; jobs[3].payload: is missing")
}

func TestErrorOfAStranger(t *testing.T) {
	for name, body := range map[string]string{"text/html": "<h1>nginx</h1>", "application/problem+json": "{", "": ""} {
		a, _ := serve(t, http.HandlerFunc(func(w http.ResponseWriter, _ *http.Request) {
			w.Header().Set("Content-Type", name)
			w.WriteHeader(http.StatusForbidden)
			_, _ = io.WriteString(w, body)
		}))
		_, err := a.Stats(t.Context())
		require.EqualError(t, err, "get stats: 403 Forbidden", name)
	}
}

func TestRetryAfterAsDate(t *testing.T) {
	f := &flaky{steps: []func(http.ResponseWriter){status(503, time.Now().Add(20*time.Second).UTC().Format(http.TimeFormat))}}
	a, w := serve(t, f)
	_, err := a.Group(t.Context(), "g")
	require.NoError(t, err)
	require.Len(t, w.taken(), 1)
	require.InDelta(t, 20, w.taken()[0].Seconds(), 10)
}

func TestIDsDoNotEscapeTheirPath(t *testing.T) {
	a, _ := serve(t, http.HandlerFunc(func(http.ResponseWriter, *http.Request) { t.Error("no request expected") }))
	for _, id := range []string{"", "a/b", "..", ".", "a b", "a?b"} {
		_, err := a.Group(t.Context(), id)
		require.ErrorContains(t, err, fmt.Sprintf("group id %q: must match", id))
		_, err = a.Cancel(t.Context(), id)
		require.Error(t, err)
		_, err = a.Append(t.Context(), id, func(func(client.Job) bool) {})
		require.Error(t, err)
		for _, err := range a.Results(t.Context(), id) {
			require.Error(t, err)
		}
		_, err = a.Wait(t.Context(), id)
		require.Error(t, err)
	}
}

func TestUnreachable(t *testing.T) {
	l, err := net.Listen("tcp", "127.0.0.1:0")
	require.NoError(t, err)
	require.NoError(t, l.Close())
	w := &waits{}
	a := client.NewAPI("http://"+l.Addr().String(), client.WithSleep(w.sleep), client.WithRetry(2, time.Minute))
	_, err = a.Stats(t.Context())
	require.ErrorContains(t, err, "get stats: ")
	var op *net.OpError
	require.ErrorAs(t, err, &op)
	require.Len(t, w.taken(), 1)
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

func TestListsGoFromPageToPage(t *testing.T) {
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
	for range 2 { // a range is no one-time thing
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
	for range a.Groups(t.Context(), client.GroupFilter{}) {
		break
	}
	require.Equal(t, []string{""}, seen, "no page is fetched in vain")

	var jobs []string
	var errs []error
	for d, err := range a.DeadLetters(t.Context()) {
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
	for range a.Results(t.Context(), "g") {
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
	require.False(t, errors.Is(last, io.EOF), "a stream that broke off is not complete")
}
