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
	"time"

	"github.com/stretchr/testify/require"

	"github.com/bulkaction/bulkaction/api"
	"github.com/bulkaction/bulkaction/internal/access/auth"
	"github.com/bulkaction/bulkaction/internal/messages"
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
	ctx context.Context, id string, q messages.FailureQuery, yield func(api.Failure) error,
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
	first := api.Failure{Ordinal: 7, Code: "PERMANENT"}
	if q.Payloads {
		first = api.Failure{Ordinal: 7, Code: "PERMANENT", Error: "=1+2", Attempts: 2, At: created, Key: "@k", Payload: []byte(`{"to":"ann"}`)}
	}
	if err := yield(first); err != nil {
		return "", err
	}
	if f.afterPage != nil {
		f.afterPage()
	}
	return "second", nil
}

func TestFailures(t *testing.T) {
	w := parallelAs(t, operator)
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
	w := parallelAs(t, operator)
	answer := w.get("/ui/groups/failed-1/failures.ndjson")
	require.Equal(t, http.StatusOK, answer.Code)
	require.Equal(t, "application/x-ndjson", answer.Header().Get("Content-Type"))
	require.Equal(t, `attachment; filename="failed-1-failures.ndjson"`, answer.Header().Get("Content-Disposition"))
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

// TestGroupFilters: a list of groups has its filters in the backend's query, in the link of the
// next page and in the live topic. The form has its type, prefix and since. Malformed filters get
// 422.
func TestGroupFilters(t *testing.T) {
	w := parallel(t)
	d := w.page("/ui/groups?tenant=acme&status=failed&type=SEND_EMAIL&paused=false&failed_jobs=true&prefix=fail&since=2026-01-02&tag=&tag=a%3Db&tag=n%3D1+2")
	no, yes := false, true
	require.Equal(t, messages.ListQuery{
		Tenant: "acme", Status: api.StatusFailed, Type: "SEND_EMAIL", Paused: &no, FailedJobs: &yes, Prefix: "fail",
		Since: time.Date(2026, 1, 2, 0, 0, 0, 0, time.UTC), Tags: api.Tags{"a": "b", "n": "1 2"}, Limit: 50,
	}, w.backend.queries[0])
	filter := "failed_jobs=true&paused=false&prefix=fail&since=2026-01-02&status=FAILED&tag=a%3Db&tag=n%3D1+2&tenant=acme&type=SEND_EMAIL"
	require.Equal(t, "groups:"+filter, attribute(d.all("body")[0], "data-topic"))
	require.Equal(t, "/ui/groups?cursor=next%26page&"+filter, nextOf(d))
	values := map[string]string{}
	var tags []string
	for _, input := range d.all("input") {
		values[attribute(input, "name")] = attribute(input, "value")
		if attribute(input, "name") == "tag" {
			tags = append(tags, attribute(input, "value"))
		}
	}
	require.Equal(t, []string{"a=b", "n=1 2", ""}, tags)
	require.Equal(t, "SEND_EMAIL", values["type"])
	require.Equal(t, "fail", values["prefix"])
	require.Equal(t, "2026-01-02", values["since"])
	require.Contains(t, d.text, "All groups")

	w.page("/ui/groups?paused=true")
	require.True(t, *w.backend.queries[1].Paused)
	for _, query := range []string{"paused=1", "failed_jobs=1", "since=yesterday", "since=1969-12-31", "type=a%20b", "prefix=a%20b", "tag=a", "tag=a%3D1&tag=a%3D2"} {
		require.Equal(t, http.StatusUnprocessableEntity, w.get("/ui/groups?"+query).Code, query)
	}
	answer := w.get("/ui/groups?since=yesterday&tag=campaign&tag=a%3Db&tenant=acme&paused=true")
	require.Equal(t, http.StatusUnprocessableEntity, answer.Code)
	again := parse(t, answer.Body.String())
	require.Contains(t, again.text, "since must be a day such as")
	require.NotContains(t, again.text, "No group")
	tags = nil
	for _, input := range again.all("input") {
		values[attribute(input, "name")] = attribute(input, "value")
		if attribute(input, "name") == "tag" {
			tags = append(tags, attribute(input, "value"))
		}
	}
	require.Equal(t, []string{"campaign", "a=b", ""}, tags)
	require.Equal(t, "yesterday", values["since"])
	require.Equal(t, "acme", values["tenant"])
}

// JobMap has two jobs in each bucket, all done but one of the first bucket, which is failed.
func (f *fakeBackend) JobMap(_ context.Context, id string, buckets int) (api.JobMap, error) {
	f.mu.Lock()
	defer f.mu.Unlock()
	f.mapReads++
	m := api.JobMap{Jobs: f.groups[id].Counts.Accepted}
	for from := int64(0); from < m.Jobs && len(m.Buckets) < buckets; from += 2 {
		b := api.MapBucket{From: from, To: from + 1, Done: 2}
		if from == 0 {
			b.Done, b.Failed = 1, 1
		}
		m.Buckets = append(m.Buckets, b)
	}
	return m, f.err
}

func TestJobMap(t *testing.T) {
	w := parallel(t)
	d := w.page("/ui/groups/failed-1")
	require.Contains(t, d.text, "Job 0 on the left, job 999 on the right, 2 jobs a column.")
	shapes := map[string]string{}
	for _, path := range d.all("path") {
		shapes[attribute(path, "class")] = attribute(path, "d")
	}
	require.Equal(t, map[string]string{
		"fill-done":   "M0 24h2v24h-2zM2 0h998v48h-998z",
		"fill-failed": "M0 0h2v24h-2z",
	}, shapes)
	require.Contains(t, w.page("/ui/groups/other-1").text, "The group has no jobs yet.")
	require.Contains(t, w.page("/ui/groups/other-1").text, "bulkaction append other-1")
}

// TestJobMapInterval: of three reads of a group's data in a row, all have the map of its jobs, and
// only one asks the backend for it.
func TestJobMapInterval(t *testing.T) {
	w := parallel(t)
	read := groupPages{w.backend}.reader("failed-1")
	ctx := auth.Trust(t.Context())
	for range 3 {
		data, err := read(ctx)
		require.NoError(t, err)
		require.NotNil(t, data.(groupData).Map)
	}
	require.Equal(t, 1, w.backend.mapReads)
}

// traced is a fake backend whose jobs have the trace id `id`; "" means that they were not sampled.
type traced struct {
	*fakeBackend
	id string
}

func (b traced) Job(ctx context.Context, group string, ordinal int64) (api.Job, error) {
	j, err := b.fakeBackend.Job(ctx, group, ordinal)
	j.TraceID = b.id
	return j, err
}

// TestTraceLinks: pages of groups and jobs link to a trace if every value that TraceURL needs is
// known.
func TestTraceLinks(t *testing.T) {
	t.Parallel()
	const id = "0af7651916cd43dd8448eb211c80319c"
	for to, want := range map[string][3]string{ // the links of a group, of a job that was sampled and of another one
		"": {},
		"https://traces.example/trace/{trace_id}":                           {"", "https://traces.example/trace/" + id, ""},
		"http://jaeger:16686/search?tags=%7B%22a%22%3A%22{group}%22%7D&n=1": {"http://jaeger:16686/search?tags=%7B%22a%22%3A%22failed-1%22%7D&n=1", "http://jaeger:16686/search?tags=%7B%22a%22%3A%22failed-1%22%7D&n=1", "http://jaeger:16686/search?tags=%7B%22a%22%3A%22failed-1%22%7D&n=1"},
		"https://traces.example/{group}/{ordinal}#{group}":                  {"", "https://traces.example/failed-1/7#failed-1", "https://traces.example/failed-1/7#failed-1"},
		"https://traces.example/{group}.{ordinal}/{trace_id}":               {"", "https://traces.example/failed-1.7/" + id, ""},
	} {
		links := func(traceID, path string) (found string) {
			w := newTestConsole(t)
			w.console.TraceURL = to
			w.with(func(o *httpapi.Options) { o.Backend = traced{w.backend, traceID} })
			for _, a := range w.page(path).all("a") {
				if attribute(a, "rel") == "noreferrer" {
					require.Empty(t, found, "one link")
					found = attribute(a, "href")
				}
			}
			return found
		}
		require.Equal(t, want, [3]string{
			links(id, "/ui/groups/failed-1"), links(id, "/ui/groups/failed-1/jobs/7"), links("", "/ui/groups/failed-1/jobs/7"),
		}, to)
	}
	require.Equal(t, "https://traces.example/?q=a%26b%7Bordinal%7D7", traceLink("https://traces.example/?q={group}{ordinal}", "a&b{ordinal}", "7", ""))
}
