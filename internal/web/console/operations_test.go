package console

import (
	"context"
	"encoding/json"
	"net/http"
	"net/url"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/bulkaction/bulkaction/api"
	"github.com/bulkaction/bulkaction/internal/messages"
	"github.com/bulkaction/bulkaction/internal/testkit/apitest"
	"github.com/bulkaction/bulkaction/internal/web/httpapi"
)

func (f *fakeBackend) operation(call string) (api.Operation, error) {
	f.mu.Lock()
	defer f.mu.Unlock()
	f.calls = append(f.calls, call)
	o := apitest.OperationView()
	o.Error = hostile
	return o, f.err
}

func (f *fakeBackend) StartOperation(_ context.Context, _ string, r api.OperationRequest) (api.Operation, error) {
	return f.operation("start " + r.Do)
}

func (f *fakeBackend) Operations(context.Context, string, int) (api.OperationList, error) {
	o, err := f.operation("operations")
	return api.OperationList{Operations: []api.Operation{o}}, err
}

func (f *fakeBackend) Operation(_ context.Context, id string) (api.Operation, error) {
	if id != "op-1" {
		return api.Operation{}, api.ErrNotFound
	}
	return f.operation("operation")
}

func (f *fakeBackend) ControlOperation(_ context.Context, _ string, do api.OperationCommand) (api.Operation, error) {
	return f.operation(string(do) + " operation")
}

func TestOperationPages(t *testing.T) {
	w := parallelAs(t, operator)
	d := w.page("/ui/groups?status=FAILED&tenant=acme")
	require.Contains(t, d.text, "All that match")
	require.Equal(t, `{"tenant":"acme","status":"FAILED"}`, filterJSON(operationFilter(messages.ListQuery{Tenant: "acme", Status: api.StatusFailed})))
	require.Equal(t, `{"all":true}`, filterJSON(api.OperationFilter{All: true}))
	require.Contains(t, w.page("/ui/dead-letters").text, "delete dead letters")

	rec := w.post("/ui/operations", url.Values{"do": {"retry"}, "dry_run": {"true"}, "filter": {`{"tenant":"acme"}`}})
	require.Equal(t, http.StatusSeeOther, rec.Code, rec.Body)
	require.Equal(t, "/ui/operations/op-1?done=operation-started", rec.Header().Get("Location"))
	for _, filter := range []string{"", "{", `{"x":1}`} {
		require.NotEqual(t, http.StatusSeeOther, w.post("/ui/operations", url.Values{"do": {"retry"}, "filter": {filter}}).Code)
	}
	require.Contains(t, w.page("/ui/operations").text, "op-1")
	for _, want := range []string{"RUNNING", "Matched 30", "Changed 20", "Skipped 10", "not ended 10 g-1 g-2"} {
		require.Contains(t, w.page("/ui/operations/op-1").text, want)
	}
	require.Subset(t, w.page("/ui/operations/op-1").actions(), []string{"/ui/operations/op-1/pause", "/ui/operations/op-1/cancel"})
	for _, do := range api.OperationCommands {
		rec := w.post("/ui/operations/op-1/"+string(do), nil)
		require.Equal(t, "/ui/operations/op-1?done=operation-"+string(do), rec.Header().Get("Location"))
	}
	require.Equal(t, http.StatusForbidden, as(t, reader).post("/ui/operations", url.Values{"do": {"retry"}, "filter": {`{"all":true}`}}).Code)
	require.NotContains(t, as(t, reader).page("/ui/groups").text, "All that match")
}

// TestMatches: filters are shown in words, and examples as links.
func TestMatches(t *testing.T) {
	t.Parallel()
	no := false
	for want, f := range map[string]api.OperationFilter{
		"all groups":                      {All: true},
		"tenant acme, status FAILED":      {Tenant: "acme", Status: api.StatusFailed},
		"not paused, tag a=b, since 2026": {Paused: &no, Tags: api.Tags{"a": "b"}, Since: &created},
	} {
		require.Contains(t, matches(api.OpPause, f), want)
	}
	require.Equal(t, "all dead letters", matches(api.OpRetryDeadLetters, api.OperationFilter{All: true}))
	require.Equal(t, "/ui/groups/a.7", exampleOf(api.OpPause, "a.7"))
	require.Equal(t, "/ui/groups/a/jobs/7", exampleOf(api.OpRetryDeadLetters, "a.7"))
}

// TestOperationAfterDryRun: the form after a dry run starts an operation on nothing that came later.
func TestOperationAfterDryRun(t *testing.T) {
	o := apitest.OperationView()
	o.State, o.DryRun = api.OperationCompleted, true
	earlier, later := o.CreatedAt.Add(-time.Hour), o.CreatedAt.Add(time.Hour)
	counted := o.CreatedAt.Add(time.Millisecond)
	for _, do := range []string{api.OpRetry, api.OpDeleteDeadLetters} {
		o.Do = do
		for until, want := range map[*time.Time]time.Time{nil: counted, &later: counted, &earlier: earlier} {
			o.Filter.Until = until
			d, err := operationPages{dryRun{o: o}}.read("op-1")(t.Context())
			require.NoError(t, err)
			require.Equal(t, do, d.(operationData).For)
			var f api.OperationFilter
			require.NoError(t, json.Unmarshal([]byte(d.(operationData).Counted), &f))
			require.Equal(t, api.OperationFilter{Tenant: "acme", Until: &want}, f)
		}
	}
}

type dryRun struct {
	httpapi.Backend
	o api.Operation
}

func (d dryRun) Operation(context.Context, string) (api.Operation, error) { return d.o, nil }
