package console

import (
	"context"
	"encoding/json"
	"fmt"
	"net/http"
	"net/url"
	"strings"
	"testing"
	"time"

	"github.com/stretchr/testify/require"
	"golang.org/x/net/html"

	"github.com/bulkaction/bulkaction/api"
	"github.com/bulkaction/bulkaction/internal/access/auth"
	"github.com/bulkaction/bulkaction/internal/messages"
)

func tenant(id string) api.Tenant {
	rps := 62.5
	return api.Tenant{
		ID: id, RPS: &rps, Weight: 2, Active: true, Unfinished: 4321, NonReady: 12, JobsPerSecond: 7.25, ActiveTenants: 3,
		Window:     api.TenantWindow{Limiter: "fixed", WindowMS: 1000, Used: 12, Limit: 25, GlobalUsed: 40, GlobalLimit: 100, NextPermitAt: &created},
		Congestion: api.TenantCongestion{Throttles: 5678, Returns: 9, MeanWaitMS: 1.5, LongestWaitMS: 3456, LastAt: &created},
	}
}

func (f *fakeBackend) Tenants(ctx context.Context, cursor string, limit int, all bool) (l api.TenantList, err error) {
	err = f.call("tenants %s %d %v", cursor, limit, all)
	f.mu.Lock()
	defer f.mu.Unlock()
	who, _ := auth.From(ctx)
	for _, id := range []string{"acme", "globex"} {
		if len(f.groups) > 0 && cursor == "" && who.Owns(id) {
			l.Tenants, l.Cursor = append(l.Tenants, tenant(id)), "next"
		}
	}
	return l, err
}

func (f *fakeBackend) Tenant(ctx context.Context, id string) (api.Tenant, error) {
	f.mu.Lock()
	defer f.mu.Unlock()
	who, _ := auth.From(ctx)
	if f.err == nil && (id != "acme" && id != "globex" || !who.Owns(id)) {
		return api.Tenant{}, fmt.Errorf("tenant %s: %w", id, api.ErrNotFound)
	}
	t := tenant(id)
	t.Paused = id == "globex"
	return t, f.err
}

// TenantHistory has three points of the tenant acme.
func (f *fakeBackend) TenantHistory(_ context.Context, id string, _ int) (api.TenantHistory, error) {
	h := api.TenantHistory{StepSeconds: 20}
	for i := range 3 {
		if id == "acme" {
			at := created.Add(time.Duration(i) * 20 * time.Second)
			h.Points = append(h.Points, api.TenantHistoryPoint{T: at, Unfinished: 10, NonReady: 4, JobsPerSecond: 1.5})
		}
	}
	return h, f.err
}

func (f *fakeBackend) PatchTenant(ctx context.Context, id string, p api.TenantPatch) (api.Tenant, error) {
	text, err := json.Marshal(p)
	if err != nil {
		return api.Tenant{}, err
	}
	if err := f.call("patch %s %s", id, text); err != nil {
		return api.Tenant{}, err
	}
	return f.Tenant(ctx, id)
}

func (f *fakeBackend) PauseTenant(_ context.Context, id string) error {
	return f.call("pause tenant %s", id)
}

func (f *fakeBackend) ResumeTenant(_ context.Context, id string) error {
	return f.call("resume tenant %s", id)
}

func TestTenants(t *testing.T) {
	w := parallelAs(t, operator)
	d := w.page("/ui/tenants")
	require.Contains(t, d.text, "acme 4,321 12 7.2 2 7.2 of 25")
	require.Contains(t, d.text, "globex")
	require.Equal(t, "/ui/tenants?cursor=next", nextOf(d))
	require.Contains(t, w.page(nextOf(d)).text, "no further tenants")
	require.Equal(t, []string{"tenants  50 false", "tenants next 50 false"}, w.backend.calls)
	require.Equal(t, "/ui/tenants/acme", w.get("/ui/tenants?id=acme").Header().Get("Location"))
	require.Equal(t, http.StatusUnprocessableEntity, w.get("/ui/tenants?id=a%20b").Code)
	require.NotContains(t, as(t, acme).page("/ui/tenants").text, "globex")
	require.Equal(t, http.StatusForbidden, as(t, metrics).get("/ui/tenants").Code)
	w.backend.groups = nil
	require.Contains(t, w.page("/ui/tenants").text, "There are no tenants yet")
	w.backend.err = api.ErrUnavailable
	require.Contains(t, w.get("/ui/tenants").Body.String(), "Redis does not answer")
}

// PreviewTenant returns the tenant with the patch. The limit of its window is the patched rps, or
// 10 permits and two more for each unit of weight.
func (f *fakeBackend) PreviewTenant(ctx context.Context, id string, p api.TenantPatch) (api.Tenant, error) {
	t, err := f.Tenant(ctx, id)
	if p.Weight.Value != nil {
		t.Weight = *p.Weight.Value
	}
	t.Window.Limit = 10 + int64(2*t.Weight)
	t.RPS, t.BasePriority, t.InFlight = p.RPS.Value, p.BasePriority.Value, p.InFlight.Value
	if t.RPS != nil {
		t.Window.Limit = int64(*t.RPS)
	}
	text, _ := json.Marshal(p)
	_ = f.call("preview %s %s", id, text)
	return t, err
}

func TestTenantsByLoad(t *testing.T) {
	w := parallelAs(t, operator)
	d := w.page("/ui/tenants?sort=backlog")
	require.Equal(t, []string{"busiest 100"}, w.backend.calls)
	require.Contains(t, d.text, "counted 2026-01-02 03:04:05 UTC")
	require.Contains(t, d.text, "globex 4,320 12 50 2 50 of 25 initech 4,319 12 7.2 2 no limit")
	require.Equal(t, "tenants:sort=backlog", attribute(d.all("body")[0], "data-topic"))
	meters := d.all("meter")
	require.Len(t, meters, 11)
	require.Equal(t, []string{"25", "50", "50 of 25 permits"}, []string{attribute(meters[1], "max"), attribute(meters[1], "value"), attribute(meters[1], "aria-label")})
	require.LessOrEqual(t, len(d.all("")), 2000)
	for path, by := range map[string]string{"/ui/tenants": "by id", "/ui/tenants?sort=backlog": "by load"} {
		for _, a := range w.page(path).all("a") {
			if attribute(a, "aria-current") == "true" {
				require.Equal(t, by, a.FirstChild.Data)
			}
		}
	}
	own := as(t, acme).page("/ui/tenants?sort=backlog")
	require.Contains(t, own.text, "acme 4,321")
	require.NotContains(t, own.text, "globex")
	for _, query := range []string{"sort=id", "sort=backlog&cursor=x"} {
		answer := w.get("/ui/tenants?" + query)
		require.Equal(t, http.StatusUnprocessableEntity, answer.Code)
		require.Contains(t, answer.Body.String(), "sort must be backlog")
	}
	w.backend.groups = nil
	require.Contains(t, w.page("/ui/tenants?sort=backlog").text, "No tenant has unfinished jobs")
}

// TestTenantPreview: a preview shows the typed settings in the form and what they would change. It
// changes nothing.
func TestTenantPreview(t *testing.T) {
	w := parallelAs(t, operator)
	for query, c := range map[string]struct{ call, text string }{
		"rps=&weight=7&base_priority=":     {`preview acme {"rps":null,"weight":7,"base_priority":null}`, "own limit 25 → share 24 of 100/window"},
		"rps=50&weight=2&base_priority=-3": {`preview acme {"rps":50,"weight":2,"base_priority":-3}`, "own limit 25 → 50 of 100/window, base priority 0 → -3"},
		"weight=2&in_flight=20":            {`preview acme {"weight":2,"in_flight":20}`, "jobs in flight no limit → 20"},
		"weight=+3+":                       {`preview acme {"weight":3}`, "share 16 of 100/window"},
	} {
		d := w.page("/ui/tenants/acme?preview=true&" + query)
		require.Contains(t, d.text, c.text)
		require.Contains(t, d.text, "Nothing is changed yet.")
		require.Contains(t, w.backend.calls, c.call)
		require.Equal(t, "tenant:acme", attribute(d.all("body")[0], "data-topic"))
		sent, err := url.ParseQuery(query)
		require.NoError(t, err)
		for _, input := range d.all("input") {
			if name := attribute(input, "name"); sent.Has(name) {
				require.Equal(t, sent.Get(name), attribute(input, "value"))
			}
			for n := input; n != nil; n = n.Parent {
				require.False(t, hasAttribute(n, "data-live"), "live data would overwrite the form")
			}
		}
		buttons := 0
		for _, b := range d.all("button") {
			if attribute(b, "formmethod") == "get" {
				require.Equal(t, "preview", attribute(b, "name"))
				buttons++
			}
		}
		require.Equal(t, 1, buttons)
	}
	require.Empty(t, w.log.entries)
	require.Empty(t, w.backend.callsOf("patch"))
	require.NotContains(t, w.page("/ui/tenants/acme?weight=7").text, "Nothing is changed yet.")
	answer := w.get("/ui/tenants/acme?preview=true&weight=x")
	require.Contains(t, answer.Body.String(), "weight")
	require.Equal(t, http.StatusUnprocessableEntity, answer.Code)
	require.Equal(t, http.StatusNotFound, w.get("/ui/tenants/nobody?preview=true").Code)

	own := as(t, acme)
	require.NotContains(t, own.page("/ui/tenants/acme?preview=true&weight=7").text, "Nothing is changed yet.")
	require.Empty(t, own.backend.callsOf("preview"))
	share := func(limit, all int64, rps *float64) api.Tenant {
		return api.Tenant{RPS: rps, Window: api.TenantWindow{Limit: limit, GlobalLimit: all}}
	}
	n := 3.0
	require.Equal(t, "share 12 → 24 of 100/window", previewOf(share(12, 100, nil), share(24, 100, nil)))
	require.Equal(t, "no limit → own limit 3/window", previewOf(share(0, 0, nil), share(3, 0, &n)))
	require.Equal(t, "own limit 3 → no limit", previewOf(share(3, 0, &n), share(0, 0, nil)))
	require.Equal(t, "no limit → no limit", previewOf(share(0, 0, nil), share(0, 0, nil)))
	bounded := share(0, 0, nil)
	bounded.InFlight = new(int64(20))
	require.Equal(t, "no limit → no limit, jobs in flight 20 → no limit", previewOf(bounded, share(0, 0, nil)))
}

func hasAttribute(n *html.Node, name string) bool {
	for _, a := range n.Attr {
		if a.Key == name {
			return true
		}
	}
	return false
}

// TestTenantsLive: the topics of tenants begin with what the reader may see of their pages. Of
// three reads of a list by load, only the first one asks the backend.
func TestTenantsLive(t *testing.T) {
	w := parallelAs(t, auth.Principal{})
	server := w.server()
	login := func(p auth.Principal) string { token, _ := w.sessions.Create(t.Context(), p); return token }
	s := w.follow(server, "tenant:acme", login(operator))
	_, data, ok := s.next()
	require.True(t, ok)
	require.Contains(t, data["load"], "4,321")
	require.Contains(t, data["groups"], "failed-1")
	require.Contains(t, data["pause"], "/ui/tenants/acme/pause")
	require.Contains(t, data["charts"], "<polygon")
	require.NotContains(t, fmt.Sprint(data), "<input")
	w.backend.set(func() { w.backend.groups = nil })
	require.Equal(t, http.StatusNotFound, w.follow(server, "tenant:acme", login(globex)).status)
	require.Equal(t, http.StatusNotFound, w.follow(server, "tenant:a%20b", login(operator)).status)
	require.Equal(t, http.StatusForbidden, w.follow(server, "tenant:acme", login(metrics)).status)

	w.backend.set(func() { w.backend.groups = newFake().groups })
	for topic, want := range map[string]string{"tenants:": "globex", "tenants:sort%3Dbacklog": "initech", "tenants:cursor%3Dnext": "no further tenants"} {
		_, data, ok = w.follow(server, topic, login(reader)).next()
		require.True(t, ok)
		require.Contains(t, data["tenants"], want)
	}
	require.Equal(t, http.StatusNotFound, w.follow(server, "tenants:sort%3Did", login(reader)).status)
	_, data, _ = w.follow(server, "tenants:", login(acme)).next()
	require.NotContains(t, data["tenants"], "globex")

	read, err := listOf(tenantPages{w.backend}.readList).live(listInterval)(t.Context(), "sort=backlog")
	require.NoError(t, err)
	before := len(w.backend.callsOf("busiest"))
	for range 3 {
		data, err := read(auth.Trust(t.Context()))
		require.NoError(t, err)
		require.NotEmpty(t, data.(tenantsData).Tenants)
	}
	require.Len(t, w.backend.callsOf("busiest"), before+1)
}

func TestTenant(t *testing.T) {
	w := parallelAs(t, operator)
	d := w.page("/ui/tenants/acme")
	for _, want := range []string{"4,321", "12 of its 25 permits", "all tenants: 40 of 100", "5,678", "3,456 ms", "failed-1 " + hostile} {
		require.Contains(t, d.text, want)
	}
	require.Subset(t, d.actions(), []string{"/ui/tenants/acme", "/ui/tenants/acme/pause"})
	values := map[string]string{}
	for _, input := range d.all("input") {
		values[attribute(input, "name")] = attribute(input, "value")
	}
	require.Equal(t, "62.5", values["rps"])
	require.Equal(t, "2", values["weight"])
	require.Empty(t, values["base_priority"])
	require.Contains(t, w.page("/ui/tenants/globex").actions(), "/ui/tenants/globex/resume")
	require.Equal(t, http.StatusNotFound, w.get("/ui/tenants/unknown").Code)

	own := as(t, acme)
	require.Contains(t, own.page("/ui/tenants/acme").text, "permits per second 62.5 · weight 2 · base priority 0 · jobs in flight no limit")
	require.NotContains(t, own.page("/ui/tenants/acme").actions(), "/ui/tenants/acme")
	require.Equal(t, http.StatusNotFound, own.get("/ui/tenants/globex").Code)
	require.Equal(t, http.StatusForbidden, own.post("/ui/tenants/acme", url.Values{"weight": {"3"}}).Code)
	require.Empty(t, own.backend.callsOf("patch"))

	d = w.page("/ui/tenants/acme")
	require.Contains(t, d.text, "Why the jobs of its oldest open group, running-1 , wait: the tenant has no permit left <b>")
	require.Contains(t, d.text, "jobs per second – Unfinished jobs")
	require.Contains(t, d.text, "failed-1.7 "+hostile)
	d = w.page("/ui/tenants/globex")
	require.Contains(t, d.text, "Only the busiest tenants have charts, from their second sample on.")

	w.backend.groups = nil
	require.Contains(t, w.page("/ui/tenants/acme").text, "The tenant has no groups.")
	w.backend.err = api.ErrUnavailable
	require.Contains(t, w.get("/ui/tenants/acme").Body.String(), "Redis does not answer")
}

func TestTenantActions(t *testing.T) {
	w := parallelAs(t, operator)
	for _, c := range []struct {
		path string
		form url.Values
		call string
	}{
		{"/ui/tenants/acme", url.Values{"rps": {"50.5"}, "weight": {" "}, "base_priority": {"-3"}}, `patch acme {"rps":50.5,"weight":null,"base_priority":-3}`},
		{"/ui/tenants/acme", url.Values{"weight": {"3"}}, `patch acme {"weight":3}`},
		{"/ui/tenants/acme/pause", nil, "pause tenant acme"},
		{"/ui/tenants/acme/resume", nil, "resume tenant acme"},
	} {
		answer := w.post(c.path, c.form)
		require.Equal(t, http.StatusSeeOther, answer.Code, answer.Body.String())
		require.Contains(t, w.backend.calls, c.call)
		to, err := url.Parse(answer.Header().Get("Location"))
		require.NoError(t, err)
		require.NotEmpty(t, noticeOf(to.Query()))
		require.Contains(t, w.page(to.String()).text, noticeOf(to.Query()))
	}
	require.Len(t, w.log.entries, 4)
	for field, text := range map[string]string{"rps": "0", "weight": "x", "base_priority": "1.5"} {
		answer := w.post("/ui/tenants/acme", url.Values{field: {text}})
		require.GreaterOrEqual(t, answer.Code, 400)
		require.Less(t, answer.Code, 500)
		require.Contains(t, answer.Body.String(), field)
		require.Contains(t, strings.ToLower(answer.Body.String()), "must be")
	}
	require.Len(t, w.log.entries, 4)
	require.Equal(t, http.StatusNotFound, w.post("/ui/tenants/a%20b/pause", nil).Code)
}

// DeadLetters returns one dead letter of each of two tenants, if the principal and q.Tenant allow
// it. For a query with a cursor, or with the type NONE, it returns no dead letter. It leaves out
// the error and the payload of each dead letter, unless the principal has the right to see
// payloads.
func (f *fakeBackend) DeadLetters(ctx context.Context, q messages.DeadLetterQuery) (l api.DeadLetterList, err error) {
	filters := ""
	for name, value := range map[string]string{"code": q.Code, "tenant": q.Tenant, "group": q.Group, "type": q.Type} {
		if value != "" {
			filters = " " + name + "=" + value + filters
		}
	}
	if !q.Since.IsZero() {
		filters += " " + q.Since.Format(time.RFC3339)
	}
	err = f.call("dead letters %s %d%s", q.Cursor, q.Limit, filters)
	f.mu.Lock()
	defer f.mu.Unlock()
	who, _ := auth.From(ctx)
	for _, id := range []string{"failed-1", "other-1"} {
		g := f.groups[id]
		if g.ID == "" || !who.Owns(g.Tenant) || q.Cursor != "" || q.Tenant != "" && q.Tenant != g.Tenant || q.Type == "NONE" {
			continue
		}
		letter := api.DeadLetter{
			EntryID: "5-0", Job: id + ".7", Group: id, Ordinal: 7, Tenant: g.Tenant, Key: hostile, Type: "NOOP", Code: hostile, Attempts: 1234, At: created,
		}
		if auth.SeesPayloads(ctx) {
			letter.Error, letter.Payload = "error "+hostile, json.RawMessage(`{"to":"</pre><script>"}`)
		}
		l.DeadLetters = append(l.DeadLetters, letter)
	}
	if l.Scanned = 10_000; len(l.DeadLetters) > 0 || q.Type == "NONE" && q.Cursor == "" {
		l.Cursor = "next&page"
	}
	return l, err
}

func (f *fakeBackend) Rejected(_ context.Context, cursor string, limit int, data bool) (l api.RejectedList, err error) {
	err = f.call("rejected %s %d %v", cursor, limit, data)
	f.mu.Lock()
	defer f.mu.Unlock()
	if len(f.groups) > 0 && cursor == "" {
		m := api.RejectedMessage{ID: "1-0", At: &created, Reason: "reason " + hostile, MessageID: hostile, Type: hostile, Bytes: 4321}
		if data {
			m.Data = "data " + hostile + strings.Repeat("x", 2*maxPayloadText)
		}
		l.Rejected, l.Cursor = []api.RejectedMessage{m, {ID: "0-1", Reason: "none"}}, "next"
	}
	return l, err
}

func nextOf(d document) string {
	for _, a := range d.all("a") {
		if attribute(a, "rel") == "next" {
			return attribute(a, "href")
		}
	}
	return ""
}

func TestDeadLetters(t *testing.T) {
	w := parallelAs(t, operator)
	d := w.page("/ui/dead-letters")
	for _, want := range []string{"of failed-1 acme", "of other-1 globex", "error " + hostile, "1,234", "</pre><script>", hostile + " 2"} {
		require.Contains(t, d.text, want)
	}
	require.Len(t, d.all("details"), 2, "payloads are behind a click")
	require.Contains(t, d.actions(), "/ui/groups/failed-1/retry")
	require.Equal(t, "/ui/dead-letters?cursor=next%26page", nextOf(d))
	require.Contains(t, w.page(nextOf(d)).text, "no further dead letters")
	require.Contains(t, w.backend.calls, "dead letters next&page 50")
	require.Equal(t, http.StatusUnprocessableEntity, w.get("/ui/dead-letters?cursor="+strings.Repeat("x", 600)).Code)

	d = as(t, reader).page("/ui/dead-letters")
	require.NotContains(t, d.text, "</pre><script>")
	require.Contains(t, d.text, "Your key does not show payloads")
	require.Empty(t, d.all("details"))
	require.NotContains(t, d.actions(), "/ui/groups/failed-1/retry")
	require.NotContains(t, as(t, acme).page("/ui/dead-letters").text, "other-1")
	require.Equal(t, http.StatusForbidden, as(t, metrics).get("/ui/dead-letters").Code)

	w.backend.groups = nil
	require.Contains(t, w.page("/ui/dead-letters").text, "No job has failed for good.")
	w.backend.err = api.ErrUnavailable
	require.Contains(t, w.get("/ui/dead-letters").Body.String(), "Redis does not answer")
}

// TestDeadLetterFilters: a page of dead letters has its filters in the call of the backend, in the
// form, in the next page's link and in the live topic. Malformed filters are refused with 422.
func TestDeadLetterFilters(t *testing.T) {
	w := parallelAs(t, operator)
	d := w.page("/ui/dead-letters?code=A%26B&tenant=acme&group=failed-1&type=NOOP&since=2026-01-02T15:04")
	require.Len(t, w.backend.calls, 1)
	for _, want := range []string{"code=A&B", "tenant=acme", "group=failed-1", "type=NOOP", "2026-01-02T15:04:00Z"} {
		require.Contains(t, w.backend.calls[0], want)
	}
	filter := "code=A%26B&group=failed-1&since=2026-01-02T15%3A04&tenant=acme&type=NOOP"
	require.Equal(t, "dead-letters:"+filter, attribute(d.all("body")[0], "data-topic"))
	require.Equal(t, "/ui/dead-letters?code=A%26B&cursor=next%26page&group=failed-1&since=2026-01-02T15%3A04&tenant=acme&type=NOOP", nextOf(d))
	values := map[string]string{}
	for _, input := range d.all("input") {
		values[attribute(input, "name")] = attribute(input, "value")
	}
	delete(values, "q") // the search field's
	require.Equal(t, map[string]string{"code": "A&B", "tenant": "acme", "group": "failed-1", "type": "NOOP", "since": "2026-01-02T15:04", "next": values["next"], "dry_run": "true",
		"filter": `{"tenant":"acme","type":"NOOP","code":"A\u0026B","since":"2026-01-02T15:04:00Z","group":"failed-1"}`}, values)
	require.NotContains(t, d.text, "other-1.7")
	require.Contains(t, d.text, "All dead letters")
	links := 0
	for _, a := range w.page("/ui/dead-letters?tenant=acme").all("a") {
		if href := attribute(a, "href"); strings.HasPrefix(href, "/ui/dead-letters?code=") {
			to, err := url.Parse(href)
			require.NoError(t, err)
			require.Equal(t, url.Values{"code": {hostile}, "tenant": {"acme"}}, to.Query())
			links++
		}
	}
	require.Equal(t, 1, links)
	require.Contains(t, w.page("/ui/dead-letters?type=NONE").text, "None of the 10,000 dead letters that were looked at fits the filters.")
	require.Contains(t, w.page("/ui/dead-letters?type=NONE&cursor=x").text, "no further dead letters that fit the filters")
	require.Contains(t, w.page("/ui/dead-letters?since=2026-01-02").text, "of failed-1")
	require.Contains(t, w.backend.calls, "dead letters  50 2026-01-02T00:00:00Z")
	for _, query := range []string{"tenant=a%20b", "group=a%20b", "type=a%20b", "since=yesterday", "since=1969-12-31", "code=" + strings.Repeat("x", 129)} {
		answer := w.get("/ui/dead-letters?" + query)
		require.Equal(t, http.StatusUnprocessableEntity, answer.Code, query)
		require.Contains(t, answer.Body.String(), query[:strings.Index(query, "=")]+" must")
	}
	own := as(t, acme).page("/ui/dead-letters")
	for _, input := range own.all("input") {
		require.NotEqual(t, "tenant", attribute(input, "name"), "a key of a tenant has no choice")
	}
	w.backend.groups = nil
	require.Contains(t, w.page("/ui/dead-letters?group=g").text, "No dead letter fits the filters.")
}

// TestLettersLive: the first event of a stream of dead letters, of rejected messages or of a job
// has what the reader may see. HTML ids in a row contain the id of the entry. Malformed and unknown
// topics get 404, and a key of a tenant gets 403 for rejected messages.
func TestLettersLive(t *testing.T) {
	w := parallelAs(t, auth.Principal{})
	server := w.server()
	login := func(p auth.Principal) string { token, _ := w.sessions.Create(t.Context(), p); return token }
	first := func(topic string, who auth.Principal) map[string]string {
		s := w.follow(server, topic, login(who))
		defer s.close()
		_, data, ok := s.next()
		require.True(t, ok, topic)
		return data
	}
	letters := first("dead-letters:", operator)["letters"]
	require.Contains(t, letters, `id="payload-failed-1.7-5-0"`)
	require.Contains(t, letters, `id="retry-other-1.7-5-0"`)
	require.NotContains(t, first("dead-letters:tenant%3Dacme", operator)["letters"], "other-1.7")
	require.NotContains(t, first("dead-letters:", acme)["letters"], "other-1.7")
	require.NotContains(t, first("dead-letters:", reader)["letters"], "payload-")
	require.NotContains(t, first("rejected:", operator)["messages"], "data-1-0")
	require.Contains(t, first("rejected:data%3Dtrue", operator)["messages"], `id="data-1-0"`)
	require.NotContains(t, first("rejected:data%3Dtrue", reader)["messages"], "data-1-0")
	job := first("job:running-1/7", operator)
	require.Contains(t, job["state"], "it waits")
	require.Contains(t, job["ends"], "&lt;/pre&gt;&lt;script&gt;")
	for topic, want := range map[string]int{
		"dead-letters:since%3Dx": 404, "dead-letters:%25zz": 404, "rejected:data%3D1": 404, "rejected:%25zz": 404,
		"job:running-1/8": 404, "job:running-1": 404, "job:/7": 404, "job:a%20b/7": 404, "job:unknown/7": 404,
	} {
		require.Equal(t, want, w.follow(server, topic, login(operator)).status, topic)
	}
	require.Equal(t, http.StatusNotFound, w.follow(server, "job:running-1/7", login(globex)).status)
	require.Equal(t, http.StatusForbidden, w.follow(server, "rejected:", login(acme)).status)

	page := newTestConsole(t).page("/ui/groups/running-1/jobs/7")
	require.Equal(t, "job:running-1/7", attribute(page.all("body")[0], "data-topic"))
	for _, input := range page.all("input") {
		for n := input; n != nil; n = n.Parent {
			require.False(t, hasAttribute(n, "data-live"), "live data would overwrite the form")
		}
	}
	read, err := listOf(letterPages{w.backend}.readDeadLetters).live(listInterval)(t.Context(), "code=A")
	require.NoError(t, err)
	before := len(w.backend.callsOf("dead"))
	for range 3 {
		_, err := read(auth.Trust(t.Context()))
		require.NoError(t, err)
	}
	require.Len(t, w.backend.callsOf("dead"), before+1, "a list is read seldom")
}

func TestRejected(t *testing.T) {
	w := parallelAs(t, operator)
	d := w.page("/ui/rejected")
	for _, want := range []string{"reason " + hostile, "4,321", "0-1 none", "With data"} {
		require.Contains(t, d.text, want)
	}
	require.Empty(t, d.all("details"))
	d = w.page("/ui/rejected?data=true")
	require.Contains(t, d.text, "data "+hostile)
	require.Contains(t, d.text, "x…")
	require.Len(t, d.all("details"), 1, "data is behind a click")
	require.Equal(t, "/ui/rejected?cursor=next&data=true", nextOf(d))
	require.Contains(t, w.page(nextOf(d)).text, "no further rejected messages")
	require.Equal(t, []string{"rejected  50 false", "rejected  50 true", "rejected next 50 true"}, w.backend.calls)
	require.Equal(t, http.StatusUnprocessableEntity, w.get("/ui/rejected?data=1").Code)

	without := as(t, reader)
	require.NotContains(t, without.page("/ui/rejected?data=true").text, "data "+hostile)
	require.Equal(t, []string{"rejected  50 false"}, without.backend.calls)
	for _, who := range []auth.Principal{acme, metrics} {
		require.Equal(t, http.StatusForbidden, as(t, who).get("/ui/rejected").Code)
	}
	w.backend.groups = nil
	require.Contains(t, w.page("/ui/rejected").text, "No message was rejected.")
	w.backend.err = api.ErrUnavailable
	require.Contains(t, w.get("/ui/rejected").Body.String(), "Redis does not answer")
}
