package main

import (
	"context"
	"crypto/ed25519"
	"encoding/base64"
	"encoding/json"
	"fmt"
	"io"
	"net/http"
	"net/http/cookiejar"
	"net/http/httptest"
	"net/url"
	"os"
	"path/filepath"
	"regexp"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/golang-jwt/jwt/v5"
	"github.com/stretchr/testify/require"
)

const apiKey = "sesame"

// room is a fake waiting room: it signs entry tokens, and serves the brokers' public keys and the
// API's calls.
type room struct {
	t       *testing.T
	key     ed25519.PrivateKey
	broker  *httptest.Server
	api     *httptest.Server
	mu      sync.Mutex
	calls   []string        // name and sold of each call
	ended   map[string]bool // fences
	renewal time.Time       // the expiry after a renewal; zero: none
	away    bool            // the API does not answer
}

func newRoom(t *testing.T) *room {
	t.Helper()
	_, key, err := ed25519.GenerateKey(nil)
	require.NoError(t, err)
	r := &room{t: t, key: key, ended: map[string]bool{}}
	r.broker = httptest.NewServer(http.HandlerFunc(func(w http.ResponseWriter, q *http.Request) {
		if q.Header.Get("Authorization") != "" { // the key is for the API alone
			w.WriteHeader(http.StatusBadRequest)
			return
		}
		x := base64.RawURLEncoding.EncodeToString(key.Public().(ed25519.PublicKey))
		fmt.Fprintf(w, `{"keys": [{"kty": "OKP", "crv": "Ed25519", "kid": "k", "x": %q}]}`, x)
	}))
	t.Cleanup(r.broker.Close)
	r.api = httptest.NewServer(http.HandlerFunc(r.serveAPI))
	t.Cleanup(r.api.Close)
	return r
}

func (r *room) sign(fence string, expires time.Time) string {
	token := jwt.NewWithClaims(jwt.SigningMethodEdDSA, jwt.MapClaims{
		"iss": r.broker.URL, "aud": "demo", "sub": "user-7", "evt": "demo", "jti": fence,
		"iat": time.Now().Unix(), "exp": expires.Unix(),
	})
	token.Header["kid"] = "k"
	signed, err := token.SignedString(r.key)
	require.NoError(r.t, err)
	return signed
}

func (r *room) serveAPI(w http.ResponseWriter, q *http.Request) {
	r.mu.Lock()
	defer r.mu.Unlock()
	var body struct {
		Token string
		Sold  bool
	}
	claims := jwt.MapClaims{}
	_ = json.NewDecoder(q.Body).Decode(&body)
	_, _, err := jwt.NewParser().ParseUnverified(body.Token, claims)
	if q.Header.Get("Authorization") != "Bearer "+apiKey {
		w.WriteHeader(http.StatusUnauthorized)
		return
	}
	if r.away || err != nil {
		w.WriteHeader(http.StatusServiceUnavailable)
		return
	}
	fence, _ := claims["jti"].(string)
	name := strings.TrimPrefix(q.URL.Path, "/v1/entry-tokens/")
	switch name {
	case "complete":
		name = fmt.Sprint(name, " ", body.Sold)
		fmt.Fprintf(w, `{"done": %t}`, !r.ended[fence])
		r.ended[fence] = true
	case "renew":
		if r.renewal.IsZero() {
			w.WriteHeader(http.StatusConflict)
			break
		}
		_ = json.NewEncoder(w).Encode(map[string]any{"token": r.sign(fence, r.renewal), "expires_at": r.renewal})
	case "verify":
		fmt.Fprintf(w, `{"valid": %t}`, !r.ended[fence])
	}
	r.calls = append(r.calls, name)
}

func (r *room) set(change func()) {
	r.mu.Lock()
	defer r.mu.Unlock()
	change()
}

// taken returns the calls since the last time.
func (r *room) taken() []string {
	r.mu.Lock()
	defer r.mu.Unlock()
	calls := r.calls
	r.calls = nil
	return calls
}

// browser is a browser that follows no redirect.
type browser struct {
	t    *testing.T
	shop string
	http *http.Client
}

type page struct {
	status           int
	body, location   string
	security, cached string
}

func (r *room) open(online bool) browser {
	r.t.Helper()
	keyFile := filepath.Join(r.t.TempDir(), "shop.key")
	require.NoError(r.t, os.WriteFile(keyFile, []byte(apiKey+"\n"), 0o600))
	s, err := newShop(r.t.Context(), config{
		broker: r.broker.URL, api: r.api.URL, event: "demo", online: online, keyFile: keyFile,
	})
	require.NoError(r.t, err)
	server := httptest.NewServer(s.handler())
	r.t.Cleanup(server.Close)
	jar, err := cookiejar.New(nil)
	require.NoError(r.t, err)
	return browser{r.t, server.URL, &http.Client{
		Jar:           jar,
		CheckRedirect: func(*http.Request, []*http.Request) error { return http.ErrUseLastResponse },
	}}
}

// admit gives the browser a token, as the broker does.
func (b browser) admit(token string) {
	u, err := url.Parse(b.shop)
	require.NoError(b.t, err)
	b.http.Jar.SetCookies(u, []*http.Cookie{{Name: "entry.demo", Value: token, Path: "/"}})
}

func (b browser) token() string {
	u, err := url.Parse(b.shop)
	require.NoError(b.t, err)
	for _, c := range b.http.Jar.Cookies(u) {
		if c.Name == "entry.demo" {
			return c.Value
		}
	}
	return ""
}

func (b browser) do(method, path string, headers ...string) page {
	b.t.Helper()
	q, err := http.NewRequestWithContext(b.t.Context(), method, b.shop+path, nil)
	require.NoError(b.t, err)
	q.Header.Set("Accept", "text/html,*/*;q=0.8")
	for i := 0; i < len(headers); i += 2 {
		q.Header.Set(headers[i], headers[i+1])
	}
	a, err := b.http.Do(q)
	require.NoError(b.t, err)
	defer a.Body.Close()
	body, err := io.ReadAll(a.Body)
	require.NoError(b.t, err)
	return page{a.StatusCode, string(body), a.Header.Get("Location"), a.Header.Get("Content-Security-Policy"), a.Header.Get("Cache-Control")}
}

func TestTheWayThroughTheShop(t *testing.T) {
	t.Parallel()
	r := newRoom(t)
	b := r.open(false)
	home := b.do("GET", "/")
	require.Equal(t, http.StatusOK, home.status)
	require.Contains(t, home.body, `href="/buy"`)
	require.Contains(t, home.security, "default-src 'none'")
	require.Contains(t, b.do("GET", "/style.css").body, "main {")
	require.Equal(t, http.StatusNotFound, b.do("GET", "/nothing").status)

	out := b.do("GET", "/buy")
	require.Equal(t, http.StatusFound, out.status)
	require.Equal(t, r.broker.URL+"/events/demo/wait", out.location)

	b.admit(r.sign("17", time.Now().Add(time.Minute)))
	offer := b.do("GET", "/buy")
	require.Equal(t, http.StatusOK, offer.status)
	require.Contains(t, offer.body, `<button id="buy">`)
	require.Contains(t, offer.body, `<button id="leave"`)
	require.Equal(t, "no-store", offer.cached)

	bought := b.do("POST", "/buy")
	require.Equal(t, http.StatusSeeOther, bought.status)
	require.Regexp(t, `^/orders/[A-Z2-7]{26}$`, bought.location)
	require.Equal(t, []string{"complete true"}, r.taken())
	order := b.do("GET", bought.location)
	require.Equal(t, http.StatusOK, order.status)
	require.Contains(t, order.body, `id="bought"`)
	require.Equal(t, http.StatusNotFound, b.do("GET", "/orders/17").status)

	require.Empty(t, b.token())
	require.Equal(t, http.StatusFound, b.do("GET", "/buy").status, "the next ticket needs a new entry")
}

// TestBuyTwice: the form is sent twice with one entry token. Both answers lead to one page of a
// ticket, and the API is asked to complete the entry twice.
func TestBuyTwice(t *testing.T) {
	t.Parallel()
	r := newRoom(t)
	b := r.open(false)
	token := r.sign("17", time.Now().Add(time.Minute))
	b.admit(token)
	first := b.do("POST", "/buy")
	b.admit(token) // the second click was sent before the answer to the first one
	second := b.do("POST", "/buy")
	require.Equal(t, first.location, second.location)
	require.Contains(t, b.do("GET", second.location).body, `id="bought"`)
	require.Equal(t, []string{"complete true", "complete true"}, r.taken())
}

func TestLeave(t *testing.T) {
	t.Parallel()
	r := newRoom(t)
	b := r.open(false)
	token := r.sign("17", time.Now().Add(time.Minute))
	b.admit(token)
	left := b.do("POST", "/leave")
	require.Equal(t, http.StatusSeeOther, left.status)
	require.Equal(t, "/", left.location)
	require.Equal(t, []string{"complete false"}, r.taken())
	require.Empty(t, b.token())

	b.admit(token) // in another tab
	late := b.do("POST", "/buy")
	require.Equal(t, http.StatusSeeOther, late.status)
	require.Contains(t, b.do("GET", late.location).body, `id="unconfirmed"`)
}

func TestRenew(t *testing.T) {
	t.Parallel()
	r := newRoom(t)
	b := r.open(false)
	b.admit(r.sign("17", time.Now().Add(time.Minute)))
	over := b.do("POST", "/renew")
	require.Equal(t, http.StatusConflict, over.status)
	require.Contains(t, over.body, `id="over"`)

	later := time.Now().Add(time.Hour).Truncate(time.Second).UTC()
	r.set(func() { r.renewal = later })
	require.Equal(t, "/buy", b.do("POST", "/renew").location)
	require.Regexp(t, regexp.QuoteMeta(later.Format("15:04:05")), b.do("GET", "/buy").body)
}

func TestAPIIsAway(t *testing.T) {
	t.Parallel()
	r := newRoom(t)
	b := r.open(false)
	b.admit(r.sign("17", time.Now().Add(time.Minute)))
	r.set(func() { r.away = true })
	for _, path := range []string{"/buy", "/leave", "/renew"} {
		p := b.do("POST", path)
		require.Equal(t, http.StatusServiceUnavailable, p.status)
		require.Contains(t, p.body, `id="unavailable"`)
	}
	require.NotEmpty(t, b.token(), "the user may try again")
	r.set(func() { r.away = false })
	require.Contains(t, b.do("GET", b.do("POST", "/buy").location).body, `id="bought"`)
}

func TestOnlineRefusesWhatWasGivenBack(t *testing.T) {
	t.Parallel()
	r := newRoom(t)
	b := r.open(true)
	b.admit(r.sign("17", time.Now().Add(time.Minute)))
	require.Equal(t, http.StatusOK, b.do("GET", "/buy").status)
	r.set(func() { r.ended["17"] = true })
	require.Equal(t, http.StatusFound, b.do("GET", "/buy").status)
}

func TestFormsAreRefused(t *testing.T) {
	t.Parallel()
	r := newRoom(t)
	b := r.open(false)
	early := b.do("GET", "/buy", "Accept", "*/*")
	require.Equal(t, http.StatusForbidden, early.status)
	require.Contains(t, early.body, "It is not your turn yet")
	require.Contains(t, early.body, r.broker.URL+"/events/demo/wait")
	for name, token := range map[string]string{"late": r.sign("17", time.Now().Add(-time.Minute)), "forged": "a.b.c"} {
		b.admit(token)
		p := b.do("POST", "/buy")
		require.Equal(t, http.StatusForbidden, p.status, name)
		require.Contains(t, p.body, `id="refused"`, name)
		require.Contains(t, p.body, r.broker.URL+"/events/demo/wait", name)
	}
	b.admit(r.sign("17", time.Now().Add(time.Minute)))
	p := b.do("POST", "/buy", "Sec-Fetch-Site", "cross-site", "Origin", "https://evil.example")
	require.Equal(t, http.StatusForbidden, p.status)
	require.Empty(t, r.taken())
}

func TestRun(t *testing.T) {
	t.Parallel()
	r := newRoom(t)
	ctx, cancel := context.WithCancel(t.Context())
	cancel()
	require.NoError(t, run(ctx, "127.0.0.1:0", config{broker: r.broker.URL, api: r.api.URL, event: "demo"}))
	require.ErrorContains(t, run(ctx, "127.0.0.1:0", config{broker: r.broker.URL, api: r.api.URL, event: "a b"}), `Event "a b"`)
	require.ErrorContains(t, run(ctx, "127.0.0.1:0", config{broker: r.broker.URL, api: "x", event: "demo"}), "the API's URL")
	require.ErrorContains(t, run(t.Context(), r.broker.Listener.Addr().String(), config{broker: r.broker.URL, api: r.api.URL, event: "demo"}), "in use: set -addr or SHOP_ADDR")
}
