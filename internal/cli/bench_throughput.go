package cli

import (
	"errors"
	"fmt"
	"os"
	"slices"
	"strings"

	"github.com/spf13/cobra"

	"github.com/bulkaction/bulkaction/bench"
)

func newBenchThroughput(r *Root, set *variables) *cobra.Command {
	var o bench.ThroughputOptions
	var workers int
	var cluster bool
	cmd := &cobra.Command{
		Use:   "throughput",
		Short: "NOOP jobs through all six roles, produced and processed at the same time",
		Args:  cobra.NoArgs,
		RunE: func(cmd *cobra.Command, _ []string) error {
			if cluster {
				o.Masters = clusterMasters
			}
			if cmd.Flags().Changed("workers") {
				o.Replicas = withWorkers(o.Replicas, workers)
			}
			if err := checkThroughput(o); err != nil {
				return err
			}
			if o.Profile != "" {
				if err := os.MkdirAll(o.Profile, 0o755); err != nil {
					return fmt.Errorf("make the folder for profiles: %w", err)
				}
				o.Brief = true
			}
			progress, done, err := r.prepareFleet(&o.FleetOptions, set, o.Jobs)
			if err != nil {
				return err
			}
			result, err := bench.RunThroughput(cmd.Context(), o, progress)
			done()
			if err != nil {
				return err
			}
			if r.JSON {
				return r.Print(result)
			}
			return r.showThroughput(result)
		},
	}
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
	f.BoolVar(&o.AOF, "aof", false, "the private redis-server writes an append-only file, synced every second")
	f.BoolVar(&o.Limits, "limits", false, "give each tenant a limit of its own, which is counted but never reached")
	f.Float64Var(&o.FailPercent, "fail-percent", 0, "percentage of the jobs that fail once and are retried after 1 ms")
	f.Float64Var(&o.Sampling, "sampling", 0,
		"part of the jobs that is traced, from 0 to 1; this process receives the traces")
	f.BoolVar(&o.Ceiling, "ceiling", false, "measure the least-work ceiling on the same Redis, before and after")
	f.BoolVar(&o.Brief, "brief", false, "measure neither latency nor memory")
	f.StringVar(&o.Profile, "profile", "",
		"folder for CPU profiles of all processes and a table of Redis's commands; implies --brief")
	f.StringVar(&o.RedisURL, "redis-url", "", "Redis to use instead of a private redis-server")
	return cmd
}

const clusterMasters = 3

func withWorkers(replicas map[string]int, n int) map[string]int {
	if replicas == nil {
		replicas = map[string]int{}
	}
	replicas["worker"] = n
	return replicas
}

func checkThroughput(o bench.ThroughputOptions) error {
	for _, f := range []struct {
		name string
		n    int
	}{{"jobs", o.Jobs}, {"tenants", o.Tenants}, {"groups", o.Groups}, {"batch", o.Batch}} {
		if f.n < 1 {
			return usagef("--%s %d: must be at least 1", f.name, f.n)
		}
	}
	switch {
	case o.Payload < 0 || o.Payload > 256<<10:
		return usagef("--payload %d: must be from 0 to %d", o.Payload, 256<<10)
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

func (r *Root) showThroughput(result bench.Throughput) error {
	t := newTable(r.Out)
	t.row("jobs", thousands(int64(result.Jobs)))
	t.row("jobs a second", thousands(int64(result.JobsPerSecond)))
	if c := result.Ceiling; c != nil {
		t.row("least-work ceiling", fmt.Sprintf("%s jobs a second; the speed is %.2f of it",
			thousands(int64(c.JobsPerSecond)), result.CeilingRatio))
	}
	t.row("Redis CPU", fmt.Sprintf("%.1f µs a job", result.RedisCPUPerJob))
	t.row("process CPU", fmt.Sprintf("%.1f µs a job, the producer included", result.ProcessCPUPerJob))
	for _, role := range append(bench.Roles(), "producer") {
		t.row("  "+role, fmt.Sprintf("%.1f µs a job, %.0f MB", result.ProcessCPUByRole[role],
			result.PeakMBByRole[role]))
	}
	t.row("Redis commands", fmt.Sprintf("%.2f a job", result.CommandsPerJob))
	if len(result.MasterCommands) > 0 {
		t.row("shares of masters", fmt.Sprintf("commands %.2f, CPU %.1f µs a job",
			result.MasterCommands, result.MasterCPU))
	}
	if result.BytesPerQueuedJob > 0 {
		t.row("Redis memory", fmt.Sprintf("%.0f bytes a queued job of %d bytes",
			result.BytesPerQueuedJob, result.PayloadBytes))
		t.row("accepted to started", fmt.Sprintf("p50 %.0f ms, p99 %.0f ms, at 100 jobs a second",
			result.P50MS, result.P99MS))
	}
	return t.flush()
}

func newBenchCeiling(r *Root, set *variables) *cobra.Command {
	var o bench.CeilingOptions
	cmd := &cobra.Command{
		Use:   "ceiling",
		Short: "The speed of the simplest queue with one stream entry a job, on this machine's Redis",
		Args:  cobra.NoArgs,
		RunE: func(cmd *cobra.Command, _ []string) error {
			if o.Jobs < 1 || o.Payload < 0 {
				return usagef("--jobs %d --payload %d: must be at least 1 and 0", o.Jobs, o.Payload)
			}
			if o.RedisURL != "" && o.AOF {
				return usagef("--redis-url: --aof is for a private Redis")
			}
			if len(*set) > 0 {
				return usagef("--set: bench ceiling starts no roles")
			}
			result, err := bench.RunCeiling(cmd.Context(), o)
			if err != nil || r.JSON {
				return errors.Join(err, r.printUnlessFailed(err, result))
			}
			t := newTable(r.Out)
			t.row("jobs a second", thousands(int64(result.JobsPerSecond)))
			t.row("Redis CPU", fmt.Sprintf("%.1f µs a job", result.RedisCPUPerJob))
			t.row("process CPU", fmt.Sprintf("%.1f µs a job", result.ProcessCPUPerJob))
			return t.flush()
		},
	}
	f := cmd.Flags()
	f.IntVar(&o.Jobs, "jobs", 200_000, "number of jobs")
	f.IntVar(&o.Payload, "payload", 200, "bytes of each job's payload")
	f.BoolVar(&o.AOF, "aof", false, "the private redis-server writes an append-only file, synced every second")
	f.StringVar(&o.RedisURL, "redis-url", "", "Redis to use instead of a private redis-server")
	return cmd
}

// printUnlessFailed prints v unless err says that it was not measured.
func (r *Root) printUnlessFailed(err error, v any) error {
	if err != nil {
		return nil
	}
	return r.Print(v)
}
