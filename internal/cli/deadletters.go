package cli

import (
	"context"
	"time"

	"github.com/spf13/cobra"

	"github.com/bulkaction/bulkaction/api"
	"github.com/bulkaction/bulkaction/client"
)

func newDeadLetters(r *Root) *cobra.Command {
	var list listFlags
	var filter client.DeadLetterFilter
	var since string
	cmd := &cobra.Command{
		Use:   "dead-letters",
		Short: "Print the failed jobs of all groups, newest first",
		Args: func(cmd *cobra.Command, args []string) (err error) {
			if err := list.check(); err != nil {
				return err
			}
			if filter.Since, err = parseSince(since, time.Now()); err != nil {
				return err
			}
			return cobra.NoArgs(cmd, args)
		},
		RunE: r.withAPI(func(ctx context.Context, a *client.API, _ []string) error {
			return printList(r, list, a.DeadLetters(ctx, filter), &columns[api.DeadLetter]{
				none:   "No dead letters found.",
				format: "%-20v %-24v %-16v %-16v %-20v %v",
				head:   []any{"AT", "JOB", "TENANT", "TYPE", "CODE", "ERROR"},
				cells: func(d api.DeadLetter) []any {
					return []any{formatTime(d.At), d.Job, d.Tenant, d.Type, d.Code, d.Error}
				},
			})
		}),
	}
	list.add(cmd, "jobs")
	flags := cmd.Flags()
	flags.StringVar(&filter.Code, "code", "", "only jobs that failed with this code, such as LOST")
	flags.StringVar(&filter.Group, "group", "", "only jobs of this group")
	flags.StringVar(&filter.Tenant, "tenant", "", "only jobs of this tenant")
	flags.StringVar(&filter.Type, "type", "", "only jobs of this type")
	flags.StringVar(&since, "since", "",
		"only jobs that failed since then: a time such as 2026-01-02T15:04:05Z, or an age such as 24h")
	return cmd
}
