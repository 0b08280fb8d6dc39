package entry_test

import (
	"context"
	"io"
	"net/http"
	"net/http/httptest"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/bulkaction/bulkaction/entry"
)

// fakeAPI is a fake of the API. It answers all requests with the status and body that the test has
// set, and records them.
type fakeAPI struct {
	*httptest.Server
	mu     sync.Mutex
	status int
	body   string
	seen   []string
}

func newAPI(t *testing.T) *fakeAPI {
	t.Helper()
	a := &fakeAPI{status: http.StatusOK}
	a.Server = httptest.NewServer(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		body, err := io.ReadAll(r.Body)
		if err != nil || r.Header.Get("Content-Type") != "application/json" {
			http.Error(w, "bad request", http.StatusBadRequest)
			return
		}
		a.mu.Lock()
		defer a.mu.Unlock()
		a.seen = append(a.seen, r.Method+" "+r.URL.Path+" "+string(body))
		w.Header().Set("Location", "/elsewhere")
		w.WriteHeader(a.status)
		_, _ = io.WriteString(w, a.body)
	}))
	t.Cleanup(a.Close)
	return a
}

func (a *fakeAPI) reply(status int, body string) {
	a.mu.Lock()
	defer a.mu.Unlock()
	a.status, a.body = status, body
}

// requests returns the requests since the last call.
func (a *fakeAPI) requests() []string {
	a.mu.Lock()
	defer a.mu.Unlock()
	seen := a.seen
	a.seen = nil
	return seen
}

func TestClient(t *testing.T) {
	t.Parallel()
	api := newAPI(t)
	c, err := entry.NewClient(api.URL+"/", nil)
	require.NoError(t, err)

	api.reply(http.StatusOK, `{"done": true}`)
	done, err := c.Complete(t.Context(), "tok", true)
	require.NoError(t, err)
	require.True(t, done)
	api.reply(http.StatusOK, `{"done": false}`)
	done, err = c.Complete(t.Context(), "tok", false)
	require.NoError(t, err)
	require.False(t, done)
	api.reply(http.StatusOK, `{"token": "new", "expires_at": "2026-11-23T10:00:00Z"}`)
	renewed, err := c.Renew(t.Context(), "tok")
	require.NoError(t, err)
	require.Equal(t, entry.Renewal{Token: "new", ExpiresAt: time.Date(2026, 11, 23, 10, 0, 0, 0, time.UTC)}, renewed)
	api.reply(http.StatusOK, `{"valid": true}`)
	valid, err := c.Verify(t.Context(), "tok")
	require.NoError(t, err)
	require.True(t, valid)
	require.Equal(t, []string{
		`POST /v1/entry-tokens/complete {"sold":true,"token":"tok"}`,
		`POST /v1/entry-tokens/complete {"sold":false,"token":"tok"}`,
		`POST /v1/entry-tokens/renew {"token":"tok"}`,
		`POST /v1/entry-tokens/verify {"token":"tok"}`,
	}, api.requests())
}

func TestClientErrors(t *testing.T) {
	t.Parallel()
	api := newAPI(t)
	c, err := entry.NewClient(api.URL, nil)
	require.NoError(t, err)
	for _, answer := range []struct {
		status int
		body   string
		is     error
		want   string
	}{
		{http.StatusConflict, `{"detail": "the session is as long as it may be"}`, entry.ErrOver, "as long as it may be"},
		{http.StatusUnprocessableEntity, `{"detail": "token: bad signature"}`, entry.ErrInvalid, "token: bad signature"},
		{http.StatusServiceUnavailable, `{"detail": "no Redis"}`, entry.ErrUnavailable, "status 503: no Redis"},
		{http.StatusBadGateway, `<html>`, entry.ErrUnavailable, "status 502: Bad Gateway"},
		{http.StatusTooManyRequests, ``, entry.ErrUnavailable, "status 429"},
		{http.StatusOK, `<html>`, entry.ErrUnavailable, "no JSON document"},
		{http.StatusOK, `{}`, entry.ErrUnavailable, "the answer has no token"},
		{http.StatusTemporaryRedirect, ``, nil, "status 307"},
		{http.StatusForbidden, `{"detail": "loopback only"}`, nil, "status 403: loopback only"},
	} {
		api.reply(answer.status, answer.body)
		_, err := c.Renew(t.Context(), "a-secret")
		require.ErrorContains(t, err, answer.want)
		require.ErrorContains(t, err, "renew the entry: ")
		require.NotContains(t, err.Error(), "a-secret")
		if answer.is != nil {
			require.ErrorIs(t, err, answer.is)
		}
		require.Len(t, api.requests(), 1, "no call is repeated, and no redirect followed")
	}
	ended, cancel := context.WithCancel(t.Context())
	cancel()
	_, err = c.Complete(ended, "a-secret", true)
	require.ErrorIs(t, err, entry.ErrUnavailable)
	require.ErrorIs(t, err, context.Canceled)

	_, err = entry.NewClient("127.0.0.1:8080", nil)
	require.Error(t, err)
	_, err = entry.NewClient("", nil)
	require.EqualError(t, err, "entry: the API's URL is missing")
}

// TestOwnHTTPClient: the Client uses a copy of the caller's http.Client. The copy has the same
// transport but follows no redirect; the caller's own http.Client is not changed.
func TestOwnHTTPClient(t *testing.T) {
	t.Parallel()
	api := newAPI(t)
	api.reply(http.StatusTemporaryRedirect, "")
	own := &http.Client{Transport: counting{t, new(int)}}
	c, err := entry.NewClient(api.URL, own)
	require.NoError(t, err)
	_, err = c.Complete(t.Context(), "tok", true)
	require.ErrorContains(t, err, "status 307")
	require.Equal(t, 1, *own.Transport.(counting).n)
	require.Nil(t, own.CheckRedirect)
}

type counting struct {
	t *testing.T
	n *int
}

func (c counting) RoundTrip(r *http.Request) (*http.Response, error) {
	*c.n++
	require.True(c.t, strings.HasSuffix(r.URL.Path, "/complete"))
	return http.DefaultTransport.RoundTrip(r)
}
