package client_test

import (
	"fmt"
	"io"
	"math"
	"net/http"
	"net/http/httptest"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/bulkaction/bulkaction/api"
	"github.com/bulkaction/bulkaction/client"
)

// TestGroupViews compares the paths and queries of five calls about groups, failures and job maps.
// FailurePage reads the next page's cursor from the header Link.
func TestGroupViews(t *testing.T) {
	var asked []string
	srv := httptest.NewServer(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		asked = append(asked, r.URL.String())
		switch r.URL.Path {
		case "/v1/groups":
			_, _ = io.WriteString(w, `{"groups":[],"scanned":0}`)
		case "/v1/groups/g/failures":
			if r.URL.Query().Get("cursor") == "" {
				w.Header().Set("Link", `</v1/groups/g/failures?cursor=7&limit=2>; rel="next"`)
			}
			_, _ = io.WriteString(w, "{\"ordinal\":3}\n{\"ordinal\":6}\n")
		case "/v1/groups/g/failures/summary":
			_, _ = io.WriteString(w, `{"total":3,"seen":3,"codes":[]}`)
		default:
			_, _ = io.WriteString(w, `{"jobs":9,"buckets":[]}`)
		}
	}))
	defer srv.Close()
	a := client.NewAPI(srv.URL)
	no := false
	for _, err := range a.Groups(t.Context(), client.GroupFilter{
		Type: "T", Paused: &no, FailedJobs: &no, Prefix: "p-", Since: time.Date(2026, 1, 2, 3, 4, 5, 0, time.UTC),
		Tags: api.Tags{"b": "2&3", "a": "1"},
	}) {
		require.NoError(t, err)
	}
	first, err := a.FailurePage(t.Context(), "g", client.FailureQuery{Code: "A&B", Limit: 2, Payloads: true})
	require.NoError(t, err)
	require.Len(t, first.Failures, 2)
	require.Equal(t, "7", first.Cursor)
	last, err := a.FailurePage(t.Context(), "g", client.FailureQuery{Cursor: first.Cursor})
	require.NoError(t, err)
	require.Empty(t, last.Cursor)
	sum, err := a.FailureSummary(t.Context(), "g")
	require.NoError(t, err)
	require.EqualValues(t, 3, sum.Total)
	m, err := a.JobMap(t.Context(), "g", 10)
	require.NoError(t, err)
	require.EqualValues(t, 9, m.Jobs)
	require.Equal(t, []string{
		"/v1/groups?failed_jobs=false&paused=false&prefix=p-&since=2026-01-02T03%3A04%3A05Z&tag=a%3D1&tag=b%3D2%263&type=T",
		"/v1/groups/g/failures?code=A%26B&cursor=&limit=2&payload=true", "/v1/groups/g/failures?cursor=7",
		"/v1/groups/g/failures/summary", "/v1/groups/g/map?buckets=10",
	}, asked)
}

func TestPauseResumeAndTenantCalls(t *testing.T) {
	var calls []string
	a, w := serve(t, http.HandlerFunc(func(rw http.ResponseWriter, r *http.Request) {
		body, err := io.ReadAll(r.Body)
		require.NoError(t, err)
		calls = append(calls, r.Method+" "+r.URL.RequestURI()+" "+string(body))
		require.Equal(t, r.Method == "PATCH", r.Header.Get("Content-Type") == "application/merge-patch+json")
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
		{`GET /v1/limits `, func() error { _, err := a.Limits(ctx); return err }},
		{`PATCH /v1/limits {"global":{"rps":0,"share":null}}`, func() error {
			_, err := a.PatchLimits(ctx, api.LimitsPatch{Global: api.GlobalPatch{RPS: api.SetTo[int64](0), Share: api.ToDefault[string]()}})
			return err
		}},
		{`PATCH /v1/types/T {"in_flight":20}`, func() error {
			_, err := a.PatchType(ctx, "T", api.TypePatch{InFlight: api.SetTo[int64](20)})
			return err
		}},
		{`PUT /v1/workers/w {"workers":0}`, func() error { _, err := a.ResizeWorker(ctx, "w", 0); return err }},
		{`PUT /v1/tenants/t {}`, func() error { _, err := a.SetTenant(ctx, "t", api.TenantSettings{}); return err }},
	} {
		calls = nil
		require.NoError(t, c.do())
		require.Equal(t, []string{c.want, c.want}, calls, "each of these calls is retried after status 503")
	}
	require.Len(t, w.all(), 16)

	calls = nil
	for _, id := range []string{"", ".", "..", "a/b", "{x}", "a b"} {
		_, err := a.PauseTenant(ctx, id)
		require.ErrorContains(t, err, "tenant id", id)
		_, err = a.ResumeType(ctx, id)
		require.ErrorContains(t, err, "type id", id)
		_, err = a.PatchType(ctx, id, api.TypePatch{})
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
