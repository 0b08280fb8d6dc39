package main

import (
	"fmt"
	"math"
	"slices"
	"strconv"
	"time"

	"github.com/bulkaction/bulkaction/bench"
)

// publishedMakespanRatio and publishedThrottles are figures of another system, from the article
// that the design is based on. The charts show them for comparison.
const (
	publishedMakespanRatio = 720.0 / 500
	publishedThrottles     = 1.45
)

func addCongestionCharts(c bench.Congestion, charts map[string]chart) {
	if len(c.PerSecond) > 0 {
		permits := pick(c.PerSecond, func(s bench.SecondOfTenants) float64 { return float64(s.Permits) })
		starts := pick(c.PerSecond, func(s bench.SecondOfTenants) float64 { return float64(s.Starts) })
		charts["congestion-rate"] = chart{
			title:    "Congestion: permits in each second",
			subtitle: fmt.Sprintf("%d jobs of %d tenants, %d permits a second in all", c.Jobs, c.Tenants, c.RPS),
			x:        "second of the run", y: "a second", lines: true, steps: true, labels: ticks(len(permits)),
			series: []series{{"permits", permits}, {"starts", starts}}, goals: []goal{{"limit", float64(c.RPS)}},
		}
	}
	charts["congestion"] = chart{
		title:    "Congestion: against the published figures",
		subtitle: "makespan as a multiple of the ideal, and throttles a job; lower is better",
		y:        "×, and throttles a job",
		labels:   []string{"makespan / ideal", "throttles a job"},
		format:   "%.3f",
		series: []series{
			{"measured", []float64{c.MakespanRatio, c.ThrottlesPerJob}},
			{"published", []float64{publishedMakespanRatio, publishedThrottles}},
		},
	}
}

// ticks returns the labels of an axis with n points, numbered from 0: at most ten of them, and ""
// for all other points.
func ticks(n int) []string {
	out := make([]string, n)
	step := max(1, int(roundStep(float64(n)/10)))
	for i := 0; i < n; i += step {
		out[i] = strconv.Itoa(i)
	}
	return out
}

// pick returns a value of each element.
func pick[T any](list []T, value func(T) float64) []float64 {
	out := make([]float64, len(list))
	for i, element := range list {
		out[i] = value(element)
	}
	return out
}

func addLimitCharts(l bench.Limits, charts map[string]chart) {
	var labels []string
	var all []series
	over := 0
	for _, r := range l.Runs {
		label := r.Limiter + "\n" + (time.Duration(r.WindowMS) * time.Millisecond).String()
		if !slices.Contains(labels, label) {
			labels = append(labels, label)
		}
		name := fmt.Sprintf("%d partitions", r.Partitions)
		k := slices.IndexFunc(all, func(s series) bool { return s.name == name })
		if k < 0 {
			k, all = len(all), append(all, series{name: name})
		}
		for len(all[k].values) <= slices.Index(labels, label) {
			all[k].values = append(all[k].values, math.NaN())
		}
		all[k].values[slices.Index(labels, label)] = 100 * r.LimitUsedRatio
		over += r.WindowsOverLimit
	}
	if len(labels) > 0 {
		charts["limits"] = chart{
			title: "Limits: how much of the limit is used while jobs wait",
			subtitle: fmt.Sprintf(
				"4 fetchers and 2 dispatchers, %d permits a second; windows over the limit in all runs: %d",
				l.RPS, over,
			),
			x: "limiter and window", y: "% of the permits", labels: labels, goals: []goal{{"99%", 99}}, series: all,
		}
	}
	for _, e := range l.Elastic {
		charts[fmt.Sprintf("elastic-%d", e.Partitions)] = chart{
			title: fmt.Sprintf("Elastic shares, partitions: %d", e.Partitions),
			subtitle: fmt.Sprintf(
				"one busy tenant among nine idle ones has %.1f%% of the limit; windows until all have their "+
					"shares back: %d",
				100*e.BusyShareOfLimit, e.ReturnWindows,
			),
			x: "window", y: "permits", lines: true, steps: true, labels: ticks(len(e.PerWindow)),
			goals: []goal{{"limit", float64(l.RPS)}},
			series: []series{
				{"busy tenant", pick(e.PerWindow, func(w bench.ElasticWindow) float64 { return float64(w.Busy) })},
				{"nine others", pick(e.PerWindow, func(w bench.ElasticWindow) float64 { return float64(w.Others) })},
			},
		}
	}
}

func addFairnessCharts(f bench.Fairness, charts map[string]chart) {
	if n := f.NoisyNeighbour; n != nil {
		charts["noisy"] = distribution("Small groups beside a noisy tenant",
			fmt.Sprintf("%d jobs of one tenant, %d small tenants; p99 is %.2f × that of a small group alone",
				n.NoisyJobs, n.SmallTenants, n.SmallRatio),
			n.SmallAloneSeconds, n.SmallSeconds)
	}
	if n := f.NoisyLongJobs; n != nil {
		charts["noisy-long"] = distribution("Small groups beside a tenant with jobs 50 times as long",
			fmt.Sprintf("p99 is %.2f × that of a small group alone", n.LongRatio), n.LongAloneSeconds, n.LongSmall)
	}
	if b := f.BehindHugeGroup; b != nil {
		charts["behind"] = distribution("Small groups behind a huge one of their own tenant",
			fmt.Sprintf("%d jobs before them; the slowest takes %.2f × as long as alone",
				b.BehindHugeJobs, b.BehindRatio),
			slices.Sorted(slices.Values(b.BehindAloneSeconds)), slices.Sorted(slices.Values(b.BehindSeconds)))
	}
	if c := f.AdmitCost; c != nil {
		cost := pick(c.AdmitCost, func(n bench.TenantsCost) float64 { return n.RedisUSJob })
		var labels []string
		for _, n := range c.AdmitCost {
			labels = append(labels, strconv.Itoa(n.Tenants))
		}
		charts["admit-cost"] = chart{
			title: "The cost of admitting a job",
			subtitle: fmt.Sprintf("%d jobs a script; from the fewest tenants to the most it grows %.2f ×",
				c.AdmitBatch, c.AdmitCostRatio),
			x:      "tenants with waiting jobs",
			y:      "µs of Redis CPU a job",
			labels: labels,
			series: []series{{"Redis CPU", cost}},
			format: "%.1f",
		}
	}
	if f.Weights == nil || f.Lanes == nil {
		return
	}
	percent := func(share float64) float64 { return 100 * share }
	charts["shares"] = chart{
		title: "Shares under saturation",
		subtitle: fmt.Sprintf("largest deviation from the expected share: weights %.1f%%, lanes %.1f%%",
			100*f.WeightError, 100*f.LaneError),
		y:      "% of the starts",
		labels: []string{"weight 1", "weight 2", "weight 4", "high", "normal", "low"},
		format: "%.1f",
		series: []series{
			{"measured", pick(slices.Concat(f.WeightShares, f.LaneShares), percent)},
			{"expected", pick([]float64{1. / 7, 2. / 7, 4. / 7, .6, .3, .1}, percent)},
		},
	}
}

// distribution returns a chart of how long groups took, by percentile: one line for groups that ran
// alone, one for groups beside other work. The values (seconds) are in ascending order.
func distribution(title, subtitle string, alone, beside []float64) chart {
	const points = 101
	quantile := func(seconds []float64) []float64 {
		out := make([]float64, points)
		for i := range out {
			if n := len(seconds); n > 0 {
				out[i] = 1000 * seconds[min(n-1, i*n/(points-1))]
			}
		}
		return out
	}
	return chart{
		title:    title,
		subtitle: subtitle,
		x:        "percentile of groups",
		y:        "ms from accepted to COMPLETED",
		lines:    true,
		labels:   ticks(points),
		series:   []series{{"alone", quantile(alone)}, {"beside it", quantile(beside)}},
	}
}
