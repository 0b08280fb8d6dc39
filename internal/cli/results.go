package cli

import (
	"github.com/spf13/cobra"

	"github.com/bulkaction/bulkaction/api"
)

func newResults(r *Root) *cobra.Command {
	return &cobra.Command{
		Use:   "results GROUP",
		Short: "Print the results of a group's done jobs, one line of JSON each",
		Args:  requireGroup,
		RunE: func(cmd *cobra.Command, args []string) error {
			a, err := r.API()
			if err != nil {
				return err
			}
			return printLines[api.Result](r, a.Results(cmd.Context(), args[0]), "", nil)
		},
	}
}
