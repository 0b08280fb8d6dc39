package bench

import (
	"context"
	"fmt"
	"math"
	"os"
	"path/filepath"
	"time"

	"github.com/bulkaction/bulkaction/bench/measure"
	"github.com/bulkaction/bulkaction/internal/jobs/ledger"
)

// ThroughputOptions say which load is run on which fleet.
type ThroughputOptions struct {
	Options
	Jobs        int
	Tenants     int
	Groups      int     // groups of each tenant
	Batch       int     // jobs of a message
	Payload     int     // bytes of each job's payload
	Limits      bool    // each tenant has a limit of its own; it is counted but never reached
	FailPercent float64 // this percentage of the jobs fails once and is retried
	// Sampling is the fraction of the jobs that is traced; 0: none. The processes send the traces
	// to this process.
	Sampling float64
	Backlog  int  // number of jobs of other groups that wait in the fair queue all the time
	Ceiling  bool // also measure the least-work ceiling, before and after
	Brief    bool // measure neither latency nor the memory of a queued job
}

// Throughput has the figures of one run, in which jobs are produced and processed at the same time.
type Throughput struct {
	Jobs    int `json:"jobs"`
	Tenants int `json:"tenants"`
	// ElapsedSeconds is the time from the first message until the last group is COMPLETED, by
	// Redis's clock.
	ElapsedSeconds   float64 `json:"elapsed_seconds"`
	JobsPerSecond    float64 `json:"jobs_per_second"`
	RedisCPUPerJob   float64 `json:"redis_cpu_us_per_job"`
	ProcessCPUPerJob float64 `json:"process_cpu_us_per_job"` // of the roles and this process
	// RedisCPUPerJob + ProcessCPUPerJob
	CPUPerJob         float64 `json:"cpu_us_per_job"`
	BytesPerQueuedJob float64 `json:"redis_bytes_per_queued_job"`
	// P50MS and P99MS are the time of single jobs from accepted to started, on a fleet with nothing
	// else to do, at 100 jobs a second, in whole ms. `bench latency` measures it more exactly.
	P50MS float64 `json:"p50_ms"`
	P99MS float64 `json:"p99_ms"`
	// with the commands that scripts call
	CommandsPerJob   float64            `json:"redis_commands_per_job"`
	ProcessCPUByRole map[string]float64 `json:"process_cpu_us_per_job_by_role"`
	// PeakMBByRole has the peak of resident memory of the largest process of each role, of this
	// process, and of a private Redis.
	PeakMBByRole map[string]float64 `json:"peak_rss_mb_by_role"`
	// FirstTenth and LastTenth are the speeds of the first and the last tenth of the jobs, in jobs
	// a second. They are missing with more than 64 groups or fewer than 20 jobs.
	FirstTenth float64 `json:"first_tenth_jobs_per_second,omitempty"`
	LastTenth  float64 `json:"last_tenth_jobs_per_second,omitempty"`
	// MasterCommands has the share of the Redis commands of each master of a cluster, ordered by
	// address, and MasterCPU its CPU time per job. Both are empty without a cluster.
	MasterCommands []float64 `json:"commands_share_by_master,omitempty"`
	MasterCPU      []float64 `json:"redis_cpu_us_per_job_by_master,omitempty"`
	// mean of the measurements before and after the run
	Ceiling *Ceiling `json:"ceiling,omitempty"`
	// our speed / the ceiling's speed
	CeilingRatio float64 `json:"ceiling_ratio,omitempty"`
	// Redis's CPU time of a job / that of a job of the ceiling
	RedisCeilingRatio float64           `json:"redis_ceiling_ratio,omitempty"`
	TraceBytes        int64             `json:"trace_bytes,omitempty"` // size of the exported traces
	Backlog           int               `json:"backlog"`
	Groups            int               `json:"groups_per_tenant"`
	PayloadBytes      int               `json:"payload_bytes"`
	MessagesJobs      int               `json:"jobs_per_message"`
	Partitions        int               `json:"partitions"`
	Masters           int               `json:"masters"`
	AOF               bool              `json:"aof"`
	Limits            bool              `json:"limits"`
	FailPercent       float64           `json:"fail_percent"`
	Sampling          float64           `json:"trace_sampling"`
	Replicas          map[string]int    `json:"replicas,omitempty"`
	Overrides         map[string]string `json:"overrides"`
}

// unreachedLimit is a rate limit (permits a second) of a tenant, so high that no run reaches it.
const unreachedLimit = 100_000_000

// quickRetries are settings with which failed jobs are due again after 1 ms: benchmarks measure the
// work of a retry, not the wait before it.
var quickRetries = []string{
	"BULKACTION_BACKPRESSURE_DEFAULT_BACKOFF=1ms", "BULKACTION_BACKPRESSURE_MAX_BACKOFF=1ms",
	"BULKACTION_CONGESTION_BASE_BACKOFF=1ms", "BULKACTION_CONGESTION_MAX_BACKOFF=1ms",
}

// failOnce are payload fields with which a NOOP job fails once and is retried.
const failOnce = `"fail":"retry","fail_times":1,`

// failingJobs returns a function for group.job. The given percentage of its jobs, spread evenly,
// fails once and is retried.
func failingJobs(payload int, percent float64) func(int) []byte {
	normal, failing := encodeJob(payload, ""), encodeJob(payload, failOnce)
	return func(i int) []byte {
		if int(float64(i+1)*percent/100) > int(float64(i)*percent/100) {
			return failing
		}
		return normal
	}
}

// RunThroughput runs NOOP jobs through all roles, on a fleet of its own.
func RunThroughput(ctx context.Context, o ThroughputOptions) (Throughput, error) {
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
		Backlog:      o.Backlog,
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
	r, err := start(ctx, o.Options, false, env...)
	if err != nil {
		return out, err
	}
	defer r.close()
	out.Overrides = r.overrides
	if err := out.measureLoad(ctx, r, o); err != nil {
		return out, err
	}
	if out.PeakMBByRole, err = r.peaks(); err != nil {
		return out, err
	}
	if !o.Brief {
		if err := out.measureIdleFleet(ctx, r, o); err != nil {
			return out, err
		}
	}
	if err := r.stop(); err != nil { // profiles and traces are complete then
		return out, err
	}
	if traces != nil {
		out.TraceBytes = traces.bytes.Load()
	}
	return out, nil
}

// measureLoad warms the fleet up, runs the load, and computes the figures of t that need no further
// run. With o.Profile it also writes commandstats.txt.
func (t *Throughput) measureLoad(ctx context.Context, r *run, o ThroughputOptions) error {
	groups := divideJobs(r.name, o.Jobs, o.Tenants, o.Groups, failingJobs(o.Payload, o.FailPercent))
	if o.Limits {
		rps := float64(unreachedLimit)
		for _, g := range groups[:o.Tenants] {
			if err := r.setTenant(ctx, g.tenant, ledger.TenantSettings{RPS: &rps}); err != nil {
				return err
			}
		}
	}
	if err := r.warmUp(ctx, failingJobs(o.Payload, o.FailPercent), o.Batch); err != nil {
		return err
	}
	if o.Backlog > 0 {
		backlog := divideJobs(r.name+"-backlog", o.Backlog, o.Tenants, o.Groups, failingJobs(o.Payload, 0))
		if err := r.queue(ctx, backlog, o.Batch, countAccepted(r)); err != nil {
			return err
		}
	}
	var before Ceiling
	var err error
	if o.Ceiling {
		if before, err = r.measureCeiling(ctx, o.Jobs, o.Payload); err != nil {
			return err
		}
	}
	var began time.Time
	var f *follower
	u, err := r.measure(ctx, func() (err error) {
		if began, err = r.now(ctx); err != nil {
			return err
		}
		f, err = r.produceAndAwait(ctx, "jobs", groups, o.Batch)
		return err
	})
	if err != nil {
		return err
	}
	t.computePerJob(u, f.end.Sub(began))
	t.FirstTenth, t.LastTenth = tenthSpeeds(f.samples, o.Jobs)
	if o.Profile != "" {
		file, table := filepath.Join(o.Profile, "commandstats.txt"), u.redisTotal().Table(o.Jobs)
		if err := os.WriteFile(file, []byte(table), 0o644); err != nil {
			return err
		}
	}
	if o.Ceiling {
		after, err := r.measureCeiling(ctx, o.Jobs, o.Payload)
		if err != nil {
			return err
		}
		t.Ceiling = before.mean(after)
		t.CeilingRatio = measure.Ratio(t.JobsPerSecond, t.Ceiling.JobsPerSecond)
		t.RedisCeilingRatio = measure.Ratio(t.RedisCPUPerJob, t.Ceiling.RedisCPUPerJob)
	}
	return nil
}

// computePerJob computes the figures of t from what the processes and Redis used in the elapsed
// time.
func (t *Throughput) computePerJob(u fleetUse, elapsed time.Duration) {
	t.ElapsedSeconds, t.JobsPerSecond = measure.Round4(elapsed.Seconds()), math.Round(float64(t.Jobs)/elapsed.Seconds())
	all := u.redisTotal()
	t.RedisCPUPerJob, t.ProcessCPUPerJob = measure.PerJob(all.CPU, t.Jobs), measure.PerJob(u.processCPU(), t.Jobs)
	t.CPUPerJob = measure.Round2(t.RedisCPUPerJob + t.ProcessCPUPerJob)
	t.CommandsPerJob = measure.Round2(float64(all.Commands) / float64(t.Jobs))
	t.ProcessCPUByRole = map[string]float64{}
	for role, cpu := range u.roles {
		t.ProcessCPUByRole[role] = measure.PerJob(cpu, t.Jobs)
	}
	if len(u.masters) > 1 {
		for _, m := range u.masters {
			t.MasterCommands = append(t.MasterCommands, measure.Ratio(float64(m.Commands), float64(all.Commands)))
			t.MasterCPU = append(t.MasterCPU, measure.PerJob(m.CPU, t.Jobs))
		}
	}
}

// warmUp runs some jobs before the measurement, so that connections, scripts and caches exist when
// it begins.
func (r *run) warmUp(ctx context.Context, job func(int) []byte, batch int) error {
	if _, err := r.produceAndAwait(ctx, "", divideJobs(r.name+"-warm", warmJobs, 1, 1, job), batch); err != nil {
		return fmt.Errorf("warm up: %w", err)
	}
	return nil
}

// produceAndAwait creates the groups, publishes their jobs, and at the same time waits until all
// groups are COMPLETED.
func (r *run) produceAndAwait(ctx context.Context, part string, groups []group, batch int) (*follower, error) {
	f := r.follow(part, groups)
	return f, f.waitBeside(ctx, func(ctx context.Context) error {
		if err := r.create(ctx, groups, 0); err != nil {
			return err
		}
		return r.fill(ctx, groups, batch)
	})
}

// measureIdleFleet measures the latency of single jobs and the memory of a queued job, on a fleet
// with nothing else to do. Its queued jobs stay in Redis.
func (t *Throughput) measureIdleFleet(ctx context.Context, r *run, o ThroughputOptions) error {
	const rate, singles = 100, 300
	groups, _, err := r.sendSingles(ctx, "", "-single", rate, singles)
	if err != nil {
		return err
	}
	now, err := r.states(ctx, groups)
	if err != nil {
		return err
	}
	waits := make([]float64, len(now))
	for i, g := range now {
		waits[i] = float64(g.Started.Sub(g.Created).Milliseconds())
	}
	t.P50MS, t.P99MS = measure.Percentile(waits, 50), measure.Percentile(waits, 99)
	t.BytesPerQueuedJob, err = r.queuedBytes(ctx, failingJobs(o.Payload, o.FailPercent), o.Batch, countAccepted(r))
	return err
}

// countAccepted returns a function that reads the number of accepted jobs of a group from Redis;
// the function returns 0 after an error.
func countAccepted(r *run) func(context.Context, group) int {
	return func(ctx context.Context, g group) int {
		now, err := r.states(ctx, []group{g})
		if err != nil {
			return 0 // the next command returns the error again
		}
		return int(now[0].Counts.Accepted)
	}
}

// queuedBytes returns the bytes of Redis memory that a queued job takes. It queues jobs that stay
// there. accepted returns the number of accepted jobs of a group.
func (r *run) queuedBytes(
	ctx context.Context, job func(int) []byte, batch int, accepted func(context.Context, group) int,
) (float64, error) {
	const jobs = 20_000
	g := group{id: r.name + "-queued", tenant: "queued", jobs: jobs, job: job}
	u, err := r.measure(ctx, func() error { return r.queue(ctx, []group{g}, batch, accepted) })
	return measure.Round2(float64(u.redisTotal().Memory) / jobs), err
}

// queue submits groups whose jobs may not start for an hour, and waits until accepted says that all
// their jobs are accepted, and the ingest stream is empty.
func (r *run) queue(
	ctx context.Context, groups []group, batch int, accepted func(context.Context, group) int,
) error {
	later := time.Now().Add(time.Hour).UTC().Format(time.RFC3339)
	for i := range groups {
		groups[i].fields = map[string]any{"run_at": later}
	}
	if err := r.create(ctx, groups, 0); err != nil {
		return err
	}
	if err := r.fill(ctx, groups, batch); err != nil {
		return err
	}
	return r.await(ctx, "queued jobs", pollInterval, func() (int, error) {
		unread, err := r.conn.Cmd.XLen(ctx, r.space.Ingest()).Result()
		left := int(unread)
		for _, g := range groups {
			left += g.jobs - accepted(ctx, g)
		}
		return left, err
	})
}
