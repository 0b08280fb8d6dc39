package bench

import (
	"context"
	"errors"
	"fmt"
	"math"
	"os"
	"path/filepath"
	"slices"
	"strconv"
	"time"

	"github.com/bulkaction/bulkaction/internal/ledger"
	"github.com/bulkaction/bulkaction/internal/redisx"
	"github.com/bulkaction/bulkaction/internal/redisx/keyspace"
)

// ThroughputOptions say which load is run on which fleet.
type ThroughputOptions struct {
	FleetOptions
	Jobs        int
	Tenants     int
	Groups      int // groups of each tenant
	Batch       int // jobs of a message
	Payload     int // bytes of each job's payload
	Partitions  int
	Limits      bool    // each tenant has a limit of its own; it is counted but never reached
	FailPercent float64 // this percentage of the jobs fails once and is retried
	// part of the jobs that is traced; traces are sent to this process; 0: no tracing
	Sampling float64
	Ceiling  bool // also measure the least-work ceiling, before and after
	Brief    bool // measure neither latency nor the memory of a queued job
}

// Throughput has the figures of one run, in which jobs are produced and processed at the same time.
type Throughput struct {
	Jobs    int `json:"jobs"`
	Tenants int `json:"tenants"`
	// from the first message until the last group is COMPLETED, by Redis's clock
	ElapsedSeconds    float64 `json:"elapsed_seconds"`
	JobsPerSecond     float64 `json:"jobs_per_second"`
	RedisCPUPerJob    float64 `json:"redis_cpu_us_per_job"`
	ProcessCPUPerJob  float64 `json:"process_cpu_us_per_job"` // all processes, this one included
	BytesPerQueuedJob float64 `json:"redis_bytes_per_queued_job"`
	// from accepted to started at 100 jobs a second, in whole ms; P99MS too. `bench latency`
	// measures it in µs
	P50MS float64 `json:"p50_ms"`
	P99MS float64 `json:"p99_ms"`
	// with the commands that scripts call
	CommandsPerJob   float64            `json:"redis_commands_per_job"`
	ProcessCPUByRole map[string]float64 `json:"process_cpu_us_per_job_by_role"`
	// peak of the largest process of each role, of this process and of a private Redis
	PeakMBByRole map[string]float64 `json:"peak_rss_mb_by_role"`
	// speeds of the first and the last tenth of the jobs; missing if there are many groups
	FirstTenth float64 `json:"first_tenth_jobs_per_second,omitempty"`
	LastTenth  float64 `json:"last_tenth_jobs_per_second,omitempty"`
	// share of the commands, and CPU time, of each master by address; only of a cluster
	MasterCommands []float64 `json:"commands_share_by_master,omitempty"`
	MasterCPU      []float64 `json:"redis_cpu_us_per_job_by_master,omitempty"`
	// mean of the measurements before and after the run
	Ceiling *Ceiling `json:"ceiling,omitempty"`
	// our speed / the ceiling's speed
	CeilingRatio float64           `json:"ceiling_ratio,omitempty"`
	TraceBytes   int64             `json:"trace_bytes,omitempty"` // size of the exported traces
	Groups       int               `json:"groups_per_tenant"`
	PayloadBytes int               `json:"payload_bytes"`
	MessagesJobs int               `json:"jobs_per_message"`
	Partitions   int               `json:"partitions"`
	Masters      int               `json:"masters"`
	AOF          bool              `json:"aof"`
	Limits       bool              `json:"limits"`
	FailPercent  float64           `json:"fail_percent"`
	Sampling     float64           `json:"sampling"`
	Replicas     map[string]int    `json:"replicas,omitempty"`
	Overrides    map[string]string `json:"overrides"`
}

const (
	// noGlobalLimit switches the global limit off, so that the machine limits the speed.
	noGlobalLimit = "BULKACTION_BACKPRESSURE_GLOBAL_RPS=0"
	// unreachedLimit is a tenant's own limit (permits a second) that no run reaches.
	unreachedLimit = 100_000_000
	warmJobs       = 2000
)

// quickRetries makes failed jobs ready after 1 ms, because the work of a retry is measured and not
// the wait.
var quickRetries = []string{
	"BULKACTION_BACKPRESSURE_DEFAULT_BACKOFF=1ms", "BULKACTION_BACKPRESSURE_MAX_BACKOFF=1ms",
	"BULKACTION_CONGESTION_BASE_BACKOFF=1ms", "BULKACTION_CONGESTION_MAX_BACKOFF=1ms",
}

func round2(x float64) float64 { return math.Round(x*100) / 100 }

// RunThroughput runs NOOP jobs through all roles, on a fleet of its own. It calls progress, which
// may be nil, with the number of jobs done.
func RunThroughput(ctx context.Context, o ThroughputOptions, progress func(done int)) (Throughput, error) {
	o.Groups, o.Partitions = max(1, o.Groups), max(1, o.Partitions)
	out := Throughput{
		Jobs:         o.Jobs,
		Tenants:      o.Tenants,
		Groups:       o.Groups,
		PayloadBytes: o.Payload,
		MessagesJobs: o.Batch,
		Partitions:   o.Partitions,
		Masters:      max(1, o.Masters),
		AOF:          o.AOF,
		Limits:       o.Limits,
		FailPercent:  o.FailPercent,
		Sampling:     o.Sampling,
		Replicas:     o.Replicas,
	}
	var traces *traceSink
	env := []string{noGlobalLimit}
	if o.FailPercent > 0 {
		env = append(env, quickRetries...)
	}
	if o.Sampling > 0 {
		var err error
		if traces, err = startTraceSink(ctx); err != nil {
			return out, err
		}
		defer traces.close()
		env = append(env, traces.env(o.Sampling)...)
	}
	r, err := startFleetRun(ctx, &o.FleetOptions, env, o.Partitions)
	if err != nil {
		return out, err
	}
	defer r.close()
	out.Overrides = o.Overrides()
	r.producer = newProducer(r.fleet.Conn, r.space, o)
	if err := r.measureThroughput(ctx, o, &out, progress); err != nil {
		return out, err
	}
	if out.PeakMBByRole, err = r.fleet.peaks(); err != nil {
		return out, err
	}
	if !o.Brief {
		if err := r.measureIdleFleet(ctx, &out); err != nil {
			return out, err
		}
	}
	if err := r.fleet.Stop(); err != nil { // profiles and traces are complete then
		return out, err
	}
	if traces != nil {
		out.TraceBytes = traces.bytes.Load()
	}
	return out, nil
}

// fleetRun is a fleet with a producer and without a global limit, for measurements of speed.
type fleetRun struct {
	fleet    *Fleet
	space    keyspace.Space
	producer *producer
	name     string
	// keys with this prefix are deleted at the end; set on a Redis that is not private
	cleanupPrefix string
}

// startFleetRun starts a fleet with the settings env; those of o.Env win. It stores all settings in
// o.Env, also the key prefix on a Redis that is not private and the number of partitions. It resets
// this process's peak memory.
func startFleetRun(ctx context.Context, o *FleetOptions, env []string, partitions int) (*fleetRun, error) {
	r := &fleetRun{name: "bench" + strconv.FormatInt(time.Now().UnixNano(), 36)}
	prefix := "bulk-action:"
	if o.RedisURL != "" { // other data may be there
		r.cleanupPrefix = "bulk-action-bench-" + r.name + ":"
		prefix = r.cleanupPrefix
		env = append(env, "BULKACTION_KEY_PREFIX="+prefix)
	}
	if partitions > 1 {
		env = append(env, "BULKACTION_PARTITIONS="+strconv.Itoa(partitions))
	}
	o.Env = append(env, o.Env...)
	var err error
	if r.space, err = keyspace.New(prefix, partitions); err != nil {
		return nil, err
	}
	resetPeakMemory()
	r.fleet, err = StartFleet(ctx, *o)
	return r, err
}

func (r *fleetRun) close() {
	_ = r.fleet.Stop() // the figures are computed, or an error was returned
	if r.cleanupPrefix != "" {
		_ = r.fleet.removeKeys(context.Background(), r.cleanupPrefix)
	}
	_ = r.fleet.Close()
}

// measureThroughput warms up, runs the load, and fills in the figures of out that need no further
// run. It writes commandstats.txt if o.Profile is set.
func (r *fleetRun) measureThroughput(
	ctx context.Context, o ThroughputOptions, out *Throughput, progress func(int),
) error {
	groups := divideJobs(r.name, o.Jobs, o.Tenants, o.Groups)
	if o.Limits {
		if err := r.limitTenants(ctx, o.Tenants); err != nil {
			return err
		}
	}
	if _, err := r.produceAndAwait(ctx, divideJobs(r.name+"-warm", warmJobs, 1, 1), nil); err != nil {
		return fmt.Errorf("warm up: %w", err)
	}
	var before Ceiling
	var err error
	if o.Ceiling {
		if before, err = measureCeiling(ctx, r.fleet.Conn, o.Jobs, o.Payload); err != nil {
			return err
		}
	}
	start, err := r.fleet.measureUse(ctx)
	if err != nil {
		return err
	}
	began, err := r.fleet.Conn.Cmd.Time(ctx).Result()
	if err != nil {
		return fmt.Errorf("ask for Redis's time: %w", err)
	}
	f, err := r.produceAndAwait(ctx, groups, progress)
	if err != nil {
		return err
	}
	end, err := r.fleet.measureUse(ctx)
	if err != nil {
		return err
	}
	out.computePerJob(end.since(start), time.UnixMilli(f.end).Sub(began))
	out.FirstTenth, out.LastTenth = tenthSpeeds(f.samples, o.Jobs)
	if o.Profile != "" {
		if err := os.WriteFile(filepath.Join(o.Profile, "commandstats.txt"),
			[]byte(end.since(start).redisTotal().table(o.Jobs)), 0o644); err != nil {
			return err
		}
	}
	if o.Ceiling {
		after, err := measureCeiling(ctx, r.fleet.Conn, o.Jobs, o.Payload)
		if err != nil {
			return err
		}
		out.Ceiling = before.mean(after)
		out.CeilingRatio = ratio(out.JobsPerSecond, out.Ceiling.JobsPerSecond)
	}
	return nil
}

// computePerJob fills in the figures from what a run used in its time.
func (t *Throughput) computePerJob(u fleetUse, elapsed time.Duration) {
	t.ElapsedSeconds, t.JobsPerSecond = round4(elapsed.Seconds()), math.Round(float64(t.Jobs)/elapsed.Seconds())
	all := u.redisTotal()
	t.RedisCPUPerJob, t.ProcessCPUPerJob = perJob(all.cpu, t.Jobs), perJob(u.processCPU(), t.Jobs)
	t.CommandsPerJob = round2(float64(all.commands) / float64(t.Jobs))
	t.ProcessCPUByRole = map[string]float64{}
	for role, cpu := range u.roles {
		t.ProcessCPUByRole[role] = perJob(cpu, t.Jobs)
	}
	if len(u.masters) > 1 {
		for _, m := range u.masters {
			t.MasterCommands = append(t.MasterCommands, ratio(float64(m.commands), float64(all.commands)))
			t.MasterCPU = append(t.MasterCPU, perJob(m.cpu, t.Jobs))
		}
	}
}

// produceAndAwait creates the groups, publishes their jobs, and waits until all groups are
// COMPLETED and the producer has ended. With an error it stops the producer.
func (r *fleetRun) produceAndAwait(ctx context.Context, groups []group, progress func(int)) (*groupFollower, error) {
	ctx, cancel := context.WithCancel(ctx)
	produced, stopped := make(chan error, 1), make(chan struct{})
	f := follow(r.fleet, r.space, groups, progress)
	go func() {
		defer close(stopped)
		err := r.producer.create(ctx, groups, nil)
		if err == nil {
			err = r.producer.fill(ctx, groups)
		}
		produced <- err
	}()
	err := f.wait(ctx, produced)
	cancel()
	<-stopped
	return f, err
}

// limitTenants gives each tenant a limit of its own, which no run reaches.
func (r *fleetRun) limitTenants(ctx context.Context, tenants int) error {
	rps := float64(unreachedLimit)
	for i := range tenants {
		name := fmt.Sprintf("tenant-%d", i)
		if err := ledger.SetTenant(ctx, r.fleet.Conn.Cmd, r.space.OfTenant(name), name,
			ledger.TenantSettings{RPS: &rps}); err != nil {
			return fmt.Errorf("set limit of tenant %s: %w", name, err)
		}
	}
	return nil
}

// measureIdleFleet measures latency and the memory of a queued job on the fleet, which is idle
// otherwise. It leaves queued jobs behind.
func (r *fleetRun) measureIdleFleet(ctx context.Context, out *Throughput) error {
	const rate, singles = 100, 300
	paced, err := r.sendSingles(ctx, rate, singles)
	if err != nil {
		return err
	}
	waits, err := r.acceptedToStarted(ctx, paced)
	if err != nil {
		return err
	}
	out.P50MS, out.P99MS = percentile(waits, 50), percentile(waits, 99)
	out.BytesPerQueuedJob, err = r.queuedBytes(ctx, r.accepted)
	return err
}

// accepted returns the number of accepted jobs of a group; 0 if it does not exist yet or can't be
// read.
func (r *fleetRun) accepted(ctx context.Context, g group) int {
	now, err := readProgress(ctx, r.fleet, r.space, []group{g})
	if err != nil {
		return 0 // the next command returns the error again
	}
	return int(now[0].Counts.Accepted)
}

// queuedBytes returns the bytes of Redis memory that a queued job needs. It submits jobs that may
// start in an hour, asks accepted until all are stored, and leaves them there.
func (r *fleetRun) queuedBytes(ctx context.Context, accepted func(context.Context, group) int) (float64, error) {
	const jobs = 20_000
	before, err := r.fleet.measureUse(ctx)
	if err != nil {
		return 0, err
	}
	groups := []group{{id: r.name + "-queued", tenant: "queued", jobs: jobs}}
	if err := r.producer.create(
		ctx, groups, map[string]any{"run_at": time.Now().Add(time.Hour).UTC().Format(time.RFC3339)},
	); err != nil {
		return 0, err
	}
	if err := r.producer.fill(ctx, groups); err != nil {
		return 0, err
	}
	for giveUp := time.Now().Add(stallTimeout); ; {
		n := accepted(ctx, groups[0])
		left, err := r.fleet.Conn.Cmd.XLen(ctx, r.space.Ingest()).Result()
		if err != nil {
			return 0, fmt.Errorf("measure memory: %w", err)
		}
		if n == jobs && left == 0 {
			break
		}
		if time.Now().After(giveUp) {
			return 0, errors.New("measure memory: the jobs were not accepted")
		}
		if err := redisx.Sleep(ctx, pollInterval); err != nil {
			return 0, err
		}
	}
	after, err := r.fleet.measureUse(ctx)
	if err != nil {
		return 0, err
	}
	return round2(float64(after.since(before).redisTotal().memory) / jobs), nil
}

// Roles returns the names of the roles, each of which may have several processes.
func Roles() []string { return slices.Clone(roles) }
