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

// ThroughputOptions say what is run.
type ThroughputOptions struct {
	FleetOptions
	Jobs        int
	Tenants     int
	Groups      int // of each tenant
	Batch       int // jobs a message
	Payload     int // bytes
	Partitions  int
	Limits      bool    // each tenant has a limit of its own, which is counted and never reached
	FailPercent float64 // of the jobs fail once and are retried
	Sampling    float64 // part of the jobs that is traced, to a sink in this process; 0: no tracing
	Ceiling     bool    // measure the least-work ceiling before and after
	Brief       bool    // neither latency nor memory are measured
}

// Throughput is what came of it. Produced and processed happen at once.
type Throughput struct {
	Jobs    int `json:"jobs"`
	Tenants int `json:"tenants"`
	// from the first message to the last group COMPLETED, by Redis's clock
	ElapsedSeconds    float64 `json:"elapsed_seconds"`
	JobsPerSecond     float64 `json:"jobs_per_second"`
	RedisCPUPerJob    float64 `json:"redis_cpu_us_per_job"`
	ProcessCPUPerJob  float64 `json:"process_cpu_us_per_job"` // all our processes, the producer included
	BytesPerQueuedJob float64 `json:"redis_bytes_per_queued_job"`
	// accepted to started at 100 jobs a second, to the ms; `bench latency` is more exact
	P50MS            float64            `json:"p50_ms"`
	P99MS            float64            `json:"p99_ms"`
	CommandsPerJob   float64            `json:"redis_commands_per_job"` // those of scripts included
	ProcessCPUByRole map[string]float64 `json:"process_cpu_us_per_job_by_role"`
	// of the largest process of each role
	PeakMBByRole   map[string]float64 `json:"peak_rss_mb_by_role"`
	FirstTenth     float64            `json:"first_tenth_jobs_per_second,omitempty"`    // not where groups are many
	LastTenth      float64            `json:"last_tenth_jobs_per_second,omitempty"`     //
	MasterCommands []float64          `json:"commands_share_by_master,omitempty"`       // of a cluster
	MasterCPU      []float64          `json:"redis_cpu_us_per_job_by_master,omitempty"` //
	Ceiling        *Ceiling           `json:"ceiling,omitempty"`                        // mean of before and after
	CeilingRatio   float64            `json:"ceiling_ratio,omitempty"`                  // our speed to the ceiling's
	TraceBytes     int64              `json:"trace_bytes,omitempty"`                    // that the sink was sent
	Groups         int                `json:"groups_per_tenant"`
	PayloadBytes   int                `json:"payload_bytes"`
	MessagesJobs   int                `json:"jobs_per_message"`
	Partitions     int                `json:"partitions"`
	Masters        int                `json:"masters"`
	AOF            bool               `json:"aof"`
	Limits         bool               `json:"limits"`
	FailPercent    float64            `json:"fail_percent"`
	Sampling       float64            `json:"sampling"`
	Replicas       map[string]int     `json:"replicas,omitempty"`
	Overrides      map[string]string  `json:"overrides"`
}

const (
	// noGlobalLimit has the machine measured, and not its limit.
	noGlobalLimit = "BULKACTION_BACKPRESSURE_GLOBAL_RPS=0"
	// unreachedLimit is a tenant's own limit that nothing reaches.
	unreachedLimit = 100_000_000
	warmJobs       = 2000
)

// quickRetries has failed jobs come back at once: the work of a retry is measured, not the wait.
var quickRetries = []string{
	"BULKACTION_BACKPRESSURE_DEFAULT_BACKOFF=1ms", "BULKACTION_BACKPRESSURE_MAX_BACKOFF=1ms",
	"BULKACTION_CONGESTION_BASE_BACKOFF=1ms", "BULKACTION_CONGESTION_MAX_BACKOFF=1ms",
}

func round2(x float64) float64 { return math.Round(x*100) / 100 }

// RunThroughput runs no-op jobs through all roles. progress, which may be nil, is called with the
// jobs done so far.
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
	if err := r.fleet.Stop(); err != nil { // profiles and traces are written by then
		return out, err
	}
	if traces != nil {
		out.TraceBytes = traces.bytes.Load()
	}
	return out, nil
}

// fleetRun is one run of a fleet.
type fleetRun struct {
	fleet         *Fleet
	space         keyspace.Space
	producer      *producer
	name          string
	cleanupPrefix string // prefix of the keys that are removed in the end, on a Redis that is not ours
}

// startFleetRun starts a fleet with env, over which the options' own wins.
func startFleetRun(ctx context.Context, o *FleetOptions, env []string, partitions int) (*fleetRun, error) {
	r := &fleetRun{name: "bench" + strconv.FormatInt(time.Now().UnixNano(), 36)}
	prefix := "bulk-action:"
	if o.RedisURL != "" { // side by side with whatever lies there
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
	_ = r.fleet.Stop() // the measurement stands or has failed already
	if r.cleanupPrefix != "" {
		_ = r.fleet.removeKeys(context.Background(), r.cleanupPrefix)
	}
	_ = r.fleet.Close()
}

// measureThroughput is the run itself.
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

// computePerJob computes what is per job.
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

// produceAndAwait sends groups through the fleet, produced and processed at once.
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

// limitTenants gives tenants limits of their own.
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

// measureIdleFleet are the figures of a fleet that is otherwise idle.
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

// accepted returns how many jobs of a group are accepted; 0 while the group is not there.
func (r *fleetRun) accepted(ctx context.Context, g group) int {
	key := r.space.OfTenant(g.tenant).Group(g.id)
	n, _ := r.fleet.Conn.Cmd.HGet(ctx, key, "accepted").Int() // an error comes again from the next command
	return n
}

// queuedBytes is the memory of a queued job: of a group that may not start yet.
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
	for giveUp := time.Now().Add(stalled); ; {
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

// Roles are those that may have several processes.
func Roles() []string { return slices.Clone(roles) }
