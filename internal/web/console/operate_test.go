package console

import (
	"context"
	"encoding/json"
	"fmt"
	"io"
	"net/http"
	"net/http/httptest"
	"net/url"
	"strings"
	"testing"
	"testing/synctest"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/bulkaction/bulkaction/api"
	"github.com/bulkaction/bulkaction/internal/access/activity"
	"github.com/bulkaction/bulkaction/internal/access/auth"
	"github.com/bulkaction/bulkaction/internal/web/httpapi"
)

// Audit returns a state with three violations and with 120 partitions, of which one has no leader
// and one was never looked at. If f.sound is set or there are no groups, the state has one
// partition and no violation.
func (f *fakeBackend) Audit(context.Context) (api.AuditState, error) {
	f.mu.Lock()
	defer f.mu.Unlock()
	f.calls = append(f.calls, "audit")
	looked, deep := created.Add(time.Hour), created
	if len(f.groups) == 0 || f.sound {
		return api.AuditState{OK: true, Partitions: []api.AuditedPartition{{Partition: 0, Leader: "w", LookedAt: &looked, DeepAt: &deep}}}, f.err
	}
	ordinal := int64(0)
	s := api.AuditState{
		ByLaw: map[string]int64{"counters": 3, "location": 1200, "states": 0},
		Violations: []api.Violation{
			{Law: "location", Partition: 3, Group: "failed-1", Ordinal: &ordinal, Detail: "detail " + hostile},
			{Law: "location", Partition: 4, Group: "running-1", Detail: "and more", Count: 1100}, {Law: "guard-state", Partition: -1, Detail: "of a guard"},
		},
	}
	for i := range 120 {
		s.Partitions = append(s.Partitions, api.AuditedPartition{Partition: i, Leader: fmt.Sprint("leader-", i), LookedAt: &looked, DeepAt: &deep})
	}
	s.Partitions[110].Leader = ""
	s.Partitions[111].LookedAt, s.Partitions[111].DeepAt = nil, nil
	return s, f.err
}

func TestAudit(t *testing.T) {
	w := parallelAs(t, reader)
	d := w.page("/ui/audit")
	for _, want := range []string{
		"1,203 violations are open.", "Open violations 1,203", "Partitions without a leader 1", "Partitions never looked at 1", "Oldest look –",
		"location 1200 1,200", "counters 3 3", "location failed-1.0 3 detail " + hostile + " 1", "running-1 4 and more 1,100", "guard-state – – of a guard",
		"and 101 other violations", "110 none", "111 leader-111 never –", "and 20 other partitions", "bulkaction audit --repair --redis-url URL",
		"failed-1.7",
	} {
		require.Contains(t, d.text, want)
	}
	require.NotContains(t, d.text, "states")
	require.NotContains(t, d.text, "leader-119")
	require.Less(t, strings.Index(d.text, "110 none"), strings.Index(d.text, "leader-0"), "what needs a look comes first")
	var links []string
	for _, a := range d.all("a") {
		links = append(links, attribute(a, "href"))
	}
	require.Subset(t, links, []string{"/ui/groups/failed-1/jobs/0", "/ui/groups/running-1", "/ui/dead-letters?code=LOST", "/ui/groups/failed-1/jobs/7"})
	require.Empty(t, w.log.entries)
	require.Equal(t, []string{"/ui/logout", "/ui/theme"}, d.actions(), "the page changes nothing")
	for _, who := range []auth.Principal{acme, metrics} {
		require.Equal(t, http.StatusForbidden, as(t, who).get("/ui/audit").Code)
	}

	w.backend.set(func() { w.backend.groups = nil })
	good := w.page("/ui/audit").text
	for _, want := range []string{"No law is violated.", "Oldest look 2026-01-02 04:04:05 UTC", "Oldest deep look 2026-01-02 03:04:05 UTC", "no job has vanished"} {
		require.Contains(t, good, want)
	}
	w.backend.set(func() { w.backend.err = api.ErrUnavailable })
	require.Contains(t, w.get("/ui/audit").Body.String(), "Redis does not answer")

	var unaudited auditData
	unaudited.summarize()
	require.Nil(t, unaudited.LookedAt)
}

// TestAuditLooksForLostJobsRarely: three reads of the audit page's data read the audit three times,
// and search the dead letters for the code LOST once.
func TestAuditLooksForLostJobsRarely(t *testing.T) {
	w := parallel(t)
	read := auditPage{w.backend}.reader()
	for range 3 {
		_, err := read(auth.With(t.Context(), admin))
		require.NoError(t, err)
	}
	require.Equal(t, []string{"audit", "dead letters  10 code=LOST", "audit", "audit"}, w.backend.calls)
}

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
	w := parallelAs(t, operator)
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
	w := parallelAs(t, auth.Principal{})
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

// Read returns two fixed entries, which no action of the test has made, and a cursor. With a cursor
// or the tenant none, or if l.empty is set, it returns no entry.
func (l *fakeLog) Read(_ context.Context, q activity.Query) (api.ActivityList, error) {
	l.mu.Lock()
	defer l.mu.Unlock()
	l.queries = append(l.queries, q)
	list := api.ActivityList{Scanned: 10_000}
	if l.empty || q.Cursor != "" {
		return list, nil
	}
	if list.Cursor = "5-1"; q.Tenant == "none" {
		return list, nil
	}
	list.Activity = []api.Activity{
		{
			ID: "9-1", At: created, Actor: "key_a", Role: "operator", Via: api.ViaUI, IP: "192.0.2.1", RequestID: "req-1", Action: "tenant.set",
			Object: "acme", Before: json.RawMessage(`{"weight":1}`), After: json.RawMessage(`{"weight":"` + strings.Repeat("x", 2*maxPayloadText) + `"}`),
		},
		{ID: "8-1", Actor: hostile, Role: "producer", Tenant: "acme", Via: api.ViaCLI, Action: hostile, Object: hostile, After: json.RawMessage(`"<b>"`), Outcome: "it " + hostile},
	}
	return list, nil
}

func TestActivity(t *testing.T) {
	w := parallelAs(t, admin)
	d := w.page("/ui/activity?actor=key_a&tenant=acme&since=2026-01-02")
	for _, want := range []string{
		"tenant.set acme key_a operator 2026-01-02 03:04:05 UTC", `{"weight":1} → {"weight":"xxx`, "x… ui 192.0.2.1 – req-1",
		hostile + " " + hostile + " " + hostile + " producer of acme – – → \"<b>\" cli failed it " + hostile,
	} {
		require.Contains(t, d.text, want)
	}
	day := time.Date(2026, 1, 2, 0, 0, 0, 0, time.UTC)
	require.Equal(t, []activity.Query{{Actor: "key_a", Tenant: "acme", Since: day, Limit: 50}}, w.log.queries)
	require.Equal(t, "/ui/activity?actor=key_a&cursor=5-1&since=2026-01-02&tenant=acme", nextOf(d))
	require.Contains(t, w.page(nextOf(d)).text, "No further entry fits the filters.")
	require.Equal(t, activity.Query{Actor: "key_a", Tenant: "acme", Since: day, Cursor: "5-1", Limit: 50}, w.log.queries[1])
	require.Contains(t, w.page("/ui/activity?tenant=none").text, "None of the 10,000 entries that were looked at fits the filters.")
	for _, query := range []string{"cursor=x", "cursor=" + strings.Repeat("1", 600), "tenant=a%20b", "since=today", "actor=" + strings.Repeat("x", 300)} {
		require.Equal(t, http.StatusUnprocessableEntity, w.get("/ui/activity?"+query).Code, query)
	}
	for _, who := range []auth.Principal{operator, reader, acme, metrics} {
		require.Equal(t, http.StatusForbidden, as(t, who).get("/ui/activity").Code, who.Role)
	}
	w.log.empty = true
	require.Contains(t, w.page("/ui/activity").text, "Nobody has changed anything yet.")
	w.with(func(o *httpapi.Options) { o.Activity = nil })
	require.Contains(t, w.page("/ui/activity").text, "This console has no activity log.")
}

// TestLimitsOfKey: the requests of a session, and the bodies that it sends, count towards the
// limits of its API key.
func TestLimitsOfKey(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		w := as(t, acme)
		o := w.options()
		o.KeyRPS = 2
		o.UI = func(s httpapi.Shared) http.Handler { return New(s, w.console.Options) }
		api := httpapi.New(o)
		send := func(method, path string, body io.Reader, header ...string) *httptest.ResponseRecorder {
			r := httptest.NewRequestWithContext(t.Context(), method, path, body)
			for i := 0; i < len(header); i += 2 {
				r.Header.Set(header[i], header[i+1])
			}
			answer := httptest.NewRecorder()
			api.ServeHTTP(answer, r)
			return answer
		}
		session := []string{"Cookie", "bulkaction=" + w.cookie}
		key := []string{"Authorization", "Bearer acme"}
		login := func(key string) int {
			return send(http.MethodPost, "/ui/login", strings.NewReader(url.Values{"key": {key}}.Encode()),
				"Content-Type", "application/x-www-form-urlencoded").Code
		}
		require.Equal(t, http.StatusOK, send(http.MethodGet, "/ui/groups", nil, session...).Code)
		require.Equal(t, http.StatusOK, send(http.MethodGet, "/v1/groups/running-1", nil, key...).Code)
		for _, path := range []string{"/ui/groups", "/ui/events?topics=overview"} {
			answer := send(http.MethodGet, path, nil, session...)
			require.Equal(t, http.StatusTooManyRequests, answer.Code, path)
			require.Equal(t, "1", answer.Header().Get("Retry-After"))
			require.Contains(t, answer.Body.String(), "2 requests a second")
		}
		require.Equal(t, http.StatusTooManyRequests, send(http.MethodPost, "/ui/groups/running-1/cancel", nil, session...).Code)
		require.Equal(t, http.StatusTooManyRequests, send(http.MethodGet, "/v1/groups/running-1", nil, key...).Code)
		require.Equal(t, http.StatusTooManyRequests, login("acme"))
		require.Empty(t, w.backend.calls)
		require.Len(t, w.sessions.all, 1, "a refused login makes no session")
		require.Equal(t, http.StatusSeeOther, login("globex"))

		const bodies = 64
		answers := make(chan int, bodies)
		var open []*io.PipeWriter
		form := append([]string{"Content-Type", "multipart/form-data; boundary=x"}, session...)
		for range bodies {
			time.Sleep(time.Second)
			body, end := io.Pipe()
			open = append(open, end)
			go func() { answers <- send(http.MethodPost, "/ui/submit", body, form...).Code }()
		}
		synctest.Wait()
		require.Empty(t, answers)
		time.Sleep(time.Second)
		answer := send(http.MethodPost, "/ui/submit", strings.NewReader("--x--"), form...)
		require.Equal(t, http.StatusTooManyRequests, answer.Code)
		require.Contains(t, answer.Body.String(), "64 bodies of jobs")
		require.Equal(t, http.StatusTooManyRequests, send(http.MethodPost, "/v1/groups/running-1/jobs",
			strings.NewReader("{}"), append([]string{"Content-Type", "application/x-ndjson"}, key...)...).Code)
		for _, end := range open {
			require.NoError(t, end.Close())
			require.Equal(t, http.StatusUnprocessableEntity, <-answers)
		}
		time.Sleep(time.Second)
		answer = send(http.MethodPost, "/ui/submit", strings.NewReader("--x--"), form...)
		require.Equal(t, http.StatusUnprocessableEntity, answer.Code)
	})
}
