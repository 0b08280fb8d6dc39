package cli

import (
	"encoding/json"
	"errors"
	"fmt"
	"os"
	"strings"

	"github.com/spf13/cobra"

	"github.com/bulkaction/bulkaction/bench"
)

func newBenchCompare(r *Root, set *variables) *cobra.Command {
	var o bench.CompareOptions
	var out string
	variants := bench.CompareVariants()
	cmd := &cobra.Command{
		Use:   "compare PROGRAM",
		Short: "Compare this program with another build under the same workload",
		Long: "Measure PROGRAM, another build of bulkaction, and this program in turn. This program sends the\n" +
			"jobs and measures both, so that PROGRAM may be older. `make bench-compare` builds the program\n" +
			"of another revision and runs this command.",
		Args: cobra.ExactArgs(1),
		RunE: func(cmd *cobra.Command, args []string) error {
			if err := checkCompare(o, args[0]); err != nil {
				return err
			}
			o.Base = []string{args[0], "role"}
			done, err := r.prepareExperiment(&o.Options, set)
			if err != nil {
				return err
			}
			result, err := bench.RunCompare(cmd.Context(), o)
			done()
			// Complete rounds are shown also if a later round failed.
			if out != "" {
				err = errors.Join(err, writeJSON(out, result))
			}
			if r.JSON {
				return errors.Join(err, r.Print(result))
			}
			return errors.Join(err, r.showComparison(result))
		},
	}
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

func checkCompare(o bench.CompareOptions, program string) error {
	if err := checkParts(o.Only, bench.CompareVariants()); err != nil {
		return err
	}
	for _, f := range []struct {
		name     string
		n, least int
	}{
		{"rounds", o.Rounds, 1}, {"jobs", o.Jobs, 1000}, {"http-jobs", o.HTTPJobs, 100},
		{"rate", o.Rate, 1}, {"seconds", o.Seconds, 1},
	} {
		if f.n < f.least {
			return usagef("--%s %d: must be at least %d", f.name, f.n, f.least)
		}
	}
	if _, err := os.Stat(program); err != nil {
		return usagef("bench compare: find the other program: %v", err)
	}
	return nil
}

func writeJSON(name string, v any) error {
	b, err := json.MarshalIndent(v, "", "  ")
	if err != nil {
		return err
	}
	return os.WriteFile(name, append(b, '\n'), 0o644)
}

func (r *Root) showComparison(c bench.Comparison) error {
	t := newTable(r.Out)
	t.row("variant", "figure", c.Base, c.Head, "ratio", "ratios of rounds")
	for _, v := range c.Variants {
		for _, f := range v.Figures {
			least, most := f.Range()
			t.row(v.Name, f.Name, fmt.Sprintf("%.2f", f.Base), fmt.Sprintf("%.2f", f.Head),
				fmt.Sprintf("%.3f", f.Ratio), fmt.Sprintf("%.3f to %.3f", least, most))
		}
	}
	return t.flush()
}
