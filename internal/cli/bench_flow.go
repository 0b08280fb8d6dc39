package cli

import (
	"context"
	"slices"
	"strings"
	"time"

	"github.com/spf13/cobra"

	"github.com/bulkaction/bulkaction/bench"
)

func newBenchCongestion(r *Root, set *variables) *cobra.Command {
	var o bench.CongestionOptions
	var quick bool
	cmd := benchmark{
		use: "congestion",
		short: "A backlog far above a small global limit: how much of the limit is used, and how often jobs " +
			"are throttled",
		options: &o.Options,
		check: func(*cobra.Command, []string) error {
			if quick {
				o.RPS *= 10
			}
			if o.Tenants > o.Jobs && o.Jobs > 0 {
				return usagef("--tenants %d: must be at most --jobs %d", o.Tenants, o.Jobs)
			}
			return checkLeast(atLeast{"jobs", o.Jobs, 1}, atLeast{"tenants", o.Tenants, 1}, atLeast{"rps", o.RPS, 1})
		},
		run: func(ctx context.Context) (any, error) { return whole(bench.RunCongestion(ctx, o)) },
	}.command(r, set)
	f := cmd.Flags()
	f.IntVar(&o.Jobs, "jobs", 15_000, "number of jobs")
	f.IntVar(&o.Tenants, "tenants", 3, "number of tenants, each with one group")
	f.IntVar(&o.RPS, "rps", 30, "global limit, permits a second")
	f.BoolVar(&quick, "quick", false, "ten times the limit")
	redisFlag(cmd, &o.Options)
	return cmd
}

func newBenchLimits(r *Root, set *variables) *cobra.Command {
	o := bench.LimitsOptions{Limiters: bench.Limiters, PartitionCounts: []int{1, 4}}
	windows := []string{"100ms", "1s", "10s"}
	cmd := benchmark{
		use:     "limits",
		short:   "Each limiter with several fetchers, dispatchers, windows and partitions: is it kept, and used fully",
		options: &o.Options,
		check: func(*cobra.Command, []string) (err error) {
			o.Windows, err = parseWindows(windows)
			for _, limiter := range o.Limiters {
				if !slices.Contains(bench.Limiters, limiter) {
					return usagef("--limiter %q: must be one of %s", limiter, strings.Join(bench.Limiters, ", "))
				}
			}
			for _, n := range o.PartitionCounts {
				if n < 1 || n > 64 {
					return usagef("--partitions %d: must be from 1 to 64", n)
				}
			}
			if o.Seconds < 0 || o.RPS < 100 || o.Parallel < 1 {
				return usagef("--seconds must not be negative, --rps at least 100, --parallel at least 1")
			}
			return err
		},
		run: func(ctx context.Context) (any, error) { return whole(bench.RunLimits(ctx, o)) },
	}.command(r, set)
	f := cmd.Flags()
	f.StringSliceVar(&o.Limiters, "limiter", o.Limiters, "limiters to try")
	f.StringSliceVar(&windows, "window", windows, "windows to try")
	f.IntSliceVar(&o.PartitionCounts, "partitions", o.PartitionCounts, "numbers of partitions to try")
	f.Float64Var(&o.Seconds, "seconds", 0,
		"size of each run's backlog, in seconds of the limit; 0: 10, at least 5 windows")
	f.IntVar(&o.RPS, "rps", 1000, "global limit, permits a second")
	f.IntVar(&o.Parallel, "parallel", 3, "runs at the same time, each with its own Redis and processes")
	f.BoolVar(&o.NoElastic, "no-elastic", false, "skip the part with one busy tenant among idle ones")
	redisFlag(cmd, &o.Options)
	return cmd
}

func parseWindows(texts []string) (windows []time.Duration, err error) {
	for _, text := range texts {
		d, err := time.ParseDuration(text)
		if err != nil || d < 10*time.Millisecond || d > time.Hour || d%time.Millisecond != 0 {
			return nil, usagef("--window %q: must be whole milliseconds from 10ms to 1h", text)
		}
		windows = append(windows, d)
	}
	return windows, nil
}

func newBenchFairness(r *Root, set *variables) *cobra.Command {
	var o bench.FairnessOptions
	parts := bench.FairnessParts()
	cmd := benchmark{
		use: "fairness", short: "Small tenants beside a noisy one, weights, lanes, and what fairness costs",
		options: &o.Options,
		check: func(*cobra.Command, []string) error {
			if o.NoisyJobs < 2000 {
				return usagef("--noisy-jobs %d: must be at least 2000, so that they run as long as the small groups",
					o.NoisyJobs)
			}
			return checkParts(o.Only, parts)
		},
		run: func(ctx context.Context) (any, error) {
			result, err := bench.RunFairness(ctx, o)
			if len(result.Overrides) == 0 { // no part succeeded
				return nil, err
			}
			return result, err
		},
	}.command(r, set)
	f := cmd.Flags()
	f.IntVar(&o.NoisyJobs, "noisy-jobs", 200_000, "jobs of the noisy tenant")
	f.StringSliceVar(&o.Only, "only", nil, "parts to run: "+strings.Join(parts, ","))
	f.Uint64Var(&o.Seed, "seed", 1, "seed of the random times at which small tenants submit")
	redisFlag(cmd, &o.Options)
	return cmd
}
