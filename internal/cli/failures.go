package cli

import (
	"fmt"

	"github.com/spf13/cobra"

	"github.com/bulkaction/bulkaction/api"
)

func newFailures(r *Root) *cobra.Command {
	return &cobra.Command{
		Use:   "failures GROUP",
		Short: "Print a group's failed jobs: a table on a terminal, otherwise one line of JSON each",
		Args:  requireGroup,
		RunE: func(cmd *cobra.Command, args []string) error {
			a, err := r.API()
			if err != nil {
				return err
			}
			const format = "%-10v %-20v %-8v %-20v %v"
			head := fmt.Sprintf(format, "JOB", "CODE", "ATTEMPTS", "AT", "ERROR")
			return printLines(r, a.Failures(cmd.Context(), args[0]), head, func(f api.Failure) string {
				return fmt.Sprintf(format, f.Ordinal, f.Code, f.Attempts, formatTime(f.At), f.Error)
			})
		},
	}
}
