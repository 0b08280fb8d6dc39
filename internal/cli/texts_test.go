package cli

import (
	"bytes"
	"net/http"
	"net/http/httptest"
	"os"
	"strings"
	"testing"

	"github.com/stretchr/testify/require"

	"github.com/bulkaction/bulkaction/api"
	"github.com/bulkaction/bulkaction/internal/process/dev"
)

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
	require.Equal(t, exitUsage, got.code)
	require.Contains(t, got.err, `--job-timeout 30h0m0s: must be a duration such as "1m30s", from 1ms to 24h0m0s`+"\n")
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
	got := f.exec(t.Context(), console{}, "room", "recalibrate", "e", "--from-seats")
	require.Equal(t, exitUsage, got.code)
	require.Contains(t, got.err, "bulkaction: --from-seats: needs a service\n")
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
