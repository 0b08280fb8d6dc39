package cli

import (
	"fmt"
	"os"

	"github.com/spf13/cobra"

	"github.com/bulkaction/bulkaction/bench"
)

func newBench(r *Root) *cobra.Command {
	cmd := &cobra.Command{
		Use:   "bench",
		Short: "Measure the system: real processes on a private redis-server",
	}
	cmd.AddCommand(newBenchThroughput(r))
	return cmd
}

func newBenchThroughput(r *Root) *cobra.Command {
	var o bench.ThroughputOptions
	cmd := &cobra.Command{
		Use:   "throughput",
		Short: "No-op jobs through all six roles, produced and processed at once",
		Args:  cobra.NoArgs,
		RunE: func(cmd *cobra.Command, _ []string) error {
			for name, n := range map[string]int{"--jobs": o.Jobs, "--tenants": o.Tenants, "--batch": o.Batch} {
				if n < 1 {
					return usagef("%s %d: must be at least 1", name, n)
				}
			}
			self, err := os.Executable()
			if err != nil {
				return fmt.Errorf("find this program: %w", err)
			}
			o.Role = []string{self, "role"}
			bar := r.newBar("jobs", int64(o.Jobs))
			result, err := bench.RunThroughput(cmd.Context(), o, func(done int) { bar.set(int64(done), int64(o.Jobs)) })
			bar.stop()
			if err != nil {
				return err
			}
			if r.JSON {
				return r.Print(result)
			}
			t := newTable(r.Out)
			t.row("jobs", thousands(int64(result.Jobs)))
			t.row("jobs a second", thousands(int64(result.JobsPerSecond)))
			t.row("Redis CPU", fmt.Sprintf("%.1f µs a job", result.RedisCPUPerJob))
			t.row("process CPU", fmt.Sprintf("%.1f µs a job, the producer included", result.ProcessCPUPerJob))
			t.row("Redis commands", fmt.Sprintf("%.2f a job", result.CommandsPerJob))
			t.row("Redis memory", fmt.Sprintf("%.0f bytes a queued job of %d bytes", result.BytesPerQueuedJob, result.PayloadBytes))
			t.row("accepted to started", fmt.Sprintf("p50 %.0f ms, p99 %.0f ms, one job at a time", result.P50MS, result.P99MS))
			return t.flush()
		},
	}
	f := cmd.Flags()
	f.IntVar(&o.Jobs, "jobs", 100_000, "jobs in all")
	f.IntVar(&o.Tenants, "tenants", 10, "tenants, a group each")
	f.IntVar(&o.Batch, "batch", 500, "jobs a message")
	f.IntVar(&o.Payload, "payload", 200, "bytes of a payload")
	f.StringVar(&o.RedisURL, "redis-url", "", "Redis to use instead of a private redis-server")
	f.BoolVar(&o.AOF, "aof", false, "let the private redis-server append to a file, synced every second")
	return cmd
}
