package app

import (
	"bufio"
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"net"
	"net/http"
	"net/http/httptest"
	"os"
	"os/exec"
	"regexp"
	"strings"
	"sync"
	"syscall"
	"testing"
	"time"

	"github.com/stretchr/testify/require"
	"go.uber.org/goleak"

	"github.com/bulkaction/bulkaction/api"
)

// childVariable is an environment variable. If it is set, the test binary runs as a process under
// [Main]: it prints a line when it runs, and one when it is told to stop. With the value "polite"
// it then stops, with "stubborn" it never does.
const childVariable = "APP_TEST_CHILD"

func TestMain(m *testing.M) {
	if manners := os.Getenv(childVariable); manners != "" {
		Main("child", nil, func(ctx context.Context, _ *Process) error {
			fmt.Println("running")
			<-ctx.Done()
			fmt.Println("told")
			if manners == "stubborn" {
				select {}
			}
			return ctx.Err()
		})
	}
	for _, name := range []string{"OTEL_EXPORTER_OTLP_ENDPOINT", "OTEL_TRACES_EXPORTER", "OTEL_METRICS_EXPORTER"} {
		_ = os.Unsetenv(name)
	}
	goleak.VerifyTestMain(m)
}

// output collects the output of a process and can be read while the process runs.
type output struct {
	mu sync.Mutex
	b  bytes.Buffer
}

func (o *output) Write(p []byte) (int, error) {
	o.mu.Lock()
	defer o.mu.Unlock()
	return o.b.Write(p)
}

func (o *output) String() string {
	o.mu.Lock()
	defer o.mu.Unlock()
	return o.b.String()
}

// line returns the first log line with the message.
func (o *output) line(t *testing.T, msg string) map[string]any {
	t.Helper()
	for text := range strings.Lines(o.String()) {
		var line map[string]any
		require.NoError(t, json.Unmarshal([]byte(text), &line), text)
		if line["msg"] == msg {
			return line
		}
	}
	require.Fail(t, "no line "+msg, o.String())
	return nil
}

// running is a process that a test runs inside its own process by Run. Its role only waits for the
// end of its context.
type running struct {
	*Process
	stderr *output
	cancel context.CancelFunc
	code   chan int
}

func start(t *testing.T, environ ...string) *running {
	t.Helper()
	ctx, cancel := context.WithCancel(t.Context())
	r := &running{stderr: new(output), cancel: cancel, code: make(chan int, 1)}
	up := make(chan *Process)
	go func() {
		r.code <- Run(ctx, Options{Role: "fetcher", Environ: append(environ, "BULKACTION_ADMIN_ADDR=127.0.0.1:0"), Stderr: r.stderr},
			func(ctx context.Context, p *Process) error {
				up <- p
				<-ctx.Done()
				return ctx.Err()
			})
	}()
	r.Process = <-up
	return r
}

func (r *running) stop() int {
	r.cancel()
	return <-r.code
}

func get(t *testing.T, url string) (int, string) {
	t.Helper()
	client := http.Client{Transport: &http.Transport{DisableKeepAlives: true}}
	response, err := client.Get(url)
	require.NoError(t, err)
	defer response.Body.Close()
	body, err := io.ReadAll(response.Body)
	require.NoError(t, err)
	return response.StatusCode, string(body)
}

func TestProcessServesItsAdminAddress(t *testing.T) {
	p := start(t, "BULKACTION_WORKER_COUNT=7", "BULKACTION_WORKERS_COUNT=7")
	base := "http://" + p.AdminAddr()

	status, body := get(t, base+"/healthz")
	require.Equal(t, http.StatusOK, status)
	require.Equal(t, "ok\n", body)

	status, body = get(t, base+"/readyz")
	require.Equal(t, http.StatusServiceUnavailable, status)
	require.JSONEq(t, `{"status":"starting"}`, body)

	var down error
	p.Ready.Add("redis", func(context.Context) error { return down })
	p.Ready.Add("clock", func(context.Context) error { return nil })
	status, body = get(t, base+"/readyz")
	require.Equal(t, http.StatusOK, status)
	require.JSONEq(t, `{"status":"ready"}`, body)

	down = errors.New("connection refused")
	status, body = get(t, base+"/readyz")
	require.Equal(t, http.StatusServiceUnavailable, status)
	require.JSONEq(t, `{"status":"failing","failing":{"redis":"connection refused"}}`, body)

	status, body = get(t, base+"/metrics")
	require.Equal(t, http.StatusOK, status)
	require.Contains(t, body, "go_goroutines ")

	p.HandleAdmin("GET /pool", http.HandlerFunc(func(w http.ResponseWriter, _ *http.Request) { fmt.Fprint(w, "busy") }))
	_, body = get(t, base+"/pool")
	require.Equal(t, "busy", body)

	require.Equal(t, ExitOK, p.stop())
	listening := p.stderr.line(t, "listening")
	require.Equal(t, "admin", listening["server"])
	require.Equal(t, p.AdminAddr(), listening["addr"])
	require.Equal(t, p.Instance, listening["instance"])
	require.Equal(t, "7", p.stderr.line(t, "starting")["config"].(map[string]any)["worker_count"])
	unknown := p.stderr.line(t, "unknown variable")
	require.Equal(t, "BULKACTION_WORKERS_COUNT", unknown["name"])
	require.Equal(t, "BULKACTION_WORKER_COUNT", unknown["did_you_mean"])
	p.stderr.line(t, "stopped")
}

func TestProcessIsNotReadyWhileItDrains(t *testing.T) {
	ctx, cancel := context.WithCancel(t.Context())
	code := Run(ctx, Options{Role: "worker", Environ: []string{"BULKACTION_ADMIN_ADDR=127.0.0.1:0"}}, func(ctx context.Context, p *Process) error {
		p.Ready.Add("redis", func(context.Context) error { return nil })
		cancel()
		require.Eventually(t, func() bool {
			_, body := get(t, "http://"+p.AdminAddr()+"/readyz")
			return strings.Contains(body, "draining")
		}, 10*time.Second, time.Millisecond)
		status, _ := get(t, "http://"+p.AdminAddr()+"/healthz")
		require.Equal(t, http.StatusOK, status)
		return nil
	})
	require.Equal(t, ExitOK, code)
}

func TestExitCodes(t *testing.T) {
	taken, err := net.Listen("tcp", "127.0.0.1:0")
	require.NoError(t, err)
	defer taken.Close()
	fine := []string{"BULKACTION_ADMIN_ADDR=127.0.0.1:0"}
	neverRun := func(context.Context, *Process) error {
		t.Error("it ran")
		return nil
	}
	cases := map[string]struct {
		args, environ  []string
		run            func(context.Context, *Process) error
		code           int
		stdout, stderr []string
	}{
		"wrong configuration": {
			environ: []string{"BULKACTION_WORKER_COUNT=ten", "BULKACTION_PARTITIONS=0"}, run: neverRun, code: ExitUsage,
			stderr: []string{"bulkaction-worker: wrong configuration:", `BULKACTION_WORKER_COUNT="ten": must be`, `BULKACTION_PARTITIONS="0": must be`},
		},
		"unknown flag": {args: []string{"-verbose"}, run: neverRun, code: ExitUsage, stderr: []string{"bulkaction-worker: unknown flag: --verbose; --help lists the flags and the variables\n"}},
		"variable as a flag": {args: []string{"--redis-url", "x"}, run: neverRun, code: ExitUsage, stderr: []string{
			"bulkaction-worker: unknown flag: --redis-url; set the environment variable BULKACTION_REDIS_URL instead\n"}},
		"argument": {args: []string{"now"}, run: neverRun, code: ExitUsage, stderr: []string{"takes no arguments"}},
		"help": {args: []string{"-help"}, run: neverRun, code: ExitOK,
			stderr: []string{"-healthcheck", "BULKACTION_REDIS_URL=redis://127.0.0.1:6379/0", "Worker pool", "Jobs that one worker process runs at once",
				"BULKACTION_SMTP_PORT=25\n        The TCP port of the mail server."}},
		"version":         {args: []string{"-version"}, run: neverRun, code: ExitOK, stdout: []string{"bulkaction-worker " + Version() + " (go1."}},
		"admin address":   {environ: []string{"BULKACTION_ADMIN_ADDR=" + taken.Addr().String()}, run: neverRun, code: ExitError, stderr: []string{"choose another BULKACTION_ADMIN_ADDR"}},
		"returns at once": {environ: fine, run: func(context.Context, *Process) error { return nil }, code: ExitOK, stderr: []string{`"msg":"stopped"`}},
		"fails":           {environ: fine, run: func(context.Context, *Process) error { return errors.New("no luck") }, code: ExitError, stderr: []string{`"msg":"failed"`, "no luck"}},
		"a role's configuration": {environ: fine, run: func(context.Context, *Process) error { return fmt.Errorf("%w: no processor", ErrConfig) },
			code: ExitUsage, stderr: []string{"wrong configuration: no processor"}},
		"cancelled inside":  {environ: fine, run: func(context.Context, *Process) error { return context.Canceled }, code: ExitError},
		"a server breaks":   {environ: fine, run: serverBreaks, code: ExitError, stderr: []string{"serve api: accept failed"}},
		"clean-up fails":    {environ: fine, run: cleanupFails, code: ExitError, stderr: []string{"stop second: b\\nstop first: a"}},
		"no configuration":  {args: []string{"-healthcheck"}, environ: []string{"BULKACTION_ADMIN_ADDR=nonsense"}, run: neverRun, code: ExitUsage},
		"health of nobody":  {args: []string{"-healthcheck"}, environ: []string{"BULKACTION_ADMIN_ADDR=127.0.0.1:1"}, run: neverRun, code: ExitError, stderr: []string{"ask for health"}},
		"health of unknown": {args: []string{"-healthcheck"}, environ: fine, run: neverRun, code: ExitError, stderr: []string{"set BULKACTION_ADMIN_ADDR"}},
	}
	for name, c := range cases {
		t.Run(name, func(t *testing.T) {
			var stdout, stderr output
			code := Run(t.Context(), Options{Role: "worker", Args: c.args, Environ: c.environ, Stdout: &stdout, Stderr: &stderr}, c.run)
			require.Equal(t, c.code, code, stderr.String())
			for _, want := range c.stdout {
				require.Contains(t, stdout.String(), want)
			}
			for _, want := range c.stderr {
				require.Contains(t, stderr.String(), want)
			}
		})
	}
}

// brokenListener is a listener whose Accept fails, as if the system had closed its socket.
type brokenListener struct{ net.Listener }

func (brokenListener) Accept() (net.Conn, error) { return nil, errors.New("accept failed") }

func serverBreaks(ctx context.Context, p *Process) error {
	listener, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		return err
	}
	p.newServer("api", brokenListener{listener}).Serve(http.NotFoundHandler())
	<-ctx.Done()
	return ctx.Err()
}

func cleanupFails(_ context.Context, p *Process) error {
	p.OnStop("first", func(context.Context) error { return errors.New("a") })
	p.OnStop("second", func(context.Context) error { return errors.New("b") })
	return nil
}

func TestTelemetryThatIsWrongIsUsage(t *testing.T) {
	t.Setenv("OTEL_TRACES_EXPORTER", "console")
	t.Setenv("OTEL_TRACES_SAMPLER", "sometimes")
	var stderr output
	require.Equal(t, ExitUsage, Run(t.Context(), Options{Role: "worker", Stderr: &stderr}, nil))
	require.Contains(t, stderr.String(), `OTEL_TRACES_SAMPLER="sometimes"`)
}

func TestSpansAreFlushedAtTheEnd(t *testing.T) {
	received := make(chan int, 10)
	collector := httptest.NewServer(http.HandlerFunc(func(_ http.ResponseWriter, r *http.Request) {
		body, _ := io.ReadAll(r.Body)
		received <- len(body)
	}))
	defer collector.Close()
	t.Setenv("OTEL_EXPORTER_OTLP_TRACES_ENDPOINT", collector.URL)
	p := start(t)
	_, span := p.Tel.Tracer.Start(t.Context(), "admit")
	span.End()
	require.Equal(t, ExitOK, p.stop())
	require.NotZero(t, <-received)
}

func TestCollectorThatIsAwayIsNoFailure(t *testing.T) {
	t.Setenv("OTEL_EXPORTER_OTLP_METRICS_ENDPOINT", "http://127.0.0.1:1")
	p := start(t)
	require.Equal(t, ExitOK, p.stop())
	p.stderr.line(t, "telemetry was not sent")
}

func TestHealthcheck(t *testing.T) {
	p := start(t)
	healthcheck := func() (int, string) {
		var stderr output
		code := Run(t.Context(), Options{Role: "fetcher", Args: []string{"-healthcheck"}, Environ: []string{"BULKACTION_ADMIN_ADDR=" + p.AdminAddr()}, Stderr: &stderr}, nil)
		return code, stderr.String()
	}
	code, said := healthcheck()
	require.Equal(t, ExitError, code)
	require.Contains(t, said, "503 Service Unavailable")
	require.Contains(t, said, `{"status":"starting"}`)

	p.Ready.Add("redis", func(context.Context) error { return nil })
	code, said = healthcheck()
	require.Equal(t, ExitOK, code, said)

	_, port, err := net.SplitHostPort(p.AdminAddr())
	require.NoError(t, err)
	require.NoError(t, checkHealth(t.Context(), "0.0.0.0:"+port), "every interface is asked on loopback")
	require.NoError(t, checkHealth(t.Context(), ":"+port))
	require.Equal(t, ExitOK, p.stop())
}

func TestStopCutsOffOpenStreams(t *testing.T) {
	ctx, cancel := context.WithCancel(t.Context())
	defer cancel()
	p := newProcess(Config{}, "ingest", nil)
	open := make(chan struct{})
	addr, err := p.Serve(ctx, "api", "127.0.0.1:0", ServeOptions{}, http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		w.(http.Flusher).Flush()
		close(open)
		<-r.Context().Done()
	}))
	require.NoError(t, err)
	client := http.Client{Transport: &http.Transport{DisableKeepAlives: true}}
	response, err := client.Get("http://" + addr.String())
	require.NoError(t, err)
	defer response.Body.Close()
	<-open
	require.NoError(t, p.stop(time.Second), "the server waits for half the time")
	_, err = io.ReadAll(response.Body)
	require.Error(t, err)
}

func TestInstancesAreUniqueAndFitForKeys(t *testing.T) {
	p := newProcess(Config{}, "worker", nil)
	q := p.As("fetcher")
	require.NotEqual(t, newInstance("worker"), p.Instance)
	require.Regexp(t, `^worker-[A-Za-z0-9._-]+-[0-9]+-[0-9a-f]{8}$`, p.Instance)
	require.Regexp(t, regexp.MustCompile(`^fetcher-`), q.Instance)
	require.True(t, api.ValidID(p.Instance))
	require.Same(t, p.Ready, q.Ready)
	require.Equal(t, "fetcher", q.Role)
	require.Equal(t, "worker", p.Role)
}

func TestIsCancelled(t *testing.T) {
	other := errors.New("lost")
	require.True(t, IsOnly(fmt.Errorf("run: %w", context.Canceled), context.Canceled))
	require.True(t, IsOnly(errors.Join(context.Canceled, fmt.Errorf("read: %w", context.Canceled)), context.Canceled))
	require.False(t, IsOnly(errors.Join(context.Canceled, other), context.Canceled))
	require.False(t, IsOnly(fmt.Errorf("run: %w", errors.Join(context.Canceled, other)), context.Canceled))
	require.False(t, IsOnly(context.DeadlineExceeded, context.Canceled))
	require.False(t, IsOnly(nil, context.Canceled))
}

func child(t *testing.T, manners string) (*exec.Cmd, *bufio.Scanner) {
	t.Helper()
	cmd := exec.Command(os.Args[0])
	cmd.Env = append(os.Environ(), childVariable+"="+manners, "BULKACTION_ADMIN_ADDR=127.0.0.1:0")
	stdout, err := cmd.StdoutPipe()
	require.NoError(t, err)
	require.NoError(t, cmd.Start())
	t.Cleanup(func() { _ = cmd.Process.Kill() })
	said := bufio.NewScanner(stdout)
	require.True(t, said.Scan())
	require.Equal(t, "running", said.Text())
	return cmd, said
}

func TestSignalStopsTheProcess(t *testing.T) {
	for _, signal := range []os.Signal{syscall.SIGTERM, syscall.SIGINT} {
		cmd, said := child(t, "polite")
		require.NoError(t, cmd.Process.Signal(signal))
		require.True(t, said.Scan())
		require.Equal(t, "told", said.Text())
		require.NoError(t, cmd.Wait(), "exit code 0")
	}
}

func TestHangupEndsNoProcess(t *testing.T) {
	cmd, said := child(t, "polite")
	require.NoError(t, cmd.Process.Signal(syscall.SIGHUP))
	require.NoError(t, cmd.Process.Signal(syscall.SIGTERM))
	require.True(t, said.Scan())
	require.Equal(t, "told", said.Text())
	require.NoError(t, cmd.Wait(), "exit code 0, not killed by SIGHUP")
}

func TestSecondSignalEndsTheProcessAtOnce(t *testing.T) {
	cmd, said := child(t, "stubborn")
	require.NoError(t, cmd.Process.Signal(syscall.SIGTERM))
	require.True(t, said.Scan())
	require.Equal(t, "told", said.Text())
	gone := make(chan error, 1)
	go func() { gone <- cmd.Wait() }()
	again := time.NewTicker(10 * time.Millisecond) // a signal that arrives together with the first one counts as the first
	defer again.Stop()
	for {
		select {
		case err := <-gone:
			var exit *exec.ExitError
			require.ErrorAs(t, err, &exit)
			require.Equal(t, syscall.SIGTERM, exit.Sys().(syscall.WaitStatus).Signal())
			return
		case <-again.C:
			_ = cmd.Process.Signal(syscall.SIGTERM)
		}
	}
}
