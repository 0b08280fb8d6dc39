package cli

import (
	"github.com/spf13/cobra"

	"github.com/bulkaction/bulkaction/api"
)

func newStatus(r *Root) *cobra.Command {
	return &cobra.Command{
		Use:   "status GROUP",
		Short: "Show a group: counts, failures by code, aggregate, timestamps",
		Long: "Show a group: counts, failures by code, aggregate, timestamps.\nThe exit code is 3 if it " +
			"has ended with failed jobs.",
		Args: requireGroup,
		RunE: func(cmd *cobra.Command, args []string) error {
			a, err := r.API()
			if err != nil {
				return err
			}
			g, err := a.Group(cmd.Context(), args[0])
			if err != nil {
				return err
			}
			if err := r.showGroup(g); err != nil {
				return err
			}
			return failedJobs(g)
		},
	}
}

func (r *Root) showGroup(g api.Group) error {
	if r.JSON {
		return r.Print(g)
	}
	return groupTable(r.Out, g)
}
