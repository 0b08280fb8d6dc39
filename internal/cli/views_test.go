package cli

import (
	"bytes"
	"net/http"
	"net/http/httptest"
	"net/url"
	"os"
	"strings"
	"testing"
	"time"

	"github.com/stretchr/testify/require"
	"go.uber.org/goleak"

	"github.com/bulkaction/bulkaction/api"
	"github.com/bulkaction/bulkaction/internal/process/dev"
)

// TestEmptyFlags: an empty value, as that of a shell's unset variable, is refused, because the
// command would do something else without it.
func TestEmptyFlags(t *testing.T) {
	f := newFakeAPI(t)
	for args, want := range map[string]string{
		"submit --type T --payload 1 --run-at ":  "--run-at is empty: give a value, or leave the flag out",
		"submit --type T --payload 1 --tenant ":  "--tenant is empty",
		"submit --type T --payload 1 --payload ": "--payload is empty",
		"groups ls --tenant ":                    "--tenant is empty",
		"groups ls --since ":                     "--since",
		"retry g --code ":                        "--code is empty",
		"dead-letters --group ":                  "--group is empty",
	} {
		f.exec(t.Context(), console{}, strings.Split(args, " ")...).ends(t, exitUsage, want)
	}
	require.Empty(t, f.calls)
}

func TestWideTextsKeepTheColumns(t *testing.T) {
	var out bytes.Buffer
	tab := newTable(&out)
	tab.row("NAME", "JOBS", "TYPE")
	tab.row("봄 세일", "12", "NOOP")
	tab.row("e\u0301te\u0301", "3", "漢字")
	require.NoError(t, tab.flush())
	require.Equal(t, "NAME      JOBS   TYPE\n봄 세일   12     NOOP\ne\u0301te\u0301       3      漢字\n", out.String())
	require.Equal(t, "春の…", truncate("春のセール", 6))
	require.Equal(t, "spr…", truncate("spring", 4))

	out.Reset()
	r := &Root{IO: IO{Out: &out, Err: &out}}
	err := printLines(r, func(yield func(string, error) bool) { _ = yield("春の", nil) && yield("ab", nil) },
		&columns[string]{"%-6s %s", []any{"NAME", "N"}, func(s string) []any { return []any{s, "x"} }, ""})
	require.NoError(t, err)
	require.Equal(t, "NAME   N\n春の   x\nab     x\n", out.String())
}

func TestBusiestTenants(t *testing.T) {
	f := newFakeAPI(t)
	got := f.exec(t.Context(), console{}, "tenant", "ls", "--sort", "backlog")
	require.Equal(t, exitOK, got.code)
	require.Equal(t, "No watcher has looked at the tenants yet.\n", got.err)
	f.tenants = map[string]api.TenantSettings{"a": {}, "b": {}}
	got = f.exec(t.Context(), console{}, "tenant", "ls", "--sort", "backlog")
	require.Equal(t, "As of 2030-01-02 03:04:05Z.\n", got.err)
	lines := strings.Split(got.out, "\n")
	require.True(t, strings.HasPrefix(lines[1], "b "), got.out)
	require.True(t, strings.HasPrefix(lines[2], "a "), got.out)
	for _, args := range []string{"--sort name", "--sort backlog --all"} {
		got = f.exec(t.Context(), console{}, append([]string{"tenant", "ls"}, strings.Fields(args)...)...)
		require.Equal(t, exitUsage, got.code, args)
	}
}

func TestLastAudit(t *testing.T) {
	f := newFakeAPI(t)
	f.audit = api.AuditState{OK: true, Partitions: []api.AuditedPartition{{Leader: "w-1", LookedAt: &epoch}}}
	require.Equal(t, run{exitOK, `PARTITION   LEADER   LOOKED AT              FULL AUDIT AT
0           w-1      2030-01-02 03:04:05Z   never
`, ""}, f.exec(t.Context(), console{}, "audit", "--last"))

	ordinal := int64(7)
	f.audit.OK, f.audit.Partitions[0].Leader = false, ""
	f.audit.Violations = []api.Violation{{Law: "location", Group: "g", Ordinal: &ordinal, Detail: "it is gone"}}
	got := f.exec(t.Context(), console{}, "audit", "--last")
	require.Equal(t, exitError, got.code)
	require.Contains(t, got.out, "0           none")
	require.Contains(t, got.out, "location   0           g       7     it is gone")
	require.Contains(t, got.err, "a violation is open")
	got = f.exec(t.Context(), console{}, "audit", "--last", "--json")
	require.Equal(t, exitError, got.code)
	require.Contains(t, got.out, `"looked_at":"2030-01-02T03:04:05Z","deep_at":null`)
	require.Equal(t, exitUsage, f.exec(t.Context(), console{}, "audit", "--last", "--repair").code)
}

func TestHistory(t *testing.T) {
	f := newFakeAPI(t)
	got := f.exec(t.Context(), console{}, "history")
	require.Equal(t, exitOK, got.code)
	require.Contains(t, got.out, "No points yet")
	f.history = api.History{StepSeconds: 10, Points: []api.HistoryPoint{
		{T: epoch, Done: 4}, {T: epoch.Add(10 * time.Second), Done: 8, Gauges: api.Gauges{Waiting: 1234}},
		{T: epoch.Add(20 * time.Second), Done: 0.5},
	}}
	got = f.exec(t.Context(), console{}, "history", "--minutes", "15")
	require.Equal(t, exitOK, got.code, got.err)
	require.Contains(t, got.out, "TO     2030-01-02 03:04:25Z")
	require.Regexp(t, `done/s +▅█▁ +0\.5 +8\n`, got.out)
	require.Regexp(t, `waiting +█ +0 +1,234\n`, got.out)
	got = f.exec(t.Context(), console{}, "history", "--json")
	require.Contains(t, got.out, `{"step_seconds":10,"points":[{"t":"2030-01-02T03:04:05Z","accepted":0,"started":0,"done":4,`)
	for _, minutes := range []string{"14", "1441"} {
		require.Equal(t, exitUsage, f.exec(t.Context(), console{}, "history", "--minutes", minutes).code)
	}
}

func TestPlot(t *testing.T) {
	require.Empty(t, plot(nil, 60))
	require.Equal(t, "   ", plot([]float64{0, 0, 0}, 60))
	require.Equal(t, "▁▂▃▄▅▆▇█", plot([]float64{0.1, 1, 2, 3, 4, 5, 6, 8}, 60))
	require.Equal(t, "█ ", plot([]float64{0, 9, 0, 0}, 2), "the highest of several")
}

// TestDeadLettersFilters: the command sends its filters to the server, and lists all seven dead
// letters. A server's answer has only a part of them, so the command calls until there is no
// cursor.
func TestDeadLettersFilters(t *testing.T) {
	f := newFakeAPI(t)
	f.deadLetterCount = 7
	for args, want := range map[string]url.Values{
		"":                    {},
		"--code SMTP_550":     {"code": {"SMTP_550"}},
		"--group g --limit 0": {"group": {"g"}},
		"--tenant acme --type T --since 2026-01-02T15:04:05Z": {
			"tenant": {"acme"}, "type": {"T"}, "since": {"2026-01-02T15:04:05Z"},
		},
	} {
		f.queries = nil
		got := f.exec(t.Context(), console{}, append([]string{"dead-letters", "--json"}, strings.Fields(args)...)...)
		require.Equal(t, exitOK, got.code, args)
		require.Equal(t, 7, strings.Count(got.out, "\n"), args)
		sent, err := url.ParseQuery(f.queries[0])
		require.NoError(t, err)
		sent.Del("limit")
		require.Equal(t, want, sent, args)
	}
	got := f.exec(t.Context(), console{}, "dead-letters", "--since", "x")
	require.Equal(t, exitUsage, got.code, got.err)
}

func TestMapRows(t *testing.T) {
	m := api.JobMap{Jobs: 8200}
	for i := range int64(82) {
		m.Buckets = append(m.Buckets, api.MapBucket{From: 100 * i, To: 100*i + 99, Waiting: 100})
	}
	m.Buckets[0] = api.MapBucket{Done: 99, Failed: 1}
	m.Buckets[1] = api.MapBucket{Done: 1, Failed: 99}
	m.Buckets[2] = api.MapBucket{Done: 50, InFlight: 50}
	m.Buckets[3] = api.MapBucket{}
	m.Buckets[81] = api.MapBucket{Cancelled: 1}
	var out bytes.Buffer
	rows := newTable(&out)
	mapRows(rows, m)
	require.NoError(t, rows.flush())
	require.Contains(t, out.String(), "0       fFI?WWWW")
	require.Contains(t, out.String(), "8,000   WC\n")
}

func TestSummaryRows(t *testing.T) {
	var out bytes.Buffer
	rows := newTable(&out)
	summaryRows(rows, api.FailureSummary{Total: 12_000, Seen: 5000, Codes: []api.FailureCode{{
		Code: "GONE", Count: 12_000, Fingerprints: []api.FailureFingerprint{{
			Text: "no mailbox <n>", Count: 12_000, Sampled: 5000,
			Samples: []api.FailureSample{{Ordinal: 7, Error: "no mailbox 7\x1b[31m"}, {Ordinal: 8}},
		}},
	}}})
	require.NoError(t, rows.flush())
	require.Contains(t, out.String(), "about 12,000   no mailbox <n>\n")
	require.Contains(t, out.String(), "job 7: no mailbox 7 [31m\n")
}

func TestCounted(t *testing.T) {
	for n, want := range map[int64]string{0: "0 jobs", 1: "1 job", 1234: "1,234 jobs"} {
		require.Equal(t, want, counted(n, "job"))
	}
	require.Equal(t, "1000000", plainNumber(1e6))
}

// TestErrorOfTheAPIAboutAFlag: the command tells the API's error about a timeout as one about the
// flag. It leaves out that the API takes a number as well, because the flag does not.
func TestErrorOfTheAPIAboutAFlag(t *testing.T) {
	f := newFakeAPI(t)
	got := f.exec(t.Context(), console{}, "submit", "--type", "T", "--payload", "1", "--job-timeout", "30h")
	got.ends(t, exitUsage, `--job-timeout 30h0m0s: must be a duration such as "1m30s", from 1ms to 24h0m0s`+"\n")
}

// refusing is an API that answers every call with the same problem.
func refusing(t *testing.T, status int, fields ...api.FieldError) *fakeAPI {
	s := httptest.NewServer(http.HandlerFunc(func(w http.ResponseWriter, _ *http.Request) {
		problem(w, status, "no", fields...)
	}))
	t.Cleanup(s.Close)
	return &fakeAPI{Server: s}
}

func TestErrorAboutAFlagWithoutAValue(t *testing.T) {
	f := refusing(t, http.StatusUnprocessableEntity, api.FieldError{Field: "from_seats", Problem: "needs a service"})
	f.exec(t.Context(), console{}, "room", "recalibrate", "e", "--from-seats").ends(t, exitUsage, "bulkaction: --from-seats: needs a service\n")
}

func TestRefusedKeyNamesItsSource(t *testing.T) {
	f := refusing(t, http.StatusUnauthorized)
	t.Setenv(keyVariable, "")
	got := f.exec(t.Context(), console{}, "stats")
	require.Contains(t, got.err, "Give an API key with --api-key-file, BULKACTION_API_KEY_FILE or BULKACTION_API_KEY.")

	file := writeFile(t, "admin.key", "bka_1\n")
	got = f.exec(t.Context(), console{}, "stats", "--api-key-file", file)
	require.Contains(t, got.err, "The key came from the file "+file+". `bulkaction key ls` shows which keys are valid.\n")

	t.Setenv(keyVariable, "bka_1")
	got = f.exec(t.Context(), console{}, "stats")
	require.Contains(t, got.err, "The key came from BULKACTION_API_KEY. `bulkaction key ls` shows which keys are valid.\n")
	require.NotContains(t, got.err, "Give an API key")
}

// TestDevWithKeys: with keys, the first thing that dev says to try is to create one.
func TestDevWithKeys(t *testing.T) {
	t.Setenv("BULKACTION_AUTH", "keys")
	require.True(t, asksForKeys(os.Environ(), ""))
	t.Setenv("BULKACTION_AUTH", "")
	require.False(t, asksForKeys(os.Environ(), ""))
	require.True(t, asksForKeys(append(os.Environ(), "BULKACTION_API_ALLOW_PLAINTEXT=true"), "0.0.0.0:8080"))

	const at, redis = "http://127.0.0.1:8080", "redis://127.0.0.1:6379/0"
	require.Equal(t, "Try: bulkaction --api http://127.0.0.1:8080 submit --type NOOP --payload '{}' --wait",
		whatToTry(at, redis, false))
	require.Equal(t, "The API asks for keys. Create one: bulkaction key create --role admin --redis-url "+
		"redis://127.0.0.1:6379/0 > admin.key\nThen try: bulkaction --api http://127.0.0.1:8080 --api-key-file "+
		"admin.key submit --type NOOP --payload '{}' --wait", whatToTry(at, redis, true))
}

// TestEmptyLists: of dead letters, failures and groups, an empty list has its header row in the
// output and a note in the error output. With --json, both outputs are empty.
func TestEmptyLists(t *testing.T) {
	f := newFakeAPI(t)
	require.Equal(t, exitOK, f.exec(t.Context(), console{}, "submit", "--type", "T", "--id", "g", "--payload", "1").code)
	for args, note := range map[string]string{
		"dead-letters":              "No dead letters found.\n",
		"failures g":                "No failed jobs found.\n",
		"groups ls --tenant nobody": "No groups found.\n",
	} {
		got := f.exec(t.Context(), console{}, strings.Fields(args)...)
		require.Equal(t, exitOK, got.code, args)
		require.Equal(t, note, got.err, args)
		require.Equal(t, 1, strings.Count(got.out, "\n"), "the header row: %s", got.out)
		require.Equal(t, run{exitOK, "", ""}, f.exec(t.Context(), console{}, append(strings.Fields(args), "--json")...))
	}
	require.Empty(t, f.exec(t.Context(), console{}, "results", "g").err, "it has a result")
}

func TestResultOfTheDemo(t *testing.T) {
	var out bytes.Buffer
	d := dev.DemoResult{Jobs: 1, Done: 1, ElapsedSeconds: 0.5, JobsPerSecond: 2, SinkReceived: 1, Audit: dev.DemoAudit{OK: true}}
	require.NoError(t, (&Root{IO: IO{Out: &out}}).showDemo(d))
	require.Contains(t, out.String(), "\n1 of 1 e-mails done in 0.5 s (2 a second), 1 received by the sink, audit clean\n")

	out.Reset()
	d.Jobs, d.Done, d.ThrottlesPerJob, d.Audit.OK = 2, 2, 0.25, false
	require.NoError(t, (&Root{IO: IO{Out: &out}}).showDemo(d))
	require.Contains(t, out.String(), "2 of 2 e-mails done in 0.5 s (2 a second), 1 received by the sink, 0.25 throttles a job, audit 0 violations\n")
}

func TestMain(m *testing.M) { goleak.VerifyTestMain(m) }
