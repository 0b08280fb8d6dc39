package cli

import (
	"github.com/spf13/cobra"

	"github.com/bulkaction/bulkaction/client"
)

func newRetry(r *Root) *cobra.Command {
	return &cobra.Command{
		Use:   "retry GROUP",
		Short: "Run the failed jobs of an ended group again",
		Args:  requireGroup,
		RunE:  r.groupCommand((*client.API).Retry, ""),
	}
}
