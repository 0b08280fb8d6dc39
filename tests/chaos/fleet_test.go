package chaos

import (
	"context"
	"errors"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"sync"
	"syscall"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/bulkaction/bulkaction/client"
	"github.com/bulkaction/bulkaction/internal/redisx"
	"github.com/bulkaction/bulkaction/internal/testkit/childproc"
	"github.com/bulkaction/bulkaction/internal/testkit/proctest"
)

// grace is how long a process may take to stop: its SHUTDOWN_GRACE_PERIOD and some seconds more.
const grace = 15 * time.Second

// fleet is a set of role processes. Each process is in a slot of the fleet, where a new process
// replaces it when it ends. If no fault explains the end of a process, that is a violation.
type fleet struct {
	bins  binaries
	files string // folder with the workers' own records
	env   map[string]string
	slots []*slot
	apis  []*client.API // one for each ingest slot

	mu         sync.Mutex
	violations []string
	spans      []span // times during which processes were dead or stopped
	last       int    // number of the newest process
	closing    bool
	watching   sync.WaitGroup
}

// span is a time in which a process was suspended by SIGSTOP. For a killed process, until is zero.
type span struct {
	process     string
	from, until time.Time
}

type slot struct {
	fleet *fleet
	role  string
	env   map[string]string

	mu      sync.Mutex
	proc    *process
	changed chan struct{} // closed, and replaced by a new channel, with each new process
}

type process struct {
	*childproc.Child
	name     string // also the name of its file
	log      *childproc.Tail
	killed   bool // a fault killed it; protected by the slot's mutex
	replaced bool // rolling has asked it to stop
}

// startFleet starts as many processes of each role as replicas says, each as the Redis user of its
// role, and waits until the APIs answer. url returns the Redis URL for the process in the i-th
// slot. All processes are killed when the test ends.
func startFleet(t testing.TB, bins binaries, replicas map[string]int, env map[string]string, url func(i int) string) *fleet {
	t.Helper()
	f := &fleet{bins: bins, files: t.TempDir(), env: env}
	for _, role := range []string{"aggregator", "watcher", "worker", "dispatcher", "fetcher", "ingest"} {
		for range replicas[role] {
			s := &slot{fleet: f, role: role, changed: make(chan struct{}), env: map[string]string{"BULKACTION_REDIS_URL": proctest.AsUser(role, url(len(f.slots)))}}
			if role == "ingest" {
				addr := childproc.FreeAddr()
				s.env["BULKACTION_API_ADDR"] = addr
				f.apis = append(f.apis, client.NewAPI("http://"+addr, client.WithRetry(1, time.Second)))
			}
			f.slots = append(f.slots, s)
		}
	}
	t.Cleanup(f.kill)
	for _, s := range f.slots {
		require.NoError(t, s.start())
	}
	for _, a := range f.apis {
		f.await(t, "the API", 30*time.Second, func(ctx context.Context) error { _, err := a.Stats(ctx); return err })
	}
	return f
}

// await calls ready repeatedly until it returns nil. The test fails after the time patience.
func (f *fleet) await(t testing.TB, what string, patience time.Duration, ready func(context.Context) error) {
	t.Helper()
	ctx, cancel := context.WithTimeout(t.Context(), patience)
	defer cancel()
	for {
		err := ready(ctx)
		if err == nil {
			return
		}
		if redisx.Sleep(ctx, 20*time.Millisecond) != nil {
			f.mu.Lock()
			defer f.mu.Unlock()
			t.Fatalf("await %s: %v; violations so far: %.2000q", what, err, f.violations)
		}
	}
}

// launch starts a process of the slot's role and makes it the slot's process.
func (s *slot) launch() (*process, error) {
	f := s.fleet
	f.mu.Lock()
	defer f.mu.Unlock()
	if f.closing {
		return nil, errClosing
	}
	f.last++
	p := &process{name: fmt.Sprintf("%s-%d", s.role, f.last), log: &childproc.Tail{}}
	cmd := exec.Command(f.bins.bulkaction, s.role)
	if s.role == "worker" {
		cmd = exec.Command(f.bins.worker)
	}
	batch := "" // every second process runs its jobs in batches
	if f.last%2 == 0 {
		batch = "CHAOS_BATCH=1"
	}
	cmd.Env = append([]string{"PATH=" + os.Getenv("PATH"), "HOME=" + os.Getenv("HOME"), "TMPDIR=" + os.Getenv("TMPDIR")},
		"CHAOS_FILES="+f.files, "CHAOS_PROCESS="+p.name, batch)
	for _, env := range []map[string]string{f.env, s.env} {
		for name, value := range env {
			cmd.Env = append(cmd.Env, name+"="+value)
		}
	}
	cmd.Stdout, cmd.Stderr = p.log, p.log
	var err error
	if p.Child, err = childproc.Start(cmd); err != nil {
		return nil, err
	}
	s.mu.Lock()
	s.proc = p
	close(s.changed)
	s.changed = make(chan struct{})
	s.mu.Unlock()
	return p, nil
}

var errClosing = errors.New("the fleet is being stopped")

func (s *slot) start() error {
	p, err := s.launch()
	if err != nil {
		return err
	}
	s.fleet.watching.Go(func() { s.supervise(p) })
	return nil
}

// supervise starts a new process each time the slot's process has ended. It returns when the phase
// rolling replaces the process itself, the fleet closes, or a start fails.
func (s *slot) supervise(p *process) {
	for {
		<-p.Done()
		if s.ended(p) {
			return
		}
		<-time.After(100 * time.Millisecond) // a supervisor would wait, too
		next, err := s.launch()
		if err != nil {
			if !errors.Is(err, errClosing) {
				s.fleet.violate("start a %s again: %v", s.role, err)
			}
			return
		}
		p = next
	}
}

// ended is called after a process has ended. If no fault explains that, it records a violation. It
// returns true if supervise shall not start another process.
func (s *slot) ended(p *process) bool {
	s.mu.Lock()
	killed, replaced := p.killed, p.replaced
	s.mu.Unlock()
	s.fleet.mu.Lock()
	closing := s.fleet.closing
	s.fleet.mu.Unlock()
	if replaced || closing {
		return true
	}
	status, _ := p.State().Sys().(syscall.WaitStatus)
	if status.Signaled() && status.Signal() == syscall.SIGKILL && (killed || s.fleet.crashed(p.name)) {
		return false
	}
	s.fleet.violate("%s ended with %s: %s", p.name, p.State(), p.log)
	return false
}

// crashed returns true if a job has killed the process.
func (f *fleet) crashed(name string) bool {
	b, err := os.ReadFile(filepath.Join(f.files, name))
	return err == nil && (strings.HasPrefix(string(b), "crash ") || strings.Contains(string(b), "\ncrash "))
}

// running returns the slot's process, and waits for it while a new one is being started. It returns
// nil if ctx ends first.
func (s *slot) running(ctx context.Context) *process {
	for {
		s.mu.Lock()
		p, changed := s.proc, s.changed
		s.mu.Unlock()
		if p != nil && p.Running() {
			return p
		}
		select {
		case <-changed:
		case <-ctx.Done():
			return nil
		}
	}
}

// kill kills the slot's process with SIGKILL, and records that a fault did it; supervise starts
// another process.
func (s *slot) kill(ctx context.Context) error {
	p := s.running(ctx)
	if p == nil {
		return fmt.Errorf("kill a %s: there is none", s.role)
	}
	s.mu.Lock()
	p.killed = true
	s.mu.Unlock()
	s.fleet.note(span{process: p.name, from: time.Now()})
	p.Kill()
	return nil
}

// stop suspends the slot's process with SIGSTOP, continues it after the time d, and records this
// span. It is no error if the process has already ended.
func (s *slot) stop(ctx context.Context, d time.Duration) error {
	p := s.running(ctx)
	if p == nil {
		return fmt.Errorf("stop a %s: there is none", s.role)
	}
	from := time.Now()
	if err := p.Suspend(); err != nil {
		return ignoreGone(err)
	}
	err := redisx.Sleep(ctx, d)
	s.fleet.note(span{process: p.name, from: from, until: time.Now()})
	return errors.Join(err, ignoreGone(p.Signal(syscall.SIGCONT)))
}

func ignoreGone(err error) error {
	if errors.Is(err, os.ErrProcessDone) {
		return nil // the process was killed in the meantime
	}
	return err
}

func (f *fleet) note(s span) {
	f.mu.Lock()
	defer f.mu.Unlock()
	f.spans = append(f.spans, s)
}

func (f *fleet) violate(format string, args ...any) {
	f.mu.Lock()
	defer f.mu.Unlock()
	f.violations = append(f.violations, fmt.Sprintf(format, args...))
}

func (f *fleet) of(role string) []*slot {
	var all []*slot
	for _, s := range f.slots {
		if s.role == role {
			all = append(all, s)
		}
	}
	return all
}

// shutDown stops all processes of the fleet with SIGTERM. A process that does not end in time, or
// ends with an error, is a violation.
func (f *fleet) shutDown() {
	f.mu.Lock()
	f.closing = true
	f.mu.Unlock()
	var wg sync.WaitGroup
	for _, s := range f.slots {
		wg.Go(func() {
			if p := s.proc; p.Running() {
				p.Stop(grace)
				if code := p.State().ExitCode(); code != 0 {
					f.violate("%s, told to stop, ended with %s: %s", p.name, p.State(), p.log)
				}
			}
		})
	}
	wg.Wait()
	f.watching.Wait()
}

// kill kills all processes of the fleet that still run, and waits until the goroutine supervise of
// each slot has returned.
func (f *fleet) kill() {
	f.mu.Lock()
	f.closing = true
	f.mu.Unlock()
	for _, s := range f.slots {
		if s.proc != nil {
			s.proc.Kill()
		}
	}
	f.watching.Wait()
}
