package cli

import (
	"fmt"
	"slices"
	"strings"
	"time"

	"github.com/spf13/cobra"

	"github.com/bulkaction/bulkaction/bench"
)

func newBenchLimits(r *Root, set *variables) *cobra.Command {
	o := bench.LimitsOptions{Limiters: bench.Limiters, Partitions: []int{1, 4}}
	windows := []string{"100ms", "1s", "10s"}
	cmd := &cobra.Command{
		Use:   "limits",
		Short: "Each limiter with several fetchers, dispatchers, windows and partitions: is it kept, and used fully",
		Args:  cobra.NoArgs,
		RunE: func(cmd *cobra.Command, _ []string) error {
			for _, limiter := range o.Limiters {
				if !slices.Contains(bench.Limiters, limiter) {
					return usagef("--limiter %q: must be one of %s", limiter, strings.Join(bench.Limiters, ", "))
				}
			}
			o.Windows = nil
			for _, w := range windows {
				d, err := time.ParseDuration(w)
				if err != nil || d < 10*time.Millisecond || d > time.Hour || d%time.Millisecond != 0 {
					return usagef("--window %q: must be whole milliseconds from 10ms to 1h", w)
				}
				o.Windows = append(o.Windows, d)
			}
			for _, n := range o.Partitions {
				if n < 1 || n > 64 {
					return usagef("--partitions %d: must be from 1 to 64", n)
				}
			}
			if o.Seconds < 0 || o.RPS < 100 || o.Parallel < 1 {
				return usagef("--seconds must not be negative, --rps at least 100, --parallel at least 1")
			}
			done, err := r.prepareExperiment(&o.Options, set)
			if err != nil {
				return err
			}
			result, err := bench.RunLimits(cmd.Context(), o)
			done()
			if err != nil {
				return err
			}
			if r.JSON {
				return r.Print(result)
			}
			return r.showLimits(result)
		},
	}
	f := cmd.Flags()
	f.StringSliceVar(&o.Limiters, "limiter", o.Limiters, "limiters to try")
	f.StringSliceVar(&windows, "window", windows, "windows to try")
	f.IntSliceVar(&o.Partitions, "partitions", o.Partitions, "numbers of partitions to try")
	f.Float64Var(&o.Seconds, "seconds", 0,
		"size of each run's backlog, in seconds of the limit; 0: 10, at least 5 windows")
	f.IntVar(&o.RPS, "rps", 1000, "global limit, permits a second")
	f.IntVar(&o.Parallel, "parallel", 3, "runs at the same time, each with its own Redis and processes")
	f.BoolVar(&o.NoElastic, "no-elastic", false, "skip the part with one busy tenant among idle ones")
	f.StringVar(&o.RedisURL, "redis-url", "", "Redis to use instead of private redis-servers")
	return cmd
}

func (r *Root) showLimits(result bench.Limits) error {
	t := newTable(r.Out)
	t.row("LIMITER", "WINDOW", "PARTITIONS", "WINDOWS", "OVER", "USED", "RETRIES")
	for _, run := range result.Runs {
		t.row(run.Limiter, time.Duration(run.WindowMS)*time.Millisecond, run.Partitions,
			run.Windows, run.WindowsOverLimit,
			fmt.Sprintf("%.2f%%", 100*run.LimitUsedRatio), run.Retries)
	}
	if len(result.Elastic) > 0 {
		t.section("ELASTIC, PARTITIONS", "BUSY TENANT'S PART OF THE LIMIT",
			"WINDOWS UNTIL THE OTHERS HAVE THEIR SHARES")
		for _, e := range result.Elastic {
			t.row(e.Partitions, fmt.Sprintf("%.2f%%", 100*e.BusyShareOfLimit), e.ReturnWindows)
		}
	}
	return t.flush()
}
