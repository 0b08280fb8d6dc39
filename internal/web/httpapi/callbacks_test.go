package httpapi_test

import (
	"bytes"
	"log/slog"
	"strings"
	"testing"

	"github.com/stretchr/testify/require"

	"github.com/bulkaction/bulkaction/api"
	"github.com/bulkaction/bulkaction/internal/access/auth"
	"github.com/bulkaction/bulkaction/internal/testkit/apitest"
	"github.com/bulkaction/bulkaction/internal/web/httpapi"
)

const endpointPath = "/v1/tenants/acme/callback"

func TestCallbackEndpoint(t *testing.T) {
	f := apitest.NewBackend()
	h := httpapi.New(options(f))
	w := call(t, h, "PUT", endpointPath, `{"url":"https://example.com/h","events":["group.failed"]}`, "Content-Type", "application/json")
	require.Equal(t, 200, w.Code, w.Body)
	require.Equal(t, []string{"group.failed"}, decode[api.TenantCallback](t, w).Events)
	require.Equal(t, 200, call(t, h, "PUT", endpointPath, `{"url":"https://example.com/h","events":null}`, "Content-Type", "application/json").Code)
	require.EqualValues(t, 7, decode[api.TenantCallback](t, call(t, h, "GET", endpointPath, "")).Pending)
	require.True(t, decode[api.CallbackRemoval](t, call(t, h, "DELETE", endpointPath, "")).Deleted)
	requireProblem(t, call(t, h, "GET", "/v1/tenants/none/callback", ""), 404, "")
	require.Equal(t, []string{
		"set callback acme https://example.com/h [group.failed]", "set callback acme https://example.com/h []", "delete callback acme",
	}, f.Calls)
	for body, field := range map[string]string{
		`{"url":1}`: "url", `{"url":"https://a.b","events":"group.failed"}`: "events", `{"url":"https://a.b","events":[1]}`: "events",
		`{"url":"https://a.b","secret":"x"}`: "secret", `[]`: "body",
	} {
		requireProblem(t, call(t, h, "PUT", endpointPath, body, "Content-Type", "application/json"), 422, field)
	}
	requireProblem(t, call(t, h, "PUT", endpointPath, `{}`, "Content-Type", "text/plain"), 415, "")
	requireProblem(t, call(t, h, "PUT", "/v1/tenants/a%2Fb/callback", `{}`, "Content-Type", "application/json"), 422, "id")
}

// TestCallbackSecretsAreNotKept: no cache may keep an answer with a secret, no log line and no entry
// of the activity log has it.
func TestCallbackSecretsAreNotKept(t *testing.T) {
	var log bytes.Buffer
	entries := &fakeActivity{}
	o := options(apitest.NewBackend())
	o.Log = slog.New(slog.NewTextHandler(&log, &slog.HandlerOptions{Level: slog.LevelDebug}))
	o.Activity = entries
	h := httpapi.New(o)
	for target, version := range map[string]int{"GET /secret": 2, "POST /secret/rotate": 3} {
		method, path, _ := strings.Cut(target, " ")
		w := call(t, h, method, endpointPath+path, "")
		require.Equal(t, "no-store", w.Header().Get("Cache-Control"))
		s := decode[api.CallbackSecret](t, w)
		require.Equal(t, version, s.Version)
		require.Contains(t, s.Secret, "whsec_")
	}
	requireProblem(t, call(t, h, "POST", endpointPath+"/secret/rotate", `{"x":1}`, "Content-Type", "application/json"), 422, "x")
	require.Contains(t, log.String(), "/secret/rotate")
	require.NotContains(t, log.String(), "whsec_")
	require.Len(t, entries.entries, 1)
	require.NotContains(t, string(entries.entries[0].Before)+string(entries.entries[0].After), "whsec_")
}

func TestCallbacks(t *testing.T) {
	f := apitest.NewBackend()
	f.Redelivered = []api.Redelivered{{Redelivered: 1000, More: true}}
	h := httpapi.New(options(f))
	l := decode[api.CallbackList](t, call(t, h, "GET", "/v1/callbacks", ""))
	require.Equal(t, "next", l.Cursor)
	require.Equal(t, map[string]string{"group": "/v1/groups/g", "redeliver": "/v1/callbacks/g.1.completed/redeliver"}, l.Callbacks[0].Links)
	call(t, h, "GET", "/v1/callbacks?state=pending&tenant=acme&cursor=next&limit=7", "")
	w := call(t, h, "POST", l.Callbacks[0].Links["redeliver"], "")
	require.Equal(t, 202, w.Code, w.Body)
	require.Equal(t, api.CallbackPending, decode[api.Callback](t, w).State)
	w = call(t, h, "POST", "/v1/callbacks/redeliver", `{"tenant":"acme"}`, "Content-Type", "application/json")
	require.Equal(t, 202, w.Code, w.Body)
	require.Equal(t, api.Redelivered{Redelivered: 1000, More: true}, decode[api.Redelivered](t, w))
	call(t, h, "POST", "/v1/callbacks/redeliver", "")
	require.Equal(t, []string{
		"callbacks {State:dead Tenant: Cursor: Limit:50}", "callbacks {State:pending Tenant:acme Cursor:next Limit:7}",
		"redeliver g.1.completed", "redeliver dead acme", "redeliver dead ",
	}, f.Calls)
	for target, field := range map[string]string{
		"GET /v1/callbacks?state=delivered": "state", "GET /v1/callbacks?tenant=a%2Fb": "tenant", "GET /v1/callbacks?limit=0": "limit",
		"POST /v1/callbacks/g/redeliver": "callback", "POST /v1/callbacks/g.0.completed/redeliver": "callback", "POST /v1/callbacks/a%2Fb.1.failed/redeliver": "callback",
	} {
		method, path, _ := strings.Cut(target, " ")
		requireProblem(t, call(t, h, method, path, ""), 422, field)
	}
	requireProblem(t, call(t, h, "POST", "/v1/callbacks/g.2.completed/redeliver", ""), 404, "")
	requireProblem(t, call(t, h, "POST", "/v1/callbacks/g.1.completed/redeliver", `{"x":1}`, "Content-Type", "application/json"), 422, "x")
	requireProblem(t, call(t, h, "POST", "/v1/callbacks/redeliver", `{"tenant":"a/b"}`, "Content-Type", "application/json"), 422, "tenant")
	requireProblem(t, call(t, h, "POST", "/v1/callbacks/redeliver", `{"state":"dead"}`, "Content-Type", "application/json"), 422, "state")
}

// TestForeignEndpointsAreNotRecorded: changes of another tenant's callbacks, which the store refuses, make no
// entry. Those of all that a key of one tenant sees are its tenant's.
func TestForeignEndpointsAreNotRecorded(t *testing.T) {
	for _, c := range []struct{ target, body, recorded string }{
		{"PUT /v1/tenants/acme/callback", `{"url":"https://example.com"}`, "callback.set acme"},
		{"PUT /v1/tenants/globex/callback", `{"url":"https://example.com"}`, ""},
		{"POST /v1/callbacks/redeliver", `{}`, "callback.redeliver acme"},
		{"POST /v1/callbacks/redeliver", `{"tenant":"acme"}`, "callback.redeliver acme"},
		{"POST /v1/callbacks/redeliver", `{"tenant":"globex"}`, ""},
	} {
		log, backend := &fakeActivity{}, apitest.NewBackend()
		o := keyOptions(backend, &fakeKeys{principal: auth.Principal{Role: auth.Producer, Tenant: "acme"}})
		o.Activity = log
		method, path, _ := strings.Cut(c.target, " ")
		call(t, httpapi.New(o), method, path, c.body, "Content-Type", "application/json", "Authorization", "Bearer good")
		require.Len(t, backend.Calls, 1, "the store decides")
		var recorded string
		for _, e := range log.entries {
			recorded += e.Action + " " + e.Object
		}
		require.Equal(t, c.recorded, recorded, c.target)
	}
}

// TestAnswersOfReceivers: who does not see payloads does not see what a receiver has answered.
func TestAnswersOfReceivers(t *testing.T) {
	for payloads, answer := range map[bool]string{true: "no", false: ""} {
		keys := &fakeKeys{principal: auth.Principal{Role: auth.Operator, Payloads: payloads}}
		h := httpapi.New(keyOptions(apitest.NewBackend(), keys))
		l := decode[api.CallbackList](t, call(t, h, "GET", "/v1/callbacks", "", "Authorization", "Bearer good"))
		require.Equal(t, answer, l.Callbacks[0].Answer)
		one := decode[api.Callback](t, call(t, h, "POST", "/v1/callbacks/g.1.completed/redeliver", "", "Authorization", "Bearer good"))
		require.Equal(t, answer, one.Answer)
	}
}
