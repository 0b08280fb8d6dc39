package console

import (
	"context"
	"encoding/json"
	"net/http"
	"net/url"
	"strings"
	"testing"

	"github.com/stretchr/testify/require"

	"github.com/bulkaction/bulkaction/api"
	"github.com/bulkaction/bulkaction/internal/access/auth"
)

// Limits returns limits of which the API has set two, unless the test has set others.
func (f *fakeBackend) Limits(context.Context) (api.Limits, error) {
	f.mu.Lock()
	defer f.mu.Unlock()
	f.calls = append(f.calls, "limits")
	if f.limits != nil {
		return *f.limits, f.err
	}
	bound, at := int64(20), created
	l := api.Limits{Limiter: "sliding", WindowMS: 1500, AppliedAt: &at, Types: map[string]api.TypeLimits{"HTTP": {InFlight: &bound, InFlightNow: 17}}}
	l.Global.RPS = api.LimitSetting[int64]{Configured: 10_000, Effective: 5000, Source: api.SourceAPI}
	l.Global.Share = api.LimitSetting[string]{Configured: "elastic", Effective: "static", Source: api.SourceAPI}
	l.Global.DefaultBackoff = api.LimitSetting[string]{Configured: "1s", Effective: "1s", Source: api.SourceEnvironment}
	l.Global.MaxBackoff = api.LimitSetting[string]{Configured: "1m0s", Effective: "1m0s", Source: api.SourceEnvironment}
	return l, f.err
}

func (f *fakeBackend) PatchLimits(ctx context.Context, p api.LimitsPatch) (api.Limits, error) {
	return f.patched(ctx, "limits", p)
}

func (f *fakeBackend) PatchType(ctx context.Context, typ string, p api.TypePatch) (api.Limits, error) {
	return f.patched(ctx, "type "+typ, p)
}

func (f *fakeBackend) patched(ctx context.Context, what string, p any) (api.Limits, error) {
	text, err := json.Marshal(p)
	if err != nil {
		return api.Limits{}, err
	}
	if err := f.call("patch %s %s", what, text); err != nil {
		return api.Limits{}, err
	}
	return f.Limits(ctx)
}

func TestLimitsPage(t *testing.T) {
	w := parallelAs(t, admin)
	d := w.page("/ui/limits")
	for _, want := range []string{
		"Permits per second 10,000/s 5,000/s set here", "Share elastic static set here", "Default backoff 1 s 1 s the environment", "Max backoff 1 min 1 min the environment",
		"limiter sliding · window 1.5 s · last change in effect since 2026-01-02 03:04:05 UTC", "HTTP no limit 17 20",
	} {
		require.Contains(t, d.text, want)
	}
	require.NotContains(t, d.text, "differ")
	require.Equal(t, "limits", attribute(d.all("body")[0], "data-topic"))
	values := func(d document) map[string]string {
		all := map[string]string{}
		for _, input := range d.all("input") {
			all[attribute(input, "name")] = attribute(input, "value") + "|" + attribute(input, "placeholder")
		}
		return all
	}
	require.Subset(t, values(d), map[string]string{"rps": "5000|10000", "default_backoff": "|1s", "type": "|"})
	for _, option := range d.all("option") {
		require.Equal(t, option.FirstChild.Data == "static", hasAttribute(option, "selected"), option.FirstChild.Data)
	}
	require.Subset(t, values(w.page("/ui/limits?type=HTTP")), map[string]string{"type_rps": "|no limit", "type_in_flight": "20|no limit"})
	require.Subset(t, values(w.page("/ui/limits?type=+new+")), map[string]string{"type_rps": "|no limit", "type_in_flight": "|no limit"})
	require.Equal(t, http.StatusUnprocessableEntity, w.get("/ui/limits?type=a%20b").Code)

	w.backend.limits = &api.Limits{
		PendingPartitions:   []int{0, 2},
		ProcessesThatDiffer: []api.ProcessLimits{{ID: "f-1", Role: "fetcher", ConfiguredLimits: api.ConfiguredLimits{RPS: 9000, Share: "elastic", DefaultBackoff: "1s", MaxBackoff: "2m"}}},
	}
	d = w.page("/ui/limits")
	require.Contains(t, d.text, "not in effect yet in partitions 0, 2.")
	require.Contains(t, d.text, "The environments of the processes differ.")
	require.Contains(t, d.text, "f-1 fetcher 9,000 elastic 1s 2m")
	require.Contains(t, d.text, "No type has limits of its own.")
}

// TestLimitsAreChanged: each form sends its own fields; an empty one sets the default. A form that
// is refused keeps what was typed, and sends nothing.
func TestLimitsAreChanged(t *testing.T) {
	w := parallelAs(t, admin)
	global := url.Values{"rps": {" 0 "}, "share": {""}, "default_backoff": {"2s"}, "max_backoff": {" "}}
	answer := w.post("/ui/limits", global)
	require.Equal(t, http.StatusSeeOther, answer.Code)
	require.Equal(t, "/ui/limits?done=limits-changed", answer.Header().Get("Location"))
	require.Contains(t, w.page("/ui/limits?done=limits-changed").text, "The limits are changed")
	answer = w.post("/ui/limits/HTTP", url.Values{"type_rps": {""}, "type_in_flight": {"20"}})
	require.Equal(t, "/ui/limits?done=limits-changed", answer.Header().Get("Location"))
	want := []string{
		`patch limits {"global":{"rps":0,"share":null,"default_backoff":"2s","max_backoff":null}}`,
		`patch type HTTP {"rps":null,"in_flight":20}`,
	}
	require.Equal(t, want, w.backend.callsOf("patch"))
	require.Equal(t, []string{"limits.set global", "type.set HTTP"}, []string{
		w.log.entries[0].Action + " " + w.log.entries[0].Object, w.log.entries[1].Action + " " + w.log.entries[1].Object,
	})

	for path, form := range map[string]url.Values{
		"/ui/limits":      {"rps": {"-7"}, "max_backoff": {"soon"}},
		"/ui/limits/HTTP": {"type_rps": {"many"}},
	} {
		answer := w.post(path, form)
		require.Equal(t, http.StatusUnprocessableEntity, answer.Code)
		typed := map[string]string{}
		for _, input := range parse(t, answer.Body.String()).all("input") {
			typed[attribute(input, "name")] = attribute(input, "value")
		}
		for name := range form {
			require.Equal(t, form.Get(name), typed[name], path)
		}
	}
	require.Contains(t, w.post("/ui/limits", url.Values{"rps": {"-7"}, "max_backoff": {"soon"}}).Body.String(), "global.max_backoff")
	require.Equal(t, http.StatusNotFound, w.post("/ui/limits/a%20b", url.Values{"type_rps": {"1"}}).Code)
	require.Equal(t, http.StatusUnprocessableEntity, w.post("/ui/limits/HTTP", nil).Code)
	require.Equal(t, http.StatusUnprocessableEntity, w.post("/ui/limits", nil).Code)
	require.Equal(t, want, w.backend.callsOf("patch"))

	w.backend.limits = &api.Limits{PendingPartitions: []int{1}}
	require.Equal(t, "/ui/limits", w.post("/ui/limits", global).Header().Get("Location"), "the page says what is not in effect")
}

func TestLimitsPageRights(t *testing.T) {
	w := parallelAs(t, auth.Principal{})
	server := w.server()
	for _, c := range []struct {
		who         auth.Principal
		see, change bool
	}{{admin, true, true}, {operator, true, false}, {reader, true, false}, {acme, false, false}, {metrics, false, false}} {
		other := as(t, c.who)
		require.Equal(t, c.see, other.get("/ui/limits").Code == http.StatusOK, c.who.Role)
		if c.see {
			d := other.page("/ui/limits")
			require.Equal(t, c.change, strings.Contains(strings.Join(d.actions(), " "), "/ui/limits"), c.who.Role)
			require.Equal(t, c.change, strings.Contains(d.text, "Change the limits of a type"))
		}
		for path, form := range map[string]url.Values{"/ui/limits": {"rps": {"1"}}, "/ui/limits/T": {"type_rps": {"1"}}} {
			require.Equal(t, c.change, other.post(path, form).Code == http.StatusSeeOther, "%s %s", c.who.Role, path)
		}
		token, _ := w.sessions.Create(t.Context(), c.who)
		if s := w.follow(server, "limits:", token); c.see {
			_, data, ok := s.next()
			require.True(t, ok)
			require.Contains(t, data["limits"], "HTTP")
			require.NotContains(t, data["limits"], "<input")
		} else {
			require.Equal(t, http.StatusForbidden, s.status)
		}
	}
}

func TestOverviewTellsPendingLimits(t *testing.T) {
	w := parallel(t)
	w.backend.limits = &api.Limits{PendingPartitions: []int{1}, ProcessesThatDiffer: []api.ProcessLimits{{}}}
	require.Contains(t, w.page("/ui/").text, "The last change of limits is not in effect everywhere. Limits The environments of processes have different limits.")
}
