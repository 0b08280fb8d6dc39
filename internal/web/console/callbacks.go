package console

import (
	"cmp"
	"context"
	"fmt"
	"net/http"
	"net/url"
	"slices"
	"strconv"

	"github.com/bulkaction/bulkaction/api"
	"github.com/bulkaction/bulkaction/internal/access/auth"
	"github.com/bulkaction/bulkaction/internal/web/httpapi"
)

const callbacksPage = 50

// callbackPages show callbacks and send them again, and change the callback endpoints of tenants.
type callbackPages struct{ backend httpapi.Backend }

type callbacksData struct {
	Callbacks []api.Callback
	Query     api.CallbackQuery
	States    []string
	Next      string
	Tenants   bool // the reader sees callbacks of several tenants
}

// Example is a command that makes a callback.
func (callbacksData) Example() string {
	return "bulkaction submit --type NOOP --payload '{}' --callback-url https://example.com/hook"
}

// Dead reports whether the page shows dead callbacks.
func (d callbacksData) Dead() bool { return d.Query.State == api.CallbackDead }

// readList parses the query of the list of callbacks, like groupPages.readList.
func (p callbackPages) readList(q url.Values) (
	read func(context.Context) (any, error), filter url.Values, err error,
) {
	query := api.CallbackQuery{State: cmp.Or(q.Get("state"), api.CallbackDead), Limit: callbacksPage}
	if !slices.Contains(api.CallbackStates, query.State) {
		return nil, nil, notOneOf("state", api.CallbackStates)
	}
	if query.Tenant, err = idOf(q, "tenant"); err != nil {
		return nil, nil, err
	}
	if query.Cursor, err = cursorOf(q); err != nil {
		return nil, nil, err
	}
	filter = chosen(map[string]string{"state": query.State, "tenant": query.Tenant, "cursor": query.Cursor})
	return func(ctx context.Context) (any, error) {
		l, err := p.backend.Callbacks(ctx, query)
		who, _ := auth.From(ctx)
		return callbacksData{
			l.Callbacks, query, api.CallbackStates, nextPage(root+"/callbacks", filter, l.Cursor),
			who.Tenant == "" || who.Tenant == auth.AllTenants,
		}, err
	}, filter, nil
}

// list shows the list of callbacks. A query that can't be used is shown again, with the problem.
func (p callbackPages) list(r *http.Request) (view, error) {
	q := r.URL.Query()
	return listOf(p.readList).orRefused("callbacks", "Callbacks", "callbacks", func(tenants bool) any {
		return callbacksData{nil, api.CallbackQuery{State: q.Get("state"), Tenant: q.Get("tenant")}, api.CallbackStates, "", tenants}
	})(r)
}

// hostOf returns the host of a callback's URL, whose path and query may be secret.
func hostOf(text string) string {
	u, err := url.Parse(text)
	if err != nil {
		return ""
	}
	return u.Host
}

// redeliver sends the callback of the pressed button again; without an id, dead ones of the tenant
// for which the list was filtered.
func (p callbackPages) redeliver(ctx context.Context, r *http.Request) (string, error) {
	tenant, err := idOf(r.PostForm, "tenant")
	if err != nil {
		return "", err
	}
	after := chosen(map[string]string{"state": r.PostForm.Get("state"), "tenant": tenant, "done": "callback"})
	if id := r.PostForm.Get("id"); id != "" {
		if api.GroupOfEvent(id) == "" {
			return "", invalid("id", "must be the id of an event, such as my-group.1.completed")
		}
		_, err = p.backend.Redeliver(ctx, id)
		return root + "/callbacks?" + after.Encode(), err
	}
	who, _ := auth.From(ctx)
	tenant, ok := who.TenantFor(tenant)
	if !ok {
		return "", fmt.Errorf("callbacks of tenant %s: %w", tenant, api.ErrNotFound)
	}
	d, err := p.backend.RedeliverDead(ctx, tenant)
	for name, value := range map[string]any{"done": "callbacks", "n": d.Redelivered, "more": d.More, "full": d.Full, "refused": d.Refused} {
		after.Set(name, fmt.Sprint(value))
	}
	return root + "/callbacks?" + after.Encode(), err
}

// redelivered says what a call of RedeliverDead has done.
func redelivered(q url.Values) string {
	n, _ := strconv.ParseUint(q.Get("n"), 10, 31)
	text := plural(n, "dead callback is", "dead callbacks are") + " sent again."
	if q.Get("more") == "true" {
		text += " There are more: send them again, too."
	}
	if q.Get("full") == "true" {
		text += " An endpoint has as many pending callbacks as may be: send the others again later."
	}
	if n, _ := strconv.ParseUint(q.Get("refused"), 10, 31); n > 0 {
		text += " " + plural(n, "stays", "stay") + " dead, because the endpoint is disabled or deleted: set it again first."
	}
	return text
}

// change changes the endpoint of the tenant in the path.
func (p callbackPages) change(ctx context.Context, r *http.Request) (string, error) {
	tenant, err := pathID(r, "id")
	if err != nil {
		return "", err
	}
	do := r.PathValue("do")
	switch do {
	case "set":
		set := api.CallbackSettings{URL: r.PostForm.Get("url"), Events: r.PostForm["events"]}
		_, err = p.backend.SetCallback(ctx, tenant, set)
	case "delete":
		err = p.backend.DeleteCallback(ctx, tenant)
	case "rotate":
		_, err = p.backend.RotateCallbackSecret(ctx, tenant)
	default:
		err = api.ErrNotFound
	}
	return root + "/tenants/" + tenant + "?done=callback-" + do, err
}

// secret returns the page with the secret of the tenant in the path. It answers a form, so that
// Console.last never has the secret.
func (p callbackPages) secret(ctx context.Context, r *http.Request) (view, error) {
	tenant, err := pathID(r, "id")
	if err != nil {
		return view{}, err
	}
	s, err := p.backend.CallbackSecret(ctx, tenant)
	return view{name: "callbacksecret", title: "Secret of " + tenant, data: s}, err
}
