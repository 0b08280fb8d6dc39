package cli

import (
	"context"
	"errors"
	"strings"

	"github.com/spf13/cobra"

	"github.com/bulkaction/bulkaction/bench"
)

func newBenchGuards(r *Root, set *variables) *cobra.Command {
	var o bench.GuardsOptions
	parts := bench.GuardsParts()
	cmd := benchmark{
		use:     "guards",
		short:   "Limiter, pool, lock and queue of package guard: speed, latency, memory, and whether limits hold",
		options: &o.Options,
		check: func(cmd *cobra.Command, _ []string) error {
			if o.Quick && !cmd.Flags().Changed("rounds") {
				o.Rounds = 3
			}
			if len(*set) > 0 {
				return usagef("--set: bench guards starts no roles")
			}
			if o.Seconds != 0 && (o.Seconds < 0.1 || o.Seconds > 60) {
				return usagef("--seconds %g: must be from 0.1 to 60", o.Seconds)
			}
			return errors.Join(checkParts(o.Only, parts), checkLeast(atLeast{"rounds", o.Rounds, 1}))
		},
		run: func(ctx context.Context) (any, error) { return bench.RunGuards(ctx, o) },
	}.command(r, set)
	f := cmd.Flags()
	f.BoolVar(&o.Quick, "quick", false, "shorter measurements, and 3 rounds unless --rounds is given: under a minute")
	f.IntVar(&o.Rounds, "rounds", 5, "measurements of each figure; medians are shown")
	f.Float64Var(&o.Seconds, "seconds", 0, "duration of each measurement of speed or latency; 0: 2, with --quick 0.5")
	f.StringSliceVar(&o.Only, "only", nil, "parts to run: "+strings.Join(parts, ","))
	redisFlag(cmd, &o.Options)
	return cmd
}

// newGuardLoad returns the hidden command of the load processes of `bench guards`. They call
// guards.
func newGuardLoad(r *Root) *cobra.Command {
	return &cobra.Command{
		Use:    bench.GuardLoadCommand,
		Short:  "Make calls of guards, for bench guards",
		Hidden: true,
		Args:   cobra.NoArgs,
		RunE:   func(cmd *cobra.Command, _ []string) error { return bench.ServeGuardLoad(cmd.Context(), r.In, r.Out) },
	}
}
