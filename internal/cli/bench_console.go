package cli

import (
	"context"
	"errors"
	"strings"

	"github.com/spf13/cobra"

	"github.com/bulkaction/bulkaction/bench"
)

const mostViewers = 2000 // most event streams that one process of the console serves

func newBenchConsole(r *Root, set *variables) *cobra.Command {
	var o bench.ConsoleOptions
	parts := bench.ConsoleParts()
	cmd := benchmark{
		use:     "console",
		short:   "The web console: lists of many groups, a large group at full speed, viewers of one page",
		options: &o.Options,
		check: func(*cobra.Command, []string) error {
			err := errors.Join(checkParts(o.Only, parts), checkLeast(
				atLeast{"groups", o.Groups, 1}, atLeast{"jobs", o.Jobs, 1}, atLeast{"viewers", o.Viewers, 1},
				atLeast{"few-viewers", o.Few, 1}, atLeast{"rounds", o.Rounds, 1}))
			if err == nil && max(o.Viewers, o.Few) > mostViewers {
				return usagef("--viewers %d, --few-viewers %d: must be at most %d", o.Viewers, o.Few, mostViewers)
			}
			return err
		},
		run: func(ctx context.Context) (any, error) { return bench.RunConsole(ctx, o) },
	}.command(r, set)
	f := cmd.Flags()
	f.IntVar(&o.Groups, "groups", 100_000, "groups, each with a tenant of its own, of the part lists")
	f.IntVar(&o.Jobs, "jobs", 1_000_000, "jobs of the large group, and of each round of the part throughput")
	f.IntVar(&o.Viewers, "viewers", 500, "viewers of one page, in the part viewers")
	f.IntVar(&o.Few, "few-viewers", 50, "viewers of the running group, in the part throughput")
	f.IntVar(&o.Rounds, "rounds", 3, "rounds with and without viewers, in the part throughput")
	f.StringSliceVar(&o.Only, "only", nil, "parts to run: "+strings.Join(parts, ","))
	return cmd
}
