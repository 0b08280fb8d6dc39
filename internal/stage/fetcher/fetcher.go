// Package fetcher is the role that hands jobs out: it takes the next ones from the fair queue,
// spends rate permits on them and puts them into the ready streams, as far as these may grow.
// It hides how it paces itself: batches grow while there is work, and it is woken when there
// is some again.
package fetcher

import (
	"context"
	"sync/atomic"
	"time"

	"github.com/bulkaction/bulkaction/api"
	"github.com/bulkaction/bulkaction/internal/journal"
	"github.com/bulkaction/bulkaction/internal/ledger"
	"github.com/bulkaction/bulkaction/internal/presence"
	"github.com/bulkaction/bulkaction/internal/redisx"
	"github.com/bulkaction/bulkaction/internal/redisx/keyspace"
	"github.com/bulkaction/bulkaction/internal/stage"
	"github.com/bulkaction/bulkaction/internal/telemetry"
)

// Config is what the role can be told.
type Config struct {
	Interval    time.Duration // the longest pause when idle
	BatchSize   int           // jobs a script at the start; grows under load
	ReadyCap    int           // most jobs in a ready stream that nobody has read
	Rate        ledger.Rate
	LaneWeights [3]int   // high, normal, low
	Alpha       *float64 // of the priority formula over all groups; nil: by fair turns
	KeepStats   time.Duration
	Journal     *journal.Journal // nil outside experiments
}

// maxBatch keeps one script under some milliseconds.
const maxBatch = 200

// typesEvery is how often the types are listed at most: a new one waits for so long beside others
// that have work.
const typesInterval = 20 * time.Millisecond

// askEvery is how often a fetcher asks for a larger part of the limit.
const quotaRequestInterval = 20 * time.Millisecond

// Fetcher is one process's fetcher, for all partitions.
type Fetcher struct {
	cfg      Config
	conn     *redisx.Conn
	space    keyspace.Space
	tel      *telemetry.Telemetry
	metrics  *telemetry.FetcherMetrics
	capacity *presence.Capacity
	id       string

	running                                              atomic.Bool
	fetched, admittedReady, admittedNonReady, emptyPolls atomic.Int64
}

// New returns a fetcher named id.
func New(cfg Config, conn *redisx.Conn, space keyspace.Space, tel *telemetry.Telemetry, id string) *Fetcher {
	return &Fetcher{
		cfg: cfg, conn: conn, space: space, tel: tel, metrics: telemetry.NewFetcherMetrics(tel.Meter), id: id,
		capacity: presence.NewCapacity(conn, space),
	}
}

// Run fetches until ctx ends.
func (f *Fetcher) Run(ctx context.Context) error {
	f.running.Store(true)
	defer f.running.Store(false)
	_ = f.capacity.Refresh(ctx)
	runs := []func(context.Context) error{
		func(ctx context.Context) error {
			return stage.Every(ctx, f.tel.Log, "capacity", presence.Interval, f.capacity.Refresh)
		},
		func(ctx context.Context) error {
			return stage.Every(ctx, f.tel.Log, "status", presence.Interval, func(ctx context.Context) error {
				return presence.PublishStage(ctx, f.conn, f.space, f.Status())
			})
		},
	}
	if f.space.Partitions() > 1 && f.cfg.Rate.RPS > 0 {
		d := divider{rate: f.cfg.Rate, conn: f.conn, space: f.space, id: f.id}
		runs = append(runs, func(ctx context.Context) error {
			defer d.resign(ctx)
			return stage.Loop{
				Name: "divide the limit",
				Conn: f.conn,
				Wake: f.space.Partition(0).Wake("divider"),
				Log:  f.tel.Log,
			}.Run(ctx, d.step)
		})
	}
	for _, p := range f.space.All() {
		loop := stage.Loop{Name: "fetch", Conn: f.conn, Wake: p.Wake("fetcher"), Log: f.tel.Log}
		part := &partitionFetcher{Fetcher: f, partition: p, batchSizes: map[string]int{}}
		runs = append(runs, func(ctx context.Context) error { return loop.Run(ctx, part.step) })
	}
	err := stage.Group(ctx, runs...)
	presence.Withdraw(ctx, f.conn, f.space, f.id)
	return err
}

// Status is what the process shows of itself.
func (f *Fetcher) Status() api.StageStatus {
	return api.StageStatus{
		ID: f.id, Role: "fetcher", Running: f.running.Load(), SeenAt: time.Now(),
		Counts: map[string]int64{
			"total_fetched": f.fetched.Load(), "admitted_ready": f.admittedReady.Load(),
			"admitted_non_ready": f.admittedNonReady.Load(), "empty_polls": f.emptyPolls.Load(),
		},
	}
}

// partition is the loop's state for one partition.
type partitionFetcher struct {
	*Fetcher
	partition        keyspace.Partition
	types            []string
	typesListedAt    time.Time
	wasIdle          bool
	policySet        bool // it is set in Redis
	quotaRequestedAt time.Time
	firstType        int // of the type that comes first
	batchSizes       map[string]int
}

// step admits one batch of every type and says how long nothing can be done.
func (p *partitionFetcher) step(ctx context.Context) (time.Duration, error) {
	if !p.policySet {
		if err := ledger.SetPolicy(ctx, p.conn.Cmd, p.partition, p.cfg.Alpha); err != nil {
			return 0, err
		}
		p.policySet = true
	}
	// After a pause the work may be of a type that was not there before.
	age := time.Since(p.typesListedAt)
	if age > p.cfg.Interval || p.wasIdle && age > typesInterval {
		age = 0
		types, err := ledger.Types(ctx, p.conn, p.partition)
		if err != nil {
			return 0, err
		}
		p.types, p.typesListedAt = types, time.Now()
	}
	idle, moved, full := p.cfg.Interval, 0, false
	p.firstType++
	for i := range p.types {
		// each is first in turn: where permits are short, the first finds the most
		typ := p.types[(i+p.firstType)%len(p.types)]
		r, err := p.admit(ctx, typ)
		if err != nil {
			return 0, err
		}
		moved += r.Moved + r.Parked
		full = full || r.State == ledger.AdmitFull
		if r.State == ledger.AdmitOK {
			idle = 0
		} else if r.Wait >= 0 {
			idle = min(idle, max(r.Wait, time.Millisecond))
		}
	}
	if moved == 0 && !full {
		p.emptyPolls.Add(1)
		p.metrics.EmptyPoll()
	}
	if age > 0 { // it may be a new type that woke this one
		idle = min(idle, typesInterval)
	}
	p.wasIdle = idle > 0
	return idle, nil
}

func (p *partitionFetcher) admit(ctx context.Context, typ string) (ledger.AdmitReply, error) {
	batch := min(max(p.batchSizes[typ], p.cfg.BatchSize), maxBatch)
	bound := p.capacity.ReadyBound(typ, min(p.cfg.BatchSize, p.cfg.ReadyCap), p.cfg.ReadyCap)
	r, err := ledger.Admit(ctx, p.conn.Cmd, p.partition, ledger.AdmitArgs{
		Type:        typ,
		Most:        batch,
		Cap:         bound.Cap,
		Slots:       bound.Slots,
		Ahead:       bound.Ahead,
		Limit:       p.cfg.Rate.Of(p.partition.Index(), p.space.Partitions()),
		Seed:        stage.SpanSeed(),
		LaneWeights: p.cfg.LaneWeights,
		KeepStats:   p.cfg.KeepStats,
	})
	if err != nil {
		return r, err
	}
	switch {
	case r.Moved == batch:
		p.batchSizes[typ] = 2 * batch
	case r.State == ledger.AdmitEmpty:
		p.batchSizes[typ] = 0
	}
	p.capacity.Admitted(typ, r.Moved, bound)
	p.recordAdmitted(ctx, typ, r)
	p.requestQuota(ctx, r)
	return r, nil
}

// askForMore wakes whoever divides the limit when this partition's part is used up.
func (p *partitionFetcher) requestQuota(ctx context.Context, r ledger.AdmitReply) {
	if p.space.Partitions() == 1 || r.State != ledger.AdmitLimited || time.Since(p.quotaRequestedAt) < quotaRequestInterval {
		return
	}
	p.quotaRequestedAt = time.Now()
	wake := p.space.Partition(0).Wake("divider")
	if n, err := p.conn.Cmd.LLen(ctx, wake).Result(); err == nil && n == 0 {
		_ = p.conn.Cmd.LPush(ctx, wake, "1").Err() // or else it looks by itself
	}
}
