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

// stopTimeout bounds all clean-ups of a process together; running jobs end before them, within
// their own grace.
const stopTimeout = 10 * time.Second

// Process is what a role runs in.
type Process struct {
	Config   Config
	Tel      *telemetry.Telemetry
	Role     string
	Instance string // unique to this start of the process; fit for a key
	Ready    *Readiness

	*host
}

// host is what all roles of a process share.
type host struct {
	admin     *http.ServeMux
	adminAddr net.Addr
	fail      context.CancelCauseFunc // ends the run with an error

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
		host: &host{admin: http.NewServeMux(), fail: fail},
	}
}

// As is the same process in another of its roles: for one that runs several. They share everything
// but the instance.
func (p *Process) As(role string) *Process {
	q := *p
	q.Role, q.Instance = role, newInstance(role)
	return &q
}

// AdminAddr is where the admin server listens, host:port.
func (p *Process) AdminAddr() string { return p.adminAddr.String() }

// OnStop has f called when the process stops, or fails to start: last in, first out, all
// within ten seconds.
func (p *Process) OnStop(name string, f func(context.Context) error) {
	p.mu.Lock()
	defer p.mu.Unlock()
	p.cleanups = append(p.cleanups, cleanup{name, f})
}

// stop runs the clean-ups and joins their errors. One that ignores the end of its context
// is left behind.
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

// newInstance is role-host-pid-random: the first three are for people, the last makes it unique.
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
