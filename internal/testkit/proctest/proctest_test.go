package proctest

import (
	"context"
	"fmt"
	"log/slog"
	"net"
	"net/http"
	"os"
	"os/signal"
	"path/filepath"
	"runtime"
	"slices"
	"strings"
	"sync"
	"sync/atomic"
	"syscall"
	"testing"
	"time"

	"github.com/stretchr/testify/require"
)

// TestMain gives the tests this test binary as the binary role; under this name it runs role.
func TestMain(m *testing.M) {
	if filepath.Base(os.Args[0]) == "role" {
		role()
		return
	}
	self, err := os.Executable()
	if err != nil {
		panic(err)
	}
	dir, err := os.MkdirTemp("", "role-")
	if err != nil {
		panic(err)
	}
	built = &binaries{dir: dir, make: map[string]func() error{
		"role": sync.OnceValue(func() error { return os.Symlink(self, filepath.Join(dir, "role")) }),
	}}
	code := m.Run()
	_ = os.RemoveAll(dir)
	os.Exit(code)
}

// role is a fake of the project's binaries. It behaves like one as far as this package can tell.
func role() {
	if len(os.Args) > 1 && os.Args[1] == "env" {
		fmt.Println(strings.Join(os.Environ(), "\n"))
		fmt.Fprintln(os.Stderr, "not data")
		os.Exit(3)
	}
	ctx, stop := signal.NotifyContext(context.Background(), syscall.SIGTERM)
	defer stop()
	slog.SetDefault(slog.New(slog.NewJSONHandler(os.Stderr, nil)))
	fmt.Fprintln(os.Stderr, os.Getenv("SAY"))

	var asked atomic.Int32
	http.HandleFunc("/readyz", func(w http.ResponseWriter, _ *http.Request) {
		if asked.Add(1) < 3 {
			http.Error(w, "redis is away", http.StatusServiceUnavailable)
		}
	})
	for _, server := range []string{"admin", "api"} {
		l, err := net.Listen("tcp", os.Getenv("BULKACTION_"+strings.ToUpper(server)+"_ADDR"))
		if err != nil {
			panic(err)
		}
		slog.Info("listening", "server", server, "addr", l.Addr().String())
		go func() { _ = http.Serve(l, nil) }()
	}
	<-ctx.Done()
	slog.Info("drained")
}

func TestProcess(t *testing.T) {
	t.Parallel()
	p := Start(t, "role", nil)
	p.WaitReady()
	require.NotEqual(t, p.AdminAddr(), p.APIAddr())

	resp, err := http.Get("http://" + p.APIAddr() + "/readyz")
	require.NoError(t, err)
	require.NoError(t, resp.Body.Close())
	require.Equal(t, http.StatusOK, resp.StatusCode)

	p.Signal(syscall.SIGTERM)
	require.Equal(t, 0, p.Wait(time.Minute))
	require.Contains(t, p.Log(), `"msg":"drained"`)
	require.Empty(t, p.Stdout())
}

func TestKill(t *testing.T) {
	t.Parallel()
	p := Start(t, "role", nil)
	require.NotEmpty(t, p.AdminAddr())
	require.True(t, p.Running())
	p.Kill()
	require.False(t, p.Running())
	require.Equal(t, -1, p.Wait(time.Minute))
}

func TestEnvironmentIsClean(t *testing.T) {
	t.Setenv("BULKACTION_KEY_PREFIX", "leaks:")
	t.Setenv("OTEL_SERVICE_NAME", "leaks")
	p := Start(t, "role", map[string]string{"BULKACTION_API_ADDR": "127.0.0.1:1", "X": "y z"}, "env")
	require.Equal(t, 3, p.Wait(time.Minute))

	var own []string
	for line := range strings.Lines(p.Stdout()) {
		name, _, _ := strings.Cut(line, "=")
		if !slices.Contains(inherited, name) {
			own = append(own, strings.TrimSpace(line))
		}
	}
	require.ElementsMatch(t, []string{
		"BULKACTION_ADMIN_ADDR=127.0.0.1:0", "BULKACTION_API_ADDR=127.0.0.1:1", "BULKACTION_LOG_FORMAT=json", "X=y z",
	}, own)
	require.Contains(t, p.Log(), "not data\n")
}

func TestFailures(t *testing.T) {
	for name, tc := range map[string]struct {
		test func(t testing.TB)
		want string
	}{
		"an unknown binary": {
			func(t testing.TB) { Start(t, "absent", nil) }, "start absent: TestMain does not name the binary absent",
		},
		"a process that ends without listening": {
			func(t testing.TB) { Start(t, "role", nil, "env").AdminAddr() }, "never said where its admin server listens",
		},
		"a process that does not end": {
			func(t testing.TB) { Start(t, "role", nil).Wait(time.Nanosecond) }, "still runs after 1ns",
		},
		"a signal to a process that has ended": {
			func(t testing.TB) { p := Start(t, "role", nil); p.Kill(); p.Signal(syscall.SIGTERM) }, os.ErrProcessDone.Error(),
		},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			require.Contains(t, failing(t, tc.test).fatal, tc.want)
		})
	}
}

func TestDataRaceFailsTheTest(t *testing.T) {
	f := failing(t, func(t testing.TB) {
		Start(t, "role", map[string]string{"SAY": "WARNING: DATA RACE"}).WaitReady()
	})
	require.Contains(t, f.errored, "has a data race")
}

func TestMissingMain(t *testing.T) {
	_, err := (*binaries)(nil).path("role")
	require.ErrorContains(t, err, "TestMain does not call proctest.Run")
}

func TestPrebuiltBinaries(t *testing.T) {
	dir := t.TempDir()
	require.NoError(t, os.WriteFile(filepath.Join(dir, "role"), nil, 0o700))
	t.Setenv(EnvBinaries, dir)
	b, remove, err := prepare([]string{"./no/such/package"})
	require.NoError(t, err)
	path, err := b.path("role")
	require.NoError(t, err)
	require.Equal(t, filepath.Join(dir, "role"), path)
	_, err = b.path("absent")
	require.ErrorContains(t, err, "no such binary")
	remove()
	require.FileExists(t, path)
}

func TestBrokenBuild(t *testing.T) {
	b, remove, err := prepare([]string{"./no/such/package"})
	require.NoError(t, err)
	defer remove()
	_, err = b.path("package")
	require.ErrorContains(t, err, "go build ./no/such/package")
}

// recorder is a testing.TB that records a failure instead of failing.
type recorder struct {
	testing.TB
	fatal, errored string
	cleanups       []func()
}

func (r *recorder) Fatalf(format string, args ...any) {
	r.fatal = fmt.Sprintf(format, args...)
	runtime.Goexit()
}
func (r *recorder) Errorf(format string, args ...any) { r.errored = fmt.Sprintf(format, args...) }
func (r *recorder) Cleanup(fn func())                 { r.cleanups = append(r.cleanups, fn) }

// failing runs a test function, with its clean-ups, on a recorder, and returns the recorder.
func failing(t *testing.T, test func(testing.TB)) *recorder {
	t.Helper()
	r := &recorder{TB: t}
	var wg sync.WaitGroup
	wg.Go(func() { test(r) })
	wg.Wait()
	for _, fn := range r.cleanups {
		fn()
	}
	return r
}

func TestLinesOfTwoStreamsDoNotMix(t *testing.T) {
	o := newOutput()
	stdout, stderr := o.stream(true), o.stream(false)
	for _, w := range []struct {
		to   *stream
		text string
	}{
		{stdout, "half a "}, {stderr, `{"msg":"listen`}, {stdout, "line\nnext"}, {stderr, "ing\",\"server\":\"api\",\"addr\":\"h:1\"}\n"},
	} {
		n, err := w.to.Write([]byte(w.text))
		require.NoError(t, err)
		require.Len(t, w.text, n)
	}
	require.Equal(t, "half a line\n{\"msg\":\"listening\",\"server\":\"api\",\"addr\":\"h:1\"}\nnext", o.log())
	addr, _ := o.listening("api")
	require.Equal(t, "h:1", addr)
	require.Equal(t, "half a line\nnext", o.stdoutText())
}
