package cli

import (
	"github.com/spf13/cobra"

	"github.com/bulkaction/bulkaction/api"
)

func newDeadLetters(r *Root) *cobra.Command {
	var limit int
	var code, group string
	cmd := &cobra.Command{
		Use: "dead-letters",
		Short: "Print the failed jobs of all groups, newest first: a table on a terminal, otherwise one line " +
			"of JSON each",
		Args: cobra.NoArgs,
		RunE: func(cmd *cobra.Command, _ []string) error {
			if limit < 0 {
				return usagef("--limit %d: must be 0 (all) or more", limit)
			}
			a, err := r.API()
			if err != nil {
				return err
			}
			seen, more := 0, false
			letters := func(yield func(api.DeadLetter, error) bool) {
				for d, err := range a.DeadLetters(cmd.Context()) {
					if err == nil && (code != "" && d.Code != code || group != "" && d.Group != group) {
						continue
					}
					if limit > 0 && seen == limit {
						more = err == nil
						return
					}
					if seen++; !yield(d, err) {
						return
					}
				}
			}
			err = printLines(r, letters, &columns[api.DeadLetter]{
				format: "%-20v %-24v %-16v %-16v %-20v %v",
				head:   []any{"AT", "JOB", "TENANT", "TYPE", "CODE", "ERROR"},
				cells: func(d api.DeadLetter) []any {
					return []any{formatTime(d.At), d.Job, d.Tenant, d.Type, d.Code, d.Error}
				},
			})
			if more {
				r.Notef("Only the newest %d are printed; --limit 0 prints all.", limit)
			}
			return err
		},
	}
	cmd.Flags().IntVar(&limit, "limit", 100, "number of jobs to print; 0: all")
	cmd.Flags().StringVar(&code, "code", "", "only jobs that failed with this code, such as LOST")
	cmd.Flags().StringVar(&group, "group", "", "only jobs of this group")
	return cmd
}
