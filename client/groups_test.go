package client_test

import (
	"io"
	"net/http"
	"net/http/httptest"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/bulkaction/bulkaction/client"
)

// TestGroupViews compares the paths and queries of five calls about groups, failures and job maps.
// FailurePage reads the next page's cursor from the header Link.
func TestGroupViews(t *testing.T) {
	var asked []string
	srv := httptest.NewServer(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		asked = append(asked, r.URL.String())
		switch r.URL.Path {
		case "/v1/groups":
			_, _ = io.WriteString(w, `{"groups":[],"scanned":0}`)
		case "/v1/groups/g/failures":
			if r.URL.Query().Get("cursor") == "" {
				w.Header().Set("Link", `</v1/groups/g/failures?cursor=7&limit=2>; rel="next"`)
			}
			_, _ = io.WriteString(w, "{\"ordinal\":3}\n{\"ordinal\":6}\n")
		case "/v1/groups/g/failures/summary":
			_, _ = io.WriteString(w, `{"total":3,"seen":3,"codes":[]}`)
		default:
			_, _ = io.WriteString(w, `{"jobs":9,"buckets":[]}`)
		}
	}))
	defer srv.Close()
	a := client.NewAPI(srv.URL)
	no := false
	for _, err := range a.Groups(t.Context(), client.GroupFilter{
		Type: "T", Paused: &no, FailedJobs: &no, Prefix: "p-", Since: time.Date(2026, 1, 2, 3, 4, 5, 0, time.UTC),
	}) {
		require.NoError(t, err)
	}
	first, err := a.FailurePage(t.Context(), "g", client.FailureQuery{Code: "A&B", Limit: 2, Payloads: true})
	require.NoError(t, err)
	require.Len(t, first.Failures, 2)
	require.Equal(t, "7", first.Cursor)
	last, err := a.FailurePage(t.Context(), "g", client.FailureQuery{Cursor: first.Cursor})
	require.NoError(t, err)
	require.Empty(t, last.Cursor)
	sum, err := a.FailureSummary(t.Context(), "g")
	require.NoError(t, err)
	require.EqualValues(t, 3, sum.Total)
	m, err := a.JobMap(t.Context(), "g", 10)
	require.NoError(t, err)
	require.EqualValues(t, 9, m.Jobs)
	require.Equal(t, []string{
		"/v1/groups?failed_jobs=false&paused=false&prefix=p-&since=2026-01-02T03%3A04%3A05Z&type=T",
		"/v1/groups/g/failures?code=A%26B&cursor=&limit=2&payload=true", "/v1/groups/g/failures?cursor=7",
		"/v1/groups/g/failures/summary", "/v1/groups/g/map?buckets=10",
	}, asked)
}
