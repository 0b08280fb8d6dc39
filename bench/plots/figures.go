package main

import (
	"fmt"
	"os"
	"strings"

	"github.com/bulkaction/bulkaction/bench"
)

// results has the JSON documents that the benchmarks printed.
type results struct {
	congestion  bench.Congestion
	limits      bench.Limits
	fairness    bench.Fairness
	performance bench.Performance
}

// figures returns the lines of the table of flow control, for the parts that were measured.
func (r results) figures() []bench.Figure {
	var out []bench.Figure
	add := func(reached bool, what, goal, measured string, args ...any) {
		out = append(out, bench.Figure{
			What:     what,
			Goal:     goal,
			Measured: fmt.Sprintf(measured, args...),
			Reached:  reached,
		})
	}
	if c := r.congestion; c.Jobs > 0 {
		of := fmt.Sprintf("congestion, %d jobs of %d tenants, %d/s: ", c.Jobs, c.Tenants, c.RPS)
		add(c.MakespanRatio <= 1.03, of+"makespan", "≤ 1.03 × ideal", "%.2f s, %.3f ×",
			c.MakespanSeconds, c.MakespanRatio)
		add(c.ThrottlesPerJob <= 0.1, of+"throttles a job", "≤ 0.1", "%.4f", c.ThrottlesPerJob)
		add(c.WindowsOverLimit == 0, of+"windows over the limit", "none", "%d of %d", c.WindowsOverLimit, c.Windows)
	}
	out = append(out, limitFigures(r.limits)...)
	f := r.fairness
	if n := f.NoisyNeighbour; n != nil {
		add(n.SmallRatio <= 2, fmt.Sprintf("noisy neighbour, %d jobs: small tenants' p99", n.NoisyJobs),
			"≤ 2 × alone", "%.3f s, %.2f ×", n.SmallP99, n.SmallRatio)
		add(n.ThroughputRatio >= 0.98, "throughput, compared with one group that runs alone",
			"≥ 98%", "%.1f%%", 100*n.ThroughputRatio)
	}
	if n := f.NoisyLongJobs; n != nil {
		add(n.LongRatio <= 3, "noisy neighbour with jobs 50 times as long: small tenants' p99",
			"≤ 3 × alone", "%.3f s, %.2f ×", n.LongP99, n.LongRatio)
	}
	if a := f.RetryAfter; a != nil {
		add(a.RetryAccepted >= 0.95, "clients that wait as long as Retry-After says: accepted on the next try",
			"≥ 95%", "%.1f%% of %d", 100*a.RetryAccepted, a.RetryTries)
	}
	if w := f.Weights; w != nil {
		add(w.WeightError <= 0.05, "weights 1:2:4 under saturation: largest deviation",
			"≤ 5%", "%.1f%%", 100*w.WeightError)
	}
	if l := f.Lanes; l != nil {
		add(l.LaneError <= 0.05 && l.LowLaneStarts > 0, "lanes 6:3:1 under saturation: largest deviation",
			"≤ 5%, low never starves", "%.1f%%; low waits %.3f s at most", 100*l.LaneError, l.LowMaxGap)
	}
	if b := f.BehindHugeGroup; b != nil {
		add(b.BehindRatio <= 2, fmt.Sprintf("small groups behind one of %d jobs of the same tenant: the slowest",
			b.BehindHugeJobs), "first, or ≤ 2 × alone", "%.3f s, %.2f ×; before the huge one: %t",
			b.BehindMax, b.BehindRatio, b.BehindFirst)
	}
	if c := f.AdmitCost; c != nil && len(c.AdmitCost) > 0 {
		first, last := c.AdmitCost[0], c.AdmitCost[len(c.AdmitCost)-1]
		add(c.AdmitCostRatio <= 1.5, fmt.Sprintf("cost of admitting a job, %d to %d tenants", first.Tenants,
			last.Tenants), "≤ 1.5 ×", "%.1f to %.1f µs, %.2f ×", first.RedisUSJob, last.RedisUSJob, c.AdmitCostRatio)
	}
	if i := f.Idle; i != nil {
		add(i.IdleCommands < 20, "idle: client commands a second of the busiest process",
			"< 20", "%.1f", i.IdleCommands)
	}
	return out
}

func limitFigures(l bench.Limits) []bench.Figure {
	if len(l.Runs) == 0 {
		return nil
	}
	over, windows := 0, 0
	used := map[string]float64{}
	for _, r := range l.Runs {
		over, windows = over+r.WindowsOverLimit, windows+r.Windows
		if least, ok := used[r.Limiter]; !ok || r.LimitUsedRatio < least {
			used[r.Limiter] = r.LimitUsedRatio
		}
	}
	var out []bench.Figure
	add := func(reached bool, what, goal, measured string) {
		out = append(out, bench.Figure{What: what, Goal: goal, Measured: measured, Reached: reached})
	}
	add(over == 0, fmt.Sprintf("limits, %d runs: windows over the limit", len(l.Runs)), "none",
		fmt.Sprintf("%d of %d", over, windows))
	for _, limiter := range bench.Limiters {
		least, ok := used[limiter]
		if !ok {
			continue
		}
		goal := 0.99
		if limiter == "sliding" {
			goal = 0.95
		}
		add(least >= goal, fmt.Sprintf("limits, `%s`: used while jobs wait, in the worst run", limiter),
			fmt.Sprintf("≥ %.0f%%", 100*goal), fmt.Sprintf("%.2f%%", 100*least))
	}
	for _, e := range l.Elastic {
		of := fmt.Sprintf("elastic, partitions: %d; ", e.Partitions)
		add(e.BusyShareOfLimit >= 0.95, of+"the busy tenant's part of the limit", "≥ 95%",
			fmt.Sprintf("%.1f%%", 100*e.BusyShareOfLimit))
		add(e.ReturnWindows <= 1, of+"windows until all have their shares", "≤ 1", fmt.Sprint(e.ReturnWindows))
	}
	return out
}

// A document has a line before each table, which says which table it is, and a line after it.
const (
	figuresBegin     = "<!-- figures: written by make plots -->\n"
	performanceBegin = "<!-- performance: written by make plots -->\n"
	tableEnd         = "<!-- end of figures -->\n"
)

// insertTable replaces the text between the line begin and the line tableEnd of a document. It
// returns the document as it is, and false, if it does not have these lines.
func insertTable(document, begin, table string) (string, bool) {
	before, rest, ok := strings.Cut(document, begin)
	_, after, closed := strings.Cut(rest, tableEnd)
	if !ok || !closed {
		return document, false
	}
	return before + begin + table + tableEnd + after, true
}

// updateDocument replaces the tables in a document for which there are figures and marks. It writes
// the file only if a table has changed.
func (r results) updateDocument(file string) error {
	b, err := os.ReadFile(file)
	if err != nil {
		return err
	}
	text := string(b)
	for begin, figures := range map[string][]bench.Figure{
		figuresBegin:     r.figures(),
		performanceBegin: r.performance.Figures(),
	} {
		if len(figures) > 0 {
			text, _ = insertTable(text, begin, bench.Markdown(figures))
		}
	}
	if text == string(b) {
		return nil
	}
	return os.WriteFile(file, []byte(text), 0o644)
}
