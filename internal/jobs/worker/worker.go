// Package worker implements the worker role: it reads the ready streams of the job types that it
// has processors for, starts the jobs under a lease, runs as many of them at a time as it has
// slots, and reports their outcomes. It hides how jobs are batched, how leases are renewed, how a
// processor that ignores its timeout is abandoned, and how a stopping process releases the jobs
// that it can't finish.
package worker

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"math"
	"slices"
	"strings"
	"sync"
	"sync/atomic"
	"time"

	"github.com/bulkaction/bulkaction/api"
	"github.com/bulkaction/bulkaction/internal/jobs/ledger"
	"github.com/bulkaction/bulkaction/internal/redisx/keyspace"
	"github.com/bulkaction/bulkaction/internal/redisx/stream"
	"github.com/bulkaction/bulkaction/internal/stage"
	"github.com/bulkaction/bulkaction/internal/stage/presence"
	"github.com/bulkaction/bulkaction/internal/telemetry"
	"github.com/bulkaction/bulkaction/processor"
)

// Config holds the settings of the worker role.
type Config struct {
	Count        int                      // number of slots at the start; see Worker.Resize
	Types        []string                 // job types to serve; empty: all that have a processor
	Block        time.Duration            // longest blocking read of the ready streams
	JobTimeout   time.Duration            // timeout of a job whose group and type set none
	MaxRetries   int                      // retries of a job whose group sets none
	MaxThrottles int                      // throttles that a job may have; the next one fails it
	Lease        time.Duration            // a worker that does not renew a job's lease for this time loses the job
	Grace        time.Duration            // how long running jobs may go on after the process is told to stop
	Backoff      time.Duration            // wait before the first retry; it doubles with each further retry
	MaxBackoff   time.Duration            // longest wait after an error or a throttle without Retry-After
	Congestion   ledger.Congestion        // its RPS is the rate limit of one partition
	TypeTimeouts map[string]time.Duration // timeouts by job type, of jobs whose group sets none
	// OnStart is called for each job that starts, with Redis's time in µs; nil outside experiments
	OnStart func(at int64, partition int, typ, tenant, group string, ordinal int64, attempt int)
}

// timeoutOf returns the timeout of a job of type typ whose group sets none.
func (c Config) timeoutOf(typ string) time.Duration { return cmp.Or(c.TypeTimeouts[typ], c.JobTimeout) }

// retriesOf returns how many retries a job of a group has.
func (c Config) retriesOf(terms ledger.GroupTerms) int {
	if terms.MaxRetries < 0 {
		return c.MaxRetries
	}
	return terms.MaxRetries
}

// Worker is one worker process: it reads jobs of all partitions and runs them in one pool of slots.
// Create it with New, run it with Run.
//
// For each partition, one goroutine reads and starts jobs of ungated types and one reports
// outcomes; for each gated type, and for each type with batches, of each partition, another one reads
// jobs, and each job that waits for a pass has its own. Each slot is a goroutine, and another one runs suspects alone. One
// goroutine each renews leases, looks for cancelled groups, publishes the status, and looks for
// overdue jobs (watch). They share only what the fields below hold: each of these has a lock of its
// own, is atomic, or is used by one goroutine.
type Worker struct {
	// Not changed after New.
	stage.Process
	cfg     Config
	metrics *telemetry.WorkerMetrics
	procs   map[string]processor.Runner
	types   []string // the served types; each is in ungated, in gates or in batches
	ungated []string
	gates   map[string]*gate      // by type
	batches map[string]*batchType // by type
	feeds   []*feed               // one for each partition

	held        *heldTasks    // the tasks that were read and whose outcome is not reported yet
	slots       *slotPool     // the started tasks that wait or run
	isolation   *isolation    // the suspects
	rates       *rates        // by type, for the capacity report
	meanRunTime movingAverage // mean run time of jobs of all types
	stopping    atomic.Bool   // Run's ctx has ended
	poolSizes   presence.PoolSizes
	waits       atomic.Pointer[waits]
}

// waits are the settings of waits that may change while the process runs.
type waits struct {
	backoff, maxBackoff time.Duration
	congestion          ledger.Congestion
}

// limitsInterval is how long a change of backoffs takes to reach a worker.
const limitsInterval = time.Second

// readLimits takes over the limits that were set while processes run.
func (w *Worker) readLimits(ctx context.Context) error {
	set, err := ledger.ReadLimitSettings(ctx, w.Conn.Cmd, w.Space)
	if err != nil {
		return err
	}
	n := waits{w.cfg.Backoff, w.cfg.MaxBackoff, w.cfg.Congestion}
	if set.DefaultBackoff != nil {
		n.backoff, n.congestion.Base = *set.DefaultBackoff, *set.DefaultBackoff
	}
	if set.MaxBackoff != nil {
		n.maxBackoff, n.congestion.Cap = *set.MaxBackoff, *set.MaxBackoff
	}
	if set.RPS != nil {
		n.congestion.RPS = ledger.RPSOf(*set.RPS, w.Space.Partitions())
	}
	w.waits.Store(&n)
	return nil
}

// ErrNoProcessor is returned by New when Config.Types names a type that has no processor.
var ErrNoProcessor = errors.New("there is no processor for type")

// New returns the worker of a process; it runs jobs with the processors procs. It starts no
// goroutine, but makes the metrics show the worker's slots. It returns an error when two processors
// have the same type, when the name of a type is invalid, when cfg.Types names a type that has no
// processor (ErrNoProcessor), or when procs is empty.
func New(p stage.Process, cfg Config, procs ...processor.Runner) (*Worker, error) {
	w := &Worker{
		Process: p, cfg: cfg, metrics: telemetry.NewWorkerMetrics(p.Tel.Meter),
		procs: map[string]processor.Runner{}, held: newHeldTasks(), slots: newSlotPool(cfg.Count),
		rates: newRates(), gates: map[string]*gate{}, batches: map[string]*batchType{},
	}
	w.waits.Store(&waits{cfg.Backoff, cfg.MaxBackoff, cfg.Congestion})
	for _, p := range procs {
		if !api.ValidID(p.Type()) {
			return nil, fmt.Errorf("processor type %q: must be 1 to %d characters of A-Z a-z 0-9 . _ -",
				p.Type(), api.MaxIDLength)
		}
		if w.procs[p.Type()] != nil {
			return nil, fmt.Errorf("two processors for type %s: keep one", p.Type())
		}
		w.procs[p.Type()] = p
		if len(cfg.Types) == 0 || slices.Contains(cfg.Types, p.Type()) {
			w.types = append(w.types, p.Type())
		}
	}
	for _, typ := range cfg.Types {
		if w.procs[typ] == nil {
			for known := range w.procs {
				if strings.EqualFold(known, typ) {
					return nil, fmt.Errorf("%w %q; did you mean %s?", ErrNoProcessor, typ, known)
				}
			}
			return nil, fmt.Errorf("%w %q: take it out, or build a worker that has one", ErrNoProcessor, typ)
		}
	}
	if len(w.types) == 0 {
		return nil, errors.New("worker without a processor: give it at least one")
	}
	slices.Sort(w.types)
	for _, typ := range w.types {
		switch proc := w.procs[typ].(type) {
		case processor.Gated:
			w.gates[typ] = newGate(w, typ, proc)
		case processor.Processor:
			w.ungated = append(w.ungated, typ)
		case processor.Batcher:
			b, err := newBatchType(w, typ, proc, p.Space.Partitions())
			if err != nil {
				return nil, fmt.Errorf("batches of type %s: %w", typ, err)
			}
			w.batches[typ], w.slots.batches = b, append(w.slots.batches, b)
		default:
			return nil, fmt.Errorf("processor of type %s (%T): must have the method Process or ProcessBatch", typ, proc)
		}
	}
	w.isolation = newIsolation(w)
	for _, p := range p.Space.All() {
		w.feeds = append(w.feeds, &feed{
			w: w, partition: p, reports: newReportQueue(),
			reader: stream.NewReader(w.Conn, keyspace.GroupWorkers, w.ID),
		})
	}
	w.metrics.ObservePool(w.slots.sizeAndActive)
	return w, nil
}

// Run reads and runs jobs until ctx ends. Then it releases the jobs that wait, waits up to
// Config.Grace for running jobs, ends the contexts of the others, and releases every job that did
// not finish. It removes the process's heartbeat, and its consumers without pending entries, from
// Redis, and returns nil after its goroutines have ended, except those whose processor ignores the
// end of its context. While Redis is away, it tries for a few seconds more to report outcomes; the
// dispatcher later reclaims the jobs whose outcomes it could not report.
func (w *Worker) Run(ctx context.Context) error {
	// Running jobs, lease renewal and reports must outlive ctx.
	workCtx, endWork := context.WithCancel(context.WithoutCancel(ctx))
	defer endWork()
	w.slots.admit = func(b *batch) { w.admitBatch(ctx, b) }
	w.slots.start(func(sl *slot) { w.serve(ctx, workCtx, sl) })

	feeds, periodic := w.Runner(), w.Runner()
	var feeding, reporting, background sync.WaitGroup
	for _, f := range w.feeds {
		if len(w.ungated) > 0 {
			feeds.Loop("read ready stream", "", f.step)
		}
		for _, g := range w.gates {
			feeds.Loop("read ready stream", "", (&gatedFeed{feed: f, gate: g}).step)
		}
		for _, b := range w.batches {
			feeds.Loop("read ready stream", "", (&batchFeed{feed: f, of: b}).step)
		}
		reporting.Go(func() { f.reportOutcomes(workCtx) })
	}
	periodic.Every("renew leases", max(w.cfg.Lease/3, time.Millisecond), w.renewLeases)
	periodic.Every("look for cancelled groups", cancelInterval, w.stopCancelled)
	periodic.Every("read limits", limitsInterval, w.readLimits)
	periodic.Every("status", presence.Interval, w.publishStatus)
	periodic.Every("watchdog", watchdogInterval, w.watch)
	feeding.Go(func() { _ = feeds.Run(ctx) })
	background.Go(func() { _ = periodic.Run(workCtx) })
	background.Go(func() { w.isolation.run(ctx, workCtx) })

	<-ctx.Done()
	w.stopping.Store(true)
	feeding.Wait()
	w.drain(endWork)
	for _, f := range w.feeds {
		f.reports.close()
	}
	reporting.Wait()
	w.slots.goroutines.Wait()
	endWork()
	background.Wait()
	presence.Withdraw(ctx, w.Conn, w.Space, w.ID)
	endCtx, cancel := context.WithTimeout(context.WithoutCancel(ctx), time.Second)
	defer cancel()
	w.dropConsumers(endCtx)
	return nil
}

// These times bound a stop to ten seconds after Config.Grace, unless a call to Redis takes longer
// to fail: abandonDelay is how long a processor may ignore the end of its context, reportTimeout how
// long the process tries to report its last outcomes, and giveUpTimeout how long it waits for the
// end of calls to Redis that it has given up.
const (
	abandonDelay  = time.Second
	reportTimeout = 5 * time.Second
	giveUpTimeout = 4 * time.Second
)

// drain empties the process. It releases the waiting jobs at once and lets running jobs finish
// within Config.Grace. Then it ends their contexts, and after abandonDelay abandons and releases
// those that still run. It waits until all outcomes are reported. If that takes longer than
// reportTimeout, it calls stopReporting, which keeps the reports from trying again, and waits up to
// giveUpTimeout for them to give up.
func (w *Worker) drain(stopReporting func()) {
	release(w.slots.close()...)
	w.isolation.releaseWaiting()
	if w.held.waitEmpty(w.cfg.Grace) {
		return
	}
	_, running := w.slots.sizeAndActive()
	w.Tel.Log.Warn("grace period is over, cancelling running jobs", "jobs", running)
	for _, t := range w.held.tasks() {
		t.stop(errShutdown)
	}
	if w.held.waitEmpty(abandonDelay) {
		return
	}
	for _, t := range w.held.tasks() {
		t.releaseFrom(stateAdmitting) // Admit ignores the end of its context
		w.abandon(t, context.Canceled, func() { t.released = true })
	}
	if !w.held.waitEmpty(reportTimeout) {
		stopReporting() // Redis is away; the dispatcher will reclaim the jobs
		w.held.waitEmpty(giveUpTimeout)
	}
}

// dropConsumers removes this process's consumers from the ready streams. A consumer that still has
// pending entries stays, because their jobs could not be reclaimed without it.
func (w *Worker) dropConsumers(ctx context.Context) {
	for _, f := range w.feeds {
		for _, typ := range w.types {
			_, _ = ledger.DropConsumer(ctx, w.Conn.Cmd, f.partition.Ready(typ), keyspace.GroupWorkers, w.ID, 0)
		}
	}
}

// Resize sets the number of slots to n, from 0 to api.MaxWorkers. New slots open at once. A surplus
// slot closes when its job ends; Resize does not wait for that. Without slots, the process reads no
// jobs, but it still serves its types. Once Run is stopping, Resize changes nothing. The error says
// that n is out of range.
func (w *Worker) Resize(n int) error {
	if n < 0 || n > api.MaxWorkers {
		return fmt.Errorf("workers %d: must be 0 to %d", n, api.MaxWorkers)
	}
	w.slots.resize(n)
	w.held.notify() // the feeds may have free capacity
	w.Tel.Log.Info("pool resized", "workers", n)
	return nil
}

// Status returns what this process reports of itself: its types, its slots and the ids of up to 20
// jobs that run now.
func (w *Worker) Status() api.WorkerStatus {
	size, active := w.slots.sizeAndActive()
	current, _ := w.slots.running(20)
	return api.WorkerStatus{
		ID: w.ID, Version: w.Version, Layouts: w.Layouts, Limits: w.Limits, Types: w.types, Workers: size, Active: active, Idle: max(0, size-active),
		CurrentJobs: current, ShuttingDown: w.stopping.Load(), SeenAt: time.Now(),
	}
}

// publishStatus publishes this process's heartbeat: its status and its capacity. Before that it
// carries out a resize that an operator has asked for. A worker that is stopping reports no types,
// so that fetchers stop making jobs ready for its slots.
func (w *Worker) publishStatus(ctx context.Context) error {
	if err := w.poolSizes.Next(ctx, w.Conn, w.Space, w.ID, w.Resize); err != nil {
		return err
	}
	r := presence.WorkerReport{WorkerStatus: w.Status()}
	_, r.RunningSince = w.slots.running(200)
	r.StartedPerSecond, r.RunMS, r.StartDelays = w.rates.report(time.Now())
	r.BatchSizes = w.batchSizes()
	r.PermissionsPerSecond, r.NoPermissionUntil = map[string]float64{}, map[string]time.Time{}
	for typ, g := range w.gates {
		a := g.availability()
		if a.PerSecond >= 0 && !math.IsInf(a.PerSecond, 1) {
			r.PermissionsPerSecond[typ] = a.PerSecond
		}
		if a.Free == 0 && a.Next.After(time.Now()) {
			r.NoPermissionUntil[typ] = a.Next
		}
	}
	if r.ShuttingDown {
		r.Types = []string{}
	}
	return presence.PublishWorker(ctx, w.Conn, w.Space, r)
}
