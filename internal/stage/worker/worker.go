// Package worker is the role that runs jobs: it reads the ready streams of the types that it has
// processors for, starts jobs under a lease, runs them side by side, and reports what came of them.
// It hides batching, leases, time-outs, also of processors that ignore their context, and the
// hand-back of what could not be finished.
package worker

import (
	"context"
	"errors"
	"fmt"
	"slices"
	"sync"
	"sync/atomic"
	"time"

	"github.com/bulkaction/bulkaction/api"
	"github.com/bulkaction/bulkaction/internal/journal"
	"github.com/bulkaction/bulkaction/internal/ledger"
	"github.com/bulkaction/bulkaction/internal/messages"
	"github.com/bulkaction/bulkaction/internal/presence"
	"github.com/bulkaction/bulkaction/internal/redisx"
	"github.com/bulkaction/bulkaction/internal/redisx/keyspace"
	"github.com/bulkaction/bulkaction/internal/redisx/stream"
	"github.com/bulkaction/bulkaction/internal/stage"
	"github.com/bulkaction/bulkaction/internal/telemetry"
	"github.com/bulkaction/bulkaction/processor"
)

// Config is what the role can be told.
type Config struct {
	Count        int           // jobs that run side by side
	Types        []string      // of those with a processor; empty is all
	Block        time.Duration // the longest blocking read
	JobTimeout   time.Duration // where a group says nothing else
	MaxRetries   int           // where a group says nothing else
	MaxThrottles int           // a partner's refusals that a job survives
	Lease        time.Duration // silent for so long, the worker counts as dead
	Grace        time.Duration // for running jobs, when the process is to stop
	Backoff      time.Duration // before the first retry; doubles with each
	MaxBackoff   time.Duration
	Congestion   ledger.Congestion // RPS is that of one partition
	Journal      *journal.Journal  // nil outside experiments
}

// Worker is one process's pool.
type Worker struct {
	cfg     Config
	conn    *redisx.Conn
	space   keyspace.Space
	tel     *telemetry.Telemetry
	metrics *telemetry.WorkerMetrics
	id      string // also the consumer's name: unique to the process's start
	procs   map[string]processor.Processor
	types   []string

	slotQueue   *slotQueue
	held        *heldTasks
	slots       *slotPool
	isolation   *isolation
	meanRunTime movingAverage
	startRates  startRates
	runTimes    *runTimes
	startCount  atomic.Int64
	stopping    atomic.Bool
	feeds       []*partitionFeed
}

// New returns a worker named id that runs jobs with these processors.
func New(
	cfg Config, conn *redisx.Conn, space keyspace.Space,
	tel *telemetry.Telemetry, id string, procs ...processor.Processor,
) (*Worker, error) {
	w := &Worker{
		cfg: cfg, conn: conn, space: space, tel: tel, metrics: telemetry.NewWorkerMetrics(tel.Meter), id: id,
		procs: map[string]processor.Processor{}, slotQueue: newSlotQueue(), held: newHeldTasks(), runTimes: newRunTimes(),
	}
	for _, p := range procs {
		if !messages.ValidID(p.Type()) {
			return nil, fmt.Errorf("processor type %q: must be 1 to %d characters of A-Z a-z 0-9 . _ -",
				p.Type(), messages.MaxIDLength)
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
			return nil, fmt.Errorf(
				"BULKACTION_WORKER_TYPES: there is no processor for type %q: take it out, or build a worker "+
					"that has one",
				typ,
			)
		}
	}
	if len(w.types) == 0 {
		return nil, errors.New("worker without a processor: give it at least one")
	}
	slices.Sort(w.types)
	w.slots, w.isolation = newSlotPool(w, cfg.Count), newIsolation(w)
	for _, p := range space.All() {
		w.feeds = append(w.feeds, &partitionFeed{
			Worker: w, partition: p, reader: stream.NewReader(conn, keyspace.GroupWorkers, id), reports: newReportQueue(),
		})
	}
	w.metrics.ObservePool(w.slots.sizeAndActive)
	return w, nil
}

// Run works until ctx ends, then lets running jobs finish within the grace period and hands
// the rest back.
func (w *Worker) Run(ctx context.Context) error {
	// What is held must be reported and kept alive beyond the end of ctx.
	workCtx, endWork := context.WithCancel(context.WithoutCancel(ctx))
	defer endWork()
	w.slots.start(workCtx)

	var reporting, feeding, background sync.WaitGroup
	for _, p := range w.feeds {
		reporting.Go(func() { p.reportOutcomes(workCtx) })
		feeding.Go(func() {
			loop := stage.Loop{Name: "read ready stream", Conn: w.conn, Log: w.tel.Log}
			_ = loop.Run(ctx, p.step)
		})
	}
	var isolating sync.WaitGroup
	isolating.Go(func() { w.isolation.run(ctx, workCtx) })
	background.Go(func() {
		_ = stage.Every(workCtx, w.tel.Log, "renew leases", max(w.cfg.Lease/3, time.Millisecond), w.renewLeases)
	})
	background.Go(func() {
		_ = stage.Every(workCtx, w.tel.Log, "look for cancelled groups", cancelInterval, w.stopCancelled)
	})
	background.Go(func() { _ = stage.Every(workCtx, w.tel.Log, "status", presence.Interval, w.publishStatus) })
	background.Go(func() { w.watchdog(workCtx) })

	<-ctx.Done()
	w.stopping.Store(true)
	feeding.Wait()
	w.drain(endWork)
	for _, p := range w.feeds {
		p.reports.close()
	}
	reporting.Wait()
	w.slots.wg.Wait()
	endWork()
	isolating.Wait()
	background.Wait()
	presence.Withdraw(ctx, w.conn, w.space, w.id)
	endCtx, cancel := context.WithTimeout(context.WithoutCancel(ctx), time.Second)
	defer cancel()
	w.dropConsumers(endCtx)
	return nil
}

// forget takes this process's consumers away, as far as they hold nothing.
func (w *Worker) dropConsumers(ctx context.Context) {
	for _, p := range w.feeds {
		for _, typ := range w.types {
			_, _ = ledger.DropConsumer(ctx, w.conn.Cmd, p.partition.Ready(typ), keyspace.GroupWorkers, w.id, 0)
		}
	}
}

// Resize changes how many jobs run side by side, at once upwards, downwards as jobs end.
func (w *Worker) Resize(n int) error {
	if n < 1 || n > MaxCount {
		return fmt.Errorf("worker count %d: must be 1 to %d", n, MaxCount)
	}
	w.slots.resize(n)
	return nil
}

// Status is what the process shows of itself.
func (w *Worker) Status() api.WorkerStatus {
	size, active := w.slots.sizeAndActive()
	return api.WorkerStatus{
		ID: w.id, Types: w.types, Workers: size, Active: active, Idle: max(0, size-active),
		CurrentJobs: w.slots.runningIDs(20), ShuttingDown: w.stopping.Load(), SeenAt: time.Now(),
	}
}

// runMS is how long jobs run on average of late, by type.
func (w *Worker) runMS() map[string]float64 { return w.runTimes.milliseconds(time.Now()) }

// publish shows the status to everybody. A worker that stops serves no type any more: nobody is
// to count on it.
func (w *Worker) publishStatus(ctx context.Context) error {
	r := presence.WorkerReport{
		WorkerStatus:     w.Status(),
		StartedPerSecond: w.startRates.perSecond(time.Now()),
		RunMS:            w.runMS(),
	}
	if r.ShuttingDown {
		r.Types = []string{}
	}
	return presence.PublishWorker(ctx, w.conn, w.space, r)
}
