package console

import (
	"context"
	"fmt"
	"net/http"
	"net/http/httptest"
	"net/url"
	"strings"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/bulkaction/bulkaction/internal/access/auth"
	"github.com/bulkaction/bulkaction/internal/access/session"
)

func TestLogin(t *testing.T) {
	t.Parallel()
	w := as(t, auth.Principal{})
	answer := w.get("/ui/groups?status=FAILED")
	require.Equal(t, http.StatusSeeOther, answer.Code)
	require.Equal(t, "/ui/login?next=%2Fui%2Fgroups%3Fstatus%3DFAILED", answer.Header().Get("Location"))
	form := parse(t, w.get(answer.Header().Get("Location")).Body.String())
	var next string
	for _, n := range form.all("input") {
		if attribute(n, "name") == "next" && next == "" {
			next = attribute(n, "value")
		}
	}
	require.Equal(t, "/ui/groups?status=FAILED", next)

	answer = w.post("/ui/login", url.Values{"key": {" acme\n"}, "next": {next}})
	require.Equal(t, http.StatusSeeOther, answer.Code)
	require.Equal(t, next, answer.Header().Get("Location"))
	require.Equal(t, "bulkaction=session-1; Path=/; Max-Age=43200; HttpOnly; SameSite=Strict", answer.Header().Get("Set-Cookie"))
	w.cookie = "session-1"
	d := w.page("/ui/groups")
	require.Contains(t, d.text, "producer of acme")
	require.Contains(t, d.actions(), "/ui/logout")
	require.Equal(t, "/ui/", w.get("/ui/login").Header().Get("Location"), "who has logged in needs no form")

	answer = w.post("/ui/login", url.Values{"key": {"admin"}})
	require.Equal(t, "/ui/", answer.Header().Get("Location"))
	require.NotContains(t, w.sessions.all, "session-1", "the session of the key before has ended")

	w.cookie = "session-2"
	answer = w.post("/ui/logout", nil)
	require.Equal(t, "/ui/login", answer.Header().Get("Location"))
	require.Contains(t, answer.Header().Get("Set-Cookie"), "Max-Age=0")
	require.Empty(t, w.sessions.all)
	require.Equal(t, http.StatusSeeOther, w.get("/ui/groups").Code)
}

func TestLoginFails(t *testing.T) {
	t.Parallel()
	for key, want := range map[string]struct {
		status int
		text   string
	}{
		"wrong": {401, "the API key is not valid"}, "": {401, "the API key is not valid"}, "many": {429, "too many failed authentications"},
		"away": {503, "Redis is not available"}, "service": {403, "no page for a key of role service"},
	} {
		w := as(t, auth.Principal{})
		answer := w.post("/ui/login", url.Values{"key": {key}})
		require.Equal(t, want.status, answer.Code, key)
		require.Contains(t, answer.Body.String(), want.text)
		require.Empty(t, answer.Header().Get("Set-Cookie"))
		require.Empty(t, w.sessions.all)
		if want.status == 429 {
			require.Equal(t, "6", answer.Header().Get("Retry-After"))
		}
	}
	w := as(t, auth.Principal{})
	w.sessions.err = session.ErrUnavailable
	answer := w.post("/ui/login", url.Values{"key": {"admin"}})
	require.Equal(t, http.StatusServiceUnavailable, answer.Code)
	require.Empty(t, answer.Header().Get("Set-Cookie"))
}

// TestSecureCookie: with the option Secure, a login sets a cookie whose name begins with __Host-
// and which has the attribute Secure.
func TestSecureCookie(t *testing.T) {
	t.Parallel()
	w := as(t, auth.Principal{})
	w.console.Secure = true
	answer := w.post("/ui/login", url.Values{"key": {"admin"}})
	require.Equal(t, "__Host-bulkaction=session-1; Path=/; Max-Age=43200; HttpOnly; Secure; SameSite=Strict", answer.Header().Get("Set-Cookie"))
}

// TestRevokedKey: a session ends when its key may no longer see payloads. After the key was
// deleted, pages and forms lead to the login, event streams get 401, and nothing is cancelled.
func TestRevokedKey(t *testing.T) {
	t.Parallel()
	w := as(t, operator)
	w.page("/ui/groups")
	changed := operator
	changed.Payloads = false
	w.keys.keys["operator"] = changed
	require.Equal(t, http.StatusSeeOther, w.get("/ui/groups").Code)
	delete(w.keys.keys, "operator")
	require.Equal(t, http.StatusSeeOther, w.get("/ui/groups").Code)
	require.Equal(t, http.StatusUnauthorized, w.get("/ui/events?topics=overview").Code)
	answer := w.post("/ui/groups/running-1/cancel", nil)
	require.True(t, strings.HasPrefix(answer.Header().Get("Location"), "/ui/login"))
	require.Empty(t, w.backend.calls)
}

func TestSessionsAway(t *testing.T) {
	t.Parallel()
	w := as(t, operator)
	w.sessions.err = session.ErrUnavailable
	answer := w.get("/ui/groups")
	require.Equal(t, http.StatusServiceUnavailable, answer.Code)
	require.Contains(t, answer.Body.String(), "Redis is away")
	require.Equal(t, http.StatusServiceUnavailable, w.get("/ui/events?topics=overview").Code)
	require.Equal(t, http.StatusSeeOther, w.post("/ui/logout", nil).Code, "the browser forgets the session all the same")
}

// TestOpenPagesDoNotUseSessions: requests that an open page makes by itself, a poll and an event
// stream, do not count as uses of its session.
func TestOpenPagesDoNotUseSessions(t *testing.T) {
	t.Parallel()
	w := as(t, operator)
	w.page("/ui/groups")
	require.Equal(t, 1, w.sessions.uses)
	poll := httptest.NewRequestWithContext(t.Context(), http.MethodGet, "/ui/groups", nil)
	poll.Header.Set(pollHeader, "1")
	require.Equal(t, http.StatusOK, w.do(poll).Code)
	s := w.follow(w.server(), "groups:", w.cookie)
	_, _, ok := s.next()
	require.True(t, ok)
	s.close()
	require.Equal(t, 1, w.sessions.uses)
	require.Contains(t, string(assets["app.js"].text), `"`+pollHeader+`"`)
}

// TestOneDeadlineForAPage: the check of the session and the read of the groups get one deadline. If
// the groups do not come in time, a page that was shown before has its last data, with 503, and
// another one gets 504.
func TestOneDeadlineForAPage(t *testing.T) {
	t.Parallel()
	w := as(t, operator)
	w.page("/ui/groups")
	require.False(t, w.sessions.deadline.IsZero())
	require.Equal(t, w.sessions.deadline, w.backend.deadline)
	require.WithinDuration(t, time.Now().Add(readTimeout), w.sessions.deadline, readTimeout)
	for _, path := range []string{"/ui/login", "/ui/unknown"} {
		w.sessions.deadline = time.Time{}
		w.get(path)
		require.False(t, w.sessions.deadline.IsZero(), path)
	}
	w.backend.err = fmt.Errorf("list groups: %w", context.DeadlineExceeded)
	answer := w.get("/ui/groups")
	require.Equal(t, http.StatusServiceUnavailable, answer.Code)
	require.Contains(t, answer.Body.String(), "running-1")
	require.Equal(t, http.StatusGatewayTimeout, w.get("/ui/groups?type=NOOP").Code, "this page was not shown before")
}

// TestWithoutKeys: without keys there is no login.
func TestWithoutKeys(t *testing.T) {
	t.Parallel()
	w := newTestConsole(t)
	require.NotContains(t, w.page("/ui/").actions(), "/ui/logout")
	require.Equal(t, "/ui/", w.get("/ui/login").Header().Get("Location"))
	require.Equal(t, "/ui/", w.post("/ui/login", url.Values{"key": {"x"}}).Header().Get("Location"))
	require.Equal(t, http.StatusSeeOther, w.post("/ui/logout", nil).Code)
}

func TestSafeNext(t *testing.T) {
	t.Parallel()
	for _, next := range []string{"/ui/", "/ui/groups?status=FAILED&cursor=a%2Fb", "/ui/groups/g-1/jobs/7", "/ui/?x=//y"} {
		require.Equal(t, next, safeNext(next))
	}
	for _, next := range []string{
		"", "/", "//example.com/ui/", "https://example.com/ui/", "javascript:alert(1)", "/ui/../v1", "/uix", `/ui/\example.com`, "ui/", "/ui/%2e%2e/%2e%2e/x",
		"/ui/\nx", "\t/ui/", "/ui/login", "/ui/login?next=/ui/login", "/ui/x/../logout", "/ui/events?topics=overview", "/ui/%zz", "/ui/theme", "user@/ui/",
	} {
		require.Equal(t, "/ui/", safeNext(next), next)
	}
}

func TestTheme(t *testing.T) {
	t.Parallel()
	w := newTestConsole(t)
	require.Equal(t, "system", attribute(w.page("/ui/").all("html")[0], "data-theme"))
	answer := w.post("/ui/theme", url.Values{"theme": {"dark"}, "next": {"/ui/groups"}})
	require.Equal(t, "/ui/groups", answer.Header().Get("Location"))
	cookie, err := http.ParseSetCookie(answer.Header().Get("Set-Cookie"))
	require.NoError(t, err)
	require.Equal(t, "dark", cookie.Value)
	r, err := http.NewRequestWithContext(t.Context(), http.MethodGet, "/ui/", nil)
	require.NoError(t, err)
	r.AddCookie(cookie)
	require.Equal(t, "dark", attribute(parse(t, w.do(r).Body.String()).all("html")[0], "data-theme"))
	require.Contains(t, w.post("/ui/theme", url.Values{"theme": {"pink; x=1"}}).Header().Get("Set-Cookie"), "=system;")
}
