package httpapi_test

import (
	"context"
	"io"
	"net/http"
	"net/netip"
	"sync/atomic"
	"testing"
	"testing/synctest"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/bulkaction/bulkaction/api"
	"github.com/bulkaction/bulkaction/internal/access/apikey"
	"github.com/bulkaction/bulkaction/internal/access/auth"
	"github.com/bulkaction/bulkaction/internal/testkit/apitest"
	"github.com/bulkaction/bulkaction/internal/web/httpapi"
)

// fakeKeys knows one key, "good", until it is revoked.
type fakeKeys struct {
	principal auth.Principal
	revoked   atomic.Bool
	err       error // of every check
	from      netip.Addr
}

func (k *fakeKeys) Authenticate(_ context.Context, token string, client netip.Addr) (auth.Principal, error) {
	k.from = client
	if k.err == nil && (token != "good" || k.revoked.Load()) {
		return auth.Principal{}, apikey.ErrInvalid
	}
	return k.principal, k.err
}

func (k *fakeKeys) Still(p auth.Principal) bool { return p == k.principal && !k.revoked.Load() }

func keyOptions(b httpapi.Backend, k *fakeKeys) httpapi.Options {
	o := options(b)
	o.Keys = k
	return o
}

// TestScopes: the function Scopes returns the scopes of all calls that need a key, also of calls
// that a server offers only with certain options.
func TestScopes(t *testing.T) {
	want := map[string]auth.Scope{}
	for _, rt := range httpapi.Routes() {
		if rt.Scope != httpapi.Open {
			want[rt.Method+" "+rt.Path] = rt.Scope
		}
	}
	require.Equal(t, want, httpapi.Scopes())
}

func TestAnswersToKeys(t *testing.T) {
	k := &fakeKeys{principal: auth.Principal{KeyID: "key_a", Role: auth.Reader, Tenant: "acme"}}
	h := httpapi.New(keyOptions(apitest.NewBackend().WithGroup("g"), k))
	require.Equal(t, 200, call(t, h, "GET", "/v1/groups/g", "", "Authorization", "bearer good").Code)
	require.Equal(t, "192.0.2.1", k.from.String())
	for _, header := range [][]string{
		nil, {"Authorization", "good"}, {"Authorization", "Basic good"}, {"X-Api-Key", "good"},
		{"Authorization", "Bearer good", "Authorization", "Bearer good"}, {"Authorization", "Bearer other"},
	} {
		rec := call(t, h, "GET", "/v1/groups/g", "", header...)
		require.Equal(t, api.Unauthenticated, requireProblem(t, rec, 401, "").Code)
		require.Equal(t, "Bearer", rec.Header().Get("WWW-Authenticate"))
	}
	requireProblem(t, call(t, h, "GET", "/v1/groups/g?access_token=good", ""), 401, "")
	rec := call(t, h, "POST", "/v1/groups/g/cancel", "", "Authorization", "Bearer good")
	require.Equal(t, api.NotAllowed, requireProblem(t, rec, 403, "").Code)
	require.Equal(t, 404, call(t, h, "GET", "/v1/none", "").Code)
	require.Equal(t, 405, call(t, h, "POST", "/v1/stats", "").Code)
	require.Equal(t, 200, call(t, h, "GET", "/", "").Code)

	k.err = apikey.ErrUnavailable
	rec = call(t, h, "GET", "/v1/groups/g", "", "Authorization", "Bearer good")
	require.Equal(t, api.StoreUnavailable, requireProblem(t, rec, 503, "").Code)
	k.err = &apikey.TooManyFailuresError{RetryAfter: 6 * time.Second}
	rec = call(t, h, "GET", "/v1/groups/g", "", "Authorization", "Bearer good")
	require.Equal(t, api.TooManyFailures, requireProblem(t, rec, 429, "").Code)
	require.Equal(t, "6", rec.Header().Get("Retry-After"))
}

// TestRoomCallsWithKeys: from another host, the verification of an entry token gets 403 if the API
// asks for no keys, and 200 with a key of the role service. The list of events gets 403 with this
// key.
func TestRoomCallsWithKeys(t *testing.T) {
	k := &fakeKeys{principal: auth.Principal{KeyID: "key_s", Role: auth.Service}}
	o := roomOptions(apitest.NewRooms())
	h := httpapi.New(o)
	require.Equal(t, 403, call(t, h, "POST", "/v1/entry-tokens/verify", `{"token":"t"}`, "Content-Type", httpapi.JSONType).Code)
	o.Keys = k
	h = httpapi.New(o)
	rec := call(t, h, "POST", "/v1/entry-tokens/verify", `{"token":"t"}`, "Content-Type", httpapi.JSONType, "Authorization", "Bearer good")
	require.Equal(t, 200, rec.Code, rec.Body.String())
	rec = call(t, h, "GET", "/v1/events", "", "Authorization", "Bearer good")
	require.Equal(t, api.NotAllowed, requireProblem(t, rec, 403, "").Code)
}

// TestRevokedKeyEndsStreams: a stream of events or results lasts while its key is valid, and ends
// within stillInterval and 1 s of the revocation. With the 7 s until Authenticator.Still says so
// (see package apikey), that may be at most 10 s.
func TestRevokedKeyEndsStreams(t *testing.T) {
	require.LessOrEqual(t, 7*time.Second+httpapi.StillInterval, 10*time.Second)
	endless := apitest.NewBackend().WithGroup("g")
	endless.OnResults = func(write func([]byte) error) error {
		for {
			if err := write([]byte(`{}`)); err != nil {
				return err
			}
			<-time.After(time.Second)
		}
	}
	for _, path := range []string{"/v1/groups/g/events", "/v1/groups/g/results"} {
		synctest.Test(t, func(t *testing.T) {
			k := &fakeKeys{principal: auth.Principal{KeyID: "key_a", Role: auth.Admin}}
			client := serve(t, httpapi.New(keyOptions(endless, k)))
			req, err := http.NewRequestWithContext(t.Context(), "GET", "http://localhost"+path, nil)
			require.NoError(t, err)
			req.Header.Set("Authorization", "Bearer good")
			resp, err := client.Do(req)
			require.NoError(t, err)
			defer resp.Body.Close()
			require.Equal(t, 200, resp.StatusCode)
			start := time.Now()
			go func() {
				<-time.After(time.Minute)
				k.revoked.Store(true)
			}()
			_, _ = io.Copy(io.Discard, resp.Body)
			took := time.Since(start)
			require.GreaterOrEqual(t, took, time.Minute, "a valid key keeps its stream")
			require.LessOrEqual(t, took, time.Minute+httpapi.StillInterval+time.Second)
		})
	}
}

// TestRevokedKeyEndsAppends: if the key is revoked after the first batch of a streamed body, the
// answer is 401, and only the 500 jobs of this batch are stored.
func TestRevokedKeyEndsAppends(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		f := apitest.NewBackend().WithGroup("g")
		k := &fakeKeys{principal: auth.Principal{KeyID: "key_a", Role: auth.Admin}}
		client := serve(t, httpapi.New(keyOptions(f, k)))
		in, out := io.Pipe()
		go func() {
			_, _ = io.WriteString(out, numbered(httpapi.MaxBatchLines+1)) // the first batch is stored when the next one begins
			<-time.After(time.Second)
			k.revoked.Store(true)
			<-time.After(2 * httpapi.StillInterval)
			_, _ = io.WriteString(out, numbered(httpapi.MaxBatchLines+1))
			out.Close()
		}()
		req, err := http.NewRequestWithContext(t.Context(), "POST", "http://localhost/v1/groups/g/jobs", in)
		require.NoError(t, err)
		req.Header.Set("Authorization", "Bearer good")
		req.Header.Set("Content-Type", ndjson)
		resp, err := client.Do(req)
		require.NoError(t, err)
		defer resp.Body.Close()
		body, err := io.ReadAll(resp.Body)
		require.NoError(t, err)
		require.Equal(t, 401, resp.StatusCode, string(body))
		require.Contains(t, string(body), `"accepted":500`)
		require.Len(t, f.Payloads("g"), httpapi.MaxBatchLines)
	})
}
