package app

import (
	"context"
	"crypto/rand"
	"encoding/hex"
	"errors"
	"fmt"
	"net"
	"net/http"
	"os"
	"regexp"
	"sync"
	"time"

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
