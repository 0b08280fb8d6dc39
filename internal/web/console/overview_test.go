package console

import (
	"context"
	"fmt"
	"net/http"
	"strings"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/bulkaction/bulkaction/api"
	"github.com/bulkaction/bulkaction/internal/access/auth"
	"github.com/bulkaction/bulkaction/internal/web/httpapi"
)

// History returns a point for each 10 s of the last five minutes; none if there are no groups. Only
// the newest two points have failed jobs.
func (f *fakeBackend) History(_ context.Context, minutes int) (h api.History, err error) {
	err = f.call("history %d", minutes)
	f.mu.Lock()
	defer f.mu.Unlock()
	h.StepSeconds = 10
	newest := time.Now().Truncate(10 * time.Second)
	for i := range 30 {
		p := api.HistoryPoint{
			T: newest.Add(time.Duration(i-29) * 10 * time.Second), Accepted: 1234, Started: 40, Done: 30,
			Gauges: api.Gauges{Waiting: 4000, NonReady: 300, Ready: 20, InFlight: 10}, StartDelayP50MS: new(1.5), StartDelayP99MS: new(99.0),
		}
		if i >= 28 {
			p.Failed = 2.5
		}
		if len(f.groups) > 0 {
			h.Points = append(h.Points, p)
		}
	}
	return h, err
}

// BusiestTenants has twelve tenants, or none if there are no groups, and returns at most limit of
// those that the principal may see. The second one borrows permits, the third has no limit.
func (f *fakeBackend) BusiestTenants(ctx context.Context, limit int) (l api.TenantList, err error) {
	err = f.call("busiest %d", limit)
	f.mu.Lock()
	defer f.mu.Unlock()
	who, _ := auth.From(ctx)
	for i, id := range []string{"acme", "globex", "initech", "d", "e", "f", "g", "h", "i", "j", "k", "l"} {
		if len(f.groups) == 0 || len(l.Tenants) == limit || !who.Owns(id) {
			continue
		}
		t := tenant(id)
		t.Unfinished -= int64(i)
		switch id {
		case "globex":
			t.JobsPerSecond = 50
		case "initech":
			t.Window.Limit = 0
		}
		l.Tenants, l.AsOf = append(l.Tenants, t), &created
	}
	return l, err
}

// callsOf returns the recorded calls of the backend that begin with word and a space.
func (f *fakeBackend) callsOf(word string) (found []string) {
	f.mu.Lock()
	defer f.mu.Unlock()
	for _, call := range f.calls {
		if name, _, _ := strings.Cut(call, " "); name == word {
			found = append(found, call)
		}
	}
	return found
}

// TestOverviewOfTheLastHours: the overview shows the history, the audit and the ten busiest
// tenants. Its period is 15, 60 or 1440 minutes; 16 are refused with 422.
func TestOverviewOfTheLastHours(t *testing.T) {
	w := parallel(t)
	w.backend.sound = true
	d := w.page("/ui/")
	for _, want := range []string{
		"Done per second 30", "Failed, last hour 50", "UTC done 30 failed 0 retried 0", "done 30 failed 2.5 retried 0",
		"waiting 1,001 non-ready 300 ready 200 in flight 10", "p50 1.5 ms p99 99 ms", "counted 2026-01-02 03:04:05 UTC",
		"acme 4,321 12 7.2 2 7.2 of 25", "globex 4,320 12 50 2 50 of 25", "initech 4,319 12 7.2 2 no limit", "j 4,312",
	} {
		require.Contains(t, d.text, want)
	}
	require.NotContains(t, d.text, "k 4,311", "there are ten tenants")
	require.NotContains(t, d.text, "open violation")
	titles := ""
	for _, n := range append(d.all("polyline"), d.all("polygon")...) {
		require.NotEmpty(t, attribute(n, "points"))
	}
	require.Len(t, d.all("polyline"), 2)
	require.Len(t, d.all("polygon"), 7)
	for _, n := range d.all("") {
		titles += attribute(n, "title") + "\n"
	}
	for _, want := range []string{
		"history: done of the newest point", "history: done, failed, retried", "stats: types[].waiting, non_ready, ready, in_flight",
		"jobs_per_second · window.window_ms, of window.limit",
	} {
		require.Contains(t, titles, want)
	}
	for path, topic := range map[string]string{"?minutes=15": "overview:15", "?minutes=1440": "overview:1440", "?minutes=60": "overview"} {
		d = w.page("/ui/" + path)
		require.Equal(t, topic, attribute(d.all("body")[0], "data-topic"))
		current := 0
		for _, a := range d.all("a") {
			if attribute(a, "aria-current") == "true" {
				require.Equal(t, "/ui/"+path, attribute(a, "href"))
				current++
			}
		}
		require.Equal(t, 1, current)
	}
	require.ElementsMatch(t, []string{"history 60", "history 60", "history 1440"}, w.backend.callsOf("history"), "15 minutes need an hour, too")
	answer := w.get("/ui/?minutes=16")
	require.Equal(t, http.StatusUnprocessableEntity, answer.Code)
	require.Contains(t, answer.Body.String(), "minutes must be 15, 60, 360 or 1440")

	empty := newTestConsole(t)
	empty.backend.groups = nil
	d = empty.page("/ui/")
	for _, want := range []string{"bulkaction watcher", "No active tenant was counted", "Done per second –", "No job has started in this time."} {
		require.Contains(t, d.text, want)
	}
}

// audited is a backend with an audit of its own.
type audited struct {
	*fakeBackend
	state api.AuditState
}

func (a audited) Audit(context.Context) (api.AuditState, error) { return a.state, nil }

func TestOverviewOfTheAudit(t *testing.T) {
	t.Parallel()
	show := func(state api.AuditState) document {
		w := newTestConsole(t)
		w.with(func(o *httpapi.Options) { o.Backend = audited{w.backend, state} })
		return w.page("/ui/")
	}
	d := show(api.AuditState{ByLaw: map[string]int64{"location": 1200, "conservation": 1, hostile: 3, "none": 0}})
	require.Contains(t, d.text, hostile+" 3, conservation 1, location 1,200 – the audit has 1,204 open violations.")
	require.NotContains(t, d.text, "none 0")
	require.NotContains(t, show(api.AuditState{}).text, "open violation")
}

// TestOverviewRights: for seven keys, whether the overview's page and stream show the figures of
// the whole system, and the tenants and the audit. Data that a key may not see is not read.
func TestOverviewRights(t *testing.T) {
	t.Parallel()
	own := auth.Principal{KeyID: "own", Role: auth.Reader, Tenant: "acme"}
	for _, c := range []struct {
		who             auth.Principal
		system, tenants bool
	}{{admin, true, true}, {operator, true, true}, {reader, true, true}, {metrics, true, false}, {acme, false, false}, {own, false, false}, {service, false, false}} {
		t.Run(string(c.who.Role)+c.who.Tenant, func(t *testing.T) {
			t.Parallel()
			w := as(t, c.who)
			w.keys.keys[c.who.KeyID] = c.who
			d := w.page("/ui/")
			require.Equal(t, c.system, strings.Contains(d.text, "Done per second"))
			require.Equal(t, c.tenants, strings.Contains(d.text, "globex"))
			require.Equal(t, c.tenants, strings.Contains(d.text, "the audit has"))
			token, _ := w.sessions.Create(t.Context(), c.who)
			_, data, ok := w.follow(w.server(), "overview", token).next()
			require.True(t, ok)
			require.Equal(t, c.tenants, strings.Contains(fmt.Sprint(data), "globex"))
			require.Equal(t, c.system, strings.Contains(fmt.Sprint(data), "Done per second"))
			if !c.tenants {
				require.Empty(t, w.backend.callsOf("busiest"))
				require.Empty(t, w.backend.callsOf("audit"))
				require.Empty(t, w.backend.callsOf("guards"))
			}
			if !c.system {
				require.Empty(t, w.backend.callsOf("history"))
			}
		})
	}
}

// TestOverviewReadsLittle: two pages and a stream together read the history, the audit, the busiest
// tenants and the failed groups once, with an interval of 1 h. After a change of the newest groups,
// the stream sends their region alone.
func TestOverviewReadsLittle(t *testing.T) {
	w := parallel(t)
	w.console.overview.history.TTL = time.Hour
	w.console.overview.system.TTL = time.Hour
	w.console.overview.stats.TTL = time.Hour
	w.console.overview.busiest.TTL = time.Hour
	w.console.overview.failures.TTL = time.Hour
	w.page("/ui/")
	w.page("/ui/?minutes=60")
	s := w.follow(w.server(), "overview", "")
	_, all, ok := s.next()
	require.True(t, ok)
	require.Len(t, all, 11)
	w.backend.set(func() { delete(w.backend.groups, "running-1") })
	_, changed, ok := s.next()
	require.True(t, ok)
	require.Contains(t, changed, "newest")
	require.Len(t, changed, 1, "only what has changed")
	for word, want := range map[string]int{"history": 1, "audit": 1, "busiest": 1} {
		require.Len(t, w.backend.callsOf(word), want, word)
	}
	failed := 0
	for _, q := range w.backend.queries {
		if q.Status == api.StatusFailed {
			failed++
		}
	}
	require.Equal(t, 1, failed)
}

// TestHealth: each thing that is not well has its sentence and a link; otherwise the overview says that
// all is well.
func TestHealth(t *testing.T) {
	t.Parallel()
	now := time.Now()
	old := now.Add(-time.Hour)
	well := func() overviewData {
		return overviewData{Stats: &api.Stats{}, At: now, Groups: true, system: &systemState{}}
	}
	for want, change := range map[string]func(d *overviewData){
		"No live process has the role fetcher":                                func(d *overviewData) { d.Missing = []string{"fetcher"} },
		"has 7 jobs, but no worker.":                                          func(d *overviewData) { d.Stats.Types = []api.TypeStats{{Type: "T", Backlog: 7}} },
		"Redis uses 90% of its memory.":                                       func(d *overviewData) { d.Stats.Memory = api.RedisMemory{Used: 900, Max: 1000} },
		"No job starts, and the next one has waited for 1 h.":                 func(d *overviewData) { d.Stats.OldestWaiting = &old },
		"11 of the 1,000 jobs that ended in the last 10 minutes have failed.": func(d *overviewData) { d.History.FailedLately, d.History.EndedLately = 11, 1000 },
		"the audit has 2 open violations":                                     func(d *overviewData) { d.system.audit.ByLaw = map[string]int64{"location": 2} },
		"has an open breaker.":                                                func(d *overviewData) { d.system.breakers = []string{"pool/smtp"} },
		"Callbacks have died in the last day":                                 func(d *overviewData) { d.system.deadCallbacks = true },
		"The last change of limits is not in effect":                          func(d *overviewData) { d.system.limits.PendingPartitions = []int{1} },
		"The environments of processes have different":                        func(d *overviewData) { d.system.limits.ProcessesThatDiffer = make([]api.ProcessLimits, 2) },
	} {
		d := well()
		change(&d)
		all := healthOf(d)
		require.Len(t, all, 1, want)
		require.Contains(t, all[0].Text, want)
		require.NotEmpty(t, all[0].Path, want)
	}
	for name, change := range map[string]func(d *overviewData){
		"nothing":      func(*overviewData) {},
		"paused":       func(d *overviewData) { d.Stats.Types = []api.TypeStats{{Type: "T", Backlog: 7, Paused: true}} },
		"no limit":     func(d *overviewData) { d.Stats.Memory.Used = 1 << 40 },
		"few failures": func(d *overviewData) { d.History.FailedLately, d.History.EndedLately = 10, 10 },
		"rare ones":    func(d *overviewData) { d.History.FailedLately, d.History.EndedLately = 100, 10_000 },
	} {
		d := well()
		change(&d)
		d.Problems = healthOf(d)
		require.Empty(t, d.Problems, name)
		html, err := newTestConsole(t).console.renderRegions("overview", admin, "", d)
		require.NoError(t, err)
		require.Contains(t, string(html["missing"]), "All is well.")
	}
}

// TestHistoryView: a history of 360 to 1440 points makes two charts: a line has at most
// historyPoints+2 points, and the HTML has less than 24,000 bytes. A gap is not drawn.
func TestHistoryView(t *testing.T) {
	t.Parallel()
	now := time.Date(2026, 1, 2, 3, 4, 5, 0, time.UTC)
	full := func(n int, step time.Duration) api.History {
		h := api.History{StepSeconds: int(step / time.Second)}
		for i := range n {
			v := float64(100_000 + i*7919%900_000)
			h.Points = append(h.Points, api.HistoryPoint{
				T: now.Add(-time.Duration(n-1-i) * step), Accepted: v, Started: v / 3, Done: v / 7, Failed: v / 11,
				Gauges: api.Gauges{Waiting: int64(v) * 10, NonReady: int64(v), Ready: 5000, InFlight: int64(v) / 2},
			})
		}
		return h
	}
	c := newTestConsole(t).console
	for minutes, h := range map[int]api.History{15: full(360, 10*time.Second), 60: full(360, 10*time.Second), 360: full(1080, 20*time.Second), 1440: full(1440, time.Minute)} {
		v := newHistoryView(h, minutes, now)
		require.NotNil(t, v.Now)
		n := len(strings.Fields(v.Rates.Lines[0].Paths[0])) / 2
		require.GreaterOrEqual(t, n, historyPoints/2, minutes)
		require.LessOrEqual(t, n, historyPoints+2, minutes)
		require.Nil(t, v.Delays)
		html, err := c.renderRegions("overview", admin, "", overviewData{History: v, Tenants: true})
		require.NoError(t, err)
		require.Less(t, len(html["history"]), 24_000, minutes)
	}

	// A history of about an hour with 1 failure/s and a gap of 10 minutes. The rate of the point
	// after the gap holds for the whole gap, so the sum has 3600 failures.
	h := api.History{StepSeconds: 10}
	for i := range 370 {
		if i < 100 || i >= 160 {
			h.Points = append(h.Points, api.HistoryPoint{T: now.Add(time.Duration(i-369) * 10 * time.Second), Failed: 1})
		}
	}
	v := newHistoryView(h, 60, now.Add(2*time.Minute))
	require.Nil(t, v.Now, "the newest point is two minutes old")
	require.EqualValues(t, 3600, v.Failed)
	require.InDelta(t, 600, v.FailedLately, 1)
	require.Len(t, v.Rates.Lines[0].Paths, 2, "a gap is not drawn")
	require.Len(t, newHistoryView(h, 15, now).Rates.Lines[0].Paths, 1)
	require.Empty(t, newHistoryView(api.History{}, 60, now))
}

// TestPermitsOfAWindow: the global limit is shown as permits a second, and for a window of less
// than a second as permits in the window.
func TestPermitsOfAWindow(t *testing.T) {
	t.Parallel()
	for want, l := range map[string]api.RateLimit{
		"1,000/s": {RPS: 1000}, "50/s": {RPS: 50, WindowMS: 1000}, "500 in 500 ms": {RPS: 1000, WindowMS: 500}, "1 in 100 ms": {RPS: 2, WindowMS: 100},
	} {
		require.Equal(t, want, overviewData{Stats: &api.Stats{RateLimit: l}}.Limit())
	}
}
