package client_test

import (
	"context"
	"fmt"
	"io"
	"net"
	"net/http"
	"net/http/httptest"
	"net/url"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/stretchr/testify/require"
	"go.uber.org/goleak"

	"github.com/bulkaction/bulkaction/api"
	"github.com/bulkaction/bulkaction/client"
)

// flakyServer is a fake server: it answers the first requests as its steps say, and later ones with
// success.
type flakyServer struct {
	mu    sync.Mutex
	steps []func(http.ResponseWriter)
	keys  []string
}

func (f *flakyServer) ServeHTTP(w http.ResponseWriter, r *http.Request) {
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

func dropConnection(http.ResponseWriter) { panic(http.ErrAbortHandler) }

func TestCallsAreRetried(t *testing.T) {
	submit := func(ctx context.Context, a *client.API) error {
		_, err := a.Submit(ctx, client.Submission{Type: "NOOP"})
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
		{"waits as long as Retry-After says", submit, steps{status(429, "7"), status(503, "2")}, 3, []time.Duration{7 * time.Second, 2 * time.Second}, ""},
		{"backs off without Retry-After", submit, steps{status(503, ""), status(502, ""), status(504, "")}, 4, []time.Duration{-1, -1, -1}, ""},
		{"survives a broken connection", submit, steps{dropConnection}, 2, []time.Duration{-1}, ""},
		{"ends after all attempts failed", submit, steps{status(503, "1"), status(503, "1"), status(503, "1"), status(503, "9")}, 4,
			[]time.Duration{time.Second, time.Second, time.Second}, "submit group: 503 Service Unavailable: not now (try again in 9s)"},
		{"does not wait longer than the maximum", submit, steps{status(429, "3600")}, 1, nil, "submit group: 429 Too Many Requests: not now (try again in 1h0m0s)"},
		{"does not retry a wrong request", submit, steps{status(422, "")}, 1, nil, "submit group: 422 Unprocessable Entity: not now"},
		{"retries seal", seal, steps{dropConnection, status(503, "1")}, 3, []time.Duration{-1, time.Second}, ""},
		{"attempts the command retry again after 429", retry, steps{status(429, "1")}, 2, []time.Duration{time.Second}, ""},
		{"does not attempt the command retry again when its effect is unknown", retry, steps{status(503, "1")}, 1, nil, "retry group g: 503 Service Unavailable: not now (try again in 1s)"},
	} {
		t.Run(c.name, func(t *testing.T) {
			t.Parallel()
			f := &flakyServer{steps: c.steps}
			a, w := serve(t, f)
			err := c.call(t.Context(), a)
			if c.err == "" {
				require.NoError(t, err)
			} else {
				require.EqualError(t, err, c.err)
			}
			require.Len(t, f.keys, c.calls)
			for _, k := range f.keys {
				require.Equal(t, f.keys[0], k, "all attempts carry the same idempotency key")
			}
			got := w.all()
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

func TestRetriesStopWithContext(t *testing.T) {
	f := &flakyServer{steps: []func(http.ResponseWriter){status(503, "1"), status(503, "1")}}
	ctx, cancel := context.WithCancel(t.Context())
	a, _ := serve(t, f, client.WithSleep(func(ctx context.Context, _ time.Duration) error {
		cancel()
		return ctx.Err()
	}))
	_, err := a.Group(ctx, "g")
	require.ErrorIs(t, err, context.Canceled)
	require.ErrorContains(t, err, "503 Service Unavailable", "the error contains the server's last answer")
	require.Len(t, f.keys, 1)
}

func TestRetriesDoNotWaitBeyondADeadline(t *testing.T) {
	f := &flakyServer{steps: []func(http.ResponseWriter){status(503, "20")}}
	a, w := serve(t, f)
	ctx, cancel := context.WithTimeout(t.Context(), 10*time.Second)
	defer cancel()
	_, err := a.Group(ctx, "g")
	require.ErrorContains(t, err, "503 Service Unavailable")
	require.Empty(t, w.all())
}

func TestErrorHoldsTheProblem(t *testing.T) {
	a, _ := serve(t, http.HandlerFunc(func(w http.ResponseWriter, _ *http.Request) {
		refuse(w, http.StatusUnprocessableEntity, api.Problem{Detail: "2 fields are wrong", Fields: []api.FieldError{
			{Field: "tenant", Problem: "must match ^[A-Za-z0-9._-]{1,128}$"},
			{Field: "jobs[3].payload", Problem: "is missing"},
		}})
	}))
	_, err := a.Submit(t.Context(), client.Submission{Type: "NOOP"})
	var e *client.Error
	require.ErrorAs(t, err, &e)
	require.Equal(t, 422, e.Status)
	require.Len(t, e.Problem.Fields, 2)
	require.EqualError(t, err, "submit group: 422 Unprocessable Entity: 2 fields are wrong: "+
		"tenant: must match ^[A-Za-z0-9._-]{1,128}$; jobs[3].payload: is missing")
}

func TestErrorDoesNotRepeatTheFields(t *testing.T) {
	e := &client.Error{Status: 422, Problem: api.Problem{Title: "Unprocessable Entity", Detail: "tenant: must match x; type: required",
		Fields: []api.FieldError{{Field: "tenant", Problem: "must match x"}, {Field: "type", Problem: "required"}}}}
	require.EqualError(t, e, "422 Unprocessable Entity: tenant: must match x; type: required")
}

func TestErrorOfAProxyHasTheStatusOnly(t *testing.T) {
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

func TestErrorNamesTheRequest(t *testing.T) {
	a, _ := serve(t, http.HandlerFunc(func(w http.ResponseWriter, _ *http.Request) {
		w.Header().Set("X-Request-Id", "r-1")
		refuse(w, http.StatusInternalServerError, api.Problem{})
	}))
	_, err := a.Stats(t.Context())
	require.EqualError(t, err, "get stats: 500 Internal Server Error (request r-1)")
}

func TestRetryAfterAsDate(t *testing.T) {
	f := &flakyServer{steps: []func(http.ResponseWriter){status(503, time.Now().Add(20*time.Second).UTC().Format(http.TimeFormat))}}
	a, w := serve(t, f)
	_, err := a.Group(t.Context(), "g")
	require.NoError(t, err)
	require.Len(t, w.all(), 1)
	require.InDelta(t, 20, w.all()[0].Seconds(), 10)
}

func TestWrongAddressIsNotRetried(t *testing.T) {
	l, err := net.Listen("tcp", "127.0.0.1:0")
	require.NoError(t, err)
	require.NoError(t, l.Close())
	w := &recordedWaits{}
	a := client.NewAPI("http://"+l.Addr().String(), client.WithSleep(w.sleep), client.WithRetry(2, time.Minute))
	_, err = a.Stats(t.Context())
	require.ErrorContains(t, err, "get stats: ")
	var op *net.OpError
	require.ErrorAs(t, err, &op)
	require.Empty(t, w.all(), "a call to a wrong address is not retried")

	srv := httptest.NewServer(http.HandlerFunc(func(w http.ResponseWriter, _ *http.Request) { answer(w, 200, api.Stats{}) }))
	a = client.NewAPI(srv.URL, client.WithSleep(w.sleep), client.WithRetry(3, time.Minute))
	_, err = a.Stats(t.Context())
	require.NoError(t, err)
	srv.Close()
	_, err = a.Stats(t.Context())
	require.ErrorAs(t, err, &op)
	require.Len(t, w.all(), 2, "a call to a server that answered before is retried")
}

func TestRetryNotice(t *testing.T) {
	var notices []string
	f := &flakyServer{steps: []func(http.ResponseWriter){status(429, "7"), status(503, "2"), status(429, "1")}}
	a, waits := serve(t, f, client.WithRetry(3, time.Minute), client.WithRetryNotice(func(err error, wait time.Duration, left int) {
		notices = append(notices, fmt.Sprintf("%s|%s|%d", err, wait, left))
	}))
	_, err := a.Submit(t.Context(), client.Submission{ID: "g", Type: "NOOP"})
	require.ErrorContains(t, err, "429", "the third attempt was the last")
	require.Equal(t, []string{
		"submit group: 429 Too Many Requests: not now (try again in 7s)|7s|2",
		"submit group: 503 Service Unavailable: not now (try again in 2s)|2s|1",
	}, notices)
	require.Equal(t, []time.Duration{7 * time.Second, 2 * time.Second}, waits.all())
}

func TestAddressIsChecked(t *testing.T) {
	for address, want := range map[string]string{
		"127.0.0.1:8080":     "list tenants: address \"127.0.0.1:8080\": write it as http://127.0.0.1:8080",
		"api.example:80":     "list tenants: address \"api.example:80\": write it as http://api.example:80",
		"":                   "list tenants: address \"\": write it as http://127.0.0.1:8080",
		"ftp://api.example":  "list tenants: address \"ftp://api.example\": write it as http://127.0.0.1:8080",
		"http://127.0.0.1:x": "list tenants: address \"http://127.0.0.1:x\": write it as http://127.0.0.1:8080",
	} {
		w := &recordedWaits{}
		a := client.NewAPI(address, client.WithSleep(w.sleep))
		for _, err := range a.Tenants(t.Context(), client.TenantFilter{}) {
			require.EqualError(t, err, want)
		}
		for _, err := range a.Events(t.Context(), "g", "") {
			require.ErrorContains(t, err, "address")
		}
		require.Empty(t, w.all(), "no call is repeated")
	}
}

const secret = "bkp_7QabcdefghijklmnopqrstuvwxyzAB2WjneH"

// received is the part of a test server that records the header Authorization of each request, by
// path.
type received struct {
	mu     sync.Mutex
	values map[string]string
}

func (r *received) note(req *http.Request) {
	r.mu.Lock()
	defer r.mu.Unlock()
	if r.values == nil {
		r.values = map[string]string{}
	}
	r.values[req.URL.Path] = strings.Join(req.Header.Values("Authorization"), ",")
}

func (r *received) of(path string) string {
	r.mu.Lock()
	defer r.mu.Unlock()
	value, ok := r.values[path]
	if !ok {
		return "no request"
	}
	return value
}

func TestAPIKeyIsSentWithEachRequest(t *testing.T) {
	t.Parallel()
	var got received
	s := httptest.NewServer(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		got.note(r)
		switch {
		case strings.HasSuffix(r.URL.Path, "/results"), strings.HasSuffix(r.URL.Path, "/jobs"):
			w.WriteHeader(http.StatusForbidden)
		case strings.HasSuffix(r.URL.Path, "/events"):
			w.WriteHeader(http.StatusUnauthorized)
		default:
			answer(w, http.StatusOK, api.Group{ID: "g"})
		}
	}))
	t.Cleanup(s.Close)
	custom := &http.Client{Transport: http.DefaultTransport}
	for _, opts := range [][]client.Option{
		{client.WithAPIKey(secret)},
		{client.WithAPIKey(secret), client.WithHTTPClient(custom)},
		{client.WithHTTPClient(custom), client.WithAPIKey(secret)},
		{client.WithHTTPClient(&http.Client{}), client.WithAPIKey(secret)},
	} {
		got.values = nil
		a := client.NewAPI(s.URL+"/", opts...)
		_, err := a.Group(t.Context(), "g")
		require.NoError(t, err)
		for _, err := range a.Results(t.Context(), "g") { // streamed
			require.Error(t, err)
			require.NotContains(t, err.Error(), secret)
		}
		for _, err := range a.Events(t.Context(), "g", "") {
			require.Error(t, err)
			require.NotContains(t, err.Error(), secret)
		}
		for _, path := range []string{"/v1/groups/g", "/v1/groups/g/results", "/v1/groups/g/events"} {
			require.Equal(t, "Bearer "+secret, got.of(path), path)
		}
	}
	require.Same(t, http.DefaultTransport, custom.Transport, "the caller's client stays as it is")

	got.values = nil
	_, err := client.NewAPI(s.URL).Group(t.Context(), "g")
	require.NoError(t, err)
	require.Empty(t, got.of("/v1/groups/g"))
}

func TestAPIKeyIsNotSentElsewhere(t *testing.T) {
	t.Parallel()
	var got received
	handler := func(target func() string) http.Handler {
		return http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
			got.note(r)
			if r.URL.Path == "/v1/groups/g" {
				http.Redirect(w, r, target(), http.StatusTemporaryRedirect)
				return
			}
			answer(w, http.StatusOK, api.Group{ID: "g"})
		})
	}
	target := "" // the requests are made one after the other
	to := handler(func() string { return target })
	s, elsewhere, encrypted := httptest.NewServer(to), httptest.NewServer(to), httptest.NewTLSServer(to)
	t.Cleanup(s.Close)
	t.Cleanup(elsewhere.Close)
	t.Cleanup(encrypted.Close)
	otherName := func(u string) string { return strings.Replace(u, "127.0.0.1", "localhost", 1) }
	for name, c := range map[string]struct {
		base, target string
		sent         bool
	}{
		"the same server":        {s.URL, "/x", true},
		"the same server, named": {s.URL, s.URL + "/x", true},
		"another port":           {s.URL, elsewhere.URL + "/x", false},
		"another name":           {s.URL, otherName(s.URL) + "/x", false},
		"from https to http":     {encrypted.URL, s.URL + "/x", false},
	} {
		got.values, target = nil, c.target
		a := client.NewAPI(c.base, client.WithAPIKey(secret), client.WithHTTPClient(encrypted.Client()))
		_, err := a.Group(t.Context(), "g")
		require.NoError(t, err, name)
		require.Equal(t, "Bearer "+secret, got.of("/v1/groups/g"), name)
		require.Equal(t, c.sent, got.of("/x") == "Bearer "+secret, name)
		require.Equal(t, !c.sent, got.of("/x") == "", name)
	}
}

// TestAPIKeyIsInNoError: the errors of six calls do not show the API key: with a line end or a NUL
// in the key, after status 404, and with three URLs that can't be reached or parsed.
func TestAPIKeyIsInNoError(t *testing.T) {
	t.Parallel()
	s := httptest.NewServer(http.NotFoundHandler())
	t.Cleanup(s.Close)
	for _, key := range []string{secret + "\n", secret + "\x00", secret} {
		a := client.NewAPI(s.URL, client.WithAPIKey(key), client.WithRetry(1, 0))
		_, err := a.Group(t.Context(), "g")
		require.Error(t, err)
		require.NotContains(t, err.Error(), secret)
	}
	for _, base := range []string{"http://127.0.0.1:1", "::", "http://[::1"} {
		_, err := client.NewAPI(base, client.WithAPIKey(secret), client.WithRetry(1, 0)).Group(t.Context(), "g")
		require.Error(t, err)
		require.NotContains(t, err.Error(), secret)
	}
}

// TestOrigin: as browsers see it, two URLs have the same origin if only the case of the scheme or
// name, or a default port that is left out, differs. http and https on the same port differ.
func TestOrigin(t *testing.T) {
	t.Parallel()
	for a, b := range map[string]string{
		"http://a": "HTTP://A:80/x?y", "https://a:443": "https://a/", "http://[::1]:80": "http://[::1]/",
	} {
		one, err := url.Parse(a)
		require.NoError(t, err)
		two, err := url.Parse(b)
		require.NoError(t, err)
		require.Equal(t, client.OriginOf(one), client.OriginOf(two))
	}
	one, err := url.Parse("http://a:443")
	require.NoError(t, err)
	two, err := url.Parse("https://a")
	require.NoError(t, err)
	require.NotEqual(t, client.OriginOf(one), client.OriginOf(two))
}

func TestMain(m *testing.M) { goleak.VerifyTestMain(m) }
