package bench

import (
	"cmp"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"strconv"
	"sync"
	"sync/atomic"
	"syscall"
	"time"

	"github.com/redis/go-redis/v9"
	"golang.org/x/sync/errgroup"

	"github.com/bulkaction/bulkaction/guard"
	"github.com/bulkaction/bulkaction/internal/redisx"
)

// guardTask is the load of one process that calls guards. The parent writes the task as JSON to the
// process's standard input. The process answers with a guardReport when it is ready; the parent
// writes a guardStep, and the process begins. At its end it writes another guardReport.
type guardTask struct {
	Kind       string // what is called, see newGuardCall
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

// guardReport is what a process with a guardTask has done so far. The first report of a task only
// says that the process is ready.
type guardReport struct {
	Error  string
	Calls  int
	CPU    time.Duration // of the process, while it made the calls
	Waits  []float64     // ms: of paced calls from the time at which they were due; of handovers
	Events []guardEvent  // of tasks that check something
}

// guardEvent is a call that was allowed. Times are in µs.
type guardEvent struct {
	Name    string // key or member
	Number  int    // of a call that stands in a queue: the number of its guardStep
	Granted int64  // by the clock of Redis
	Works   int64  // when the holder works, by this host's clock, which Redis uses too
	Ends    int64  // just before the release is sent, by this host's clock
	Probe   bool

	Released int64 // when the release has been answered, by this host's clock
}

// guardStep is a command of the parent that begins a guardTask. In a task of kind queue, further
// steps say which calls join the lock's queue and which leave it, until the last step.
type guardStep struct {
	Number int           // of the first call
	Count  int           // calls that join the queue
	Wait   time.Duration // after this time they leave it; 0: never
	Leave  bool          // the call with this number leaves the queue
	Last   bool          // all remaining calls leave the queue
}

// ServeGuardLoad is the main function of a process that generates load on guards. It reads tasks
// from in until that ends, carries them out, and writes reports to out.
func ServeGuardLoad(ctx context.Context, in io.Reader, out io.Writer) error {
	tasks, reports := json.NewDecoder(in), json.NewEncoder(out)
	for {
		var t guardTask
		if err := tasks.Decode(&t); errors.Is(err, io.EOF) {
			return nil
		} else if err != nil {
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

// guardCall makes one call, for a goroutine of this number.
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
	var one guardCall
	if t.Kind != "queue" {
		if one, err = load.newCall(ctx); err != nil {
			return r, err
		}
	}
	if err := reports.Encode(guardReport{}); err != nil {
		return r, err
	}
	var begin guardStep
	if err := steps.Decode(&begin); err != nil {
		return r, err
	}
	before := ownCPU()
	switch {
	case t.Kind == "queue":
		err = load.queue(ctx, steps)
	case t.PerSecond > 0:
		r.Calls, err = load.pace(ctx, one)
	default:
		r.Calls, err = load.saturate(ctx, one)
	}
	r.CPU, r.Waits, r.Events = ownCPU()-before, load.waits, load.events
	return r, err
}

// ownCPU returns the CPU time of this process.
func ownCPU() time.Duration {
	var u syscall.Rusage
	_ = syscall.Getrusage(syscall.RUSAGE_SELF, &u) // fails only for other arguments
	return time.Duration(u.Utime.Nano() + u.Stime.Nano())
}

// saturate calls `one` in all goroutines, again and again, until the time of the task is over. It
// returns the number of calls.
func (l *guardLoad) saturate(ctx context.Context, one guardCall) (int, error) {
	var calls atomic.Int64
	end := time.Now().Add(seconds(l.Seconds))
	all, ctx := errgroup.WithContext(ctx)
	for i := range l.Goroutines {
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
			l.waits[i] = float64(time.Since(due).Microseconds()) / 1000
			return err
		})
	}
	return n, all.Wait()
}

// queue reads the steps of a task of kind queue, and lets calls join the queue of one lock, and
// leave it, as they say.
func (l *guardLoad) queue(ctx context.Context, steps *json.Decoder) error {
	ctx, cancelAll := context.WithCancel(ctx)
	defer cancelAll()
	var all sync.WaitGroup
	lock := queueLock(l.client)
	leave := map[int]context.CancelFunc{}
	for {
		var s guardStep
		if err := steps.Decode(&s); err != nil {
			return err
		}
		switch {
		case s.Last:
			cancelAll()
			all.Wait()
			return nil
		case s.Leave:
			leave[s.Number]()
			continue
		}
		for number := s.Number; number < s.Number+s.Count; number++ {
			standing, cancel := context.WithTimeout(ctx, cmp.Or(s.Wait, time.Hour))
			leave[number] = cancel
			all.Go(func() {
				lease, err := lock.Lock(standing)
				if err != nil {
					return // it left, or timed out
				}
				l.note(guardEvent{Number: number, Granted: lease.Fence()})
				_ = lease.Release(context.WithoutCancel(standing), guard.Neutral) // the lease ends by itself
			})
		}
	}
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

// guardPoolName is the name of the pool of a task.
const guardPoolName = "p"

// newCall prepares the calls of a task.
func (l *guardLoad) newCall(ctx context.Context) (guardCall, error) {
	switch l.Kind {
	case "take":
		return l.take(), nil
	case "lock", "handover":
		return l.lock(), nil
	}
	pool, err := l.client.Pool(ctx, guardPoolName, guard.Spec{
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
			return l.hold(ctx, guard.Success, func() (*guard.Lease, error) {
				return pool.Acquire(ctx, guard.MaxWait(2*time.Second))
			})
		}, nil
	case "probe":
		return func(ctx context.Context, _ int) error {
			return l.hold(ctx, guard.Failure, func() (*guard.Lease, error) { return pool.TryAcquire(ctx) })
		}, nil
	}
	return nil, fmt.Errorf("there is no task %q", l.Kind)
}

// take returns a function that calls a limiter's Take, with the task's keys in turn. In a task with
// faults it stores the time of each call that was allowed, and waits a little after any other. In
// other tasks a denied call is an error.
func (l *guardLoad) take() guardCall {
	limiter := l.client.Limiter("l", l.Rate, guard.OnOutage(guard.Closed))
	keys := make([]string, l.Names)
	for i := range keys {
		keys[i] = "k" + strconv.Itoa(i)
	}
	var n atomic.Int64
	return func(ctx context.Context, goroutine int) error {
		key := keys[(int(n.Add(1))*l.Processes+l.Index)%l.Names]
		d, err := limiter.Take(ctx, key, 1)
		if !l.Faults {
			if err == nil && !d.Allowed {
				err = errors.New("the limit was reached")
			}
			return err
		}
		if err != nil || !d.Allowed {
			return redisx.Sleep(ctx, max(time.Millisecond, min(d.RetryAfter, 20*time.Millisecond)))
		}
		l.note(guardEvent{Name: key, Granted: d.At.UnixMicro()})
		return nil
	}
}

// lock returns a function that locks and unlocks once. No two goroutines of all processes use the
// same lock at a time, unless the task has only one name. In a task of kind handover the function
// stores the time from a release until the next holder's call returns.
func (l *guardLoad) lock() guardCall {
	all := make([]*guard.Lock, l.Names)
	for i := range all {
		all[i] = l.client.Lock("n" + strconv.Itoa(i))
	}
	turns := make([]int, l.Goroutines)
	var mu sync.Mutex
	return func(ctx context.Context, goroutine int) error {
		mu.Lock()
		step := l.Goroutines * l.Processes
		i := turns[goroutine]*step + l.Index*l.Goroutines + goroutine
		if turns[goroutine]++; i+step >= l.Names {
			turns[goroutine] = 0
		}
		mu.Unlock()
		lease, err := all[i%l.Names].Lock(ctx)
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
func (l *guardLoad) hold(ctx context.Context, outcome guard.Outcome, acquire func() (*guard.Lease, error)) error {
	lease, err := acquire()
	var denied *guard.DeniedError
	switch {
	case errors.As(err, &denied):
		return redisx.Sleep(ctx, max(time.Millisecond, min(denied.After, 20*time.Millisecond)))
	case err != nil && l.Faults:
		return redisx.Sleep(ctx, time.Millisecond)
	case err != nil:
		return err
	}
	e := guardEvent{Name: lease.Member(), Granted: lease.Fence(), Probe: lease.Probe(), Works: time.Now().UnixMicro()}
	if l.Hold > 0 {
		sleepUntil(time.Now().Add(l.Hold))
	}
	e.Ends = time.Now().UnixMicro()
	err = lease.Release(ctx, outcome)
	e.Released = time.Now().UnixMicro()
	l.note(e)
	if err != nil && !l.Faults {
		return err
	}
	return nil
}

func seconds(s float64) time.Duration { return time.Duration(s * float64(time.Second)) }
