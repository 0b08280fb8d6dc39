package bulktest

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"maps"
	"runtime"
	"slices"
	"strings"
	"sync"
	"time"

	"github.com/bulkaction/bulkaction/api"
	"github.com/bulkaction/bulkaction/client"
	"github.com/bulkaction/bulkaction/internal/process/app"
	"github.com/bulkaction/bulkaction/internal/process/builtin"
	"github.com/bulkaction/bulkaction/internal/redisx"
	"github.com/bulkaction/bulkaction/processor"
)

// Ended is a group that has ended, with the results and the failures of its jobs, each by the
// ordinal of the job.
type Ended struct {
	api.Group
	Results  map[int64]api.Result
	Failures map[int64]api.Failure
}

// Submit submits a group, which it seals, and waits until the group has ended.
func (s *System) Submit(g client.Submission) Ended {
	s.t.Helper()
	g.Seal = true
	accepted, err := s.API.Submit(s.t.Context(), g)
	if err != nil {
		s.t.Fatalf("bulktest: %v", err)
	}
	return s.Wait(accepted.ID)
}

// patience is how long (in the bubble's time) Wait accepts that nothing happens to a group, in
// addition to the timeout of a job, when no start time is known. Skipped time does not count, but
// each skip takes `restart` off.
var patience = 2 * time.Minute // tests shorten it

const (
	pause   = 250 * time.Millisecond // between two looks at a group
	restart = 2 * time.Second        // how much of its patience Wait loses with each time that it skips
)

// Wait waits until a group has ended. While no job runs, it skips the time to the next start of a
// job, as Sleep does. The test fails if a group makes no progress for two minutes plus the timeout
// of a job, or if a group that a producer publishes does not exist by then.
func (s *System) Wait(group string) Ended {
	s.t.Helper()
	limit := patience + s.longestTimeout()
	var last progress
	left, waited := limit, "" // waited: what the group waited for when time was skipped last
	for {
		g, err := s.API.Group(s.t.Context(), group)
		switch {
		case errors.Is(err, client.ErrNotFound):
		case err != nil:
			s.t.Fatalf("bulktest: %v", err)
		case g.Status.Ended():
			return s.collect(g)
		}
		if now := progressOf(g); now != last {
			last, left, waited = now, limit, ""
		}
		if left <= 0 {
			why := waited
			switch {
			case err != nil:
				why = "it has not arrived"
			case why == "":
				why = s.why(group)
			}
			s.t.Fatalf("bulktest: group %s makes no progress: %s; counts: %+v. %s", group, why, g.Counts,
				s.watch.calls.report())
		}
		if due, ok := s.nothingRuns(); ok && time.Until(due) > shortest {
			if err == nil {
				waited = s.why(group)
			}
			s.skip(due)
			left -= restart
			continue
		}
		s.pass(pause)
		left -= pause
	}
}

// shortest is the shortest time that Sleep and Wait skip by stopping the roles. A stop and start
// take about a second of the bubble's time, so skipping less would gain little.
const shortest = 5 * time.Second

// Sleep lets the time d pass. While no job runs or is about to run, it stops the roles, jumps to
// the next start of a job, and starts the roles again, as an operator could do overnight: a day
// passes in some milliseconds. A time.Sleep lets the roles run, and then ten minutes take some
// seconds of real time.
func (s *System) Sleep(d time.Duration) {
	s.t.Helper()
	for end := time.Now().Add(d); ; {
		left := time.Until(end)
		if left <= 0 {
			return
		}
		due, ok := s.nothingRuns()
		if ok && (due.IsZero() || due.After(end)) {
			due = end
		}
		if ok && time.Until(due) > shortest {
			s.skip(due)
			continue
		}
		s.pass(min(left, time.Second))
	}
}

// skip lets the bubble's time pass until due. It stops the roles, and starts them again shortly
// before due, so that the worker has announced itself by then: before, Why says that there is none.
func (s *System) skip(due time.Time) {
	s.t.Helper()
	s.stop()
	s.pass(time.Until(due) - pause)
	s.start()
	s.pass(pause)
}

// pass waits for the time d. The test's context does not end the wait early: it ends only after the
// test.
func (s *System) pass(d time.Duration) { _ = redisx.Sleep(s.t.Context(), d) }

// nothingRuns reports whether no job runs, or may start before a known time. due is that time; zero
// if no job has a start time. Jobs of a paused group do not count as running.
func (s *System) nothingRuns() (due time.Time, ok bool) {
	s.t.Helper()
	for g, err := range s.API.Groups(s.t.Context(), client.GroupFilter{}) {
		if err != nil {
			s.t.Fatalf("bulktest: %v", err)
		}
		unfinished := g.Counts.Accepted - g.Counts.Ended()
		if g.Status.Ended() || unfinished == 0 && !g.Sealed && g.Status != api.StatusAggregating {
			continue
		}
		if unfinished == 0 || g.Counts.Ready+g.Counts.InFlight > 0 {
			return due, false
		}
		why, err := s.API.Why(s.t.Context(), g.ID)
		switch {
		case err != nil:
			s.t.Fatalf("bulktest: %v", err)
		case why.Reason == api.WhyPaused:
		case why.Until == nil:
			return due, false
		case due.IsZero() || why.Until.Before(due):
			due = *why.Until
		}
	}
	return due, true
}

// progress has some fields of a group. Two values of it differ if something happened to the group
// between them. That a deferred job waits again does not count.
type progress struct {
	status  api.Status
	ended   int64
	retries int64
	total   int64
	sealed  bool
}

func progressOf(g api.Group) progress {
	return progress{g.Status, g.Counts.Ended(), g.Retries, g.Counts.Accepted, g.Sealed}
}

// longestTimeout returns the longest timeout that the settings give to jobs of any type.
func (s *System) longestTimeout() time.Duration {
	cfg, err := app.LoadSettings(s.config.Settings, new(builtin.Config))
	if err != nil {
		s.t.Fatalf("bulktest: %v", err) // not reached: the roles have started with them
	}
	longest := cfg.Worker.JobTimeout
	for _, d := range cfg.Worker.JobTimeouts {
		longest = max(longest, d)
	}
	return longest
}

// why says what the next job of a group waits for.
func (s *System) why(group string) string {
	why, err := s.API.Why(s.t.Context(), group)
	if err != nil {
		return err.Error()
	}
	return why.Detail
}

// collect reads the results and the failures of a group.
func (s *System) collect(g api.Group) Ended {
	s.t.Helper()
	e := Ended{g, map[int64]api.Result{}, map[int64]api.Failure{}}
	for r, err := range s.API.Results(s.t.Context(), g.ID) {
		if err != nil {
			s.t.Fatalf("bulktest: %v", err)
		}
		e.Results[r.Ordinal] = r
	}
	for f, err := range s.API.Failures(s.t.Context(), g.ID) {
		if err != nil {
			s.t.Fatalf("bulktest: %v", err)
		}
		e.Failures[f.Ordinal] = f
	}
	return e
}

// calls records the calls of processors that have not returned yet, with their goroutines, so that
// a failing test can name them.
type calls struct {
	mu      sync.Mutex
	last    int
	running map[int]call
}

type call struct {
	job       processor.Job // the first one of a batch
	others    int           // further jobs of a batch
	goroutine string        // "goroutine 7 "
}

func newCalls() *calls { return &calls{running: map[int]call{}} }

// watch is middleware that records the calls.
func (c *calls) watch(next processor.Handler) processor.Handler {
	return func(ctx context.Context, job processor.Job) (any, error) {
		defer c.began(job, 0)()
		return next(ctx, job)
	}
}

// watchBatch is watch for batchers.
func (c *calls) watchBatch(next processor.BatchHandler) processor.BatchHandler {
	return func(ctx context.Context, jobs []processor.Job) ([]processor.Outcome[any], error) {
		defer c.began(jobs[0], len(jobs)-1)()
		return next(ctx, jobs)
	}
}

// began records a call of the goroutine that calls it, until ended is called.
func (c *calls) began(job processor.Job, others int) (ended func()) {
	c.mu.Lock()
	defer c.mu.Unlock()
	c.last++
	id := c.last
	c.running[id] = call{job, others, goroutineID()}
	return func() {
		c.mu.Lock()
		defer c.mu.Unlock()
		delete(c.running, id)
	}
}

// mostReported is how many running calls a report shows.
const mostReported = 3

// report describes the processors that have not returned: how many these are and, of at most three,
// the job and the stack of the goroutine. It returns "" if all processors have returned.
func (c *calls) report() string {
	c.mu.Lock()
	running := maps.Clone(c.running)
	c.mu.Unlock()
	if len(running) == 0 {
		return ""
	}
	stacks := allStacks()
	var b strings.Builder
	fmt.Fprintf(&b, "Processors that run: %d.", len(running))
	for _, id := range slices.Sorted(maps.Keys(running))[:min(len(running), mostReported)] {
		r := running[id]
		fmt.Fprintf(&b, "\nType %s, job %s, attempt %d", r.job.Type, r.job.ID(), r.job.Attempt)
		if r.others > 0 {
			fmt.Fprintf(&b, ", and %d more jobs of the call", r.others)
		}
		b.WriteString(":\n")
		for _, stack := range stacks {
			if strings.HasPrefix(stack, r.goroutine) {
				b.WriteString(stack + "\n")
			}
		}
	}
	return b.String()
}

// goroutineID returns the first words of the calling goroutine's stack, "goroutine N", which
// identify it.
func goroutineID() string {
	var b [64]byte
	head, _, _ := bytes.Cut(b[:runtime.Stack(b[:], false)], []byte("["))
	return string(head)
}

func allStacks() []string {
	b := make([]byte, 1<<20)
	for {
		n := runtime.Stack(b, true)
		if n < len(b) || n >= 64<<20 {
			return strings.Split(string(b[:n]), "\n\n")
		}
		b = make([]byte, 2*len(b))
	}
}
