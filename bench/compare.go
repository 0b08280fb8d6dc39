package main

import (
	"cmp"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"net/http"
	"os"
	"path/filepath"
	"runtime"
	"slices"
	"strconv"
	"strings"
	"time"

	"golang.org/x/sync/errgroup"

	"github.com/bulkaction/bulkaction/api"
	"github.com/bulkaction/bulkaction/client"
	"github.com/bulkaction/bulkaction/internal/redisx"
)

// compareOptions say which two programs are compared and how thoroughly. options.program is the one
// called "head".
type compareOptions struct {
	options
	base     string   // the other program
	chosen   []string // names of variants; empty: all
	rounds   int      // measurements of each variant with each program
	jobs     int      // jobs of a run that measures throughput
	httpJobs int      // jobs of such a run in the variant http
	groups   int      // groups of such a run in the variants single and small
	lone     int      // jobs that run alone on an idle system, in the variant single
	expire   bool     // also measure how the ended groups of the variants single and small are deleted
	rate     int      // jobs a second while latency is measured
	seconds  int      // how many seconds latency is measured
}

var compareBenchmark = benchmark{
	"compare", "PROGRAM: compare the head with another build, which may be older, under the same workload",
	func(f *flags) runner {
		var c compareOptions
		f.takes = "PROGRAM"
		f.int(&c.rounds, "rounds", 5, 1, 0, "runs of each variant with each program; medians are shown")
		f.int(&c.jobs, "jobs", 300_000, 1000, 0, "jobs of each run that measures throughput")
		f.int(&c.httpJobs, "http-jobs", 10_000, 100, 0, "the same for the variant http, in which each job is a request")
		f.int(&c.groups, "groups", 20_000, 100, 0, "groups of each such run of the variants single and small")
		f.int(&c.lone, "lone", 100, 1, 0, "jobs of the variant single that run one at a time, on an idle system")
		f.BoolVar(&c.expire, "expire", false, "also let the ended groups of these variants expire, all at once")
		f.int(&c.rate, "rate", 100, 1, 0, "single jobs a second while latency is measured")
		f.int(&c.seconds, "seconds", 5, 1, 0, "duration of each run that measures latency")
		file := f.String("out", "", "file to which the JSON is written, with the figures of each round")
		f.only(compareVariantNames())
		return func(ctx context.Context, o options) (any, error) {
			c.options, c.base, c.chosen = o, f.argument, f.chosen
			if _, err := os.Stat(c.base); err != nil {
				return nil, usageError("find the other program: " + err.Error())
			}
			var result Comparison
			err := attempt("", func() { c.run(ctx, &result) }) // complete rounds are shown also if a later round failed
			if *file != "" {
				check(os.WriteFile(*file, append(must(json.MarshalIndent(result, "", "  ")), '\n'), 0o644))
			}
			return result, err
		}
	},
}

// Comparison shows what two programs cost under the same workload, which the same load generator
// makes for both.
type Comparison struct {
	Base     string            `json:"base"` // name of the base program's file
	Head     string            `json:"head"`
	CPUs     int               `json:"cpus"`
	Rounds   int               `json:"rounds"`
	Rate     int               `json:"latency_rate"`
	Seconds  int               `json:"latency_seconds"` // how long latency is measured in a round
	Variants []ComparedVariant `json:"variants"`
}

// ComparedVariant has the figures of one variant.
type ComparedVariant struct {
	Name    string           `json:"name"`
	What    string           `json:"what"`
	Jobs    int              `json:"jobs"` // of a run that measures throughput
	Figures []ComparedFigure `json:"figures"`
}

// ComparedFigure has one figure of both programs: the medians over all rounds, and the value of
// each round.
type ComparedFigure struct {
	Name     string    `json:"name"`
	Base     float64   `json:"base"`
	Head     float64   `json:"head"`
	Ratio    float64   `json:"ratio"`     // head / base
	BaseRuns []float64 `json:"base_runs"` // one value a round; HeadRuns too
	HeadRuns []float64 `json:"head_runs"`
}

// Range returns the smallest and the largest of all rounds' ratios head / base.
func (f ComparedFigure) Range() (least, most float64) {
	ratios := make([]float64, len(f.BaseRuns))
	for i := range ratios {
		ratios[i] = ratio(f.HeadRuns[i], f.BaseRuns[i])
	}
	return slices.Min(ratios), slices.Max(ratios)
}

// show prints a row for each figure of each variant.
func (c Comparison) show(out io.Writer) {
	fmt.Fprintf(out, "variant\tfigure\t%s\t%s\tratio\tratios of rounds\n", c.Base, c.Head)
	for _, v := range c.Variants {
		for _, f := range v.Figures {
			least, most := f.Range()
			fmt.Fprintf(out, "%s\t%s\t%.2f\t%.2f\t%.3f\t%.3f to %.3f\n", v.Name, f.Name, f.Base, f.Head, f.Ratio, least, most)
		}
	}
}

// Names of the figures, in the order in which they are shown.
const (
	figureSpeed    = "jobs_per_second"
	figureRedisCPU = "redis_cpu_us_per_job"
	figureRoleCPU  = "roles_cpu_us_per_job" // the roles' processes, without this one
	figureCommands = "redis_commands_per_job"
	figureP50      = "p50_ms" // from accepted to started, as in Latency
	figureP99      = "p99_ms"
	figureMemory   = "redis_bytes_per_queued_job"

	// What a retried or traced job costs beyond a plain one.
	figureBeyondRedis    = "redis_cpu_us_beyond_plain"
	figureBeyondRoles    = "roles_cpu_us_beyond_plain"
	figureBeyondCommands = "redis_commands_beyond_plain"

	// Those of the variants single and small; redis_ includes the producer's XADD of the group.
	figureGroupSpeed    = "groups_per_second" // until the last COMPLETED event was published
	figureGroupRedisCPU = "redis_cpu_us_per_group"
	figureGroupRoleCPU  = "roles_cpu_us_per_group"
	figureGroupCommands = "redis_commands_per_group"
	figureGroupMemory   = "redis_bytes_per_ended_group" // without the stream events
	// figureCeiling is the speed / that of the group ceiling, measured after the run on the same Redis.
	figureCeiling = "ceiling_ratio"
	// From accepted to the COMPLETED event, under this load and of a lone job on an idle system, in
	// whole ms.
	figureEndedP50 = "ended_p50_ms"
	figureEndedP99 = "ended_p99_ms"
	figureLoneP50  = "lone_ended_p50_ms"
	figureLoneP99  = "lone_ended_p99_ms"
	// The slowest script while all groups expire (0: under 1 ms), and Redis's CPU for it.
	figureExpireSlowest = "expire_slowest_script_ms"
	figureExpireCPU     = "expire_redis_cpu_us_per_group"
)

// figuresBeyond has the names of figures of costs beyond a plain job, by those of the costs of a job.
var figuresBeyond = map[string]string{
	figureRedisCPU: figureBeyondRedis, figureRoleCPU: figureBeyondRoles, figureCommands: figureBeyondCommands,
}

var comparedFigureNames = []string{
	figureSpeed, figureRedisCPU, figureRoleCPU, figureCommands, figureBeyondRedis, figureBeyondRoles, figureBeyondCommands,
	figureP50, figureP99, figureMemory,
	figureGroupSpeed, figureGroupRedisCPU, figureGroupRoleCPU, figureGroupCommands, figureGroupMemory, figureCeiling,
	figureEndedP50, figureEndedP99, figureLoneP50, figureLoneP99, figureExpireSlowest, figureExpireCPU,
}

// compareVariant is a workload. The base variant has 10 tenants; the field what of each other one
// says how it differs from base, or from the variant http.
type compareVariant struct {
	name, what string
	tenants    int
	limits     bool               // each tenant has a limit of its own; it is counted but never reached
	retries    int                // one of so many jobs fails once; 0: none
	sampling   float64            // the part of the jobs that is traced
	aggregate  []client.Aggregate // aggregates that each group asks for
	http       bool               // each job is a group of its own, submitted by one HTTP request
	memory     bool               // also measure the memory of a queued job
	payload    int                // bytes of each payload; 0: comparePayload
	size       int                // jobs of each group, which is one group.submit message; 0: large groups
}

var compareVariants = []compareVariant{
	{name: "base", what: "10 tenants, a group each, 500 jobs a message", tenants: 10, memory: true},
	{
		name: "tenants", what: "1,000 tenants, each at a limit of its own that is not reached",
		tenants: 1000, limits: true,
	},
	{name: "retries", what: "1% of the jobs fail once and are retried after 1 ms", tenants: 10, retries: 100},
	{name: "retried", what: "20% of the jobs fail once and are retried after 1 ms", tenants: 10, retries: 5},
	{name: "traced", what: "20% of the jobs are traced", tenants: 10, sampling: 0.2},
	{
		name: "aggregates", what: "each group asks for a sum and a distribution", tenants: 10,
		aggregate: []client.Aggregate{
			{As: aggregateSum, Op: "sum", Field: "data.cost"},
			{As: aggregateSpread, Op: "distribution", Field: "data.cost"},
		},
	},
	{
		name: "http", what: "one job a request: POST /v1/groups, each job a group of its own",
		tenants: 10, http: true,
	},
	{name: "single", what: "1,000 tenants, groups of 1 job, each one message", tenants: 1000, size: 1},
	{name: "small", what: "1,000 tenants, groups of 5 jobs, each one message", tenants: 1000, size: 5},
}

// share returns the part of the jobs that costs more than a plain job; 0: that is not measured.
func (v compareVariant) share() float64 {
	if v.retries > 0 {
		return 1 / float64(v.retries)
	}
	return v.sampling
}

func compareVariantNames() []string {
	names := make([]string, len(compareVariants))
	for i, v := range compareVariants {
		names[i] = v.name
	}
	return names
}

// roundFigures has what one program measured in one round for one variant, by the names of the
// figures.
type roundFigures map[string]float64

// run runs the chosen variants, o.rounds times, each with one program and then the other. The first
// error ends it. out then has the figures of all rounds of a variant that both programs completed:
// the last variants may have a round less, or be missing.
func (o *compareOptions) run(ctx context.Context, out *Comparison) {
	chosen := slices.DeleteFunc(slices.Clone(compareVariants), func(v compareVariant) bool {
		return !slices.Contains(o.chosen, v.name)
	})
	programs := [2]string{o.base, o.program}
	names := [2]string{filepath.Base(o.base), filepath.Base(o.program)}
	*out = Comparison{
		Base: names[0], Head: names[1], CPUs: runtime.NumCPU(), Rounds: o.rounds, Rate: o.rate, Seconds: o.seconds,
	}
	measured := make([][2][]roundFigures, len(chosen))
	defer func() {
		for i, v := range chosen {
			if len(measured[i][0]) > 0 {
				out.Variants = append(out.Variants, ComparedVariant{v.name, v.what, o.jobsOf(v), computeMedians(measured[i])})
			}
		}
	}()
	for step := range o.rounds * len(chosen) {
		round, i := step/len(chosen), step%len(chosen)
		var both [2]roundFigures
		for turn := range programs {
			side := (round + turn) % 2 // the programs take turns in being the first
			part := fmt.Sprintf("round %d of %d, %s, %s", round+1, o.rounds, chosen[i].name, names[side])
			o.show(part, 2*step+turn, 2*o.rounds*len(chosen))
			check(attempt(part, func() { both[side] = o.measure(ctx, programs[side], chosen[i]) }))
		}
		for side := range both {
			measured[i][side] = append(measured[i][side], both[side])
		}
	}
}

// jobsOf returns the number of jobs of the run that measures the throughput of variant v.
func (o *compareOptions) jobsOf(v compareVariant) int {
	switch {
	case v.http:
		return o.httpJobs
	case v.size > 0:
		return o.groups * v.size
	}
	return o.jobs
}

// computeMedians computes the medians and ratios of a variant from the rounds of both programs (0:
// base, 1: head). It skips figures that the variant does not measure.
func computeMedians(rounds [2][]roundFigures) []ComparedFigure {
	var out []ComparedFigure
	for _, name := range comparedFigureNames {
		if _, ok := rounds[0][0][name]; !ok {
			continue
		}
		f := ComparedFigure{Name: name}
		for i := range rounds[0] {
			f.BaseRuns = append(f.BaseRuns, rounds[0][i][name])
			f.HeadRuns = append(f.HeadRuns, rounds[1][i][name])
		}
		f.Base, f.Head = median(f.BaseRuns), median(f.HeadRuns)
		f.Ratio = ratio(f.Head, f.Base)
		out = append(out, f)
	}
	return out
}

// measure runs a variant once with one program. Latency and memory are measured on a second fleet,
// because the journals that are needed for latency cost CPU.
func (o *compareOptions) measure(ctx context.Context, program string, v compareVariant) roundFigures {
	out := roundFigures{}
	if v.size > 0 {
		o.measureGroups(ctx, program, v, out)
		return out
	}
	o.measureThroughput(ctx, program, v, out)
	if share := v.share(); share > 0 {
		plain := roundFigures{} // measured just beside it, because machines drift
		o.measureThroughput(ctx, program, compareVariants[0], plain)
		for name, beyond := range figuresBeyond {
			out[beyond] = round2((out[name] - plain[name]) / share)
		}
	}
	o.measureLatency(ctx, program, v, out)
	return out
}

func (o *compareOptions) measureThroughput(ctx context.Context, program string, v compareVariant, out roundFigures) {
	c := o.start(ctx, program, v, false)
	defer c.close()
	jobs := o.jobsOf(v)
	var began time.Time
	var ends []groupEnd
	u := c.measure(ctx, func() {
		began = must(c.now(ctx))
		ends = c.send(ctx, "", jobs)
	})
	delete(u.roles, producerRole)
	out[figureSpeed] = round2(float64(jobs) / lastCompleted(ends).Sub(began).Seconds())
	out[figureRedisCPU] = perJob(u.redis.cpu, jobs)
	out[figureRoleCPU] = perJob(u.processCPU(), jobs)
	out[figureCommands] = round4(float64(u.redis.commands) / float64(jobs))
	check(c.stop())
	if c.sink != nil && c.sink.bytes.Load() == 0 {
		failf("%w: no traces came", errWrongLoad)
	}
}

// measureGroups measures a variant of small groups, with nobody who reads events meanwhile: they are
// counted, and read when all have been published.
func (o *compareOptions) measureGroups(ctx context.Context, program string, v compareVariant, out roundFigures) {
	c := o.start(ctx, program, v, false)
	defer c.close()
	if v.size == 1 && o.lone > 0 {
		q := quantilesOf(c.runAlone(ctx, o.lone))
		out[figureLoneP50], out[figureLoneP99] = q.P50MS, q.P99MS
	}
	c.ends.close()
	groups := c.smallGroups("", o.groups, v.size)
	messages := c.encodeGroups(groups)
	before := c.settledMemory(ctx)
	var began time.Time
	u := c.measure(ctx, func() {
		began = must(c.now(ctx))
		check(c.publishGroups(ctx, messages))
		check(c.await(ctx, "events", followInterval, func() (int, error) {
			n, err := c.conn.Cmd.XLen(ctx, c.space.Events()).Result()
			return max(0, statesOfGroup*len(groups)-int(n)), err
		}))
	})
	delete(u.roles, producerRole)
	c.ends = must(c.listenAfter(ctx, "0", 0))
	ends := c.awaitChecked(ctx, groups, o.jobsOf(v))
	waits, last := make([]float64, len(ends)), began
	for i, e := range ends {
		waits[i] = e.msUntil(e.published.UnixMicro())
		if e.published.After(last) {
			last = e.published
		}
	}
	q, took := quantilesOf(waits), last.Sub(began).Seconds()
	out[figureGroupSpeed], out[figureSpeed] = round2(float64(o.groups)/took), round2(float64(o.jobsOf(v))/took)
	out[figureGroupRedisCPU], out[figureGroupRoleCPU] = perJob(u.redis.cpu, o.groups), perJob(u.processCPU(), o.groups)
	out[figureGroupCommands] = round4(float64(u.redis.commands) / float64(o.groups))
	out[figureGroupMemory] = round2(float64(c.settledMemory(ctx)-before) / float64(o.groups))
	out[figureEndedP50], out[figureEndedP99] = q.P50MS, q.P99MS
	check(c.stop())
	if o.expire {
		c.expireAll(ctx, groups, out)
	}
	out[figureCeiling] = ratio(out[figureGroupSpeed],
		c.measureGroupCeiling(ctx, o.groups, v.size, comparePayload).GroupsPerSecond)
}

// runAlone runs n groups of one job, each after the end of the one before and a pause that differs,
// so that it does not keep step with what the roles do at intervals. It returns the ms from the
// acceptance of each to its COMPLETED event.
func (c *compareRun) runAlone(ctx context.Context, n int) (waits []float64) {
	for i, g := range c.smallGroups("-lone", n, 1) {
		check(redisx.Sleep(ctx, time.Duration(20+7*i%50)*time.Millisecond))
		check(c.publishSingle(ctx, g, i))
		e := c.awaitChecked(ctx, []group{g}, 1)[0]
		waits = append(waits, e.msUntil(e.published.UnixMicro()))
	}
	return waits
}

// expireAll starts the roles again, with a retention that is over for all groups, and waits until the
// groups are deleted. Redis's slow log says how long scripts took.
func (c *compareRun) expireAll(ctx context.Context, groups []group, out roundFigures) {
	const most = 1000 // entries of the slow log
	rdb := c.conn.Cmd
	check(errors.Join(rdb.ConfigSet(ctx, "slowlog-log-slower-than", "1000").Err(), // µs
		rdb.ConfigSet(ctx, "slowlog-max-len", strconv.Itoa(most)).Err(), rdb.Do(ctx, "SLOWLOG", "RESET").Err()))
	c.overrides["BULKACTION_RETENTION_GROUPS"] = "1s"
	c.startRoles(c.options, c.overrides, "")
	check(c.awaitHTTP(ctx, c.apiURL+"/v1/stats"))
	u := c.measure(ctx, func() {
		next := 0 // asks for one of a hundred groups, because each request costs Redis something
		check(c.await(ctx, "groups to expire", followInterval, func() (int, error) {
			for ; next < len(groups); next += 100 {
				if _, err := c.api.Group(ctx, groups[next].id); !errors.Is(err, client.ErrNotFound) {
					return len(groups) - next, err
				}
			}
			return 0, nil
		}))
	})
	check(c.stop())
	for _, slow := range must(rdb.SlowLogGet(ctx, most).Result()) {
		if strings.HasPrefix(slow.Args[0], "eval") || strings.HasPrefix(slow.Args[0], "fcall") {
			out[figureExpireSlowest] = max(out[figureExpireSlowest], millis(slow.Duration))
		}
	}
	out[figureExpireCPU] = perJob(u.redis.cpu, len(groups))
}

// settledMemory empties the stream events and returns the memory that Redis uses then.
func (c *compareRun) settledMemory(ctx context.Context) int64 {
	check(redisx.Sleep(ctx, settleTime))
	check(c.conn.Cmd.XTrimMaxLen(ctx, c.space.Events(), 0).Err())
	return c.use(ctx).redis.memory
}

// encodeGroups returns the data of the group.submit message of each group.
func (c *compareRun) encodeGroups(groups []group) [][]byte {
	out, jobs := make([][]byte, len(groups)), 0
	for i, g := range groups {
		out[i] = must(g.complete(jobs))
		jobs += g.jobs
	}
	return out
}

// publishGroups publishes group.submit messages from several goroutines, as fast as Redis takes them.
func (c *compareRun) publishGroups(ctx context.Context, messages [][]byte) error {
	producers, ctx := errgroup.WithContext(ctx)
	for part := range slices.Chunk(messages, (len(messages)+compareProducers-1)/compareProducers) {
		producers.Go(func() error {
			pipe := c.pipeline()
			for _, data := range part {
				if err := pipe.add(ctx, "group.submit", data); err != nil {
					return err
				}
			}
			return pipe.flush(ctx)
		})
	}
	return producers.Wait()
}

// lastCompleted returns the time at which the last of the groups was completed, by Redis's clock;
// the zero time if none was.
func lastCompleted(ends []groupEnd) (last time.Time) {
	for _, e := range ends {
		if at := e.group.Timestamps["completed"]; at.After(last) {
			last = at
		}
	}
	return last
}

func (o *compareOptions) measureLatency(ctx context.Context, program string, v compareVariant, out roundFigures) {
	c := o.start(ctx, program, v, true)
	defer c.close()
	groups := c.smallGroups("-paced", o.rate*o.seconds, 1)
	check(pace(ctx, o.rate, len(groups), func(ctx context.Context, i int, _ time.Time) error {
		return c.submitSingle(ctx, groups[i], i)
	}))
	ends := c.awaitChecked(ctx, groups, len(groups))
	if v.memory {
		out[figureMemory] = c.queuedBytes(ctx, c.job, perMessage, c.accepted)
	}
	c.readJournals()
	started := c.log.firstStarts()
	waits := make([]float64, len(ends))
	for i, e := range ends {
		at, ok := started[e.group.ID]
		if !ok {
			failf("group %s has ended without a start: %w", e.group.ID, errNoStarts)
		}
		waits[i] = e.msUntil(at)
	}
	q := quantilesOf(waits)
	out[figureP50], out[figureP99] = q.P50MS, q.P99MS
}

// compareRun is a run of one of the compared programs, under one variant. The program may be of
// another revision, with other keys and scripts, so this code relies on contracts: the ingest
// stream, the HTTP API, the events stream and Redis's INFO. It also needs two things that are not
// contracts: the hidden command that runs a role, and the format of the journal.
type compareRun struct {
	*run
	v    compareVariant
	ends *endListener
	job  func(i int) []byte // returns the JSON of job i of the variant
	sink *traceSink         // of the traces; nil: nothing is traced
}

const (
	compareClients   = 32  // concurrent HTTP requests
	compareProducers = 4   // goroutines that publish groups
	comparePayload   = 200 // bytes of each payload
	statesOfGroup    = 5   // events of a group: CREATED, DISPATCHED, RUNNING, AGGREGATING, COMPLETED
	// settleTime is how long the roles get for what they do after the last event of a load.
	settleTime = time.Second
	// eventsPause is the pause between two reads of the events stream: reading more often would
	// cost CPU.
	eventsPause = 50 * time.Millisecond
)

// start starts a fleet with a program, sets the tenants' limits if v has them, listens to events,
// and warms the fleet up.
func (o *compareOptions) start(ctx context.Context, program string, v compareVariant, journals bool) *compareRun {
	of := o.options
	of.program = program
	env := append([]string{noGlobalLimit}, quickRetries...)
	transport := &http.Transport{MaxIdleConnsPerHost: compareClients}
	options := []client.Option{client.WithHTTPClient(&http.Client{Transport: transport})}
	c := &compareRun{v: v, job: v.encodeJobs()}
	if v.sampling > 0 {
		c.sink = startTraceSink()
		env = append(env, c.sink.env(v.sampling)...)
	}
	check(attempt("prepare", func() {
		c.run = startWithAPI(ctx, of, journals, options, env...)
		if v.limits {
			rps := float64(unreachedLimit)
			for i := range v.tenants {
				must(c.api.SetTenant(ctx, v.tenant(i), api.TenantSettings{RPS: &rps}))
			}
		}
		c.ends = must(c.listenForEnds(ctx, eventsPause))
		c.send(ctx, "-warm", min(warmJobs*max(1, v.size), o.jobsOf(v))) // warmJobs groups, if they are small
	}, c.close))
	return c
}

// close stops the fleet and the listener of its events.
func (c *compareRun) close() {
	if c.ends != nil {
		c.ends.close()
	}
	if c.run != nil {
		c.run.close()
	}
	if c.sink != nil {
		c.sink.Close()
	}
}

// tenant names the tenant of the i-th group.
func (v compareVariant) tenant(i int) string { return fmt.Sprintf("tenant-%d", i%v.tenants) }

func (v compareVariant) withFields(groups []group) []group {
	for i := range groups {
		if v.aggregate != nil {
			groups[i].fields = map[string]any{"aggregate": v.aggregate}
		}
	}
	return groups
}

// send submits jobs as fast as possible, and waits until their groups are completed; see
// awaitChecked for its checks.
func (c *compareRun) send(ctx context.Context, suffix string, jobs int) []groupEnd {
	if c.v.size > 0 {
		groups := c.smallGroups(suffix, jobs/c.v.size, c.v.size)
		check(c.publishGroups(ctx, c.encodeGroups(groups)))
		return c.awaitChecked(ctx, groups, jobs)
	}
	if c.v.http {
		groups := c.smallGroups(suffix, jobs, 1)
		all, sending := errgroup.WithContext(ctx)
		all.SetLimit(compareClients)
		for i := range groups {
			all.Go(func() error { return c.submitSingle(sending, groups[i], i) })
		}
		check(all.Wait())
		return c.awaitChecked(ctx, groups, jobs)
	}
	groups := c.v.withFields(divideJobs(c.name+suffix, jobs, c.v.tenants, 1, c.job))
	check(c.create(ctx, groups, 0))
	check(c.fill(ctx, groups, perMessage))
	return c.awaitChecked(ctx, groups, jobs)
}

// smallGroups returns n groups of size jobs each, not submitted yet. The tenants of the variant take
// turns as their owners.
func (c *compareRun) smallGroups(suffix string, n, size int) []group {
	return c.v.withFields(smallGroups(c.name+suffix, n, size, c.v.tenant, c.job))
}

// submitSingle submits a group whose only job is job i of the load, over HTTP or as a message to
// the ingest stream, as the variant says.
func (c *compareRun) submitSingle(ctx context.Context, g group, i int) error {
	if !c.v.http {
		return c.publishSingle(ctx, g, i)
	}
	body, err := g.complete(i)
	if err == nil {
		_, err = c.api.SubmitJSON(ctx, body)
	}
	return err
}

const (
	comparePeriod   = 100 // number of jobs after which the jobs repeat
	aggregateSum    = "cost"
	aggregateSpread = "spread"
)

// encodeJobs returns a function that returns the JSON of the i-th job of the variant. The jobs
// repeat after comparePeriod jobs.
func (v compareVariant) encodeJobs() func(int) []byte {
	jobs := make([][]byte, comparePeriod)
	for i := range jobs {
		fields := ""
		if v.retries > 0 && i%v.retries == v.retries-1 {
			fields = failOnce
		}
		if v.aggregate != nil {
			fields += fmt.Sprintf(`"result":{"cost":%d},`, i+1)
		}
		jobs[i] = encodeJob(cmp.Or(v.payload, comparePayload), fields)
	}
	return func(i int) []byte { return jobs[i%comparePeriod] }
}

// awaitChecked waits until the groups are completed, and checks that they have the jobs, retries
// and aggregates that the variant must produce.
func (c *compareRun) awaitChecked(ctx context.Context, groups []group, jobs int) []groupEnd {
	ends := must(c.ends.awaitCompleted(ctx, groups))
	check(c.v.checkGroups(ends, jobs))
	return ends
}

var errWrongLoad = errors.New("the jobs did something else than the variant asks for")

// checkGroups returns an error unless the ended groups together have the number of done jobs, the
// retries and the aggregates that the variant must produce.
func (v compareVariant) checkGroups(ends []groupEnd, jobs int) error {
	var got, want [4]int64 // jobs done, retries, sum of the values, values in the distributions
	for _, e := range ends {
		got[0] += e.group.Counts.Done
		got[1] += e.group.Retries
		if v.aggregate == nil {
			continue
		}
		var sum float64
		var spread struct {
			Count int64 `json:"count"`
		}
		err := errors.Join(
			json.Unmarshal(e.group.Aggregate[aggregateSum], &sum),
			json.Unmarshal(e.group.Aggregate[aggregateSpread], &spread))
		if err != nil {
			return fmt.Errorf("read aggregate of group %s: %w", e.group.ID, err)
		}
		got[2], got[3] = got[2]+int64(sum), got[3]+spread.Count
	}
	want[0] = int64(jobs)
	if v.retries > 0 {
		want[1] = int64(jobs / v.retries)
	}
	if v.aggregate != nil {
		for i := range jobs {
			want[2] += int64(i%comparePeriod + 1)
		}
		want[3] = int64(jobs)
	}
	if got != want {
		return fmt.Errorf("%w: [jobs done, retries, sum, values] are %v, want %v", errWrongLoad, got, want)
	}
	return nil
}

// accepted returns the number of accepted jobs of a group; 0 if the group can't be read, for
// example because it does not exist yet.
func (c *compareRun) accepted(ctx context.Context, g group) int {
	// An error counts as 0 accepted jobs: the caller asks again until the number is right, and has
	// a time limit.
	shown, _ := c.api.Group(ctx, g.id)
	return int(shown.Counts.Accepted)
}
