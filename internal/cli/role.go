package cli

import (
	"os"

	"github.com/spf13/cobra"

	"github.com/bulkaction/bulkaction/internal/app"
	"github.com/bulkaction/bulkaction/internal/roles"
)

// newRole is how the bench runs real processes without building six binaries.
func newRole(*Root) *cobra.Command {
	return &cobra.Command{
		Use:       "role NAME",
		Short:     "Run one role as a process, as its own binary does",
		Hidden:    true,
		Args:      cobra.MatchAll(cobra.ExactArgs(1), cobra.OnlyValidArgs),
		ValidArgs: roles.Names,
		RunE: func(_ *cobra.Command, args []string) error {
			os.Args = args // app.Main reads flags from behind the program's name
			app.Main(args[0], roles.ByName(args[0]))
			return nil
		},
	}
}
