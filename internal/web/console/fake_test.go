package console

import (
	"context"
	"encoding/json"
	"fmt"
	"log/slog"
	"net/http"
	"net/http/httptest"
	"net/netip"
	"net/url"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/stretchr/testify/require"
	"golang.org/x/net/html"

	"github.com/bulkaction/bulkaction/api"
	"github.com/bulkaction/bulkaction/internal/access/activity"
	"github.com/bulkaction/bulkaction/internal/access/apikey"
	"github.com/bulkaction/bulkaction/internal/access/auth"
	"github.com/bulkaction/bulkaction/internal/access/session"
	"github.com/bulkaction/bulkaction/internal/messages"
	"github.com/bulkaction/bulkaction/internal/web/httpapi"
)

// hostile is a text that users may have sent.
const hostile = "\"><script>alert(1)</script>{{.}}javascript:alert(1)\u202e'`"

var created = time.Date(2026, 1, 2, 3, 4, 5, 0, time.UTC)

// fakeBackend is a backend in memory with a few groups. Methods that it does not implement panic.
type fakeBackend struct {
	httpapi.Backend // nil

	mu      sync.Mutex
	err     error // of every call
	groups  map[string]api.Group
	tags    api.Tags // of the last submission
	jobs    map[string][]messages.Job
	calls   []string
	reads   int
	queries []messages.ListQuery
	refuse  error // of Append
	sound   bool  // the audit finds no violation
	// afterPage, unless nil, is called after the first page of failed jobs was read.
	afterPage func()
	mapReads  int
	long      int // bytes of each result
	submitted *messages.SubmitGroup
	jobQuery  messages.JobQuery // of the last call of Jobs
	stages    []api.StageStatus // which Stats returns too, beside its fixed ones
	deadline  time.Time         // of the last call of Groups
	limits    *api.Limits       // which Limits returns; nil: those of a fixed answer

	noEndpoint  bool            // no tenant has a callback endpoint
	redelivered api.Redelivered // which RedeliverDead returns
}

func newFake() *fakeBackend {
	eta, total := 12.5, int64(1200)
	failed := api.Group{
		ID: "failed-1", Tenant: "acme", Name: hostile, Tags: api.Tags{"a": "x& <b>"}, CallbackURL: "javascript:alert(2)//" + hostile, Type: "SEND_EMAIL", Priority: "normal", Status: api.StatusFailed,
		Sealed: true, Round: 2, Counts: api.Counts{Accepted: 1000, Done: 900, Failed: 100},
		FailuresByCode: map[string]int64{"PERMANENT": 90, hostile: 10},
		Aggregate: map[string]json.RawMessage{
			"cost": []byte("12.5"), "why": []byte(`{"a":3,"` + "<b>" + `":1}`), "list": []byte(`["<i>"]`), "none": []byte("null"),
			"ms": []byte(`{"count":4,"min":1,"max":9,"mean":4,"stddev":2.5,"p50":3,"p90":8,"p95":9,"p99":9,"histogram":[[1,3,3],[3,9,1]]}`),
		},
		Timestamps: map[string]time.Time{"created": created, "running": created.Add(time.Second), "failed": created.Add(time.Minute)},
	}
	running := api.Group{
		ID: "running-1", Tenant: "acme", Type: "NOOP", Priority: "high", Status: api.StatusRunning, Round: 1, Total: &total,
		Counts: api.Counts{Accepted: 1000, Waiting: 400, NonReady: 50, Ready: 40, InFlight: 10, Done: 490, Failed: 10}, ETASeconds: &eta,
		FailuresByCode: map[string]int64{"TIMEOUT": 10}, Timestamps: map[string]time.Time{"created": created}, Paused: true,
	}
	other := api.Group{ID: "other-1", Tenant: "globex", Type: "NOOP", Status: api.StatusCompleted, Timestamps: map[string]time.Time{}}
	return &fakeBackend{groups: map[string]api.Group{"failed-1": failed, "running-1": running, "other-1": other}, jobs: map[string][]messages.Job{}}
}

func (f *fakeBackend) call(format string, args ...any) error {
	f.mu.Lock()
	defer f.mu.Unlock()
	f.calls = append(f.calls, fmt.Sprintf(format, args...))
	return f.err
}

func (f *fakeBackend) set(change func()) {
	f.mu.Lock()
	defer f.mu.Unlock()
	change()
}

func (f *fakeBackend) group(ctx context.Context, id string) (api.Group, error) {
	f.mu.Lock()
	defer f.mu.Unlock()
	f.reads++
	who, ok := auth.From(ctx)
	g, there := f.groups[id]
	if f.err == nil && (!ok || !there || !who.Owns(g.Tenant)) {
		return api.Group{}, fmt.Errorf("group %s: %w", id, api.ErrNotFound)
	}
	return g, f.err
}

func (f *fakeBackend) GroupSummary(ctx context.Context, id string, _ int64) (api.Group, bool, error) {
	g, err := f.group(ctx, id)
	return g, true, err
}

func (f *fakeBackend) Group(ctx context.Context, id string) (api.Group, error) {
	return f.group(ctx, id)
}

func (f *fakeBackend) Groups(ctx context.Context, q messages.ListQuery) (api.GroupList, error) {
	f.mu.Lock()
	defer f.mu.Unlock()
	f.queries = append(f.queries, q)
	f.deadline, _ = ctx.Deadline()
	who, _ := auth.From(ctx)
	l := api.GroupList{Scanned: 3}
	for _, id := range []string{"failed-1", "running-1", "other-1"} {
		g := f.groups[id]
		if g.ID != "" && who.Owns(g.Tenant) && (q.Status == "" || q.Status == g.Status) && (q.Tenant == "" || q.Tenant == g.Tenant) {
			l.Groups = append(l.Groups, g)
		}
	}
	if len(f.groups) > 0 && q.Cursor == "" {
		l.Cursor = "next&page"
	}
	return l, f.err
}

func (f *fakeBackend) Why(context.Context, string) (api.Why, error) {
	return api.Why{Job: "running-1.7", Reason: api.WhyRate, Detail: "the tenant has no permit left <b>"}, nil
}

func (f *fakeBackend) Jobs(_ context.Context, group string, q messages.JobQuery) (api.JobList, error) {
	if f.set(func() { f.jobQuery = q }); q.Key == "none" {
		return api.JobList{}, nil
	} else if q.Key == "repeated" {
		return api.JobList{}, &messages.ValidationError{Fields: []messages.FieldError{{Field: "key", Problem: "can't be looked up"}}}
	}
	return api.JobList{Jobs: []api.Job{{
		Group: group, Ordinal: 7, State: q.State, Attempts: 1,
		LastError: &api.JobError{Code: "PERMANENT", Error: hostile, Attempt: 1, At: created},
	}}}, f.call("jobs %s %s", group, q.State)
}

func (f *fakeBackend) Job(ctx context.Context, group string, ordinal int64) (api.Job, error) {
	if _, err := f.group(ctx, group); err != nil {
		return api.Job{}, err
	}
	if ordinal != 7 {
		return api.Job{}, fmt.Errorf("job %s.%d: %w", group, ordinal, api.ErrNotFound)
	}
	return api.Job{
		ID: group + ".7", Group: group, Ordinal: 7, Key: "k", State: "non_ready", Attempts: 2, Result: []byte(`{"a":"</pre><script>"}`),
		Errors: []api.JobError{{Code: "E", Error: hostile, Attempt: 2, At: created}}, Why: &api.Why{Detail: "it waits", Reason: "retry"}, Until: &created,
	}, nil
}

func (f *fakeBackend) Stats(context.Context) (api.Stats, error) {
	f.mu.Lock()
	defer f.mu.Unlock()
	return api.Stats{
		StartedPerSec: 12.25, ActiveTenants: 2, DeadLetters: 1234, RateLimit: api.RateLimit{RPS: 100, Used: 7},
		Types: []api.TypeStats{
			{Type: "NOOP", Backlog: 1500, Waiting: 1000, NonReady: 300, Ready: 200, InFlight: 10, Workers: 2},
			{Type: "HTTP", Backlog: 1, Waiting: 1, Paused: true},
		},
		Workers: []api.WorkerStatus{{Workers: 10, Active: 4}},
		Stages:  append([]api.StageStatus{{Role: "ingest", Running: true}, {Role: "fetcher", Running: true}, {Role: "dispatcher", Running: true}, {Role: "watcher", Running: true}}, f.stages...),
	}, f.err
}

func (f *fakeBackend) command(name, id string) (api.Accepted, error) {
	if id == "conflict-1" {
		return api.Accepted{}, fmt.Errorf("group %s has ended: %w", id, api.ErrConflict)
	}
	return api.Accepted{ID: id}, f.call("%s %s", name, id)
}

func (f *fakeBackend) Pause(_ context.Context, id string) (api.Accepted, error) {
	return f.command("pause", id)
}

func (f *fakeBackend) Resume(_ context.Context, id string) (api.Accepted, error) {
	return f.command("resume", id)
}

func (f *fakeBackend) Cancel(_ context.Context, id string) (api.Accepted, error) {
	return f.command("cancel", id)
}

func (f *fakeBackend) Retry(_ context.Context, id string, c api.RetryChoice) (api.Accepted, error) {
	jobs := strings.Trim(fmt.Sprint(c.Jobs), "[]")
	return f.command(strings.TrimSpace(fmt.Sprint("retry ", strings.Join(c.Codes, ","), jobs)), id)
}

func (f *fakeBackend) CancelJob(_ context.Context, id string, ordinal int64) (api.Job, error) {
	return api.Job{}, f.call("cancel job %s %d", id, ordinal)
}

func (f *fakeBackend) Seal(_ context.Context, id string, _ *int64) (api.Accepted, error) {
	return f.command("seal", id)
}

func (f *fakeBackend) PauseType(_ context.Context, typ string) error {
	return f.call("pause type %s", typ)
}

func (f *fakeBackend) ResumeType(_ context.Context, typ string) error {
	return f.call("resume type %s", typ)
}

func (f *fakeBackend) Submit(_ context.Context, g *messages.SubmitGroup, _ httpapi.SubmitOptions) (api.Accepted, error) {
	f.set(func() { f.tags, f.submitted = g.Tags, g })
	return api.Accepted{ID: g.ID}, f.call("submit %s %s %s", g.ID, g.Tenant, g.Type)
}

func (f *fakeBackend) Append(_ context.Context, group string, jobs []messages.Job, _ httpapi.AppendOptions) error {
	f.set(func() { f.jobs[group] = append(f.jobs[group], jobs...) })
	if f.refuse != nil {
		return f.refuse
	}
	return f.call("append %s %d", group, len(jobs))
}

// fakeLog is an activity log in memory. Do stores an entry and makes the change.
type fakeLog struct {
	mu      sync.Mutex
	entries []api.Activity
	queries []activity.Query
	empty   bool // it has nothing to read
}

func (l *fakeLog) Do(ctx context.Context, e api.Activity, do func(context.Context) error) error {
	l.mu.Lock()
	l.entries = append(l.entries, e)
	l.mu.Unlock()
	return do(ctx)
}

// fakeKeys knows keys by their tokens.
type fakeKeys struct {
	mu   sync.Mutex
	keys map[string]auth.Principal
}

func (k *fakeKeys) Authenticate(_ context.Context, token string, _ netip.Addr) (auth.Principal, error) {
	k.mu.Lock()
	defer k.mu.Unlock()
	switch token {
	case "many":
		return auth.Principal{}, &apikey.TooManyFailuresError{RetryAfter: 6 * time.Second}
	case "away":
		return auth.Principal{}, apikey.ErrUnavailable
	}
	if p, ok := k.keys[token]; ok {
		return p, nil
	}
	return auth.Principal{}, apikey.ErrInvalid
}

func (k *fakeKeys) Still(p auth.Principal) bool {
	k.mu.Lock()
	defer k.mu.Unlock()
	return k.keys[p.KeyID] == p
}

func (k *fakeKeys) revoke(id string) {
	k.mu.Lock()
	defer k.mu.Unlock()
	delete(k.keys, id)
}

// fakeSessions keeps sessions in memory.
type fakeSessions struct {
	mu  sync.Mutex
	all map[string]auth.Principal
	err error
	n   int

	uses     int       // requests that count as a use of a session
	deadline time.Time // of the last call of Find
}

func (s *fakeSessions) Create(_ context.Context, p auth.Principal) (string, error) {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.n++
	token := fmt.Sprint("session-", s.n)
	s.all[token] = p
	return token, s.err
}

func (s *fakeSessions) Find(ctx context.Context, token string, request bool) (auth.Principal, error) {
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.deadline, _ = ctx.Deadline(); request {
		s.uses++
	}
	if s.err != nil {
		return auth.Principal{}, s.err
	}
	p, ok := s.all[token]
	if !ok {
		return auth.Principal{}, session.ErrNone
	}
	return p, nil
}

func (s *fakeSessions) End(_ context.Context, token string) error {
	s.mu.Lock()
	defer s.mu.Unlock()
	delete(s.all, token)
	return s.err
}

// Principals of the API keys in fakeKeys. The token of each key is its key id.
var (
	admin    = auth.Principal{KeyID: "admin", Role: auth.Admin, Payloads: true}
	operator = auth.Principal{KeyID: "operator", Role: auth.Operator, Payloads: true}
	reader   = auth.Principal{KeyID: "reader", Role: auth.Reader}
	acme     = auth.Principal{KeyID: "acme", Role: auth.Producer, Tenant: "acme", Payloads: true}
	globex   = auth.Principal{KeyID: "globex", Role: auth.Producer, Tenant: "globex", Payloads: true}
	metrics  = auth.Principal{KeyID: "metrics", Role: auth.Metrics}
	service  = auth.Principal{KeyID: "service", Role: auth.Service}
)

// testConsole is a console over fake stores. A console from newTestConsole asks for no login.
type testConsole struct {
	*testing.T
	backend  *fakeBackend
	rooms    *fakeRooms
	log      *fakeLog
	keys     *fakeKeys
	sessions *fakeSessions
	keyStore *fakeKeyStore
	console  *Console
	cookie   string
}

func newTestConsole(t *testing.T) *testConsole {
	w := &testConsole{T: t, backend: newFake(), rooms: newFakeRooms(), log: &fakeLog{}, keyStore: newKeyStore()}
	w.console = New(httpapi.Share(w.options()), Options{})
	return w
}

// as returns a console that asks for a login, with a session of the principal who. Without a key id
// in who there is no session.
func as(t *testing.T, who auth.Principal) *testConsole {
	w := &testConsole{T: t, backend: newFake(), rooms: newFakeRooms(), log: &fakeLog{}, sessions: &fakeSessions{all: map[string]auth.Principal{}}, keyStore: newKeyStore()}
	w.keys = &fakeKeys{keys: map[string]auth.Principal{}}
	for _, p := range []auth.Principal{admin, operator, reader, acme, globex, metrics, service} {
		w.keys.keys[p.KeyID] = p
	}
	w.console = New(httpapi.Share(w.options()), Options{Sessions: w.sessions})
	if who.KeyID != "" {
		w.cookie, _ = w.sessions.Create(t.Context(), who)
	}
	return w
}

func parallel(t *testing.T) *testConsole { t.Parallel(); return newTestConsole(t) }

func parallelAs(t *testing.T, who auth.Principal) *testConsole { t.Parallel(); return as(t, who) }

// options returns the options of the API that shares its stores with the console.
func (w *testConsole) options() httpapi.Options {
	o := httpapi.Options{
		Backend: w.backend, Rooms: w.rooms, Activity: w.log, KeyStore: w.keyStore, Version: "v1",
		Log: slog.New(slog.NewTextHandler(w.Output(), nil)),
	}
	if w.keys != nil {
		o.Keys = w.keys
	}
	return o
}

func (w *testConsole) do(r *http.Request) *httptest.ResponseRecorder {
	w.Helper()
	r.RemoteAddr = "127.0.0.1:1234"
	if r.Host == "example.com" { // the default of httptest; the tests of rooms expect localhost
		r.Host = "localhost"
	}
	if w.cookie != "" {
		r.AddCookie(&http.Cookie{Name: "bulkaction", Value: w.cookie})
	}
	answer := httptest.NewRecorder()
	w.console.ServeHTTP(answer, r)
	return answer
}

func (w *testConsole) get(path string) *httptest.ResponseRecorder {
	w.Helper()
	return w.do(httptest.NewRequestWithContext(w.Context(), http.MethodGet, path, nil))
}

func (w *testConsole) post(path string, form url.Values) *httptest.ResponseRecorder {
	w.Helper()
	r := httptest.NewRequestWithContext(w.Context(), http.MethodPost, path, strings.NewReader(form.Encode()))
	r.Header.Set("Content-Type", "application/x-www-form-urlencoded")
	return w.do(r)
}

// page reads a page that must be there.
func (w *testConsole) page(path string) document {
	w.Helper()
	answer := w.get(path)
	require.Equal(w, http.StatusOK, answer.Code, answer.Body.String())
	return parse(w.T, answer.Body.String())
}

// document is a page of HTML.
type document struct {
	root *html.Node
	text string // as people see it
}

func parse(t *testing.T, text string) document {
	t.Helper()
	root, err := html.Parse(strings.NewReader(text))
	require.NoError(t, err)
	d := document{root: root}
	for n := range root.Descendants() {
		if n.Type == html.TextNode && n.Parent.Data != "script" && n.Parent.Data != "style" {
			d.text += n.Data + " "
		}
	}
	d.text = strings.Join(strings.Fields(d.text), " ")
	return d
}

func (d document) all(name string) (found []*html.Node) {
	for n := range d.root.Descendants() {
		if n.Type == html.ElementNode && (name == "" || n.Data == name) {
			found = append(found, n)
		}
	}
	return found
}

func attribute(n *html.Node, name string) string {
	for _, a := range n.Attr {
		if a.Key == name {
			return a.Val
		}
	}
	return ""
}

// actions returns the paths to which the page's POST forms are sent.
func (d document) actions() (paths []string) {
	for _, form := range d.all("form") {
		if attribute(form, "method") == "post" {
			paths = append(paths, attribute(form, "action"))
		}
	}
	return paths
}
