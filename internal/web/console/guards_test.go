package console

import (
	"context"
	"fmt"
	"net/http"
	"net/http/httptest"
	"net/url"
	"strings"
	"testing"

	"github.com/stretchr/testify/require"

	"github.com/bulkaction/bulkaction/api"
	"github.com/bulkaction/bulkaction/guard"
	"github.com/bulkaction/bulkaction/internal/access/auth"
)

func (f *fakeBackend) Guards(_ context.Context, q guard.Query) (l api.GuardList, err error) {
	err = f.call("guards %s %s %d", q.Kind, q.Cursor, q.Limit)
	f.mu.Lock()
	defer f.mu.Unlock()
	if len(f.groups) == 0 || q.Cursor != "" || q.Kind == "key" {
		return l, err
	}
	counters := map[string]int64{"granted": 123456, "denied": 77, "lost": 3}
	l.Guards = []api.GuardSummary{
		{Name: "pool/smtp", Members: 1500, Free: 1200, Cooling: 250, Leases: 45, Queue: 6, Counters: counters},
		{Name: "lock/report", Members: 1, Free: 1, Counters: map[string]int64{}},
	}
	l.Cursor = "0.7.pool/smtp"
	return l, err
}

func (f *fakeBackend) Guard(_ context.Context, name string) (api.Guard, error) {
	f.mu.Lock()
	defer f.mu.Unlock()
	f.reads++
	if f.err != nil {
		return api.Guard{}, f.err
	}
	three := int64(3)
	g := api.Guard{Name: name, Rev: 4, Counters: map[string]int64{"granted": 1000, "denied": 20, "queued": 7, "expired": 5, "lost": 2, "stale": 1}}
	switch name {
	case "pool/smtp":
		g.Spec = api.GuardSpec{Limiter: "sliding", Permits: 80, WindowMS: 600_000, Failures: 3, OpenForMS: 60_000, Successes: 1, Concurrency: 2, LeaseMS: 30_000, MaxWaitMS: 60_000, MaxQueue: 10_000}
		g.Queue = api.GuardQueue{Length: 9, OldestMS: 2500}
		g.Members = []api.GuardMember{
			{ID: "dora", State: "free", Breaker: "closed", Left: &three},
			{ID: "bob", State: "cooling", Breaker: "open", OpenUntil: &created, Failures: 3, Left: &three, NextAt: &created},
			{ID: "carl" + hostile, State: "off", Breaker: "half_open", LastUsedAt: &created, Uses: 4321},
			{ID: "alice", State: "busy", Breaker: "closed", Held: 2, Left: &three, Uses: 12},
		}
	case "limiter/api":
		g.Spec = api.GuardSpec{Limiter: "token", Permits: 5, WindowMS: 1000, Burst: 10}
	case "lock/report":
		g.Spec = api.GuardSpec{Limiter: "none", Concurrency: 1}
		g.Members = []api.GuardMember{{ID: "1", State: "free", Breaker: "closed"}}
	case "pool/large":
		g.Spec = api.GuardSpec{Limiter: "token", Permits: 5, WindowMS: 1000, Burst: 10}
		for i := range 2000 {
			g.Members = append(g.Members, api.GuardMember{ID: fmt.Sprintf("m%04d", i), State: "free", Breaker: "closed"})
		}
	default:
		return g, fmt.Errorf("guard %s: %w", name, api.ErrNotFound)
	}
	return g, nil
}

func (f *fakeBackend) ControlGuard(_ context.Context, name, member string, do guard.Action) error {
	if member == "nobody" {
		return fmt.Errorf("guard %s: member %s: %w", name, member, api.ErrNotFound)
	}
	return f.call("%s %s of %s", do, member, name)
}

func TestGuards(t *testing.T) {
	w := parallelAs(t, reader)
	d := w.page("/ui/guards")
	require.Contains(t, d.text, "pool/smtp 1,500 1,200 250 45 6 123,456 77 3")
	require.Contains(t, d.text, "lock/report 1 1 0 0 0 0 0 0")
	require.Equal(t, "guards:", attribute(d.all("body")[0], "data-topic"))
	require.Equal(t, "/ui/guards?cursor=0.7.pool%2Fsmtp", nextOf(d))
	require.Contains(t, w.page(nextOf(d)).text, "no further guards")
	require.Contains(t, w.page("/ui/guards?kind=key").text, "There is no guard of the kind key.")
	require.Equal(t, []string{"guards   50", "guards  0.7.pool/smtp 50", "guards key  50"}, w.backend.calls)
	require.Equal(t, http.StatusUnprocessableEntity, w.get("/ui/guards?kind=odd").Code)
	var links []string
	for _, a := range d.all("a") {
		links = append(links, attribute(a, "href"))
	}
	require.Contains(t, links, "/ui/guards/pool%2Fsmtp")
	w.backend.groups = nil
	require.Contains(t, w.page("/ui/guards").text, "BULKACTION_SMTP_ACCOUNTS_FILE=accounts.yaml bulkaction dev")
	w.backend.err = api.ErrUnavailable
	require.Contains(t, w.get("/ui/guards").Body.String(), "Redis does not answer")
	for _, who := range []auth.Principal{acme, metrics, service} {
		require.Equal(t, http.StatusForbidden, as(t, who).get("/ui/guards").Code, who.Role)
		require.Equal(t, http.StatusForbidden, as(t, who).get("/ui/guards/pool%2Fsmtp").Code, who.Role)
	}
}

func TestLimiter(t *testing.T) {
	d := parallelAs(t, reader).page("/ui/guards/limiter%2Fapi")
	require.Contains(t, d.text, "limit 5 per 1 s, bursts of 10 for each key.")
	require.Contains(t, d.text, "bulkaction guard show limiter/api --keys")
	require.NotContains(t, d.text, "Members")
}

func TestGuard(t *testing.T) {
	w := parallelAs(t, reader)
	d := w.page("/ui/guards/pool%2Fsmtp")
	for _, want := range []string{
		"limit 80 in any 10 min", "breaker opens after 3 failures in a row for 1 min, closes after 1 success", "leases at once 2",
		"queue of at most 10,000 , for at most 1 min", "Members 4", "Breakers not closed 2", "Leases 2", "Queue 9", "Oldest waiter 2.5 s",
		"Granted 1,000", "Denied 20", "Queued 7", "Expired in the queue 5", "Leases lost 2", "Stale releases 1",
		"alice busy closed 0 3 2 12 never –", "bob cooling open until 2026-01-02 03:04:05 UTC 3 3 0 0 never 2026-01-02",
		"carl" + hostile + " off half open 0 no limit 0 4,321 2026-01-02",
	} {
		require.Contains(t, d.text, want)
	}
	require.Less(t, strings.Index(d.text, "alice"), strings.Index(d.text, "dora"), "by id")
	require.Empty(t, formsTo(d, "/ui/guards"), "a reader controls nothing")
	require.Equal(t, "guard:pool/smtp?", attribute(d.all("body")[0], "data-topic"))

	d = w.page("/ui/guards/smtp?state=not_closed&prefix=b")
	require.Contains(t, d.text, "bob")
	require.NotContains(t, d.text, "alice")
	require.NotContains(t, d.text, "carl")
	require.Equal(t, "guard:pool/smtp?prefix=b&state=not_closed", attribute(d.all("body")[0], "data-topic"))
	require.Contains(t, w.page("/ui/guards/lock%2Freport?state=off").text, "No member fits the filters.")
	require.Contains(t, w.page("/ui/guards/lock%2Freport").text, "leases at once 1")
	d = w.page("/ui/guards/pool%2Flarge")
	require.Contains(t, d.text, "limit 5 per 1 s, bursts of 10")
	require.Contains(t, d.text, "leases at once unbounded")
	require.Contains(t, d.text, "the first 100 of 2,000 members")
	require.Less(t, len(d.all("")), 2000, "the nodes of a page")

	for path, status := range map[string]int{
		"/ui/guards/pool%2Fnone": 404, "/ui/guards/a%20b": 404, "/ui/guards/odd%2Fx": 404,
		"/ui/guards/smtp?state=odd": 422, "/ui/guards/smtp?prefix=a%20b": 422,
	} {
		require.Equal(t, status, w.get(path).Code, path)
	}
	w.backend.err = api.ErrUnavailable
	require.Contains(t, w.get("/ui/guards/pool%2Fsmtp").Body.String(), "Redis does not answer")
}

// formsTo returns the paths to which the page's POST forms are sent, those that begin with path.
func formsTo(d document, path string) (found []string) {
	for _, action := range d.actions() {
		if strings.HasPrefix(action, path) {
			found = append(found, action)
		}
	}
	return found
}

// buttons returns, by the id of each button, the question that the page asks before the action; ""
// for none.
func buttons(d document) map[string]string {
	all := map[string]string{}
	for _, b := range d.all("button") {
		if id := attribute(b, "id"); id != "" {
			all[id] = attribute(b, "data-confirm")
		}
	}
	return all
}

// TestGuardButtons: the members alice (two leases), bob (an open breaker) and carl (off) have the
// buttons that fit their states. The buttons of alice that take back, disable and open ask first.
func TestGuardButtons(t *testing.T) {
	w := parallelAs(t, admin)
	asks := buttons(w.page("/ui/guards/pool%2Fsmtp"))
	require.Equal(t, "End 2 leases of the member alice of pool/smtp. The holders learn it at their next renewal, and go on until then.", asks["take-back-alice"])
	require.Equal(t, "Disable the member alice of pool/smtp: it is lent no more. Its 2 leases run on.", asks["disable-alice"])
	require.Contains(t, asks["open-alice"], "Open the breaker of the member alice of pool/smtp")
	require.Contains(t, asks, "close-bob")
	require.NotContains(t, asks, "open-bob")
	require.NotContains(t, asks, "take-back-bob")
	require.Contains(t, asks, "enable-carl"+hostile)
	require.NotContains(t, asks, "disable-carl"+hostile)
	require.NotContains(t, buttons(w.page("/ui/guards/lock%2Freport")), "open-1", "a lock has no breaker")
}

// TestGuardActions: each action of an admin makes one call of the backend and one entry in the
// activity log. Malformed ones make none; an operator, a reader and a producer get 403 for disable.
func TestGuardActions(t *testing.T) {
	w := parallelAs(t, admin)
	for _, do := range guard.Actions {
		answer := w.post("/ui/guards/pool%2Fsmtp/members/alice", url.Values{"command": {string(do)}})
		require.Equal(t, http.StatusSeeOther, answer.Code, answer.Body.String())
		to := answer.Header().Get("Location")
		require.Equal(t, "/ui/guards/pool%2Fsmtp?done=guard-"+string(do), to)
		require.Equal(t, string(do)+" alice of pool/smtp", w.backend.calls[len(w.backend.calls)-1])
		require.Equal(t, api.Activity{Action: "guard." + string(do), Object: "alice@pool/smtp"}, w.log.entries[len(w.log.entries)-1])
		require.Contains(t, w.page(to).text, notices["guard-"+string(do)])
	}
	require.Len(t, w.backend.calls, len(guard.Actions))
	require.Len(t, w.log.entries, len(guard.Actions))
	for path, form := range map[string]url.Values{
		"/ui/guards/pool%2Fsmtp/members/alice":  {"command": {"stop"}},
		"/ui/guards/pool%2Fsmtp/members/bob":    {},
		"/ui/guards/a%20b/members/alice":        {"command": {"open"}},
		"/ui/guards/pool%2Fsmtp/members/a%20b":  {"command": {"open"}},
		"/ui/guards/pool%2Fsmtp/members/nobody": {"command": {"open"}},
	} {
		code := w.post(path, form).Code
		require.True(t, code == http.StatusUnprocessableEntity || code == http.StatusNotFound, "%s %d", path, code)
	}
	require.Len(t, w.backend.calls, len(guard.Actions))
	for _, who := range []auth.Principal{operator, reader, acme} {
		w := as(t, who)
		require.Equal(t, http.StatusForbidden, w.post("/ui/guards/pool%2Fsmtp/members/alice", url.Values{"command": {"disable"}}).Code)
		require.Empty(t, w.backend.calls)
		require.Empty(t, w.log.entries)
	}
}

// TestGuardTopics: a stream of guards begins with the rows that the filters of its topic select;
// malformed topics get 404. Five reads of a page with 2000 members ask the backend twice.
func TestGuardTopics(t *testing.T) {
	w := parallel(t)
	server := w.server()
	for topic, want := range map[string]int{
		"guards:": 200, "guards:kind%3Dpool": 200, "guard:pool/smtp?": 200, "guard:smtp%3Fstate%3Doff": 200,
		"guards:kind%3Dodd": 404, "guards:%25zz": 404, "guard:": 404, "guard:pool/none": 404, "guard:smtp%3Fstate%3Dodd": 404, "guard:smtp%3F%25zz": 404,
	} {
		s := w.follow(server, topic, "")
		require.Equal(t, want, s.status, topic)
		if want == 200 {
			event, data, _ := s.next()
			require.Equal(t, "regions", event, topic)
			require.NotEmpty(t, data["rows"])
		}
		s.close()
	}
	s := w.follow(server, "guard:pool/smtp%3Fstate%3Dbusy", "")
	_, data, _ := s.next()
	require.Contains(t, data["rows"], "alice")
	require.NotContains(t, data["rows"], "bob")
	require.Contains(t, data["now"], "2.5 s")

	alone := newFake()
	read, _, err := guardPages{alone}.reader("pool/large", nil)
	require.NoError(t, err)
	read = seldomIfLarge(read)
	for range 5 {
		data, err := read(t.Context())
		require.NoError(t, err)
		require.Equal(t, 2000, data.(guardData).All)
		require.Nil(t, data.(guardData).Members, "they would be kept for each filter")
	}
	require.Equal(t, 2, alone.reads, "the first read finds that it is large")

	closed := as(t, auth.Principal{})
	token, _ := closed.sessions.Create(t.Context(), acme)
	r := httptest.NewRequestWithContext(t.Context(), http.MethodGet, "/ui/events?topics=guards:", nil)
	r.AddCookie(&http.Cookie{Name: "bulkaction", Value: token})
	answer := httptest.NewRecorder()
	closed.console.ServeHTTP(answer, r)
	require.Equal(t, http.StatusForbidden, answer.Code)
}
