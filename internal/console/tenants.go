package console

import (
	"context"
	"net/http"

	"github.com/bulkaction/bulkaction/api"
	"github.com/bulkaction/bulkaction/internal/httpapi"
)

const (
	tenantsPage  = 50
	tenantGroups = 10
)

// tenantPages show tenants, and change their settings.
type tenantPages struct{ backend httpapi.Backend }

// tenantsData is the data of the list of tenants.
type tenantsData struct {
	Tenants []api.Tenant
	Next    string // path of the next page
	First   bool   // this is the first page
}

// list shows the tenants by id, or sends the browser to the tenant whose id is in the query.
func (p tenantPages) list(r *http.Request) (view, error) {
	q := r.URL.Query()
	id, err := idOf(q, "id")
	if err != nil {
		return view{}, err
	}
	if id != "" {
		return view{}, redirectError(root + "/tenants/" + id)
	}
	cursor, err := cursorOf(q)
	if err != nil {
		return view{}, err
	}
	l, err := p.backend.Tenants(r.Context(), cursor, tenantsPage, false)
	if err != nil {
		return view{}, err
	}
	d := tenantsData{Tenants: l.Tenants, Next: nextPage(root+"/tenants", nil, l.Cursor), First: cursor == ""}
	return view{name: "tenants", title: "Tenants", data: d}, nil
}

// tenantData is the data of the page of a tenant.
type tenantData struct {
	api.Tenant
	Groups []api.Group // the newest
}

func (p tenantPages) tenant(r *http.Request) (view, error) {
	id, err := pathID(r, "id")
	if err != nil {
		return view{}, err
	}
	t, err := p.backend.Tenant(r.Context(), id)
	if err != nil {
		return view{}, err
	}
	l, err := p.backend.Groups(r.Context(), httpapi.ListQuery{Tenant: id, Limit: tenantGroups})
	if err != nil {
		return view{}, err
	}
	return view{name: "tenant", title: "Tenant " + id, data: tenantData{t, l.Groups}}, nil
}

// change sets the settings in the form. An empty field sets the default.
func (p tenantPages) change(ctx context.Context, r *http.Request) (string, error) {
	id, err := pathID(r, "id")
	if err != nil {
		return "", err
	}
	texts := map[string]string{}
	for _, name := range []string{"rps", "weight", "base_priority"} {
		if r.PostForm.Has(name) {
			texts[name] = r.PostForm.Get(name)
		}
	}
	patch, err := httpapi.TenantPatchOf(texts)
	if err != nil {
		return "", err
	}
	_, err = p.backend.PatchTenant(ctx, id, patch)
	return root + "/tenants/" + id + "?done=tenant-changed", err
}

// pauseTenant returns an action that pauses a tenant, or lets it go on.
func pauseTenant(
	do func(context.Context, string) error, done string,
) func(context.Context, *http.Request) (string, error) {
	return func(ctx context.Context, r *http.Request) (string, error) {
		id, err := pathID(r, "id")
		if err != nil {
			return "", err
		}
		return root + "/tenants/" + id + "?done=" + done, do(ctx, id)
	}
}
