// Package dispatcher implements the dispatcher role: it promotes due jobs, with one permit each,
// lets scheduled groups start at their time, and reclaims the jobs of dead workers. It hides the
// pause after an outage of Redis, in which every worker looks dead.
package dispatcher

import (
	"context"
	"slices"
	"strconv"
	"strings"
	"sync"
	"sync/atomic"
	"time"

	"github.com/redis/go-redis/v9"
	"go.opentelemetry.io/otel/attribute"

	"github.com/bulkaction/bulkaction/api"
	"github.com/bulkaction/bulkaction/internal/jobs/ledger"
	"github.com/bulkaction/bulkaction/internal/redisx"
	"github.com/bulkaction/bulkaction/internal/redisx/call"
	"github.com/bulkaction/bulkaction/internal/redisx/keyspace"
	"github.com/bulkaction/bulkaction/internal/redisx/stream"
	"github.com/bulkaction/bulkaction/internal/stage"
	"github.com/bulkaction/bulkaction/internal/stage/presence"
	"github.com/bulkaction/bulkaction/internal/telemetry"
)

// Config holds the settings of the dispatcher role.
type Config struct {
	Interval   time.Duration // longest pause while jobs are non-ready
	BatchSize  int           // most jobs that one script call promotes, up to maxBatch
	FetchBatch int           // argument least of presence.ReadyBound, if ReadyCap is not less
	ReadyCap   int           // largest number of undelivered jobs in a ready stream
	Meter      ledger.Meter  // how permits are counted
	Lease      time.Duration // a worker that does not renew a job's lease for this time is dead
	MaxLosses  int           // a job that has lost more workers than this fails
	// OnPermits is called after each call of the script promote, with the permits that it spent,
	// perhaps none, and Redis's time in µs; nil outside experiments
	OnPermits func(at int64, partition int, permits []ledger.Permit)
}

// batchPause is the shortest pause after a call that met due jobs and left none that can be promoted
// at once: the jobs that become due during the pause are promoted together. No wake token
// ends it, because under load each report of failed jobs sends one. It is shorter than the time
// after which admit keeps permits for due jobs (overdue in lua/parts/shares.lua).
const batchPause = 15 * time.Millisecond

// maxBatch and reclaimBatch are the most jobs that one script call promotes and reclaims.
// consumerInterval is the time between two removals of consumers from the ready streams and the
// results stream: of those that have been idle for consumerIdle and have no pending entries.
const (
	maxBatch         = 200
	reclaimBatch     = 100
	consumerInterval = time.Minute
	consumerIdle     = 10 * time.Minute
)

// Dispatcher is one dispatcher process. It promotes and reclaims the jobs of all partitions.
type Dispatcher struct {
	stage.Process
	cfg      Config
	metrics  *telemetry.DispatcherMetrics
	capacity *presence.Capacity

	running                                        atomic.Bool
	cycles, moved, skipped, reclaimed, workersLost atomic.Int64 // counts since the start of the process
	outagePause                                    outagePause
}

// New returns the dispatcher of a process. It starts no goroutine.
func New(p stage.Process, cfg Config) *Dispatcher {
	return &Dispatcher{
		Process:  p,
		cfg:      cfg,
		metrics:  telemetry.NewDispatcherMetrics(p.Tel.Meter),
		capacity: presence.NewCapacity(p.Conn, p.Space),
	}
}

// Run promotes and reclaims jobs of all partitions until ctx ends.
func (d *Dispatcher) Run(ctx context.Context) error {
	d.running.Store(true)
	defer d.running.Store(false)
	_ = d.capacity.Refresh(ctx)
	r := d.Runner()
	r.Every("capacity", presence.Interval, d.capacity.Refresh)
	r.Report(d.Status)
	for _, p := range d.Space.All() {
		part := &partitionDispatcher{Dispatcher: d, partition: p}
		r.Loop("promote", p.Wake("dispatcher"), part.promote)
		r.Loop("reclaim", "", part.reclaim)
	}
	return r.Run(ctx)
}

// Status returns this process's report of itself: its counts since it started.
func (d *Dispatcher) Status() api.StageStatus {
	return api.StageStatus{
		ID: d.ID, Role: "dispatcher", Running: d.running.Load(), SeenAt: time.Now(),
		Counts: map[string]int64{
			"total_cycles": d.cycles.Load(), "total_moved": d.moved.Load(), "total_skipped": d.skipped.Load(),
			"taken_back": d.reclaimed.Load(), "worker_lost": d.workersLost.Load(),
		},
	}
}

// partitionDispatcher promotes and reclaims the jobs of one partition.
type partitionDispatcher struct {
	*Dispatcher
	partition          keyspace.Partition
	ownersCheckedAt    time.Time // when recoverEntries last ran
	consumersCheckedAt time.Time
	unservedTurn       int                  // where the next page of unserved types begins
	unservedSince      map[string]time.Time // types that no live worker serves
}

// unservedPerPass is how many types that no live worker serves one pass of reclaim looks at: what it
// takes back of them waits for a worker anyway.
const unservedPerPass = 50

// promote lets scheduled groups start and promotes due jobs, one batch of each. It returns how long
// to wait for the next ones, at most Config.Interval: 0 when there may be more now, a negative time
// when no group is scheduled and only paused tenants, or none, have non-ready jobs.
func (p *partitionDispatcher) promote(ctx context.Context) (time.Duration, error) {
	began := time.Now()
	released, next, err := ledger.Schedule(ctx, p.Conn.Cmd, p.partition, 100)
	if err != nil {
		return 0, err
	}
	least := min(p.cfg.FetchBatch, p.cfg.ReadyCap)
	caps := map[string]int{}
	for _, typ := range p.capacity.Served() {
		bound := p.capacity.ReadyBound(typ, least, p.cfg.ReadyCap)
		caps[typ] = bound.Cap
		// If the number of the type's slots is known, Ahead is the bound: promote counts only
		// undelivered jobs, and those in slots are delivered. The bound is at least 1: while jobs
		// are long, Ahead is 0, and nothing would be promoted.
		if bound.Slots > 0 {
			caps[typ] = min(bound.Cap, max(1, bound.Ahead))
		}
	}
	r, err := ledger.Promote(ctx, p.Conn.Cmd, p.partition, ledger.PromoteArgs{
		Most:     min(p.cfg.BatchSize, maxBatch),
		Meter:    p.cfg.Meter,
		Seed:     stage.SpanSeed(),
		FullWait: p.cfg.Interval / 4,
		Cap:      least,
		Caps:     caps,
	})
	if err != nil {
		return 0, err
	}
	p.moved.Add(int64(r.Moved))
	if skipped(r) {
		p.skipped.Add(1)
	}
	p.cycles.Add(1)
	if p.cfg.OnPermits != nil {
		p.cfg.OnPermits(r.AtUS, p.partition.Index(), r.Permits)
	}
	p.recordPromoted(ctx, r, time.Since(began))
	if released > 0 || r.Moved > 0 && r.Wait == 0 {
		return 0, nil
	}
	shortest, paused := time.Millisecond, time.Duration(0)
	if r.Moved > 0 || r.Skipped > 0 {
		shortest, paused = 0, min(batchPause, p.cfg.Interval)
		if err := redisx.Sleep(ctx, paused); err != nil {
			return 0, err
		}
	}
	idle := time.Duration(-1)
	for _, wait := range []time.Duration{next, r.Wait} {
		if wait >= 0 && (idle < 0 || wait-paused < idle) {
			idle = max(wait-paused, shortest)
		}
	}
	if idle > p.cfg.Interval {
		idle = p.cfg.Interval
	}
	return idle, nil
}

// reclaim takes back jobs whose lease has ended, one batch of each type, but of unservedPerPass
// unserved types at most. Twice in a lease it begins
// a lease for unowned entries (see recoverEntries), and once in consumerInterval it removes idle
// consumers. It returns how long to wait before the next call: at most a quarter of the lease, and
// 0 after a call that found such jobs. For one lease after an outage of Redis it does nothing.
func (p *partitionDispatcher) reclaim(ctx context.Context) (time.Duration, error) {
	pause := max(p.cfg.Lease/4, 10*time.Millisecond)
	wait, err := p.outagePause.remaining(ctx, p.Conn, p.cfg.Lease)
	if err != nil || wait > 0 {
		return min(max(wait, time.Millisecond), pause), err
	}
	types, err := ledger.Types(ctx, p.Conn.Cmd, p.partition)
	if err != nil {
		return 0, p.outagePause.noteOutage(err, p.cfg.Lease)
	}
	due, page := p.dueTypes(types)
	recoverable := page
	if time.Since(p.ownersCheckedAt) > p.cfg.Lease/2 {
		p.ownersCheckedAt = time.Now()
		recoverable = due
	}
	if err := p.recoverEntries(ctx, recoverable); err != nil {
		return 0, p.outagePause.noteOutage(err, p.cfg.Lease)
	}
	for _, typ := range due {
		since, unserved := p.unservedSince[typ]
		unserved = unserved && time.Since(since) > p.cfg.Lease
		r, err := ledger.Reclaim(ctx, p.Conn.Cmd, p.partition, typ, p.cfg.Lease, reclaimBatch, p.cfg.MaxLosses, unserved)
		if err != nil {
			return 0, p.outagePause.noteOutage(err, p.cfg.Lease)
		}
		p.metrics.TakenBack(r.Taken + r.Failed)
		p.metrics.DeadLettered(r.Failed)
		for _, s := range r.Steps {
			p.Tel.RecordStep(ctx, p.partition.Ready(typ), telemetry.JobStep(s))
		}
		p.reclaimed.Add(int64(r.Taken))
		p.workersLost.Add(int64(r.Failed))
		if len(r.Missing) > 0 {
			p.Tel.Log.Error("entries of a ready stream were deleted while workers held them",
				"partition", p.partition.Index(), "type", typ, "entries", r.Missing)
		}
		if r.Taken+r.Failed+r.Stale > 0 {
			p.Tel.Log.Warn("reclaimed jobs whose leases have ended",
				"partition", p.partition.Index(), "type", typ,
				"reclaimed", r.Taken, "failed", r.Failed, "stale", r.Stale)
			pause = 0
		}
	}
	if time.Since(p.consumersCheckedAt) > consumerInterval {
		p.consumersCheckedAt = time.Now()
		return pause, p.dropConsumers(ctx, types)
	}
	return pause, nil
}

// dueTypes returns the types that this pass looks at: all of them, or the served ones and a page of
// the unserved ones if these are many.
func (p *partitionDispatcher) dueTypes(types []string) (due, page []string) {
	served := p.capacity.Served()
	var unserved []string
	since := map[string]time.Time{}
	for _, typ := range types {
		if slices.Contains(served, typ) {
			due = append(due, typ)
			continue
		}
		unserved = append(unserved, typ)
		if since[typ] = p.unservedSince[typ]; since[typ].IsZero() {
			since[typ] = time.Now()
		}
	}
	p.unservedSince = since
	if len(unserved) <= unservedPerPass {
		return types, nil
	}
	if p.unservedTurn >= len(unserved) {
		p.unservedTurn = 0
	}
	page = unserved[p.unservedTurn:min(len(unserved), p.unservedTurn+unservedPerPass)]
	p.unservedTurn += unservedPerPass
	return append(due, page...), page
}

// recoverEntries begins a lease for each unowned entry of the ready streams. A worker that still
// runs such a job renews the lease; the other jobs are reclaimed when it ends. It also gives new
// ids to entries whose ids are in the future.
func (p *partitionDispatcher) recoverEntries(ctx context.Context, types []string) error {
	reader := stream.NewReader(p.Conn, keyspace.GroupWorkers, p.ID)
	for _, typ := range types {
		if err := reader.Recover(ctx, p.partition.Ready(typ), 0, p.Tel.Log); err != nil {
			return err
		}
	}
	return nil
}

// dropConsumers removes the consumers of workers and aggregators that have been idle for
// consumerIdle and hold no entries: their processes are dead.
func (p *partitionDispatcher) dropConsumers(ctx context.Context, types []string) error {
	for _, typ := range types {
		if err := p.dropIdleConsumers(ctx, p.partition.Ready(typ), keyspace.GroupWorkers); err != nil {
			return err
		}
	}
	return p.dropIdleConsumers(ctx, p.partition.ResultStream(), keyspace.GroupAggregator)
}

// dropIdleConsumers removes from one consumer group of a stream the consumers that have been idle
// for consumerIdle and hold no entries.
func (p *partitionDispatcher) dropIdleConsumers(ctx context.Context, stream, group string) error {
	consumers, err := p.Conn.Cmd.XInfoConsumers(ctx, stream, group).Result()
	if call.IsUnavailable(err) {
		return err
	}
	for _, c := range consumers { // empty after an error, for example if no process has read the stream yet
		if c.Pending > 0 || c.Idle < consumerIdle {
			continue
		}
		if _, err := ledger.DropConsumer(ctx, p.Conn.Cmd, stream, group, c.Name, consumerIdle); err != nil {
			return err
		}
	}
	return nil
}

// outagePause stops reclaim for one lease after an outage of Redis. The idle times of entries grow
// during an outage although no worker can renew a lease, so all workers look dead afterwards.
type outagePause struct {
	mu      sync.Mutex
	until   time.Time // reclaim stops until then
	checked bool      // Redis was asked for its uptime since the last outage
}

// noteOutage returns err. If err says that Redis is away, it first begins a pause of one lease.
func (q *outagePause) noteOutage(err error, lease time.Duration) error {
	if call.IsUnavailable(err) {
		q.mu.Lock()
		q.until, q.checked = time.Now().Add(lease), false
		q.mu.Unlock()
	}
	return err
}

// remaining returns how long reclaim must still pause; zero or less: not at all. At its first call
// and after each outage, it asks Redis for its uptime, because a restart of Redis is an outage too.
// If Redis is away, it begins a new pause of one lease and returns the error.
func (q *outagePause) remaining(ctx context.Context, conn *redisx.Conn, lease time.Duration) (time.Duration, error) {
	q.mu.Lock()
	defer q.mu.Unlock()
	if q.checked {
		return time.Until(q.until), nil
	}
	var mu sync.Mutex // guards until: each shard answers in its own goroutine
	until := q.until
	err := conn.Shards(ctx, func(ctx context.Context, shard redis.UniversalClient) error {
		info, err := shard.Info(ctx, "server").Result()
		mu.Lock()
		defer mu.Unlock()
		if up, ok := serverUptime(info); ok && up < lease {
			until = latest(until, time.Now().Add(lease-up))
		}
		return err
	})
	if call.IsUnavailable(err) {
		q.until = time.Now().Add(lease)
		return 0, err
	}
	q.until, q.checked = until, true
	return time.Until(q.until), nil
}

// latest returns the later one of two times.
func latest(a, b time.Time) time.Time {
	if a.After(b) {
		return a
	}
	return b
}

// serverUptime reads a lower bound of the server's uptime from a reply of INFO: Redis counts how
// often the second of its clock changes, so the uptime that it reports is up to a second too long.
// It returns false if the reply has no uptime; the embedded server reports none, and it never
// restarts while this process runs.
func serverUptime(info string) (time.Duration, bool) {
	for line := range strings.Lines(info) {
		if v, ok := strings.CutPrefix(line, "uptime_in_seconds:"); ok {
			n, err := strconv.Atoi(strings.TrimSpace(v))
			return time.Duration(max(0, n-1)) * time.Second, err == nil
		}
	}
	return 0, false
}

// skipped says whether a cycle promoted nothing because ready streams were full.
func skipped(r ledger.PromoteReply) bool { return r.Moved == 0 && r.Skipped > 0 }

// recordPromoted adds the reply of one call of the script promote to the metrics. It records a span
// for each sampled job that was promoted, and a span of the batch that links to these. took is the
// duration of the call.
func (p *partitionDispatcher) recordPromoted(ctx context.Context, r ledger.PromoteReply, took time.Duration) {
	p.metrics.Cycle(r.Moved, skipped(r), took)
	for _, a := range r.Permits {
		p.metrics.Allowed(a.Tenant, int(a.N))
	}
	for _, d := range r.Denials {
		p.metrics.Denied(d.Tenant, d.Reason)
	}
	if len(r.Traced) == 0 {
		return
	}
	batch := p.Tel.NewBatch("promote", p.partition.NonReady(), r.Traced[0].Now)
	for i := range r.Traced {
		t := &r.Traced[i]
		span := telemetry.JobSpan{Parent: t.Parent, ID: t.SpanID, Start: t.Now}
		batch.Job(ctx, span, func() []attribute.KeyValue {
			return append(telemetry.JobAttributes(t.Tenant, t.Group, t.Ordinal, t.Attempt),
				attribute.String("bulkaction.non_ready.reason", nonReadyReasons[t.Reason]),
				attribute.Int64("bulkaction.non_ready.waited_ms", max(0, t.Now.Sub(t.Since)).Milliseconds()))
		})
	}
	batch.End(ctx, r.Moved)
}

// nonReadyReasons maps the letter by which the scripts say why a job was non-ready to the name that
// spans show.
var nonReadyReasons = map[string]string{
	"R": "RATE_LIMITED", "A": "API_THROTTLED", "E": "TRANSIENT_ERROR", "S": "SCHEDULED",
	"P": "SUSPENDED", "G": "RESOURCE_BUSY", "": "RELEASED",
}
