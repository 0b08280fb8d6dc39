package httpapi_test

import (
	"testing"

	"github.com/stretchr/testify/require"

	"github.com/bulkaction/bulkaction/api"
	"github.com/bulkaction/bulkaction/internal/testkit/apitest"
	"github.com/bulkaction/bulkaction/internal/web/httpapi"
)

func TestOperations(t *testing.T) {
	f := apitest.NewBackend()
	h := httpapi.New(httpapi.Options{Backend: f})
	w := call(t, h, "POST", "/v1/operations", `{"do": "cancel", "dry_run": true, "filter": {"tenant": "acme", "status": "RUNNING",
		"paused": false, "since": "2026-01-02T00:00:00Z"}}`, "Content-Type", "application/json")
	require.Equal(t, 201, w.Code, w.Body)
	require.Equal(t, "/v1/operations/op-1", w.Header().Get("Location"))
	require.Equal(t, "/v1/operations/op-1/pause", decode[api.Operation](t, w).Links["pause"])
	require.Equal(t, "cancel", f.Started.Do)
	require.True(t, f.Started.DryRun)
	require.Equal(t, api.StatusRunning, f.Started.Filter.Status)
	require.False(t, *f.Started.Filter.Paused)

	require.Len(t, decode[api.OperationList](t, call(t, h, "GET", "/v1/operations?limit=7", "")).Operations, 1)
	require.Equal(t, 0.5, decode[api.Operation](t, call(t, h, "GET", "/v1/operations/op-1", "")).Progress)
	requireProblem(t, call(t, h, "GET", "/v1/operations/op-2", ""), 404, "")
	for _, do := range api.OperationCommands {
		require.Equal(t, 202, call(t, h, "POST", "/v1/operations/op-1/"+string(do), "").Code)
	}
	require.Equal(t, []string{"start cancel", "operations  7", "pause op-1", "resume op-1", "cancel op-1"}, f.Calls)
}

func TestOperationWithBadFields(t *testing.T) {
	h := httpapi.New(httpapi.Options{Backend: apitest.NewBackend()})
	for body, field := range map[string]string{
		`{"do": 1}`:                                                     "do",
		`{"do": "cancel", "filter": []}`:                                "filter",
		`{"do": "cancel", "filter": {"all": "yes"}}`:                    "filter.all",
		`{"do": "cancel", "filter": {"since": "yesterday"}}`:            "filter.since",
		`{"do": "cancel", "filter": {"until": "1960-01-01T00:00:00Z"}}`: "filter.until",
		`{"do": "cancel", "filter": {"staus": "RUNNING"}}`:              "filter.staus",
		`{"do": "cancel", "dry": true}`:                                 "dry",
	} {
		requireProblem(t, call(t, h, "POST", "/v1/operations", body, "Content-Type", "application/json"), 422, field)
	}
	requireProblem(t, call(t, h, "POST", "/v1/operations?x=1", `{}`), 400, "")
}
