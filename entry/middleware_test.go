package entry_test

import (
	"bytes"
	"crypto/ed25519"
	"encoding/json"
	"log/slog"
	"net/http"
	"net/http/httptest"
	"strings"
	"testing"
	"testing/synctest"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/bulkaction/bulkaction/entry"
	"github.com/bulkaction/bulkaction/internal/room/entrytoken"
)

const waitURL = publicURL + "/events/" + event + "/wait"

// shop answers with the claims of the request.
var shop = http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
	c, ok := entry.FromContext(r.Context())
	_ = json.NewEncoder(w).Encode(map[string]any{"ok": ok, "user": c.User, "fence": c.Fence, "token": entry.Token(r.Context())})
})

// ask sends a request through the middleware of v.
func ask(v *entry.Verifier, method string, header map[string]string, cookies ...string) *httptest.ResponseRecorder {
	r := httptest.NewRequest(method, "/buy", nil)
	for name, value := range header {
		r.Header.Set(name, value)
	}
	for _, token := range cookies {
		r.AddCookie(&http.Cookie{Name: "entry." + event, Value: token})
	}
	w := httptest.NewRecorder()
	v.Middleware(shop).ServeHTTP(w, r)
	return w
}

const browser = "text/html,application/xhtml+xml,application/xml;q=0.9,*/*;q=0.8"

func TestMiddlewareLetsValidTokensThrough(t *testing.T) {
	t.Parallel()
	s := newSigner(t)
	v := newVerifier(t, entry.Config{Keys: []ed25519.PublicKey{s.public()}})
	good, old := s.sign(t, time.Minute), s.sign(t, -time.Minute)
	for name, w := range map[string]*httptest.ResponseRecorder{
		"cookie":                        ask(v, "GET", map[string]string{"Accept": browser}, good),
		"cookie of a POST":              ask(v, "POST", nil, good),
		"bearer token":                  ask(v, "POST", map[string]string{"Authorization": "Bearer " + good}),
		"bearer in other case":          ask(v, "GET", map[string]string{"Authorization": "bEARER   " + good}),
		"cookie beside another scheme":  ask(v, "GET", map[string]string{"Authorization": "Basic abc"}, good),
		"cookie beside another token":   ask(v, "GET", map[string]string{"Authorization": "Bearer abc"}, good),
		"bearer beside an old cookie":   ask(v, "GET", map[string]string{"Authorization": "Bearer " + good}, old),
		"two cookies, one of them old":  ask(v, "GET", nil, old, good),
		"bearer beside too many cookie": ask(v, "GET", map[string]string{"Authorization": "Bearer " + good}, old, old, old, old, old),
	} {
		require.Equal(t, http.StatusOK, w.Code, name)
		require.JSONEq(t, `{"ok": true, "user": "`+user+`", "fence": "17", "token": "`+good+`"}`, w.Body.String(), name)
	}
}

func TestMiddlewareRefuses(t *testing.T) {
	t.Parallel()
	s := newSigner(t)
	v := newVerifier(t, entry.Config{Keys: []ed25519.PublicKey{s.public()}})
	good, old := s.sign(t, time.Minute), s.sign(t, -time.Minute)
	otherName := httptest.NewRequest("GET", "/buy?token="+good, nil)
	otherName.Header.Set("Accept", browser)
	otherName.AddCookie(&http.Cookie{Name: "entry.other", Value: good})
	otherNameAnswer := httptest.NewRecorder()
	v.Middleware(shop).ServeHTTP(otherNameAnswer, otherName)

	page := func(header ...string) map[string]string {
		h := map[string]string{"Accept": browser}
		for i := 0; i < len(header); i += 2 {
			h[header[i]] = header[i+1]
		}
		return h
	}
	for name, w := range map[string]*httptest.ResponseRecorder{
		"no token":                   ask(v, "GET", page()),
		"an old token":               ask(v, "GET", page(), old),
		"no token at all":            ask(v, "GET", page("Authorization", "Bearer")),
		"an empty bearer":            ask(v, "GET", page("Authorization", "Bearer ")),
		"another scheme":             ask(v, "GET", page("Authorization", "Basic "+good)),
		"another cookie and a query": otherNameAnswer,
		"the fourth cookie":          ask(v, "GET", page(), old, old, old, good),
		"64 KiB of cookies":          ask(v, "GET", page(), strings.Repeat("A", 64<<10)),
		"only HTML accepted":         ask(v, "GET", map[string]string{"Accept": "text/html"}),
		"several headers":            ask(v, "GET", map[string]string{"Accept": "application/json, TEXT/HTML;q=0.5"}),
	} {
		require.Equal(t, http.StatusFound, w.Code, name)
		require.Equal(t, waitURL, w.Header().Get("Location"), name)
		require.Equal(t, "no-store", w.Header().Get("Cache-Control"), name)
	}
	for name, w := range map[string]*httptest.ResponseRecorder{
		"no Accept":        ask(v, "GET", nil),
		"any":              ask(v, "GET", map[string]string{"Accept": "*/*"}),
		"JSON":             ask(v, "GET", map[string]string{"Accept": "application/json"}),
		"no HTML":          ask(v, "GET", map[string]string{"Accept": "text/html;q=0, */*"}),
		"bad Accept":       ask(v, "GET", map[string]string{"Accept": ";;,/"}),
		"POST of a script": ask(v, "POST", map[string]string{"Accept": "application/json, */*"}, old),
		"HEAD":             ask(v, "HEAD", page()),
	} {
		require.Equal(t, http.StatusForbidden, w.Code, name)
		require.Equal(t, "application/problem+json", w.Header().Get("Content-Type"), name)
		require.Equal(t, "no-store", w.Header().Get("Cache-Control"), name)
		require.JSONEq(t, `{"type": "about:blank", "title": "Forbidden", "status": 403, "wait": "`+waitURL+`",
			"detail": "this needs a valid entry token of the event spring-sale: enter its waiting room"}`, w.Body.String(), name)
	}
}

// TestLateForm: a browser that sends a form without a valid token, or too late, gets a page that says
// what to do.
func TestLateForm(t *testing.T) {
	t.Parallel()
	s := newSigner(t)
	v := newVerifier(t, entry.Config{Keys: []ed25519.PublicKey{s.public()}})
	for name, w := range map[string]*httptest.ResponseRecorder{
		"too late":   ask(v, "POST", map[string]string{"Accept": browser}, s.sign(t, -time.Minute)),
		"never in":   ask(v, "POST", map[string]string{"Accept": browser, "Accept-Language": "en-US,ko;q=0.5"}),
		"an upload":  ask(v, "PUT", map[string]string{"Accept": "text/html"}),
		"in no time": ask(v, "DELETE", map[string]string{"Accept": browser, "Accept-Language": "fr"}),
	} {
		require.Equal(t, http.StatusForbidden, w.Code, name)
		require.Equal(t, "text/html; charset=utf-8", w.Header().Get("Content-Type"), name)
		require.Equal(t, "no-store", w.Header().Get("Cache-Control"), name)
		require.Contains(t, w.Header().Get("Content-Security-Policy"), "default-src 'none'", name)
		require.Contains(t, w.Body.String(), `<html lang="en">`, name)
		require.Contains(t, w.Body.String(), "What you sent was not accepted", name)
		require.Contains(t, w.Body.String(), `<a href="`+waitURL+`">Go to the waiting room</a>`, name)
	}
	w := ask(v, "POST", map[string]string{"Accept": browser, "Accept-Language": "ko-KR,ko;q=0.9"})
	require.Contains(t, w.Body.String(), `">대기실로 가기</a>`)
	require.Equal(t, "ko", w.Header().Get("Content-Language"))
}

func TestOwnRefusal(t *testing.T) {
	t.Parallel()
	s := newSigner(t)
	v := newVerifier(t, entry.Config{Keys: []ed25519.PublicKey{s.public()}, Refused: http.HandlerFunc(
		func(w http.ResponseWriter, _ *http.Request) { http.Error(w, "your time is over", http.StatusForbidden) })})
	require.Equal(t, http.StatusFound, ask(v, "GET", map[string]string{"Accept": browser}).Code)
	require.Equal(t, http.StatusOK, ask(v, "POST", nil, s.sign(t, time.Minute)).Code)
	w := ask(v, "POST", nil, s.sign(t, -time.Minute))
	require.Equal(t, http.StatusForbidden, w.Code)
	require.Equal(t, "your time is over\n", w.Body.String())
	require.Equal(t, "no-store", w.Header().Get("Cache-Control"))
}

func TestContextWithoutToken(t *testing.T) {
	t.Parallel()
	c, ok := entry.FromContext(t.Context())
	require.False(t, ok)
	require.Zero(t, c)
	require.Empty(t, entry.Token(t.Context()))
}

// TestMiddlewareWithoutKeys: without public keys, the answer to a token is 503. The waiting page
// would send admitted users back, for ever. A browser without a token is sent there.
func TestMiddlewareWithoutKeys(t *testing.T) {
	t.Parallel()
	s := newSigner(t)
	v := newVerifier(t, entry.Config{HTTPClient: (&brokers{}).client()})
	token := s.sign(t, time.Minute)
	w := ask(v, "GET", map[string]string{"Accept": browser}, token)
	require.Equal(t, http.StatusServiceUnavailable, w.Code)
	require.Equal(t, "2", w.Header().Get("Retry-After"))
	require.Contains(t, w.Header().Get("Content-Type"), "text/html")
	require.Contains(t, w.Body.String(), "reload this page")
	require.Contains(t, ask(v, "POST", map[string]string{"Accept": browser}, token).Body.String(), "send it again")
	w = ask(v, "POST", nil, token)
	require.Equal(t, http.StatusServiceUnavailable, w.Code)
	require.Contains(t, w.Body.String(), `"status":503`)
	require.Equal(t, http.StatusFound, ask(v, "GET", map[string]string{"Accept": browser}).Code, "without a token nothing is checked")
}

// TestMismatchIsLoggedOnceAMinute: ten tokens for another audience and ten forged ones are refused
// in each of two minutes. Each minute has one warning, about the audience, without token and user.
func TestMismatchIsLoggedOnceAMinute(t *testing.T) {
	t.Parallel()
	synctest.Test(t, func(t *testing.T) {
		s := newSigner(t)
		var log bytes.Buffer
		v := newVerifier(t, entry.Config{Keys: []ed25519.PublicKey{s.public()}, Log: slog.New(slog.NewTextHandler(&log, nil))})
		token := s.sign(t, time.Hour, func(c *entrytoken.Claims) { c.Audience = "shop" })
		for range 2 {
			for range 10 {
				require.Equal(t, http.StatusForbidden, ask(v, "POST", nil, token).Code)
				require.Equal(t, http.StatusForbidden, ask(v, "POST", nil, "forged").Code)
			}
			require.Equal(t, 1, strings.Count(log.String(), "level=WARN"), log.String())
			require.Contains(t, log.String(), "it is for another audience")
			require.NotContains(t, log.String(), user)
			require.NotContains(t, log.String(), token)
			log.Reset()
			time.Sleep(time.Minute)
		}
	})
}

func TestOnline(t *testing.T) {
	t.Parallel()
	s := newSigner(t)
	api := newAPI(t)
	v := newVerifier(t, entry.Config{Keys: []ed25519.PublicKey{s.public()}, Online: true, APIURL: api.URL + "/"})
	good := s.sign(t, time.Minute)
	page := map[string]string{"Accept": browser}

	api.reply(http.StatusOK, `{"valid": true, "event": "spring-sale", "fence": "17"}`)
	require.Equal(t, http.StatusOK, ask(v, "GET", page, good).Code)
	require.Equal(t, []string{`POST /v1/entry-tokens/verify {"token":"` + good + `"}`}, api.requests())

	api.reply(http.StatusOK, `{"valid": false}`)
	require.Equal(t, http.StatusFound, ask(v, "GET", page, good).Code)
	_, err := v.Verify(t.Context(), good)
	require.ErrorIs(t, err, entry.ErrInvalid)
	require.ErrorContains(t, err, "given back")
	api.reply(http.StatusUnprocessableEntity, `{"detail": "bad signature"}`)
	require.Equal(t, http.StatusFound, ask(v, "GET", page, good).Code)
	api.requests()

	// A token that is refused offline costs no call of the API.
	require.Equal(t, http.StatusFound, ask(v, "GET", page, s.sign(t, -time.Minute)).Code)
	require.Equal(t, http.StatusFound, ask(v, "GET", page, "forged").Code)
	require.Empty(t, api.requests())

	for _, status := range []int{http.StatusServiceUnavailable, http.StatusTooManyRequests, http.StatusNotFound} {
		api.reply(status, `{}`)
		require.Equal(t, http.StatusServiceUnavailable, ask(v, "GET", page, good).Code, status)
	}
	api.Close()
	require.Equal(t, http.StatusServiceUnavailable, ask(v, "GET", page, good).Code, "nobody is let in unchecked")
}

func TestCookies(t *testing.T) {
	t.Parallel()
	expires := time.Date(2026, 11, 23, 10, 0, 0, 0, time.UTC)
	r := entry.Renewal{Token: "abc", ExpiresAt: expires}
	require.Equal(t, "entry.spring-sale=abc; Path=/; Expires=Mon, 23 Nov 2026 10:00:00 GMT; HttpOnly; SameSite=Lax",
		entry.Cookie(event, r, false).String())
	require.Equal(t, "entry.spring-sale=abc; Path=/; Expires=Mon, 23 Nov 2026 10:00:00 GMT; HttpOnly; Secure; SameSite=Lax",
		entry.Cookie(event, r, true).String())
	require.Equal(t, "entry.spring-sale=; Path=/; Max-Age=0; HttpOnly; SameSite=Lax", entry.RemovedCookie(event, false).String())
	require.Equal(t, "entry.spring-sale", entry.CookieName(event))
}
