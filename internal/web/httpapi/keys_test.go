package httpapi

import (
	"context"
	"fmt"
	"net/url"
	"slices"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/bulkaction/bulkaction/api"
	"github.com/bulkaction/bulkaction/internal/access/apikey"
	"github.com/bulkaction/bulkaction/internal/access/auth"
)

// fakeKeyStore is a store of API keys in memory.
type fakeKeyStore struct {
	keys []apikey.Record
	err  error
}

func (f *fakeKeyStore) List(context.Context) ([]apikey.Record, []error, error) {
	return slices.Clone(f.keys), nil, f.err
}

func (f *fakeKeyStore) Create(_ context.Context, r apikey.Request) (apikey.NewKey, error) {
	if f.err != nil {
		return apikey.NewKey{}, f.err
	}
	k, err := r.New(auth.SHA256, time.Date(2026, 1, 2, 3, 4, 5, 0, time.UTC))
	f.keys = append(f.keys, k.Record)
	return k, err
}

func (f *fakeKeyStore) Revoke(_ context.Context, id string) error {
	n := len(f.keys)
	f.keys = slices.DeleteFunc(f.keys, func(k apikey.Record) bool { return k.ID == id })
	if len(f.keys) == n {
		return fmt.Errorf("revoke API key %s: %w", id, apikey.ErrNoKey)
	}
	return f.err
}

func TestKeys(t *testing.T) {
	store, log := &fakeKeyStore{}, &fakeActivity{}
	o := options(newFakeBackend())
	o.KeyStore, o.Activity = store, log
	h := New(o)
	require.JSONEq(t, `{"keys":[]}`, call(t, h, "GET", "/v1/keys", "").Body.String())
	rec := call(t, h, "POST", "/v1/keys", `{"role":"producer","tenant":"acme","name":"shop","payloads":false,"expires_in_seconds":3600}`, "Content-Type", jsonType)
	require.Equal(t, 201, rec.Code, rec.Body.String())
	created := decode[api.NewKey](t, rec)
	require.Regexp(t, auth.TokenPattern, created.Secret)
	require.Equal(t, api.Key{
		ID: auth.SHA256(created.Secret).KeyID(), Role: "producer", Tenant: "acme", Name: "shop", CreatedAt: created.CreatedAt,
		ExpiresAt: new(created.CreatedAt.Add(time.Hour)),
	}, created.Key)
	list := call(t, h, "GET", "/v1/keys", "")
	require.Equal(t, []api.Key{created.Key}, decode[api.KeyList](t, list).Keys)
	require.NotContains(t, list.Body.String(), created.Secret)
	require.JSONEq(t, `{"id":"`+created.ID+`","revoked":true}`, call(t, h, "DELETE", "/v1/keys/"+created.ID, "").Body.String())
	requireProblem(t, call(t, h, "DELETE", "/v1/keys/"+created.ID, ""), 404, "")
	var actions []string
	for _, e := range log.entries {
		actions = append(actions, e.Action+" "+e.Object+" "+string(e.After))
		require.NotContains(t, string(e.After), created.Secret)
	}
	require.Equal(t, []string{
		`key.create shop {"lifetime":"1h0m0s","name":"shop","payloads":false,"role":"producer","tenant":"acme"}`,
		"key.revoke " + created.ID + " ", "key.revoke " + created.ID + " ",
	}, actions[:3])

	for body, field := range map[string]string{
		`{"role":"x"}`: "role", `{"role":"producer"}`: "tenant", `{"role":"admin","tenant":"a"}`: "tenant", `{"role":"reader","tenant":"*"}`: "tenant",
		`{"role":"admin","name":"\u0000"}`: "name", `{"role":"admin","expires_in_seconds":59}`: "expires_in_seconds",
		`{"role":"admin","expires_in_seconds":-1}`: "expires_in_seconds", `{"role":"admin","expires_in_seconds":99999999999}`: "expires_in_seconds",
		`{"role":"admin","more":1}`: "more", `{"role":7}`: "role",
	} {
		requireProblem(t, call(t, h, "POST", "/v1/keys", body, "Content-Type", jsonType), 422, field)
	}
	requireProblem(t, call(t, h, "POST", "/v1/keys", `{`, "Content-Type", jsonType), 400, "body")
	require.Empty(t, store.keys)
	store.err = apikey.ErrFull
	requireProblem(t, call(t, h, "POST", "/v1/keys", `{"role":"admin"}`, "Content-Type", jsonType), 409, "")
	store.err = api.ErrUnavailable
	requireProblem(t, call(t, h, "GET", "/v1/keys", ""), 503, "")
}

func TestPagesOfKeys(t *testing.T) {
	store := &fakeKeyStore{}
	for i := range 7 {
		at := time.Date(2026, 1, 2, 3, 4, i/3, 0, time.UTC) // some have the same time
		store.keys = append(store.keys, apikey.Record{ID: fmt.Sprint("key_", i), Role: auth.Admin, CreatedAt: at})
	}
	o := options(newFakeBackend())
	o.KeyStore = store
	h := New(o)
	var got []string
	for cursor := ""; ; {
		page := decode[api.KeyList](t, call(t, h, "GET", "/v1/keys?limit=2&cursor="+url.QueryEscape(cursor), ""))
		for _, k := range page.Keys {
			got = append(got, k.ID)
		}
		if cursor = page.Cursor; cursor == "" {
			break
		}
	}
	require.Equal(t, []string{"key_0", "key_1", "key_2", "key_3", "key_4", "key_5", "key_6"}, got)
	requireProblem(t, call(t, h, "GET", "/v1/keys?cursor=x", ""), 422, "cursor")
}

// TestNoKeyStore: an API that asks for no keys answers 409 to the calls that list, create and
// revoke keys.
func TestNoKeyStore(t *testing.T) {
	h := New(options(newFakeBackend()))
	requireProblem(t, call(t, h, "GET", "/v1/keys", ""), 409, "")
	requireProblem(t, call(t, h, "POST", "/v1/keys", `{"role":"admin"}`, "Content-Type", jsonType), 409, "")
	requireProblem(t, call(t, h, "DELETE", "/v1/keys/key_a", ""), 409, "")
}
