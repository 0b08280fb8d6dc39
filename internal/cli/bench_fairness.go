package cli

import (
	"errors"
	"fmt"
	"strings"

	"github.com/spf13/cobra"

	"github.com/bulkaction/bulkaction/bench"
)

func newBenchFairness(r *Root, set *variables) *cobra.Command {
	var o bench.FairnessOptions
	parts := bench.FairnessParts()
	cmd := &cobra.Command{
		Use:   "fairness",
		Short: "Small tenants beside a noisy one, weights, lanes, and what fairness costs",
		Args:  cobra.NoArgs,
		RunE: func(cmd *cobra.Command, _ []string) error {
			if err := checkParts(o.Only, parts); err != nil {
				return err
			}
			if o.NoisyJobs < 2000 {
				return usagef("--noisy-jobs %d: must be at least 2000, so that they run as long as the small groups",
					o.NoisyJobs)
			}
			done, err := r.prepareExperiment(&o.Options, set)
			if err != nil {
				return err
			}
			result, err := bench.RunFairness(cmd.Context(), o)
			done()
			if len(result.Overrides) == 0 {
				return err
			}
			// The parts that succeeded are shown also if another part failed.
			if r.JSON {
				return errors.Join(err, r.Print(result))
			}
			return errors.Join(err, r.showFairness(result))
		},
	}
	f := cmd.Flags()
	f.IntVar(&o.NoisyJobs, "noisy-jobs", 20_000, "jobs of the noisy tenant")
	f.StringSliceVar(&o.Only, "only", nil, "parts to run: "+strings.Join(parts, ","))
	f.Uint64Var(&o.Seed, "seed", 1, "seed of the random times at which small tenants submit")
	f.StringVar(&o.RedisURL, "redis-url", "",
		"Redis to use instead of private redis-servers; the part cost always has its own")
	return cmd
}

func (r *Root) showFairness(f bench.Fairness) error {
	t := newTable(r.Out)
	if n := f.NoisyNeighbour; n != nil {
		t.row("beside a noisy tenant", fmt.Sprintf("p99 %.3f s, alone %.3f s: %.2f ×",
			n.SmallP99, n.SmallAloneP99, n.SmallRatio))
		t.row("throughput", fmt.Sprintf("%.0f jobs/s, %.0f in one group: %.1f%%",
			n.JobsPerSecond, n.OneGroupPerSecond, 100*n.ThroughputRatio))
	}
	if n := f.NoisyLongJobs; n != nil {
		t.row("beside long jobs", fmt.Sprintf("p99 %.3f s, alone %.3f s: %.2f ×",
			n.LongP99, n.LongAloneP99, n.LongRatio))
	}
	if w := f.Weights; w != nil {
		t.row("weights 1:2:4", fmt.Sprintf("shares %v, off by %.1f%%", w.WeightShares, 100*w.WeightError))
	}
	if l := f.Lanes; l != nil {
		t.row("lanes 6:3:1", fmt.Sprintf("shares %v, off by %.1f%%; low waits %.3f s at most",
			l.LaneShares, 100*l.LaneError, l.LowMaxGap))
	}
	if b := f.BehindHugeGroup; b != nil {
		t.row("behind a huge group", fmt.Sprintf("%.3f s at most, alone %.3f s: %.2f ×",
			b.BehindMax, b.BehindAloneMax, b.BehindRatio))
	}
	if c := f.AdmitCost; c != nil {
		for _, n := range c.AdmitCost {
			t.row(fmt.Sprintf("admission, %s tenants", thousands(int64(n.Tenants))),
				fmt.Sprintf("%.2f µs of Redis a job", n.RedisUSJob))
		}
	}
	if i := f.Idle; i != nil {
		t.row("idle", fmt.Sprintf("%.1f commands a second of a process at most", i.IdleCommands))
	}
	if a := f.RetryAfter; a != nil {
		t.row("Retry-After", fmt.Sprintf("%.1f%% of %d next tries accepted", 100*a.RetryAccepted, a.RetryTries))
	}
	return t.flush()
}
