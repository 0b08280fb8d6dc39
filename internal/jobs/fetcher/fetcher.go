// Package fetcher implements the fetcher role. It admits jobs: it dequeues the next jobs from the
// fair queue, spends a permit on each, and puts them into the ready streams, up to the bounds of
// the streams. It hides its pace: its batches grow while there is work, and a wake token wakes an
// idle fetcher.
package fetcher

import (
	"cmp"
	"context"
	"slices"
	"sync/atomic"
	"time"

	"go.opentelemetry.io/otel/attribute"

	"github.com/bulkaction/bulkaction/api"
	"github.com/bulkaction/bulkaction/internal/jobs/ledger"
	"github.com/bulkaction/bulkaction/internal/redisx"
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
	BatchSize   int
	ReadyCap    int           // largest number of undelivered jobs in a ready stream
	Rate        ledger.Rate   // the global rate limit
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

// Run admits jobs, and publishes the process's status, until ctx ends. With several partitions and
// a global rate limit, it also takes part in rebalancing the quotas of the partitions.
func (f *Fetcher) Run(ctx context.Context) error {
	f.running.Store(true)
	defer f.running.Store(false)
	_ = f.capacity.Refresh(ctx)
	r := f.Runner()
	r.Every("capacity", presence.Interval, f.capacity.Refresh)
	r.Report(f.Status)
	if f.Space.Partitions() > 1 && f.cfg.Rate.RPS > 0 {
		rebalancer := newRebalancer(f.cfg.Rate, f.Conn, f.Space, f.ID)
		r.Loop("rebalance quota", rebalanceWake(f.Space), rebalancer.step)
		r.OnStop(rebalancer.resign)
	}
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
		Limit:       p.cfg.Rate.Of(p.partition.Index(), p.Space.Partitions()),
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

// requestQuota wakes the quota rebalancer when r says that this partition has used up its quota, or
// keeps what is left of it for other tenants; at most once in quotaRequestInterval. With one
// partition it does nothing.
func (p *partitionFetcher) requestQuota(ctx context.Context, r ledger.AdmitReply) {
	if p.Space.Partitions() == 1 || r.State != ledger.AdmitLimited {
		return
	}
	if time.Since(p.quotaRequestedAt) < quotaRequestInterval {
		return
	}
	p.quotaRequestedAt = time.Now()
	wake := rebalanceWake(p.Space)
	if n, err := p.Conn.Cmd.LLen(ctx, wake).Result(); err == nil && n == 0 {
		_ = p.Conn.Cmd.LPush(ctx, wake, "1").Err() // without this token, the rebalancer acts at its next interval
	}
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

// rebalancer divides the global rate limit among partitions by demand: each partition has a quota,
// and one process at a time moves quota to the partitions where jobs wait. Each fetcher process has one if
// there are several partitions and a global limit, but only the leader's moves quota. It reduces
// quotas before it increases others, and only after it has read the quotas of all partitions. So
// the effective quotas never add up to more than the limit.
type rebalancer struct {
	rate  ledger.Rate
	conn  *redisx.Conn
	space keyspace.Space
	id    string

	peaks []demandPeak // for each partition
}

// newRebalancer returns a rebalancer of the limit rate, for the process named id.
func newRebalancer(rate ledger.Rate, conn *redisx.Conn, space keyspace.Space, id string) *rebalancer {
	return &rebalancer{rate: rate, conn: conn, space: space, id: id}
}

const (
	rebalanceLease = 3 * time.Second // after this time without a step, another process may replace the leader
	rebalancePause = time.Second     // pause without demand, or while another process leads
)

// rebalanceWake returns the key of the list whose wake tokens end the rebalancer's pause early.
func rebalanceWake(space keyspace.Space) string { return space.Partition(0).Wake("rebalancer") }

// pause returns the pause between two steps while there is demand.
func (r *rebalancer) pause() time.Duration {
	return min(max(r.rate.Window/8, 20*time.Millisecond), 200*time.Millisecond)
}

// step asks for the leadership or renews it; while another process is the leader, it does nothing
// else. The leader reads the quotas and the demand of all partitions, and moves quota if that is
// worthwhile and all earlier increases are effective. step returns the pause until the next step.
func (r *rebalancer) step(ctx context.Context) (time.Duration, error) {
	fence, err := ledger.LeadRebalancing(ctx, r.conn.Cmd, r.space.Partition(0), r.id, rebalanceLease)
	if err != nil || fence == 0 { // another process is the leader
		return rebalancePause, err
	}
	quotas := make([]ledger.Quota, r.space.Partitions())
	allEffective, idle := true, true
	for i := range quotas {
		limit := r.rate.Of(i, len(quotas))
		quotas[i], err = ledger.ReadQuota(ctx, r.conn.Cmd, r.space.Partition(i), fence, limit)
		if err != nil || quotas[i].Fenced {
			return rebalancePause, err
		}
		allEffective = allEffective && quotas[i].FromUS == 0
		idle = idle && quotas[i].Demand == 0
	}
	r.applyPeaks(quotas)
	if allEffective {
		window := int(time.Now().UnixNano() / int64(r.rate.Window))
		if err := r.moveQuotas(ctx, fence, quotas, divide(r.rate.PerWindow(), quotas, window)); err != nil {
			return 0, err
		}
	}
	if idle {
		return rebalancePause, nil
	}
	return r.pause(), nil
}

// applyPeaks replaces the demand of each partition in quotas by its largest recent demand: of about
// the last window, or the last second if that is shorter. A partition that has just admitted all
// its jobs is likely to need its quota again.
func (r *rebalancer) applyPeaks(quotas []ledger.Quota) {
	if r.peaks == nil {
		r.peaks = make([]demandPeak, len(quotas))
	}
	now := time.Now()
	for i := range quotas {
		if k := &r.peaks[i]; quotas[i].Demand >= k.demand || now.Sub(k.at) > min(r.rate.Window, time.Second) {
			*k = demandPeak{quotas[i].Demand, now}
		}
		quotas[i].Demand = r.peaks[i].demand
	}
}

// demandPeak is the largest recent demand of a partition.
type demandPeak struct {
	demand int64 // permits that its jobs could use
	at     time.Time
}

// moveQuotas changes the quotas to want: first those that get smaller, then those that get larger.
// It does nothing when no partition would gain at least a fiftieth of the limit, unless a partition
// without any quota is to get some. With the limiter fixed, the permits that a partition has spent
// become free when the window ends: an increase may become effective then. With sliding, they
// become free in several steps: a call may give a partition less than want. With token, an increase
// is effective at once. If this process is not the leader any more, moveQuotas stops and returns
// nil.
func (r *rebalancer) moveQuotas(ctx context.Context, fence int64, quotas []ledger.Quota, want []int64) error {
	all, minMove := r.rate.PerWindow(), max(1, r.rate.PerWindow()/50)
	worthwhile, increases, spare := false, int64(0), all
	for i, p := range quotas {
		worthwhile = worthwhile || want[i]-p.Effective >= minMove || p.Effective == 0 && want[i] > 0
		increases += max(0, want[i]-p.Effective)
		spare -= p.Effective
	}
	if !worthwhile {
		return nil
	}
	notBefore := int64(0)
	for i, p := range quotas {
		if want[i] >= p.Effective {
			continue
		}
		taken, err := r.setQuota(ctx, fence, i, want[i], ledger.Increase{})
		if err != nil || taken.Fenced {
			return err
		}
		spare += taken.Freed
		notBefore = max(notBefore, taken.FromUS)
	}
	spare = max(0, spare)
	for i, p := range quotas {
		increase := want[i] - p.Effective
		if increase <= 0 {
			continue
		}
		now := min(increase, spare*increase/increases)
		to, terms := want[i], ledger.Increase{NotBeforeUS: notBefore, AtOnce: now}
		if r.rate.Limiter == ledger.LimiterSliding {
			to = p.Effective + now
		}
		if given, err := r.setQuota(ctx, fence, i, to, terms); err != nil || given.Fenced {
			return err
		}
	}
	return nil
}

// setQuota changes the quota of one partition to permits a window. If the reply is Fenced, this
// process is not the leader any more, and nothing has changed.
func (r *rebalancer) setQuota(
	ctx context.Context, fence int64, partition int, permits int64, increase ledger.Increase,
) (ledger.Quota, error) {
	return ledger.SetQuota(ctx, r.conn.Cmd, r.space.Partition(partition), fence,
		r.rate.Of(partition, r.space.Partitions()), permits, increase)
}

// resign gives up the leadership, so that another process can lead at once. After an error, the
// leader lease ends by itself.
func (r *rebalancer) resign(ctx context.Context) {
	_, _ = ledger.LeadRebalancing(ctx, r.conn.Cmd, r.space.Partition(0), r.id, 0)
}

// divide returns the quota, in permits, that each partition should have of the limit. It divides by
// max-min fairness (water-filling): partitions with demand come first, weighted by their active
// tenants; permits that one does not need go to those that can use more. While every quota covers
// its demand and their sum is within the limit, all quotas stay as they are. If the limit is large
// enough, a hundredth of it, divided evenly, is the least demand of the partitions, so that a new
// tenant in one without demand need not wait for the next step. If there are fewer permits than
// partitions, the partitions take turns: turn is the number of the turn.
func divide(limit int64, quotas []ledger.Quota, turn int) []int64 {
	n := int64(len(quotas))
	reserved := limit / 100 / n
	want, out := make([]int64, n), make([]int64, n)
	shortage := false
	assigned := int64(0)
	for i, p := range quotas {
		want[i] = min(limit, max(p.Demand, reserved))
		out[i] = p.Effective
		shortage = shortage || want[i] > p.Effective
		assigned += p.Effective
	}
	if !shortage && assigned <= limit {
		return out
	}
	// In ascending order of demand per active tenant, each partition gets its demand, but at most
	// its part of the permits that are left, by its number of active tenants.
	weight := func(i int) int64 { return max(1, quotas[i].Active) }
	order := make([]int, n)
	weights := int64(0)
	for i := range order {
		order[i] = i
		weights += weight(i)
	}
	slices.SortFunc(order, func(a, b int) int {
		return cmp.Compare(float64(want[a])/float64(weight(a)), float64(want[b])/float64(weight(b)))
	})
	rest := limit
	for _, i := range order {
		out[i] = min(want[i], rest*weight(i)/weights)
		rest -= out[i]
		weights -= weight(i)
	}
	// The rest, for which there is no demand now, is divided evenly among all partitions.
	for k, i := range order {
		extra := rest / (n - int64(k))
		out[i] += extra
		rest -= extra
	}
	// If partitions with demand have no permit, one of them takes a permit from a partition with
	// the largest quota. turn selects both.
	var withoutQuota, richest []int
	largest := max(1, slices.Max(out))
	for i := range out {
		if out[i] == 0 && want[i] > 0 {
			withoutQuota = append(withoutQuota, i)
		}
		if out[i] == largest {
			richest = append(richest, i)
		}
	}
	if len(withoutQuota) > 0 && len(richest) > 0 {
		out[withoutQuota[turn%len(withoutQuota)]]++
		out[richest[turn%len(richest)]]--
	}
	return out
}
