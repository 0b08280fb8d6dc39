// Package fetcher implements the fetcher role. It admits jobs: it dequeues the next jobs from the
// fair queue, spends a permit on each, and puts them into the ready streams, up to the bounds of
// the streams. It hides its pace: its batches grow while there is work, and a wake token wakes an
// idle fetcher.
package fetcher

import (
	"context"
	"slices"
	"sync/atomic"
	"time"

	"go.opentelemetry.io/otel/attribute"

	"github.com/bulkaction/bulkaction/api"
	"github.com/bulkaction/bulkaction/internal/jobs/ledger"
	"github.com/bulkaction/bulkaction/internal/redisx/keyspace"
	"github.com/bulkaction/bulkaction/internal/stage"
	"github.com/bulkaction/bulkaction/internal/stage/presence"
	"github.com/bulkaction/bulkaction/internal/telemetry"
)

// Config holds the settings of the fetcher role.
type Config struct {
	Interval time.Duration // longest pause while there is nothing to admit
	// BatchSize is how many jobs one of the first script calls admits at most; the number grows
	// under load. It is also the argument least of presence.ReadyBound, if ReadyCap is not less
	BatchSize int
	ReadyCap  int          // largest number of undelivered jobs in a ready stream
	Meter     ledger.Meter // how permits are counted
	// Configured are the global limits of the process's environment. They are in effect while this
	// process leads the limits, unless others were set while processes run.
	Configured  api.ConfiguredLimits
	LaneWeights [3]int        // for the lanes high, normal and low
	Alpha       *float64      // factor of the priority formula, which orders a lane's groups; nil: fair shares
	KeepStats   time.Duration // retention of congestion statistics
	// OnPermits is called after each call of the script admit, with the permits that it spent,
	// perhaps none, and Redis's time in µs; nil outside experiments
	OnPermits func(at int64, partition int, typ string, permits []ledger.Permit)
}

// maxBatch bounds the jobs that one script call admits, so that the call takes a few ms at most.
const maxBatch = 200

// typesInterval is the shortest time between two reads of the list of job types from Redis. It
// applies after an idle step only: while jobs of known types are admitted, the list is read once in
// Config.Interval, so jobs of a new type may wait for as long.
const typesInterval = 20 * time.Millisecond

// unservedPerStep is how many types that no live worker serves one step admits jobs of; they take
// turns. Each type costs a round trip, so without a bound one tenant could delay the jobs of all
// others by jobs of thousands of unknown types.
const unservedPerStep = 20

// quotaRequestInterval is the shortest time between two requests of this process for more quota for
// a partition.
const quotaRequestInterval = 20 * time.Millisecond

// Fetcher is one fetcher process. It admits jobs of all partitions.
type Fetcher struct {
	stage.Process
	cfg      Config
	metrics  *telemetry.FetcherMetrics
	capacity *presence.Capacity

	running atomic.Bool
	// Counts since the start of the process.
	fetched, admittedReady, admittedNonReady, emptyPolls atomic.Int64
}

// New returns the fetcher of a process. It starts no goroutine.
func New(p stage.Process, cfg Config) *Fetcher {
	return &Fetcher{
		Process:  p,
		cfg:      cfg,
		metrics:  telemetry.NewFetcherMetrics(p.Tel.Meter),
		capacity: presence.NewCapacity(p.Conn, p.Space),
	}
}

// Run admits jobs, and publishes the process's status, until ctx ends. One of the fetchers also leads
// the limits.
func (f *Fetcher) Run(ctx context.Context) error {
	f.running.Store(true)
	defer f.running.Store(false)
	_ = f.capacity.Refresh(ctx)
	r := f.Runner()
	r.Every("capacity", presence.Interval, f.capacity.Refresh)
	r.Report(f.Status)
	leader := newLeader(f.cfg, f.Conn, f.Space, f.ID)
	r.Loop("lead the limits", ledger.LimitsWake(f.Space), leader.step)
	r.OnStop(leader.resign)
	for _, p := range f.Space.All() {
		part := &partitionFetcher{Fetcher: f, partition: p, batchSizes: map[string]int{}}
		r.Loop("fetch", p.Wake("fetcher"), part.step)
	}
	return r.Run(ctx)
}

// Status returns this process's report of itself: its counts since it started.
func (f *Fetcher) Status() api.StageStatus {
	return api.StageStatus{
		ID: f.ID, Role: "fetcher", Running: f.running.Load(), SeenAt: time.Now(),
		Counts: map[string]int64{
			"total_fetched": f.fetched.Load(), "admitted_ready": f.admittedReady.Load(),
			"admitted_non_ready": f.admittedNonReady.Load(), "total_rejected": 0, // it takes no job that it has to turn away (ADR 49)
			"empty_polls": f.emptyPolls.Load(),
		},
	}
}

// partitionFetcher admits the jobs of one partition.
type partitionFetcher struct {
	*Fetcher
	partition        keyspace.Partition
	served, unserved []string  // the partition's job types, with and without a live worker
	typesListedAt    time.Time // when these were listed
	wasIdle          bool      // the last step admitted all it could
	policySet        bool      // the fair-queue policy is stored in Redis
	quotaRequestedAt time.Time
	turn             int            // number of steps; rotates the types
	batchSizes       map[string]int // by type: jobs that the next script call asks for
}

// step admits one batch of jobs of each type that a live worker serves, and of up to
// unservedPerStep others; the error of one type ends the step. The first step also stores the
// fair-queue policy (Config.Alpha) in Redis. It returns how long to wait for more jobs: 0 when
// there may be more now.
func (p *partitionFetcher) step(ctx context.Context) (time.Duration, error) {
	if !p.policySet {
		if err := ledger.SetPolicy(ctx, p.Conn.Cmd, p.partition, p.cfg.Alpha); err != nil {
			return 0, err
		}
		p.policySet = true
	}
	// After an idle time, new jobs may be of a new type.
	age := time.Since(p.typesListedAt)
	if age > p.cfg.Interval || p.wasIdle && age > typesInterval {
		age = 0
		if err := p.listTypes(ctx); err != nil {
			return 0, err
		}
	}
	idle, moved, full := p.cfg.Interval, 0, false
	for _, typ := range p.nextTypes() {
		r, err := p.admit(ctx, typ)
		if err != nil {
			return 0, err
		}
		moved += r.Moved + r.NonReady
		full = full || r.State == ledger.AdmitFull
		if r.State == ledger.AdmitOK {
			idle = 0
		} else if r.Wait >= 0 {
			idle = min(idle, max(r.Wait, time.Millisecond))
		}
	}
	if moved > 0 && len(p.unserved) > unservedPerStep {
		idle = 0 // the types whose turn did not come yet may have jobs
	}
	if moved == 0 && !full {
		p.emptyPolls.Add(1)
		p.metrics.EmptyPoll()
	}
	if age > 0 { // jobs of a type that is not in the list may have woken this fetcher
		idle = min(idle, typesInterval)
	}
	p.wasIdle = idle > 0
	return idle, nil
}

// listTypes reads the partition's job types.
func (p *partitionFetcher) listTypes(ctx context.Context) error {
	types, err := ledger.Types(ctx, p.Conn.Cmd, p.partition)
	if err != nil {
		return err
	}
	p.served, p.unserved, p.typesListedAt = nil, nil, time.Now()
	served := p.capacity.Served()
	slices.Sort(served)
	for _, typ := range types {
		if _, ok := slices.BinarySearch(served, typ); ok {
			p.served = append(p.served, typ)
		} else {
			p.unserved = append(p.unserved, typ)
		}
	}
	return nil
}

// nextTypes returns the types that the present step admits jobs of, and counts the step in turn.
// The served types take turns in being first, because the type that is admitted first finds the
// most permits of the rate limit.
func (p *partitionFetcher) nextTypes() []string {
	p.turn++
	stride := 1
	if len(p.unserved) > unservedPerStep {
		stride = unservedPerStep
	}
	types := appendFrom(nil, p.served, p.turn, len(p.served))
	return appendFrom(types, p.unserved, p.turn*stride, min(len(p.unserved), unservedPerStep))
}

// appendFrom appends n elements of a ring, from the given index on, to a list.
func appendFrom(list, ring []string, index, n int) []string {
	for i := range n {
		list = append(list, ring[(index+i)%len(ring)])
	}
	return list
}

// admit admits one batch of jobs of type typ, records it in the counts and metrics, and asks for
// more quota if it was used up (see requestQuota). When the batch was full, it doubles the size of
// the type's next batch, up to maxBatch; when the type has no more waiting jobs, the next batch has
// the size Config.BatchSize again.
func (p *partitionFetcher) admit(ctx context.Context, typ string) (ledger.AdmitReply, error) {
	batch := min(max(p.batchSizes[typ], p.cfg.BatchSize), maxBatch)
	bound := p.capacity.ReadyBound(typ, min(p.cfg.BatchSize, p.cfg.ReadyCap), p.cfg.ReadyCap)
	r, err := ledger.Admit(ctx, p.Conn.Cmd, p.partition, ledger.AdmitArgs{
		Type:        typ,
		Most:        batch,
		Cap:         bound.Cap,
		Slots:       bound.Slots,
		Ahead:       bound.Ahead,
		Unserved:    !slices.Contains(p.served, typ),
		Meter:       p.cfg.Meter,
		Seed:        stage.SpanSeed(),
		LaneWeights: p.cfg.LaneWeights,
		KeepStats:   p.cfg.KeepStats,
	})
	if err != nil {
		return r, err
	}
	switch {
	case r.Moved >= batch: // admit may add a few jobs, to complete a small group
		p.batchSizes[typ] = 2 * batch
	case r.State == ledger.AdmitEmpty:
		p.batchSizes[typ] = 0
	}
	p.capacity.Admitted(typ, r.Moved, bound)
	p.recordAdmitted(ctx, typ, r)
	p.requestQuota(ctx, r)
	return r, nil
}

// requestQuota wakes the leader of the limits when r says that this partition has none yet, or has
// used up its quota, or keeps what is left of it for other tenants; at most once in
// quotaRequestInterval. With one partition nothing can be moved to it.
func (p *partitionFetcher) requestQuota(ctx context.Context, r ledger.AdmitReply) {
	if r.State != ledger.AdmitUnset && (p.Space.Partitions() == 1 || r.State != ledger.AdmitLimited) {
		return
	}
	if time.Since(p.quotaRequestedAt) < quotaRequestInterval {
		return
	}
	p.quotaRequestedAt = time.Now()
	_ = ledger.WakeLimits(ctx, p.Conn.Cmd, p.Space) // without it, the leader acts at its next interval
}

// recordAdmitted adds the reply of one call of the script admit to the counts and the metrics, and
// passes its permits to Config.OnPermits. It records a span for each sampled job that was admitted,
// and a span of the batch that links to these.
func (p *partitionFetcher) recordAdmitted(ctx context.Context, typ string, r ledger.AdmitReply) {
	p.fetched.Add(int64(r.Moved + r.NonReady))
	p.admittedReady.Add(int64(r.Moved))
	p.admittedNonReady.Add(int64(r.NonReady))
	p.metrics.Fetched(r.Moved, r.NonReady)
	if p.cfg.OnPermits != nil {
		p.cfg.OnPermits(r.AtUS, p.partition.Index(), typ, r.Permits)
	}
	for _, a := range r.Permits {
		p.metrics.Allowed(a.Tenant, int(a.N))
	}
	for _, d := range r.Denials {
		p.metrics.Denied(d.Tenant, d.Reason)
	}
	if len(r.Traced) == 0 {
		return
	}
	batch := p.Tel.NewBatch("admit", p.partition.Ready(typ), r.Traced[0].Now)
	for i := range r.Traced {
		t := &r.Traced[i]
		span := telemetry.JobSpan{Parent: t.Parent, ID: t.SpanID, Start: t.Now}
		batch.Job(ctx, span, func() []attribute.KeyValue {
			attrs := telemetry.JobAttributes(t.Tenant, t.Group, t.Ordinal, 0)
			return append(attrs, telemetry.WaitAttributes(t.Fairness, t.Rate, 0)...)
		})
	}
	batch.End(ctx, r.Moved)
}
