package cli

import (
	"encoding/json"
	"fmt"
	"net/http"
	"strings"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/bulkaction/bulkaction/api"
	"github.com/bulkaction/bulkaction/guard"
)

// submitGroup submits the group g with two jobs, one of which fails.
func submitGroup(t *testing.T, f *fakeAPI) {
	t.Helper()
	got := f.exec(t.Context(), console{}, "submit", "--type", "SEND_EMAIL", "--tenant", "acme", "--id", "g", "--name", "Spring", "--payload", `"ok"`, "--payload", `"fail"`)
	require.Equal(t, exitOK, got.code, got.err)
	require.Equal(t, "g\n", got.out)
	require.Empty(t, got.err)
}

func TestStatus(t *testing.T) {
	f := newFakeAPI(t)
	submitGroup(t, f)
	got := f.exec(t.Context(), console{}, "status", "g")
	require.Equal(t, exitOK, got.code, "the query worked")
	require.Equal(t, `Group      g
Name       Spring
Tenant     acme
Type       SEND_EMAIL
Priority   normal
Status     COMPLETED
Progress   2 of 2 ended (100%)

JOBS        COUNT
waiting     0
non-ready   0
ready       0
in flight   0
done        1
failed      1
cancelled   0
accepted    2
throttles   0
retries     0

FAILED WITH   JOBS
SMTP_550      1

AGGREGATE   VALUE
cost        12.5

STATE       SINCE
created     2030-01-02 03:04:05Z
completed   2030-01-02 03:05:05Z
`, got.out)
	require.Equal(t, "See them with `bulkaction failures g`, run them again with `bulkaction retry g`.\n", got.err)

	got = f.exec(t.Context(), console{}, "status", "g", "--json")
	require.Equal(t, exitOK, got.code)
	require.Empty(t, got.err)
	var g api.Group
	require.NoError(t, json.Unmarshal([]byte(got.out), &g))
	require.Equal(t, f.groupByID(t, "g").Group, g)
	require.Equal(t, 1, strings.Count(got.out, "\n"))
}

func TestStatusOfARunningGroup(t *testing.T) {
	f := newFakeAPI(t)
	f.keepOpen = true
	submitGroup(t, f)
	f.groups["g"].Counts.Failed = 1
	require.Equal(t, exitOK, f.exec(t.Context(), console{}, "status", "g").code, "the group has not ended, so failed jobs are no error yet")
}

func TestGroupTable(t *testing.T) {
	eta, total := 83.4, int64(12_345)
	g := api.Group{Status: api.StatusRunning, Paused: true, Round: 2, Total: &total, Counts: api.Counts{Accepted: 10_000, Done: 1200, Failed: 34}, ETASeconds: &eta}
	require.Equal(t, "RUNNING, paused, not sealed, round 2", groupState(g))
	require.Equal(t, "1,234 of 12,345 ended (9%), about 1m23s left", progressText(g))
	require.Equal(t, "0 of 0 ended", progressText(api.Group{}))
	for n, want := range map[int64]string{0: "0", 999: "999", 1000: "1,000", -1234567: "-1,234,567", -100: "-100"} {
		require.Equal(t, want, thousands(n))
	}
	require.Equal(t, "a [2Jb c", printable("a\x1b[2Jb\nc"))
	require.Equal(t, "ab…", truncate("abcd", 3))
}

func TestResultsAndFailures(t *testing.T) {
	f := newFakeAPI(t)
	submitGroup(t, f)
	const result = `{"ordinal":0,"duration_ms":1.5,"attempts":1,"data":{"cost":"<1>"}}` + "\n"
	const failure = `{"ordinal":1,"code":"SMTP_550","error":"no such user \u001b[31m<x>","attempts":4,"at":"2030-01-02T03:04:05Z"}` + "\n"
	for _, c := range []struct {
		console console
		args    string
		want    string
	}{
		{console{}, "results g --json", result},
		{console{outIsTerm: true}, "results g --json", result},
		{console{}, "results g", "" +
			"JOB        KEY                  ATTEMPTS           MS DATA\n" +
			"0          -                    1                 1.5 {\"cost\":\"<1>\"}\n"},
		{console{}, "failures g --json", failure},
		{console{outIsTerm: true}, "failures g --json", failure},
		{console{}, "failures g", "" +
			"JOB        KEY                  CODE                 ATTEMPTS AT                   ERROR\n" +
			"1          -                    SMTP_550             4        2030-01-02 03:04:05Z no such user  [31m<x>\n"},
	} {
		got := f.exec(t.Context(), c.console, strings.Fields(c.args)...)
		require.Equal(t, run{exitOK, c.want, ""}, got, c.args)
	}
}

func TestJobs(t *testing.T) {
	f := newFakeAPI(t)
	submitGroup(t, f)
	got := f.exec(t.Context(), console{}, "jobs", "g", "--state", "In-Flight")
	require.Equal(t, run{exitOK, "" +
		"JOB        KEY                  STATE      ATTEMPTS LAST ERROR\n" +
		"0          ?                    in_flight  1        TIMEOUT: too slow\n" +
		"1          customer-7           in_flight  2        SMTP_550: no such user\n", ""}, got)
	got = f.exec(t.Context(), console{}, "jobs", "g", "--limit", "1")
	require.Contains(t, got.err, "Only the first 1 are printed; --all prints all.")
	f.exec(t.Context(), console{}, "jobs", "g", "--state", "running").ends(t, exitUsage, `--state "running": must be one of waiting, non_ready`)

	got = f.exec(t.Context(), console{}, "job", "g", "--key", "customer-7")
	require.Equal(t, exitOK, got.code, got.err)
	require.Contains(t, got.out, "customer-7")
	require.Regexp(t, `Trace +0af7651916cd43dd8448eb211c80319c\n`, got.out)
	f.exec(t.Context(), console{}, "job", "g", "--key", "nobody").ends(t, exitError, `no job of group g has the key "nobody"`)
	for _, args := range [][]string{{"job", "g"}, {"job", "g", "1", "--key", "k"}, {"job", "g", "x"}} {
		require.Equal(t, exitUsage, f.exec(t.Context(), console{}, args...).code, args)
	}
}

func TestCancelAndRetry(t *testing.T) {
	f := newFakeAPI(t)
	submitGroup(t, f)
	require.Equal(t, run{exitOK, "g.7   cancelled\n", ""}, f.exec(t.Context(), console{}, "job", "cancel", "g", "7"))
	require.Equal(t, exitUsage, f.exec(t.Context(), console{}, "job", "cancel", "g").code)
	got := f.exec(t.Context(), console{}, "cancel", "g")
	require.Equal(t, exitError, got.code)
	require.Equal(t, "bulkaction: cancel group g: 409 Conflict: group g is COMPLETED: cancel is not possible\n", got.err)

	require.Equal(t, run{exitOK, "g   RUNNING   failed jobs run again\n", ""}, f.exec(t.Context(), console{}, "retry", "g"))
	require.Equal(t, 2, f.groupByID(t, "g").Round)
	got = f.exec(t.Context(), console{}, "retry", "g", "--job", "x")
	require.Equal(t, exitUsage, got.code, got.err)
	got = f.exec(t.Context(), console{}, "cancel", "g", "--json")
	require.Equal(t, run{exitOK, `{"id":"g","status":"CANCELLED","counts":{"accepted":2,"waiting":0,"non_ready":0,"ready":0,"in_flight":0,"done":1,"failed":1,"cancelled":0},"links":{"self":"/v1/groups/g"}}` + "\n", ""}, got)
}

func TestDeadLetters(t *testing.T) {
	f := newFakeAPI(t)
	f.deadLetterCount = 7
	got := f.exec(t.Context(), console{}, "dead-letters", "--json")
	require.Equal(t, exitOK, got.code)
	require.Equal(t, 7, strings.Count(got.out, "\n"))
	require.Empty(t, got.err)
	var first api.DeadLetter
	require.NoError(t, json.NewDecoder(strings.NewReader(got.out)).Decode(&first))
	require.Equal(t, "g.0", first.Job)

	got = f.exec(t.Context(), console{outIsTerm: true}, "dead-letters", "--limit", "3")
	require.Equal(t, exitOK, got.code)
	require.Equal(t, "AT                   JOB                      TENANT           TYPE             CODE                 ERROR", strings.Split(got.out, "\n")[0])
	require.Equal(t, 4, strings.Count(got.out, "\n"))
	require.Equal(t, "Only the newest 3 are printed; --all prints all.\n", got.err)

	for limit, lines := range map[string]int{"0": 7, "7": 7, "1": 1} {
		got = f.exec(t.Context(), console{}, "dead-letters", "--json", "--limit", limit)
		require.Equal(t, lines, strings.Count(got.out, "\n"))
		require.Equal(t, limit == "1", got.err != "")
	}
}

func TestStats(t *testing.T) {
	f := newFakeAPI(t)
	require.Equal(t, run{exitOK, `Groups               12
Active tenants       3
Started per second   1234.6
Rate limit           10,000 a second, fixed window of 1000 ms, elastic; 42 used in this window
Rejected messages    0
Dead letters         7
Partitions           4
Layout of the data   jobs 1+, rooms 1

ROLE      PROCESSES
fetcher   1
watcher   none

TYPE         BACKLOG     RUNNABLE   WAITING     NON-READY   READY   IN FLIGHT   WORKERS
SEND_EMAIL   1,234,567   1,067      1,234,000   500         67      10          2

WORKER   ACTIVE   OF   SERVES            SEEN
w-1      9        10   SEND_EMAIL HTTP   2030-01-02 03:04:05Z, shutting down

STAGE   ROLE                   COUNTS              SEEN
f-1     fetcher, not running   empty=1 fetched=5   2030-01-02 03:04:05Z
`, ""}, f.exec(t.Context(), console{}, "stats"))

	got := f.exec(t.Context(), console{}, "stats", "--json")
	var s api.Stats
	require.NoError(t, json.Unmarshal([]byte(got.out), &s))
	require.Equal(t, 4, s.Partitions)
	require.Equal(t, "none", limitText(api.RateLimit{}))
}

func TestWatch(t *testing.T) {
	f := newFakeAPI(t)
	f.keepOpen = true
	submitGroup(t, f)
	watched := make(chan run)
	go func() { watched <- f.exec(t.Context(), console{}, "watch", "g") }()
	require.Eventually(t, func() bool { return f.called("GET /v1/groups/g/events") }, waitFor, tick)
	f.mu.Lock()
	f.groups["g"].finish()
	f.groups["g"].change()
	f.mu.Unlock()

	got := <-watched
	require.Equal(t, exitFailedJobs, got.code)
	require.Contains(t, got.out, "2030-01-02 03:04:05Z COMPLETED   2 of 2 ended (100%), 1 failed\nGroup      g\n")
	require.Contains(t, got.err, "group g has ended: 1 of 2 jobs failed")

	got = f.exec(t.Context(), console{}, "watch", "g", "--json")
	require.Equal(t, exitFailedJobs, got.code)
	var e api.Event
	require.NoError(t, json.Unmarshal([]byte(got.out), &e), "the output must contain only events")
	require.Equal(t, "group.completed", e.Type)
}

func TestWatchOnATerminal(t *testing.T) {
	f := newFakeAPI(t)
	submitGroup(t, f)
	got := f.exec(t.Context(), console{terminal: true, outIsTerm: true}, "watch", "g")
	require.Equal(t, exitFailedJobs, got.code)
	require.True(t, strings.HasPrefix(got.out, "Group      g\n"), "the bar shows the states, so the output must contain only the summary: %s", got.out)
	require.Contains(t, got.err, "COMPLETED")
	require.Contains(t, got.err, "2 of 2 ended (100%), 1 failed")

	got = f.exec(t.Context(), console{terminal: true}, "watch", "g", "--json")
	require.True(t, json.Valid([]byte(got.out)), "the output must contain no progress")
	require.Contains(t, got.err, "COMPLETED")
}

const (
	waitFor = 10 * time.Second
	tick    = time.Millisecond
)

func (f *fakeAPI) listGuards(w http.ResponseWriter, r *http.Request) {
	switch q := r.URL.Query(); {
	case q.Get("kind") == "key":
		reply(w, http.StatusOK, api.GuardList{Guards: []api.GuardSummary{{Name: "key/hosts/a"}}})
	case q.Get("cursor") == "":
		reply(w, http.StatusOK, api.GuardList{Cursor: "0.1.", Guards: []api.GuardSummary{{
			Name: "pool/smtp", Members: 40, Free: 3, Cooling: 30, Leases: 7, Queue: 1234,
			Counters: map[string]int64{"granted": 1234567, "denied": 5, "lost": 2},
		}}})
	default:
		reply(w, http.StatusOK, api.GuardList{Guards: []api.GuardSummary{{Name: "lock/a"}, {Name: "pool/smtp"}, {Name: "limiter/api"}}})
	}
}

func fakeGuard(name string) api.Guard {
	left, at := int64(17), epoch
	return api.Guard{
		Name: name, Rev: 3,
		Spec: api.GuardSpec{
			Limiter: "sliding", Permits: 80, WindowMS: 600_000, Failures: 3, OpenForMS: 600_000, Successes: 3, Concurrency: 1,
			LeaseMS: 30_000, MaxWaitMS: 60_000, MaxQueue: 10_000,
		},
		Members: []api.GuardMember{
			{ID: "a", State: "busy", Breaker: "half_open", Failures: 1, Held: 1, Left: &left, LastUsedAt: &at, Uses: 1234},
			{ID: "b", State: "free", Breaker: "closed", NextAt: &at},
		},
		Queue:    api.GuardQueue{Length: 2, OldestMS: 1500},
		Counters: map[string]int64{"granted": 1234},
	}
}

func (f *fakeAPI) showGuard(w http.ResponseWriter, r *http.Request) {
	switch r.PathValue("name") {
	case "health":
		reply(w, http.StatusOK, f.health)
		return
	case "limiter/api":
		v := api.Guard{Name: "limiter/api", Spec: api.GuardSpec{Limiter: "token", Permits: 5, WindowMS: 1000, Burst: 10}}
		if r.URL.Query().Get("keys") == "true" {
			v.Keys, v.MoreKeys = []string{"user-1", "user-2"}, true
		}
		reply(w, http.StatusOK, v)
		return
	}
	if r.PathValue("name") == "none" {
		problem(w, http.StatusNotFound, "guard none: no such guard")
		return
	}
	reply(w, http.StatusOK, fakeGuard(r.PathValue("name")))
}

func (f *fakeAPI) controlGuard(w http.ResponseWriter, r *http.Request) {
	name, member, do := r.PathValue("name"), r.PathValue("id"), r.PathValue("verb")
	switch {
	case name == "none" || member == "x":
		problem(w, http.StatusNotFound, "not found")
	case member == "b" && do == "open":
		problem(w, http.StatusConflict, "the member has no circuit breaker")
	default:
		reply(w, http.StatusAccepted, api.GuardAction{Guard: name, Member: member, Action: do})
	}
}

func TestGuardLs(t *testing.T) {
	f := newFakeAPI(t)
	got := f.exec(t.Context(), console{outIsTerm: true}, "guard", "ls")
	require.Equal(t, exitOK, got.code, got.err)
	lines := strings.Split(strings.TrimSpace(got.out), "\n")
	require.Len(t, lines, 4, "sorted, and each guard once")
	require.Contains(t, got.err, "Redis does not answer: guards follow their outage policies.")
	require.Equal(t, "GUARD MEMBERS FREE COOLING LEASES QUEUE GRANTED DENIED LOST", strings.Join(strings.Fields(lines[0]), " "))
	require.Equal(t, "lock/a 0 0 0 0 0 0 0 0", strings.Join(strings.Fields(lines[2]), " "))
	require.Equal(t, "limiter/api - - - - - - - -", strings.Join(strings.Fields(lines[1]), " "))
	require.Equal(t, "pool/smtp 40 3 30 7 1,234 1,234,567 5 2", strings.Join(strings.Fields(lines[3]), " "))
	f.health = api.GuardHealth{Healthy: true, Redis: api.GuardRedisHealth{Reachable: true, PingMS: 0.34, Role: "master", MemoryRatio: 0.257}}
	require.Contains(t, f.exec(t.Context(), console{}, "guard", "ls").err, "Redis (master) answers in 0.3 ms; its memory is 26% full.")
	f.health.Healthy, f.health.Redis.Evicts, f.health.Redis.MemoryRatio = false, true, 0
	require.Contains(t, f.exec(t.Context(), console{}, "guard", "ls").err, "its memory has no limit. It forgets keys when that is full")
	got = f.exec(t.Context(), console{}, "guard", "ls", "--kind", "key", "--json")
	require.Equal(t, `{"name":"key/hosts/a","rev":0,"members":0,"free":0,"cooling":0,"leases":0,"queue":0,"counters":null}`+"\n", got.out)
	f.exec(t.Context(), console{}, "guard", "ls", "--kind", "keys").ends(t, exitUsage, `--kind "keys": must be one of pool`)
	require.Equal(t, exitUsage, f.exec(t.Context(), console{}, "guard").code)
}

func TestGuardShow(t *testing.T) {
	f := newFakeAPI(t)
	got := f.exec(t.Context(), console{}, "guard", "show", "pool/smtp")
	require.Equal(t, exitOK, got.code, got.err)
	for _, line := range []string{
		"Limit 80 in any 10m0s", "Breaker opens after 3 failures in a row for 10m0s, closes after 3 successes",
		"Queue 2 of at most 10,000, for at most 1m0s, the first for 1.5s", "granted 1,234",
		"a busy half-open 1 1 17 1,234 2030-01-02 03:04:05Z",
		"b free closed 0 0 no limit 0 never 2030-01-02 03:04:05Z",
	} {
		require.Contains(t, strings.Join(strings.Fields(got.out), " "), line)
	}
	require.Contains(t, f.exec(t.Context(), console{}, "guard", "show", "lock/a", "--json").out, `{"name":"lock/a","rev":3,`)
	got = f.exec(t.Context(), console{}, "guard", "show", "limiter/api")
	require.Equal(t, "Guard limiter/api Limit 5 per 1s, bursts of 10, for each key", strings.Join(strings.Fields(got.out), " "))
	got = f.exec(t.Context(), console{}, "guard", "show", "limiter/api", "--keys")
	require.Contains(t, strings.Join(strings.Fields(got.out), " "), "for each key KEY user-1 user-2 …")
	f.exec(t.Context(), console{}, "guard", "show", "none").ends(t, exitError, "`bulkaction guard ls` lists")
	for _, args := range [][]string{nil, {"a", "b"}, {"a b"}, {"pools/a"}} {
		require.Equal(t, exitUsage, f.exec(t.Context(), console{}, append([]string{"guard", "show"}, args...)...).code, args)
	}
}

func TestGuardActions(t *testing.T) {
	f := newFakeAPI(t)
	for do, done := range map[guard.Action]string{
		guard.Disable: "disabled", guard.Enable: "enabled", guard.Open: "opened", guard.CloseBreaker: "closed",
		guard.TakeBack: "taken back",
	} {
		got := f.exec(t.Context(), console{}, "guard", string(do), "smtp", "a")
		require.Equal(t, exitOK, got.code, got.err)
		require.Equal(t, fmt.Sprintf("smtp   a   %s\n", done), got.out)
		require.Equal(t, do == guard.TakeBack, strings.Contains(got.err, "a third of a lease later"))
		require.True(t, f.called("POST /v1/guards/smtp/members/a/"+string(do)))
		got = f.exec(t.Context(), console{}, "guard", string(do), "breaker/b", "--json")
		require.Equal(t, fmt.Sprintf(`{"guard":"breaker/b","member":"1","action":%q}`+"\n", do), got.out)
	}
	for args, hint := range map[string]string{
		"disable none a": "A guard is known once a process has used it",
		"disable smtp x": "Guard smtp exists; `bulkaction guard show smtp` lists its members, for example a.",
		"open smtp b":    "Its policy has no breaker.",
	} {
		f.exec(t.Context(), console{}, append([]string{"guard"}, strings.Fields(args)...)...).ends(t, exitError, hint)
	}
	for args, problem := range map[string]string{
		"disable":         "needs a guard",
		"disable a b c":   "needs a guard",
		"disable smtp":    "`bulkaction guard show smtp` lists them",
		"disable smtp a/": "member id",
		"disable x/y a":   "must be NAME or KIND/NAME",
	} {
		f.exec(t.Context(), console{}, append([]string{"guard"}, strings.Fields(args)...)...).ends(t, exitUsage, problem)
	}
}
