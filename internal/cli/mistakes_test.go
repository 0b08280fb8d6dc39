package cli

import (
	"context"
	"io"
	"net"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/bulkaction/bulkaction/api"
	"github.com/bulkaction/bulkaction/internal/process/app"
	"github.com/bulkaction/bulkaction/internal/process/dev"
)

// TestMistakes makes mistakes that newcomers make. The command must say what is wrong and what to
// do. A case with a file submits it too.
func TestMistakes(t *testing.T) {
	t.Setenv("BULKACTION_API_ALLOW_UNAUTHENTICATED", "")
	for _, c := range []struct {
		code       int
		args       string // divided at the spaces
		file, text string
		says       string
	}{
		{exitUsage, "submit --type NOOP --payload {to:a@example.com}", "", "",
			"--payload number 1 is not JSON: write it in single quotes, for example --payload '{\"to\": \"a@example.com\"}'"},
		{exitError, "submit --type NOOP", "a.csv", "", "the file is empty"},
		{exitError, "submit --type NOOP", "a.csv", "", "A CSV file begins with a header row"},
		{exitFailedJobs, "submit --type T --id g --wait", "a.ndjson", "{\"payload\":\"fail\"}\nx\n",
			"group g has ended: 1 of 1 jobs failed; besides, 1 line rejected\nSee them with `bulkaction failures g`"},
		{exitError, "status nosuch", "", "", "`bulkaction rejected`"},
		{exitUsage, "dev --addr localhost", "", "", `--addr "localhost": must be host:port`},
		{exitUsage, "dev --addr :18080", "", "", `--addr ":18080": give the host, too, such as 127.0.0.1:18080`},
		{exitUsage, "demo --tenants 0", "", "", "--tenants 0: must be at least 1\n"},
		{exitUsage, "demo --jobs 0", "", "", "--jobs 0: must be at least 1\n"},
		{exitUsage, "demo --jobs 1", "", "", "--jobs 1 --tenants 3: each tenant needs at least one job; give --tenants 1\n"},
	} {
		t.Run(c.args+": "+c.says, func(t *testing.T) {
			args := strings.Fields(c.args)
			if c.file != "" {
				args = append(args, "--file", writeFile(t, c.file, c.text))
			}
			got := newFakeAPI(t).exec(t.Context(), console{}, args...)
			require.Equal(t, c.code, got.code, got.err)
			require.Contains(t, got.err, c.says)
		})
	}
}

// TestMistakesInSettings: a wrong setting is named with what to do.
func TestMistakesInSettings(t *testing.T) {
	_, unknown, err := app.Load([]string{"BULKACTION_REDIS_URI=redis://127.0.0.1:6379"}, nil)
	require.NoError(t, err)
	require.Equal(t, []app.Unknown{{Name: "BULKACTION_REDIS_URI", DidYouMean: "BULKACTION_REDIS_URL"}}, unknown, "each role logs it")
	_, err = app.LoadSettings(map[string]string{"BULKACTION_WORKER_COUNT": "4"}, nil)
	require.ErrorIs(t, err, app.ErrConfig)
	require.ErrorContains(t, err, "BULKACTION_WORKER_COUNT: leave out BULKACTION_ in the names of settings")
	_, _, err = app.Load([]string{"BULKACTION_JOB_TIMEOUT=30"}, nil)
	require.ErrorContains(t, err, `BULKACTION_JOB_TIMEOUT="30": must be a duration`)
	require.ErrorContains(t, err, ": give the unit, such as 30s")
}

// freeAddress returns an address at which nobody listens.
func freeAddress(t *testing.T) string {
	l, err := net.Listen("tcp", "127.0.0.1:0")
	require.NoError(t, err)
	require.NoError(t, l.Close())
	return l.Addr().String()
}

// TestMistakePortTaken: dev and demo, at an address where another process listens, say that the
// port is taken and what to do.
func TestMistakePortTaken(t *testing.T) {
	l, err := net.Listen("tcp", "127.0.0.1:0")
	require.NoError(t, err)
	defer l.Close()
	for _, command := range []string{"dev", "demo"} {
		got := console{}.exec(t.Context(), command, "--addr", l.Addr().String())
		require.Equal(t, exitError, got.code)
		require.Contains(t, got.err, "the API can't listen at "+l.Addr().String()+": the port is taken")
		require.Contains(t, got.err, "perhaps another `bulkaction dev`: stop it, or give another address, such as --addr 127.0.0.1:8081.")
	}
}

func TestMistakeURLOfRedis(t *testing.T) {
	for _, command := range []string{"dev", "demo", "audit"} {
		got := console{}.exec(t.Context(), command, "--redis-url", "localhost:6379")
		got.ends(t, exitUsage, `--redis-url "localhost:6379": begin it with redis://, as in redis://localhost:6379/0`)
		require.NotContains(t, got.err, "BULKACTION_REDIS_URL")

		got = console{}.exec(t.Context(), command, "--redis-url", "ann:secret@localhost:6379")
		got.ends(t, exitUsage, "--redis-url: ")
		require.NotContains(t, got.err, "secret")
	}
}

// TestMistakeRedisUnreachable: if nothing listens at the address of Redis, dev and demo say so and
// what to do. Their context has ended before, so that they do not wait for Redis.
func TestMistakeRedisUnreachable(t *testing.T) {
	address := freeAddress(t)
	require.Equal(t, address, unreachableRedis(t.Context(), "redis://"+address+"/0"))
	ctx, cancel := context.WithCancel(t.Context())
	cancel()
	for _, command := range []string{"dev", "demo"} {
		got := console{}.exec(ctx, command, "--addr", "127.0.0.1:0", "--redis-url", "redis://"+address+"/0")
		require.Contains(t, got.err, "Redis does not answer at "+address+" yet: waiting for it. Start it, or give its "+
			"address with --redis-url; without --redis-url, "+command+" runs an embedded Redis.")
	}
}

// TestMistakeRedisUnreachableInTheLog: while dev.Run waits for Redis, its log names --redis-url as
// what has set the address.
func TestMistakeRedisUnreachableInTheLog(t *testing.T) {
	ctx, cancel := context.WithCancel(t.Context())
	log := watchedLog{until: "waiting for it", seen: cancel}
	code := dev.Run(ctx, dev.Options{
		RedisURL: "redis://" + freeAddress(t) + "/0", Addr: "127.0.0.1:0",
		Environ: []string{"BULKACTION_LOG_FORMAT=text", "BULKACTION_LOG_LEVEL=warn"}, Log: &log,
	})
	require.Equal(t, app.ExitOK, code)
	require.Contains(t, log.String(), "address_set_by=--redis-url")
}

// watchedLog calls seen when a line with the text until is written.
type watchedLog struct {
	until string
	seen  func()
	mu    sync.Mutex
	text  strings.Builder
}

func (l *watchedLog) Write(p []byte) (int, error) {
	l.mu.Lock()
	defer l.mu.Unlock()
	if strings.Contains(string(p), l.until) {
		l.seen()
	}
	return l.text.Write(p)
}

func (l *watchedLog) String() string {
	l.mu.Lock()
	defer l.mu.Unlock()
	return l.text.String()
}

// TestEmbeddedRedisMayAnswerLate: the settings for the embedded Redis have a command timeout of
// 30 s, unless it is set: on a busy machine this Redis answers late, because it shares the CPU with
// the roles. A password for another Redis is left out.
func TestEmbeddedRedisMayAnswerLate(t *testing.T) {
	for want, environ := range map[time.Duration][]string{
		30 * time.Second: {"BULKACTION_REDIS_PASSWORD=of-another-redis"},
		5 * time.Second:  {"BULKACTION_REDIS_COMMAND_TIMEOUT=5s"},
	} {
		cfg, _, err := app.Load(dev.ForEmbedded(environ), nil)
		require.NoError(t, err)
		require.Equal(t, want, cfg.Redis.CommandTimeout)
		require.Empty(t, cfg.Redis.Password)
	}
}

func TestMistakeDevWithAVariableForRedis(t *testing.T) {
	ctx, cancel := context.WithCancel(t.Context())
	cancel()
	for url, noted := range map[string]bool{"redis://127.0.0.1:6380/0": true, "redis://127.0.0.1:6379/0": false} {
		t.Setenv("BULKACTION_REDIS_URL", url)
		got := console{}.exec(ctx, "dev", "--addr", "127.0.0.1:0")
		require.Equal(t, noted, strings.Contains(got.err, "dev does not use BULKACTION_REDIS_URL"), url)
	}
}

// TestMistakeWarnings: submit prints the warnings in the answer of the API, for example about a
// type that no worker serves, to the error output; with --json they are in the output instead.
func TestMistakeWarnings(t *testing.T) {
	f := newFakeAPI(t)
	f.warnings = []string{"No live worker serves the type noop: its jobs wait until one does. Did you mean NOOP?"}
	got := f.exec(t.Context(), console{}, "submit", "--type", "noop", "--id", "g", "--payload", "{}")
	require.Equal(t, exitOK, got.code)
	require.Equal(t, "g\n", got.out)
	require.Contains(t, got.err, "Did you mean NOOP?")
	got = f.exec(t.Context(), console{}, "submit", "--type", "noop", "--file", writeFile(t, "a.csv", "a\n1\n"), "--json")
	require.Equal(t, exitOK, got.code)
	require.Contains(t, got.out, "Did you mean NOOP?")
	require.Empty(t, got.err)
}

func TestActivity(t *testing.T) {
	f := newFakeAPI(t)
	got := f.exec(t.Context(), console{}, "activity", "--actor", "key_a", "--tenant", "acme", "--since", "2026-01-02T15:04:05+01:00")
	require.Equal(t, exitOK, got.code, got.err)
	require.Regexp(t, `key_a +operator +api +tenant.set +acme +\{"rps":5\}\n`, got.out)
	require.Regexp(t, `cli:ann +- +cli +key.revoke +key_b +failed: 2026-01-02T14:04:05Z\n`, got.out)
	got = f.exec(t.Context(), console{}, "activity", "--since", "24h", "--limit", "1", "--json")
	require.Equal(t, 1, strings.Count(got.out, "\n"))
	require.Contains(t, got.out, `"action":"tenant.set"`)
	for _, since := range []string{"yesterday", "-1h"} {
		f.exec(t.Context(), console{}, "activity", "--since", since).ends(t, exitUsage, "--since "+since+": must be a time such as")
	}
}

func TestMistakeMessageOfTheStream(t *testing.T) {
	f := newFakeAPI(t)
	got := f.exec(t.Context(), console{}, "rejected")
	require.Equal(t, exitOK, got.code)
	require.Regexp(t, `m9 +group.submit +2 +type: required\n`, got.out)
	require.Regexp(t, `4-0 +- +0 +no data\n`, got.out)
	got = f.exec(t.Context(), console{}, "rejected", "--data", "--limit", "1", "--json")
	require.Equal(t, 1, strings.Count(got.out, "\n"))
	require.Contains(t, got.out, `"data":"{}"`)
}

// TestMistakeSameIDAgain: another file is submitted under the id of a group that exists. The
// command says whether its jobs were added or refused.
func TestMistakeSameIDAgain(t *testing.T) {
	f := newFakeAPI(t)
	f.keepOpen = true
	first, second := writeFile(t, "a.csv", "to\na\nb\n"), writeFile(t, "b.csv", "to\nc\n")
	submit := func(file string, more ...string) run {
		return f.exec(t.Context(), console{}, append([]string{"submit", "--type", "T", "--id", "g", "--file", file}, more...)...)
	}
	require.Equal(t, run{exitOK, "g\n", ""}, submit(first, "--no-seal"))
	require.Equal(t, "Group g has accepted these jobs before: nothing is new.\n", submit(first, "--no-seal").err)
	submit(writeFile(t, "c.ndjson", "x\n")).ends(t, exitError, "no line was accepted; group g keeps the jobs that it had\nCorrect the lines and submit the file again.")
	require.EqualValues(t, "CREATED", f.groupByID(t, "g").Status)
	got := submit(second)
	require.Equal(t, run{exitOK, "g\n", "Group g had 2 jobs already, and has 3 now; it is sealed now. " +
		"`bulkaction append` adds jobs and does not seal.\n"}, got)
	require.Equal(t, run{exitOK, "g\n", "Group g has accepted these jobs before: nothing is new.\n"}, submit(second))
	got = submit(writeFile(t, "d.csv", "to\nd\n"))
	require.Equal(t, run{exitError, "", "bulkaction: group g is sealed: it takes no more jobs\nSubmit the file as a separate group, under another --id.\n"}, got)
}

func TestMistakeOnlyAHeader(t *testing.T) {
	file := writeFile(t, "a.csv", "to,name\n")
	got := newFakeAPI(t).exec(t.Context(), console{}, "submit", "--type", "T", "--id", "g", "--file", file)
	require.Equal(t, run{exitOK, "g\n", "The file " + file + " has no rows after its header, so it adds no jobs.\n"}, got)
}

func TestMistakeDurationAsStartTime(t *testing.T) {
	f := newFakeAPI(t)
	f.conflict = true
	for _, jobs := range [][]string{{"--payload", "1"}, {"--file", writeFile(t, "a.csv", "to\na\n")}} {
		f.exec(t.Context(), console{}, append(jobs, "submit", "--type", "T", "--id", "g", "--run-at", "10m")...).ends(t, exitError, "--run-at 10m is another time in each run of the command")
	}
}

// TestMistakeWatchOfAGroupThatIsNotSealed: watch warns that a group that is not sealed does not
// end. isPast says of a group whether it has left the state that is shown.
func TestMistakeWatchOfAGroupThatIsNotSealed(t *testing.T) {
	f := newFakeAPI(t)
	require.Equal(t, exitOK, f.exec(t.Context(), console{}, "submit", "--type", "T", "--id", "g", "--no-seal").code)
	watched := make(chan run)
	go func() { watched <- f.exec(t.Context(), console{}, "watch", "g") }()
	require.Eventually(t, func() bool { return f.called("GET /v1/groups/g/events") }, waitFor, tick)
	require.Equal(t, exitOK, f.exec(t.Context(), console{}, "seal", "g").code)
	got := <-watched
	require.Equal(t, exitOK, got.code, got.err)
	require.Equal(t, "Group g is not sealed, so it does not end: `bulkaction seal g` says that it has all its jobs.\n", got.err)

	past := api.Group{Status: api.StatusCreated, Timestamps: map[string]time.Time{"created": epoch, "running": epoch}}
	require.True(t, isPast(past))
	past.Status = api.StatusRunning
	require.False(t, isPast(past))
}

func TestMistakeRetryOfARunningGroup(t *testing.T) {
	f := newFakeAPI(t)
	f.keepOpen = true
	require.Equal(t, exitOK, f.exec(t.Context(), console{}, "submit", "--type", "T", "--id", "g", "--payload", "1").code)
	f.exec(t.Context(), console{}, "retry", "g").ends(t, exitError, "\n`bulkaction watch g` waits for its end.\n")
}

func TestMistakeUnknownKeysInAList(t *testing.T) {
	f := newFakeAPI(t)
	require.Equal(t, exitOK, f.exec(t.Context(), console{}, "submit", "--type", "T", "--id", "g", "--payload", "1").code)
	require.Regexp(t, `(?m)^0 +\? +`, f.exec(t.Context(), console{}, "jobs", "g").out)
}

func TestMistakePortOfAnotherService(t *testing.T) {
	l, err := net.Listen("tcp", "127.0.0.1:0")
	require.NoError(t, err)
	defer l.Close()
	go func() {
		for conn, err := l.Accept(); err == nil; conn, err = l.Accept() {
			_, _ = conn.Read(make([]byte, 1))
			_ = conn.(*net.TCPConn).CloseWrite() // ends without an answer, and without a reset
			_, _ = io.Copy(io.Discard, conn)
			_ = conn.Close()
		}
	}()
	console{}.exec(t.Context(), "stats", "--api", l.Addr().String()).ends(t, exitError, "Is this the API's port?")
}
