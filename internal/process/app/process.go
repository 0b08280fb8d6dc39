package app

import (
	"context"
	"crypto/rand"
	"encoding/hex"
	"encoding/json"
	"errors"
	"fmt"
	"net"
	"net/http"
	"os"
	"regexp"
	"runtime/debug"
	"slices"
	"sync"
	"time"

	"golang.org/x/sync/singleflight"

	"github.com/bulkaction/bulkaction/internal/telemetry"
)

// stopTimeout is the most time for all clean-ups of a stopping process together. Running jobs have
// ended before that, within SHUTDOWN_GRACE_PERIOD.
const stopTimeout = 10 * time.Second

// Process is the environment in which a role runs: configuration, telemetry, readiness
// and clean-ups.
type Process struct {
	Config   Config
	Tel      *telemetry.Telemetry
	Role     string
	Instance string // unique for this start of the process; may be part of a Redis key
	Ready    *Readiness
	// Embedded means that the process runs inside another program, which handles the signals.
	Embedded bool

	*host
}

// host holds what all roles of a process share.
type host struct {
	admin     *http.ServeMux
	hasAdmin  bool // the admin server is to listen
	adminAddr net.Addr
	fail      context.CancelCauseFunc // ends the context of Run with an error

	mu       sync.Mutex
	cleanups []cleanup
}

type cleanup struct {
	name string
	run  func(context.Context) error
}

func newProcess(cfg Config, role string, fail context.CancelCauseFunc) *Process {
	return &Process{
		Config: cfg, Tel: telemetry.Nop(), Role: role, Instance: newInstance(role), Ready: NewReadiness(),
		host: &host{admin: http.NewServeMux(), hasAdmin: true, fail: fail},
	}
}

// As returns a Process for another role, for an operating-system process that runs several roles.
// They share everything except the role and the instance name.
func (p *Process) As(role string) *Process {
	q := *p
	q.Role, q.Instance = role, newInstance(role)
	return &q
}

// Fail ends the process in order, with an error.
func (p *Process) Fail(err error) { p.fail(err) }

// AdminAddr returns the address of the admin server, host:port.
func (p *Process) AdminAddr() string { return p.adminAddr.String() }

// OnStop registers f to be called when the process stops or fails to start. The function registered
// last is called first; all of them share ten seconds.
func (p *Process) OnStop(name string, f func(context.Context) error) {
	p.mu.Lock()
	defer p.mu.Unlock()
	p.cleanups = append(p.cleanups, cleanup{name, f})
}

// stop makes the process not ready, runs the clean-ups, the last registered one first, and joins
// their errors. After timeout it still calls the remaining clean-ups, but does not wait for a
// clean-up that ignores the end of its context.
func (p *Process) stop(timeout time.Duration) error {
	p.Ready.SetDraining()
	ctx, cancel := context.WithTimeout(context.Background(), timeout)
	defer cancel()
	var errs []error
	for {
		c, ok := p.popCleanup()
		if !ok {
			return errors.Join(errs...)
		}
		done := make(chan error, 1)
		go func() { done <- c.run(ctx) }()
		select {
		case err := <-done:
			if err != nil {
				errs = append(errs, fmt.Errorf("stop %s: %w", c.name, err))
			}
		case <-ctx.Done():
			errs = append(errs, fmt.Errorf("stop %s: %w", c.name, ctx.Err()))
		}
	}
}

// Guard calls a function of the program that surrounds or extends the process, such as a hook, and
// returns its error. what names the function. A panic, also in the methods of the error, and the end
// of the goroutine become an error, and the log has the place.
func (p *Process) Guard(what string, call func() error) error {
	ended := make(chan error, 1)
	go func() {
		err := fmt.Errorf("%s ended its goroutine by runtime.Goexit: it must return", what)
		defer func() {
			if r := recover(); r != nil {
				err = fmt.Errorf("%s panicked: see `code of the program panicked` in the log", what)
				p.Tel.Log.Error("code of the program panicked", "what", what,
					"panic", fmt.Sprint(r), "stack", string(debug.Stack()))
			}
			ended <- err
		}()
		if err = call(); err != nil {
			_, _ = err.Error(), IsOnly(err, context.Canceled) // what others do with it must not panic
		}
	}()
	return <-ended
}

func (p *Process) popCleanup() (cleanup, bool) {
	p.mu.Lock()
	defer p.mu.Unlock()
	if len(p.cleanups) == 0 {
		return cleanup{}, false
	}
	last := p.cleanups[len(p.cleanups)-1]
	p.cleanups = p.cleanups[:len(p.cleanups)-1]
	return last, true
}

var notInID = regexp.MustCompile(`[^A-Za-z0-9._-]+`)

// newInstance returns role-host-pid-random. The first three parts are for people; the last part
// makes the name unique.
func newInstance(role string) string {
	host, err := os.Hostname()
	if err != nil || host == "" {
		host = "unknown"
	}
	host = notInID.ReplaceAllString(host, "_")
	var random [4]byte
	_, _ = rand.Read(random[:]) // never fails
	return fmt.Sprintf("%.32s-%.48s-%d-%s", role, host, os.Getpid(), hex.EncodeToString(random[:]))
}

const checkTimeout = time.Second

// Readiness decides whether a process can do its work. It serves /readyz: 200 if every check
// passes, otherwise 503. Only a caller on this host gets the reasons. /readyz?for=traffic ignores
// shared checks. A process without any check that counts is starting. A starting process and a
// stopping (draining) one are not ready.
type Readiness struct {
	timeout time.Duration // of each check

	mu       sync.Mutex
	checks   []*check
	draining bool
	layouts  map[string]string
}

// Purpose is what the caller of /readyz uses the answer for.
type Purpose string

const (
	// ForWork asks whether the process can do its work.
	ForWork Purpose = ""
	// ForTraffic asks whether a load balancer should send requests. Checks of what all processes
	// share, such as Redis, don't count: when Redis is away, every process fails them, and a load
	// balancer without any process answers clients worse than the processes do.
	ForTraffic Purpose = "traffic"
)

// check is a named check of /readyz. At most one run of it is active: requests that arrive
// meanwhile get its result, so that a check that hangs does not pile up goroutines.
type check struct {
	name   string
	shared bool // what it checks is away for all processes at once
	run    func(context.Context) error
	once   singleflight.Group
}

// NewReadiness returns a Readiness without checks.
func NewReadiness() *Readiness { return &Readiness{timeout: checkTimeout} }

// Add adds a check. /readyz shows its error to callers on this host, so the error must contain no
// secret. A check that takes longer than a second has failed.
func (r *Readiness) Add(name string, run func(context.Context) error) {
	r.mu.Lock()
	defer r.mu.Unlock()
	r.checks = append(r.checks, &check{name: name, run: run})
}

// AddShared adds a check of a service that all processes use. /readyz?for=traffic ignores this
// check.
func (r *Readiness) AddShared(name string, run func(context.Context) error) {
	r.mu.Lock()
	defer r.mu.Unlock()
	r.checks = append(r.checks, &check{name: name, shared: true, run: run})
}

// SetDraining makes the process permanently not ready, because it is stopping.
func (r *Readiness) SetDraining() {
	r.mu.Lock()
	defer r.mu.Unlock()
	r.draining = true
}

// SetLayouts sets the numbers of the layouts that reports show.
func (r *Readiness) SetLayouts(numbers map[string]string) {
	r.mu.Lock()
	defer r.mu.Unlock()
	r.layouts = numbers
}

// ReadyReport is the body of /readyz.
type ReadyReport struct {
	Status  string            `json:"status"`            // ready, failing, starting or draining
	Failing map[string]string `json:"failing,omitempty"` // the error of each failing check, by its name
	// Layouts has the numbers of the layouts of the data in Redis, by part; absent before they are known.
	Layouts map[string]string `json:"layouts,omitempty"`
}

// Report runs all checks that count for a purpose concurrently, and returns the result. It runs
// none while the process is draining.
func (r *Readiness) Report(ctx context.Context, purpose Purpose) ReadyReport {
	r.mu.Lock()
	checks, draining, layouts := slices.Clone(r.checks), r.draining, r.layouts
	r.mu.Unlock()
	if purpose == ForTraffic {
		checks = slices.DeleteFunc(checks, func(c *check) bool { return c.shared })
	}
	switch {
	case draining:
		return ReadyReport{Status: "draining"}
	case len(checks) == 0:
		return ReadyReport{Status: "starting"}
	}
	errs := make([]error, len(checks))
	var running sync.WaitGroup
	for i, c := range checks {
		running.Go(func() { errs[i] = c.ask(ctx, r.timeout) })
	}
	running.Wait()
	report := ReadyReport{Status: "ready", Layouts: layouts}
	for i, err := range errs {
		if err == nil {
			continue
		}
		if report.Failing == nil {
			report.Status, report.Failing = "failing", map[string]string{}
		}
		report.Failing[checks[i].name] = err.Error()
	}
	return report
}

func (c *check) ask(ctx context.Context, timeout time.Duration) error {
	ctx, cancel := context.WithTimeout(ctx, timeout)
	defer cancel()
	answer := c.once.DoChan("", func() (any, error) {
		// the request that started the check may be cancelled
		shared, cancel := context.WithTimeout(context.WithoutCancel(ctx), timeout)
		defer cancel()
		return nil, c.run(shared)
	})
	select {
	case a := <-answer:
		return a.Err
	case <-ctx.Done():
		if errors.Is(ctx.Err(), context.DeadlineExceeded) {
			return fmt.Errorf("no answer within %s", timeout)
		}
		return ctx.Err()
	}
}

// ServeHTTP serves /readyz, and /readyz?for=traffic. Only this host learns which checks fail and
// why.
func (r *Readiness) ServeHTTP(w http.ResponseWriter, request *http.Request) {
	purpose := Purpose(request.URL.Query().Get("for"))
	if purpose != ForWork && purpose != ForTraffic {
		http.Error(w, "for must be traffic, or absent", http.StatusBadRequest)
		return
	}
	report := r.Report(request.Context(), purpose)
	if !fromLoopback(request) {
		report.Failing, report.Layouts = nil, nil
	}
	w.Header().Set("Content-Type", "application/json")
	if report.Status != "ready" {
		w.WriteHeader(http.StatusServiceUnavailable)
	}
	_ = json.NewEncoder(w).Encode(report) // fails only if the client has closed the connection
}
