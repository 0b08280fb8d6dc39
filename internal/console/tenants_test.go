package console

import (
	"context"
	"encoding/json"
	"fmt"
	"net/http"
	"net/url"
	"strings"
	"testing"

	"github.com/stretchr/testify/require"

	"github.com/bulkaction/bulkaction/api"
	"github.com/bulkaction/bulkaction/internal/auth"
)

func tenant(id string) api.Tenant {
	rps := 62.5
	return api.Tenant{
		ID: id, RPS: &rps, Weight: 2, Active: true, Unfinished: 4321, NonReady: 12, JobsPerSecond: 7.25, ActiveTenants: 3,
		Window:     api.TenantWindow{Limiter: "fixed", WindowMS: 1000, Used: 12, Limit: 25, GlobalUsed: 40, GlobalLimit: 100, NextPermitAt: &created},
		Congestion: api.TenantCongestion{Throttles: 5678, Returns: 9, MeanWaitMS: 1.5, LongestWaitMS: 3456, LastAt: &created},
	}
}

func (f *fakeBackend) Tenants(ctx context.Context, cursor string, limit int, all bool) (l api.TenantList, err error) {
	err = f.call("tenants %s %d %v", cursor, limit, all)
	f.mu.Lock()
	defer f.mu.Unlock()
	who, _ := auth.From(ctx)
	for _, id := range []string{"acme", "globex"} {
		if len(f.groups) > 0 && cursor == "" && who.Owns(id) {
			l.Tenants, l.Cursor = append(l.Tenants, tenant(id)), "next"
		}
	}
	return l, err
}

func (f *fakeBackend) Tenant(ctx context.Context, id string) (api.Tenant, error) {
	f.mu.Lock()
	defer f.mu.Unlock()
	who, _ := auth.From(ctx)
	if f.err == nil && (id != "acme" && id != "globex" || !who.Owns(id)) {
		return api.Tenant{}, fmt.Errorf("tenant %s: %w", id, api.ErrNotFound)
	}
	t := tenant(id)
	t.Paused = id == "globex"
	return t, f.err
}

func (f *fakeBackend) PatchTenant(ctx context.Context, id string, p api.TenantPatch) (api.Tenant, error) {
	text, err := json.Marshal(p)
	if err != nil {
		return api.Tenant{}, err
	}
	if err := f.call("patch %s %s", id, text); err != nil {
		return api.Tenant{}, err
	}
	return f.Tenant(ctx, id)
}

func (f *fakeBackend) PauseTenant(_ context.Context, id string) error {
	return f.call("pause tenant %s", id)
}

func (f *fakeBackend) ResumeTenant(_ context.Context, id string) error {
	return f.call("resume tenant %s", id)
}

func TestTenants(t *testing.T) {
	t.Parallel()
	w := as(t, operator)
	d := w.page("/ui/tenants")
	require.Contains(t, d.text, "acme 4,321 12 7.2 2 12 of 25")
	require.Contains(t, d.text, "globex")
	require.Equal(t, "/ui/tenants?cursor=next", nextOf(d))
	require.Contains(t, w.page(nextOf(d)).text, "no further tenants")
	require.Equal(t, []string{"tenants  50 false", "tenants next 50 false"}, w.backend.calls)
	require.Equal(t, "/ui/tenants/acme", w.get("/ui/tenants?id=acme").Header().Get("Location"))
	require.Equal(t, http.StatusUnprocessableEntity, w.get("/ui/tenants?id=a%20b").Code)
	require.NotContains(t, as(t, acme).page("/ui/tenants").text, "globex")
	require.Equal(t, http.StatusForbidden, as(t, metrics).get("/ui/tenants").Code)
	w.backend.groups = nil
	require.Contains(t, w.page("/ui/tenants").text, "There are no tenants yet")
	w.backend.err = api.ErrUnavailable
	require.Contains(t, w.get("/ui/tenants").Body.String(), "Redis does not answer")
}

func TestTenant(t *testing.T) {
	t.Parallel()
	w := as(t, operator)
	d := w.page("/ui/tenants/acme")
	for _, want := range []string{"4,321", "12 of its 25 permits", "all tenants: 40 of 100", "5,678", "3,456 ms", "failed-1 " + hostile} {
		require.Contains(t, d.text, want)
	}
	require.Subset(t, d.actions(), []string{"/ui/tenants/acme", "/ui/tenants/acme/pause"})
	values := map[string]string{}
	for _, input := range d.all("input") {
		values[attribute(input, "name")] = attribute(input, "value")
	}
	require.Equal(t, "62.5", values["rps"])
	require.Equal(t, "2", values["weight"])
	require.Empty(t, values["base_priority"])
	require.Contains(t, w.page("/ui/tenants/globex").actions(), "/ui/tenants/globex/resume")
	require.Equal(t, http.StatusNotFound, w.get("/ui/tenants/unknown").Code)

	own := as(t, acme)
	require.Contains(t, own.page("/ui/tenants/acme").text, "permits per second 62.5 · weight 2 · base priority 0")
	require.NotContains(t, own.page("/ui/tenants/acme").actions(), "/ui/tenants/acme")
	require.Equal(t, http.StatusNotFound, own.get("/ui/tenants/globex").Code)
	require.Equal(t, http.StatusForbidden, own.post("/ui/tenants/acme", url.Values{"weight": {"3"}}).Code)
	require.Empty(t, own.backend.calls)

	w.backend.groups = nil
	require.Contains(t, w.page("/ui/tenants/acme").text, "The tenant has no groups.")
	w.backend.err = api.ErrUnavailable
	require.Contains(t, w.get("/ui/tenants/acme").Body.String(), "Redis does not answer")
}

func TestTenantActions(t *testing.T) {
	t.Parallel()
	w := as(t, operator)
	for _, c := range []struct {
		path string
		form url.Values
		call string
	}{
		{"/ui/tenants/acme", url.Values{"rps": {"50.5"}, "weight": {" "}, "base_priority": {"-3"}}, `patch acme {"rps":50.5,"weight":null,"base_priority":-3}`},
		{"/ui/tenants/acme", url.Values{"weight": {"3"}}, `patch acme {"weight":3}`},
		{"/ui/tenants/acme/pause", nil, "pause tenant acme"},
		{"/ui/tenants/acme/resume", nil, "resume tenant acme"},
	} {
		answer := w.post(c.path, c.form)
		require.Equal(t, http.StatusSeeOther, answer.Code, answer.Body.String())
		require.Contains(t, w.backend.calls, c.call)
		to, err := url.Parse(answer.Header().Get("Location"))
		require.NoError(t, err)
		require.NotEmpty(t, noticeOf(to.Query()))
		require.Contains(t, w.page(to.String()).text, noticeOf(to.Query()))
	}
	require.Len(t, w.log.entries, 4)
	for field, text := range map[string]string{"rps": "0", "weight": "x", "base_priority": "1.5"} {
		answer := w.post("/ui/tenants/acme", url.Values{field: {text}})
		require.GreaterOrEqual(t, answer.Code, 400)
		require.Less(t, answer.Code, 500)
		require.Contains(t, answer.Body.String(), field)
		require.Contains(t, strings.ToLower(answer.Body.String()), "must be")
	}
	require.Len(t, w.log.entries, 4)
	require.Equal(t, http.StatusNotFound, w.post("/ui/tenants/a%20b/pause", nil).Code)
}
