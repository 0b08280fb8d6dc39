package cli

import (
	"context"

	"github.com/spf13/cobra"

	"github.com/bulkaction/bulkaction/api"
	"github.com/bulkaction/bulkaction/client"
)

func newCancel(r *Root) *cobra.Command {
	return &cobra.Command{
		Use:   "cancel GROUP",
		Short: "Cancel a group at once: none of its jobs starts any more",
		Args:  requireGroup,
		RunE:  r.groupCommand((*client.API).Cancel, ""),
	}
}

// groupCommand returns a command that calls do for one group and prints the group's status.
// pauseState is printed as well; it is "" for commands whose effect the status shows.
func (r *Root) groupCommand(
	do func(*client.API, context.Context, string) (api.Accepted, error), pauseState string,
) func(*cobra.Command, []string) error {
	return func(cmd *cobra.Command, args []string) error {
		a, err := r.API()
		if err != nil {
			return err
		}
		accepted, err := do(a, cmd.Context(), args[0])
		if err != nil {
			return err
		}
		if r.JSON && pauseState != "" {
			return r.Print(struct {
				api.Accepted
				Paused bool `json:"paused"`
			}{accepted, pauseState == statePaused})
		}
		if r.JSON {
			return r.Print(accepted)
		}
		t := newTable(r.Out)
		if pauseState == "" {
			t.row(accepted.ID, accepted.Status)
		} else {
			t.row(accepted.ID, accepted.Status, pauseState)
		}
		return t.flush()
	}
}
