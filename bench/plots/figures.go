package main

import (
	"fmt"
	"os"
	"strings"

	"github.com/bulkaction/bulkaction/bench"
)

// figure is one line of the table: what was to be reached, and what was.
type figure struct {
	what, goal, measured string
	reached              bool
}

// results are what the benches printed.
type results struct {
	congestion bench.Congestion
	limits     bench.Limits
	fairness   bench.Fairness
}

func (r results) figures() []figure {
	var out []figure
	add := func(reached bool, what, goal, measured string, args ...any) {
		out = append(out, figure{what, goal, fmt.Sprintf(measured, args...), reached})
	}
	if c := r.congestion; c.Jobs > 0 {
		of := fmt.Sprintf("congestion, %d jobs of %d tenants, %d/s: ", c.Jobs, c.Tenants, c.RPS)
		add(c.MakespanRatio <= 1.03, of+"makespan", "≤ 1.03 × ideal", "%.2f s, %.3f ×", c.MakespanSeconds, c.MakespanRatio)
		add(c.ThrottlesPerJob <= 0.1, of+"throttles a job", "≤ 0.1", "%.4f", c.ThrottlesPerJob)
		add(c.WindowsOverLimit == 0, of+"windows over the limit", "none", "%d of %d", c.WindowsOverLimit, c.Windows)
	}
	out = append(out, limitFigures(r.limits)...)
	f := r.fairness
	if n := f.Noisy; n != nil {
		add(n.SmallRatio <= 2, fmt.Sprintf("noisy neighbour, %d jobs: small tenants' p99", n.NoisyJobs), "≤ 2 × alone", "%.3f s, %.2f ×", n.SmallP99, n.SmallRatio)
		add(n.ThroughputRatio >= 0.98, "throughput, against one group with nobody to be fair to", "≥ 98%", "%.1f%%", 100*n.ThroughputRatio)
	}
	if n := f.Long; n != nil {
		add(n.LongRatio <= 3, "noisy neighbour with jobs 50 times as long: small tenants' p99", "≤ 3 × alone", "%.3f s, %.2f ×", n.LongP99, n.LongRatio)
	}
	if a := f.RetryAfter; a != nil {
		add(a.RetryAccepted >= 0.95, "clients that wait for their Retry-After: accepted on the next try", "≥ 95%", "%.1f%% of %d", 100*a.RetryAccepted, a.RetryTries)
	}
	if w := f.Weights; w != nil {
		add(w.WeightError <= 0.05, "weights 1:2:4 under saturation: furthest off", "≤ 5%", "%.1f%%", 100*w.WeightError)
	}
	if l := f.Lanes; l != nil {
		add(l.LaneError <= 0.05 && l.LowLaneStarts > 0, "lanes 6:3:1 under saturation: furthest off", "≤ 5%, low never starves", "%.1f%%; low waits %.3f s at most", 100*l.LaneError, l.LowMaxGap)
	}
	if b := f.Behind; b != nil {
		add(b.BehindRatio <= 2, fmt.Sprintf("small groups behind one of %d jobs of the same tenant: the slowest", b.BehindHugeJobs), "first, or ≤ 2 × alone", "%.3f s, %.2f ×; before the huge one: %t",
			b.BehindMax, b.BehindRatio, b.BehindFirst)
	}
	if c := f.AdmitCost; c != nil && len(c.AdmitCost) > 0 {
		first, last := c.AdmitCost[0], c.AdmitCost[len(c.AdmitCost)-1]
		add(c.AdmitCostRatio <= 1.5, fmt.Sprintf("cost of admitting a job, %d to %d tenants", first.Tenants, last.Tenants), "≤ 1.5 ×", "%.1f to %.1f µs, %.2f ×", first.RedisUSJob, last.RedisUSJob, c.AdmitCostRatio)
	}
	if i := f.Idle; i != nil {
		add(i.IdleCommands < 20, "idle: client commands a second of the busiest process", "< 20", "%.1f", i.IdleCommands)
	}
	return out
}

func limitFigures(l bench.Limits) []figure {
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
	out := []figure{{fmt.Sprintf("limits, %d runs: windows over the limit", len(l.Runs)), "none", fmt.Sprintf("%d of %d", over, windows), over == 0}}
	for _, limiter := range bench.Limiters {
		least, ok := used[limiter]
		if !ok {
			continue
		}
		goal := 0.99
		if limiter == "sliding" {
			goal = 0.95
		}
		out = append(out, figure{fmt.Sprintf("limits, `%s`: used while jobs wait, in the worst run", limiter), fmt.Sprintf("≥ %.0f%%", 100*goal), fmt.Sprintf("%.2f%%", 100*least), least >= goal})
	}
	for _, e := range l.Elastic {
		of := fmt.Sprintf("elastic, partitions: %d; ", e.Partitions)
		out = append(out,
			figure{of + "the busy tenant's part of the limit", "≥ 95%", fmt.Sprintf("%.1f%%", 100*e.BusyShareOfLimit), e.BusyShareOfLimit >= 0.95},
			figure{of + "windows until all have their shares", "≤ 1", fmt.Sprint(e.ReturnWindows), e.ReturnWindows <= 1})
	}
	return out
}

// table writes figures in Markdown.
func table(figures []figure) string {
	var b strings.Builder
	b.WriteString("| experiment | goal | measured | reached |\n|---|---|---|---|\n")
	for _, f := range figures {
		reached := "yes"
		if !f.reached {
			reached = "**no**"
		}
		fmt.Fprintf(&b, "| %s | %s | %s | %s |\n", f.what, f.goal, f.measured, reached)
	}
	return b.String()
}

// The table stands between these lines of a document.
const (
	begin = "<!-- figures: written by make plots -->\n"
	end   = "<!-- end of figures -->\n"
)

// insert puts the table into a document, where it has a place for it.
func insert(document, table string) (string, bool) {
	before, rest, ok := strings.Cut(document, begin)
	_, after, closed := strings.Cut(rest, end)
	if !ok || !closed {
		return document, false
	}
	return before + begin + table + end + after, true
}

// write brings the table of a file up to date.
func write(file, table string) error {
	b, err := os.ReadFile(file)
	if err != nil {
		return err
	}
	text, ok := insert(string(b), table)
	if !ok || text == string(b) {
		return nil
	}
	return os.WriteFile(file, []byte(text), 0o644)
}
