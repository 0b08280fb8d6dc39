package console

import (
	"context"
	"errors"
	"fmt"
	"net/http"
	"net/url"
	"regexp"
	"strings"
	"testing"

	"github.com/stretchr/testify/require"

	"github.com/bulkaction/bulkaction/api"
	"github.com/bulkaction/bulkaction/internal/access/auth"
	"github.com/bulkaction/bulkaction/internal/web/httpapi"
)

func (f *fakeBackend) FailureSummary(ctx context.Context, id string) (api.FailureSummary, error) {
	g, err := f.group(ctx, id)
	if err != nil || g.Counts.Failed == 0 {
		return api.FailureSummary{}, err
	}
	sum := api.FailureSummary{Total: g.Counts.Failed, Seen: 50, Codes: []api.FailureCode{
		{Code: "PERMANENT", Count: 80}, {Code: hostile, Count: 10},
	}}
	if who, _ := auth.From(ctx); !who.Payloads && who.KeyID != "" {
		return sum, nil
	}
	sum.Codes[0].Fingerprints = []api.FailureFingerprint{{
		Text: "no such user # " + hostile, Count: 80, Sampled: 40,
		Samples: []api.FailureSample{{Ordinal: 7, At: created, Error: "no such user 4711 " + hostile}},
	}}
	return sum, nil
}

// Failures has two pages with one failed job each. After the first one it calls f.afterPage.
func (f *fakeBackend) Failures(
	ctx context.Context, id string, q httpapi.FailureQuery, yield func(api.Failure) error,
) (next string, err error) {
	if _, err := f.group(ctx, id); err != nil {
		return "", err
	}
	if err := f.call("failures %s %s %s %d", id, q.Code, q.Cursor, q.Limit); err != nil {
		return "", err
	}
	if q.Cursor != "" {
		return "", yield(api.Failure{Ordinal: 8, Code: "PERMANENT"})
	}
	if err := yield(api.Failure{Ordinal: 7, Code: "PERMANENT"}); err != nil {
		return "", err
	}
	if f.afterPage != nil {
		f.afterPage()
	}
	return "second", nil
}

func TestFailures(t *testing.T) {
	t.Parallel()
	w := as(t, operator)
	d := w.page("/ui/groups/failed-1/failures")
	for _, want := range []string{
		"100 failed jobs · 50 of them were read", "PERMANENT 80 jobs", "no such user # " + hostile + " about 80 jobs",
		"job 7 no such user 4711 " + hostile, "Retry 100 failed jobs", "Retry these", hostile + " 10 jobs", "and 10 jobs with rarer codes",
	} {
		require.Contains(t, d.text, want)
	}
	require.Contains(t, d.actions(), "/ui/groups/failed-1/retry")
	d = w.page("/ui/groups/failed-1/failures?code=" + url.QueryEscape(hostile))
	require.NotContains(t, d.text, "PERMANENT")
	require.Contains(t, d.text, "only code "+hostile)
	var links []string
	for _, a := range d.all("a") {
		links = append(links, attribute(a, "href"))
	}
	escaped := regexp.MustCompile("%..").ReplaceAllStringFunc(url.QueryEscape(hostile), strings.ToLower)
	download := "/ui/groups/failed-1/failures.ndjson?code=" + escaped
	require.Contains(t, links, download)
	w.get(download)
	require.Contains(t, w.backend.calls, "failures failed-1 "+hostile+"  1000")

	require.Contains(t, w.page("/ui/groups/failed-1/failures?code=OTHER").text, "No failed job has this code, or")
	require.Contains(t, w.page("/ui/groups/other-1/failures").text, "bulkaction failures other-1 --summary")
	running := w.page("/ui/groups/running-1/failures")
	require.Contains(t, running.text, "can run again after it has ended")
	require.NotContains(t, running.actions(), "/ui/groups/running-1/retry")
	require.Equal(t, http.StatusUnprocessableEntity, w.get("/ui/groups/failed-1/failures?code="+strings.Repeat("x", 129)).Code)
	require.Contains(t, w.page("/ui/groups/failed-1").text, "What the errors have in common")
	w.backend.err = api.ErrUnavailable
	require.Contains(t, w.get("/ui/groups/failed-1/failures").Body.String(), "Redis does not answer")
}

// TestFailuresAccess: the page and the download get 200 for a reader and the group's tenant, 404
// for another tenant, 403 for the role metrics, and 303 without a session.
func TestFailuresAccess(t *testing.T) {
	t.Parallel()
	for _, path := range []string{"/ui/groups/failed-1/failures", "/ui/groups/failed-1/failures.ndjson"} {
		for who, status := range map[auth.Principal]int{
			reader: http.StatusOK, acme: http.StatusOK, globex: http.StatusNotFound, metrics: http.StatusForbidden,
			{}: http.StatusSeeOther,
		} {
			require.Equal(t, status, as(t, who).get(path).Code, fmt.Sprint(path, who))
		}
	}
	d := as(t, reader).page("/ui/groups/failed-1/failures")
	require.Contains(t, d.text, "Your key does not show error texts.")
	require.NotContains(t, d.text, "no such user")
	require.NotContains(t, d.actions(), "/ui/groups/failed-1/retry")
}

func TestFailuresDownload(t *testing.T) {
	t.Parallel()
	w := as(t, operator)
	answer := w.get("/ui/groups/failed-1/failures.ndjson")
	require.Equal(t, http.StatusOK, answer.Code)
	require.Equal(t, "application/x-ndjson", answer.Header().Get("Content-Type"))
	require.Equal(t, `attachment; filename="failures.ndjson"`, answer.Header().Get("Content-Disposition"))
	lines := strings.Split(strings.TrimSpace(answer.Body.String()), "\n")
	require.Len(t, lines, 2)
	require.Contains(t, lines[0], `"ordinal":7`)
	require.Contains(t, lines[1], `"ordinal":8`)
	require.Equal(t, http.StatusNotFound, w.get("/ui/groups/no%20id/failures.ndjson").Code)
	require.Equal(t, http.StatusUnprocessableEntity, w.get("/ui/groups/failed-1/failures.ndjson?code="+strings.Repeat("x", 129)).Code)
	w.backend.err = errors.New("secret of the store")
	answer = w.get("/ui/groups/failed-1/failures.ndjson")
	require.Equal(t, http.StatusInternalServerError, answer.Code)
	require.Empty(t, answer.Header().Get("Content-Disposition"))
}

// TestFailuresDownloadBreaks: if Redis is away or the key is revoked after the first page of failed
// jobs, the download panics with http.ErrAbortHandler, which breaks the connection.
func TestFailuresDownloadBreaks(t *testing.T) {
	t.Parallel()
	for name, breaks := range map[string]func(w *testConsole){
		"Redis away":  func(w *testConsole) { w.backend.set(func() { w.backend.err = api.ErrUnavailable }) },
		"revoked key": func(w *testConsole) { w.keys.revoke("operator") },
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			w := as(t, operator)
			w.backend.afterPage = func() { breaks(w) }
			require.PanicsWithError(t, http.ErrAbortHandler.Error(), func() { w.get("/ui/groups/failed-1/failures.ndjson") })
		})
	}
}
