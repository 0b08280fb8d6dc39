package cli

import (
	"context"
	"encoding/json"
	"net/http"
	"net/http/httptest"
	"testing"

	"github.com/stretchr/testify/require"

	"github.com/bulkaction/bulkaction/api"
	"github.com/bulkaction/bulkaction/internal/messages"
	"github.com/bulkaction/bulkaction/internal/testkit/apitest"
	"github.com/bulkaction/bulkaction/internal/web/httpapi"
)

func TestOperations(t *testing.T) {
	var asked api.OperationRequest
	var calls []string
	o := apitest.OperationView()
	o.CreatedBy, o.Tenant = "key_1", "globex"
	s := httptest.NewServer(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		calls = append(calls, r.Method+" "+r.URL.Path)
		switch {
		case r.Method == http.MethodPost && r.URL.Path == "/v1/operations":
			asked = api.OperationRequest{}
			_ = json.NewDecoder(r.Body).Decode(&asked)
			o := o
			o.Do, o.Filter, o.DryRun = asked.Do, asked.Filter, asked.DryRun
			reply(w, http.StatusCreated, o)
		case r.URL.Path == "/v1/operations":
			reply(w, http.StatusOK, api.OperationList{Operations: []api.Operation{o}})
		default: // it has ended by then
			ended := o
			ended.State, ended.EndedAt = api.OperationCompleted, &epoch
			reply(w, http.StatusOK, ended)
		}
	}))
	t.Cleanup(s.Close)
	exec := func(args ...string) run {
		return console{}.exec(t.Context(), append([]string{"--api", s.URL, "operation"}, args...)...)
	}
	got := exec("start", "retry", "--tenant", "acme", "--code", "X", "--tag", "k=v", "--paused=false", "--dry-run", "--wait", "--json")
	require.Equal(t, exitOK, got.code, got)
	require.Contains(t, got.out, `"state":"COMPLETED"`)
	require.Equal(t, api.OperationRequest{
		Do: api.OpRetry, DryRun: true,
		Filter: api.OperationFilter{Tenant: "acme", Code: "X", Tags: api.Tags{"k": "v"}, Paused: new(false)},
	}, asked)
	got = exec("start", "delete_dead_letters", "--until", "720h")
	require.Equal(t, exitOK, got.code, got)
	require.Contains(t, got.out, "30 dead letters matched, 20 changed, 10 skipped")
	require.Contains(t, got.out, "10 not_ended, such as g-1, g-2")
	require.NotNil(t, asked.Filter.Until)
	require.Nil(t, asked.Filter.Since)
	for _, want := range []string{"op-1", "50 of 100 groups", `{"tenant":"acme"}`, "key_1", "globex"} {
		require.Contains(t, exec("list").out, want)
	}
	for _, want := range []string{"COMPLETED", "50 of 100 groups", `{"tenant":"acme"}`, "key_1", "globex"} {
		require.Contains(t, exec("show", "op-1").out, want)
	}
	require.Contains(t, exec("resume", "--help").out, "Let a paused operation go on")
	calls = nil
	for _, do := range api.OperationCommands {
		require.Equal(t, exitOK, exec(string(do), "op-1").code)
	}
	require.Equal(t, []string{"POST /v1/operations/op-1/pause", "POST /v1/operations/op-1/resume", "POST /v1/operations/op-1/cancel"}, calls)
	for _, bad := range [][]string{{"start"}, {"start", "explode"}, {"start", "pause", "--tag", "x"}, {"show", "a/b"}, {"start", "pause", "--since", "x"},
		{"start", "pause"}, {"start", "pause", "--wait"}} {
		require.Equal(t, exitUsage, exec(bad...).code, bad)
	}
}

// TestOperationThatIsNotCompleted: who waits for an operation learns from the exit code that it has not
// done all.
func TestOperationThatIsNotCompleted(t *testing.T) {
	for _, state := range []api.OperationState{api.OperationCancelled, api.OperationFailed, api.OperationPaused} {
		o := apitest.OperationView()
		o.State = state
		s := httptest.NewServer(http.HandlerFunc(func(w http.ResponseWriter, _ *http.Request) { reply(w, http.StatusCreated, o) }))
		t.Cleanup(s.Close)
		got := console{}.exec(t.Context(), "--api", s.URL, "operation", "start", "retry", "--all", "--wait")
		require.Equal(t, exitError, got.code, got)
		require.Contains(t, got.out, string(state))
		require.Contains(t, got.err, "operation op-1 is "+string(state))
		require.Equal(t, exitOK, console{}.exec(t.Context(), "--api", s.URL, "operation", "start", "retry", "--all").code)
	}
}

// TestRefusedOperation: what the API refuses is named by flags, and an unknown operation is no group.
func TestRefusedOperation(t *testing.T) {
	s := httptest.NewServer(httpapi.New(httpapi.Options{Backend: refusingOperations{apitest.NewBackend()}}))
	t.Cleanup(s.Close)
	exec := func(args ...string) run {
		return console{}.exec(t.Context(), append([]string{"--api", s.URL, "operation"}, args...)...)
	}
	got := exec("start", "pause", "--all", "--group", "g", "--tag", "k=v")
	require.Equal(t, exitUsage, got.code, got)
	require.Contains(t, got.err, "--group g: no; --tag [k=v]: no; --all: must be alone")
	got = exec("show", "op-2")
	require.Equal(t, exitError, got.code, got)
	require.Contains(t, got.err, "`bulkaction operation ls`")
	require.NotContains(t, got.err, "group's id")
}

type refusingOperations struct{ *apitest.Backend }

func (refusingOperations) StartOperation(context.Context, string, api.OperationRequest) (api.Operation, error) {
	return api.Operation{}, &messages.ValidationError{Fields: []messages.FieldError{
		{Field: "filter.group", Problem: "no"}, {Field: "filter.tags", Problem: "no"}, {Field: "filter.all", Problem: "must be alone"},
	}}
}
