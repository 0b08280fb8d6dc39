// Package proctest runs the project's binaries for tests: it builds them once in each test binary's
// run, and starts, signals and kills processes. It hides how a process reports its addresses: by a
// JSON log line with the msg "listening", a server ("admin", "api" or "broker") and an addr.
package proctest

import (
	"context"
	"fmt"
	"io"
	"maps"
	"net/http"
	"os"
	"os/exec"
	"testing"
	"time"

	"github.com/bulkaction/bulkaction/internal/testkit/childproc"
)

// startTimeout is the most time in which a started process must listen and be ready.
const startTimeout = 60 * time.Second

// Values of the attribute server in the log line "listening".
const (
	adminServer  = "admin"
	apiServer    = "api"
	brokerServer = "broker"
)

// Process is one run of a binary. A method that fails ends the test; call the methods from the
// test's goroutine.
type Process struct {
	t      testing.TB
	name   string
	child  *childproc.Child
	output *output
}

// Start starts a binary by its name, or by its absolute path. The process inherits only the
// variables that Go, the shell and temporary files need. Start sets variables for free loopback
// ports of the admin and API servers and for JSON logs; env is added to them and wins. The process
// is killed at the end of the test. A data race that it has reported fails the test; if the test
// failed, its output is shown.
func Start(t testing.TB, name string, env map[string]string, args ...string) *Process {
	t.Helper()
	path, err := built.path(name)
	if err != nil {
		t.Fatalf("start %s: %v", name, err)
	}
	p := &Process{t: t, name: name, output: newOutput()}
	cmd := exec.Command(path, args...)
	cmd.Env = environ(env)
	cmd.Dir = t.TempDir()
	stdout, stderr := p.output.stream(true), p.output.stream(false)
	cmd.Stdout, cmd.Stderr = stdout, stderr
	if p.child, err = childproc.Start(cmd); err != nil {
		t.Fatalf("start %s: %v", name, err)
	}
	t.Cleanup(func() {
		p.child.Kill()
		if p.output.raced() {
			t.Errorf("%s, process %d, has a data race", name, p.PID())
		}
		if t.Failed() {
			t.Logf("output of %s, process %d, %s:\n%s", name, p.PID(), p.child.State(), p.Log())
		}
	})
	return p
}

// inherited lists the environment variables that a process under test gets from the test, because
// they do not change its behaviour.
var inherited = []string{"PATH", "HOME", "TMPDIR", "GOCOVERDIR", "GORACE", "GOTRACEBACK"}

func environ(env map[string]string) []string {
	all := map[string]string{
		"BULKACTION_ADMIN_ADDR": "127.0.0.1:0",
		"BULKACTION_API_ADDR":   "127.0.0.1:0",
		"BULKACTION_LOG_FORMAT": "json",
	}
	for _, name := range inherited {
		if value, ok := os.LookupEnv(name); ok {
			all[name] = value
		}
	}
	maps.Copy(all, env)
	var list []string
	for name, value := range all {
		list = append(list, name+"="+value)
	}
	return list
}

// PID returns the process id.
func (p *Process) PID() int { return p.child.PID() }

// Running reports whether the process still runs.
func (p *Process) Running() bool { return p.child.Running() }

// Log returns the last part of the process's output on stdout and stderr.
func (p *Process) Log() string { return p.output.log() }

// Output returns everything that the process has written to stdout and stderr.
func (p *Process) Output() string { return p.output.allText() }

// Stdout returns everything that the process has written to stdout. After Wait it is complete.
func (p *Process) Stdout() string { return p.output.stdoutText() }

// Signal sends sig to the process.
func (p *Process) Signal(sig os.Signal) {
	p.t.Helper()
	if err := p.child.Signal(sig); err != nil {
		p.t.Fatalf("%s: %v", p.name, err)
	}
}

// Suspend stops the process with SIGSTOP and waits until it has stopped. SIGCONT continues it.
func (p *Process) Suspend() {
	p.t.Helper()
	if err := p.child.Suspend(); err != nil {
		p.t.Fatalf("%s: %v", p.name, err)
	}
}

// Kill ends the process like a crash, and waits for its end.
func (p *Process) Kill() { p.child.Kill() }

// Wait waits for the end of the process and returns its exit code, or -1 if a signal ended it. The
// test fails if this takes longer than timeout.
func (p *Process) Wait(timeout time.Duration) int {
	p.t.Helper()
	select {
	case <-p.child.Done():
		return p.child.State().ExitCode()
	case <-time.After(timeout):
		p.t.Fatalf("%s, process %d, still runs after %s", p.name, p.PID(), timeout)
		return 0
	}
}

// AdminAddr waits until the admin server listens and returns its host:port.
func (p *Process) AdminAddr() string { p.t.Helper(); return p.addr(adminServer) }

// APIAddr waits until the API listens and returns its host:port.
func (p *Process) APIAddr() string { p.t.Helper(); return p.addr(apiServer) }

// BrokerAddr waits until the server for visitors of the waiting room listens and returns its
// host:port.
func (p *Process) BrokerAddr() string { p.t.Helper(); return p.addr(brokerServer) }

func (p *Process) addr(server string) string {
	p.t.Helper()
	expired := time.After(startTimeout)
	for {
		addr, changed := p.output.listening(server)
		if addr != "" {
			return addr
		}
		select {
		case <-changed:
		case <-p.child.Done():
			if addr, _ := p.output.listening(server); addr != "" {
				return addr
			}
			p.t.Fatalf("%s has ended and never said where its %s server listens", p.name, server)
		case <-expired:
			p.t.Fatalf("%s has not said in %s where its %s server listens", p.name, startTimeout, server)
		}
	}
}

// WaitReady waits until /readyz of the admin server answers 200.
func (p *Process) WaitReady() {
	p.t.Helper()
	ctx, cancel := context.WithTimeout(p.t.Context(), startTimeout)
	defer cancel()
	client := &http.Client{Transport: &http.Transport{DisableKeepAlives: true}}
	url := "http://" + p.AdminAddr() + "/readyz"
	tick := time.NewTicker(10 * time.Millisecond)
	defer tick.Stop()
	for {
		err := ready(ctx, client, url)
		if err == nil {
			return
		}
		select {
		case <-tick.C:
		case <-p.child.Done():
			p.t.Fatalf("%s ended before it was ready: %v", p.name, err)
		case <-ctx.Done():
			p.t.Fatalf("%s is not ready: %v", p.name, err)
		}
	}
}

func ready(ctx context.Context, client *http.Client, url string) error {
	req, err := http.NewRequestWithContext(ctx, http.MethodGet, url, nil)
	if err != nil {
		return err
	}
	resp, err := client.Do(req)
	if err != nil {
		return err
	}
	defer resp.Body.Close()
	if resp.StatusCode != http.StatusOK {
		body, _ := io.ReadAll(io.LimitReader(resp.Body, 1<<10)) // the body has the reason
		return fmt.Errorf("%s: %s", resp.Status, body)
	}
	return nil
}
