package bench

import (
	"context"
	"fmt"
	"path/filepath"
	"runtime"
	"slices"
	"time"

	"github.com/bulkaction/bulkaction/bench/measure"
	"github.com/bulkaction/bulkaction/client"
)

// CompareOptions say which two programs are compared and how thoroughly. Options.Role starts the
// program called "head", Base the one called "base".
type CompareOptions struct {
	Options
	Base     []string // command that starts a role of the base program; see Options.Role
	Only     []string // names of variants; empty: all
	Rounds   int      // measurements of each variant with each program
	Jobs     int      // jobs of a run that measures throughput
	HTTPJobs int      // jobs of such a run in the variants in which each job is a request
	Rate     int      // jobs a second while latency is measured
	Seconds  int      // how many seconds latency is measured
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
		ratios[i] = measure.Ratio(f.HeadRuns[i], f.BaseRuns[i])
	}
	return slices.Min(ratios), slices.Max(ratios)
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
)

var comparedFigureNames = []string{
	figureSpeed, figureRedisCPU, figureRoleCPU, figureCommands, figureP50, figureP99, figureMemory,
}

// compareVariant is a workload. The base variant has 10 tenants; the field what of each other one
// says how it differs from base, or from the variant http.
type compareVariant struct {
	name, what string
	tenants    int
	limits     bool               // each tenant has a limit of its own; it is counted but never reached
	retries    bool               // 1% of the jobs fail once
	aggregate  []client.Aggregate // aggregates that each group asks for
	http       bool               // each job is a group of its own, submitted by one HTTP request
	keys       bool               // the API of head asks for a key, that of base does not
	memory     bool               // also measure the memory of a queued job
}

var compareVariants = []compareVariant{
	{name: "base", what: "10 tenants, a group each, 500 jobs a message", tenants: 10, memory: true},
	{
		name: "tenants", what: "1,000 tenants, each at a limit of its own that is not reached",
		tenants: 1000, limits: true,
	},
	{name: "retries", what: "1% of the jobs fail once and are retried after 1 ms", tenants: 10, retries: true},
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
	{
		name: "keys", what: "as http; the API of head asks for a key, and that of base does not",
		tenants: 10, http: true, keys: true,
	},
}

// CompareVariants returns the names of all variants.
func CompareVariants() []string {
	names := make([]string, len(compareVariants))
	for i, v := range compareVariants {
		names[i] = v.name
	}
	return names
}

// roundFigures has what one program measured in one round for one variant, by the names of the
// figures.
type roundFigures map[string]float64

// RunCompare runs the chosen variants, o.Rounds times, each with one program and then the other.
// The first error ends it. It then returns the figures of all rounds of a variant that both
// programs completed: the last variants may have a round less, or be missing.
func RunCompare(ctx context.Context, o CompareOptions) (Comparison, error) {
	chosen := slices.DeleteFunc(slices.Clone(compareVariants), func(v compareVariant) bool {
		return len(o.Only) > 0 && !slices.Contains(o.Only, v.name)
	})
	programs := [2][]string{o.Base, o.Role}
	names := [2]string{filepath.Base(o.Base[0]), filepath.Base(o.Role[0])}
	measured := make([][2][]roundFigures, len(chosen))
	var err error
	done := 0
	for round := 0; round < o.Rounds && err == nil; round++ {
		for i := 0; i < len(chosen) && err == nil; i++ {
			var both [2]roundFigures
			for turn := range programs {
				side := (round + turn) % 2 // the programs take turns in being the first
				part := fmt.Sprintf("round %d of %d, %s, %s", round+1, o.Rounds, chosen[i].name, names[side])
				o.progress(part, done, 2*o.Rounds*len(chosen))
				v := chosen[i]
				v.keys = v.keys && side == 1
				if both[side], err = o.measure(ctx, programs[side], v); err != nil {
					err = fmt.Errorf("%s: %w", part, err)
					break
				}
				done++
			}
			if err == nil {
				for side := range both {
					measured[i][side] = append(measured[i][side], both[side])
				}
			}
		}
	}
	out := Comparison{
		Base: names[0], Head: names[1], CPUs: runtime.NumCPU(), Rounds: o.Rounds, Rate: o.Rate, Seconds: o.Seconds,
	}
	for i, v := range chosen {
		if len(measured[i][0]) > 0 {
			out.Variants = append(out.Variants, ComparedVariant{v.name, v.what, o.jobs(v), computeMedians(measured[i])})
		}
	}
	return out, err
}

// jobs returns the number of jobs of the run that measures the throughput of variant v.
func (o *CompareOptions) jobs(v compareVariant) int {
	if v.http {
		return o.HTTPJobs
	}
	return o.Jobs
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
		f.Base, f.Head = measure.Median(f.BaseRuns), measure.Median(f.HeadRuns)
		f.Ratio = measure.Ratio(f.Head, f.Base)
		out = append(out, f)
	}
	return out
}

// measure runs a variant once with one program. Latency and memory are measured on a second fleet,
// because the journals that are needed for latency cost CPU.
func (o *CompareOptions) measure(ctx context.Context, role []string, v compareVariant) (roundFigures, error) {
	out := roundFigures{}
	if err := o.measureThroughput(ctx, role, v, out); err != nil {
		return nil, fmt.Errorf("measure throughput: %w", err)
	}
	if err := o.measureLatency(ctx, role, v, out); err != nil {
		return nil, fmt.Errorf("measure latency: %w", err)
	}
	return out, nil
}

func (o *CompareOptions) measureThroughput(
	ctx context.Context, role []string, v compareVariant, out roundFigures,
) error {
	c, err := o.start(ctx, role, v, false)
	if err != nil {
		return err
	}
	defer c.close()
	jobs := o.jobs(v)
	var began time.Time
	var ends []groupEnd
	u, err := c.measure(ctx, func() error {
		if began, err = c.now(ctx); err != nil {
			return err
		}
		ends, err = c.send(ctx, "", jobs)
		return err
	})
	if err != nil {
		return err
	}
	delete(u.roles, producerRole)
	out[figureSpeed] = measure.Round2(float64(jobs) / lastCompleted(ends).Sub(began).Seconds())
	out[figureRedisCPU] = measure.PerJob(u.redisTotal().CPU, jobs)
	out[figureRoleCPU] = measure.PerJob(u.processCPU(), jobs)
	out[figureCommands] = measure.Round4(float64(u.redisTotal().Commands) / float64(jobs))
	return c.stop()
}

// lastCompleted returns the time at which the last of the groups was completed, by Redis's clock;
// the zero time if none was.
func lastCompleted(ends []groupEnd) time.Time {
	var last time.Time
	for _, e := range ends {
		if at := e.group.Timestamps["completed"]; at.After(last) {
			last = at
		}
	}
	return last
}

func (o *CompareOptions) measureLatency(
	ctx context.Context, role []string, v compareVariant, out roundFigures,
) error {
	c, err := o.start(ctx, role, v, true)
	if err != nil {
		return err
	}
	defer c.close()
	ends, err := c.sendPaced(ctx, o.Rate, o.Rate*o.Seconds)
	if err != nil {
		return err
	}
	if v.memory {
		if out[figureMemory], err = c.queuedBytes(ctx, c.job, perMessage, c.accepted); err != nil {
			return err
		}
	}
	if err := c.readJournals(); err != nil {
		return err
	}
	started := firstStarts(c.log)
	waits := make([]float64, len(ends))
	for i, e := range ends {
		at, ok := started[e.group.ID]
		if !ok {
			return fmt.Errorf("group %s has ended without a start: %w", e.group.ID, errNoStarts)
		}
		waits[i] = e.msUntil(at)
	}
	q := quantilesOf(waits)
	out[figureP50], out[figureP99] = q.P50MS, q.P99MS
	return nil
}
