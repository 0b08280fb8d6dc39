package client_test

import (
	"context"
	"fmt"
	"io"
	"math"
	"net/http"
	"net/http/httptest"
	"testing"

	"github.com/stretchr/testify/require"

	"github.com/bulkaction/bulkaction/api"
	"github.com/bulkaction/bulkaction/client"
	"github.com/bulkaction/bulkaction/guard"
	"github.com/bulkaction/bulkaction/internal/web/httpapi"
)

func TestPauseResumeAndTenantCalls(t *testing.T) {
	var calls []string
	a, w := serve(t, http.HandlerFunc(func(rw http.ResponseWriter, r *http.Request) {
		body, err := io.ReadAll(r.Body)
		require.NoError(t, err)
		calls = append(calls, r.Method+" "+r.URL.RequestURI()+" "+string(body))
		if len(calls)%2 == 1 {
			refuse(rw, http.StatusServiceUnavailable, api.Problem{})
			return
		}
		answer(rw, http.StatusOK, map[string]any{"id": "x", "paused": true, "detail": "it waits"})
	}))
	ctx := t.Context()
	set := api.TenantSettings{RPS: ptr(2.5), BasePriority: ptr(int64(-3))}
	for _, c := range []struct {
		want string
		do   func() error
	}{
		{"POST /v1/groups/g/pause ", func() error { _, err := a.Pause(ctx, "g"); return err }},
		{"POST /v1/groups/g/resume ", func() error { _, err := a.Resume(ctx, "g"); return err }},
		{"GET /v1/groups/g/why ", func() error {
			why, err := a.Why(ctx, "g")
			require.Equal(t, "it waits", why.Detail)
			return err
		}},
		{"POST /v1/tenants/t/pause ", func() error { _, err := a.PauseTenant(ctx, "t"); return err }},
		{"POST /v1/tenants/t/resume ", func() error { _, err := a.ResumeTenant(ctx, "t"); return err }},
		{"POST /v1/types/T/pause ", func() error {
			p, err := a.PauseType(ctx, "T")
			require.True(t, p.Paused)
			return err
		}},
		{"POST /v1/types/T/resume ", func() error { _, err := a.ResumeType(ctx, "T"); return err }},
		{"GET /v1/tenants/t ", func() error {
			tenant, err := a.Tenant(ctx, "t")
			require.Equal(t, "x", tenant.ID)
			return err
		}},
		{`PUT /v1/tenants/t {"rps":2.5,"base_priority":-3}`, func() error { _, err := a.SetTenant(ctx, "t", set); return err }},
		{`PATCH /v1/tenants/t {"rps":null,"weight":2}`, func() error {
			_, err := a.PatchTenant(ctx, "t", api.TenantPatch{RPS: api.ToDefault[float64](), Weight: api.SetTo(2.0)})
			return err
		}},
		{`PATCH /v1/tenants/t {}`, func() error { _, err := a.PatchTenant(ctx, "t", api.TenantPatch{}); return err }},
		{`PUT /v1/workers/w {"workers":0}`, func() error { _, err := a.ResizeWorker(ctx, "w", 0); return err }},
		{`PUT /v1/tenants/t {}`, func() error { _, err := a.SetTenant(ctx, "t", api.TenantSettings{}); return err }},
	} {
		calls = nil
		require.NoError(t, c.do())
		require.Equal(t, []string{c.want, c.want}, calls, "each of these calls is retried after status 503")
	}
	require.Len(t, w.all(), 13)

	calls = nil
	for _, id := range []string{"", ".", "..", "a/b", "{x}", "a b"} {
		_, err := a.PauseTenant(ctx, id)
		require.ErrorContains(t, err, "tenant id", id)
		_, err = a.ResumeType(ctx, id)
		require.ErrorContains(t, err, "type id", id)
		_, err = a.Tenant(ctx, id)
		require.ErrorContains(t, err, "must match", id)
		_, err = a.SetTenant(ctx, id, api.TenantSettings{})
		require.ErrorContains(t, err, "must match", id)
		_, err = a.PatchTenant(ctx, id, api.TenantPatch{})
		require.ErrorContains(t, err, "must match", id)
		_, err = a.Why(ctx, id)
		require.ErrorContains(t, err, "group id", id)
	}
	_, err := a.SetTenant(ctx, "t", api.TenantSettings{RPS: ptr(math.NaN())})
	require.ErrorContains(t, err, "set tenant t")
	require.Empty(t, calls, "no request is sent for an invalid argument")
}

func TestTenantsArePaged(t *testing.T) {
	a, _ := serve(t, http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		require.Equal(t, "true", r.URL.Query().Get("groups"))
		switch r.URL.Query().Get("cursor") {
		case "":
			answer(w, http.StatusOK, api.TenantList{Tenants: []api.Tenant{{ID: "a"}, {ID: "b"}}, Cursor: "b"})
		case "b":
			answer(w, http.StatusOK, api.TenantList{Tenants: []api.Tenant{{ID: "c"}}})
		default:
			refuse(w, http.StatusUnprocessableEntity, api.Problem{})
		}
	}))
	var ids string
	for tenant, err := range a.Tenants(t.Context(), client.TenantFilter{Groups: true}) {
		require.NoError(t, err)
		ids += tenant.ID
	}
	require.Equal(t, "abc", ids)

	gone := client.NewAPI("http://127.0.0.1:1", client.WithRetry(1, 0))
	for _, err := range gone.Tenants(t.Context(), client.TenantFilter{}) {
		require.ErrorContains(t, err, "list tenants", fmt.Sprint(err))
	}
}

// controlBackend is a fake backend behind the handlers of the real HTTP API. It stores the last
// settings, which each tenant then has, the last patch, and the names of the tenants and types that
// were paused. Pause of a group always fails.
type controlBackend struct {
	httpapi.Backend // nil: methods that are not defined here are not called

	settings api.TenantSettings
	patch    api.TenantPatch
	paused   []string
}

func (b *controlBackend) Tenant(_ context.Context, id string) (api.Tenant, error) {
	return api.Tenant{ID: id, RPS: b.settings.RPS, Weight: 1, BasePriority: b.settings.BasePriority}, nil
}

func (b *controlBackend) SetTenant(ctx context.Context, id string, set api.TenantSettings) (api.Tenant, error) {
	b.settings = set
	return b.Tenant(ctx, id)
}

func (b *controlBackend) PatchTenant(ctx context.Context, id string, p api.TenantPatch) (api.Tenant, error) {
	b.patch = p
	return b.Tenant(ctx, id)
}

func (b *controlBackend) PauseTenant(_ context.Context, id string) error {
	b.paused = append(b.paused, "tenant "+id)
	return nil
}

func (b *controlBackend) PauseType(_ context.Context, id string) error {
	b.paused = append(b.paused, "type "+id)
	return nil
}

func (b *controlBackend) Pause(_ context.Context, id string) (api.Accepted, error) {
	return api.Accepted{}, fmt.Errorf("group %s has ended: %w", id, api.ErrConflict)
}

func (b *controlBackend) Why(context.Context, string) (api.Why, error) {
	return api.Why{Reason: api.WhyPaused, Detail: "it is paused", PausedBy: []string{"tenant"}}, nil
}

func TestPauseResumeAndTenantCallsOnTheRealServer(t *testing.T) {
	b := &controlBackend{}
	a, _ := serve(t, httpapi.New(httpapi.Options{Backend: b}))
	set := api.TenantSettings{RPS: ptr(2.5), BasePriority: ptr(int64(-1e15))}
	tenant, err := a.SetTenant(t.Context(), "acme", set)
	require.NoError(t, err)
	require.Equal(t, set, b.settings)
	shown, err := a.Tenant(t.Context(), "acme")
	require.NoError(t, err)
	require.Equal(t, tenant, shown)
	_, err = a.SetTenant(t.Context(), "acme", api.TenantSettings{RPS: ptr(-1.0), Weight: ptr(0.0), BasePriority: ptr(int64(math.MaxInt64))})
	var refused *client.Error
	require.ErrorAs(t, err, &refused)
	require.Equal(t, http.StatusUnprocessableEntity, refused.Status)
	require.Len(t, refused.Problem.Fields, 3, "every bad field is named")
	require.Equal(t, set, b.settings)

	patch := api.TenantPatch{RPS: api.ToDefault[float64](), BasePriority: api.SetTo(int64(1e15))}
	_, err = a.PatchTenant(t.Context(), "acme", patch)
	require.NoError(t, err)
	require.Equal(t, patch, b.patch, "the server reads what the client writes")

	for _, do := range []func(context.Context, string) (api.Paused, error){a.PauseTenant, a.PauseType} {
		p, err := do(t.Context(), "x.y")
		require.NoError(t, err)
		require.True(t, p.Paused)
	}
	require.Equal(t, []string{"tenant x.y", "type x.y"}, b.paused)
	_, err = a.Pause(t.Context(), "g")
	require.ErrorAs(t, err, &refused)
	require.Equal(t, http.StatusConflict, refused.Status)
	why, err := a.Why(t.Context(), "g")
	require.NoError(t, err)
	require.Equal(t, []string{"tenant"}, why.PausedBy)
}

func TestRejected(t *testing.T) {
	t.Parallel()
	var asked []string
	srv := httptest.NewServer(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		asked = append(asked, r.Method+" "+r.URL.String())
		_, _ = w.Write([]byte(`{"rejected":[{"id":"2-0","reason":"no such type","bytes":2}],"cursor":"2-0"}`))
	}))
	defer srv.Close()
	a := client.NewAPI(srv.URL)
	page, err := a.Rejected(t.Context(), client.RejectedQuery{})
	require.NoError(t, err)
	require.Equal(t, "2-0", page.Cursor)
	require.Equal(t, "no such type", page.Rejected[0].Reason)
	_, err = a.Rejected(t.Context(), client.RejectedQuery{Cursor: page.Cursor, Limit: 7, Data: true})
	require.NoError(t, err)
	require.Equal(t, []string{"GET /v1/rejected", "GET /v1/rejected?cursor=2-0&data=true&limit=7"}, asked)
}

// guardBackend is a backend of the real HTTP API with guards.
type guardBackend struct {
	httpapi.Backend // nil: methods that are not defined here are not called

	calls []string
}

func (b *guardBackend) Guards(_ context.Context, q guard.Query) (api.GuardList, error) {
	b.calls = append(b.calls, fmt.Sprintf("list %q %q %d", q.Kind, q.Cursor, q.Limit))
	if q.Cursor == "" {
		return api.GuardList{Cursor: "0.1.a"}, nil // a page may be empty
	}
	return api.GuardList{Guards: []api.GuardSummary{{Name: "pool/p"}, {Name: "lock/l"}}}, nil
}

func (b *guardBackend) Guard(_ context.Context, name string) (api.Guard, error) {
	b.calls = append(b.calls, "get "+name)
	return api.Guard{Name: name, Spec: api.GuardSpec{Limiter: "none"}}, nil
}

func (b *guardBackend) ControlGuard(_ context.Context, name, member string, do guard.Action) error {
	b.calls = append(b.calls, fmt.Sprintf("%s %s of %s", do, member, name))
	if member == "x" {
		return fmt.Errorf("member x: %w", api.ErrNotFound)
	}
	return nil
}

func TestGuardCallsOnTheRealServer(t *testing.T) {
	b := &guardBackend{}
	a, _ := serve(t, httpapi.New(httpapi.Options{Backend: b}))
	ctx := t.Context()
	var names []string
	for g, err := range a.Guards(ctx, "pool") {
		require.NoError(t, err)
		names = append(names, g.Name)
	}
	require.Equal(t, []string{"pool/p", "lock/l"}, names)
	for _, name := range []string{"p", "key/hosts/example.org"} {
		v, err := a.Guard(ctx, name)
		require.NoError(t, err)
		require.Equal(t, "none", v.Spec.Limiter)
	}
	done, err := a.ControlGuard(ctx, "lock/l", "1", "take-back")
	require.NoError(t, err)
	require.Equal(t, api.GuardAction{Guard: "lock/l", Member: "1", Action: "take-back"}, done)
	_, err = a.ControlGuard(ctx, "p", "x", "disable")
	var refused *client.Error
	require.ErrorAs(t, err, &refused)
	require.Equal(t, 404, refused.Status)
	require.ErrorContains(t, err, "disable member x of guard p")
	want := []string{
		`list "pool" "" 1000`, `list "pool" "0.1.a" 1000`, "get pool/p", "get key/hosts/example.org", "take-back 1 of lock/l",
		"disable x of pool/p",
	}
	require.Equal(t, want, b.calls)

	_, err = a.Guard(ctx, "pools/p")
	require.ErrorContains(t, err, "must be NAME or KIND/NAME")
	_, err = a.ControlGuard(ctx, "p", "a/b", "open")
	require.ErrorContains(t, err, "member id")
	_, err = a.ControlGuard(ctx, "p/../q", "a", "open")
	require.ErrorContains(t, err, "must be NAME or KIND/NAME")
	_, err = a.ControlGuard(ctx, "p", "a", "..")
	require.ErrorContains(t, err, "action")
	require.Equal(t, want, b.calls, "no invalid argument reaches the backend")
}
