package main

import (
	"cmp"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"os"
	"os/exec"
	"strconv"
	"sync"
	"sync/atomic"
	"time"

	"github.com/redis/go-redis/v9"
	"golang.org/x/sync/errgroup"

	"github.com/bulkaction/bulkaction/guard"
	"github.com/bulkaction/bulkaction/internal/redisx"
	"github.com/bulkaction/bulkaction/internal/testkit/childproc"
)

// guardLoadCommand is the argument with which this program runs as a process that calls guards.
const guardLoadCommand = "guard-load"

// guardTask is the load of one process that calls guards. The parent writes the task as JSON to the
// process's standard input. The process answers with a guardReport when it is ready; the parent
// writes true, and the process begins. At its end it writes another guardReport.
type guardTask struct {
	Kind       string // what is called, see newCall
	URL        string // of Redis
	Prefix     string // of the keys
	Index      int    // number of the process, from 0
	Processes  int    // number of processes with this task
	Goroutines int    // of each process
	Seconds    float64
	PerSecond  float64 // calls a second of this process; 0: each goroutine calls again at once
	Names      int     // number of keys of a limiter, or number of locks
	Members    int     // of a pool
	Capacity   int     // concurrency of each member
	Rate       guard.Rate
	Breaker    guard.BreakerPolicy
	Hold       time.Duration // how long a lease is held
	Faults     bool          // calls may fail: go on
}

// guardReport is what a process with a guardTask has done. The first report of a task only says
// that the process is ready.
type guardReport struct {
	Error  string
	Calls  int
	Waits  []float64    // ms: of paced calls from the time at which they were due; of handovers
	Events []guardEvent // of tasks that check something
}

// guardEvent is a call that was allowed. Times are in µs.
type guardEvent struct {
	Name     string // key or member
	Granted  int64  // by the clock of Redis
	Works    int64  // when the holder works, by this host's clock, which Redis uses too
	Ends     int64  // just before the release is sent
	Released int64  // when the release has been answered
}

// serveGuardLoad is the main function of a process that calls guards. It reads tasks from in until
// that ends, carries them out, and writes reports to out.
func serveGuardLoad(ctx context.Context, in io.Reader, out io.Writer) error {
	tasks, reports := json.NewDecoder(in), json.NewEncoder(out)
	for {
		var t guardTask
		if err := tasks.Decode(&t); err != nil {
			if errors.Is(err, io.EOF) {
				return nil
			}
			return fmt.Errorf("read a task: %w", err)
		}
		r, err := t.serve(ctx, tasks, reports)
		if err != nil {
			r.Error = err.Error()
		}
		if err := reports.Encode(r); err != nil {
			return fmt.Errorf("write a report: %w", err)
		}
	}
}

// guardLoad is one task under way.
type guardLoad struct {
	guardTask
	client *guard.Client

	mu     sync.Mutex
	events []guardEvent
	waits  []float64
}

type guardCall func(ctx context.Context, goroutine int) error

func (t guardTask) serve(ctx context.Context, steps *json.Decoder, reports *json.Encoder) (r guardReport, err error) {
	opts, err := redis.ParseURL(t.URL)
	if err != nil {
		return r, err
	}
	opts.PoolSize = 20
	rdb := redis.NewClient(opts)
	defer rdb.Close() //nolint:errcheck // all calls have ended
	load := &guardLoad{guardTask: t, client: guard.New(rdb, guard.Prefix(t.Prefix))}
	defer func() {
		closing, cancel := context.WithTimeout(context.WithoutCancel(ctx), time.Second)
		defer cancel()
		_ = load.client.Close(closing) // leases of failed releases may be left
	}()
	one, err := load.newCall(ctx)
	if err != nil {
		return r, err
	}
	var begin bool
	if err := errors.Join(reports.Encode(guardReport{}), steps.Decode(&begin)); err != nil {
		return r, err
	}
	if t.PerSecond > 0 {
		r.Calls, err = load.pace(ctx, one)
	} else {
		r.Calls, err = saturate(ctx, t.Goroutines, t.Seconds, one)
	}
	r.Waits, r.Events = load.waits, load.events
	return r, err
}

// saturate calls `one` in n goroutines, again and again, until the time is over. It returns the
// number of calls.
func saturate(ctx context.Context, n int, span float64, one guardCall) (int, error) {
	var calls atomic.Int64
	end := time.Now().Add(seconds(span))
	all, ctx := errgroup.WithContext(ctx)
	for i := range n {
		all.Go(func() error {
			n := 0
			for ; time.Now().Before(end); n++ {
				if err := one(ctx, i); err != nil {
					return err
				}
			}
			calls.Add(int64(n))
			return nil
		})
	}
	err := all.Wait()
	return int(calls.Load()), err
}

// pace makes calls at a steady rate, whether or not earlier ones have been answered. It stores how
// long each call took from the time at which it was due.
func (l *guardLoad) pace(ctx context.Context, one guardCall) (int, error) {
	n := int(l.PerSecond * l.Seconds)
	l.waits = make([]float64, n)
	interval := time.Duration(float64(time.Second) / l.PerSecond)
	// The processes take turns.
	begin := time.Now().Add(interval * time.Duration(l.Index) / time.Duration(l.Processes))
	all, ctx := errgroup.WithContext(ctx)
	for i := range n {
		due := begin.Add(time.Duration(i) * interval)
		sleepUntil(due)
		all.Go(func() error {
			err := one(ctx, i%l.Goroutines)
			l.waits[i] = millis(time.Since(due))
			return err
		})
	}
	return n, all.Wait()
}

func (l *guardLoad) note(e guardEvent) {
	l.mu.Lock()
	defer l.mu.Unlock()
	l.events = append(l.events, e)
}

// guardMembers returns n members with the ids m0, m1 and so on.
func guardMembers(n int) []guard.Member {
	members := make([]guard.Member, n)
	for i := range members {
		members[i].ID = "m" + strconv.Itoa(i)
	}
	return members
}

// newCall prepares the calls of a task.
func (l *guardLoad) newCall(ctx context.Context) (guardCall, error) {
	switch l.Kind {
	case "take":
		return l.take(), nil
	case "lock", "handover":
		return l.lock(), nil
	}
	pool, err := l.client.Pool(ctx, "p", guard.Spec{
		Members: guardMembers(l.Members), Rate: l.Rate, Breaker: l.Breaker, Concurrency: l.Capacity,
	})
	if err != nil {
		return nil, err
	}
	switch l.Kind {
	case "pair":
		return func(ctx context.Context, _ int) error {
			lease, err := pool.Acquire(ctx)
			if err != nil {
				return err
			}
			return lease.Release(ctx, guard.Success)
		}, nil
	case "lease":
		return func(ctx context.Context, _ int) error {
			return l.hold(ctx, pool)
		}, nil
	}
	return nil, fmt.Errorf("there is no task %q", l.Kind)
}

// take returns a function that calls a limiter's Take, with the task's keys in turn. In a task with
// faults it stores the time of each call that was allowed, and waits a little after any other. In
// other tasks a denied call is an error.
func (l *guardLoad) take() guardCall {
	limiter := l.client.Limiter("l", l.Rate, guard.OnOutage(guard.Closed))
	var n atomic.Int64
	return func(ctx context.Context, _ int) error {
		key := "k" + strconv.Itoa((int(n.Add(1))*l.Processes+l.Index)%l.Names)
		d, err := limiter.Take(ctx, key, 1)
		switch {
		case err == nil && d.Allowed:
			if l.Faults {
				l.note(guardEvent{Name: key, Granted: d.At.UnixMicro()})
			}
			return nil
		case l.Faults:
			return redisx.Sleep(ctx, max(time.Millisecond, min(d.RetryAfter, 20*time.Millisecond)))
		}
		return cmp.Or(err, errLimited)
	}
}

var errLimited = errors.New("the limit was reached")

// lock returns a function that locks and unlocks once. No two goroutines of all processes use the
// same lock at a time, unless the task has only one name. In a task of kind handover the function
// stores the time from a release until the next holder's call returns.
func (l *guardLoad) lock() guardCall {
	all := make([]*guard.Lock, l.Names)
	for i := range all {
		all[i] = l.client.Lock("n" + strconv.Itoa(i))
	}
	turns := make([]atomic.Int64, l.Goroutines)
	step := l.Goroutines * l.Processes
	return func(ctx context.Context, goroutine int) error {
		turn := int(turns[goroutine].Add(1)) % max(1, l.Names/step)
		lease, err := all[(turn*step+l.Index*l.Goroutines+goroutine)%l.Names].Lock(ctx)
		if err != nil {
			return err
		}
		if l.Kind == "handover" {
			// The last holder's release granted this lease. The fence of the lease is the time of
			// that release by Redis's clock (µs).
			handover := float64(time.Now().UnixMicro()-lease.Fence()) / 1000
			l.mu.Lock()
			l.waits = append(l.waits, handover)
			l.mu.Unlock()
			sleepUntil(time.Now().Add(l.Hold))
		}
		return lease.Release(ctx, guard.Neutral)
	}
}

// hold acquires a lease, holds it for the task's time, releases it, and stores these times. If the
// lease is denied, or in a task with faults the call fails, hold waits a little instead. The fence
// of a lease is the time of its grant.
func (l *guardLoad) hold(ctx context.Context, pool *guard.Pool) error {
	lease, err := pool.Acquire(ctx, guard.MaxWait(2*time.Second))
	var denied *guard.DeniedError
	switch {
	case errors.As(err, &denied):
		return redisx.Sleep(ctx, max(time.Millisecond, min(denied.After, 20*time.Millisecond)))
	case err != nil && l.Faults:
		return redisx.Sleep(ctx, time.Millisecond)
	case err != nil:
		return err
	}
	e := guardEvent{Name: lease.Member(), Granted: lease.Fence(), Works: time.Now().UnixMicro()}
	sleepUntil(time.Now().Add(l.Hold))
	e.Ends = time.Now().UnixMicro()
	err = lease.Release(ctx, guard.Success)
	e.Released = time.Now().UnixMicro()
	l.note(e)
	if l.Faults {
		return nil
	}
	return err
}

// loader is a child process that calls guards.
type loader struct {
	*childproc.Child
	log     *childproc.Tail
	out     *os.File
	send    *json.Encoder
	reports *json.Decoder
}

// startLoader starts this program as a child process that calls guards. It is killed when ctx ends.
func startLoader(ctx context.Context) (*loader, error) {
	program, err := os.Executable()
	if err != nil {
		return nil, err
	}
	out, stdout, err := os.Pipe()
	if err != nil {
		return nil, err
	}
	defer stdout.Close() //nolint:errcheck // the process has its own
	l := &loader{out: out, log: &childproc.Tail{}, reports: json.NewDecoder(out)}
	cmd := exec.Command(program, guardLoadCommand) // #nosec G204: this program
	cmd.Stdout, cmd.Stderr = stdout, l.log
	in, err := cmd.StdinPipe()
	if err == nil {
		l.send = json.NewEncoder(in)
		l.Child, err = childproc.Start(cmd)
	}
	if err != nil {
		return nil, errors.Join(fmt.Errorf("start a process that makes calls: %w", err), out.Close())
	}
	context.AfterFunc(ctx, l.Kill) // so that no read of a report blocks any more
	return l, nil
}

func (l *loader) close() {
	l.Kill()
	_ = l.out.Close() // it was only read
}

// report reads the next report of the process.
func (l *loader) report() (r guardReport) {
	if err := l.reports.Decode(&r); err != nil {
		failf("a process that makes calls has ended: %w: %s", err, l.log)
	}
	if r.Error != "" {
		failf("a process that makes calls: %s", r.Error)
	}
	return r
}

// prepare sends a task to each of the first n processes, and waits until all are ready. A task
// without a key prefix gets a new one.
func (b *guardBench) prepare(n int, t guardTask) {
	t.URL, t.Prefix, t.Processes = cmp.Or(t.URL, b.url), cmp.Or(t.Prefix, b.newPrefix()), n
	for i, l := range b.loaders[:n] {
		t.Index = i
		check(l.send.Encode(t))
	}
	b.end(n)
}

// begin starts the tasks of the first n processes.
func (b *guardBench) begin(n int) {
	for _, l := range b.loaders[:n] {
		check(l.send.Encode(true))
	}
}

// end waits until the first n processes have ended their tasks, and returns the sum of their
// reports.
func (b *guardBench) end(n int) (sum guardReport) {
	for _, l := range b.loaders[:n] {
		r := l.report()
		sum.Calls += r.Calls
		sum.Waits, sum.Events = append(sum.Waits, r.Waits...), append(sum.Events, r.Events...)
	}
	return sum
}

// carryOut carries out a task in n processes and returns the sum of their reports.
func (b *guardBench) carryOut(n int, t guardTask) guardReport {
	b.prepare(n, t)
	b.begin(n)
	return b.end(n)
}
