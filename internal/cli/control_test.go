package cli

import (
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"maps"
	"net"
	"net/http"
	"net/http/httptest"
	"os"
	"slices"
	"strconv"
	"strings"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/bulkaction/bulkaction/api"
)

func (f *fakeAPI) pauseOrResume(w http.ResponseWriter, r *http.Request) {
	reply(w, http.StatusAccepted, api.Paused{ID: r.PathValue("id"), Paused: r.PathValue("verb") == "pause", Links: map[string]string{}})
}

func (f *fakeAPI) resizeWorker(w http.ResponseWriter, r *http.Request) {
	size := api.PoolSize{ID: r.PathValue("id")}
	_ = json.NewDecoder(r.Body).Decode(&size)
	reply(w, http.StatusAccepted, size)
}

func TestResizeWorker(t *testing.T) {
	f := newFakeAPI(t)
	require.Equal(t, run{exitOK, "w-1   0\n", ""}, f.exec(t.Context(), console{}, "worker", "resize", "w-1", "0"))
	require.Equal(t, run{exitOK, `{"id":"w-1","workers":20}` + "\n", ""}, f.exec(t.Context(), console{}, "worker", "resize", "w-1", "20", "--json"))
	for _, args := range [][]string{{"w-1"}, {"w-1", "-1"}, {"w-1", "10001"}, {"w-1", "many"}, {"w/1", "1"}} {
		require.Equal(t, exitUsage, f.exec(t.Context(), console{}, append([]string{"worker", "resize", "--"}, args...)...).code, args)
	}
	gone := httptest.NewServer(http.HandlerFunc(func(w http.ResponseWriter, _ *http.Request) {
		problem(w, http.StatusNotFound, "worker w-1: no live process has this id")
	}))
	t.Cleanup(gone.Close)
	console{}.exec(t.Context(), "--api", gone.URL, "worker", "resize", "w-1", "3").ends(t, exitError, "`bulkaction stats` lists the worker processes")
}

func (f *fakeAPI) listTenants(w http.ResponseWriter, r *http.Request) {
	f.mu.Lock()
	defer f.mu.Unlock()
	l := api.TenantList{Tenants: []api.Tenant{}}
	if r.URL.Query().Get("sort") == "backlog" {
		if len(f.tenants) > 0 {
			l.AsOf = &epoch
		}
		for _, id := range slices.Backward(slices.Sorted(maps.Keys(f.tenants))) {
			l.Tenants = append(l.Tenants, f.tenantDocument(id))
		}
		reply(w, http.StatusOK, l)
		return
	}
	for _, id := range slices.Sorted(maps.Keys(f.tenants)) {
		if r.URL.Query().Get("groups") != "true" && strings.HasPrefix(id, "own") {
			continue
		}
		if id > r.URL.Query().Get("cursor") && l.Cursor == "" {
			l.Tenants = append(l.Tenants, f.tenantDocument(id))
			if len(l.Tenants) == 2 {
				l.Cursor = id
			}
		}
	}
	reply(w, http.StatusOK, l)
}

func (f *fakeAPI) tenant(w http.ResponseWriter, r *http.Request) {
	f.mu.Lock()
	defer f.mu.Unlock()
	if _, ok := f.tenants[r.PathValue("id")]; !ok {
		problem(w, http.StatusNotFound, "tenant "+r.PathValue("id")+": not found")
		return
	}
	reply(w, http.StatusOK, f.tenantDocument(r.PathValue("id")))
}

func (f *fakeAPI) patchTenant(w http.ResponseWriter, r *http.Request) {
	f.mu.Lock()
	defer f.mu.Unlock()
	body, _ := io.ReadAll(r.Body)
	f.bodies = append(f.bodies, string(body))
	set := f.tenants[r.PathValue("id")]
	if err := json.Unmarshal(body, &set); err != nil { // null makes a pointer nil, an absent field does not change it
		problem(w, http.StatusUnprocessableEntity, err.Error())
		return
	}
	f.tenants[r.PathValue("id")] = set
	reply(w, http.StatusOK, f.tenantDocument(r.PathValue("id")))
}

func (f *fakeAPI) tenantDocument(id string) api.Tenant {
	set, at := f.tenants[id], epoch
	t := api.Tenant{
		ID: id, RPS: set.RPS, Weight: 1, BasePriority: set.BasePriority, InFlight: set.InFlight, Active: true, Unfinished: 12345, NonReady: 678, JobsPerSecond: 9.5, ActiveTenants: 3,
		Window:     api.TenantWindow{Limiter: "fixed", Share: "elastic", WindowMS: 1000, Used: 5, Limit: 10, GlobalUsed: 70, GlobalLimit: 0, NextPermitAt: &at},
		Congestion: api.TenantCongestion{Throttles: 4, Returns: 3, MeanWaitMS: 1234.5, LongestWaitMS: 83_000, LastAt: &at},
	}
	if set.Weight != nil {
		t.Weight = *set.Weight
	}
	return t
}

func fakeWhy(job string) api.Why {
	at := epoch
	return api.Why{
		Job: job, Reason: api.WhyRate, Detail: "Its tenant acme has used up the limit.", Until: &at, Position: ptr(int64(1234)), EstimateSeconds: ptr(83.4),
		Limit: &api.WhyLimit{Scope: "tenant", RPS: 12.5, WindowMS: 1000, PerWindow: 12, Used: 12, NextPermitAt: &at},
	}
}

func (f *fakeAPI) why(w http.ResponseWriter, r *http.Request) {
	if g, unlock := f.find(w, r); g != nil {
		defer unlock()
		reply(w, http.StatusOK, fakeWhy(g.ID+".0"))
	}
}

func (f *fakeAPI) job(w http.ResponseWriter, r *http.Request) {
	g, unlock := f.find(w, r)
	if g == nil {
		return
	}
	defer unlock()
	if n, err := strconv.Atoi(r.PathValue("ordinal")); err != nil || n >= len(g.jobs) {
		problem(w, http.StatusNotFound, "job "+g.ID+"."+r.PathValue("ordinal")+": not found")
		return
	}
	j := api.Job{ID: g.ID + "." + r.PathValue("ordinal"), Group: g.ID, State: "in_flight", Attempts: 1}
	if r.PathValue("ordinal") != "0" {
		why := fakeWhy(j.ID)
		j.State, j.Waiting, j.Why, j.Until = "non_ready", why.Reason, &why, why.Until
		j.Errors = []api.JobError{
			{Code: "SMTP_451", Error: "later \x1b[31m", Attempt: 3, At: epoch},
			{Code: "TIMEOUT", Error: "timed out after 30s", Attempt: 2, At: epoch.Add(-time.Minute)},
		}
		j.LastError, j.TraceID = &j.Errors[0], "0af7651916cd43dd8448eb211c80319c"
	}
	reply(w, http.StatusOK, j)
}

func TestPauseAndResume(t *testing.T) {
	f := newFakeAPI(t)
	f.keepOpen = true
	submitGroup(t, f)
	require.Equal(t, run{exitOK, "g   RUNNING   paused\n", ""}, f.exec(t.Context(), console{}, "pause", "g"))
	require.True(t, f.groupByID(t, "g").Paused)
	require.Equal(t, run{exitOK, `{"id":"g","status":"RUNNING","counts":{"accepted":2,"waiting":2,"non_ready":0,"ready":0,"in_flight":0,"done":0,"failed":0,"cancelled":0},"links":{"self":"/v1/groups/g"},"paused":false}` + "\n", ""}, f.exec(t.Context(), console{}, "resume", "g", "--json"))
	require.False(t, f.groupByID(t, "g").Paused)
	f.groups["g"].finish()
	f.exec(t.Context(), console{}, "pause", "g").ends(t, exitError, "pause group g: 409 Conflict")

	for kind, root := range map[string]string{"tenant": "/v1/tenants/x/", "type": "/v1/types/x/"} {
		got := f.exec(t.Context(), console{}, kind, "pause", "x")
		require.Equal(t, run{exitOK, "x   paused\n", got.err}, got)
		require.Contains(t, got.err, strings.ToUpper(kind[:1])+kind[1:]+" x is unknown")
		require.Equal(t, run{exitOK, `{"id":"x","paused":false,"links":{}}` + "\n", ""}, f.exec(t.Context(), console{}, kind, "resume", "x", "--json"))
		require.True(t, f.called("POST "+root+"pause") && f.called("POST "+root+"resume"))
	}
	f.tenants["known"] = api.TenantSettings{}
	require.Equal(t, run{exitOK, "known   paused\n", ""}, f.exec(t.Context(), console{}, "tenant", "pause", "known"))
	require.Equal(t, run{exitOK, "SEND_EMAIL   paused\n", ""}, f.exec(t.Context(), console{}, "type", "pause", "SEND_EMAIL"))
}

func TestTenantSet(t *testing.T) {
	f := newFakeAPI(t)
	for _, c := range []struct{ flags, body string }{
		{"--rps 12.5", `{"rps":12.5}`}, // the tenant did not exist before
		{"--weight 2", `{"weight":2}`},
		{"--base-priority -7", `{"base_priority":-7}`},
		{"--rps 3 --weight 1", `{"rps":3,"weight":1}`},
		{"--base-priority 0", `{"base_priority":0}`},
		{"--in-flight 20", `{"in_flight":20}`},
		{"--clear --weight 5", `{"rps":null,"weight":5,"base_priority":null,"in_flight":null}`},
		{"--clear", `{"rps":null,"weight":null,"base_priority":null,"in_flight":null}`},
	} {
		f.bodies = nil
		got := f.exec(t.Context(), console{}, append([]string{"tenant", "set", "acme", "--json"}, strings.Fields(c.flags)...)...)
		require.Equal(t, exitOK, got.code, got.err)
		require.Equal(t, []string{c.body}, f.bodies, c.flags)
		var shown api.Tenant
		require.NoError(t, json.Unmarshal([]byte(got.out), &shown))
		require.Equal(t, f.tenantDocument("acme"), shown)
	}
}

func TestLimitShow(t *testing.T) {
	f := newFakeAPI(t)
	require.Equal(t, run{exitOK, `Limiter   fixed, window of 1000 ms

SETTING           CONFIGURED   EFFECTIVE   SOURCE
rps               10,000       10,000      environment
share             elastic      elastic     environment
default-backoff   1s           1s          environment
max-backoff       1m0s         1m0s        environment
`, ""}, f.exec(t.Context(), console{}, "limit", "show"))

	f.limits.Global = api.GlobalPatch{RPS: api.SetTo[int64](0), Share: api.SetTo("static")}
	f.limits.TypeLimits = map[string]api.TypeLimits{"HTTP": {InFlight: ptr(int64(20)), InFlightNow: 17}, "A": {RPS: ptr(int64(1500))}}
	f.limits.Differ = []api.ProcessLimits{{ID: "f-1", Role: "fetcher", ConfiguredLimits: api.ConfiguredLimits{Share: "elastic", DefaultBackoff: "1s", MaxBackoff: "2m0s"}}}
	require.Equal(t, run{exitOK, `Limiter                       fixed, window of 1000 ms
Last change in effect since   2026-01-02 03:04:05Z

SETTING           CONFIGURED   EFFECTIVE   SOURCE
rps               10,000       no limit    api
share             elastic      static      api
default-backoff   1s           1s          environment
max-backoff       1m0s         1m0s        environment

TYPE   RPS        IN FLIGHT   OF AT MOST
A      1,500      0           no limit
HTTP   no limit   17          20

PROCESS   ROLE      RPS        SHARE     DEFAULT-BACKOFF   MAX-BACKOFF
f-1       fetcher   no limit   elastic   1s                2m0s
`, "Warning: the environments of the processes differ. Where the source is the environment, rps and share of the leader among the fetchers are in effect, " +
		"and each worker uses its own backoffs. Give all the same values.\n"}, f.exec(t.Context(), console{}, "limit", "show"))
	var l api.Limits
	require.NoError(t, json.Unmarshal([]byte(f.exec(t.Context(), console{}, "limit", "show", "--json").out), &l))
	want, err := f.limits.Limits(t.Context())
	require.NoError(t, err)
	require.Equal(t, want, l)
}

func TestLimitSetAndReset(t *testing.T) {
	f := newFakeAPI(t)
	for _, c := range []struct{ flags, global string }{
		{"set --rps 5000", `{"rps":5000}`},
		{"set --share static --default-backoff 2s --max-backoff 24h", `{"rps":5000,"share":"static","default_backoff":"2s","max_backoff":"24h0m0s"}`},
		{"set --rps 0", `{"rps":0,"share":"static","default_backoff":"2s","max_backoff":"24h0m0s"}`},
		{"reset --share --max-backoff", `{"rps":0,"share":null,"default_backoff":"2s","max_backoff":null}`},
		{"reset --rps --default-backoff", `{"rps":null,"share":null,"default_backoff":null,"max_backoff":null}`},
		{"set --share elastic", `{"rps":null,"share":"elastic","default_backoff":null,"max_backoff":null}`},
		{"reset", `{"rps":null,"share":null,"default_backoff":null,"max_backoff":null}`},
	} {
		got := f.exec(t.Context(), console{}, append([]string{"limit"}, strings.Fields(c.flags)...)...)
		require.Equal(t, run{exitOK, f.exec(t.Context(), console{}, "limit", "show").out, ""}, got, "as show shows it")
		global, err := json.Marshal(f.limits.Global)
		require.NoError(t, err)
		require.JSONEq(t, c.global, string(global), c.flags)
	}
	f.limits.Pending = []int{0, 2}
	const stored = "The last change is stored, but not in effect yet in partitions 0, 2. It takes effect when a fetcher reaches them: if " +
		"`bulkaction stats` shows none, start one (`bulkaction fetcher`). `bulkaction limit show` says when it did.\n"
	for _, args := range []string{"limit set --rps 7", "limit reset", "limit show", "type set HTTP --rps 7", "type show HTTP"} {
		for _, output := range []string{"", " --json"} {
			got := f.exec(t.Context(), console{}, strings.Fields(args+output)...)
			require.Equal(t, exitOK, got.code, got.err)
			require.Equal(t, stored, got.err, args)
		}
	}
	f.limits.Pending = []int{1}
	f.exec(t.Context(), console{}, "limit", "reset").ends(t, exitOK, "in partition 1. ")
}

func TestTypeSetAndShow(t *testing.T) {
	f := newFakeAPI(t)
	f.limits.TypeLimits["HTTP"] = api.TypeLimits{InFlightNow: 17}
	require.Equal(t, run{exitOK, "Type             HTTP\nLimit a second   50\nIn flight        17 of at most 20\n", ""},
		f.exec(t.Context(), console{}, "type", "set", "HTTP", "--rps", "50", "--in-flight", "20"))
	require.Equal(t, run{exitOK, "Type             HTTP\nLimit a second   no limit\nIn flight        17 of at most 9\n", ""},
		f.exec(t.Context(), console{}, "type", "set", "HTTP", "--clear", "--in-flight", "9"))
	got := f.exec(t.Context(), console{}, "type", "show", "HTTP", "--json")
	require.Equal(t, run{exitOK, `{"type":"HTTP","in_flight":9,"in_flight_now":17}` + "\n", ""}, got)
	require.Equal(t, run{exitOK, "Type             HTTP\nLimit a second   no limit\nIn flight        no limit\n", ""},
		f.exec(t.Context(), console{}, "type", "set", "HTTP", "--clear"))
	require.Equal(t, run{exitOK, `{"type":"other","in_flight_now":0}` + "\n", ""}, f.exec(t.Context(), console{}, "type", "show", "other", "--json"))
	require.Empty(t, f.limits.TypeLimits)
}

func TestLimitsRefuseWrongValues(t *testing.T) {
	f := newFakeAPI(t)
	for args, says := range map[string]string{
		"limit set":                        "nothing to set: give --rps, --share, --default-backoff or --max-backoff",
		"limit set --rps 1.5":              `--rps "1.5": must be a whole number`,
		"limit set --max-backoff 5":        `--max-backoff "5": must be a duration such as 30s`,
		"type set HTTP":                    "nothing to set: give --rps, --in-flight or --clear",
		"type set --rps 5":                 "set needs the id of one type, got 0 arguments",
		"tenant set a --in-flight 1000001": "--in-flight 1000001: must be 1 to 1,000,000",
	} {
		f.exec(t.Context(), console{}, strings.Fields(args)...).ends(t, exitUsage, says)
	}
	require.Empty(t, f.calls)
	for args, says := range map[string]string{ // the server says what is wrong
		"limit set --rps -1 --share equal":  "--rps -1: must be a whole number from 0 to 1000000000; --share equal: must be static or elastic",
		"limit set --default-backoff 0s":    "--default-backoff 0s: must be a duration from 1ms to 24h, such as 500ms or 1m30s",
		"type set HTTP --rps 0":             "--rps 0: must be a whole number from 1 to 1000000000",
		"type set HTTP --in-flight 1000001": "--in-flight 1000001: must be a whole number from 1 to 1000000",
	} {
		f.exec(t.Context(), console{}, strings.Fields(args)...).ends(t, exitUsage, says)
	}
	require.Empty(t, f.limits.Calls)
}

func TestTenantSetSaysWhatAFractionOfAPermitBecomes(t *testing.T) {
	f := newFakeAPI(t)
	for rps, says := range map[string]string{
		"1.5": "A window has whole permits, at least 1: --rps 1.5 allows 1 in each window of 1000 ms, which is 1 a second. " +
			"A longer BULKACTION_BACKPRESSURE_RATE_LIMIT_WINDOW is more exact.\n",
		"0.25": "A window has whole permits, at least 1: --rps 0.25 allows 1 in each window of 1000 ms, which is 1 a second. " +
			"A longer BULKACTION_BACKPRESSURE_RATE_LIMIT_WINDOW is more exact.\n",
		"50": "",
	} {
		got := f.exec(t.Context(), console{}, "tenant", "set", "acme", "--rps", rps)
		require.Equal(t, exitOK, got.code)
		require.Equal(t, says, got.err)
	}
}

func TestTenantShow(t *testing.T) {
	f := newFakeAPI(t)
	f.tenants["acme"] = api.TenantSettings{Weight: ptr(2.5), BasePriority: ptr(int64(-1234)), InFlight: ptr(int64(2000))}
	require.Equal(t, run{exitOK, `Tenant            acme
State             active
Limit a second    share
In flight         0 of at most 2,000
Weight            2.5
Base priority     -1,234
Unfinished jobs   12,345
Non-ready         678
Ended a second    9.5
Active tenants    3

WINDOW OF 1000 MS   USED   OF
tenant              5      10
all tenants         70     no limit
next permit         2030-01-02 03:04:05Z

CONGESTION     VALUE
throttles      4
returns        3
mean wait      1.2 s
longest wait   1m23s
last           2030-01-02 03:04:05Z
`, ""}, f.exec(t.Context(), console{}, "tenant", "show", "acme"))
	f.exec(t.Context(), console{}, "tenant", "show", "nobody").ends(t, exitError, "A tenant is known once it has a group or settings (`bulkaction tenant set nobody --rps N`).")
	require.Equal(t, "paused", tenantState(api.Tenant{Paused: true, Active: true}))
	require.Equal(t, "idle", tenantState(api.Tenant{}))
}

func TestLimitsOfSeveralPartitions(t *testing.T) {
	var out strings.Builder
	tenant := api.Tenant{ID: "acme", Window: api.TenantWindow{WindowMS: 1000, Used: 1, Limit: 1, GlobalUsed: 3, GlobalLimit: 3}}
	require.NoError(t, (&Root{IO: IO{Out: &out}}).show(nil, func(t table) { tenantRows(t, tenant, 6) }))
	require.Contains(t, out.String(), "its partition       3      3, its part of 6 for all tenants\n")
	require.NotContains(t, out.String(), "\nall tenants")

	l := api.WhyLimit{Scope: "global", RPS: 6, WindowMS: 1000, PerWindow: 3, Used: 3}
	require.Equal(t, "6 a second for all tenants; its partition has 3 of the 6 of a window of 1000 ms, 3 used", whyLimitText(l))
	l.Scope = "type"
	require.Equal(t, "6 a second for its type; its partition has 3 of the 6 of a window of 1000 ms, 3 used", whyLimitText(l))
	l.Scope, l.PerWindow, l.Used = "global", 6, 2
	require.Equal(t, "6 a second for all tenants; 2 of 6 used in this window of 1000 ms", whyLimitText(l))
	l.Scope = "share"
	require.Equal(t, "6 a second for its tenant's share; 2 of 6 used in this window of 1000 ms", whyLimitText(l))
}

func TestInvalidFlagValues(t *testing.T) {
	for args, says := range map[string]string{
		"tenant set acme --rps x":                      `--rps "x": must be a number`,
		"tenant set acme --base-priority 1.5":          `--base-priority "1.5": must be a whole number`,
		"submit --type T --payload 1 --job-timeout 30": `--job-timeout "30": must be a duration such as 30s`,
		"submit --type T --payload 1 --tenants a":      "unknown flag: --tenants; did you mean --tenant?",
	} {
		console{}.exec(t.Context(), strings.Fields(args)...).ends(t, exitUsage, "bulkaction: "+says+"\n")
	}
}

func TestDevRefusesWrongSettings(t *testing.T) {
	t.Setenv("BULKACTION_WORKER_COUNT", "none")
	got := console{}.exec(t.Context(), "dev", "--addr", "127.0.0.1:0") // another process may have port 8080
	got.ends(t, exitUsage, `BULKACTION_WORKER_COUNT="none": must be`, "bulkaction: some settings are wrong: the lines above say which\n")

	t.Setenv("BULKACTION_WORKER_COUNT", "")
	t.Setenv("BULKACTION_WORKER_TYPES", "SEND_MAIL")
	console{}.exec(t.Context(), "dev", "--addr", "127.0.0.1:0").ends(t, exitUsage, `BULKACTION_WORKER_TYPES: there is no processor for type \"SEND_MAIL\"`)
}

func TestDevSaysThatItsRedisIsElsewhere(t *testing.T) {
	require.Empty(t, otherRedis("redis://127.0.0.1:6379/0"))
	require.Contains(t, otherRedis("redis://127.0.0.1:63790/0"), "export BULKACTION_REDIS_URL=redis://127.0.0.1:63790/0")
}

func TestSubmitWarnsOfARunAtInThePast(t *testing.T) {
	f := newFakeAPI(t)
	for at, says := range map[string]string{"2020-01-31T09:00:00Z": "--run-at 2020-01-31T09:00:00Z is in the past: the jobs start at once.\n", "10m": ""} {
		got := f.exec(t.Context(), console{}, "submit", "--type", "T", "--id", "g", "--payload", "1", "--run-at", at)
		require.Equal(t, run{exitOK, "g\n", says}, got)
	}
}

func TestTenantLs(t *testing.T) {
	f := newFakeAPI(t)
	for i := range 5 {
		f.tenants[fmt.Sprint("t", i)] = api.TenantSettings{RPS: ptr(float64(i) + 0.5)}
	}
	got := f.exec(t.Context(), console{}, "tenant", "ls")
	require.Equal(t, exitOK, got.code)
	lines := strings.Split(strings.TrimSpace(got.out), "\n")
	require.Len(t, lines, 6, "lines of all pages")
	lines = strings.Split(strings.TrimSpace(f.exec(t.Context(), console{}, "tenant", "ls", "--json").out), "\n")
	require.Len(t, lines, 5, "lines of all pages")
	var last api.Tenant
	require.NoError(t, json.Unmarshal([]byte(lines[4]), &last))
	require.Equal(t, f.tenantDocument("t4"), last)
	f.tenants["own"] = api.TenantSettings{}
	for flags, lines := range map[string]int{"ls": 6, "ls --all": 7} {
		got := f.exec(t.Context(), console{}, append([]string{"tenant"}, strings.Fields(flags)...)...)
		require.Len(t, strings.Split(strings.TrimSpace(got.out), "\n"), lines, flags)
	}
	got = f.exec(t.Context(), console{outIsTerm: true}, "tenant", "ls")
	require.Equal(t, "TENANT                   STATE           RPS   WEIGHT   UNFINISHED    NON-READY  PER SEC\n"+
		"t0                       active          0.5        1       12,345          678      9.5", strings.Join(strings.Split(got.out, "\n")[:2], "\n"))
}

func TestWhy(t *testing.T) {
	f := newFakeAPI(t)
	submitGroup(t, f)
	const said = `Waits for         rate
Why               Its tenant acme has used up the limit.
Not before        2030-01-02 03:04:05Z
Jobs before it    1,234
Starts in about   1m23s
Limit             12.5 a second for its tenant; 12 of 12 used in this window of 1000 ms
`
	require.Equal(t, run{exitOK, "Job               g.0\n" + said, ""}, f.exec(t.Context(), console{}, "why", "g"))
	require.Equal(t, run{exitOK, "Job               g.1\nState             non ready\n" + said +
		"Last error        SMTP_451: later  [31m (attempt 3, 2030-01-02 03:04:05Z)\n" +
		"Error before      TIMEOUT: timed out after 30s (attempt 2, 2030-01-02 03:03:05Z)\n", ""}, f.exec(t.Context(), console{}, "why", "g", "1"))
	require.Equal(t, run{exitOK, "Job     g.0\nState   in flight\n", ""}, f.exec(t.Context(), console{}, "why", "g", "0"))

	f.exec(t.Context(), console{}, "why", "g", "2").ends(t, exitError, "404 Not Found: job g.2: not found\nGroup g exists; the ordinals of its jobs are 0 to 1.\n")
	got := f.exec(t.Context(), console{}, "why", "nosuch", "0")
	require.Contains(t, got.err, "\nCheck the group's id")

	var why api.Why
	require.NoError(t, json.Unmarshal([]byte(f.exec(t.Context(), console{}, "why", "g", "--json").out), &why))
	require.Equal(t, fakeWhy("g.0"), why)
	var j api.Job
	require.NoError(t, json.Unmarshal([]byte(f.exec(t.Context(), console{}, "why", "g", "1", "--json").out), &j))
	require.Equal(t, fakeWhy("g.1"), *j.Why)
}

func TestStatsShowsPausedTypes(t *testing.T) {
	var out strings.Builder
	require.NoError(t, (&Root{IO: IO{Out: &out}}).show(nil, func(t table) { statsRows(t, api.Stats{Types: []api.TypeStats{{Type: "A", Paused: true}, {Type: "B"}}}) }))
	require.Contains(t, out.String(), "A (paused)   0")
	require.NotContains(t, out.String(), "B (paused)")
}

// TestSubmitCSVWithoutJobs: for a CSV file of blank lines no group is created. If the server
// refuses the header row, the group is cancelled, unless it had jobs before. Blank lines before the
// header row are ignored.
func TestSubmitCSVWithoutJobs(t *testing.T) {
	for _, content := range []string{"", "\n \r\n\t"} {
		f := newFakeAPI(t)
		f.exec(t.Context(), console{}, "submit", "--type", "T", "--id", "g", "--file", writeFile(t, "a.csv", content)).ends(t, exitError, "the file is empty\nA CSV file begins with a header row")
		require.Empty(t, f.calls)
		got := f.exec(t.Context(), console{in: strings.NewReader(content)}, "submit", "--type", "T", "--file", "-", "--format", "csv")
		require.Equal(t, exitError, got.code)
		require.Empty(t, f.calls)
	}
	f := newFakeAPI(t)
	f.refusal = "the header row names a twice"
	f.exec(t.Context(), console{}, "submit", "--type", "T", "--id", "g", "--file", writeFile(t, "a.csv", "a,b\n1,2\n")).ends(t, exitError, "group g has no jobs and is cancelled")
	require.Equal(t, api.StatusCancelled, f.groupByID(t, "g").Status)

	f = newFakeAPI(t)
	require.Equal(t, exitOK, f.exec(t.Context(), console{}, "submit", "--type", "T", "--id", "g", "--no-seal", "--payload", "1").code)
	f.refusal = "the header row names a twice"
	got := f.exec(t.Context(), console{}, "submit", "--type", "T", "--id", "g", "--file", writeFile(t, "a.csv", "a,b\n1,2\n"))
	require.Equal(t, exitError, got.code)
	require.NotEqual(t, api.StatusCancelled, f.groupByID(t, "g").Status, "a group with earlier jobs must not be cancelled")

	f = newFakeAPI(t) // blank lines may precede the header row
	got = f.exec(t.Context(), console{}, "submit", "--type", "T", "--id", "g", "--file", writeFile(t, "a.csv", "\n\nto\na@example.com\n"))
	require.Equal(t, exitOK, got.code)
	require.Len(t, f.groupByID(t, "g").jobs, 1)
}

func TestBarOutputOnATerminalWithoutASize(t *testing.T) {
	f, err := os.Create(t.TempDir() + "/tty")
	require.NoError(t, err)
	defer f.Close()
	size := func(width, height int, err error) func(int) (int, int, error) {
		return func(int) (int, int, error) { return width, height, err }
	}
	require.Equal(t, io.Writer(f), barOutput(f, size(80, 24, nil)))
	require.Equal(t, io.Writer(f), barOutput(f, size(0, 0, errors.New("no terminal"))))
	for _, s := range [][2]int{{0, 0}, {0, 24}, {80, 0}} {
		out := barOutput(f, size(s[0], s[1], nil))
		_, isFile := out.(*os.File)
		require.False(t, isFile, "barOutput must hide that the output is a file")
		_, err := out.Write([]byte("x"))
		require.NoError(t, err)
	}
	b, err := os.ReadFile(f.Name())
	require.NoError(t, err)
	require.Equal(t, "xxx", string(b))
}

func TestUnreachableMailServer(t *testing.T) {
	l, err := net.Listen("tcp", "127.0.0.1:0")
	require.NoError(t, err)
	host, port, err := net.SplitHostPort(l.Addr().String())
	require.NoError(t, err)
	t.Setenv("BULKACTION_SMTP_HOST", host)
	t.Setenv("BULKACTION_SMTP_PORT", port)
	require.Empty(t, unreachableMailServer(t.Context()))
	require.NoError(t, l.Close())
	require.Equal(t, net.JoinHostPort(host, port), unreachableMailServer(t.Context()))
	t.Setenv("BULKACTION_WORKER_TYPES", "NOOP,HTTP")
	require.Empty(t, unreachableMailServer(t.Context()))
	t.Setenv("BULKACTION_WORKER_TYPES", "")
	t.Setenv("BULKACTION_SMTP_ACCOUNTS_FILE", "accounts.yaml")
	require.Empty(t, unreachableMailServer(t.Context()))
}
