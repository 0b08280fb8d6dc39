package console

import (
	"context"
	"fmt"
	"net/http"
	"net/url"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/stretchr/testify/require"
	"golang.org/x/net/html"

	"github.com/bulkaction/bulkaction/api"
	"github.com/bulkaction/bulkaction/internal/access/auth"
	"github.com/bulkaction/bulkaction/internal/messages"
)

const endpointURL = "https://hooks.example/secret-path?token=secret-query"

// endpoints are the callback endpoints of a fake backend: that of acme works, and that of globex is
// disabled.
func (f *fakeBackend) Callback(ctx context.Context, tenant string) (api.TenantCallback, error) {
	f.mu.Lock()
	defer f.mu.Unlock()
	who, _ := auth.From(ctx)
	c := api.TenantCallback{Tenant: tenant, URL: endpointURL + hostile, Events: []string{"group.failed", "group.created"}, SecretVersion: 2, Pending: 4321}
	switch {
	case f.err != nil:
		return c, f.err
	case !who.Owns(tenant) || f.noEndpoint:
		return c, api.ErrNotFound
	case tenant == "globex":
		failing := created.Add(-time.Hour)
		c.FailingSince, c.DisabledAt, c.DisabledBecause = &failing, &created, "it answers 410 "+hostile
	}
	return c, nil
}

// owned notes a call on the endpoint of a tenant. A tenant of somebody else does not exist.
func (f *fakeBackend) owned(ctx context.Context, tenant, format string, args ...any) error {
	if who, _ := auth.From(ctx); !who.Owns(tenant) {
		return api.ErrNotFound
	}
	return f.call(format, args...)
}

func (f *fakeBackend) SetCallback(ctx context.Context, tenant string, set api.CallbackSettings) (api.TenantCallback, error) {
	if strings.HasPrefix(set.URL, "http:") {
		return api.TenantCallback{}, &messages.ValidationError{Fields: []messages.FieldError{{Field: "url", Problem: "must begin with https:// " + hostile}}}
	}
	return api.TenantCallback{}, f.owned(ctx, tenant, "set callback %s %s %q", tenant, set.URL, set.Events)
}

func (f *fakeBackend) DeleteCallback(ctx context.Context, tenant string) error {
	return f.owned(ctx, tenant, "delete callback %s", tenant)
}

func (f *fakeBackend) CallbackSecret(ctx context.Context, tenant string) (api.CallbackSecret, error) {
	until := created.Add(24 * time.Hour)
	return api.CallbackSecret{Tenant: tenant, Secret: "whsec_new", Version: 2, Previous: "whsec_old", PreviousUntil: &until}, f.owned(ctx, tenant, "secret %s", tenant)
}

func (f *fakeBackend) RotateCallbackSecret(ctx context.Context, tenant string) (api.CallbackSecret, error) {
	return api.CallbackSecret{Tenant: tenant, Secret: "whsec_newer", Version: 3}, f.owned(ctx, tenant, "rotate %s", tenant)
}

// Callbacks returns one callback of each tenant on the first page, and an empty second page.
func (f *fakeBackend) Callbacks(ctx context.Context, q api.CallbackQuery) (l api.CallbackList, err error) {
	err = f.call("callbacks %s %s %s %d", q.State, q.Tenant, q.Cursor, q.Limit)
	f.mu.Lock()
	defer f.mu.Unlock()
	who, _ := auth.From(ctx)
	if q.Tenant == "sparse" && q.Cursor == "" {
		l.Cursor = "on"
	}
	for _, g := range []api.Group{f.groups["failed-1"], f.groups["other-1"]} {
		if g.ID == "" || !who.Owns(g.Tenant) || q.Cursor != "" || q.Tenant != "" && q.Tenant != g.Tenant {
			continue
		}
		c := api.Callback{
			ID: g.ID + ".1.failed", Tenant: g.Tenant, Group: g.ID, Type: "group.failed", At: created, URL: endpointURL, State: q.State, Tries: 1234,
			Error: "status 500 " + hostile, Answer: "</pre><script>" + hostile,
		}
		at := created.Add(time.Minute)
		if q.State == api.CallbackDead {
			c.DiedAt = &at
		} else {
			c.NextAt = &at
		}
		l.Callbacks, l.Cursor = append(l.Callbacks, c), "next&page"
	}
	return l, err
}

// FindCallback finds callbacks of all groups. One of somebody else does not exist.
func (f *fakeBackend) FindCallback(ctx context.Context, id string) (api.Callback, error) {
	f.mu.Lock()
	defer f.mu.Unlock()
	g, found := f.groups[api.GroupOfEvent(id)]
	if who, _ := auth.From(ctx); !found || !who.Owns(g.Tenant) {
		return api.Callback{}, api.ErrNotFound
	}
	return api.Callback{ID: id, Tenant: g.Tenant, Group: g.ID}, nil
}

func (f *fakeBackend) Redeliver(_ context.Context, id string) (api.Callback, error) {
	if strings.HasPrefix(id, "running-1") {
		return api.Callback{}, fmt.Errorf("the endpoint has as many pending callbacks as may be: %w", api.ErrConflict)
	}
	return api.Callback{}, f.call("redeliver %s", id)
}

func (f *fakeBackend) RedeliverDead(_ context.Context, tenant string) (api.Redelivered, error) {
	err := f.call("redeliver dead %s", tenant)
	return f.redelivered, err
}

func boxes(d document) (ticked []string) {
	for _, box := range d.all("input") {
		if attribute(box, "name") == "events" && hasAttribute(box, "checked") {
			ticked = append(ticked, attribute(box, "value"))
		}
	}
	return ticked
}

func rowButtons(d document) (found []*html.Node) {
	for _, b := range d.all("button") {
		if attribute(b, "form") == "again" {
			found = append(found, b)
		}
	}
	return found
}

func TestCallbacks(t *testing.T) {
	w := parallelAs(t, operator)
	answer := w.get("/ui/callbacks")
	require.NotContains(t, answer.Body.String(), "secret-", "the path and the query of a URL may be secret")
	d := w.page("/ui/callbacks")
	for _, want := range []string{
		"failed-1.1.failed failed-1 acme hooks.example 1,234 2026-01-02 03:05:05 UTC status 500 " + hostile, "</pre><script>" + hostile,
		"other-1.1.failed other-1 globex", "Died", "Send all dead again",
	} {
		require.Contains(t, d.text, want)
	}
	require.Equal(t, "callbacks:state=dead", attribute(d.all("body")[0], "data-topic"))
	require.Equal(t, "/ui/callbacks?cursor=next%26page&state=dead", nextOf(d))
	require.Contains(t, w.page(nextOf(d)).text, "There are no further callbacks.")
	pending := w.page("/ui/callbacks?state=pending&tenant=acme")
	require.Contains(t, pending.text, "Next try")
	require.Contains(t, pending.text, "Send now")
	require.NotContains(t, pending.text, "other-1")
	require.NotContains(t, pending.text, "Send all dead again")
	require.Equal(t, []string{"callbacks dead   50", "callbacks dead   50", "callbacks dead  next&page 50", "callbacks pending acme  50"}, w.backend.calls)
	require.Contains(t, w.page("/ui/callbacks?tenant=sparse").text, "The next page looks on.")
	for _, query := range []string{"state=delivered", "tenant=a%20b", "cursor=" + strings.Repeat("x", 513)} {
		require.Equal(t, http.StatusUnprocessableEntity, w.get("/ui/callbacks?"+query).Code, query)
	}

	own := as(t, acme).page("/ui/callbacks")
	require.NotContains(t, own.text, "other-1")
	for _, input := range own.all("input") {
		require.False(t, attribute(input, "name") == "tenant" && attribute(input, "type") != "hidden", "a key of a tenant has no choice")
	}
	looks := as(t, reader).page("/ui/callbacks")
	require.NotContains(t, looks.text, "</pre><script>", "an answer is for those who see payloads")
	require.NotContains(t, looks.actions(), "/ui/callbacks")
	require.Empty(t, rowButtons(looks))
	require.Equal(t, http.StatusForbidden, as(t, metrics).get("/ui/callbacks").Code)

	s := w.follow(w.server(), "callbacks:state%3Ddead%26tenant%3Dacme", w.cookie)
	_, data, ok := s.next()
	require.True(t, ok)
	require.Contains(t, data["rows"], `id="answer-failed-1.1.failed"`)
	require.NotContains(t, data["rows"], "other-1")

	w.backend.set(func() { w.backend.groups = nil })
	require.Contains(t, w.page("/ui/callbacks").text, "No callback is dead. Set an endpoint on the page of a tenant")
	w.backend.set(func() { w.backend.err = api.ErrUnavailable })
	require.Contains(t, w.get("/ui/callbacks").Body.String(), "Redis does not answer")
}

// TestRedeliver: a row's button sends one callback again, and the form's own button a step of the
// dead ones of the chosen tenant, of a key's own tenant at most. The notice says what is left.
func TestRedeliver(t *testing.T) {
	w := parallelAs(t, operator)
	d := w.page("/ui/callbacks?tenant=acme")
	row := rowButtons(d)[0]
	require.Equal(t, "failed-1.1.failed", attribute(row, "value"))
	require.Equal(t, "id", attribute(row, "name"))
	form := url.Values{}
	for _, input := range d.all("input") {
		if attribute(input.Parent, "id") == "again" {
			form.Set(attribute(input, "name"), attribute(input, "value"))
		}
	}
	require.Equal(t, url.Values{"state": {"dead"}, "tenant": {"acme"}}, form)
	w.backend.calls = nil
	sends := func(form url.Values) string {
		t.Helper()
		answer := w.post("/ui/callbacks", form)
		require.Equal(t, http.StatusSeeOther, answer.Code, answer.Body)
		return w.page(answer.Header().Get("Location")).text
	}
	require.Contains(t, sends(url.Values{"state": {"pending"}, "tenant": {"acme"}, "id": {"failed-1.1.failed"}}), "The callback is sent again.")
	require.Equal(t, []string{"redeliver failed-1.1.failed", "callbacks pending acme  50"}, w.backend.calls)
	require.Equal(t, "callback.redeliver failed-1.1.failed", w.log.entries[0].Action+" "+w.log.entries[0].Object)
	w.backend.calls, w.backend.redelivered = nil, api.Redelivered{Redelivered: 1000, More: true, Full: true}
	text := sends(form)
	require.Contains(t, text, "1,000 dead callbacks are sent again. There are more: send them again, too. An endpoint has as many pending callbacks as may be")
	require.Equal(t, []string{"redeliver dead acme", "callbacks dead acme  50"}, w.backend.calls)
	require.Equal(t, "callback.redeliver", w.log.entries[1].Action)
	w.backend.redelivered = api.Redelivered{Redelivered: 1, Refused: 2}
	text = sends(url.Values{})
	require.NotContains(t, text, "There are more")
	require.Contains(t, text, "2 stay dead, because the endpoint is disabled or deleted: set it again first.")
	require.Contains(t, w.page("/ui/callbacks?done=callbacks&n=1").text, "1 dead callback is sent again.")
	require.Contains(t, w.page("/ui/callbacks?done=callbacks&n=-1&more=true").text, "0 dead callbacks are sent again. There are more")

	entries := len(w.log.entries)
	require.Equal(t, http.StatusConflict, w.post("/ui/callbacks", url.Values{"id": {"running-1.1.failed"}}).Code)
	require.Equal(t, http.StatusUnprocessableEntity, w.post("/ui/callbacks", url.Values{"tenant": {"a b"}}).Code)
	require.Equal(t, http.StatusUnprocessableEntity, w.post("/ui/callbacks", url.Values{"id": {"a/../b" + hostile}}).Code)
	require.Len(t, w.log.entries, entries+1, "of what does not exist nothing is in the log")

	own := as(t, acme)
	own.post("/ui/callbacks", nil)
	require.Equal(t, []string{"redeliver dead acme"}, own.backend.calls)
	require.Equal(t, http.StatusNotFound, own.post("/ui/callbacks", url.Values{"tenant": {"globex"}}).Code)
	require.Equal(t, http.StatusNotFound, own.post("/ui/callbacks", url.Values{"id": {"other-1.1.completed"}}).Code)
	none := as(t, reader)
	require.Equal(t, http.StatusForbidden, none.post("/ui/callbacks", nil).Code)
	require.Empty(t, append(none.backend.calls, own.backend.calls[1:]...))
}

// TestTenantCallback: the page of a tenant shows its endpoint, and sets, deletes and rotates it. A
// refused form keeps what was typed and ticked.
func TestTenantCallback(t *testing.T) {
	w := parallelAs(t, operator)
	d := w.page("/ui/tenants/acme")
	require.Contains(t, d.text, "URL "+endpointURL+hostile+" · events group.failed , group.created · pending 4,321")
	require.NotContains(t, d.text, "Nothing is sent")
	require.Equal(t, []string{"group.created", "group.failed"}, boxes(d))
	require.Contains(t, w.page("/ui/tenants/globex").text, "fails since 2026-01-02 02:04:05 UTC Nothing is sent since 2026-01-02 03:04:05 UTC : it answers 410 "+hostile)
	const at = "/ui/tenants/acme/callback"
	require.Subset(t, d.actions(), []string{at + "/set", at + "/secret", at + "/rotate", at + "/delete"})

	for path, want := range map[string]string{
		at + "/set":    `set callback acme https://a.example/ ["group.failed" "group.running"]; callback.set acme; The callback endpoint is set.`,
		at + "/delete": "delete callback acme; callback.delete acme; The callback endpoint is deleted.",
		at + "/rotate": "rotate acme; callback.rotate acme; The tenant has a new secret.",
	} {
		w.backend.calls, w.log.entries = nil, nil
		answer := w.post(path, url.Values{"url": {"https://a.example/"}, "events": {"group.failed", "group.running"}})
		require.Equal(t, http.StatusSeeOther, answer.Code, answer.Body)
		call, logged, notice := w.backend.calls[len(w.backend.calls)-1], w.log.entries[0], w.page(answer.Header().Get("Location")).text
		parts := strings.Split(want, "; ")
		require.Equal(t, parts[:2], []string{call, logged.Action + " " + logged.Object})
		require.Contains(t, notice, parts[2])
		require.NotContains(t, fmt.Sprintf("%s %+v", notice, w.log.entries), "whsec_")
	}

	require.Equal(t, http.StatusNotFound, w.post(at+"/pause", nil).Code)
	answer := w.post(at+"/set", url.Values{"url": {"http://typed.example/" + hostile}, "events": {"group.cancelled"}})
	require.Equal(t, http.StatusUnprocessableEntity, answer.Code)
	refused := parse(t, answer.Body.String())
	require.Contains(t, refused.text, "url must begin with https:// "+hostile)
	require.Equal(t, []string{"group.cancelled"}, boxes(refused))
	for _, input := range refused.all("input") {
		if attribute(input, "name") == "url" {
			require.Equal(t, "http://typed.example/"+hostile, attribute(input, "value"))
		}
	}
	other := parse(t, w.post("/ui/tenants/acme", url.Values{"rps": {"x"}}).Body.String())
	require.Equal(t, []string{"group.created", "group.failed"}, boxes(other), "another form of the page was refused")

	w.backend.set(func() { w.backend.noEndpoint = true })
	d = w.page("/ui/tenants/acme")
	require.Contains(t, d.text, "The tenant has none")
	require.Equal(t, []string{"group.completed", "group.failed", "group.cancelled"}, boxes(d))
	require.NotContains(t, d.actions(), at+"/delete")
	require.Contains(t, d.actions(), at+"/secret", "groups may have URLs of their own")

	s := w.follow(w.server(), "tenant:globex", w.cookie)
	_, data, ok := s.next()
	require.True(t, ok)
	require.Contains(t, data["callback"], "The tenant has none")
}

// TestCallbackSecret: the secret is in the answer to a form alone, which no cache and no later page
// has, for those who may control the tenant's groups.
func TestCallbackSecret(t *testing.T) {
	w := parallelAs(t, acme)
	answer := w.post("/ui/tenants/acme/callback/secret", nil)
	require.Equal(t, http.StatusOK, answer.Code)
	require.Equal(t, "no-store", answer.Header().Get("Cache-Control"))
	d := parse(t, answer.Body.String())
	require.Equal(t, "whsec_new", d.all("code")[0].FirstChild.Data)
	require.Contains(t, d.text, "The previous one signs, too, until 2026-01-03 03:04:05 UTC : whsec_old")
	later := w.get("/ui/tenants/acme").Body.String() + w.get("/ui/callbacks").Body.String() + w.get("/ui/activity").Body.String()
	require.NotContains(t, later+fmt.Sprintf("%+v %+v", w.console.last.All(), w.log.entries), "whsec_")
	require.NotEqual(t, http.StatusOK, w.get("/ui/tenants/acme/callback/secret").Code)

	w.backend.calls, w.log.entries = nil, nil
	looks := as(t, reader)
	for _, do := range []string{"/set", "/secret", "/rotate", "/delete"} {
		require.Equal(t, http.StatusNotFound, w.post("/ui/tenants/globex/callback"+do, nil).Code, do)
		require.Equal(t, http.StatusNotFound, w.post("/ui/tenants/a%20b/callback"+do, nil).Code, do)
		require.Equal(t, http.StatusForbidden, looks.post("/ui/tenants/acme/callback"+do, nil).Code, do)
		require.NotContains(t, looks.page("/ui/tenants/acme").actions(), "/ui/tenants/acme/callback"+do)
	}
	require.Empty(t, slices.DeleteFunc(append(w.backend.calls, looks.backend.calls...), func(call string) bool { return strings.HasPrefix(call, "dead letters") }))
	require.Empty(t, w.log.entries)
}
