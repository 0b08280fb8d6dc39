package console

import (
	"context"
	"net/http"
	"strings"
	"testing"

	"github.com/stretchr/testify/require"

	"github.com/bulkaction/bulkaction/api"
	"github.com/bulkaction/bulkaction/internal/access/auth"
	"github.com/bulkaction/bulkaction/internal/web/httpapi"
)

// with makes the console anew, with changed options of the API.
func (w *testConsole) with(change func(*httpapi.Options)) *testConsole {
	o := w.options()
	change(&o)
	w.console = New(httpapi.Share(o), w.console.Options)
	return w
}

// statsBackend is a fake backend whose Stats returns stats.
type statsBackend struct {
	*fakeBackend
	stats api.Stats
}

func (b statsBackend) Stats(context.Context) (api.Stats, error) {
	b.mu.Lock()
	defer b.mu.Unlock()
	return b.stats, b.err
}

// manyProcesses has stats with two workers, a dispatcher and an ingest process, and no watcher. It
// has hostile texts where users may have sent them.
var manyProcesses = api.Stats{
	Roles: []api.RoleStatus{{Role: "ingest", Processes: 1}, {Role: "worker", Processes: 2}, {Role: "watcher"}},
	Types: []api.TypeStats{
		{Type: "SERVED", Backlog: 5, Workers: 1}, {Type: hostile, Backlog: 1234, InFlight: 1}, {Type: "IDLE"},
	},
	Workers: []api.WorkerStatus{
		{ID: "w-1", Version: "v1.2.3", Types: []string{"SERVED", hostile}, Workers: 10, Active: 4, Idle: 6, CurrentJobs: []string{"g.1", "a.b.2", "odd", hostile + ".3", "g."}, SeenAt: created},
		{ID: "w-2", Workers: 2000, Active: 1000, Idle: 1000, ShuttingDown: true, SeenAt: created},
	},
	Stages: []api.StageStatus{
		{ID: "d-1", Role: "dispatcher", Version: "v1.2.3", Running: true, Counts: map[string]int64{"total_moved": 4321}, SeenAt: created},
		{ID: "i-1", Role: "ingest", SeenAt: created},
	},
}

func TestWorkers(t *testing.T) {
	t.Parallel()
	w := as(t, operator)
	stats := statsBackend{w.backend, manyProcesses}
	w.with(func(o *httpapi.Options) { o.Backend = stats })
	d := w.page("/ui/workers")
	for _, want := range []string{
		"watcher none", "Workers busy 1,004 of 2,010", "No worker serves " + hostile + " ( 1,235 jobs )", "w-1 v1.2.3 SERVED , " + hostile + " 4 of 10 6",
		"5 jobs", "w-2 shutting down – – 1,000 of 2,000 1,000", "d-1 dispatcher v1.2.3 total moved 4,321", "i-1 ingest not running",
		"different versions: unknown, v1.2.3",
	} {
		require.Contains(t, d.text, want)
	}
	require.NotContains(t, d.text, "serves SERVED")
	require.Less(t, strings.Index(d.text, "i-1 ingest"), strings.Index(d.text, "d-1 dispatcher"), "in the order of the pipeline")
	var links []string
	for _, a := range d.all("a") {
		if href := attribute(a, "href"); strings.Contains(href, "/jobs/") {
			links = append(links, href)
		}
	}
	require.Equal(t, []string{"/ui/groups/g/jobs/1", "/ui/groups/a.b/jobs/2"}, links)
	require.Equal(t, "workers", attribute(d.all("body")[0], "data-topic"))
	require.Equal(t, http.StatusForbidden, as(t, acme).get("/ui/workers").Code)
	figures := as(t, metrics)
	figures.with(func(o *httpapi.Options) { o.Backend = statsBackend{figures.backend, manyProcesses} })
	text := figures.get("/ui/workers").Body.String()
	require.Contains(t, text, "a.b.2")
	require.NotContains(t, text, "/jobs/2", "a key for figures reads no jobs")

	w.with(func(o *httpapi.Options) { o.Backend = statsBackend{fakeBackend: w.backend} })
	require.Contains(t, w.page("/ui/workers").text, "No worker process is alive. This command runs all roles in one process: bulkaction all")
	w.backend.set(func() { w.backend.err = api.ErrUnavailable })
	require.Contains(t, w.get("/ui/workers").Body.String(), "Redis does not answer")
}

// TestSystemTopics: the page of processes and the page of the audit each have a topic. Each
// principal that may open the page may also follow its topic. The first event of the topic has a
// live region of the page.
func TestSystemTopics(t *testing.T) {
	t.Parallel()
	w := as(t, auth.Principal{})
	server := w.server()
	for _, c := range []struct {
		who    auth.Principal
		topic  string
		status int
		region string
	}{
		{reader, "workers", http.StatusOK, "pools"}, {metrics, "workers", http.StatusOK, "stages"}, {acme, "workers", http.StatusForbidden, ""},
		{reader, "workers:x", http.StatusNotFound, ""},
		{reader, "audit", http.StatusOK, "violations"}, {metrics, "audit", http.StatusForbidden, ""}, {reader, "audit:x", http.StatusNotFound, ""},
	} {
		cookie, err := w.sessions.Create(t.Context(), c.who)
		require.NoError(t, err)
		s := w.follow(server, c.topic, cookie)
		require.Equal(t, c.status, s.status, c.topic)
		if c.region != "" {
			event, data, _ := s.next()
			require.Equal(t, "regions", event)
			require.NotEmpty(t, data[c.region])
		}
		s.close()
	}
}
