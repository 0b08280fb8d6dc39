package client

import (
	"context"
	"iter"
	"net/http"
	"net/url"

	"github.com/bulkaction/bulkaction/api"
)

// Keys iterates over the API keys in Redis, the oldest first. It needs the key of an admin. An
// error ends the iteration.
func (a *operatorAPI) Keys(ctx context.Context) iter.Seq2[api.Key, error] {
	return pages(ctx, a.transport, "keys", url.Values{"limit": {"200"}},
		func(l api.KeyList) ([]api.Key, string) { return l.Keys, l.Cursor })
}

// CreateKey creates an API key. Only its answer ever shows the secret. The client repeats the call
// only after status 429. When it is unknown whether an attempt had its effect, CreateKey returns
// the error; Keys may then show a new key whose secret nobody knows.
func (a *operatorAPI) CreateKey(ctx context.Context, r api.KeyRequest) (api.NewKey, error) {
	c := apiCall{action: "create key", method: http.MethodPost, path: "/v1/keys", onlyIfRefused: true}.withBody(r)
	return doJSON[api.NewKey](ctx, a.transport, c)
}

// RevokeKey deletes an API key. All processes refuse it within ten seconds.
func (a *operatorAPI) RevokeKey(ctx context.Context, id string) (api.KeyRevoked, error) {
	return doJSON[api.KeyRevoked](ctx, a.transport, callOn("revoke", http.MethodDelete, "key", id, ""))
}
