// Package dispatcher is the role that brings parked jobs back: it promotes what is due and gets a
// permit, lets scheduled groups start, and takes back what dead workers left behind.
package dispatcher

import (
	"context"
	"strconv"
	"strings"
	"sync"
	"sync/atomic"
	"time"

	"github.com/redis/go-redis/v9"

	"github.com/bulkaction/bulkaction/api"
	"github.com/bulkaction/bulkaction/internal/journal"
	"github.com/bulkaction/bulkaction/internal/ledger"
	"github.com/bulkaction/bulkaction/internal/presence"
	"github.com/bulkaction/bulkaction/internal/redisx"
	"github.com/bulkaction/bulkaction/internal/redisx/call"
	"github.com/bulkaction/bulkaction/internal/redisx/keyspace"
	"github.com/bulkaction/bulkaction/internal/stage"
	"github.com/bulkaction/bulkaction/internal/telemetry"
)

// Config is what the role can be told.
type Config struct {
	Interval   time.Duration // the longest pause while something is parked
	BatchSize  int           // jobs a script
	FetchBatch int           // the least that a ready stream may hold
	ReadyCap   int           // the most
	Rate       ledger.Rate
	Lease      time.Duration    // a worker that is silent for so long is dead
	MaxLosses  int              // a job that lost so many workers fails
	Journal    *journal.Journal // nil outside experiments
}

// gather is the least pause while jobs become due one after the other: what is due then
// goes together.
const batchPause = 10 * time.Millisecond

// How many jobs one script moves at most, how many entries of dead workers it takes back, and how
// often consumers are looked through.
const (
	maxBatch         = 200
	reclaimBatch     = 100
	consumerInterval = time.Minute
	consumerIdle     = 10 * time.Minute
)

// Dispatcher is one process's dispatcher, for all partitions.
type Dispatcher struct {
	cfg      Config
	conn     *redisx.Conn
	space    keyspace.Space
	tel      *telemetry.Telemetry
	metrics  *telemetry.DispatcherMetrics
	capacity *presence.Capacity
	id       string

	running                                        atomic.Bool
	cycles, moved, skipped, reclaimed, workersLost atomic.Int64
	outagePause                                    outagePause
}

// New returns a dispatcher named id.
func New(cfg Config, conn *redisx.Conn, space keyspace.Space, tel *telemetry.Telemetry, id string) *Dispatcher {
	return &Dispatcher{
		cfg: cfg, conn: conn, space: space, tel: tel, metrics: telemetry.NewDispatcherMetrics(tel.Meter), id: id,
		capacity: presence.NewCapacity(conn, space),
	}
}

// Run dispatches until ctx ends.
func (d *Dispatcher) Run(ctx context.Context) error {
	d.running.Store(true)
	defer d.running.Store(false)
	_ = d.capacity.Refresh(ctx)
	runs := []func(context.Context) error{
		func(ctx context.Context) error {
			return stage.Every(ctx, d.tel.Log, "capacity", presence.Interval, d.capacity.Refresh)
		},
		func(ctx context.Context) error {
			return stage.Every(ctx, d.tel.Log, "status", presence.Interval, func(ctx context.Context) error {
				return presence.PublishStage(ctx, d.conn, d.space, d.Status())
			})
		},
	}
	for _, p := range d.space.All() {
		part := &partitionDispatcher{Dispatcher: d, partition: p}
		promote := stage.Loop{Name: "promote", Conn: d.conn, Wake: p.Wake("dispatcher"), Log: d.tel.Log}
		reclaim := stage.Loop{Name: "reclaim", Conn: d.conn, Log: d.tel.Log}
		runs = append(runs,
			func(ctx context.Context) error { return promote.Run(ctx, part.promote) },
			func(ctx context.Context) error { return reclaim.Run(ctx, part.reclaim) },
		)
	}
	err := stage.Group(ctx, runs...)
	presence.Withdraw(ctx, d.conn, d.space, d.id)
	return err
}

// Status is what the process shows of itself.
func (d *Dispatcher) Status() api.StageStatus {
	return api.StageStatus{
		ID: d.id, Role: "dispatcher", Running: d.running.Load(), SeenAt: time.Now(),
		Counts: map[string]int64{
			"total_cycles": d.cycles.Load(), "total_moved": d.moved.Load(), "total_skipped": d.skipped.Load(),
			"taken_back": d.reclaimed.Load(), "worker_lost": d.workersLost.Load(),
		},
	}
}

type partitionDispatcher struct {
	*Dispatcher
	partition          keyspace.Partition
	consumersCheckedAt time.Time
}

// promote lets scheduled groups start and moves what is due.
func (p *partitionDispatcher) promote(ctx context.Context) (time.Duration, error) {
	began := time.Now()
	released, next, err := ledger.Schedule(ctx, p.conn.Cmd, p.partition, 100)
	if err != nil {
		return 0, err
	}
	types, err := ledger.Types(ctx, p.conn, p.partition)
	if err != nil {
		return 0, err
	}
	caps := make(map[string]int, len(types))
	for _, typ := range types {
		bound := p.capacity.ReadyBound(typ, min(p.cfg.FetchBatch, p.cfg.ReadyCap), p.cfg.ReadyCap)
		caps[typ] = bound.Cap
		// what may be undelivered beside what runs, and one at least: admit leaves no room where
		// all workers are busy
		if bound.Slots > 0 {
			caps[typ] = min(bound.Cap, max(1, bound.Ahead))
		}
	}
	r, err := ledger.Promote(ctx, p.conn.Cmd, p.partition, ledger.PromoteArgs{
		Most:     min(p.cfg.BatchSize, maxBatch),
		Limit:    p.cfg.Rate.Of(p.partition.Index(), p.space.Partitions()),
		Seed:     stage.SpanSeed(),
		FullWait: p.cfg.Interval / 4,
		Caps:     caps,
	})
	if err != nil {
		return 0, err
	}
	p.moved.Add(int64(r.Moved))
	p.skipped.Add(int64(r.Skipped))
	p.cycles.Add(1)
	p.cfg.Journal.Permits(r.AtUS, p.partition.Index(), journal.Promote, "", r.Permits)
	p.recordPromoted(ctx, r, time.Since(began))
	if released > 0 || r.Moved > 0 && r.Wait == 0 {
		return 0, nil
	}
	least := time.Millisecond
	if r.Moved > 0 {
		least = batchPause
	}
	idle := time.Duration(-1)
	for _, wait := range []time.Duration{next, r.Wait} {
		if wait >= 0 && (idle < 0 || wait < idle) {
			idle = max(wait, least)
		}
	}
	if idle > p.cfg.Interval {
		idle = p.cfg.Interval
	}
	return idle, nil
}

// reclaim looks for jobs of dead workers, a few times in a lease.
func (p *partitionDispatcher) reclaim(ctx context.Context) (time.Duration, error) {
	pause := max(p.cfg.Lease/4, 10*time.Millisecond)
	wait, err := p.outagePause.remaining(ctx, p.conn, p.cfg.Lease)
	if err != nil || wait > 0 {
		return min(max(wait, time.Millisecond), pause), err
	}
	types, err := ledger.Types(ctx, p.conn, p.partition)
	if err != nil {
		return 0, p.outagePause.noteOutage(err, p.cfg.Lease)
	}
	for _, typ := range types {
		r, err := ledger.Reclaim(ctx, p.conn.Cmd, p.partition, typ, p.cfg.Lease, reclaimBatch, p.cfg.MaxLosses)
		if err != nil {
			return 0, p.outagePause.noteOutage(err, p.cfg.Lease)
		}
		p.metrics.TakenBack(r.Taken + r.Buried)
		p.metrics.DeadLettered(r.Buried)
		p.reclaimed.Add(int64(r.Taken))
		p.workersLost.Add(int64(r.Buried))
		if len(r.Missing) > 0 {
			p.tel.Log.Error("entries of a ready stream were deleted while workers held them",
				"partition", p.partition.Index(), "type", typ, "entries", r.Missing)
		}
		if r.Taken+r.Buried+r.Stale > 0 {
			p.tel.Log.Warn("took jobs back from lost workers",
				"partition", p.partition.Index(), "type", typ, "taken", r.Taken, "failed", r.Buried, "stale", r.Stale)
			pause = 0
		}
	}
	if time.Since(p.consumersCheckedAt) > consumerInterval {
		p.consumersCheckedAt = time.Now()
		return pause, p.dropConsumers(ctx, types)
	}
	return pause, nil
}

// dropConsumers forgets dead workers and aggregators that hold nothing any more.
func (p *partitionDispatcher) dropConsumers(ctx context.Context, types []string) error {
	for _, typ := range types {
		if err := p.dropIdle(ctx, p.partition.Ready(typ), keyspace.GroupWorkers); err != nil {
			return err
		}
	}
	return p.dropIdle(ctx, p.partition.ResultStream(), keyspace.GroupAggregator)
}

func (p *partitionDispatcher) dropIdle(ctx context.Context, stream, group string) error {
	consumers, err := p.conn.Cmd.XInfoConsumers(ctx, stream, group).Result()
	if call.IsUnavailable(err) {
		return err
	}
	for _, c := range consumers { // none: nobody has read the stream yet
		if c.Pending > 0 || c.Idle < consumerIdle {
			continue
		}
		if _, err := ledger.DropConsumer(ctx, p.conn.Cmd, stream, group, c.Name, consumerIdle); err != nil {
			return err
		}
	}
	return nil
}

// quiet keeps reclaim from working for a lease after Redis was away: idle times count on meanwhile,
// so that everybody looks dead.
type outagePause struct {
	mu      sync.Mutex
	until   time.Time
	checked bool
}

// note remembers that Redis was away.
func (q *outagePause) noteOutage(err error, lease time.Duration) error {
	if call.IsUnavailable(err) {
		q.mu.Lock()
		q.until, q.checked = time.Now().Add(lease), false
		q.mu.Unlock()
	}
	return err
}

// left is how long to keep quiet. A process that has just come, or come back, asks Redis how
// long it is up.
func (q *outagePause) remaining(ctx context.Context, conn *redisx.Conn, lease time.Duration) (time.Duration, error) {
	q.mu.Lock()
	defer q.mu.Unlock()
	if q.checked {
		return time.Until(q.until), nil
	}
	var mu sync.Mutex // of the shards' answers
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

func latest(a, b time.Time) time.Time {
	if a.After(b) {
		return a
	}
	return b
}

// uptime reads INFO; a server that does not tell (the embedded one) is never restarted under us.
func serverUptime(info string) (time.Duration, bool) {
	for line := range strings.Lines(info) {
		if v, ok := strings.CutPrefix(line, "uptime_in_seconds:"); ok {
			n, err := strconv.Atoi(strings.TrimSpace(v))
			return time.Duration(n) * time.Second, err == nil
		}
	}
	return 0, false
}
