package entry_test

import (
	"bytes"
	"context"
	"fmt"
	"io"
	"log/slog"
	"net/http"
	"net/http/httptest"
	"strings"
	"sync"
	"testing"
	"testing/synctest"
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

// world is a Verifier and the fake brokers from which it fetches keys, in a bubble of synctest.
type world struct {
	*testing.T
	b   *brokers
	v   *entry.Verifier
	log *bytes.Buffer
}

func inBubble(t *testing.T, test func(w *world), published ...func(t testing.TB) signer) {
	t.Helper()
	t.Parallel()
	synctest.Test(t, func(t *testing.T) {
		w := &world{T: t, b: &brokers{}, log: &bytes.Buffer{}}
		var all []signer
		for _, s := range published {
			all = append(all, s(t))
		}
		w.b.set(all...)
		w.v = newVerifier(t, entry.Config{HTTPClient: w.b.client(), Log: slog.New(slog.NewTextHandler(w.log, nil))})
		test(w)
	})
}

// fetches returns the number of fetches since the last call.
func (w *world) fetches() int64 { return w.b.fetches.Swap(0) }

func (w *world) check(want error, token string) {
	w.Helper()
	_, err := w.v.Verify(w.Context(), token)
	if want == nil {
		require.NoError(w, err)
	} else {
		require.ErrorIs(w, err, want)
	}
}

// TestKeyRotation: when brokers begin to use a new key, it is fetched for the first token that
// names it, but at most once a minute. Tokens of a key that is not published any more are refused
// once the fetched keys are 5 minutes old.
func TestKeyRotation(t *testing.T) {
	inBubble(t, func(w *world) {
		old, next := w.b.signers[0], newSigner(w)
		oldToken := old.sign(w, time.Hour)
		w.check(nil, oldToken)
		require.EqualValues(w, 1, w.fetches())

		w.b.set(next, old)
		w.check(nil, next.sign(w, time.Hour)) // at once
		require.EqualValues(w, 1, w.fetches())
		w.check(nil, oldToken)

		third := newSigner(w)
		w.b.set(third, next, old)
		w.check(entry.ErrInvalid, third.sign(w, time.Hour)) // the next fetch is allowed a minute later
		require.Zero(w, w.fetches())
		time.Sleep(time.Minute)
		w.check(nil, third.sign(w, time.Hour))
		require.EqualValues(w, 1, w.fetches())

		w.b.set(third) // the keys are fetched again after 5 minutes, so the others end
		w.check(nil, oldToken)
		time.Sleep(5 * time.Minute)
		w.check(entry.ErrInvalid, oldToken)
		w.check(nil, third.sign(w, time.Hour))
		require.EqualValues(w, 1, w.fetches())
	}, newSigner)
}

// TestJWKSOutage: while the public keys can't be fetched for an hour, the Verifier uses the old
// keys, and tries to fetch them once a minute from the fifth minute on.
func TestJWKSOutage(t *testing.T) {
	inBubble(t, func(w *world) {
		s := w.b.signers[0]
		token := s.sign(w, 24*time.Hour)
		w.b.set()
		w.fetches()
		for range 60 {
			time.Sleep(time.Minute)
			w.check(nil, token)
			w.check(nil, token)
		}
		require.InDelta(w, 56, w.fetches(), 1, "one fetch a minute, from 5 minutes on")
		require.Contains(w, w.log.String(), "the public keys of entry tokens could not be fetched")
		require.Contains(w, w.log.String(), "connection refused")
		// While no keys can be fetched, a token with an unknown key is not called invalid: a broker
		// may have signed it.
		w.check(entry.ErrUnavailable, newSigner(w).sign(w, time.Hour))
		w.b.set(s)
		time.Sleep(time.Minute)
		w.check(nil, token)
		w.check(entry.ErrInvalid, newSigner(w).sign(w, time.Hour))
	}, newSigner)
}

// TestBrokersAreAwayAtStart: a service may start before the brokers do. Until they answer, Verify
// returns ErrUnavailable, and fetches at most once a second.
func TestBrokersAreAwayAtStart(t *testing.T) {
	inBubble(t, func(w *world) {
		s := newSigner(w)
		token := s.sign(w, time.Hour)
		require.EqualValues(w, 1, w.fetches())
		w.check(entry.ErrUnavailable, token)
		w.check(entry.ErrUnavailable, token)
		require.Zero(w, w.fetches(), "at most one fetch a second")
		time.Sleep(time.Second)
		w.check(entry.ErrUnavailable, token)
		require.EqualValues(w, 1, w.fetches())
		w.b.set(s)
		time.Sleep(time.Second)
		w.check(nil, token)
	})
}

// TestFloodOfUnknownKeys: in each of three minutes, 100 concurrent checks of a token with an
// unknown key cause one fetch of the public keys. A token with a known key stays valid.
func TestFloodOfUnknownKeys(t *testing.T) {
	inBubble(t, func(w *world) {
		good, foreign := w.b.signers[0].sign(w, time.Hour), newSigner(w).sign(w, time.Hour)
		w.fetches()
		for range 3 {
			var callers sync.WaitGroup
			for range 100 {
				callers.Go(func() {
					w.check(entry.ErrInvalid, foreign)
					w.check(nil, good)
				})
			}
			callers.Wait()
			require.EqualValues(w, 1, w.fetches())
			time.Sleep(time.Minute)
		}
	}, newSigner)
}

// TestSlowFetch: a slow fetch of the public keys delays only the tokens that need it. It continues
// when the context of the call that caused it ends. Other calls wait for it until their own context
// ends.
func TestSlowFetch(t *testing.T) {
	inBubble(t, func(w *world) {
		old, next := w.b.signers[0], newSigner(w)
		good, unknown := old.sign(w, time.Hour), next.sign(w, time.Hour)
		w.b.set(old, next)
		w.b.release = make(chan struct{})

		ctx, cancel := context.WithCancel(w.Context())
		first, second, third := make(chan error, 1), make(chan error, 1), make(chan error, 1)
		verify := func(ctx context.Context, result chan error) { _, err := w.v.Verify(ctx, unknown); result <- err }
		go verify(ctx, first)
		synctest.Wait()
		go verify(ctx, second)
		go verify(w.Context(), third)
		synctest.Wait()
		w.check(nil, good)
		cancel()
		require.ErrorIs(w, <-second, entry.ErrUnavailable) // it does not wait any longer
		require.Empty(w, first)
		close(w.b.release)
		require.NoError(w, <-first)
		require.NoError(w, <-third)
	}, newSigner)
}

// TestOldKeysAreRenewedOnce: when the public keys are old, one request fetches them again; the
// others use the old keys meanwhile.
func TestOldKeysAreRenewedOnce(t *testing.T) {
	inBubble(t, func(w *world) {
		token := w.b.signers[0].sign(w, time.Hour)
		w.fetches()
		time.Sleep(5 * time.Minute)
		w.b.release = make(chan struct{})
		first := make(chan struct{})
		go func() { defer close(first); w.check(nil, token) }()
		synctest.Wait()
		w.check(nil, token)
		close(w.b.release)
		<-first
		w.check(nil, token)
		require.EqualValues(w, 1, w.fetches())
	}, newSigner)
}

func TestUnusableJWKS(t *testing.T) {
	s := newSigner(t)
	jwk := strings.TrimSuffix(strings.TrimPrefix(string(s.JWKS()), `{"keys":[`), "]}")
	for name, c := range map[string]struct {
		answer answer
		want   string
	}{
		"an error":            {answer{http.StatusInternalServerError, string(s.JWKS())}, "status 500"},
		"a redirect":          {answer{status: http.StatusFound}, "status 302"},
		"no JSON":             {answer{http.StatusOK, "<html>"}, "no JWKS"},
		"no keys":             {answer{http.StatusOK, `{"keys":[]}`}, "no Ed25519 key"},
		"another kind of key": {answer{http.StatusOK, `{"keys":[{"kty":"RSA","kid":"a","n":"AQAB","e":"AQAB"}]}`}, "no Ed25519 key"},
		"an encryption key":   {answer{http.StatusOK, `{"keys":[` + strings.Replace(jwk, `"sig"`, `"enc"`, 1) + `]}`}, "no Ed25519 key"},
		"another algorithm":   {answer{http.StatusOK, `{"keys":[` + strings.Replace(jwk, "EdDSA", "HS256", 1) + `]}`}, "no Ed25519 key"},
		"a short key":         {answer{http.StatusOK, `{"keys":[{"kty":"OKP","crv":"Ed25519","kid":"a","x":"AAAA"}]}`}, "no Ed25519 key"},
		"no kid":              {answer{http.StatusOK, `{"keys":[` + strings.Replace(jwk, `"kid"`, `"id"`, 1) + `]}`}, "no Ed25519 key"},
		"too long":            {answer{http.StatusOK, fmt.Sprintf(`{"keys":[%s],"x":%q}`, jwk, strings.Repeat("x", 2<<20))}, "more than 1048576 bytes"},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			b := &brokers{answer: &c.answer}
			var log bytes.Buffer
			v := newVerifier(t, entry.Config{HTTPClient: b.client(), Log: slog.New(slog.NewTextHandler(&log, nil))})
			require.Contains(t, log.String(), c.want)
			_, err := v.Verify(t.Context(), s.sign(t, time.Hour))
			require.ErrorIs(t, err, entry.ErrUnavailable)
		})
	}
	t.Run("keys that are skipped", func(t *testing.T) {
		t.Parallel()
		b := &brokers{answer: &answer{
			http.StatusOK, `{"keys":[{"kty":"RSA","kid":"a"},` + jwk + `,{"kty":"OKP","crv":"X25519","kid":"b","x":"AAAA"}]}`,
		}}
		_, err := newVerifier(t, entry.Config{HTTPClient: b.client()}).Verify(t.Context(), s.sign(t, time.Hour))
		require.NoError(t, err)
	})
}
