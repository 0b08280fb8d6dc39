package console

import (
	"net/http"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/bulkaction/bulkaction/api"
	"github.com/bulkaction/bulkaction/internal/web/httpapi"
)

// TestGroupFilters: a list of groups has its filters in the backend's query, in the link of the
// next page and in the live topic. The form has its type, prefix and since. Malformed filters get
// 422.
func TestGroupFilters(t *testing.T) {
	t.Parallel()
	w := newTestConsole(t)
	d := w.page("/ui/groups?tenant=acme&status=failed&type=SEND_EMAIL&paused=false&failed_jobs=true&prefix=fail&since=2026-01-02")
	no, yes := false, true
	require.Equal(t, httpapi.ListQuery{
		Tenant: "acme", Status: api.StatusFailed, Type: "SEND_EMAIL", Paused: &no, FailedJobs: &yes, Prefix: "fail",
		Since: time.Date(2026, 1, 2, 0, 0, 0, 0, time.UTC), Limit: 50,
	}, w.backend.queries[0])
	filter := "failed_jobs=true&paused=false&prefix=fail&since=2026-01-02&status=FAILED&tenant=acme&type=SEND_EMAIL"
	require.Equal(t, "groups:"+filter, attribute(d.all("body")[0], "data-topic"))
	require.Equal(t, "/ui/groups?cursor=next%26page&"+filter, nextOf(d))
	values := map[string]string{}
	for _, input := range d.all("input") {
		values[attribute(input, "name")] = attribute(input, "value")
	}
	require.Equal(t, "SEND_EMAIL", values["type"])
	require.Equal(t, "fail", values["prefix"])
	require.Equal(t, "2026-01-02", values["since"])
	require.Contains(t, d.text, "All groups")

	w.page("/ui/groups?paused=true")
	require.True(t, *w.backend.queries[1].Paused)
	for _, query := range []string{"paused=1", "failed_jobs=1", "since=yesterday", "since=1969-12-31", "type=a%20b", "prefix=a%20b"} {
		require.Equal(t, http.StatusUnprocessableEntity, w.get("/ui/groups?"+query).Code, query)
	}
}
