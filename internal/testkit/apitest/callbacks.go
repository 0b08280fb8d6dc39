package apitest

import (
	"context"
	"fmt"
	"time"

	"github.com/bulkaction/bulkaction/api"
)

// SetCallback stores nothing: the answer is EndpointView with what was asked for.
func (f *Backend) SetCallback(_ context.Context, tenant string, set api.CallbackSettings) (api.TenantCallback, error) {
	c := EndpointView()
	c.Tenant, c.URL = tenant, set.URL
	if set.Events != nil {
		c.Events = set.Events
	}
	return c, f.Record(fmt.Sprint("set callback ", tenant, " ", set.URL, " ", set.Events))
}

// Callback returns EndpointView, for the tenant acme.
func (f *Backend) Callback(_ context.Context, tenant string) (api.TenantCallback, error) {
	if tenant != "acme" && f.Err == nil {
		return api.TenantCallback{}, fmt.Errorf("callback of tenant %s: %w", tenant, api.ErrNotFound)
	}
	return EndpointView(), f.Err
}

// DeleteCallback records the call.
func (f *Backend) DeleteCallback(_ context.Context, tenant string) error {
	return f.Record("delete callback " + tenant)
}

// CallbackSecret returns a secret of the version 2.
func (f *Backend) CallbackSecret(_ context.Context, tenant string) (api.CallbackSecret, error) {
	return api.CallbackSecret{Tenant: tenant, Secret: "whsec_c2Vjb25k", Version: 2}, f.Err
}

// RotateCallbackSecret returns a secret of the version 3.
func (f *Backend) RotateCallbackSecret(_ context.Context, tenant string) (api.CallbackSecret, error) {
	until := time.Date(2026, 1, 3, 3, 4, 5, 0, time.UTC)
	return api.CallbackSecret{
		Tenant: tenant, Secret: "whsec_dGhpcmQ=", Version: 3, Previous: "whsec_c2Vjb25k", PreviousUntil: &until,
	}, f.Record("rotate " + tenant)
}

// Callbacks returns two pages with CallbackView.
func (f *Backend) Callbacks(_ context.Context, q api.CallbackQuery) (api.CallbackList, error) {
	l := api.CallbackList{Callbacks: []api.Callback{CallbackView(q.State)}}
	if q.Cursor == "" {
		l.Cursor = "next"
	}
	return l, f.Record(fmt.Sprintf("callbacks %+v", q))
}

// FindCallback returns CallbackView, which is dead.
func (f *Backend) FindCallback(_ context.Context, id string) (api.Callback, error) {
	c := CallbackView(api.CallbackDead)
	if id != c.ID {
		return api.Callback{}, fmt.Errorf("callback %s: %w", id, api.ErrNotFound)
	}
	return c, nil
}

// Redeliver returns CallbackView, which is pending.
func (f *Backend) Redeliver(_ context.Context, id string) (api.Callback, error) {
	c := CallbackView(api.CallbackPending)
	if id != c.ID && f.Err == nil {
		return api.Callback{}, fmt.Errorf("callback %s: %w", id, api.ErrNotFound)
	}
	return c, f.Record("redeliver " + id)
}

// RedeliverDead returns the first of f.Redelivered, and removes it there; nothing if there is none.
func (f *Backend) RedeliverDead(_ context.Context, tenant string) (api.Redelivered, error) {
	err := f.Record("redeliver dead " + tenant)
	f.Mu.Lock()
	defer f.Mu.Unlock()
	if err != nil || len(f.Redelivered) == 0 {
		return api.Redelivered{}, err
	}
	next := f.Redelivered[0]
	f.Redelivered = f.Redelivered[1:]
	return next, nil
}

// EndpointView is the callback endpoint of the tenant acme.
func EndpointView() api.TenantCallback {
	return api.TenantCallback{
		Tenant: "acme", URL: "https://example.com/hook?token=t", Events: api.DefaultCallbackEvents, SecretVersion: 2, Pending: 7,
	}
}

// CallbackView is a callback of a group g of the tenant acme.
func CallbackView(state string) api.Callback {
	at := time.Date(2026, 1, 2, 3, 4, 5, 0, time.UTC)
	c := api.Callback{
		ID: "g.1.completed", Tenant: "acme", Group: "g", Type: "group.completed", At: at,
		URL: "https://example.com/hook", State: state, Tries: 8, Error: "500 Internal Server Error", Answer: "no",
	}
	if state == api.CallbackDead {
		c.DiedAt = &at
	} else {
		c.NextAt = &at
	}
	return c
}
