package cli

import (
	"context"
	"os"

	"github.com/spf13/cobra"

	"github.com/bulkaction/bulkaction/internal/app"
	"github.com/bulkaction/bulkaction/internal/journal"
	"github.com/bulkaction/bulkaction/internal/roles"
)

// newRole is how the bench runs real processes without building six binaries.
func newRole(*Root) *cobra.Command {
	var dir string
	cmd := &cobra.Command{
		Use:       "role NAME",
		Short:     "Run one role as a process, as its own binary does",
		Hidden:    true,
		Args:      cobra.MatchAll(cobra.ExactArgs(1), cobra.OnlyValidArgs),
		ValidArgs: roles.Names,
		RunE: func(_ *cobra.Command, args []string) error {
			os.Args = args // app.Main reads flags from behind the program's name
			app.Main(args[0], journaled(dir, roles.ByName(args[0])))
			return nil
		},
	}
	cmd.Flags().StringVar(&dir, "journal", "", "folder to which permits and starts are logged, for experiments")
	return cmd
}

// journaled has a role note its permits and starts in dir, if any.
func journaled(dir string, run roles.Role) roles.Role {
	if dir == "" {
		return run
	}
	return func(ctx context.Context, p *app.Process) error {
		j, err := journal.Open(dir, p.Instance)
		if err != nil {
			return err
		}
		p.OnStop("journal", func(context.Context) error { return j.Close() })
		return run(journal.With(ctx, j), p)
	}
}
