// Package stage holds what the roles share: Process, what a role gets from its process; Runner,
// which runs the loops of a role, waits for wake tokens between their steps, and at the end gives
// up what the role holds; and the check of the number of partitions. The package of a role is in
// the folder of its name below this one.
package stage

import (
	"context"
	"encoding/binary"
	"encoding/hex"
	"errors"
	"fmt"
	"log/slog"
	"math/rand/v2"
	"strconv"
	"sync"
	"sync/atomic"
	"time"

	"github.com/redis/go-redis/v9"

	"github.com/bulkaction/bulkaction/api"
	"github.com/bulkaction/bulkaction/internal/redisx"
	"github.com/bulkaction/bulkaction/internal/redisx/call"
	"github.com/bulkaction/bulkaction/internal/redisx/keyspace"
	"github.com/bulkaction/bulkaction/internal/stage/presence"
	"github.com/bulkaction/bulkaction/internal/telemetry"
)

// Process is what a role gets from the process that runs it.
type Process struct {
	// ID names the process's consumers, leader leases and heartbeat. It is unique to each start of
	// a process.
	ID      string
	Version string         // of the program
	Layouts map[string]int // the newest layout of each part of the data that the program reads
	// Limits are the global limits of the process's environment; nil: it has none.
	Limits *api.ConfiguredLimits
	Conn   *redisx.Conn
	Space  keyspace.Space
	Tel    *telemetry.Telemetry
}

// Runner runs the loops of a role. The role adds its loops with the methods below, and then calls
// Run once.
type Runner struct {
	process  Process
	loops    []func(context.Context) error
	cleanups []func(context.Context)
}

// Runner returns a Runner without loops.
func (p Process) Runner() *Runner { return &Runner{process: p} }

// Add adds a function that works until its context ends. If it returns an error, all loops end.
func (r *Runner) Add(run func(context.Context) error) { r.loops = append(r.loops, run) }

// Loop adds a loop that repeats step and never waits while there is work. name is for the log, wake
// is the key of the list that gets a wake token when there may be work ("": none).
//
// When step fails, the loop repeats it with backoff until it succeeds: a role continues after an
// outage of Redis. The first error and the success are logged, not the errors between.
func (r *Runner) Loop(name, wake string, step Step) {
	l := loop{name: name, waker: newWaker(r.process.Conn, wake), log: r.process.Tel.Log}
	r.Add(func(ctx context.Context) error { l.run(ctx, step); return nil })
}

// Every adds a loop that calls f at once and then again after each interval. name is for the log.
// Errors of f are logged at debug level only, so it is meant for an f that may fail sometimes.
func (r *Runner) Every(name string, interval time.Duration, f func(context.Context) error) {
	r.Add(func(ctx context.Context) error {
		for {
			if err := f(ctx); err != nil && ctx.Err() == nil {
				r.process.Tel.Log.Debug("periodic call failed", "call", name, "error", err)
			}
			if redisx.Sleep(ctx, interval) != nil {
				return nil
			}
		}
	})
}

// Report adds the heartbeat of the process: at each presence.Interval it publishes what status
// returns, and at the end it removes the heartbeat from Redis.
func (r *Runner) Report(status func() api.StageStatus) {
	p := r.process
	r.Every("status", presence.Interval, func(ctx context.Context) error {
		s := status()
		s.Version, s.Layouts, s.Limits = p.Version, p.Layouts, p.Limits
		return presence.PublishStage(ctx, p.Conn, p.Space, s)
	})
	r.OnStop(func(ctx context.Context) { presence.Withdraw(ctx, p.Conn, p.Space, p.ID) })
}

// ReportAlive adds the heartbeat of a role that publishes no counts, with the names of the reducers
// that the process has.
func (r *Runner) ReportAlive(role string, reducers []string) {
	r.Report(func() api.StageStatus {
		return api.StageStatus{ID: r.process.ID, Role: role, Running: true, Reducers: reducers, SeenAt: time.Now()}
	})
}

// OnStop adds a function that gives up what the role holds in Redis, such as a leader lease. Run
// calls it after all loops have ended, with a context that ends after a second; what the function
// has not given up then expires by itself.
func (r *Runner) OnStop(f func(context.Context)) { r.cleanups = append(r.cleanups, f) }

// Run runs all loops until ctx ends or a function of Add returns an error, and then the functions
// of OnStop, one after the other. Before it returns, it waits for the last blocking reads, about
// redisx.MaxBlock at most. It returns the errors of functions that were added with Add.
func (r *Runner) Run(ctx context.Context) error {
	err := RunAll(ctx, r.loops...)
	for _, cleanup := range r.cleanups {
		end, cancel := context.WithTimeout(context.WithoutCancel(ctx), time.Second)
		cleanup(end)
		cancel()
	}
	return err
}

// RunAll calls all functions at the same time and returns when all have returned. The first error
// ends the context of the others. It returns all errors, joined in the order of runs.
func RunAll(ctx context.Context, runs ...func(context.Context) error) error {
	ctx, cancel := context.WithCancel(ctx)
	defer cancel()
	errs := make([]error, len(runs))
	var wg sync.WaitGroup
	for i, run := range runs {
		wg.Go(func() {
			if errs[i] = run(ctx); errs[i] != nil {
				cancel()
			}
		})
	}
	wg.Wait()
	return errors.Join(errs...)
}

// ErrOneNode is the error of a process that does not know that its Redis is a Cluster.
var ErrOneNode = errors.New(
	"BULKACTION_REDIS_URL names one node of a Redis Cluster: name several, separated by commas, or add ?cluster=true")

// CheckPartitions returns an error when the configured number of partitions differs from the number
// stored in Redis, or when Redis fails. If Redis has no number, it stores the configured one. A
// process with another number would look for tenants in the wrong partitions.
func CheckPartitions(ctx context.Context, conn *redisx.Conn, space keyspace.Space) error {
	want := strconv.Itoa(space.Partitions())
	have, err := conn.Cmd.Get(ctx, space.PartitionCount()).Result()
	if errors.Is(err, redis.Nil) { // GET comes first, because it works even when memory is full
		if err = conn.Cmd.SetNX(ctx, space.PartitionCount(), want, 0).Err(); err == nil {
			have, err = conn.Cmd.Get(ctx, space.PartitionCount()).Result()
		}
	}
	if call.IsMoved(err) && !conn.IsCluster() {
		return ErrOneNode
	}
	if err != nil {
		return fmt.Errorf("check number of partitions: %w", err)
	}
	if have != want {
		return fmt.Errorf(
			"BULKACTION_PARTITIONS is %s, but the data in Redis was made with %s (key %s): set it to %s, or "+
				"use another BULKACTION_KEY_PREFIX",
			want, have, space.PartitionCount(), have,
		)
	}
	return nil
}

// SpanSeed returns 8 random hex digits, not all 0, from which a script makes the ids of the spans
// that it creates.
func SpanSeed() string {
	var b [4]byte
	binary.BigEndian.PutUint32(b[:], rand.Uint32()|1)
	return hex.EncodeToString(b[:])
}

// Step does some of a role's work. It returns how long to wait before the next step: 0 when there
// is more work now; a negative time when only a wake token should end the wait. A wake token ends
// any wait earlier, and no wait is longer than redisx.MaxBlock.
type Step func(ctx context.Context) (idle time.Duration, err error)

// loop is one loop of a role: it repeats a step until its context ends (see Runner.Loop).
type loop struct {
	name  string
	waker *waker
	log   *slog.Logger
}

// run calls step again and again until ctx ends. Before it returns, it waits for the last blocking
// read of its waker.
func (l loop) run(ctx context.Context, step Step) {
	defer l.waker.reads.Wait()
	loops := redisx.Loops{Log: l.log}
	retry := redisx.Backoff{Min: 50 * time.Millisecond, Max: 5 * time.Second}
	loops.Run(ctx, l.name, retry, step, func(ctx context.Context, idle time.Duration) error {
		if idle < 0 {
			idle = redisx.MaxBlock
		}
		l.waker.wait(ctx, min(idle, redisx.MaxBlock))
		return nil
	})
}

// waker waits in Redis (BLPOP) for a wake token, for at most a given time. Redis may end a blocking
// read up to 100 ms late, so waker measures the time itself; a read that is still blocked serves
// the next wait too. It begins a read only during a wait, because a token is for an idle process.
type waker struct {
	conn      *redisx.Conn
	key       string
	token     chan struct{} // a read has returned a token
	readEnded chan struct{} // a read has ended without a token
	reading   atomic.Bool   // a read runs
	reads     sync.WaitGroup
}

func newWaker(conn *redisx.Conn, key string) *waker {
	return &waker{conn: conn, key: key, token: make(chan struct{}, 1), readEnded: make(chan struct{}, 1)}
}

// wait blocks until there is a wake token, the time d is over, or ctx ends.
func (w *waker) wait(ctx context.Context, d time.Duration) {
	timer := time.NewTimer(d)
	defer timer.Stop()
	for {
		if w.key != "" && w.reading.CompareAndSwap(false, true) {
			w.reads.Go(func() { w.readToken(context.WithoutCancel(ctx)) })
		}
		select {
		case <-w.readEnded: // begin the next read
		case <-w.token:
			return
		case <-timer.C:
			return
		case <-ctx.Done():
			return
		}
	}
}

// readToken does one blocking read, and signals on token or on readEnded whether it returned a
// token. After an error of Redis it signals nothing, so that wait ends by its timer and does not
// read again at once.
func (w *waker) readToken(ctx context.Context) {
	err := w.conn.Block.BLPop(ctx, redisx.MaxBlock, w.key).Err()
	w.reading.Store(false)
	signal := w.readEnded
	switch {
	case err == nil:
		signal = w.token
	case !errors.Is(err, redis.Nil):
		return
	}
	select {
	case signal <- struct{}{}:
	default:
	}
}
