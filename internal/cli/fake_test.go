package cli

import (
	"bufio"
	"bytes"
	"cmp"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"maps"
	"net/http"
	"net/http/httptest"
	"slices"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/bulkaction/bulkaction/api"
	"github.com/bulkaction/bulkaction/internal/messages"
	"github.com/bulkaction/bulkaction/internal/testkit/apitest"
	"github.com/bulkaction/bulkaction/internal/web/httpapi"
)

var epoch = time.Date(2030, 1, 2, 3, 4, 5, 0, time.UTC)

// fakeAPI is an HTTP server with the calls of the API, in memory. A group ends as soon as it is
// sealed, unless keepOpen is set. A job whose payload contains "fail" fails.
type fakeAPI struct {
	*httptest.Server
	mu              sync.Mutex
	groups          map[string]*fakeGroup
	calls           []string // method and path
	queries         []string // of appends, and of lists of dead letters
	health          api.GuardHealth
	busyAppends     int    // number of appends to refuse with 429
	retryAfter      string // header of these answers; "" is 0
	audit           api.AuditState
	history         api.History
	deadLetterCount int  // number of dead letters
	keepOpen        bool // sealed groups do not end
	tenants         map[string]api.TenantSettings
	limits          *apitest.Backend // behind the real API
	bodies          []string         // of patches of tenants, and of seals with a body, which seal nothing
	warnings        []string         // of each submission
	conflict        bool             // submissions are answered with 409
	failSeals       bool             // seals are answered with 500
	refusal         string           // if set, appends are answered with 422 and this text
}

type fakeGroup struct {
	api.Group
	submitted *messages.SubmitGroup
	jobs      []messages.Job
	keys      map[string]bool
	changed   chan struct{} // closed and replaced when the group changes
}

func newFakeAPI(t *testing.T) *fakeAPI {
	f := &fakeAPI{groups: map[string]*fakeGroup{}, tenants: map[string]api.TenantSettings{}, limits: apitest.NewBackend()}
	mux := http.NewServeMux()
	mux.HandleFunc("POST /v1/groups", f.submit)
	mux.HandleFunc("GET /v1/groups", f.listGroups)
	mux.HandleFunc("POST /v1/groups/{id}/jobs", f.append)
	mux.HandleFunc("POST /v1/groups/{id}/{verb}", f.command)
	mux.HandleFunc("GET /v1/groups/{id}", f.group)
	mux.HandleFunc("GET /v1/groups/{id}/events", f.events)
	mux.HandleFunc("GET /v1/groups/{id}/{what}", f.list)
	mux.HandleFunc("GET /v1/groups/{id}/jobs", f.listJobs)
	mux.HandleFunc("GET /v1/groups/{id}/why", f.why)
	mux.HandleFunc("GET /v1/groups/{id}/jobs/{ordinal}", f.job)
	mux.HandleFunc("POST /v1/groups/{id}/jobs/{ordinal}/cancel", func(w http.ResponseWriter, r *http.Request) {
		_ = json.NewEncoder(w).Encode(api.Job{ID: r.PathValue("id") + "." + r.PathValue("ordinal"), State: "cancelled"})
	})
	mux.HandleFunc("POST /v1/{kind}/{id}/{verb}", f.pauseOrResume)
	mux.HandleFunc("GET /v1/tenants", f.listTenants)
	mux.HandleFunc("GET /v1/tenants/{id}", f.tenant)
	mux.HandleFunc("PATCH /v1/tenants/{id}", f.patchTenant)
	limits := httpapi.New(httpapi.Options{Backend: f.limits})
	mux.Handle("/v1/limits", limits)
	mux.Handle("/v1/scale", limits)
	mux.Handle("PATCH /v1/types/{type}", limits)
	mux.HandleFunc("PUT /v1/workers/{id}", f.resizeWorker)
	mux.HandleFunc("GET /v1/guards", f.listGuards)
	mux.HandleFunc("GET /v1/guards/{name}", f.showGuard)
	mux.HandleFunc("POST /v1/guards/{name}/members/{id}/{verb}", f.controlGuard)
	mux.HandleFunc("GET /v1/dead-letters", f.deadLetters)
	mux.HandleFunc("GET /v1/rejected", f.rejected)
	mux.HandleFunc("GET /v1/activity", f.activity)
	mux.HandleFunc("GET /v1/stats", f.stats)
	mux.HandleFunc("GET /v1/history", func(w http.ResponseWriter, _ *http.Request) { reply(w, http.StatusOK, f.history) })
	mux.HandleFunc("GET /v1/audit", func(w http.ResponseWriter, _ *http.Request) { reply(w, http.StatusOK, f.audit) })
	f.Server = httptest.NewServer(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		f.mu.Lock()
		f.calls = append(f.calls, r.Method+" "+r.URL.Path)
		f.mu.Unlock()
		mux.ServeHTTP(w, r)
	}))
	t.Cleanup(f.Close)
	return f
}

func reply(w http.ResponseWriter, status int, v any) {
	w.Header().Set("Content-Type", "application/json")
	w.WriteHeader(status)
	_ = json.NewEncoder(w).Encode(v)
}

func problem(w http.ResponseWriter, status int, detail string, fields ...api.FieldError) {
	w.Header().Set("Content-Type", "application/problem+json")
	w.WriteHeader(status)
	_ = json.NewEncoder(w).Encode(api.Problem{Title: http.StatusText(status), Status: status, Detail: detail, Fields: fields})
}

// find returns the group in the path and a function that unlocks it. If there is no such group,
// find answers 404 and returns nil.
func (f *fakeAPI) find(w http.ResponseWriter, r *http.Request) (*fakeGroup, func()) {
	f.mu.Lock()
	g := f.groups[r.PathValue("id")]
	if g == nil {
		f.mu.Unlock()
		problem(w, http.StatusNotFound, "group "+r.PathValue("id")+": not found")
		return nil, nil
	}
	return g, f.mu.Unlock
}

func (f *fakeAPI) submit(w http.ResponseWriter, r *http.Request) {
	body, _ := io.ReadAll(r.Body)
	s, err := messages.Decoder{}.DecodeSubmit(body)
	if err != nil {
		fields := []api.FieldError{}
		if bad, ok := errors.AsType[*messages.ValidationError](err); ok {
			for _, b := range bad.Fields {
				fields = append(fields, api.FieldError(b))
			}
		}
		problem(w, http.StatusUnprocessableEntity, err.Error(), fields...)
		return
	}
	if f.conflict {
		problem(w, http.StatusConflict, "group g: another group has this id")
		return
	}
	f.mu.Lock()
	defer f.mu.Unlock()
	if s.ID == "" {
		s.ID = fmt.Sprintf("made-up-%d", len(f.groups))
	}
	if f.groups[s.ID] == nil {
		f.groups[s.ID] = &fakeGroup{
			Group: api.Group{
				ID: s.ID, Tenant: s.Tenant, Name: s.Name, Tags: s.Tags, Type: s.Type, Priority: "normal", Status: api.StatusCreated, Round: 1,
				Timestamps: map[string]time.Time{"created": epoch},
			},
			submitted: s, keys: map[string]bool{}, changed: make(chan struct{}),
		}
		f.groups[s.ID].add(s.Jobs)
		if s.Seal {
			f.seal(f.groups[s.ID])
		}
	}
	g := f.groups[s.ID]
	reply(w, http.StatusAccepted, api.Accepted{ID: g.ID, Status: g.Status, Counts: g.Counts, Links: map[string]string{"self": "/v1/groups/" + g.ID}, Tenant: s.Tenant, Warnings: f.warnings})
}

func accepted(w http.ResponseWriter, g *fakeGroup) {
	reply(w, http.StatusAccepted, api.Accepted{ID: g.ID, Status: g.Status, Counts: g.Counts, Links: map[string]string{"self": "/v1/groups/" + g.ID}})
}

func (g *fakeGroup) add(jobs []messages.Job) {
	g.jobs = append(g.jobs, jobs...)
	g.Counts.Accepted += int64(len(jobs))
	g.Counts.Waiting += int64(len(jobs))
}

// seal seals a group and ends it, unless keepOpen is set.
func (f *fakeAPI) seal(g *fakeGroup) {
	g.Sealed = true
	g.Status = api.StatusRunning
	if !f.keepOpen {
		g.finish()
	}
	g.change()
}

func (g *fakeGroup) change() {
	close(g.changed)
	g.changed = make(chan struct{})
}

func (g *fakeGroup) finish() {
	g.Counts.Waiting, g.Status = 0, api.StatusCompleted
	for _, j := range g.jobs {
		if bytes.Contains(j.Payload, []byte("fail")) {
			g.Counts.Failed++
			continue
		}
		g.Counts.Done++
	}
	if g.Counts.Failed > 0 {
		g.FailuresByCode = map[string]int64{"SMTP_550": g.Counts.Failed}
	}
	g.Aggregate = map[string]json.RawMessage{"cost": json.RawMessage("12.5")}
	g.Timestamps["completed"] = epoch.Add(time.Minute)
}

func (f *fakeAPI) append(w http.ResponseWriter, r *http.Request) {
	body, err := io.ReadAll(r.Body)
	if err != nil {
		return
	}
	g, unlock := f.find(w, r)
	if g == nil {
		return
	}
	defer unlock()
	if f.busyAppends > 0 {
		f.busyAppends--
		w.Header().Set("Retry-After", cmp.Or(f.retryAfter, "0"))
		problem(w, http.StatusTooManyRequests, api.ErrBackpressure.Error()+": the backlog is full")
		return
	}
	if f.refusal != "" {
		problem(w, http.StatusUnprocessableEntity, f.refusal)
		return
	}
	got := api.Appended{Rejected: []api.LineError{}}
	var jobs []messages.Job
	f.queries = append(f.queries, r.URL.RawQuery)
	csv := r.Header.Get("Content-Type") == "text/csv"
	lines := bufio.NewScanner(bytes.NewReader(body))
	for n := int64(1); lines.Scan(); n++ {
		job := messages.Job{Payload: json.RawMessage(fmt.Sprintf("%q", lines.Text()))}
		var err error
		if !csv {
			job, err = messages.Decoder{}.DecodeJob(lines.Bytes())
		}
		switch {
		case err != nil:
			got.RejectedTotal++
			got.Rejected = append(got.Rejected, api.LineError{Line: n, Error: err.Error()})
		case !csv || n > 1:
			jobs = append(jobs, job)
		}
	}
	key := r.Header.Get("Idempotency-Key")
	if g.Sealed && !g.keys[key] {
		w.Header().Set("Content-Type", "application/problem+json")
		w.WriteHeader(http.StatusConflict)
		_ = json.NewEncoder(w).Encode(api.Problem{Status: http.StatusConflict, Code: api.Sealed, Detail: "group " + g.ID + " is RUNNING"})
		return
	}
	if !g.keys[key] {
		g.keys[key] = true
		g.add(jobs)
	}
	got.Accepted = int64(len(jobs))
	reply(w, http.StatusOK, got)
}

func (f *fakeAPI) command(w http.ResponseWriter, r *http.Request) {
	g, unlock := f.find(w, r)
	if g == nil {
		return
	}
	defer unlock()
	switch verb := r.PathValue("verb"); {
	case verb == "seal" && f.failSeals:
		problem(w, http.StatusInternalServerError, "no")
		return
	case verb == "seal" && r.ContentLength > 0:
		body, _ := io.ReadAll(r.Body)
		f.bodies = append(f.bodies, string(body))
	case verb == "seal":
		if !g.Sealed {
			f.seal(g)
		}
	case verb == "cancel" && !g.Status.Ended():
		g.Status, g.Counts.Cancelled, g.Counts.Waiting = api.StatusCancelled, g.Counts.Waiting, 0
		g.change()
	case (verb == "pause" || verb == "resume") && !g.Status.Ended():
		g.Paused = verb == "pause"
	case verb == "retry" && g.Status.Ended():
		g.Round, g.Status = g.Round+1, api.StatusRunning
	default:
		problem(w, http.StatusConflict, "group "+g.ID+" is "+string(g.Status)+": "+verb+" is not possible")
		return
	}
	accepted(w, g)
}

func (f *fakeAPI) group(w http.ResponseWriter, r *http.Request) {
	if g, unlock := f.find(w, r); g != nil {
		defer unlock()
		reply(w, http.StatusOK, g.Group)
	}
}

// listGroups answers with pages of two groups, ordered by id.
func (f *fakeAPI) listGroups(w http.ResponseWriter, r *http.Request) {
	f.mu.Lock()
	defer f.mu.Unlock()
	q := r.URL.Query()
	l := api.GroupList{Groups: []api.Group{}}
	for _, id := range slices.Sorted(maps.Keys(f.groups)) {
		g := f.groups[id].Group
		if id <= q.Get("cursor") || q.Get("tenant") != "" && q.Get("tenant") != g.Tenant ||
			q.Get("status") != "" && q.Get("status") != string(g.Status) ||
			q.Get("failed_jobs") != "" && q.Get("failed_jobs") != fmt.Sprint(g.Counts.Failed > 0) {
			continue
		}
		if tags, err := api.ParseTags(q["tag"]); err != nil || !g.Tags.Include(tags) {
			continue
		}
		if len(l.Groups) == 2 {
			l.Cursor = l.Groups[1].ID
			break
		}
		l.Groups = append(l.Groups, g)
	}
	reply(w, http.StatusOK, l)
}

func (f *fakeAPI) events(w http.ResponseWriter, r *http.Request) {
	g, unlock := f.find(w, r)
	if g == nil {
		return
	}
	w.Header().Set("Content-Type", "text/event-stream")
	for n := 0; ; n++ {
		now, changed := g.Group, g.changed
		typ := "group." + strings.ToLower(string(now.Status))
		b, _ := json.Marshal(api.Event{ID: fmt.Sprint(n), Type: typ, At: epoch, Group: &now})
		unlock()
		_, _ = fmt.Fprintf(w, "id: %d\ndata: %s\n\n", n, b)
		_ = http.NewResponseController(w).Flush()
		if now.Status.Ended() {
			return
		}
		select {
		case <-changed:
		case <-r.Context().Done():
			return
		}
		f.mu.Lock()
	}
}

func (f *fakeAPI) list(w http.ResponseWriter, r *http.Request) {
	g, unlock := f.find(w, r)
	if g == nil {
		return
	}
	defer unlock()
	e := json.NewEncoder(w)
	e.SetEscapeHTML(false)
	for i, j := range g.jobs {
		failed := bytes.Contains(j.Payload, []byte("fail"))
		switch what := r.PathValue("what"); {
		case what == "results" && !failed:
			_ = e.Encode(api.Result{Ordinal: int64(i), DurationMS: 1.5, Attempts: 1, Data: json.RawMessage(`{"cost":"<1>"}`)})
		case what == "failures" && failed:
			_ = e.Encode(api.Failure{Ordinal: int64(i), Code: "SMTP_550", Error: "no such user \x1b[31m<x>", Attempts: 4, At: epoch})
		}
	}
}

func (f *fakeAPI) deadLetters(w http.ResponseWriter, r *http.Request) {
	const page = 3
	from := 0
	_, _ = fmt.Sscan(r.URL.Query().Get("cursor"), &from)
	f.mu.Lock()
	f.queries = append(f.queries, r.URL.RawQuery)
	f.mu.Unlock()
	l := api.DeadLetterList{DeadLetters: []api.DeadLetter{}}
	for i := from; i < min(from+page, f.deadLetterCount); i++ {
		l.DeadLetters = append(l.DeadLetters, api.DeadLetter{Job: fmt.Sprintf("g.%d", i), Tenant: "acme", Group: "g", Ordinal: int64(i), Type: "SEND_EMAIL", Code: "SMTP_550", Error: "no", At: epoch})
	}
	if from+page < f.deadLetterCount {
		l.Cursor = fmt.Sprint(from + page)
	}
	reply(w, http.StatusOK, l)
}

func (f *fakeAPI) stats(w http.ResponseWriter, _ *http.Request) {
	reply(w, http.StatusOK, api.Stats{
		Partitions: 4, Layouts: map[string]string{"jobs": "1+", "rooms": "1"}, Groups: 12, ActiveTenants: 3, StartedPerSec: 1234.56, DeadLetters: 7,
		Types:     []api.TypeStats{{Type: "SEND_EMAIL", Backlog: 1234567, Runnable: 1067, Waiting: 1234000, NonReady: 500, Ready: 67, InFlight: 10, Workers: 2}},
		Workers:   []api.WorkerStatus{{ID: "w-1", Types: []string{"SEND_EMAIL", "HTTP"}, Workers: 10, Active: 9, SeenAt: epoch, ShuttingDown: true}},
		Stages:    []api.StageStatus{{ID: "f-1", Role: "fetcher", Counts: map[string]int64{"fetched": 5, "empty": 1}, SeenAt: epoch}},
		Roles:     []api.RoleStatus{{Role: "fetcher", Processes: 1}, {Role: "watcher"}},
		RateLimit: api.RateLimit{Limiter: "fixed", Share: "elastic", RPS: 10000, WindowMS: 1000, Used: 42},
	})
}

// called reports whether a request "METHOD PATH" was made.
func (f *fakeAPI) called(call string) bool {
	f.mu.Lock()
	defer f.mu.Unlock()
	return slices.Contains(f.calls, call)
}

func (f *fakeAPI) groupByID(t *testing.T, id string) fakeGroup {
	f.mu.Lock()
	defer f.mu.Unlock()
	require.Contains(t, f.groups, id)
	return *f.groups[id]
}

// run is the result of one command: its exit code and what it printed.
type run struct {
	code     int
	out, err string
}

type console struct {
	in                  io.Reader
	out                 io.Writer // replaces the buffer
	terminal, outIsTerm bool
}

// exec runs a command line that uses the fake API.
func (f *fakeAPI) exec(ctx context.Context, c console, args ...string) run {
	return c.exec(ctx, append([]string{"--api", f.URL}, args...)...)
}

func (c console) exec(ctx context.Context, args ...string) run {
	var out, err bytes.Buffer
	stdio := IO{In: c.in, Out: &out, Err: &err, IsTerminal: c.terminal, OutIsTerminal: c.outIsTerm}
	if c.in == nil {
		stdio.In = strings.NewReader("")
	}
	if c.out != nil {
		stdio.Out = c.out
	}
	code := Main(ctx, args, stdio)
	return run{code, out.String(), err.String()}
}

// ends requires the exit code, and the texts in the error output.
func (r run) ends(t *testing.T, code int, says ...string) {
	t.Helper()
	require.Equal(t, code, r.code, r.err)
	for _, text := range says {
		require.Contains(t, r.err, text)
	}
}

// rejected has two pages with a message each.
func (f *fakeAPI) rejected(w http.ResponseWriter, r *http.Request) {
	list := api.RejectedList{Rejected: []api.RejectedMessage{{ID: "9-0", At: &epoch, Reason: "type: required", Type: "group.submit", MessageID: "m9", Bytes: 2}}, Cursor: "9-0"}
	if r.URL.Query().Get("cursor") == "9-0" {
		list = api.RejectedList{Rejected: []api.RejectedMessage{{ID: "5-0", Reason: "no data", Entry: "4-0"}}}
	}
	if r.URL.Query().Get("data") == "true" {
		list.Rejected[0].Data = "{}"
	}
	reply(w, http.StatusOK, list)
}

// activity has two pages with an entry each.
func (f *fakeAPI) activity(w http.ResponseWriter, r *http.Request) {
	q := r.URL.Query()
	list := api.ActivityList{Activity: []api.Activity{{
		ID: "9-0", At: epoch, Actor: q.Get("actor"), Tenant: q.Get("tenant"), Via: api.ViaAPI, Role: "operator",
		Action: "tenant.set", Object: "acme", After: []byte(`{"rps":5}`),
	}}, Cursor: "9-0"}
	if q.Get("cursor") == "9-0" {
		list = api.ActivityList{Activity: []api.Activity{{
			ID: "5-0", At: epoch, Actor: "cli:ann", Via: api.ViaCLI, Action: "key.revoke", Object: "key_b", Outcome: "failed: " + q.Get("since"),
		}}}
	}
	reply(w, http.StatusOK, list)
}

// listJobs answers with two jobs. For the key customer-7 it answers with one of them, for another
// key with none.
func (f *fakeAPI) listJobs(w http.ResponseWriter, r *http.Request) {
	q, id := r.URL.Query(), r.PathValue("id")
	state := q.Get("state")
	l := api.JobList{Jobs: []api.Job{
		{
			ID: id + ".0", Group: id, State: state, Attempts: 1,
			LastError: &api.JobError{Code: "TIMEOUT", Error: "too slow", At: epoch},
		},
		{
			ID: id + ".1", Group: id, Ordinal: 1, Key: "customer-7", State: state, Attempts: 2,
			LastError: &api.JobError{Code: "SMTP_550", Error: "no such user", At: epoch},
		},
	}}
	switch q.Get("key") {
	case "":
	case "customer-7":
		l.Jobs = l.Jobs[1:]
	default:
		l.Jobs = l.Jobs[:0]
	}
	_ = json.NewEncoder(w).Encode(l)
}
