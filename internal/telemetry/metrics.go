package telemetry

import (
	"cmp"
	"context"
	"slices"
	"strings"
	"sync"
	"sync/atomic"
	"time"

	"go.opentelemetry.io/otel/attribute"
	"go.opentelemetry.io/otel/metric"
)

// FetcherMetrics are the fetcher's metrics: how jobs leave the fair queue, and the permits for
// that.
type FetcherMetrics struct {
	*rateLimits
	fetched, emptyPolls, ready, nonReady counter
	admittedReady, admittedNonReady      counter
}

// NewFetcherMetrics creates the fetcher's instruments.
func NewFetcherMetrics(meter metric.Meter) *FetcherMetrics {
	i := instruments{meter}
	const admitted, help = "backpressure_admitted_total", "Jobs that left the fair queue, by where they went."
	return &FetcherMetrics{
		rateLimits: newRateLimits(i, time.Now),
		fetched:    i.counter("fetcher_total_fetched", "Jobs taken out of the fair queue."),
		emptyPolls: i.counter("fetcher_empty_polls", "Looks at the fair queue that found nothing to take."),
		ready:      i.counter("fetcher_admitted_ready", "Jobs that the fetcher put into a ready stream."),
		nonReady: i.counter("fetcher_admitted_non_ready",
			"Jobs that the fetcher made non-ready because there was no permit."),
		admittedReady:    i.counter(admitted, help, attribute.String("destination", "ready")),
		admittedNonReady: i.counter(admitted, help, attribute.String("destination", "non_ready")),
	}
}

// Fetched counts jobs that left the fair queue: those that became ready, and those that became
// non-ready.
func (m *FetcherMetrics) Fetched(ready, nonReady int) {
	m.fetched.add(ready + nonReady)
	m.ready.add(ready)
	m.admittedReady.add(ready)
	m.nonReady.add(nonReady)
	m.admittedNonReady.add(nonReady)
}

// EmptyPoll counts a step of the fetcher that took no job of any type out of the fair queue of one
// partition, although it found no ready stream full.
func (m *FetcherMetrics) EmptyPoll() { m.emptyPolls.add(1) }

// SubmissionMetrics count what the store of groups turns away.
type SubmissionMetrics struct{ rejected counter }

// NewSubmissionMetrics creates the instruments of a store of groups.
func NewSubmissionMetrics(meter metric.Meter) *SubmissionMetrics {
	return &SubmissionMetrics{instruments{meter}.counter("backpressure_rejected_total",
		"Jobs of requests that were refused because too many jobs wait or Redis is almost full.")}
}

// Rejected counts a request that backpressure has refused, by its jobs; one without jobs counts as
// one.
func (m *SubmissionMetrics) Rejected(jobs int) { m.rejected.add(max(1, jobs)) }

// The Dead constants say why a job became a dead letter.
const (
	DeadRetries     = "retries"      // its retries are used up
	DeadPermanent   = "permanent"    // an attempt failed with a permanent error
	DeadThrottles   = "throttles"    // downstream APIs have throttled it too often
	DeadWorkerLost  = "worker_lost"  // too many workers died while they ran it
	DeadLost        = "lost"         // it had vanished
	DeadNoProcessor = "no_processor" // no worker serves its type
)

// deadLetters returns the counters of jobs that became dead letters, by the reasons for which a role
// ends jobs. Roles share the metric: the process that ends a job counts it, so that the sum over all
// processes counts each job once.
func (i instruments) deadLetters(reasons ...string) map[string]counter {
	all := map[string]counter{}
	for _, reason := range reasons {
		all[reason] = i.counter("worker_dead_letter_total", "Jobs that this process ended as failed for good, by reason.",
			attribute.String("reason", reason))
	}
	return all
}

// DispatcherMetrics are the dispatcher's metrics: how jobs leave non-ready. They include permits,
// because each promotion spends one.
type DispatcherMetrics struct {
	*rateLimits
	moved, skipped, totalMoved, totalSkipped, takenBack counter
	deadLetter                                          map[string]counter
	cycle                                               histogram
}

// NewDispatcherMetrics creates the dispatcher's instruments.
func NewDispatcherMetrics(meter metric.Meter) *DispatcherMetrics {
	i := instruments{meter}
	return &DispatcherMetrics{
		rateLimits:   newRateLimits(i, time.Now),
		moved:        i.counter("dispatch_moved_total", "Jobs promoted from non-ready to a ready stream."),
		skipped:      i.counter("dispatch_skip_total", "Cycles that promoted nothing because ready streams were full."),
		totalMoved:   i.counter("dispatcher_total_moved", "Jobs promoted from non-ready to a ready stream."),
		totalSkipped: i.counter("dispatcher_total_skipped", "Cycles that promoted nothing because ready streams were full."),
		deadLetter:   i.deadLetters(DeadWorkerLost),
		takenBack: i.counter("dispatcher_total_taken_back",
			"Jobs taken back from workers that gave no sign of life for a lease."),
		cycle: i.histogram("dispatch_cycle_duration_ms", "Time that one dispatch cycle took.",
			0.5, 1, 2, 5, 10, 20, 50, 100, 200, 500, 1000, 2000, 5000),
	}
}

// Cycle records one dispatch cycle: the jobs that it promoted, whether it was skipped, which means
// that it promoted none because ready streams were full, and its duration.
func (m *DispatcherMetrics) Cycle(moved int, skipped bool, took time.Duration) {
	m.moved.add(moved)
	m.totalMoved.add(moved)
	if skipped {
		m.skipped.add(1)
		m.totalSkipped.add(1)
	}
	m.cycle.record(took)
}

// DeadLettered counts jobs that failed because too many workers died while running them.
func (m *DispatcherMetrics) DeadLettered(n int) { m.deadLetter[DeadWorkerLost].add(n) }

// TakenBack counts jobs that were reclaimed from dead workers, including those that then failed.
func (m *DispatcherMetrics) TakenBack(n int) { m.takenBack.add(n) }

// waits are the upper bounds, in ms, of the histogram buckets for wait times: from 1 ms to an hour.
var waits = []float64{
	1, 2, 5, 10, 25, 50, 100, 250, 500, 1000, 2500, 5000, 10000, 30000, 60000, 300000, 900000, 3600000,
}

// WorkerMetrics are the worker's metrics: attempts, and the pool of slots that runs them.
type WorkerMetrics struct {
	pool                                 atomic.Pointer[func() (size, active int)]
	succeeded, failed, timedOut, retried counter
	deadLetter                           map[string]counter
	deferred                             metric.Int64Counter
	stale, leasesLost                    counter
	duration, startDelay                 histogram
	fairness, rate, congestion           histogram
}

// NewWorkerMetrics creates the worker's instruments. The pool's gauges are 0 until
// [WorkerMetrics.ObservePool].
func NewWorkerMetrics(meter metric.Meter) *WorkerMetrics {
	i := instruments{meter}
	m := &WorkerMetrics{
		succeeded: i.counter("worker_job_success_total", "Attempts that succeeded."),
		failed:    i.counter("worker_job_failed_total", "Attempts that failed."),
		timedOut:  i.counter("worker_job_timeout_total", "Attempts that failed by running out of time."),
		retried:   i.counter("worker_job_retry_total", "Attempts that will be followed by another."),
		deferred: must(i.meter.Int64Counter(NamePrefix+"worker_job_deferred_total",
			metric.WithDescription("Jobs that wait again because what they need is busy, by type."))),
		deadLetter: i.deadLetters(DeadRetries, DeadPermanent, DeadThrottles),
		stale: i.counter("worker_stale_total",
			"Outcomes that changed nothing, because the attempt was no longer the job's."),
		leasesLost: i.counter("worker_leases_lost_total", "Jobs whose lease was lost while they ran here."),
		duration: i.histogram("worker_job_duration_ms", "Time that the processor ran, per attempt.",
			1, 2, 5, 10, 25, 50, 100, 250, 500, 1000, 2500, 5000, 10000, 30000, 60000, 300000),
		startDelay: i.histogram("job_start_delay_ms", "Time from when a job was accepted to when it first started.",
			waits...),
		fairness: i.histogram("wait_fairness_ms",
			"Time that a job waited for its turn in the fair queue, at the start of each attempt.", waits...),
		rate: i.histogram("wait_rate_ms", "Time that a job waited for a permit, at the start of each attempt.",
			waits...),
		congestion: i.histogram("wait_congestion_ms",
			"Time that a job waited after failed or throttled attempts, at the start of each attempt.", waits...),
	}
	size := i.gauge("worker_pool_size", "Jobs that this process can run at once.")
	active := i.gauge("worker_pool_active", "Jobs that this process runs now.")
	idle := i.gauge("worker_pool_idle", "Jobs that this process could run beside those it runs now.")
	i.observe(func(o metric.Observer) {
		var all, busy int
		if pool := m.pool.Load(); pool != nil {
			all, busy = (*pool)()
		}
		o.ObserveInt64(size, int64(all))
		o.ObserveInt64(active, int64(busy))
		// While the pool shrinks, more jobs may run than it has slots.
		o.ObserveInt64(idle, int64(max(all-busy, 0)))
	}, size, active, idle)
	return m
}

// ObservePool sets the function that the pool's gauges call: it returns how many slots the pool is
// to have and how many jobs run, which may be more. It replaces an earlier function.
func (m *WorkerMetrics) ObservePool(pool func() (size, active int)) { m.pool.Store(&pool) }

// Started records the time from a job's acceptance to its first start.
func (m *WorkerMetrics) Started(waited time.Duration) { m.startDelay.record(waited) }

// Waited records how long a job had waited before an attempt began: behind other jobs (fairness),
// for permits (rate), and after attempts that failed or were throttled, deferred or reclaimed
// (congestion). The worker calls it when the attempt has ended.
func (m *WorkerMetrics) Waited(fairness, rate, congestion time.Duration) {
	m.fairness.record(fairness)
	m.rate.record(rate)
	m.congestion.record(congestion)
}

// Ran records how long the processor ran in an attempt, whether it succeeded or failed. Released
// and deferred attempts are not recorded.
func (m *WorkerMetrics) Ran(took time.Duration) { m.duration.record(took) }

// Ended counts attempts that succeeded, attempts that failed (throttled ones too), and, of the
// failed ones, those that timed out.
func (m *WorkerMetrics) Ended(succeeded, failed, timedOut int) {
	m.succeeded.add(succeeded)
	m.failed.add(failed)
	m.timedOut.add(timedOut)
}

// Retried counts n jobs that will run again after a failed or throttled attempt.
func (m *WorkerMetrics) Retried(n int) { m.retried.add(n) }

// Deferred counts a job of type typ that was deferred, because what it needs is busy.
func (m *WorkerMetrics) Deferred(typ string) {
	m.deferred.Add(context.Background(), 1, metric.WithAttributes(attribute.String("type", typ)))
}

// Stale counts outcomes that changed nothing.
func (m *WorkerMetrics) Stale(n int) { m.stale.add(n) }

// LeasesLost counts jobs whose lease was lost while the worker process held them, running or not,
// but not those that had an outcome by then, or that the worker had stopped.
func (m *WorkerMetrics) LeasesLost(n int) { m.leasesLost.add(n) }

// DeadLettered counts n jobs that failed for good, with reason DeadRetries, DeadPermanent or
// DeadThrottles.
func (m *WorkerMetrics) DeadLettered(reason string, n int) { m.deadLetter[reason].add(n) }

// WatcherMetrics are the watcher's metrics: how many jobs are at which location, the violations of
// the audit, and the jobs that the watcher failed.
type WatcherMetrics struct {
	unserved   atomic.Int64
	queues     atomic.Pointer[queues]
	leads      atomic.Pointer[func() []bool]
	violations atomic.Pointer[map[string]int]
	deadLetter map[string]counter
	byCode     map[string]counter
}

type queues struct {
	QueueSizes
	backlog []typeBacklog
}

type typeBacklog struct {
	jobs, runnable int64
	series         metric.ObserveOption
}

// NewWatcherMetrics creates the watcher's instruments.
func NewWatcherMetrics(meter metric.Meter) *WatcherMetrics {
	i := instruments{meter}
	m := &WatcherMetrics{deadLetter: i.deadLetters(DeadLost, DeadNoProcessor), byCode: map[string]counter{}}
	for _, code := range []string{"LOST", "NO_PROCESSOR"} {
		m.byCode[code] = i.counter("watcher_dead_letter_total", "Jobs that the watcher ended as failed, by code.",
			attribute.String("code", code))
	}
	ready := i.gauge("ready_queue_size", "Jobs in ready streams that no worker has started.")
	nonReady := i.gauge("non_ready_queue_size", "Non-ready jobs: each waits until its due time.")
	outbox := i.gauge("outbox_size", "Changes of groups that are not in the stream of events yet.")
	rejected := i.gauge("rejected_messages", "Messages of ingest streams that could not be read, until their retention is over.")
	memory := must(meter.Float64ObservableGauge(NamePrefix+"redis_memory_ratio",
		metric.WithDescription("Used part of the memory of the fullest Redis server that has a limit.")))
	backlog := i.gauge("backlog", "Jobs that wait to run, by type.")
	unserved := i.gauge("unserved_backlog", "Jobs that wait to run and whose type no live worker serves.")
	runnable := i.gauge("backlog_runnable", "Jobs of the backlog that may run now, by type.")
	i.observe(func(o metric.Observer) {
		q := m.queues.Load()
		if q == nil {
			return
		}
		o.ObserveInt64(ready, int64(q.Ready))
		o.ObserveInt64(nonReady, int64(q.NonReady))
		o.ObserveInt64(outbox, q.Outbox)
		o.ObserveInt64(rejected, q.Rejected)
		o.ObserveFloat64(memory, q.MemoryRatio)
		o.ObserveInt64(unserved, m.unserved.Load())
		for _, b := range q.backlog {
			o.ObserveInt64(backlog, b.jobs, b.series)
			o.ObserveInt64(runnable, b.runnable, b.series)
		}
	}, ready, nonReady, outbox, rejected, memory, backlog, runnable, unserved)
	leader := i.gauge("leader", "1 in the watcher that leads the partition, 0 in others.")
	i.observe(func(o metric.Observer) {
		if leads := m.leads.Load(); leads != nil {
			for partition, does := range (*leads)() {
				value := int64(0)
				if does {
					value = 1
				}
				o.ObserveInt64(leader, value, metric.WithAttributes(attribute.Int("partition", partition)))
			}
		}
	}, leader)
	violations := i.gauge("audit_violations",
		"Violations that the audit finds and that stay, by law; of the law durability those since the process leads.")
	i.observe(func(o metric.Observer) {
		if byLaw := m.violations.Load(); byLaw != nil {
			for law, n := range *byLaw {
				o.ObserveInt64(violations, int64(n), metric.WithAttributes(attribute.String("law", law)))
			}
		}
	}, violations)
	return m
}

// DeadLettered counts n jobs that the watcher ended as failed, with code LOST or NO_PROCESSOR.
func (m *WatcherMetrics) DeadLettered(code string, n int) {
	m.deadLetter[strings.ToLower(code)].add(n)
	m.byCode[code].add(n)
}

// SetViolations replaces the numbers of open violations, by law. The caller must not change the map
// afterwards.
func (m *WatcherMetrics) SetViolations(byLaw map[string]int) { m.violations.Store(&byLaw) }

// SetUnserved sets the gauge of waiting jobs whose type no live worker serves. It is shown with the
// other queue gauges.
func (m *WatcherMetrics) SetUnserved(jobs int64) { m.unserved.Store(jobs) }

// ObserveLeader sets the function that the gauge leader calls: it returns for each partition whether
// this process leads it.
func (m *WatcherMetrics) ObserveLeader(leads func() []bool) { m.leads.Store(&leads) }

// HideQueues stops showing the queue gauges until the next SetQueues, because another process, the
// leader, shows them.
func (m *WatcherMetrics) HideQueues() { m.queues.Store(nil) }

// QueueSizes are sizes of the whole installation. Outbox is in entries; MemoryRatio is 0 without a limit.
type QueueSizes struct {
	Ready, NonReady  int
	Outbox, Rejected int64
	MemoryRatio      float64
}

// SetQueues replaces the values of the queue gauges: the sizes, and by type the
// backlog and those of its jobs that may run. A type that is missing in backlog is no longer shown. The [MaxLabels] types with the
// largest backlog have a series each; all other types share the series [Other].
func (m *WatcherMetrics) SetQueues(sizes QueueSizes, backlog, runnable map[string]int) {
	q := &queues{QueueSizes: sizes}
	types := make([]string, 0, len(backlog))
	rest, restRunnable := 0, 0
	for typ, jobs := range backlog {
		if typ == Other {
			rest, restRunnable = rest+jobs, restRunnable+runnable[typ]
			continue
		}
		types = append(types, typ)
	}
	slices.SortFunc(types, func(a, b string) int {
		return cmp.Or(cmp.Compare(backlog[b], backlog[a]), cmp.Compare(a, b))
	})
	for n, typ := range types {
		if n >= MaxLabels {
			rest, restRunnable = rest+backlog[typ], restRunnable+runnable[typ]
			continue
		}
		q.backlog = append(q.backlog, newTypeBacklog(typ, backlog[typ], runnable[typ]))
	}
	if _, named := backlog[Other]; named || len(types) > MaxLabels {
		q.backlog = append(q.backlog, newTypeBacklog(Other, rest, restRunnable))
	}
	m.queues.Store(q)
}

func newTypeBacklog(typ string, jobs, runnable int) typeBacklog {
	return typeBacklog{
		jobs: int64(jobs), runnable: int64(runnable),
		series: metric.WithAttributeSet(attribute.NewSet(attribute.String("type", typ))),
	}
}

// instruments creates OpenTelemetry instruments with the names of the metrics contract.
// OpenTelemetry returns the same instrument for the same name, so the roles of one process can
// share instruments. The only possible error is an invalid name, which is a bug in this package: it
// panics.
type instruments struct{ meter metric.Meter }

// NamePrefix begins the names of all metrics.
const NamePrefix = "bulk_action_"

// counter is one series of a counter: a name with fixed attributes. Recording needs no context:
// only exemplars would use it, and the Prometheus text format has none.
type counter struct {
	c    metric.Int64Counter
	opts []metric.AddOption
}

// counter creates a counter. Its series exists from the start, with value 0.
func (i instruments) counter(name, description string, attrs ...attribute.KeyValue) counter {
	c := must(i.meter.Int64Counter(NamePrefix+name, metric.WithDescription(description)))
	series := counter{c: c}
	if len(attrs) > 0 {
		series.opts = []metric.AddOption{metric.WithAttributeSet(attribute.NewSet(attrs...))}
	}
	c.Add(context.Background(), 0, series.opts...)
	return series
}

func (c counter) add(n int) {
	if n > 0 {
		c.c.Add(context.Background(), int64(n), c.opts...)
	}
}

// histogram records durations in milliseconds.
type histogram struct{ h metric.Float64Histogram }

func (i instruments) histogram(name, description string, bounds ...float64) histogram {
	return histogram{must(i.meter.Float64Histogram(NamePrefix+name,
		metric.WithDescription(description), metric.WithUnit("ms"), metric.WithExplicitBucketBoundaries(bounds...)))}
}

func (h histogram) record(d time.Duration) {
	h.h.Record(context.Background(), float64(max(d, 0))/float64(time.Millisecond))
}

func (i instruments) gauge(name, description string) metric.Int64ObservableGauge {
	return must(i.meter.Int64ObservableGauge(NamePrefix+name, metric.WithDescription(description)))
}

func (i instruments) observableCounter(name, description string) metric.Int64ObservableCounter {
	return must(i.meter.Int64ObservableCounter(NamePrefix+name, metric.WithDescription(description)))
}

// observe registers f, which is called at each collection of metrics.
func (i instruments) observe(f func(metric.Observer), observed ...metric.Observable) {
	must(i.meter.RegisterCallback(func(_ context.Context, o metric.Observer) error {
		f(o)
		return nil
	}, observed...))
}

func must[T any](v T, err error) T {
	if err != nil {
		panic("telemetry: " + err.Error())
	}
	return v
}

// Reasons for which a permit was denied.
const (
	DeniedGlobal   = "global"    // the global limit is reached, or the partition's quota of it
	DeniedPerGroup = "per_group" // the tenant's share or own limit is reached
	DeniedType     = "type"      // the rate of the type is reached
	DeniedInFlight = "in_flight" // as many jobs of the tenant or the type are ready or running as may be
)

var deniedReasons = [...]string{DeniedGlobal, DeniedPerGroup, DeniedType, DeniedInFlight}

// MaxLabels bounds the series of a metric with a label whose values users choose: so many values
// have a series each, all other values share the series Other.
const (
	MaxLabels = 64
	Other     = "other"
)

// keepSeries is the shortest time for which a tenant keeps its series after its last given or
// denied permit.
const keepSeries = 10 * time.Minute

// rateLimits counts permits per tenant, with a bounded number of series: the first MaxLabels
// tenants have a series each, all other tenants share Other. When all series are taken and another
// tenant comes, a sweep runs, at most once in keepSeries. It takes the series away from each tenant
// that was given or denied no permit since the last sweep. If such a tenant returns, its series
// starts at 0, like that of a restarted process. The counts are not in SDK counters, because the
// SDK never removes a series.
type rateLimits struct {
	now func() time.Time

	mu       sync.RWMutex
	byTenant map[string]*tenantPermits
	sweepAt  time.Time
	other    *tenantPermits
}

type tenantPermits struct {
	allowed       atomic.Int64
	allowedSeries metric.ObserveOption
	denied        [len(deniedReasons)]atomic.Int64 // by reason
	deniedSeries  [len(deniedReasons)]metric.ObserveOption

	seen int64 // the sum of the counters at the last sweep
}

func newRateLimits(i instruments, now func() time.Time) *rateLimits {
	r := &rateLimits{
		now:      now,
		byTenant: make(map[string]*tenantPermits),
		sweepAt:  now().Add(keepSeries),
		other:    newTenantPermits(Other),
	}
	allowed := i.observableCounter("rate_limit_allowed_total", "Permits given to jobs.")
	denied := i.observableCounter("rate_limit_denied_total", "Permits denied, by the limit that was reached.")
	i.observe(func(o metric.Observer) { r.observe(o, allowed, denied) }, allowed, denied)
	return r
}

func newTenantPermits(tenant string) *tenantPermits {
	label := attribute.String("tenant", tenant)
	series := func(attrs ...attribute.KeyValue) metric.ObserveOption {
		return metric.WithAttributeSet(attribute.NewSet(attrs...))
	}
	p := &tenantPermits{allowedSeries: series(label)}
	for i, reason := range deniedReasons {
		p.deniedSeries[i] = series(label, attribute.String("reason", reason))
	}
	return p
}

// Allowed counts n jobs of a tenant that became ready; with a rate limit each was given a permit.
func (r *rateLimits) Allowed(tenant string, n int) { r.of(tenant).allowed.Add(int64(max(n, 0))) }

// Denied counts one denied permit or place. reason is one of the constants Denied…. A type's limit is
// denied to nobody in particular: tenant is then "".
func (r *rateLimits) Denied(tenant, reason string) {
	if i := slices.Index(deniedReasons[:], reason); i >= 0 {
		r.of(cmp.Or(tenant, Other)).denied[i].Add(1)
	}
}

func (r *rateLimits) of(tenant string) *tenantPermits {
	r.mu.RLock()
	p, full := r.byTenant[tenant], len(r.byTenant) >= MaxLabels
	if p == nil && (tenant == Other || full && r.now().Before(r.sweepAt)) {
		p = r.other
	}
	r.mu.RUnlock()
	if p != nil {
		return p
	}
	return r.admit(tenant)
}

func (r *rateLimits) admit(tenant string) *tenantPermits {
	r.mu.Lock()
	defer r.mu.Unlock()
	if p := r.byTenant[tenant]; p != nil {
		return p
	}
	if len(r.byTenant) >= MaxLabels && !r.now().Before(r.sweepAt) {
		r.sweep()
	}
	if len(r.byTenant) >= MaxLabels {
		return r.other
	}
	p := newTenantPermits(tenant)
	r.byTenant[tenant] = p
	return p
}

// sweep removes the tenants whose counters have not changed since the last sweep. The caller holds
// the lock.
func (r *rateLimits) sweep() {
	r.sweepAt = r.now().Add(keepSeries)
	for tenant, p := range r.byTenant {
		sum := p.sum()
		if sum == p.seen {
			delete(r.byTenant, tenant)
		}
		p.seen = sum
	}
}

func (p *tenantPermits) sum() int64 {
	sum := p.allowed.Load()
	for i := range p.denied {
		sum += p.denied[i].Load()
	}
	return sum
}

func (r *rateLimits) observe(o metric.Observer, allowed, denied metric.Int64Observable) {
	r.mu.RLock()
	defer r.mu.RUnlock()
	r.other.observe(o, allowed, denied)
	for _, p := range r.byTenant {
		p.observe(o, allowed, denied)
	}
}

func (p *tenantPermits) observe(o metric.Observer, allowed, denied metric.Int64Observable) {
	report := func(what metric.Int64Observable, n int64, series metric.ObserveOption) {
		if n > 0 {
			o.ObserveInt64(what, n, series)
		}
	}
	report(allowed, p.allowed.Load(), p.allowedSeries)
	for i := range p.denied {
		report(denied, p.denied[i].Load(), p.deniedSeries[i])
	}
}
