package cli

import (
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"io"
	"io/fs"
	"net"
	"net/http"
	"net/http/cookiejar"
	"net/http/httptest"
	"net/url"
	"os"
	"path/filepath"
	"strings"
	"syscall"
	"testing"
	"time"

	"github.com/redis/go-redis/v9"
	"github.com/spf13/cobra"
	"github.com/spf13/pflag"
	"github.com/stretchr/testify/require"

	"github.com/bulkaction/bulkaction/api"
	"github.com/bulkaction/bulkaction/guard"
	"github.com/bulkaction/bulkaction/internal/jobs/ledger"
	"github.com/bulkaction/bulkaction/internal/process/app"
	"github.com/bulkaction/bulkaction/internal/process/roles"
	"github.com/bulkaction/bulkaction/internal/testkit/redistest"
)

func TestWrongUsage(t *testing.T) {
	f := newFakeAPI(t)
	for _, c := range []struct {
		args string
		err  string
	}{
		{"nosuch", `unknown command "nosuch" for "bulkaction"; ` + "`bulkaction --help` lists the commands"},
		{"sumbit", `unknown command "sumbit" for "bulkaction"; did you mean ` + "`bulkaction submit`?"},
		{"tenant paus acme", `unknown command "paus" for "bulkaction tenant"; did you mean ` + "`bulkaction tenant pause`?"},
		{"submit --typ T", "unknown flag: --typ; did you mean --type?"},
		{"groups ls --statuss FAILED", "unknown flag: --statuss; did you mean --status?"},
		{"status", "status needs the id of one group, got 0 arguments"},
		{"watch a b", "watch needs the id of one group, got 2 arguments"},
		{"status g --nosuch", "unknown flag: --nosuch; `bulkaction status --help` lists the flags"},
		{"stats extra", `stats takes no argument "extra"`},
		{"dead-letters --limit -1", "--limit -1: must be 0 (all) or more"},
		{"dead-letters --limit x", `--limit "x": must be a whole number`},
		{"stats --api ftp://x", `--api "ftp://x": write it as http://127.0.0.1:8080`},
		{"stats --api :::", "--api"},
		{"submit", "there are no jobs: give --file, --payload or --body, or --no-seal to append jobs later; --type is missing"},
		{"submit --type T --file x.csv --payload 1", "--file, --payload and --body exclude each other"},
		{"submit --type T --body x", "--type cannot be combined with --body"},
		{"submit --type T --payload {", "--payload number 1 is not JSON"},
		{"submit --type T --payload 1 --run-at soon", `--run-at "soon": write a time`},
		{"submit --type T --payload 1 --aggregate op=sum", "needs as=NAME and op=OPERATION"},
		{"submit --type T --payload 1 --aggregate as=x,op=sum,as=y", "as is there twice"},
		{"submit --type T --payload 1 --aggregate as=x,op=sum,of=y", `the keys are as, op, field and over, not "of"`},
		{"submit --type T --payload 1 --tag a", "--tag: must be KEY=VALUE with a key that matches"},
		{"groups ls --tag a=1 --tag a=2", "--tag: must name each key once"},
		{"submit --type T --payload 1 --format csv", "--format needs --file"},
		{"submit --type T --wait --no-seal", "--wait would never end with --no-seal"},
		{"submit --type T --file cli.go", "unknown format of cli.go: give --format ndjson or --format csv"},
		{"submit --type a/b --payload 1 --priority urgent --tenant {", `--type "a/b": must match ^[A-Za-z0-9._-]{1,128}$ (except . and ..); --tenant "{": must match`},
		{"submit --type T --payload 1 --priority HIGH", `--priority "HIGH": must be high, normal or low`},
		{"submit --type T --payload 1 --id a/b", `--id "a/b": must match`},
		{"pause", "pause needs the id of one group, got 0 arguments"},
		{"resume a b", "resume needs the id of one group, got 2 arguments"},
		{"pause a/b", `group id "a/b": must match`},
		{"type", "type needs a subcommand: show, scale, set, pause, resume"},
		{"type block T", `unknown command "block" for "bulkaction type"; there are: pause, resume, scale, set, show`},
		{"type pause", "pause needs the id of one type, got 0 arguments"},
		{"type pause a/b", `type id "a/b": must match`},
		{"type scale A,a/b", `type id "a/b": must match`},
		{"type scale T --drain 0s", "drain: must be a time from 1s to 24h0m0s, such as 60s"},
		{"tenant", "tenant needs a subcommand: ls, show, set, erase, pause, resume"},
		{"tenant drop acme", `unknown command "drop"`},
		{"tenant ls acme", `ls takes no argument "acme"`},
		{"tenant show", "show needs the id of one tenant, got 0 arguments"},
		{"tenant set acme", "nothing to set: give --rps, --in-flight, --weight, --base-priority or --clear"},
		{"tenant set --rps 1", "set needs the id of one tenant, got 0 arguments"},
		{"tenant set acme --rps 0", "--rps 0: must be above 0"},
		{"tenant set acme --rps -1", "--rps -1: must be above 0"},
		{"tenant set acme --rps NaN", "--rps NaN: must be above 0"},
		{"tenant set acme --rps 1e10", "--rps 10000000000: must be above 0"},
		{"tenant set acme --rps many", `--rps "many": must be a number`},
		{"tenant set acme --weight 1e6", "--weight 1000000: must be 0.001 to 1000"},
		{"submit --wait", "See `bulkaction submit --help`.\n"},
		{"watch a --nosuch", "unknown flag: --nosuch; `bulkaction watch --help` lists the flags\n"},
		{"job g 0 --key k", "give the ordinal or --key, not both"},
		{"job g", "job needs a group, and an ordinal or --key, got 1 argument\n"},
		{"key create --role x", `role "x": must be one of admin, operator, reader, producer, metrics or service`},
		{"key create", "key create needs --role: one of admin, operator, reader, producer, metrics or service"},
		{"key create --role admin --expires 30d", `--expires "30d": must be a duration from 1m to 87600h, such as 720h; there are no days`},
		{"key create --role admin --expires 30s", "expires 30s: must be from 1m to 87600h, or 0 for never"},
		{"room set e --grace 5", `--grace "5": must be a duration with its unit, such as 30s, from 0s (until the stream ends) to 24h`},
		{"tenant set acme --weight 0", "--weight 0: must be 0.001 to 1000"},
		{"tenant set acme --weight 1001", "--weight 1001: must be 0.001 to 1000"},
		{"tenant set acme --weight NaN", "--weight NaN: must be 0.001 to 1000"},
		{"tenant set acme --base-priority 1.5", `--base-priority "1.5": must be a whole number`},
		{"tenant set acme --base-priority -1000000000000001", "--base-priority -1000000000000001: must be -1e15 to 1e15"},
		{"why", "why needs a group, and an ordinal for one of its jobs, got 0 arguments"},
		{"why g 1 2", "got 3 arguments"},
		{"why g first", `ordinal "first": must be a whole number from 0`},
		{"why g -- -1", `ordinal "-1": must be a whole number from 0`},
		{"why a/b", `group id "a/b": must match`},
	} {
		t.Run(c.args, func(t *testing.T) {
			got := f.exec(t.Context(), console{}, strings.Fields(c.args)...)
			got.ends(t, exitUsage, c.err)
			require.Equal(t, 1, strings.Count(got.err, " --help`"), "the help of one command is named: %s", got.err)
			require.Empty(t, got.out)
		})
	}
	require.Empty(t, f.calls, "no request may be sent")
}

func TestWrongUsageOfRoles(t *testing.T) {
	for args, want := range map[string]string{
		"worker resiz w 1": `unknown command "resiz" for "bulkaction worker"; did you mean ` + "`bulkaction worker resize`?",
		"fetcher now":      `fetcher takes no argument "now"`,
	} {
		console{}.exec(t.Context(), strings.Fields(args)...).ends(t, exitUsage, want)
	}
	var help strings.Builder
	describe(newWorker(&Root{}), &help)
	require.Contains(t, help.String(), "Subcommand: worker resize WORKER SLOTS\n  Set how many jobs a worker process runs at once\n")
}

func TestHelpExitsWithSuccess(t *testing.T) {
	for _, args := range [][]string{nil, {"--help"}, {"help", "submit"}, {"submit", "--help"}, {"--version"}} {
		got := console{}.exec(t.Context(), args...)
		require.Equal(t, exitOK, got.code)
		require.NotEmpty(t, got.out)
		require.Empty(t, got.err)
	}
	for _, c := range []string{"submit", "status", "watch", "results", "failures", "cancel", "pause", "resume", "retry", "why", "tenant", "type", "dead-letters", "stats"} {
		require.Contains(t, console{}.exec(t.Context()).out, "  "+c+" ")
	}
}

func TestMoreCommands(t *testing.T) {
	var out strings.Builder
	demo := func(r *Root) *cobra.Command {
		return &cobra.Command{Use: "extra", RunE: func(*cobra.Command, []string) error { return r.Print(map[string]int{"jobs": 1}) }}
	}
	code := Main(t.Context(), []string{"extra"}, IO{In: strings.NewReader(""), Out: &out, Err: &out}, demo)
	require.Equal(t, exitOK, code)
	require.Equal(t, "{\"jobs\":1}\n", out.String())
}

func TestAddressOfTheAPI(t *testing.T) {
	f := newFakeAPI(t)
	t.Setenv("BULKACTION_API", strings.TrimPrefix(f.URL, "http://"))
	require.Equal(t, exitOK, console{}.exec(t.Context(), "stats", "--json").code)
	require.Equal(t, exitOK, console{}.exec(t.Context(), "stats", "--json", "--api", f.URL+"/").code)
	require.Equal(t, []string{"GET /v1/stats", "GET /v1/stats"}, f.calls)
}

func TestErrorsSayWhatToDo(t *testing.T) {
	l, err := net.Listen("tcp", "127.0.0.1:0")
	require.NoError(t, err)
	require.NoError(t, l.Close())
	got := console{}.exec(t.Context(), "stats", "--api", l.Addr().String())
	got.ends(t, exitError, "connection refused", "Is it running? Start it with `bulkaction dev`, or give its address with --api or BULKACTION_API.")
	require.Empty(t, got.out)

	f := newFakeAPI(t)
	for _, command := range []string{"status", "watch", "results", "failures", "cancel", "pause", "resume", "retry", "why"} {
		got := f.exec(t.Context(), console{terminal: true}, command, "nosuch")
		got.ends(t, exitError, "404 Not Found: group nosuch: not found\nCheck the group's id")
		require.Empty(t, got.out)
	}
	f.exec(t.Context(), console{}, "status", "a/b").ends(t, exitUsage, `group id "a/b": must match`)

	for status, advice := range map[int]string{500: "The server's log says more.", 429: "more work than it can take", 503: "Redis"} {
		srv := httptest.NewServer(http.HandlerFunc(func(w http.ResponseWriter, _ *http.Request) {
			w.Header().Set("Retry-After", "3600") // longer than the client waits
			problem(w, status, "")
		}))
		got := console{}.exec(t.Context(), "stats", "--api", srv.URL)
		srv.Close()
		got.ends(t, exitError, advice)
	}
}

// brokenPipe is a pipe whose reader has closed it.
type brokenPipe struct{}

func (brokenPipe) Write([]byte) (int, error) { return 0, syscall.EPIPE }

func TestBrokenPipe(t *testing.T) {
	f := newFakeAPI(t)
	require.Equal(t, exitOK, f.exec(t.Context(), console{}, "submit", "--type", "T", "--id", "g", "--payload", "1").code)
	f.deadLetterCount = 10
	for _, args := range []string{"results g", "status g", "status g --json", "watch g", "watch g --json", "dead-letters", "stats", "submit --type T --payload 1"} {
		got := f.exec(t.Context(), console{out: brokenPipe{}}, strings.Fields(args)...)
		require.Equal(t, exitOK, got.code, args)
		require.Empty(t, got.err, args)
	}
}

type fullDisk struct{}

func (fullDisk) Write([]byte) (int, error) { return 0, syscall.ENOSPC }

func TestLostOutputIsAnError(t *testing.T) {
	f := newFakeAPI(t)
	require.Equal(t, exitOK, f.exec(t.Context(), console{}, "submit", "--type", "T", "--id", "g", "--payload", "1").code)
	for _, args := range []string{"results g", "status g", "watch g", "stats", "cancel g"} {
		require.Equal(t, exitError, f.exec(t.Context(), console{out: fullDisk{}}, strings.Fields(args)...).code, args)
	}
}

func TestInterrupted(t *testing.T) {
	f := newFakeAPI(t)
	f.keepOpen = true
	require.Equal(t, exitOK, f.exec(t.Context(), console{}, "submit", "--type", "T", "--id", "g", "--payload", "1").code)
	for _, args := range []string{"watch g", "watch g --json", "submit --type T --id g --payload 1 --wait", "submit --type T --id h --payload 1 --wait --json"} {
		for _, terminal := range []bool{false, true} {
			f.mu.Lock()
			f.calls = nil
			f.mu.Unlock()
			ctx, cancel := context.WithCancel(t.Context())
			done := make(chan run)
			go func() { done <- f.exec(ctx, console{terminal: terminal}, strings.Fields(args)...) }()
			require.Eventually(t, func() bool { return f.called("GET /v1/groups/g/events") || f.called("GET /v1/groups/h/events") }, waitFor, tick)
			cancel()
			got := <-done
			got.ends(t, exitInterrupted, "bulkaction: interrupted\nThe group still runs: `bulkaction watch ")
		}
	}
	ctx, cancel := context.WithCancel(t.Context())
	cancel()
	for _, command := range []string{"stats", "dead-letters", "status g", "results g"} {
		require.Equal(t, exitInterrupted, f.exec(ctx, console{}, strings.Fields(command)...).code)
	}
}

func TestExitCodeOfAnEndedGroup(t *testing.T) {
	var failed *failedJobsError
	require.NoError(t, failedJobs(api.Group{Status: api.StatusRunning, Counts: api.Counts{Failed: 3}}))
	require.NoError(t, failedJobs(api.Group{Status: api.StatusCompleted, Counts: api.Counts{Done: 3}}))
	require.NoError(t, failedJobs(api.Group{Status: api.StatusCancelled, Counts: api.Counts{Cancelled: 3}}))
	require.ErrorAs(t, failedJobs(api.Group{Status: api.StatusCompleted, Counts: api.Counts{Done: 3, Failed: 1}}), &failed)
	require.ErrorAs(t, failedJobs(api.Group{Status: api.StatusCancelled, Counts: api.Counts{Failed: 1}}), &failed)
	require.ErrorAs(t, failedJobs(api.Group{Status: api.StatusFailed}), &failed)
	require.Empty(t, advice(errors.New("something else")))
	require.Equal(t, "See them with `bulkaction failures g`, run them again with `bulkaction retry g`.",
		advice(failedJobs(api.Group{ID: "g", Status: api.StatusFailed, FailuresByCode: map[string]int64{"SMTP_550": 2}})))
	require.Contains(t, advice(failedJobs(api.Group{ID: "g", Status: api.StatusFailed, FailuresByCode: map[string]int64{"SMTP_550": 2, "LOST": 3}})),
		"3 of them vanished from Redis: their errors say which must be submitted again in a new group.")
}

// TestGlobalFlags: isGlobal returns true for each of the persistent flags of the root command.
func TestGlobalFlags(t *testing.T) {
	root := (&Root{}).command(nil)
	root.PersistentFlags().VisitAll(func(f *pflag.Flag) { require.True(t, isGlobal(f.Name), f.Name) })
}

func runRole(t *testing.T, role process) int {
	t.Helper()
	var log strings.Builder
	code := app.Run(t.Context(), app.Options{
		Role: "fetcher", Environ: []string{"BULKACTION_ADMIN_ADDR=127.0.0.1:0"}, Stderr: &log,
	}, role)
	t.Log(log.String())
	return code
}

// TestRoleWritesItsJournal requires the lines that the module bench reads, also from binaries of
// other revisions.
func TestRoleWritesItsJournal(t *testing.T) {
	dir := t.TempDir()
	role := func(ctx context.Context, _ *app.Process) error {
		if h := roles.HooksOf(ctx); h.Admitted != nil {
			h.Admitted(7, 0, "T", []ledger.Permit{{Tenant: "acme", N: 3}})
			h.Promoted(8, 2, []ledger.Permit{{Tenant: "acme", N: 1}})
			h.Started(9, 0, "T", "acme", "g", 5, 1)
		}
		return nil
	}
	require.Equal(t, app.ExitOK, runRole(t, withJournal(dir, role)))
	files, err := filepath.Glob(filepath.Join(dir, "*.journal.tsv"))
	require.NoError(t, err)
	require.Len(t, files, 1)
	got, err := os.ReadFile(files[0])
	require.NoError(t, err)
	require.Equal(t, "P\t7\t0\tT\tacme\tadmit\t3\nP\t8\t2\t\tacme\tpromote\t1\nS\t9\t0\tT\tacme\tg\t5\t1\n", string(got))

	require.Equal(t, app.ExitOK, runRole(t, withJournal("", role)), "without a folder there is no journal")
	require.Equal(t, app.ExitError, runRole(t, withJournal(filepath.Join(dir, "nowhere"), role)))
	_, err = os.Stat(filepath.Join(dir, "nowhere"))
	require.ErrorIs(t, err, fs.ErrNotExist)
}

func TestRoleWritesItsCPUProfile(t *testing.T) {
	role := func(context.Context, *app.Process) error { return nil }
	name := filepath.Join(t.TempDir(), "worker.pprof")
	require.Equal(t, app.ExitOK, runRole(t, withProfile(name, role)))
	info, err := os.Stat(name)
	require.NoError(t, err)
	require.Positive(t, info.Size())
	require.Equal(t, app.ExitOK, runRole(t, withProfile("", role)))
	require.Equal(t, app.ExitError, runRole(t, withProfile(filepath.Join(name, "nowhere"), role)))
}

// TestConsole runs `bulkaction console` on a real Redis: it logs in with a key, controls a guard,
// an event and a type, and finds the changes in the activity log. After the key is revoked, it is
// refused. The console process leaves the ingest stream alone.
func TestConsole(t *testing.T) {
	server := redistest.Server(t)
	at := []string{"--redis-url", server.URL()}
	got := console{}.exec(t.Context(), append([]string{"key", "create", "--role", "admin", "--json"}, at...)...)
	require.Equal(t, exitOK, got.code, got.err)
	var key struct{ Key, ID string }
	require.NoError(t, json.Unmarshal([]byte(got.out), &key))
	entry := redis.XAddArgs{Stream: "bulk-action:ingest", Values: []string{"type", "group.cancel", "data", `{"group":"x"}`}}
	require.NoError(t, server.Client().XAdd(t.Context(), &entry).Err())

	t.Setenv("BULKACTION_AUTH", "keys")
	ctx, stop := context.WithCancel(t.Context())
	started, out := io.Pipe()
	ended := make(chan run, 1)
	go func() {
		got := console{out: out}.exec(ctx, append([]string{"console", "--addr", "127.0.0.1:0", "--json"}, at...)...)
		_ = out.CloseWithError(io.EOF)
		ended <- got
	}()
	t.Cleanup(func() {
		stop()
		got := <-ended
		require.Contains(t, []int{exitOK, exitInterrupted}, got.code, got.err)
	})
	var address struct{ API, Console string }
	require.NoError(t, json.NewDecoder(started).Decode(&address))
	require.Equal(t, address.API+"/ui/", address.Console)

	jar, err := cookiejar.New(nil)
	require.NoError(t, err)
	browser := &http.Client{Jar: jar}
	ask := func(method, path string, form url.Values) (status int, at, text string) {
		r, err := http.NewRequestWithContext(t.Context(), method, address.API+path, strings.NewReader(form.Encode()))
		require.NoError(t, err)
		r.Header.Set("Content-Type", "application/x-www-form-urlencoded")
		r.Header.Set("Accept", "text/html")
		answer, err := browser.Do(r)
		require.NoError(t, err)
		defer answer.Body.Close()
		body, err := io.ReadAll(answer.Body)
		require.NoError(t, err)
		return answer.StatusCode, answer.Request.URL.Path, string(body)
	}
	_, path, _ := ask(http.MethodGet, "/", nil)
	require.Equal(t, "/ui/login", path)
	status, path, text := ask(http.MethodPost, "/ui/login", url.Values{"key": {key.Key}})
	require.Equal(t, http.StatusOK, status, text)
	require.Equal(t, "/ui/", path)
	require.Contains(t, text, "Workers busy")
	guards := guard.New(server.Client(), guard.Prefix("bulk-action:"))
	_, err = guards.Pool(t.Context(), "smtp", guard.Spec{Members: []guard.Member{{ID: "alice"}}})
	require.NoError(t, err)
	_, _, text = ask(http.MethodPost, "/ui/guards/pool%2Fsmtp/members/alice", url.Values{"command": {"disable"}})
	require.Contains(t, text, "The member is disabled")
	view, err := guards.Inspect(t.Context(), "pool/smtp")
	require.NoError(t, err)
	require.Equal(t, "off", view.Members[0].State)
	keyFile := writeFile(t, "key", key.Key)
	got = console{}.exec(t.Context(), "room", "set", "sale", "--capacity", "3", "--api", address.API, "--api-key-file", keyFile)
	require.Equal(t, exitOK, got.code, got.err)
	_, _, text = ask(http.MethodPost, "/ui/rooms/sale/pause", nil)
	require.Contains(t, text, "The event is paused")
	_, _, text = ask(http.MethodGet, "/ui/rooms", nil)
	require.Contains(t, text, "No live process has the role <b>broker</b>")
	_, _, text = ask(http.MethodPost, "/ui/types/NOOP/pause", nil)
	require.Contains(t, text, "The type is paused")

	got = console{}.exec(t.Context(), "activity", "--json", "--api", address.API, "--api-key-file", keyFile)
	require.Equal(t, exitOK, got.code, got.err)
	var entries []api.Activity
	for line := range strings.Lines(got.out) {
		var a api.Activity
		require.NoError(t, json.Unmarshal([]byte(line), &a))
		entries = append(entries, a)
	}
	require.Equal(t, "type.pause", entries[0].Action)
	require.Equal(t, "event.mode", entries[1].Action)
	require.Equal(t, "event.set", entries[2].Action)
	require.Equal(t, "guard.disable", entries[3].Action)
	require.Equal(t, api.ViaUI, entries[0].Via)
	require.Equal(t, key.ID, entries[0].Actor)
	require.NotEmpty(t, entries[0].RequestID)
	require.NotEmpty(t, entries[0].IP)

	sessions, err := server.Client().Keys(t.Context(), "bulk-action:auth:session:*").Result()
	require.NoError(t, err)
	require.Len(t, sessions, 1)
	got = console{}.exec(t.Context(), append([]string{"key", "revoke", key.ID}, at...)...)
	require.Equal(t, exitOK, got.code, got.err)
	require.Eventually(t, func() bool {
		_, path, _ := ask(http.MethodGet, "/ui/groups", nil)
		return path == "/ui/login"
	}, time.Minute, 100*time.Millisecond)
	require.EqualValues(t, 1, server.Client().XLen(t.Context(), "bulk-action:ingest").Val())
	require.Zero(t, server.Client().Exists(t.Context(), "bulk-action:stages").Val(), "it is no ingest")
}

func TestMistakesOfConsole(t *testing.T) {
	for args, says := range map[string]string{
		"console --redis-url localhost:6379":        "--redis-url ",
		"console --addr localhost":                  `--addr "localhost": must be host:port`,
		"console --addr 127.0.0.1:0 --key-prefix {": "BULKACTION_KEY_PREFIX",
		"console x": "",
	} {
		var log bytes.Buffer
		console{out: &log}.exec(t.Context(), strings.Fields(args)...).ends(t, exitUsage, says)
	}
	t.Setenv("BULKACTION_API_SERVE", "ui,web")
	console{}.exec(t.Context(), "console", "--addr", "127.0.0.1:0").ends(t, exitUsage, `BULKACTION_API_SERVE="ui,web": must be api, ui, or api,ui`)
}
