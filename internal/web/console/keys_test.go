package console

import (
	"context"
	"errors"
	"fmt"
	"net/http"
	"net/http/httptest"
	"net/url"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/bulkaction/bulkaction/api"
	"github.com/bulkaction/bulkaction/internal/access/apikey"
	"github.com/bulkaction/bulkaction/internal/access/auth"
	"github.com/bulkaction/bulkaction/internal/access/session"
	"github.com/bulkaction/bulkaction/internal/web/httpapi"
)

// FirstUse says whether the form with this id is used for the first time, as the real store does.
func (s *fakeSessions) FirstUse(_ context.Context, form string) (bool, error) {
	s.mu.Lock()
	defer s.mu.Unlock()
	_, sent := s.all["form "+form]
	s.all["form "+form] = auth.Principal{}
	return !sent, s.err
}

type fakeKeyStore struct {
	mu       sync.Mutex
	keys     []apikey.Record
	unusable []error
	secrets  []string
	requests []apikey.Request
	revoked  []string
	err      error
}

func newKeyStore() *fakeKeyStore {
	later := time.Now().Add(time.Hour)
	return &fakeKeyStore{
		keys: []apikey.Record{
			{ID: "admin", Role: auth.Admin, Payloads: true, CreatedAt: created, CreatedBy: "cli:ann", LastUsedDay: "2026-01-03"},
			{ID: "key_old", Role: auth.Reader, Name: hostile, CreatedAt: created, ExpiresAt: created.Add(time.Hour)},
			{ID: "key_rot", Role: auth.Producer, Tenant: "acme", Payloads: true, CreatedAt: created, ExpiresAt: later, ReplacedBy: "key_new"},
		},
		unusable: []error{errors.New("key key_bad: its record can't be used")},
	}
}

func (k *fakeKeyStore) List(context.Context) ([]apikey.Record, []error, error) {
	k.mu.Lock()
	defer k.mu.Unlock()
	return append([]apikey.Record(nil), k.keys...), k.unusable, k.err
}

func (k *fakeKeyStore) Create(_ context.Context, r apikey.Request) (apikey.NewKey, error) {
	k.mu.Lock()
	defer k.mu.Unlock()
	if k.err != nil {
		return apikey.NewKey{}, k.err
	}
	created, err := r.New(auth.SHA256, time.Now())
	k.requests, k.keys, k.secrets = append(k.requests, r), append(k.keys, created.Record), append(k.secrets, created.Token)
	return created, err
}

func (k *fakeKeyStore) Revoke(_ context.Context, id string) error {
	k.mu.Lock()
	defer k.mu.Unlock()
	if id == "unknown" {
		return apikey.ErrNoKey
	}
	k.revoked = append(k.revoked, id)
	return k.err
}

func TestKeys(t *testing.T) {
	w := parallelAs(t, admin)
	d := w.page("/ui/keys")
	for _, want := range []string{
		"admin yours admin – valid yes 2026-01-02 03:04:05 UTC by cli:ann never 2026-01-03", "key_old " + hostile + " reader – expired no", "key_rot producer acme replaced by key_new yes",
		"1 record of a key can't be used", "key_bad",
	} {
		require.Contains(t, d.text, want)
	}
	require.Subset(t, d.actions(), []string{"/ui/keys", "/ui/keys/key_old/revoke"})
	confirms := map[string]string{}
	for _, b := range d.all("button") {
		confirms[attribute(b, "id")] = attribute(b, "data-confirm")
	}
	require.Contains(t, confirms["revoke-key_old"], "Revoke the key key_old ("+hostile+") with the role reader.")
	require.Contains(t, confirms["revoke-admin"], "It is your own key")
	require.NotContains(t, confirms["revoke-key_rot"], "your own")
	require.NotEqual(t, formIDOf(d), formIDOf(w.page("/ui/keys")), "each copy of the form has its name")

	for i := range 60 {
		w.keyStore.keys = append(w.keyStore.keys, apikey.Record{ID: fmt.Sprintf("key_%02d", i), Role: auth.Metrics, CreatedAt: created.Add(time.Minute)})
	}
	d = w.page("/ui/keys")
	require.NotContains(t, d.text, "key_47")
	last := w.page(nextOf(d))
	require.Contains(t, last.text, "key_59")
	require.Empty(t, nextOf(last))
	require.Equal(t, http.StatusUnprocessableEntity, w.get("/ui/keys?cursor=x").Code)

	w.keyStore.keys, w.keyStore.unusable = nil, nil
	require.Contains(t, w.page("/ui/keys").text, "There are no keys in Redis.")
	for _, who := range []auth.Principal{operator, reader, acme, metrics} {
		other := as(t, who)
		require.Equal(t, http.StatusForbidden, other.get("/ui/keys").Code)
		require.Equal(t, http.StatusForbidden, other.post("/ui/keys", url.Values{"form_id": {"a"}, "role": {"admin"}}).Code)
		require.Equal(t, http.StatusForbidden, other.post("/ui/keys/key_old/revoke", nil).Code)
		require.Empty(t, other.keyStore.requests)
		require.Empty(t, other.keyStore.revoked)
		require.Empty(t, other.log.entries)
	}
}

func formIDOf(d document) string {
	for _, input := range d.all("input") {
		if attribute(input, "name") == "form_id" {
			return attribute(input, "value")
		}
	}
	return ""
}

// TestCreateKey: the answer to the form has the secret of the new key once, in its body; later
// pages, last views and the activity log do not have it. The form sent again gets 409 and creates
// no key.
func TestCreateKey(t *testing.T) {
	w := parallelAs(t, admin)
	form := url.Values{
		"form_id": {formIDOf(w.page("/ui/keys"))}, "role": {"producer"}, "tenant": {" acme "}, "name": {hostile[:20]}, "payloads": {"false"}, "days": {"30"},
	}
	answer := w.post("/ui/keys", form)
	require.Equal(t, http.StatusOK, answer.Code, answer.Body.String())
	require.Equal(t, "no-store", answer.Header().Get("Cache-Control"))
	require.Len(t, w.keyStore.secrets, 1)
	secret := w.keyStore.secrets[0]
	require.Equal(t, 1, strings.Count(answer.Body.String(), secret))
	for _, values := range answer.Header() {
		require.NotContains(t, strings.Join(values, " "), secret)
	}
	d := parse(t, answer.Body.String())
	require.Contains(t, d.text, secret+" Copy")
	require.Contains(t, d.text, "name "+hostile[:20]+" · role producer · tenant acme · payloads no · expires")
	no := false
	require.Equal(t, []apikey.Request{{Role: auth.Producer, Tenant: "acme", Payloads: &no, Name: hostile[:20], CreatedBy: "admin", Lifetime: 30 * 24 * time.Hour}}, w.keyStore.requests)
	require.Len(t, w.log.entries, 1)
	require.Equal(t, "key.create", w.log.entries[0].Action)

	again := w.post("/ui/keys", form)
	require.Equal(t, http.StatusConflict, again.Code)
	require.Contains(t, again.Body.String(), "this form was sent before")
	require.Len(t, w.keyStore.requests, 1)
	require.Len(t, w.log.entries, 1, "what was not tried is not in the log")

	everything := again.Body.String() + w.get("/ui/keys").Body.String() + w.get("/ui/activity").Body.String() + fmt.Sprintf("%+v %+v", w.console.last.All(), w.log.entries)
	require.NotContains(t, everything, secret)
	w.keyStore.err = api.ErrUnavailable
	away := w.get("/ui/keys")
	require.Equal(t, http.StatusServiceUnavailable, away.Code)
	require.NotContains(t, away.Body.String(), secret)
	require.Contains(t, away.Body.String(), "Redis does not answer")
}

func TestCreateKeyRefuses(t *testing.T) {
	w := parallelAs(t, admin)
	for problem, form := range map[string]url.Values{
		"The form is incomplete": {"role": {"admin"}}, "must be one of": {"form_id": {"a"}}, "role": {"form_id": {"a"}, "role": {"odd"}},
		"a producer needs one": {"form_id": {"a"}, "role": {"producer"}}, "must be 1 to 3650": {"form_id": {"a"}, "role": {"admin"}, "days": {"0"}},
		"days": {"form_id": {"a"}, "role": {"admin"}, "days": {"1.5"}}, "printable": {"form_id": {"a"}, "role": {"admin"}, "name": {"a\nb"}},
		"payloads": {"form_id": {"a"}, "role": {"admin"}, "payloads": {"x"}}, "incomplete": {"form_id": {strings.Repeat("x", 65)}, "role": {"admin"}},
	} {
		answer := w.post("/ui/keys", form)
		require.Equal(t, http.StatusUnprocessableEntity, answer.Code, problem)
		require.Contains(t, parse(t, answer.Body.String()).text, problem)
	}
	require.Empty(t, w.keyStore.requests)
	require.Empty(t, w.log.entries)

	good := url.Values{"form_id": {"a"}, "role": {"metrics"}}
	require.Equal(t, http.StatusOK, w.post("/ui/keys", good).Code, "a form with a mistake is not used up")
	require.Nil(t, w.keyStore.requests[0].Payloads)
	require.Zero(t, w.keyStore.requests[0].Lifetime)
	good.Set("form_id", "b")
	w.keyStore.err = apikey.ErrFull
	require.Equal(t, http.StatusConflict, w.post("/ui/keys", good).Code)
	good.Set("form_id", "c")
	w.keyStore.err = fmt.Errorf("create: %w", api.ErrUnavailable)
	answer := w.post("/ui/keys", good)
	require.Equal(t, http.StatusServiceUnavailable, answer.Code)
	require.Contains(t, answer.Body.String(), "may have been carried out")

	cookie := w.cookie
	w.sessions.err = session.ErrUnavailable
	require.Equal(t, http.StatusServiceUnavailable, w.post("/ui/keys", good).Code)
	w.sessions.err, w.cookie = nil, ""
	require.Equal(t, "/ui/login", w.post("/ui/keys", good).Header().Get("Location"))
	w.cookie = cookie
}

func TestRevokeKey(t *testing.T) {
	w := parallelAs(t, admin)
	answer := w.post("/ui/keys/key_old/revoke", nil)
	require.Equal(t, "/ui/keys?done=key-revoked", answer.Header().Get("Location"))
	require.Contains(t, w.page("/ui/keys?done=key-revoked").text, "The key is revoked")
	require.Equal(t, []string{"key_old"}, w.keyStore.revoked)
	require.Len(t, w.log.entries, 1)
	require.Equal(t, "key.revoke key_old", w.log.entries[0].Action+" "+w.log.entries[0].Object)
	require.Equal(t, http.StatusNotFound, w.post("/ui/keys/unknown/revoke", nil).Code)
	require.Equal(t, http.StatusNotFound, w.post("/ui/keys/a%20b/revoke", nil).Code)
}

// TestKeysOff: without a store of keys, because the API asks for none, the page names the command
// that creates a key. Forms are refused with 409 and are not in the activity log.
func TestKeysOff(t *testing.T) {
	w := parallel(t)
	w.with(func(o *httpapi.Options) { o.KeyStore = nil })
	require.Contains(t, w.page("/ui/keys").text, "bulkaction key create --role admin --redis-url URL")
	require.Equal(t, http.StatusConflict, w.post("/ui/keys", url.Values{"form_id": {"a"}, "role": {"admin"}}).Code)
	require.Equal(t, http.StatusConflict, w.post("/ui/keys/key_old/revoke", nil).Code)
	require.Empty(t, w.log.entries)
}

func TestLogin(t *testing.T) {
	w := parallelAs(t, auth.Principal{})
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
	w := parallelAs(t, auth.Principal{})
	w.console.Secure = true
	answer := w.post("/ui/login", url.Values{"key": {"admin"}})
	require.Equal(t, "__Host-bulkaction=session-1; Path=/; Max-Age=43200; HttpOnly; Secure; SameSite=Strict", answer.Header().Get("Set-Cookie"))
}

// TestRevokedKey: a session ends when its key may no longer see payloads. After the key was
// deleted, pages and forms lead to the login, event streams get 401, and nothing is cancelled.
func TestRevokedKey(t *testing.T) {
	w := parallelAs(t, operator)
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
	w := parallelAs(t, operator)
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
	w := parallelAs(t, operator)
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
	w := parallelAs(t, operator)
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
	w := parallel(t)
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
	w := parallel(t)
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
