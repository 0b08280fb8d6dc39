package client_test

import (
	"net/http"
	"net/http/httptest"
	"net/url"
	"strings"
	"sync"
	"testing"

	"github.com/stretchr/testify/require"

	"github.com/bulkaction/bulkaction/api"
	"github.com/bulkaction/bulkaction/client"
)

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
