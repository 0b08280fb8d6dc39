package cli

import (
	"fmt"

	"github.com/spf13/cobra"

	"github.com/bulkaction/bulkaction/bench"
)

func newBenchCongestion(r *Root, set *variables) *cobra.Command {
	var o bench.CongestionOptions
	var quick bool
	cmd := &cobra.Command{
		Use: "congestion",
		Short: "A backlog far above a small global limit: how much of the limit is used, and how often jobs " +
			"are throttled",
		Args: cobra.NoArgs,
		RunE: func(cmd *cobra.Command, _ []string) error {
			for name, n := range map[string]int{"--jobs": o.Jobs, "--tenants": o.Tenants, "--rps": o.RPS} {
				if n < 1 {
					return usagef("%s %d: must be at least 1", name, n)
				}
			}
			if o.Tenants > o.Jobs {
				return usagef("--tenants %d: must be at most --jobs %d", o.Tenants, o.Jobs)
			}
			if quick {
				o.RPS *= 10
			}
			done, err := r.prepareExperiment(&o.Options, set)
			if err != nil {
				return err
			}
			result, err := bench.RunCongestion(cmd.Context(), o)
			done()
			if err != nil {
				return err
			}
			if r.JSON {
				return r.Print(result)
			}
			t := newTable(r.Out)
			t.row("jobs", fmt.Sprintf("%s of %d tenants at %d a second",
				thousands(int64(result.Jobs)), result.Tenants, result.RPS))
			t.row("makespan", fmt.Sprintf("%.2f s, %.4f × the ideal %.2f s",
				result.MakespanSeconds, result.MakespanRatio, result.IdealSeconds))
			t.row("throttles", fmt.Sprintf("%.4f a job", result.ThrottlesPerJob))
			t.row("windows over the limit", fmt.Sprintf("%d of %d", result.WindowsOverLimit, result.Windows))
			t.row("limit used", fmt.Sprintf("%.2f%%", 100*result.LimitUsedRatio))
			return t.flush()
		},
	}
	f := cmd.Flags()
	f.IntVar(&o.Jobs, "jobs", 15_000, "number of jobs")
	f.IntVar(&o.Tenants, "tenants", 3, "number of tenants, each with one group")
	f.IntVar(&o.RPS, "rps", 30, "global limit, permits a second")
	f.BoolVar(&quick, "quick", false, "ten times the limit")
	f.StringVar(&o.RedisURL, "redis-url", "", "Redis to use instead of a private redis-server")
	return cmd
}
