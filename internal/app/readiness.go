package app

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"net/http"
	"sync"
	"time"

	"golang.org/x/sync/singleflight"
)

const checkTimeout = time.Second

// Readiness tells whether a process should be sent work. It serves /readyz: 200 when every check
// passes, else 503 with the reasons. A process without any check is still starting, and one that
// drains is not ready.
type Readiness struct {
	timeout time.Duration // of each check

	mu       sync.Mutex
	checks   []*check
	draining bool
}

// check runs at most once at a time: whoever asks meanwhile gets the same answer, so that one that
// hangs does not pile up.
type check struct {
	name string
	run  func(context.Context) error
	once singleflight.Group
}

// NewReadiness has no checks yet.
func NewReadiness() *Readiness { return &Readiness{timeout: checkTimeout} }

// Add lets check decide with the others from now on. Its error is shown to whoever asks, so it must
// hold no secret; one that takes longer than a second has failed.
func (r *Readiness) Add(name string, run func(context.Context) error) {
	r.mu.Lock()
	defer r.mu.Unlock()
	r.checks = append(r.checks, &check{name: name, run: run})
}

// SetDraining makes the process not ready for good.
func (r *Readiness) SetDraining() {
	r.mu.Lock()
	defer r.mu.Unlock()
	r.draining = true
}

// ReadyReport is the body of /readyz.
type ReadyReport struct {
	Status  string            `json:"status"`            // ready, failing, starting or draining
	Failing map[string]string `json:"failing,omitempty"` // error by name of the check
}

// Report runs all checks at once.
func (r *Readiness) Report(ctx context.Context) ReadyReport {
	r.mu.Lock()
	checks, draining := r.checks, r.draining
	r.mu.Unlock()
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
	report := ReadyReport{Status: "ready"}
	for i, err := range errs {
		if err == nil {
			continue
		}
		if report.Failing == nil {
			report = ReadyReport{Status: "failing", Failing: map[string]string{}}
		}
		report.Failing[checks[i].name] = err.Error()
	}
	return report
}

func (c *check) ask(ctx context.Context, timeout time.Duration) error {
	ctx, cancel := context.WithTimeout(ctx, timeout)
	defer cancel()
	answer := c.once.DoChan("", func() (any, error) {
		shared, cancel := context.WithTimeout(context.WithoutCancel(ctx), timeout) // the first to ask may hang up
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

// ServeHTTP answers /readyz.
func (r *Readiness) ServeHTTP(w http.ResponseWriter, request *http.Request) {
	report := r.Report(request.Context())
	w.Header().Set("Content-Type", "application/json")
	if report.Status != "ready" {
		w.WriteHeader(http.StatusServiceUnavailable)
	}
	_ = json.NewEncoder(w).Encode(report) // fails only when the client has gone
}
