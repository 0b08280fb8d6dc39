package client

import (
	"context"
	"encoding/json"
	"fmt"
	"iter"
	"net/http"
	"net/url"
	"time"

	"github.com/bulkaction/bulkaction/api"
	"github.com/bulkaction/bulkaction/internal/calls/webhook"
)

// SetCallback lets a URL be called when groups of a tenant end, or enter other states that
// set.Events names. It replaces the tenant's endpoint, and enables one that is disabled.
func (a *API) SetCallback(ctx context.Context, tenant string, set api.CallbackSettings) (api.TenantCallback, error) {
	c := callOn("set callback of", http.MethodPut, "tenant", tenant, "/callback").withBody(set)
	return doJSON[api.TenantCallback](ctx, a, c)
}

// Callback returns the callback endpoint of a tenant. Without one the error is ErrNotFound.
func (a *API) Callback(ctx context.Context, tenant string) (api.TenantCallback, error) {
	return doJSON[api.TenantCallback](ctx, a, callOn("get callback of", http.MethodGet, "tenant", tenant, "/callback"))
}

// DeleteCallback deletes the callback endpoint of a tenant. What is pending for it becomes dead.
func (a *API) DeleteCallback(ctx context.Context, tenant string) (api.CallbackRemoval, error) {
	return doJSON[api.CallbackRemoval](ctx, a,
		callOn("delete callback of", http.MethodDelete, "tenant", tenant, "/callback"))
}

// CallbackSecret returns the secret that [VerifyWebhook] needs for callbacks of a tenant's groups.
func (a *API) CallbackSecret(ctx context.Context, tenant string) (api.CallbackSecret, error) {
	return doJSON[api.CallbackSecret](ctx, a,
		callOn("get callback secret of", http.MethodGet, "tenant", tenant, "/callback/secret"))
}

// RotateCallbackSecret gives a tenant a new secret. For 24 hours its callbacks are signed with both.
// The client repeats the call only after status 429: a second rotation would end the validity of the
// secret that receivers have.
func (a *API) RotateCallbackSecret(ctx context.Context, tenant string) (api.CallbackSecret, error) {
	c := callOn("rotate callback secret of", http.MethodPost, "tenant", tenant, "/callback/secret/rotate")
	c.onlyIfRefused = true
	return doJSON[api.CallbackSecret](ctx, a, c)
}

// CallbackFilter selects callbacks.
type CallbackFilter struct {
	State  string // api.CallbackDead (when empty) or api.CallbackPending
	Tenant string // "": all that the API key may see
}

// Callbacks iterates over callbacks: dead ones newest first, pending ones by endpoint, within each by
// the time of their next try. An error ends the iteration.
func (a *API) Callbacks(ctx context.Context, f CallbackFilter) iter.Seq2[api.Callback, error] {
	query := url.Values{"limit": {"1000"}}
	for name, value := range map[string]string{"state": f.State, "tenant": f.Tenant} {
		if value != "" {
			query.Set(name, value)
		}
	}
	return pages(ctx, a, "callbacks", query,
		func(l api.CallbackList) ([]api.Callback, string) { return l.Callbacks, l.Cursor })
}

// Redeliver sends a callback again now, with all its tries: a dead one becomes pending, a pending one
// does not wait. One that was delivered is forgotten: the error is ErrNotFound.
func (a *API) Redeliver(ctx context.Context, id string) (api.Callback, error) {
	c := apiCall{action: "redeliver callback " + id, method: http.MethodPost, path: "/v1/callbacks/" + id + "/redeliver"}
	if api.GroupOfEvent(id) == "" {
		c.invalid = fmt.Errorf("callback id %q: must be that of an event, such as my-group.1.completed", id)
	}
	return doJSON[api.Callback](ctx, a, c)
}

// RedeliverDead makes dead callbacks of a tenant, or with "" all that the API key may see, pending
// again, up to 1,000 in a call. While the answer has More, the call is to be repeated; if it has Full,
// after a while.
func (a *API) RedeliverDead(ctx context.Context, tenant string) (api.Redelivered, error) {
	c := apiCall{action: "redeliver dead callbacks", method: http.MethodPost, path: "/v1/callbacks/redeliver"}
	if tenant != "" {
		c = c.withBody(map[string]string{"tenant": tenant})
	}
	return doJSON[api.Redelivered](ctx, a, c)
}

// ErrSignature is the error of [VerifyWebhook] for a request that no owner of the secret has sent.
var ErrSignature = webhook.ErrSignature

// VerifyWebhook checks the signature of a callback, and that it was signed at most five minutes ago,
// and returns its event. secret is that of api.CallbackSecret. A callback may come more than once:
// the header webhook-id is then the same. Callbacks may come in any order: Timestamp tells which one
// is newer.
func VerifyWebhook(secret string, header http.Header, body []byte) (e api.WebhookEvent, err error) {
	if err := webhook.Verify(secret, header, body, time.Now()); err != nil {
		return e, fmt.Errorf("verify webhook: %w", err)
	}
	if err := json.Unmarshal(body, &e); err != nil {
		return api.WebhookEvent{}, fmt.Errorf("verify webhook: decode event: %w", err)
	}
	return e, nil
}
