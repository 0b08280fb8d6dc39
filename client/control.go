package client

import (
	"context"
	"fmt"
	"iter"
	"net/http"
	"net/url"

	"github.com/bulkaction/bulkaction/api"
)

// Pause stops the group: none of its jobs starts any more, and its running jobs finish.
func (a *API) Pause(ctx context.Context, group string) (api.Accepted, error) {
	return a.command(ctx, group, "pause", nil, retryAlways)
}

// Resume undoes Pause.
func (a *API) Resume(ctx context.Context, group string) (api.Accepted, error) {
	return a.command(ctx, group, "resume", nil, retryAlways)
}

// Why says what the group's next job waits for. Job says it for any job of the group.
func (a *API) Why(ctx context.Context, group string) (api.Why, error) {
	path, err := groupPath(group, "/why")
	if err != nil {
		return api.Why{}, err
	}
	return doJSON[api.Why](ctx, a, apiCall{action: "explain group " + group, path: path, retry: retryAlways})
}

// PauseTenant stops a tenant: none of its jobs starts any more, and its running jobs finish. The
// tenant need not exist yet.
func (a *API) PauseTenant(ctx context.Context, tenant string) (api.Paused, error) {
	return a.setPaused(ctx, "tenant", tenant, "pause")
}

// ResumeTenant undoes PauseTenant.
func (a *API) ResumeTenant(ctx context.Context, tenant string) (api.Paused, error) {
	return a.setPaused(ctx, "tenant", tenant, "resume")
}

// PauseType stops a job type: none of its jobs starts any more, and its running jobs finish. The
// type need not be known yet.
func (a *API) PauseType(ctx context.Context, typ string) (api.Paused, error) {
	return a.setPaused(ctx, "type", typ, "pause")
}

// ResumeType undoes PauseType.
func (a *API) ResumeType(ctx context.Context, typ string) (api.Paused, error) {
	return a.setPaused(ctx, "type", typ, "resume")
}

func (a *API) setPaused(ctx context.Context, kind, id, verb string) (api.Paused, error) {
	path, err := pathOf(kind, id, "/"+verb)
	if err != nil {
		return api.Paused{}, err
	}
	return doJSON[api.Paused](ctx, a, apiCall{
		action: verb + " " + kind + " " + id,
		method: http.MethodPost,
		path:   path,
		retry:  retryAlways,
	})
}

// Tenants iterates over the tenants that have groups or settings, ordered by id, and fetches one
// page after the other. An error ends the iteration.
func (a *API) Tenants(ctx context.Context) iter.Seq2[api.Tenant, error] {
	c := apiCall{action: "list tenants", path: "/v1/tenants", query: url.Values{"limit": {"200"}}, retry: retryAlways}
	return pages(ctx, a, c, func(l api.TenantList) ([]api.Tenant, string) { return l.Tenants, l.Cursor })
}

// Tenant returns a tenant's settings, and its queue and limits as they are now.
func (a *API) Tenant(ctx context.Context, tenant string) (api.Tenant, error) {
	path, err := pathOf("tenant", tenant, "")
	if err != nil {
		return api.Tenant{}, err
	}
	return doJSON[api.Tenant](ctx, a, apiCall{action: "get tenant " + tenant, path: path, retry: retryAlways})
}

// SetTenant replaces all settings of a tenant: a field of set that is nil gets its default. Pausing
// is not a setting, and stays. The next admission uses the new settings.
func (a *API) SetTenant(ctx context.Context, tenant string, set api.TenantSettings) (api.Tenant, error) {
	path, err := pathOf("tenant", tenant, "")
	if err != nil {
		return api.Tenant{}, err
	}
	body, err := marshal(set)
	if err != nil {
		return api.Tenant{}, fmt.Errorf("set tenant %s: %w", tenant, err)
	}
	return doJSON[api.Tenant](ctx, a, apiCall{
		action: "set tenant " + tenant,
		method: http.MethodPut,
		path:   path,
		body:   body,
		retry:  retryAlways,
	})
}

// pathOf returns the path of a tenant or type. It refuses an invalid id, which could change the
// URL.
func pathOf(kind, id, rest string) (string, error) {
	if !validID.MatchString(id) || id == "." || id == ".." {
		return "", fmt.Errorf("%s id %q: must match %s", kind, id, validID)
	}
	return "/v1/" + kind + "s/" + id + rest, nil
}
