package client

import (
	"context"
	"iter"
	"net/http"
	"net/url"
	"strconv"
	"time"

	"github.com/bulkaction/bulkaction/api"
)

// operatorAPI holds the calls on tenants, on types and on the whole installation.
type operatorAPI struct{ *transport }

// PauseTenant stops a tenant: none of its jobs starts any more, and its running jobs finish. The
// tenant need not exist yet.
func (a *operatorAPI) PauseTenant(ctx context.Context, tenant string) (api.Paused, error) {
	return doJSON[api.Paused](ctx, a.transport, callOn("pause", http.MethodPost, "tenant", tenant, "/pause"))
}

// ResumeTenant undoes PauseTenant.
func (a *operatorAPI) ResumeTenant(ctx context.Context, tenant string) (api.Paused, error) {
	return doJSON[api.Paused](ctx, a.transport, callOn("resume", http.MethodPost, "tenant", tenant, "/resume"))
}

// PauseType stops a job type: none of its jobs starts any more, and its running jobs finish. The
// type need not be known yet.
func (a *operatorAPI) PauseType(ctx context.Context, typ string) (api.Paused, error) {
	return doJSON[api.Paused](ctx, a.transport, callOn("pause", http.MethodPost, "type", typ, "/pause"))
}

// ResumeType undoes PauseType.
func (a *operatorAPI) ResumeType(ctx context.Context, typ string) (api.Paused, error) {
	return doJSON[api.Paused](ctx, a.transport, callOn("resume", http.MethodPost, "type", typ, "/resume"))
}

// TenantFilter says which tenants [API.Tenants] leaves out.
type TenantFilter struct {
	// Groups also lists the implicit tenants: a group that was submitted without a tenant is its
	// own tenant.
	Groups bool
}

// Tenants iterates over the tenants that have groups or settings or are paused, ordered by id, and
// fetches one page after the other. An error ends the iteration.
func (a *operatorAPI) Tenants(ctx context.Context, f TenantFilter) iter.Seq2[api.Tenant, error] {
	query := url.Values{"limit": {"200"}}
	if f.Groups {
		query.Set("groups", "true")
	}
	return pages(ctx, a.transport, "tenants", query,
		func(l api.TenantList) ([]api.Tenant, string) { return l.Tenants, l.Cursor })
}

// BusiestTenants returns the active tenants with the most unfinished jobs, at most 100, as they
// were at AsOf or later, at most about 30 s ago. AsOf is nil if no watcher has looked yet. With an
// API key of one tenant, the list has only this tenant, as it is now, if it exists.
func (a *operatorAPI) BusiestTenants(ctx context.Context) (api.TenantList, error) {
	return doJSON[api.TenantList](ctx, a.transport, apiCall{
		action: "list busiest tenants", method: http.MethodGet, path: "/v1/tenants",
		query: url.Values{"sort": {"backlog"}},
	})
}

// History returns throughput and queues of the last minutes. minutes is 15 to 1,440.
func (a *operatorAPI) History(ctx context.Context, minutes int) (api.History, error) {
	return doJSON[api.History](ctx, a.transport, apiCall{
		action: "get history", method: http.MethodGet, path: "/v1/history",
		query: url.Values{"minutes": {strconv.Itoa(minutes)}},
	})
}

// Audit returns what the watchers have found when they last audited their partitions.
func (a *operatorAPI) Audit(ctx context.Context) (api.AuditState, error) {
	return doJSON[api.AuditState](ctx, a.transport,
		apiCall{action: "get audit", method: http.MethodGet, path: "/v1/audit"})
}

// Tenant returns a tenant's settings, and its queue and limits as they are now.
func (a *operatorAPI) Tenant(ctx context.Context, tenant string) (api.Tenant, error) {
	return doJSON[api.Tenant](ctx, a.transport, callOn("get", http.MethodGet, "tenant", tenant, ""))
}

// SetTenant replaces all settings of a tenant: a nil field of set means the default. A pause is no
// setting, so a paused tenant stays paused. The next admission uses the new settings.
func (a *operatorAPI) SetTenant(ctx context.Context, tenant string, set api.TenantSettings) (api.Tenant, error) {
	return doJSON[api.Tenant](ctx, a.transport, putOn("set", "tenant", tenant, set))
}

// PatchTenant changes the settings of a tenant that the patch has; the others stay as they are.
// Patches of different settings at the same time all have their effect.
func (a *operatorAPI) PatchTenant(ctx context.Context, tenant string, patch api.TenantPatch) (api.Tenant, error) {
	c := callOn("change", http.MethodPatch, "tenant", tenant, "").withBody(patch)
	c.header = http.Header{"Content-Type": {"application/merge-patch+json"}}
	return doJSON[api.Tenant](ctx, a.transport, c)
}

// ResizeWorker asks a worker process to have n slots from now on, 0 to api.MaxWorkers; without
// slots it starts no job. Stats names the processes, and shows the new number within a second. A
// process that starts again begins with its configured number.
func (a *operatorAPI) ResizeWorker(ctx context.Context, worker string, n int) (api.PoolSize, error) {
	return doJSON[api.PoolSize](ctx, a.transport, putOn("resize", "worker", worker, map[string]int{"workers": n}))
}

// putOn returns a PUT call with a JSON body on one object, such as a tenant. The body replaces the
// object.
func putOn(verb, kind, id string, body any) apiCall {
	return callOn(verb, http.MethodPut, kind, id, "").withBody(body)
}

// Stats returns queue sizes, rates, and the live processes.
func (a *operatorAPI) Stats(ctx context.Context) (api.Stats, error) {
	return doJSON[api.Stats](ctx, a.transport,
		apiCall{action: "get stats", method: http.MethodGet, path: "/v1/stats"})
}

// DeadLetterFilter selects the dead letters that match all fields. An empty field matches every
// dead letter.
type DeadLetterFilter struct {
	Tenant, Group, Type, Code string
	Since                     time.Time // the oldest time; zero: none
}

// DeadLetters iterates over dead letters, newest first, and fetches one page after the other. An
// error ends the iteration.
func (a *operatorAPI) DeadLetters(ctx context.Context, f DeadLetterFilter) iter.Seq2[api.DeadLetter, error] {
	query := url.Values{"limit": {"200"}}
	for name, value := range map[string]string{"tenant": f.Tenant, "group": f.Group, "type": f.Type, "code": f.Code} {
		if value != "" {
			query.Set(name, value)
		}
	}
	if !f.Since.IsZero() {
		query.Set("since", f.Since.UTC().Format(time.RFC3339Nano))
	}
	return pages(ctx, a.transport, "dead letters", query,
		func(l api.DeadLetterList) ([]api.DeadLetter, string) { return l.DeadLetters, l.Cursor })
}
