package cli

import (
	"github.com/spf13/cobra"

	"github.com/bulkaction/bulkaction/api"
)

func newDeadLetters(r *Root) *cobra.Command {
	var list listFlags
	var code, group string
	cmd := &cobra.Command{
		Use:   "dead-letters",
		Short: "Print the failed jobs of all groups, newest first",
		Args:  cobra.NoArgs,
		RunE: func(cmd *cobra.Command, _ []string) error {
			if err := list.check(); err != nil {
				return err
			}
			a, err := r.API()
			if err != nil {
				return err
			}
			letters := func(yield func(api.DeadLetter, error) bool) {
				for d, err := range a.DeadLetters(cmd.Context()) {
					if err == nil && (code != "" && d.Code != code || group != "" && d.Group != group) {
						continue
					}
					if !yield(d, err) {
						return
					}
				}
			}
			return printList(r, list, letters, &columns[api.DeadLetter]{
				format: "%-20v %-24v %-16v %-16v %-20v %v",
				head:   []any{"AT", "JOB", "TENANT", "TYPE", "CODE", "ERROR"},
				cells: func(d api.DeadLetter) []any {
					return []any{formatTime(d.At), d.Job, d.Tenant, d.Type, d.Code, d.Error}
				},
			})
		},
	}
	list.add(cmd, "jobs")
	cmd.Flags().StringVar(&code, "code", "", "only jobs that failed with this code, such as LOST")
	cmd.Flags().StringVar(&group, "group", "", "only jobs of this group")
	return cmd
}
