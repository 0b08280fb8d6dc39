package console

import (
	"crypto/tls"
	"fmt"
	"io/fs"
	"maps"
	"net/http"
	"net/http/httptest"
	"net/url"
	"os"
	"regexp"
	"slices"
	"strings"
	"testing"

	"github.com/stretchr/testify/require"

	"github.com/bulkaction/bulkaction/api"
	"github.com/bulkaction/bulkaction/internal/access/auth"
	"github.com/bulkaction/bulkaction/internal/web/httpapi"
)

// paths are the addresses of the pages that these tests look at, also of two that do not exist.
var paths = []string{
	"/ui/", "/ui/groups", "/ui/groups?tenant=acme&status=failed&cursor=x", "/ui/groups/failed-1", "/ui/groups/running-1",
	"/ui/groups/running-1/jobs/7", "/ui/groups/failed-1/jobs?state=failed", "/ui/groups/failed-1/failures", "/ui/submit",
	"/ui/dead-letters", "/ui/callbacks", "/ui/callbacks?state=pending", "/ui/rejected?data=true", "/ui/tenants", "/ui/tenants/acme", "/ui/tenants/globex",
	"/ui/guards", "/ui/guards/pool%2Fsmtp", "/ui/guards/lock%2Freport?state=off", "/ui/rooms", "/ui/rooms/sale", "/ui/rooms/closed",
	"/ui/limits", "/ui/limits?type=HTTP", "/ui/workers", "/ui/audit", "/ui/activity?actor=key_a", "/ui/keys", "/ui/groups/unknown", "/ui/nothing", "/ui/?done=groups&n=3&failed=1",
}

// TestTablesAreComplete: each page, action and topic names the scope that a caller needs, and has a
// function or a page that answers.
func TestTablesAreComplete(t *testing.T) {
	t.Parallel()
	c := newTestConsole(t).console
	known := append(slices.Clone(auth.Scopes), open)
	for _, p := range c.pages {
		require.Contains(t, known, p.scope, p.path)
		require.Equal(t, p.path == "/openapi.yaml", p.view == nil, p.path)
	}
	for _, a := range c.allActions() {
		require.Contains(t, auth.Scopes, a.scope, a.path)
		require.NotEqual(t, a.do == nil, a.show == nil, a.path)
	}
	for name, topic := range c.topics() {
		require.Contains(t, known, topic.scope, name)
		require.NotEmpty(t, c.views().live[topic.page], name)
	}
	require.Panics(t, func() { c.authorized("", nil) })
}

// TestPagesAreSafe: no page of paths has inline styles, scripts or handlers, an iframe, a link to
// another host, or an HTML id twice. Pages of a group show the hostile text literally.
func TestPagesAreSafe(t *testing.T) {
	t.Parallel()
	for _, path := range paths {
		t.Run(path, func(t *testing.T) {
			t.Parallel()
			d := parse(t, newTestConsole(t).get(path).Body.String())
			ids := map[string]bool{}
			for _, n := range d.all("") {
				for _, a := range n.Attr {
					require.NotEqual(t, "style", a.Key)
					require.False(t, strings.HasPrefix(a.Key, "on"), a.Key)
					if a.Key == "href" || a.Key == "src" || a.Key == "action" {
						require.Regexp(t, `^(/ui/|#|/openapi\.yaml$)`, a.Val)
					}
					if a.Key == "id" {
						require.False(t, ids[a.Val], "two elements have the id "+a.Val)
						ids[a.Val] = true
					}
				}
				if n.Data == "script" {
					require.Nil(t, n.FirstChild, "a script in the page")
				}
				require.NotContains(t, []string{"style", "iframe", "i"}, n.Data)
			}
			if strings.Contains(path, "groups/") && !strings.Contains(path, "unknown") {
				require.Contains(t, d.text, hostile)
			}
		})
	}
}

// TestSources: the templates and app.css have no inline styles, scripts and handlers. The Go files
// convert nothing to template.HTML or a similar type.
func TestSources(t *testing.T) {
	t.Parallel()
	files, err := fs.Glob(templateFiles, "templates/*.gohtml")
	require.NoError(t, err)
	require.NotEmpty(t, files)
	bad := regexp.MustCompile(`(?i)\sstyle=|<style|\son[a-z]+=|<script>|javascript:|https?://[^w]|@import`)
	for _, file := range append(files, "assets/app.css") {
		text, err := os.ReadFile(file)
		require.NoError(t, err)
		require.Empty(t, bad.FindString(string(text)), file)
	}
	require.NotEmpty(t, bad.FindString(`<p style="x">`), "the search finds something")
	sources, err := fs.Glob(os.DirFS("."), "*.go")
	require.NoError(t, err)
	conversion := regexp.MustCompile(`template\.(HTML|HTMLAttr|JS|JSStr|CSS|URL|Srcset)\b`)
	for _, file := range sources {
		if strings.HasSuffix(file, "_test.go") {
			continue
		}
		text, err := os.ReadFile(file)
		require.NoError(t, err)
		require.Empty(t, conversion.FindString(string(text)), file)
	}
}

func TestHeaders(t *testing.T) {
	w := parallel(t)
	want := map[string]string{
		"Content-Security-Policy":      "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self' data:; connect-src 'self'; form-action 'self'; base-uri 'none'; frame-ancestors 'none'",
		"Referrer-Policy":              "no-referrer",
		"Cross-Origin-Opener-Policy":   "same-origin",
		"Cross-Origin-Resource-Policy": "same-origin",
		"Permissions-Policy":           "camera=(), geolocation=(), microphone=()",
		"X-Content-Type-Options":       "nosniff",
		"Strict-Transport-Security":    "",
	}
	page, script := w.get("/ui/"), w.get(assetPath("app.js"))
	for name, value := range want {
		require.Equal(t, value, page.Header().Get(name), name)
		require.Equal(t, value, script.Header().Get(name), name)
	}
	require.Equal(t, "no-store", page.Header().Get("Cache-Control"))
	require.Equal(t, "text/html; charset=utf-8", page.Header().Get("Content-Type"))
	require.Equal(t, "public, max-age=31536000, immutable", script.Header().Get("Cache-Control"))
	require.Equal(t, "text/javascript; charset=utf-8", script.Header().Get("Content-Type"))
	for _, name := range slices.Collect(maps.Keys(assets)) {
		if name != "submit.js" { // only the page Submit loads it
			require.Contains(t, page.Body.String()+"app.js", assetPath(name)[len("/ui/assets/"):])
		}
		require.NotEmpty(t, w.get(assetPath(name)).Header().Get("Content-Type"))
	}
	stale := w.get("/ui/assets/0000000000000000/app.js")
	require.Equal(t, http.StatusNotFound, stale.Code)
	require.NotContains(t, stale.Header().Get("Cache-Control"), "immutable")

	w.console.TLS = &tls.Config{}
	require.Equal(t, "max-age=31536000", w.get("/ui/").Header().Get("Strict-Transport-Security"))
}

// TestRoles: for five keys, the links of the navigation, whether the overview has the form that
// pauses a type, and whether a running group can be cancelled and the form for submissions opened.
func TestRoles(t *testing.T) {
	t.Parallel()
	nav := func(d document) (names []string) {
		for _, a := range d.all("a") {
			if a.Parent.Data == "li" {
				names = append(names, a.FirstChild.Data)
			}
		}
		return names
	}
	for who, want := range map[auth.Principal][]string{
		admin:    {"Overview", "Groups", "Dead letters", "Operations", "Callbacks", "Submit", "Tenants", "Limits", "Guards", "Rooms", "Workers", "Rejected", "Audit", "Activity", "Keys", "API"},
		operator: {"Overview", "Groups", "Dead letters", "Operations", "Callbacks", "Tenants", "Limits", "Guards", "Rooms", "Workers", "Rejected", "Audit", "API"},
		acme:     {"Overview", "Groups", "Dead letters", "Operations", "Callbacks", "Submit", "Tenants", "API"},
		reader:   {"Overview", "Groups", "Dead letters", "Operations", "Callbacks", "Tenants", "Limits", "Guards", "Rooms", "Workers", "Rejected", "Audit", "API"}, metrics: {"Overview", "Workers", "API"},
	} {
		t.Run(string(who.Role), func(t *testing.T) {
			t.Parallel()
			w := as(t, who)
			d := w.page("/ui/")
			require.Equal(t, want, nav(d))
			require.Equal(t, who.Role == auth.Admin, slices.Contains(d.actions(), "/ui/types/NOOP/pause"))
			require.Equal(t, who.Tenant == "", strings.Contains(d.text, "Workers busy"), "a tenant sees no figures of the system")
			require.Equal(t, who.Tenant != "" || who.Role == auth.Metrics, !strings.Contains(d.text, "globex"))
			if !who.May(auth.Read) {
				require.Equal(t, http.StatusForbidden, w.get("/ui/groups").Code)
				return
			}
			group := w.page("/ui/groups/running-1")
			require.Equal(t, who.May(auth.Control), slices.Contains(group.actions(), "/ui/groups/running-1/cancel"))
			require.Equal(t, http.StatusOK, w.get("/ui/groups").Code)
			answer := w.post("/ui/groups/running-1/cancel", nil)
			if who.May(auth.Control) {
				require.Equal(t, http.StatusSeeOther, answer.Code)
			} else {
				require.Equal(t, http.StatusForbidden, answer.Code)
				require.NotContains(t, w.backend.calls, "cancel running-1")
			}
			require.Equal(t, who.May(auth.Submit), w.get("/ui/submit").Code == http.StatusOK)
		})
	}
}

// TestTenancy: for a key of a tenant, another tenant's group looks like one that does not exist.
func TestTenancy(t *testing.T) {
	w := parallelAs(t, globex)
	foreign, unknown := w.get("/ui/groups/failed-1"), w.get("/ui/groups/unknown-")
	require.Equal(t, http.StatusNotFound, foreign.Code)
	require.Equal(t, strings.ReplaceAll(unknown.Body.String(), "unknown-", "failed-1"), foreign.Body.String())
	require.Equal(t, http.StatusNotFound, w.post("/ui/groups/failed-1/cancel", nil).Code)
	require.Equal(t, http.StatusNotFound, w.get("/ui/groups/failed-1/jobs/7").Code)
	require.Empty(t, w.log.entries)
}

// TestOverview: the overview shows figures, missing roles and failed groups, and without groups how
// to submit one.
func TestOverview(t *testing.T) {
	w := parallel(t)
	d := w.page("/ui/")
	for _, want := range []string{
		"Waiting 1,001", "Running 10", "Workers busy 4 of 10", "Permits used 7 of 100/s", "waiting 1,001 non-ready 300 ready 200 in flight 10",
		"No live process has the role aggregator", "HTTP paused", "failed-1", "none",
	} {
		require.Contains(t, d.text, want)
	}
	require.Equal(t, "overview", attribute(d.all("body")[0], "data-topic"))
	require.NotContains(t, d.text, "role worker")
	w = newTestConsole(t)
	w.backend.groups = nil
	empty := w.page("/ui/")
	require.Contains(t, empty.text, "bulkaction submit --type NOOP --payload '{}' --wait")
	require.Contains(t, empty.text, "No group has the status FAILED.")
}

func TestGroups(t *testing.T) {
	w := parallel(t)
	d := w.page("/ui/groups?tenant=acme&status=running")
	require.Equal(t, api.StatusRunning, w.backend.queries[0].Status)
	require.Equal(t, 50, w.backend.queries[0].Limit)
	require.Contains(t, d.text, "running-1")
	require.NotContains(t, d.text, "failed-1")
	require.NotContains(t, w.page("/ui/groups").text, "0001", "a group without a time")
	require.Equal(t, "groups:status=RUNNING&tenant=acme", attribute(d.all("body")[0], "data-topic"))
	var next string
	for _, a := range d.all("a") {
		if attribute(a, "rel") == "next" {
			next = attribute(a, "href")
		}
	}
	require.Equal(t, "/ui/groups?cursor=next%26page&status=RUNNING&tenant=acme", next)
	w.page(next)
	require.Equal(t, "next&page", w.backend.queries[2].Cursor)
	for path, text := range map[string]string{
		"/ui/groups?tenant=no%20id":                                  "tenant must match",
		"/ui/groups?status=odd":                                      "status must be one of CREATED, ",
		"/ui/groups?cursor=" + strings.Repeat("x", 600):              "cursor must be",
		"/ui/groups/failed-1/jobs?ordinal=x":                         "The ordinal must be a whole number",
		"/ui/groups/failed-1/jobs?ordinal=" + "99999999999999999999": "The ordinal must be a whole number",
	} {
		answer := w.get(path)
		require.Equal(t, http.StatusUnprocessableEntity, answer.Code, path)
		require.Contains(t, answer.Body.String(), text)
	}
	require.Equal(t, "/ui/groups/failed-1/jobs/7", w.get("/ui/groups/failed-1/jobs?ordinal=7").Header().Get("Location"))
	require.Equal(t, http.StatusNotFound, w.get("/ui/groups/failed-1/jobs/8").Code)
	require.Equal(t, http.StatusNotFound, w.get("/ui/groups/failed-1/jobs/x").Code)
}

func TestGroup(t *testing.T) {
	w := parallel(t)
	d := w.page("/ui/groups/running-1")
	for _, want := range []string{
		"RUNNING paused", "Its next job: the tenant has no permit left <b>", "Jobs per second 40", "Ends in 13 s", "Ended 50% of 1,000",
		"TIMEOUT 10", "job 7 PERMANENT " + hostile, "open for more jobs",
	} {
		require.Contains(t, d.text, want)
	}
	require.NotContains(t, w.get("/ui/groups/running-1").Body.String(), `class="why"`, "a used-up limit is no warning")
	for reason, warns := range map[string]bool{
		"": false, api.WhyCapacity: false, api.WhyFairness: false, api.WhyRetry: false,
		api.WhyPaused: true, api.WhyNoProcessor: true, api.WhyMissingRole: true,
	} {
		require.Equal(t, warns, holdsUp(reason), reason)
	}
	require.Subset(t, d.actions(), []string{"/ui/groups/running-1/resume", "/ui/groups/running-1/cancel", "/ui/groups/running-1/seal"})
	d = w.page("/ui/groups/failed-1")
	require.Contains(t, d.text, "Retry 100 failed jobs")
	require.Contains(t, d.text, "cost 12.5")
	require.Contains(t, d.text, "59 s after running")
	require.Contains(t, d.text, "callback javascript:alert(2)//"+hostile, "a text, no link")
	require.NotContains(t, d.text, "Why it waits")
	require.Contains(t, d.actions(), "/ui/groups/failed-1/retry")
	require.NotContains(t, d.actions(), "/ui/groups/failed-1/cancel")
	var asks []string
	for _, b := range d.all("button") {
		asks = append(asks, attribute(b, "data-confirm"))
	}
	require.Contains(t, asks, "Run 100 failed jobs of failed-1 again.")
	var links []string
	for _, a := range d.all("a") {
		links = append(links, attribute(a, "href"))
	}
	require.Contains(t, links, "/ui/groups?tenant=acme&tag=a%3dx%26%20%3cb%3e")
}

// TestWithoutPayloads: the page of a job says to a reader without the right to payloads that it
// shows no payloads, results and error texts, and says nothing of it to an operator with this right.
func TestWithoutPayloads(t *testing.T) {
	t.Parallel()
	require.Contains(t, as(t, reader).page("/ui/groups/failed-1/jobs/7").text, "Your key does not show payloads, results and error texts.")
	require.NotContains(t, as(t, operator).page("/ui/groups/failed-1/jobs/7").text, "Your key does not")
}

// TestActions: each action on groups and types is carried out, is recorded in the activity log, and
// leads to a page that says so. A refused form is not recorded. A conflict and an outage are shown.
func TestActions(t *testing.T) {
	w := parallelAs(t, admin)
	for path, call := range map[string]string{
		"/ui/groups/running-1/pause": "pause running-1", "/ui/groups/running-1/resume": "resume running-1",
		"/ui/groups/running-1/cancel": "cancel running-1", "/ui/groups/failed-1/retry": "retry failed-1",
		"/ui/groups/running-1/seal": "seal running-1", "/ui/types/NOOP/pause": "pause type NOOP", "/ui/types/NOOP/resume": "resume type NOOP",
	} {
		answer := w.post(path, nil)
		require.Equal(t, http.StatusSeeOther, answer.Code, path)
		require.Contains(t, w.backend.calls, call)
		require.Contains(t, w.page(answer.Header().Get("Location")).text, noticeOf(url.Values{"done": {answer.Header().Get("Location")[strings.Index(answer.Header().Get("Location"), "done=")+5:]}}))
	}
	require.Len(t, w.log.entries, 7)
	w.post("/ui/groups/failed-1/retry", url.Values{"code": {"E1"}})
	require.Contains(t, w.backend.calls, "retry E1 failed-1")
	entries := len(w.log.entries)
	answer := w.post("/ui/groups/failed-1/retry", url.Values{"code": {strings.Repeat("x", httpapi.MaxCodeLength+1)}})
	require.Equal(t, http.StatusUnprocessableEntity, answer.Code)
	require.Contains(t, answer.Body.String(), "code must be at most 128 bytes")
	require.Len(t, w.log.entries, entries, "a long code is in the activity log")

	require.Equal(t, http.StatusNotFound, w.do(httptest.NewRequestWithContext(t.Context(), http.MethodPut, "/ui/groups/running-1/pause", nil)).Code)
	w.backend.groups["conflict-1"] = api.Group{ID: "conflict-1", Tenant: "acme"}
	answer = w.post("/ui/groups/conflict-1/cancel", nil)
	require.Equal(t, http.StatusConflict, answer.Code)
	require.Contains(t, answer.Body.String(), "has ended")
	w.backend.err = api.ErrUnavailable
	answer = w.post("/ui/types/NOOP/pause", nil)
	require.Equal(t, http.StatusServiceUnavailable, answer.Code)
	require.Contains(t, answer.Body.String(), "The action may have been carried out")
}

func TestBulkActions(t *testing.T) {
	w := parallel(t)
	w.backend.groups["conflict-1"] = api.Group{ID: "conflict-1", Tenant: "acme"}
	answer := w.post("/ui/groups", url.Values{"command": {"cancel"}, "id": {"running-1", "conflict-1", "unknown", "failed-1", "running-1"}, "next": {"/ui/groups?tenant=acme"}})
	require.Equal(t, http.StatusSeeOther, answer.Code, answer.Body.String())
	require.Equal(t, "/ui/groups?done=groups&failed=2&n=2&tenant=acme", answer.Header().Get("Location"))
	require.Equal(t, []string{"cancel failed-1", "cancel running-1"}, w.backend.calls)
	require.Contains(t, w.page(answer.Header().Get("Location")).text, "Done with 2 groups. 2 groups did not take the command")

	var many []string
	for i := range 51 {
		many = append(many, fmt.Sprint("g", i))
	}
	for _, form := range []url.Values{
		{"command": {"pause"}}, {"command": {"drop"}, "id": {"a"}}, {"command": {"seal"}, "id": {"a"}}, {"id": {"a"}},
		{"command": {"pause"}, "id": many}, {"command": {"pause"}, "id": {"a b"}},
	} {
		form.Set("next", "/ui/groups?tenant=acme")
		answer = w.post("/ui/groups", form)
		require.Equal(t, http.StatusUnprocessableEntity, answer.Code, form)
		require.Contains(t, answer.Body.String(), `href="/ui/groups?tenant=acme"`)
	}
	answer = w.post("/ui/groups", url.Values{"command": {"pause"}, "id": {"running-1"}, "next": {"https://example.com/ui/groups"}})
	require.True(t, strings.HasPrefix(answer.Header().Get("Location"), "/ui/groups?"))
}

// TestRedisAway: while Redis is away, a page that was shown before has its last data and their
// time, and another page says that Redis is away. The text of an unknown error is not shown.
func TestRedisAway(t *testing.T) {
	w := parallel(t)
	require.Contains(t, w.page("/ui/groups").text, "running-1")
	w.backend.err = api.ErrUnavailable
	answer := w.get("/ui/groups")
	require.Equal(t, http.StatusServiceUnavailable, answer.Code)
	d := parse(t, answer.Body.String())
	require.Contains(t, d.text, "running-1")
	require.Contains(t, d.text, "Redis does not answer. What you see is of")
	other := parse(t, w.get("/ui/groups/running-1").Body.String())
	require.Contains(t, other.text, "Redis is away")
	require.Contains(t, other.text, "tries again")
	w.backend.err = nil
	require.Equal(t, http.StatusOK, w.get("/ui/groups").Code)

	w.backend.err = fmt.Errorf("secret of the store")
	answer = w.get("/ui/groups")
	require.Equal(t, http.StatusInternalServerError, answer.Code)
	require.NotContains(t, answer.Body.String(), "secret")
}

// TestLastViewsArePrivate: in an outage, a key of a tenant does not get the list of groups that an
// admin has seen. At most maxLast views are kept.
func TestLastViewsArePrivate(t *testing.T) {
	w := parallelAs(t, admin)
	w.page("/ui/groups")
	w.backend.err = api.ErrUnavailable
	w.cookie, _ = w.sessions.Create(t.Context(), acme)
	require.NotContains(t, w.get("/ui/groups").Body.String(), "other-1")
	for i := range 3 * maxLast {
		w.console.last.Put(keyOf(httptest.NewRequestWithContext(t.Context(), http.MethodGet, fmt.Sprint("/ui/?n=", i), nil)), view{})
	}
	require.Len(t, w.console.last.All(), maxLast)
}

func TestNumbers(t *testing.T) {
	t.Parallel()
	for want, got := range map[string]string{
		"0": count(0), "-1,234,567": count(-1234567), "999": count(999), "1,000": count(int64(1000)),
		"0.25": decimal(0.25), "7.5": decimal(7.5), "1,235": decimal(1234.5678), "–": decimal(nan()), "1e+20": decimal(1e20),
		"99%": percent(999, 1000), "0.1%": percent(1, 1_000_000), "100%": percent(3, 3), "0%": percent(0, 3), "4.2%": percent(42, 1000),
		"0 s": duration(0), "250 ms": duration(0.25), "1.5 s": duration(1.5), "59 s": duration(59), "2 min 5 s": duration(125),
		"1 h": duration(3600), "1 d 1 h": duration(90000), "1 job": plural(1, "job", "jobs"), "2,000 jobs": plural(2000, "job", "jobs"),
	} {
		require.Equal(t, want, got)
	}
	_, err := pick("a")
	require.Error(t, err)
}

func nan() float64 { z := 0.0; return z / z }

// TestWayBackFromARefusedForm: the error page of a refused action links back to the page of the
// action. If the action has no page, it links to the overview.
func TestWayBackFromARefusedForm(t *testing.T) {
	w := parallel(t)
	for path, want := range map[string]string{
		"/ui/types/NO%20TYPE/pause": "/ui/", "/ui/groups/conflict-1/pause": "/ui/groups/conflict-1",
	} {
		answer := w.post(path, url.Values{"rps": {"none"}})
		require.GreaterOrEqual(t, answer.Code, 400, path)
		found := false
		for _, link := range parse(t, answer.Body.String()).all("a") {
			found = found || attribute(link, "class") == "button" && attribute(link, "href") == want
		}
		require.True(t, found, "%s: %s", path, answer.Body)
	}
	require.Equal(t, http.StatusMethodNotAllowed, w.do(httptest.NewRequestWithContext(t.Context(), http.MethodHead, "/ui/events?topics=overview", nil)).Code)
}

// TestLinkToTheAPI: the navigation leads to the API's document, if this address serves it.
func TestLinkToTheAPI(t *testing.T) {
	w := parallel(t)
	require.Contains(t, w.get("/ui/").Body.String(), `<a href="/openapi.yaml">API</a>`)
	w.with(func(o *httpapi.Options) { o.OnlyUI = true })
	require.NotContains(t, w.get("/ui/").Body.String(), "/openapi.yaml")
}

// TestCommandLinesNameTheAPI: command lines of bulkaction have --api unless the API has the default
// address, also in live regions.
func TestCommandLinesNameTheAPI(t *testing.T) {
	w := parallel(t)
	w.backend.groups = nil
	commandsOn := func(host string) (texts []string) {
		r := httptest.NewRequestWithContext(t.Context(), http.MethodGet, "http://"+host+"/ui/groups", nil)
		for _, code := range parse(t, w.do(r).Body.String()).all("code") {
			texts = append(texts, code.FirstChild.Data)
		}
		return texts
	}
	plain := "bulkaction submit --type NOOP --payload '{}' --wait"
	for host, want := range map[string]string{
		"localhost:8080": plain, "127.0.0.1:8080": plain, "localhost:9090": plain + " --api http://localhost:9090",
		"jobs.example.com": plain + " --api http://jobs.example.com", "a'b": plain + " --api http://ADDRESS",
	} {
		require.Equal(t, []string{want}, commandsOn(host), host)
	}
	server := w.server()
	_, data, _ := w.follow(server, "groups:", "").next()
	require.Contains(t, data["rows"], "--api "+server)
	w.console.Secure = true
	require.Equal(t, []string{plain + " --api https://localhost:8080"}, commandsOn("localhost:8080"))
	w.console.OnlyUI = true
	require.Equal(t, []string{plain + " --api URL"}, commandsOn("localhost:8080"))
	require.Contains(t, w.get("/ui/audit").Body.String(), "audit --redis-url URL<", "this command asks Redis")
}
