package console

import (
	"context"
	"encoding/json"
	"net/http"
	"net/url"
	"strings"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/bulkaction/bulkaction/api"
	"github.com/bulkaction/bulkaction/internal/access/auth"
	"github.com/bulkaction/bulkaction/internal/web/httpapi"
)

// DeadLetters returns one dead letter of each of two tenants, if the principal and q.Tenant allow
// it. For a query with a cursor, or with the type NONE, it returns no dead letter. It leaves out
// the error and the payload of each dead letter, unless the principal has the right to see
// payloads.
func (f *fakeBackend) DeadLetters(ctx context.Context, q httpapi.DeadLetterQuery) (l api.DeadLetterList, err error) {
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
	t.Parallel()
	w := as(t, operator)
	d := w.page("/ui/dead-letters")
	for _, want := range []string{"failed-1.7", "other-1.7", "error " + hostile, "1,234", "</pre><script>", hostile + " 2"} {
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
	t.Parallel()
	w := as(t, operator)
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
	require.Equal(t, map[string]string{"code": "A&B", "tenant": "acme", "group": "failed-1", "type": "NOOP", "since": "2026-01-02T15:04", "next": values["next"]}, values)
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
	require.Contains(t, w.page("/ui/dead-letters?since=2026-01-02").text, "failed-1.7")
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
	t.Parallel()
	w := as(t, auth.Principal{})
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
	read, err := letterPages{w.backend}.openDeadLetters(t.Context(), "code=A")
	require.NoError(t, err)
	before := len(w.backend.callsOf("dead"))
	for range 3 {
		_, err := read(auth.Trust(t.Context()))
		require.NoError(t, err)
	}
	require.Len(t, w.backend.callsOf("dead"), before+1, "a list is read seldom")
}

func TestRejected(t *testing.T) {
	t.Parallel()
	w := as(t, operator)
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
