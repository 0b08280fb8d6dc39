package bench

import (
	"context"
	"fmt"
	"runtime"
	"slices"
	"strings"
)

// PerformanceOptions say how thorough the measurement is.
type PerformanceOptions struct {
	Options
	Quick  bool     // fewer jobs, and a shorter measurement of latency
	Rounds int      // measurements of the base and of each variant
	Only   []string // names of parts, see PerformanceParts; empty: all
}

// Performance has the throughput of one machine and what each feature costs.
type Performance struct {
	Quick    bool                       `json:"quick"`
	Rounds   int                        `json:"rounds"`
	CPUs     int                        `json:"cpus"`
	Base     *Throughput                `json:"base,omitempty"` // round of median speed; CeilingRatio: median of all
	Variants map[string]MeasuredVariant `json:"variants,omitempty"`
	Latency  *Latency                   `json:"latency,omitempty"`
	Big      *BigGroup                  `json:"big,omitempty"`
}

// MeasuredVariant compares a variant with the base. Both run in turn: base, variant, base, variant,
// …
type MeasuredVariant struct {
	// speed of the variant / speed of the base; median of the rounds
	Ratio float64 `json:"ratio"`
	// the same for the CPU time of a job, of Redis and all processes together
	CPURatio float64    `json:"cpu_ratio"`
	Run      Throughput `json:"run"`    // the round with the median speed
	Base     Throughput `json:"base"`   // the base's round with the median speed
	Ratios   []float64  `json:"ratios"` // ratio of the speeds in each round
}

// performanceVariant changes one option of the base run. Its name selects it on the command line.
type performanceVariant struct {
	name, what string
	least      float64 // goal: at least this part of the base's speed; 0: a goal in jobs a second
	change     func(*ThroughputOptions)
}

var performanceVariants = []performanceVariant{
	{"aof", "AOF everysec", 0.7, func(o *ThroughputOptions) { o.AOF = true }},
	{"limits", "1,000 tenants, each at a limit of its own", 0.8, func(o *ThroughputOptions) {
		o.Tenants, o.Limits = 1000, true
	}},
	{"retries", "1% of the jobs fail once", 0.8, func(o *ThroughputOptions) { o.FailPercent = 1 }},
	{"tracing", "1% of the jobs traced", 0.95, func(o *ThroughputOptions) { o.Sampling = 0.01 }},
	{"singles", "one job a message", 0, func(o *ThroughputOptions) { o.Batch = 1 }},
}

// PerformanceParts returns the names of the parts that can be measured alone.
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
	wants := func(part string) bool { return len(o.Only) == 0 || slices.Contains(o.Only, part) }
	jobs, big, seconds := 100_000, 1_000_000, 30
	if o.Quick {
		jobs, big, seconds = 50_000, 200_000, 10
	}
	fleet := FleetOptions{Role: o.Role, Env: o.Env}
	base := ThroughputOptions{FleetOptions: fleet, Jobs: jobs, Tenants: 10, Batch: perMessage, Payload: 200}
	if wants("base") {
		runs := make([]Throughput, o.Rounds)
		full := base
		full.Ceiling = true
		for i := range runs {
			var err error
			if runs[i], err = RunThroughput(ctx, full, o.progressOf("base", jobs)); err != nil {
				return out, fmt.Errorf("base: %w", err)
			}
		}
		out.Base = medianBySpeed(runs)
		ratios := make([]float64, o.Rounds)
		for i, r := range runs {
			ratios[i] = r.CeilingRatio
		}
		// Each round's ratio compares a run with the ceiling just before and after it.
		out.Base.CeilingRatio = percentile(ratios, 50)
	}
	base.Brief = true
	for _, v := range performanceVariants {
		if !wants(v.name) {
			continue
		}
		result, err := o.runInTurn(ctx, base, v)
		if err != nil {
			return out, fmt.Errorf("%s: %w", v.name, err)
		}
		out.Variants[v.name] = result
	}
	if wants("latency") {
		total := 100 * seconds
		r, err := RunLatency(ctx, LatencyOptions{
			FleetOptions: fleet,
			Rate:         100,
			Seconds:      seconds,
			Progress:     o.progressOf("latency", total),
		})
		if err != nil {
			return out, fmt.Errorf("latency: %w", err)
		}
		out.Latency = &r
	}
	if wants("big") {
		r, err := RunBigGroup(ctx, BigGroupOptions{
			FleetOptions: fleet,
			Jobs:         big,
			Payload:      200,
			Progress:     o.progressOf("big", big),
		})
		if err != nil {
			return out, fmt.Errorf("big: %w", err)
		}
		out.Big = &r
	}
	return out, nil
}

func (o PerformanceOptions) progressOf(name string, total int) func(int) {
	return func(done int) { o.progress(name, int64(done), int64(total)) }
}

// runInTurn runs the base and the variant in turn, o.Rounds times each.
func (o PerformanceOptions) runInTurn(
	ctx context.Context, base ThroughputOptions, v performanceVariant,
) (MeasuredVariant, error) {
	varied := base
	v.change(&varied)
	var bases, runs []Throughput
	var out MeasuredVariant
	var cpu []float64
	for range o.Rounds {
		b, err := RunThroughput(ctx, base, o.progressOf("base of "+v.name, base.Jobs))
		if err != nil {
			return out, err
		}
		r, err := RunThroughput(ctx, varied, o.progressOf(v.name, varied.Jobs))
		if err != nil {
			return out, err
		}
		bases, runs = append(bases, b), append(runs, r)
		out.Ratios = append(out.Ratios, ratio(r.JobsPerSecond, b.JobsPerSecond))
		cpu = append(cpu, ratio(r.totalCPU(), b.totalCPU()))
	}
	out.Ratio, out.CPURatio = percentile(out.Ratios, 50), percentile(cpu, 50)
	out.Run, out.Base = *medianBySpeed(runs), *medianBySpeed(bases)
	return out, nil
}

// totalCPU returns the CPU time of a job, of Redis and all processes together, in µs.
func (t *Throughput) totalCPU() float64 { return t.RedisCPUPerJob + t.ProcessCPUPerJob }

// medianBySpeed returns the run with the median speed; of two in the middle, the faster.
func medianBySpeed(runs []Throughput) *Throughput {
	sorted := slices.SortedFunc(slices.Values(runs), func(a, b Throughput) int {
		return int(a.JobsPerSecond - b.JobsPerSecond)
	})
	return &sorted[len(sorted)/2]
}

// Figure is one line of the table of results: the goal and the measured value.
type Figure struct {
	What, Goal, Measured string
	Reached              bool
}

// Figures returns the lines of all parts that were measured.
func (p Performance) Figures() []Figure {
	var out []Figure
	add := func(reached bool, what, goal, measured string, args ...any) {
		out = append(out, Figure{what, goal, fmt.Sprintf(measured, args...), reached})
	}
	if b := p.Base; b != nil {
		add(b.JobsPerSecond >= 75_000,
			fmt.Sprintf("produced and processed at once, six processes, %d jobs of %d tenants, %d a message",
				b.Jobs, b.Tenants, b.MessagesJobs),
			"≥ 75,000/s", "%.0f/s", b.JobsPerSecond)
		if b.Ceiling != nil {
			add(b.CeilingRatio >= 0.5, "against the least-work ceiling, measured before and after",
				"≥ 0.5 ×", "%.2f × %.0f/s", b.CeilingRatio, b.Ceiling.JobsPerSecond)
		}
		add(b.RedisCPUPerJob <= 8, "CPU of Redis", "≤ 8 µs a job", "%.1f µs", b.RedisCPUPerJob)
		add(b.totalCPU() <= 26, "CPU of Redis and all processes, the producer included",
			"≤ 26 µs a job", "%.1f µs", b.totalCPU())
		if b.BytesPerQueuedJob > 0 {
			add(b.BytesPerQueuedJob <= float64(b.PayloadBytes+120), "Redis memory of a queued job",
				"≤ payload + 120 bytes", "payload + %.0f bytes", b.BytesPerQueuedJob-float64(b.PayloadBytes))
		}
	}
	for _, v := range performanceVariants {
		r, ok := p.Variants[v.name]
		switch {
		case !ok:
		case v.least > 0:
			add(r.Ratio >= v.least, v.what, fmt.Sprintf("≥ %g × the base beside it", v.least),
				"%.2f ×, at %.2f × the CPU", r.Ratio, r.CPURatio)
		default:
			add(r.Run.JobsPerSecond >= 15_000, v.what, "≥ 15,000/s", "%.0f/s", r.Run.JobsPerSecond)
		}
	}
	if l := p.Latency; l != nil {
		add(l.P50MS <= 2 && l.P99MS <= 8, fmt.Sprintf("accepted to started at %d jobs a second", l.Rate),
			"p50 ≤ 2 ms, p99 ≤ 8 ms", "p50 %.1f ms, p99 %.1f ms", l.P50MS, l.P99MS)
	}
	if b := p.Big; b != nil {
		add(b.SteadyRatio >= 0.9, fmt.Sprintf("one group of %d from a file over HTTP: the last tenth's speed",
			b.Jobs), "≥ 0.9 × the first's", "%.2f ×, %.0f/s in all", b.SteadyRatio, b.JobsPerSecond)
		add(b.PeakMB <= 150, "its largest process", "≤ 150 MB", "%.0f MB", b.PeakMB)
		add(b.Results == b.Jobs, "its results, read back as NDJSON", "all", "%d in %.1f s", b.Results, b.ResultsSeconds)
	}
	return out
}

// Markdown returns the figures as a Markdown table.
func Markdown(figures []Figure) string {
	var b strings.Builder
	b.WriteString("| experiment | goal | measured | reached |\n|---|---|---|---|\n")
	for _, f := range figures {
		reached := "yes"
		if !f.Reached {
			reached = "**no**"
		}
		fmt.Fprintf(&b, "| %s | %s | %s | %s |\n", f.What, f.Goal, f.Measured, reached)
	}
	return b.String()
}
