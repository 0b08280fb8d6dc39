package cli

import (
	"errors"
	"fmt"
	"strings"

	"github.com/spf13/cobra"

	"github.com/bulkaction/bulkaction/bench"
)

func newBenchLatency(r *Root, set *variables) *cobra.Command {
	var o bench.LatencyOptions
	cmd := &cobra.Command{
		Use:   "latency",
		Short: "Single jobs at a steady rate: time from accepted to started",
		Args:  cobra.NoArgs,
		RunE: func(cmd *cobra.Command, _ []string) error {
			if o.Rate < 1 || o.Rate > 10_000 {
				return usagef("--rate %d: must be from 1 to 10000", o.Rate)
			}
			if o.Seconds < 1 {
				return usagef("--seconds %d: must be at least 1", o.Seconds)
			}
			progress, done, err := r.prepareFleet(&o.FleetOptions, set, o.Rate*o.Seconds)
			if err != nil {
				return err
			}
			o.Progress = progress
			result, err := bench.RunLatency(cmd.Context(), o)
			done()
			if err != nil || r.JSON {
				return errors.Join(err, r.printUnlessFailed(err, result))
			}
			t := newTable(r.Out)
			row := func(what string, q bench.Quantiles) {
				t.row(what, fmt.Sprintf("p50 %.2f ms, p99 %.2f ms, at most %.2f ms", q.P50MS, q.P99MS, q.MaxMS))
			}
			t.row("jobs", fmt.Sprintf("%s, %d a second", thousands(int64(result.Jobs)), result.Rate))
			row("accepted to started", bench.Quantiles{P50MS: result.P50MS, P99MS: result.P99MS, MaxMS: result.MaxMS})
			row("published to started", result.PublishedStarted)
			row("published to finished", result.PublishedFinished)
			return t.flush()
		},
	}
	f := cmd.Flags()
	f.IntVar(&o.Rate, "rate", 100, "jobs a second")
	f.IntVar(&o.Seconds, "seconds", 30, "duration of the measurement")
	f.BoolVar(&o.AOF, "aof", false, "the private redis-server writes an append-only file, synced every second")
	f.StringVar(&o.RedisURL, "redis-url", "", "Redis to use instead of a private redis-server")
	return cmd
}

func newBenchBig(r *Root, set *variables) *cobra.Command {
	var o bench.BigGroupOptions
	cmd := &cobra.Command{
		Use:   "big",
		Short: "One large group, uploaded from a file over HTTP: speed, memory, and reading of its results",
		Args:  cobra.NoArgs,
		RunE: func(cmd *cobra.Command, _ []string) error {
			if o.Jobs < 10 {
				return usagef("--jobs %d: must be at least 10", o.Jobs)
			}
			progress, done, err := r.prepareFleet(&o.FleetOptions, set, o.Jobs)
			if err != nil {
				return err
			}
			o.Progress = progress
			result, err := bench.RunBigGroup(cmd.Context(), o)
			done()
			if err != nil || r.JSON {
				return errors.Join(err, r.printUnlessFailed(err, result))
			}
			t := newTable(r.Out)
			t.row("jobs", fmt.Sprintf("%s, a file of %.0f MB", thousands(int64(result.Jobs)), result.FileMB))
			t.row("jobs a second", fmt.Sprintf("%s; the first tenth %s, the last %s",
				thousands(int64(result.JobsPerSecond)), thousands(int64(result.FirstTenth)),
				thousands(int64(result.LastTenth))))
			t.row("largest process", fmt.Sprintf("%.0f MB; Redis %.0f MB", result.PeakMB, result.PeakMBByRole["redis"]))
			t.row("results", fmt.Sprintf("%s in %.1f s", thousands(int64(result.Results)), result.ResultsSeconds))
			return t.flush()
		},
	}
	f := cmd.Flags()
	f.IntVar(&o.Jobs, "jobs", 1_000_000, "jobs of the group")
	f.IntVar(&o.Payload, "payload", 200, "bytes of each job's payload")
	f.BoolVar(&o.AOF, "aof", false, "the private redis-server writes an append-only file, synced every second")
	return cmd
}

func newBenchPerformance(r *Root, set *variables) *cobra.Command {
	var o bench.PerformanceOptions
	parts := bench.PerformanceParts()
	cmd := &cobra.Command{
		Use:   "performance",
		Short: "All figures of docs/performance.md; takes more than ten minutes",
		Args:  cobra.NoArgs,
		RunE: func(cmd *cobra.Command, _ []string) error {
			if err := checkParts(o.Only, parts); err != nil {
				return err
			}
			if o.Rounds < 1 {
				return usagef("--rounds %d: must be at least 1", o.Rounds)
			}
			if o.Quick && !cmd.Flags().Changed("rounds") {
				o.Rounds = 1
			}
			done, err := r.prepareExperiment(&o.Options, set)
			if err != nil {
				return err
			}
			result, err := bench.RunPerformance(cmd.Context(), o)
			done()
			// The parts that succeeded are shown also if another part failed.
			if r.JSON {
				return errors.Join(err, r.Print(result))
			}
			return errors.Join(err, r.showFigures(result.Figures()))
		},
	}
	f := cmd.Flags()
	f.BoolVar(&o.Quick, "quick", false, "fewer jobs, and one round unless --rounds is given")
	f.IntVar(&o.Rounds, "rounds", 3, "measurements of the base and of each variant, in turn; medians are shown")
	f.StringSliceVar(&o.Only, "only", nil, "parts to run: "+strings.Join(parts, ","))
	return cmd
}

func (r *Root) showFigures(figures []bench.Figure) error {
	t := newTable(r.Out)
	t.row("figure", "goal", "measured", "reached")
	for _, f := range figures {
		reached := "yes"
		if !f.Reached {
			reached = "NO"
		}
		t.row(f.What, f.Goal, f.Measured, reached)
	}
	return t.flush()
}
