package bench

import (
	"context"
	"fmt"
	"runtime"
	"slices"

	"github.com/bulkaction/bulkaction/bench/measure"
)

// PerformanceOptions say how thorough the measurement is.
type PerformanceOptions struct {
	Options
	Quick  bool     // fewer jobs, and a shorter measurement of latency
	Rounds int      // measurements of the base and of each variant
	Only   []string // names of parts, see PerformanceParts; empty: all
}

// Performance has the throughput of the system on one machine, and what each feature costs.
type Performance struct {
	Quick    bool                       `json:"quick"`
	Rounds   int                        `json:"rounds"`
	CPUs     int                        `json:"cpus"`
	Base     *Throughput                `json:"base,omitempty"` // round of median speed; median ceiling ratios
	Variants map[string]MeasuredVariant `json:"variants,omitempty"`
	Latency  *Latency                   `json:"latency,omitempty"`
	Big      *BigGroup                  `json:"big,omitempty"`
}

// MeasuredVariant compares a variant with the base load. Runs of both alternate: base, variant,
// base, variant, …
type MeasuredVariant struct {
	// Ratio is the speed of the variant / the speed of the base; the median of the rounds.
	Ratio float64 `json:"ratio"`
	// CPURatio is the CPU time per job of the variant / that of the base; the median of the rounds.
	// It counts Redis and all other processes.
	CPURatio      float64    `json:"cpu_ratio"`
	JobsPerSecond float64    `json:"jobs_per_second"` // of the variant; median of the rounds
	Run           Throughput `json:"run" text:"-"`    // the round with the median speed
	Base          Throughput `json:"base" text:"-"`   // the base's round with the median speed
	Ratios        []float64  `json:"ratios"`          // ratio of the speeds in each round
}

// performanceVariants has, for each variant, what it changes of the base run.
var performanceVariants = []struct {
	name   string // selects it on the command line
	change func(*ThroughputOptions)
}{
	{"aof", func(o *ThroughputOptions) { o.AOF = true }},
	{"limits", func(o *ThroughputOptions) { o.Tenants, o.Limits = 1000, true }},
	{"retries", func(o *ThroughputOptions) { o.FailPercent = 1 }},
	{"tracing", func(o *ThroughputOptions) { o.Sampling = 0.01 }},
	{"singles", func(o *ThroughputOptions) { o.Batch = 1 }},
}

// PerformanceParts returns the names of the parts of the benchmark, which PerformanceOptions.Only
// can choose.
func PerformanceParts() []string {
	parts := []string{"base"}
	for _, v := range performanceVariants {
		parts = append(parts, v.name)
	}
	return append(parts, "latency", "big")
}

// RunPerformance measures the chosen parts one after the other, each on fleets of its own. The
// first error ends it; the parts that were measured before are returned.
func RunPerformance(ctx context.Context, o PerformanceOptions) (Performance, error) {
	out := Performance{Quick: o.Quick, Rounds: o.Rounds, CPUs: runtime.NumCPU(), Variants: map[string]MeasuredVariant{}}
	// 400,000 jobs take at least 5 s, so the slower beginning of a run hardly changes its speed.
	jobs, big, seconds := 400_000, 1_000_000, 30
	if o.Quick {
		jobs, big, seconds = 50_000, 200_000, 10
	}
	base := ThroughputOptions{Options: o.Options, Jobs: jobs, Tenants: 10, Batch: perMessage, Payload: 200, Brief: true}
	for _, part := range PerformanceParts() {
		if len(o.Only) > 0 && !slices.Contains(o.Only, part) {
			continue
		}
		var err error
		switch part {
		case "base":
			out.Base, err = o.measureBase(ctx, base)
		case "latency":
			out.Latency, err = measured(RunLatency(ctx, LatencyOptions{
				Options: o.Options.named(part), Rate: 100, Seconds: seconds,
			}))
		case "big":
			out.Big, err = measured(RunBigGroup(ctx, BigGroupOptions{
				Options: o.Options.named(part), Jobs: big, Payload: 200,
			}))
		default:
			err = o.runInTurn(ctx, base, part, out.Variants)
		}
		if err != nil {
			return out, fmt.Errorf("%s: %w", part, err)
		}
	}
	return out, nil
}

// measured returns a pointer to the result of a benchmark, or nil and the error if there is one.
func measured[T any](result T, err error) (*T, error) {
	if err != nil {
		return nil, err
	}
	return &result, nil
}

// named returns a copy of o whose Progress always gets this name, in place of the names of the
// parts.
func (o Options) named(name string) Options {
	whole := o
	o.Progress = func(_ string, done, total int64) { whole.progress(name, int(done), int(total)) }
	return o
}

func (o PerformanceOptions) measureBase(ctx context.Context, base ThroughputOptions) (*Throughput, error) {
	base.Options, base.Brief, base.Ceiling = o.Options.named("base"), false, true
	runs, ratios, redis := make([]Throughput, o.Rounds), make([]float64, o.Rounds), make([]float64, o.Rounds)
	for i := range runs {
		var err error
		if runs[i], err = RunThroughput(ctx, base); err != nil {
			return nil, err
		}
		ratios[i], redis[i] = runs[i].CeilingRatio, runs[i].RedisCeilingRatio
	}
	out := medianBySpeed(runs)
	// These are the medians of the rounds. The ratio of a round compares its run with the ceiling
	// measured just before and after it.
	out.CeilingRatio, out.RedisCeilingRatio = measure.Percentile(ratios, 50), measure.Percentile(redis, 50)
	return out, nil
}

// runInTurn runs the base load and the variant of this name alternately, o.Rounds times each, and
// adds the comparison to variants.
func (o PerformanceOptions) runInTurn(
	ctx context.Context, base ThroughputOptions, name string, variants map[string]MeasuredVariant,
) error {
	varied := base
	base.Options, varied.Options = o.Options.named("base of "+name), o.Options.named(name)
	for _, v := range performanceVariants {
		if v.name == name {
			v.change(&varied)
		}
	}
	var bases, runs []Throughput
	var out MeasuredVariant
	var cpu []float64
	for range o.Rounds {
		b, err := RunThroughput(ctx, base)
		if err != nil {
			return err
		}
		r, err := RunThroughput(ctx, varied)
		if err != nil {
			return err
		}
		bases, runs = append(bases, b), append(runs, r)
		out.Ratios = append(out.Ratios, measure.Ratio(r.JobsPerSecond, b.JobsPerSecond))
		cpu = append(cpu, measure.Ratio(r.CPUPerJob, b.CPUPerJob))
	}
	out.Ratio, out.CPURatio = measure.Percentile(out.Ratios, 50), measure.Percentile(cpu, 50)
	out.Run, out.Base = *medianBySpeed(runs), *medianBySpeed(bases)
	out.JobsPerSecond = out.Run.JobsPerSecond
	variants[name] = out
	return nil
}

// medianBySpeed returns the run with the median speed; of two in the middle, the faster.
func medianBySpeed(runs []Throughput) *Throughput {
	sorted := slices.SortedFunc(slices.Values(runs), func(a, b Throughput) int {
		return int(a.JobsPerSecond - b.JobsPerSecond)
	})
	return &sorted[len(sorted)/2]
}
