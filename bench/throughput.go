package main

import (
	"bytes"
	"cmp"
	"context"
	"fmt"
	"io"
	"maps"
	"math"
	"net/http"
	"net/http/httptest"
	"os"
	"path/filepath"
	"runtime"
	"slices"
	"strconv"
	"strings"
	"sync/atomic"
	"time"

	"github.com/bulkaction/bulkaction/internal/jobs/ledger"
)

// ThroughputLoad says which load is run on which fleet. It is part of the result.
type ThroughputLoad struct {
	Jobs         int            `json:"jobs"`
	Tenants      int            `json:"tenants"`
	Groups       int            `json:"groups_per_tenant"`
	MessagesJobs int            `json:"jobs_per_message"`
	PayloadBytes int            `json:"payload_bytes"`
	Partitions   int            `json:"partitions"`
	AOF          bool           `json:"aof"`
	Limits       bool           `json:"limits"` // each tenant has a limit of its own; it is counted but never reached
	FailPercent  float64        `json:"fail_percent"`
	Sampling     float64        `json:"trace_sampling"` // the fraction of the jobs that is traced; 0: none
	Backlog      int            `json:"backlog"`        // jobs of other groups that wait in the fair queue all the time
	Replicas     map[string]int `json:"replicas,omitempty"`

	ceiling bool // also measure the least-work ceiling, before and after
	brief   bool // measure neither latency nor the memory of a queued job
}

// Throughput has the figures of one run, in which jobs are produced and processed at the same time.
type Throughput struct {
	ThroughputLoad
	// ElapsedSeconds is the time from the first message until the last group is COMPLETED, by
	// Redis's clock.
	ElapsedSeconds    float64 `json:"elapsed_seconds"`
	JobsPerSecond     float64 `json:"jobs_per_second"`
	RedisCPUPerJob    float64 `json:"redis_cpu_us_per_job"`
	ProcessCPUPerJob  float64 `json:"process_cpu_us_per_job"` // of the roles and this process
	CPUPerJob         float64 `json:"cpu_us_per_job"`         // of Redis, the roles and this process
	BytesPerQueuedJob float64 `json:"redis_bytes_per_queued_job"`
	// P50MS and P99MS are the time of single jobs from accepted to started, on a fleet with nothing
	// else to do, at 100 jobs a second, in whole ms. `latency` measures it more exactly.
	P50MS            float64            `json:"p50_ms"`
	P99MS            float64            `json:"p99_ms"`
	CommandsPerJob   float64            `json:"redis_commands_per_job"` // with those that scripts call
	ProcessCPUByRole map[string]float64 `json:"process_cpu_us_per_job_by_role"`
	// PeakMBByRole has the peak of resident memory of the largest process of each role, of this
	// process, and of a private Redis.
	PeakMBByRole map[string]float64 `json:"peak_rss_mb_by_role"`
	// FirstTenth and LastTenth are the speeds of the first and the last tenth of the jobs, in jobs
	// a second. They are missing with more than 64 groups or fewer than 20 jobs.
	FirstTenth        float64           `json:"first_tenth_jobs_per_second,omitempty"`
	LastTenth         float64           `json:"last_tenth_jobs_per_second,omitempty"`
	Ceiling           *Ceiling          `json:"ceiling,omitempty"`       // mean of before and after the run
	CeilingRatio      float64           `json:"ceiling_ratio,omitempty"` // our speed / the ceiling's speed
	RedisCeilingRatio float64           `json:"redis_ceiling_ratio,omitempty"`
	TraceBytes        int64             `json:"trace_bytes,omitempty"` // size of the exported traces
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

var throughputBenchmark = benchmark{
	"throughput", "NOOP jobs through all six roles, produced and processed at the same time",
	func(f *flags) runner {
		var l ThroughputLoad
		var workers int
		replicas := map[string]int{}
		f.int(&l.Jobs, "jobs", 100_000, 1, 0, "number of jobs")
		f.int(&l.Tenants, "tenants", 10, 1, 0, "number of tenants")
		f.int(&l.Groups, "groups", 1, 1, 0, "groups of each tenant")
		f.int(&l.MessagesJobs, "batch", perMessage, 1, 0, "jobs of each message")
		f.int(&l.PayloadBytes, "payload", 200, 0, 256<<10, "bytes of each job's payload")
		f.int(&workers, "workers", 1, 1, 64, "number of worker processes")
		f.Func("replicas", "number of processes by role, such as fetcher=2,aggregator=2", func(s string) error {
			for _, kv := range strings.Split(s, ",") {
				role, text, _ := strings.Cut(kv, "=")
				n, err := strconv.Atoi(text)
				if !slices.Contains(roles, role) || err != nil || n < 1 || n > 64 {
					return fmt.Errorf("write ROLE=N, from 1 to 64; the roles are %s", strings.Join(roles, ", "))
				}
				replicas[role] = n
			}
			return nil
		})
		f.int(&l.Partitions, "partitions", 1, 1, 1024, "number of partitions")
		f.BoolVar(&l.Limits, "limits", false, "give each tenant a limit of its own, which is counted but never reached")
		f.float(&l.FailPercent, "fail-percent", 0, 0, 100, "percentage of the jobs that fail once and are retried after 1 ms")
		f.float(&l.Sampling, "sampling", 0, 0, 1, "part of the jobs that is traced; this process receives the traces")
		f.int(&l.Backlog, "backlog", 0, 0, 0, "number of jobs of other groups that wait in the fair queue all the time")
		f.BoolVar(&l.ceiling, "ceiling", false, "measure the least-work ceiling on the same Redis, before and after")
		f.BoolVar(&l.brief, "brief", false, "measure neither latency nor memory")
		profile := f.String("profile", "",
			"folder for CPU profiles of all processes and a table of Redis's commands; implies --brief")
		f.aof()
		f.redis()
		return func(ctx context.Context, o options) (any, error) {
			if f.given("workers") {
				replicas["worker"] = workers
			}
			if len(replicas) > 0 {
				l.Replicas = replicas
			}
			l.AOF = o.aof
			if o.profile = *profile; o.profile != "" {
				l.brief = true
				check(os.MkdirAll(o.profile, 0o755))
			}
			return runThroughput(ctx, o, l), nil
		}
	},
}

// runThroughput runs NOOP jobs through all roles, on a fleet of its own.
func runThroughput(ctx context.Context, o options, l ThroughputLoad) (out Throughput) {
	out.ThroughputLoad = l
	o.partitions, o.aof, o.replicas = l.Partitions, l.AOF, l.Replicas
	env := []string{noGlobalLimit}
	if l.FailPercent > 0 {
		env = append(env, quickRetries...)
	}
	sink := startTraceSink()
	defer sink.Close()
	if l.Sampling > 0 {
		env = append(env, sink.env(l.Sampling)...)
	}
	r := start(ctx, o, false, env...)
	defer r.close()
	out.Overrides = r.overrides
	out.measureLoad(ctx, r, l)
	out.PeakMBByRole = r.peaks()
	if !l.brief {
		out.measureIdleFleet(ctx, r, l)
	}
	check(r.stop()) // profiles and traces are complete then
	out.TraceBytes = sink.bytes.Load()
	return out
}

// traceSink is the server to which processes send their traces. It counts the bytes and drops them.
type traceSink struct {
	*httptest.Server
	bytes atomic.Int64
}

func startTraceSink() *traceSink {
	s := &traceSink{}
	s.Server = httptest.NewServer(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		n, _ := io.Copy(io.Discard, r.Body) // the exporter repeats a request that fails
		s.bytes.Add(n)
		w.Header().Set("Content-Type", "application/x-protobuf") // an empty body: all spans were accepted
	}))
	return s
}

// env returns the variables with which processes trace this part of the jobs, and send it here.
func (s *traceSink) env(sampling float64) []string {
	return []string{
		"OTEL_EXPORTER_OTLP_ENDPOINT=" + s.URL, "OTEL_EXPORTER_OTLP_PROTOCOL=http/protobuf",
		"OTEL_METRICS_EXPORTER=none", "OTEL_TRACES_SAMPLER=parentbased_traceidratio",
		"OTEL_TRACES_SAMPLER_ARG=" + strconv.FormatFloat(sampling, 'g', -1, 64),
	}
}

// measureLoad warms the fleet up, runs the load, and computes the figures of t that need no further
// run. With a folder for profiles it also writes commandstats.txt.
func (t *Throughput) measureLoad(ctx context.Context, r *run, l ThroughputLoad) {
	job := failingJobs(l.PayloadBytes, l.FailPercent)
	groups := divideJobs(r.name, l.Jobs, l.Tenants, l.Groups, job)
	if l.Limits {
		rps := float64(unreachedLimit)
		for _, g := range groups[:l.Tenants] {
			check(r.setTenant(ctx, g.tenant, ledger.TenantSettings{RPS: &rps}))
		}
	}
	r.warmUp(ctx, job, l.MessagesJobs)
	if l.Backlog > 0 {
		backlog := divideJobs(r.name+"-backlog", l.Backlog, l.Tenants, l.Groups, failingJobs(l.PayloadBytes, 0))
		r.queue(ctx, backlog, l.MessagesJobs, r.accepted)
	}
	var before Ceiling
	if l.ceiling {
		before = r.measureCeiling(ctx, l.Jobs, l.PayloadBytes)
	}
	var began time.Time
	var f *follower
	u := r.measure(ctx, func() {
		began = must(r.now(ctx))
		f = r.produceAndAwait(ctx, "jobs", groups, l.MessagesJobs)
	})
	t.computePerJob(u, f.end.Sub(began))
	t.FirstTenth, t.LastTenth = tenthSpeeds(f.samples, l.Jobs)
	if folder := r.options.profile; folder != "" {
		check(os.WriteFile(filepath.Join(folder, "commandstats.txt"), []byte(u.redis.table(l.Jobs)), 0o644))
	}
	if l.ceiling {
		t.Ceiling = before.mean(r.measureCeiling(ctx, l.Jobs, l.PayloadBytes))
		t.CeilingRatio = ratio(t.JobsPerSecond, t.Ceiling.JobsPerSecond)
		t.RedisCeilingRatio = ratio(t.RedisCPUPerJob, t.Ceiling.RedisCPUPerJob)
	}
}

// computePerJob computes the figures of t from what the processes and Redis used in the elapsed
// time.
func (t *Throughput) computePerJob(u fleetUse, elapsed time.Duration) {
	t.ElapsedSeconds, t.JobsPerSecond = round4(elapsed.Seconds()), math.Round(float64(t.Jobs)/elapsed.Seconds())
	all := u.redis
	t.RedisCPUPerJob, t.ProcessCPUPerJob = perJob(all.cpu, t.Jobs), perJob(u.processCPU(), t.Jobs)
	t.CPUPerJob = round2(t.RedisCPUPerJob + t.ProcessCPUPerJob)
	t.CommandsPerJob = round2(float64(all.commands) / float64(t.Jobs))
	t.ProcessCPUByRole = map[string]float64{}
	for role, cpu := range u.roles {
		t.ProcessCPUByRole[role] = perJob(cpu, t.Jobs)
	}
}

// warmUp runs some jobs before the measurement, so that connections, scripts and caches exist when
// it begins.
func (r *run) warmUp(ctx context.Context, job func(int) []byte, batch int) {
	r.produceAndAwait(ctx, "", divideJobs(r.name+"-warm", warmJobs, 1, 1, job), batch)
}

// produceAndAwait creates the groups, publishes their jobs, and at the same time waits until all
// groups are COMPLETED.
func (r *run) produceAndAwait(ctx context.Context, part string, groups []group, batch int) *follower {
	f := r.follow(part, groups)
	check(f.waitBeside(ctx, func(ctx context.Context) error {
		if err := r.create(ctx, groups, 0); err != nil {
			return err
		}
		return r.fill(ctx, groups, batch)
	}))
	return f
}

// measureIdleFleet measures the latency of single jobs and the memory of a queued job, on a fleet
// with nothing else to do. Its queued jobs stay in Redis.
func (t *Throughput) measureIdleFleet(ctx context.Context, r *run, l ThroughputLoad) {
	const rate, singles = 100, 300
	groups, _ := r.sendSingles(ctx, "", "-single", rate, singles)
	waits := make([]float64, singles)
	for i, g := range must(r.states(ctx, groups)) {
		waits[i] = float64(g.Started.Sub(g.Created).Milliseconds())
	}
	t.P50MS, t.P99MS = percentile(waits, 50), percentile(waits, 99)
	t.BytesPerQueuedJob = r.queuedBytes(ctx, failingJobs(l.PayloadBytes, l.FailPercent), l.MessagesJobs, r.accepted)
}

// accepted returns the number of accepted jobs of a group; 0 after an error: the next command
// returns the error again.
func (r *run) accepted(ctx context.Context, g group) int {
	now, err := r.states(ctx, []group{g})
	if err != nil {
		return 0
	}
	return int(now[0].Counts.Accepted)
}

// queuedBytes returns the bytes of Redis memory that a queued job takes. It queues jobs that stay
// there. accepted returns the number of accepted jobs of a group.
func (r *run) queuedBytes(
	ctx context.Context, job func(int) []byte, batch int, accepted func(context.Context, group) int,
) float64 {
	const jobs = 20_000
	g := group{id: r.name + "-queued", tenant: "queued", jobs: jobs, job: job}
	u := r.measure(ctx, func() { r.queue(ctx, []group{g}, batch, accepted) })
	return round2(float64(u.redis.memory) / jobs)
}

// queue submits groups whose jobs may not start for an hour, and waits until accepted says that all
// their jobs are accepted, and the ingest stream is empty.
func (r *run) queue(ctx context.Context, groups []group, batch int, accepted func(context.Context, group) int) {
	later := time.Now().Add(time.Hour).UTC().Format(time.RFC3339)
	for i := range groups {
		groups[i].fields = values{"run_at": later}
	}
	check(r.create(ctx, groups, 0))
	check(r.fill(ctx, groups, batch))
	check(r.await(ctx, "queued jobs", pollInterval, func() (int, error) {
		unread, err := r.conn.Cmd.XLen(ctx, r.space.Ingest()).Result()
		left := int(unread)
		for _, g := range groups {
			left += g.jobs - accepted(ctx, g)
		}
		return left, err
	}))
}

// Latency shows how long a job waits on a system with little load. Each job is a group of its own.
// The time of its acceptance is stored by Redis in whole ms, rounded down, so the real wait is up
// to 1 ms shorter. All other times are in µs.
type Latency struct {
	Quantiles        // from accepted to started
	Rate      int    `json:"rate"`
	Jobs      int    `json:"jobs"`
	Workload  string `json:"workload"`
	// PublishedStarted has the times from the moment at which the job was due to be published until
	// it started: a delay in the producer counts. PublishedFinished has those until a listener has
	// read the event that the group is COMPLETED.
	PublishedStarted  Quantiles         `json:"published_to_started"`
	PublishedFinished Quantiles         `json:"published_to_finished"`
	Overrides         map[string]string `json:"overrides"`
}

var latencyBenchmark = benchmark{
	"latency", "Single jobs at a steady rate: time from accepted to started",
	func(f *flags) runner {
		var rate, seconds int
		f.int(&rate, "rate", 100, 1, 10_000, "jobs a second")
		f.int(&seconds, "seconds", 30, 1, 0, "duration of the measurement")
		f.aof()
		f.redis()
		return func(ctx context.Context, o options) (any, error) { return runLatency(ctx, o, rate, seconds), nil }
	},
}

// runLatency sends single jobs at a steady rate, which does not fall when earlier jobs are slow.
func runLatency(ctx context.Context, o options, rate, seconds int) Latency {
	out := Latency{Rate: rate, Jobs: rate * seconds, Workload: "groups of one job, a message each, of one tenant"}
	r := start(ctx, o, true, noGlobalLimit)
	defer r.close()
	out.Overrides = r.overrides
	r.sendSingles(ctx, "", "-warm", rate, min(rate, warmJobs))
	ends := must(r.listenForEnds(ctx, 0))
	defer ends.close()
	groups, due := r.sendSingles(ctx, "jobs", "-single", rate, out.Jobs)
	completed := must(ends.awaitCompleted(ctx, groups))
	r.readJournals()
	if out.compute(groups, due, completed, r.log); out.PublishedStarted == (Quantiles{}) {
		check(errNoStarts)
	}
	return out
}

// compute computes the figures of l. due has, for each group, the time at which its job was due to
// be published, in µs by Redis's clock.
func (l *Latency) compute(groups []group, due []int64, completed []groupEnd, log journalLog) {
	started := log.firstStarts()
	var accepted, published, ends []float64
	for i, g := range groups {
		if at, ok := started[g.id]; ok {
			accepted = append(accepted, completed[i].msUntil(at))
			published = append(published, float64(at-due[i])/1000)
		}
		ends = append(ends, float64(completed[i].readAt-due[i])/1000)
	}
	l.Quantiles = quantilesOf(accepted)
	l.PublishedStarted, l.PublishedFinished = quantilesOf(published), quantilesOf(ends)
}

// sendSingles sends n groups of one job at a steady rate and waits until they are done. It returns
// the groups, and the time at which each was due to be published, in µs by Redis's clock.
func (r *run) sendSingles(ctx context.Context, part, suffix string, rate, n int) ([]group, []int64) {
	offset := must(r.clockOffset(ctx))
	groups, dues := smallGroups(r.name+suffix, n, 1, named("single"), nil), make([]int64, n)
	check(pace(ctx, rate, n, func(ctx context.Context, i int, due time.Time) error {
		dues[i] = due.Add(offset).UnixMicro()
		if i%paceSenders == 0 {
			r.options.show(part, i, n)
		}
		return r.publishSingle(ctx, groups[i], 0)
	}))
	check(r.follow("", groups).wait(ctx))
	return groups, dues
}

// performance measures the throughput of the system on one machine, and what each feature costs.
type performance struct {
	options
	base   ThroughputLoad
	rounds int
}

// performanceVariants has, for each variant, what it changes of the base run.
var performanceVariants = []struct {
	name   string
	change func(*ThroughputLoad)
}{
	{"aof", func(l *ThroughputLoad) { l.AOF = true }},
	{"limits", func(l *ThroughputLoad) { l.Tenants, l.Limits = 1000, true }},
	{"retries", func(l *ThroughputLoad) { l.FailPercent = 1 }},
	{"tracing", func(l *ThroughputLoad) { l.Sampling = 0.01 }},
	{"singles", func(l *ThroughputLoad) { l.MessagesJobs = 1 }},
}

var performanceBenchmark = benchmark{
	"performance", "All figures of docs/performance.md; takes more than ten minutes",
	func(f *flags) runner {
		quick := f.Bool("quick", false, "fewer jobs, and one round unless --rounds is given")
		p := &performance{}
		f.int(&p.rounds, "rounds", 3, 1, 0, "measurements of the base and of each variant, in turn; medians are shown")
		// 400,000 jobs take at least 5 s, so the slower beginning of a run hardly changes its speed.
		jobs, big, seconds := 400_000, 1_000_000, 30
		variants := values{}
		all := []part{{"base", func(ctx context.Context) values { return values{"base": p.measureBase(ctx)} }}}
		for _, v := range performanceVariants {
			all = append(all, part{v.name, func(ctx context.Context) values {
				variants[v.name] = p.runInTurn(ctx, v.change)
				return values{"variants": variants}
			}})
		}
		parts := f.parts(append(all,
			part{"latency", func(ctx context.Context) values {
				return values{"latency": runLatency(ctx, p.options, 100, seconds)}
			}},
			part{"big", func(ctx context.Context) values { return values{"big": runBigGroup(ctx, p.options, big, 200)} }})...)
		return func(ctx context.Context, o options) (any, error) {
			if p.options = o; *quick {
				jobs, big, seconds = 50_000, 200_000, 10
				if !f.given("rounds") {
					p.rounds = 1
				}
			}
			p.base = ThroughputLoad{
				Jobs: jobs, Tenants: 10, Groups: 1, MessagesJobs: perMessage, PayloadBytes: 200, Partitions: 1,
				brief: true,
			}
			out, err := runParts(ctx, o, parts(), false)
			return out.with(values{"quick": *quick, "rounds": p.rounds, "cpus": runtime.NumCPU()}), err
		}
	},
}

func (p *performance) measureBase(ctx context.Context) Throughput {
	base := p.base
	base.brief, base.ceiling = false, true
	runs, ratios, redis := make([]Throughput, p.rounds), make([]float64, p.rounds), make([]float64, p.rounds)
	for i := range runs {
		runs[i] = runThroughput(ctx, p.options, base)
		ratios[i], redis[i] = runs[i].CeilingRatio, runs[i].RedisCeilingRatio
	}
	// The ratio of a round compares its run with the ceiling measured just before and after it.
	out := medianBySpeed(runs)
	out.CeilingRatio, out.RedisCeilingRatio = percentile(ratios, 50), percentile(redis, 50)
	return out
}

// runInTurn runs the base load and a variant of it alternately. Ratios are those of the variant to
// the base; a ratio is the median of the rounds' ratios, a run the round with the median speed.
func (p *performance) runInTurn(ctx context.Context, change func(*ThroughputLoad)) values {
	varied := p.base
	change(&varied)
	bases, runs := make([]Throughput, p.rounds), make([]Throughput, p.rounds)
	speed, cpu := make([]float64, p.rounds), make([]float64, p.rounds)
	for i := range p.rounds {
		bases[i], runs[i] = runThroughput(ctx, p.options, p.base), runThroughput(ctx, p.options, varied)
		speed[i], cpu[i] = ratio(runs[i].JobsPerSecond, bases[i].JobsPerSecond), ratio(runs[i].CPUPerJob, bases[i].CPUPerJob)
	}
	run := medianBySpeed(runs)
	return values{
		"ratio": percentile(speed, 50), "cpu_ratio": percentile(cpu, 50), "ratios": speed,
		"jobs_per_second": run.JobsPerSecond, "run": run, "base": medianBySpeed(bases),
	}
}

// medianBySpeed returns the run with the median speed; of two in the middle, the faster.
func medianBySpeed(runs []Throughput) Throughput {
	sorted := slices.SortedFunc(slices.Values(runs), func(a, b Throughput) int {
		return cmp.Compare(a.JobsPerSecond, b.JobsPerSecond)
	})
	return sorted[len(sorted)/2]
}

var bigBenchmark = benchmark{
	"big", "One large group, uploaded from a file over HTTP: speed, memory, and reading of its results",
	func(f *flags) runner {
		var jobs, payload int
		f.int(&jobs, "jobs", 1_000_000, 10, 0, "jobs of the group")
		f.int(&payload, "payload", 200, 0, 256<<10, "bytes of each job's payload")
		f.aof()
		return func(ctx context.Context, o options) (any, error) { return runBigGroup(ctx, o, jobs, payload), nil }
	},
}

// jobResult is the result of each job of a big group.
const jobResult = `{"cost":2}`

// runBigGroup uploads the jobs of one group from a file over HTTP, while the first of them already
// run; then it reads the results back.
func runBigGroup(ctx context.Context, o options, jobs, payload int) values {
	file := must(os.CreateTemp("", "bulkaction-big-"))
	defer os.Remove(file.Name()) //nolint:errcheck // a temporary file
	defer file.Close()           //nolint:errcheck // it is read to its end
	line := append(encodeJob(payload, `"result":`+jobResult+`,`), '\n')
	for left := jobs; left > 0; left -= 1000 {
		must(file.Write(bytes.Repeat(line, min(left, 1000))))
	}
	must(file.Seek(0, io.SeekStart))
	r := startWithAPI(ctx, o, false, nil, noGlobalLimit)
	defer r.close()
	r.warmUp(ctx, failingJobs(payload, 0), perMessage)
	g := group{id: r.name, tenant: "big", jobs: jobs}
	f := r.follow("jobs", []group{g})
	var began time.Time
	var uploaded time.Duration
	u := r.measure(ctx, func() {
		began = must(r.now(ctx))
		cost := []map[string]string{{"as": "cost", "op": "sum", "field": "data.cost"}}
		must(r.api.SubmitJSON(ctx, must(g.submission(values{"aggregate": cost}))))
		check(f.waitBeside(ctx, func(ctx context.Context) error {
			from := time.Now()
			appended, err := r.api.AppendNDJSON(ctx, r.name, file)
			if err == nil && int(appended.Accepted) != jobs {
				err = fmt.Errorf("upload the file: %d jobs were accepted of %d", appended.Accepted, jobs)
			}
			if uploaded = time.Since(from); err == nil {
				_, err = r.api.Seal(ctx, r.name, nil)
			}
			return err
		}))
	})
	results, reading := 0, time.Now()
	for result, err := range r.api.Results(ctx, r.name) {
		if check(err); string(result.Data) == jobResult {
			results++
		}
	}
	peaks := r.peaks()
	largest := maps.Clone(peaks)
	delete(largest, redisRole)
	elapsed := f.end.Sub(began)
	first, last := tenthSpeeds(f.samples, jobs)
	return values{
		"jobs": jobs, "payload_bytes": payload, "file_mb": round2(float64(len(line)) * float64(jobs) / (1 << 20)),
		"upload_seconds": round4(uploaded.Seconds()),
		// from the first request until the group was COMPLETED, by Redis's clock
		"elapsed_seconds": round4(elapsed.Seconds()), "jobs_per_second": math.Round(float64(jobs) / elapsed.Seconds()),
		"first_tenth_jobs_per_second": first, "last_tenth_jobs_per_second": last, "steady_ratio": ratio(last, first),
		"peak_rss_mb_by_role": peaks, "peak_rss_mb": slices.Max(slices.Collect(maps.Values(largest))), // without Redis
		// results that were read back with the value that their jobs returned
		"results": results, "missing_results": jobs - results, "results_seconds": round4(time.Since(reading).Seconds()),
		"process_cpu_us_per_job": perJob(u.processCPU(), jobs), "redis_cpu_us_per_job": perJob(u.redis.cpu, jobs),
		"overrides": r.overrides,
	}
}
