package httpapi

import (
	"cmp"
	"context"
	"errors"
	"net/http"
	"net/url"
	"slices"
	"strings"

	"github.com/bulkaction/bulkaction/api"
	"github.com/bulkaction/bulkaction/internal/access/auth"
)

const callbacksPath = "/v1/callbacks"

func (s *server) callbackRoutes() []route {
	const get, post = http.MethodGet, http.MethodPost
	const endpoint = "/v1/tenants/{id}/callback"
	return []route{
		{method: http.MethodPut, path: endpoint, scope: auth.Control, object: tenantInPath,
			serve: show(changed(s, "id", decodeCallback, s.Backend.SetCallback, jsonType))},
		{method: get, path: endpoint, scope: auth.Read, object: tenantInPath, serve: showByID(s.Backend.Callback)},
		{method: http.MethodDelete, path: endpoint, scope: auth.Control, object: tenantInPath,
			serve: showByID(s.deleteCallback)},
		{method: get, path: endpoint + "/secret", scope: auth.Control, object: tenantInPath,
			serve: showByID(s.Backend.CallbackSecret)},
		{method: post, path: endpoint + "/secret/rotate", scope: auth.Control, object: tenantInPath,
			serve: commandOn(s, "id", nil, func(ctx context.Context, tenant string, _ struct{}) (any, error) {
				return s.Backend.RotateCallbackSecret(ctx, tenant)
			})},
		{method: get, path: callbacksPath, scope: auth.Read, object: ownInList, serve: show(s.listCallbacks),
			query: []string{"state", "tenant", "cursor", "limit"}},
		{method: post, path: callbacksPath + "/{callback}/redeliver", scope: auth.Control, object: callbackInPath,
			serve: commandOn(s, "callback", nil, func(ctx context.Context, id string, _ struct{}) (any, error) {
				c, err := s.Backend.Redeliver(ctx, id)
				return callbackView(ctx, c), err
			})},
		{method: post, path: callbacksPath + "/redeliver", scope: auth.Control, object: tenantInBody,
			serve: commandOn(s, "", readTenant, func(ctx context.Context, _, tenant string) (any, error) {
				return s.Backend.RedeliverDead(ctx, tenant)
			})},
	}
}

// decodeCallback decodes the body of PUT /v1/tenants/{id}/callback. The store checks the values.
func decodeCallback(body []byte) (set api.CallbackSettings, err error) {
	f, err := parseFields(body)
	if err != nil {
		return set, err
	}
	set = api.CallbackSettings{URL: f.text("url"), Events: listOf[string](f, "events", "types of events, which are strings")}
	return set, f.err()
}

func (s *server) deleteCallback(ctx context.Context, tenant string) (api.CallbackRemoval, error) {
	err := s.write(ctx, func(ctx context.Context) error { return s.Backend.DeleteCallback(ctx, tenant) })
	return api.CallbackRemoval{Tenant: tenant, Deleted: true}, err
}

func (s *server) listCallbacks(r *http.Request) (l api.CallbackList, err error) {
	v := r.URL.Query()
	q := api.CallbackQuery{State: cmp.Or(v.Get("state"), api.CallbackDead), Tenant: v.Get("tenant")}
	if q.Cursor, q.Limit, err = pageParams(r); err != nil {
		return l, err
	}
	if !slices.Contains(api.CallbackStates, q.State) {
		return l, invalidField("state", "must be one of "+strings.Join(api.CallbackStates, ", "))
	}
	if q.Tenant != "" && !api.ValidID(q.Tenant) {
		return l, invalidField("tenant", idProblem)
	}
	l, err = s.Backend.Callbacks(r.Context(), q)
	l.Callbacks = orEmpty(l.Callbacks)
	for i, c := range l.Callbacks {
		l.Callbacks[i] = callbackView(r.Context(), c)
	}
	return l, err
}

// callbackView returns a callback with links. What a receiver has answered is shown to those who see error
// texts of jobs.
func callbackView(ctx context.Context, c api.Callback) api.Callback {
	if !auth.SeesPayloads(ctx) {
		c.Answer = ""
	}
	c.Links = map[string]string{
		"group": "/v1/groups/" + c.Group, "redeliver": callbacksPath + "/" + c.ID + "/redeliver",
	}
	return c
}

func readTenant(f *fields) string {
	tenant := f.text("tenant")
	if tenant != "" && !api.ValidID(tenant) {
		f.problem("tenant", idProblem)
	}
	return tenant
}

// shownCallback returns what the activity log shows of a callback endpoint: a query may have secrets.
func shownCallback(address string, events []string) any {
	u, err := url.Parse(address)
	if err != nil {
		return api.CallbackSettings{Events: events}
	}
	u.User, u.RawQuery, u.Fragment = nil, "", ""
	return api.CallbackSettings{URL: u.String(), Events: events}
}

func (b recorded) SetCallback(
	ctx context.Context, tenant string, set api.CallbackSettings,
) (api.TenantCallback, error) {
	if p, _ := auth.From(ctx); !p.Owns(tenant) { // the store refuses it
		return b.Backend.SetCallback(ctx, tenant, set)
	}
	var before any
	if c, err := b.Callback(ctx, tenant); err == nil {
		before = shownCallback(c.URL, c.Events)
	}
	e := entry("callback.set", tenant, before, shownCallback(set.URL, set.Events))
	return recordedCall(ctx, b.log, e, func(ctx context.Context) (api.TenantCallback, error) {
		return b.Backend.SetCallback(ctx, tenant, set)
	})
}

func (b recorded) DeleteCallback(ctx context.Context, tenant string) error {
	c, err := b.Callback(ctx, tenant)
	if err != nil && !errors.Is(err, api.ErrUnavailable) {
		return err
	}
	return b.log.Do(ctx, entry("callback.delete", tenant, shownCallback(c.URL, c.Events), nil),
		func(ctx context.Context) error { return b.Backend.DeleteCallback(ctx, tenant) })
}

// RotateCallbackSecret records the version of the secret alone.
func (b recorded) RotateCallbackSecret(ctx context.Context, tenant string) (api.CallbackSecret, error) {
	s, err := b.CallbackSecret(ctx, tenant)
	if err != nil && !errors.Is(err, api.ErrUnavailable) {
		return s, err
	}
	return recordedCall(ctx, b.log, entry("callback.rotate", tenant, map[string]int{"version": s.Version}, nil),
		func(ctx context.Context) (api.CallbackSecret, error) {
			return b.Backend.RotateCallbackSecret(ctx, tenant)
		})
}

func (b recorded) Redeliver(ctx context.Context, id string) (api.Callback, error) {
	_, err := b.FindCallback(ctx, id)
	if err != nil && !errors.Is(err, api.ErrUnavailable) {
		return api.Callback{}, err
	}
	return recordedCall(ctx, b.log, entry("callback.redeliver", id, nil, nil),
		func(ctx context.Context) (api.Callback, error) { return b.Backend.Redeliver(ctx, id) })
}

func (b recorded) RedeliverDead(ctx context.Context, tenant string) (api.Redelivered, error) {
	p, _ := auth.From(ctx)
	of, ok := p.TenantFor(tenant)
	if !ok { // the store refuses it
		return b.Backend.RedeliverDead(ctx, tenant)
	}
	return recordedCall(ctx, b.log, entry("callback.redeliver", cmp.Or(of, "all"), nil, nil),
		func(ctx context.Context) (api.Redelivered, error) { return b.Backend.RedeliverDead(ctx, tenant) })
}
