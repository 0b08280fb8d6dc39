package cli

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"os"
	"slices"
	"strings"

	"github.com/spf13/cobra"

	"github.com/bulkaction/bulkaction/bench"
)

const clusterMasters = 3

func newBenchThroughput(r *Root, set *variables) *cobra.Command {
	var o bench.ThroughputOptions
	var workers int
	var cluster bool
	cmd := benchmark{
		use: "throughput", short: "NOOP jobs through all six roles, produced and processed at the same time",
		options: &o.Options,
		check: func(cmd *cobra.Command, _ []string) error {
			if cluster {
				o.Masters = clusterMasters
			}
			if cmd.Flags().Changed("workers") {
				if o.Replicas == nil {
					o.Replicas = map[string]int{}
				}
				o.Replicas["worker"] = workers
			}
			return checkThroughput(o)
		},
		run: func(ctx context.Context) (any, error) {
			if o.Profile != "" {
				o.Brief = true
				if err := os.MkdirAll(o.Profile, 0o755); err != nil {
					return nil, fmt.Errorf("make the folder for profiles: %w", err)
				}
			}
			return whole(bench.RunThroughput(ctx, o))
		},
	}.command(r, set)
	f := cmd.Flags()
	f.IntVar(&o.Jobs, "jobs", 100_000, "number of jobs")
	f.IntVar(&o.Tenants, "tenants", 10, "number of tenants")
	f.IntVar(&o.Groups, "groups", 1, "groups of each tenant")
	f.IntVar(&o.Batch, "batch", 500, "jobs of each message")
	f.IntVar(&o.Payload, "payload", 200, "bytes of each job's payload")
	f.IntVar(&workers, "workers", 1, "number of worker processes")
	f.StringToIntVar(&o.Replicas, "replicas", nil, "number of processes by role, such as fetcher=2,aggregator=2")
	f.IntVar(&o.Partitions, "partitions", 1, "number of partitions")
	f.BoolVar(&cluster, "cluster", false, fmt.Sprintf("a private Redis Cluster of %d masters", clusterMasters))
	f.BoolVar(&o.Limits, "limits", false, "give each tenant a limit of its own, which is counted but never reached")
	f.Float64Var(&o.FailPercent, "fail-percent", 0, "percentage of the jobs that fail once and are retried after 1 ms")
	f.Float64Var(&o.Sampling, "sampling", 0,
		"part of the jobs that is traced, from 0 to 1; this process receives the traces")
	f.IntVar(&o.Backlog, "backlog", 0, "number of jobs of other groups that wait in the fair queue all the time")
	f.BoolVar(&o.Ceiling, "ceiling", false, "measure the least-work ceiling on the same Redis, before and after")
	f.BoolVar(&o.Brief, "brief", false, "measure neither latency nor memory")
	f.StringVar(&o.Profile, "profile", "",
		"folder for CPU profiles of all processes and a table of Redis's commands; implies --brief")
	aofFlag(cmd, &o.Options)
	redisFlag(cmd, &o.Options)
	return cmd
}

func checkThroughput(o bench.ThroughputOptions) error {
	if err := checkLeast(atLeast{"jobs", o.Jobs, 1}, atLeast{"tenants", o.Tenants, 1},
		atLeast{"groups", o.Groups, 1}, atLeast{"batch", o.Batch, 1}); err != nil {
		return err
	}
	switch {
	case o.Payload < 0 || o.Payload > 256<<10:
		return usagef("--payload %d: must be from 0 to %d", o.Payload, 256<<10)
	case o.Backlog < 0:
		return usagef("--backlog %d: must be at least 0", o.Backlog)
	case o.Partitions < 1 || o.Partitions > 1024:
		return usagef("--partitions %d: must be from 1 to 1024", o.Partitions)
	case o.FailPercent < 0 || o.FailPercent > 100:
		return usagef("--fail-percent %g: must be from 0 to 100", o.FailPercent)
	case o.Sampling < 0 || o.Sampling > 1:
		return usagef("--sampling %g: must be from 0 to 1", o.Sampling)
	case o.RedisURL != "" && (o.AOF || o.Masters > 1):
		return usagef("--redis-url: --aof and --cluster are for a private Redis")
	}
	for role, n := range o.Replicas {
		if !slices.Contains(bench.Roles(), role) {
			return usagef("--replicas %s=%d: the roles are %s", role, n, strings.Join(bench.Roles(), ", "))
		}
		if n < 1 || n > 64 {
			return usagef("--replicas %s=%d: must be from 1 to 64", role, n)
		}
	}
	return nil
}

func newBenchCeiling(r *Root, set *variables) *cobra.Command {
	var o bench.CeilingOptions
	cmd := benchmark{
		use: "ceiling", short: "The speed of the simplest queue with one stream entry a job, on this machine's Redis",
		options: &o.Options,
		check: func(*cobra.Command, []string) error {
			switch {
			case o.Jobs < 1 || o.Payload < 0:
				return usagef("--jobs %d --payload %d: must be at least 1 and 0", o.Jobs, o.Payload)
			case o.RedisURL != "" && o.AOF:
				return usagef("--redis-url: --aof is for a private Redis")
			case len(*set) > 0:
				return usagef("--set: bench ceiling starts no roles")
			}
			return nil
		},
		run: func(ctx context.Context) (any, error) { return whole(bench.RunCeiling(ctx, o)) },
	}.command(r, set)
	cmd.Flags().IntVar(&o.Jobs, "jobs", 200_000, "number of jobs")
	cmd.Flags().IntVar(&o.Payload, "payload", 200, "bytes of each job's payload")
	aofFlag(cmd, &o.Options)
	redisFlag(cmd, &o.Options)
	return cmd
}

func newBenchLatency(r *Root, set *variables) *cobra.Command {
	var o bench.LatencyOptions
	cmd := benchmark{
		use: "latency", short: "Single jobs at a steady rate: time from accepted to started",
		options: &o.Options,
		check: func(*cobra.Command, []string) error {
			if o.Rate < 1 || o.Rate > 10_000 {
				return usagef("--rate %d: must be from 1 to 10000", o.Rate)
			}
			return checkLeast(atLeast{"seconds", o.Seconds, 1})
		},
		run: func(ctx context.Context) (any, error) { return whole(bench.RunLatency(ctx, o)) },
	}.command(r, set)
	cmd.Flags().IntVar(&o.Rate, "rate", 100, "jobs a second")
	cmd.Flags().IntVar(&o.Seconds, "seconds", 30, "duration of the measurement")
	aofFlag(cmd, &o.Options)
	redisFlag(cmd, &o.Options)
	return cmd
}

func newBenchBig(r *Root, set *variables) *cobra.Command {
	var o bench.BigGroupOptions
	cmd := benchmark{
		use: "big", short: "One large group, uploaded from a file over HTTP: speed, memory, and reading of its results",
		options: &o.Options,
		check:   func(*cobra.Command, []string) error { return checkLeast(atLeast{"jobs", o.Jobs, 10}) },
		run:     func(ctx context.Context) (any, error) { return whole(bench.RunBigGroup(ctx, o)) },
	}.command(r, set)
	cmd.Flags().IntVar(&o.Jobs, "jobs", 1_000_000, "jobs of the group")
	cmd.Flags().IntVar(&o.Payload, "payload", 200, "bytes of each job's payload")
	aofFlag(cmd, &o.Options)
	return cmd
}

func newBenchPerformance(r *Root, set *variables) *cobra.Command {
	var o bench.PerformanceOptions
	parts := bench.PerformanceParts()
	cmd := benchmark{
		use: "performance", short: "All figures of docs/performance.md; takes more than ten minutes",
		options: &o.Options,
		check: func(cmd *cobra.Command, _ []string) error {
			if o.Quick && !cmd.Flags().Changed("rounds") {
				o.Rounds = 1
			}
			return errors.Join(checkParts(o.Only, parts), checkLeast(atLeast{"rounds", o.Rounds, 1}))
		},
		run: func(ctx context.Context) (any, error) { return bench.RunPerformance(ctx, o) },
	}.command(r, set)
	f := cmd.Flags()
	f.BoolVar(&o.Quick, "quick", false, "fewer jobs, and one round unless --rounds is given")
	f.IntVar(&o.Rounds, "rounds", 3, "measurements of the base and of each variant, in turn; medians are shown")
	f.StringSliceVar(&o.Only, "only", nil, "parts to run: "+strings.Join(parts, ","))
	return cmd
}

func newBenchCompare(r *Root, set *variables) *cobra.Command {
	var o bench.CompareOptions
	var out string
	variants := bench.CompareVariants()
	cmd := benchmark{
		use: "compare PROGRAM", short: "Compare this program with another build under the same workload",
		options: &o.Options,
		check: func(_ *cobra.Command, args []string) error {
			o.Base = []string{args[0], "role"}
			if err := errors.Join(checkParts(o.Only, variants), checkLeast(
				atLeast{"rounds", o.Rounds, 1}, atLeast{"jobs", o.Jobs, 1000}, atLeast{"http-jobs", o.HTTPJobs, 100},
				atLeast{"rate", o.Rate, 1}, atLeast{"seconds", o.Seconds, 1})); err != nil {
				return err
			}
			if _, err := os.Stat(args[0]); err != nil {
				return usagef("bench compare: find the other program: %v", err)
			}
			return nil
		},
		// Complete rounds are shown also if a later round failed.
		run: func(ctx context.Context) (any, error) {
			result, err := bench.RunCompare(ctx, o)
			if out != "" {
				err = errors.Join(err, writeJSON(out, result))
			}
			return result, err
		},
	}.command(r, set)
	cmd.Args = cobra.ExactArgs(1)
	cmd.Long = "Measure PROGRAM, another build of bulkaction, and this program in turn. This program sends the\n" +
		"jobs and measures both, so that PROGRAM may be older. `make bench-compare` builds the program\n" +
		"of another revision and runs this command."
	f := cmd.Flags()
	f.StringSliceVar(&o.Only, "only", nil, "variants to run: "+strings.Join(variants, ","))
	f.IntVar(&o.Rounds, "rounds", 5, "runs of each variant with each program; medians are shown")
	f.IntVar(&o.Jobs, "jobs", 300_000, "jobs of each run that measures throughput")
	f.IntVar(&o.HTTPJobs, "http-jobs", 10_000, "the same for the variant http, in which each job is a request")
	f.IntVar(&o.Rate, "rate", 100, "single jobs a second while latency is measured")
	f.IntVar(&o.Seconds, "seconds", 5, "duration of each run that measures latency")
	f.StringVar(&out, "out", "", "file to which the JSON is written, with the figures of each round")
	return cmd
}

func writeJSON(name string, v any) error {
	b, err := json.MarshalIndent(v, "", "  ")
	if err != nil {
		return err
	}
	return os.WriteFile(name, append(b, '\n'), 0o644)
}
