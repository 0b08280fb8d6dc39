package cli

import (
	"cmp"
	"context"
	"iter"
	"slices"
	"strings"
	"time"

	"github.com/spf13/cobra"

	"github.com/bulkaction/bulkaction/api"
	"github.com/bulkaction/bulkaction/client"
)

// statuses are the states of a group, in the order in which groups pass through them; a group ends
// in one of the last three.
var statuses = []string{"CREATED", "DISPATCHED", "RUNNING", "AGGREGATING", "COMPLETED", "FAILED", "CANCELLED"}

func newGroups(r *Root) *cobra.Command {
	return parentCommand("groups", "List groups", newGroupsLs(r))
}

func newGroupsLs(r *Root) *cobra.Command {
	var filter client.GroupFilter
	var status, since string
	var paused, failedJobs bool
	var list listFlags
	cmd := &cobra.Command{
		Use:   "ls [--tenant TENANT] [--status STATUS]",
		Short: "List the groups, newest first",
		Long: "List the groups, newest first. With --status and without --tenant, the newest is the one that was\n" +
			"opened or has ended last; otherwise, and for CANCELLED, the one that was created last.",
		Example: "  bulkaction groups ls --status FAILED --since 24h",
		Args: func(cmd *cobra.Command, args []string) (err error) {
			status = strings.ToUpper(status)
			if status != "" && !slices.Contains(statuses, status) {
				return usagef("--status %q: must be one of %s", status, strings.Join(statuses, ", "))
			}
			for _, id := range []struct{ flag, value string }{
				{"tenant", filter.Tenant}, {"type", filter.Type}, {"prefix", filter.Prefix},
			} {
				if id.value != "" && !api.ValidID(id.value) {
					return usagef("--%s %q: must "+api.IDRule, id.flag, id.value)
				}
			}
			if cmd.Flags().Changed("paused") {
				filter.Paused = &paused
			}
			if cmd.Flags().Changed("failed-jobs") {
				filter.FailedJobs = &failedJobs
			}
			if filter.Since, err = parseSince(since, time.Now()); err != nil {
				return err
			}
			if err := list.check(); err != nil {
				return err
			}
			return cobra.NoArgs(cmd, args)
		},
		RunE: r.withAPI(func(ctx context.Context, a *client.API, _ []string) error {
			filter.Status = api.Status(status)
			return printList(r, list, a.Groups(ctx, filter), &columns[api.Group]{
				none:   "No groups found.",
				format: "%-36v %-16v %-16v %-12v %10v %10v %10v %v",
				head:   []any{"GROUP", "TENANT", "TYPE", "STATUS", "JOBS", "DONE", "FAILED", "CREATED"},
				cells: func(g api.Group) []any {
					return []any{
						g.ID, g.Tenant, g.Type, groupState(g), thousands(g.Counts.Accepted), thousands(g.Counts.Done),
						thousands(g.Counts.Failed), formatTime(g.Timestamps["created"]),
					}
				},
			})
		}),
	}
	cmd.Flags().StringVar(&filter.Tenant, "tenant", "", "only groups of this tenant")
	cmd.Flags().StringVar(&status, "status", "", "only groups in this state, such as RUNNING or FAILED")
	cmd.Flags().StringVar(&filter.Type, "type", "", "only groups of this type, or with jobs of it")
	cmd.Flags().BoolVar(&paused, "paused", false, "only paused groups; --paused=false: only those that are not")
	cmd.Flags().BoolVar(&failedJobs, "failed-jobs", false, "only groups with failed jobs, also COMPLETED ones; "+
		"--failed-jobs=false: only those without")
	cmd.Flags().StringVar(&filter.Prefix, "prefix", "", "only groups whose id begins with this")
	cmd.Flags().StringVar(&since, "since", "", "only groups created since then: a time such as 2026-01-02T15:04:05Z, "+
		"or an age such as 24h")
	list.add(cmd, "groups")
	return cmd
}

// listFlags say how many items of a long list are printed.
type listFlags struct {
	limit int
	all   bool
	order string // which items come first; "": the newest
}

func (l *listFlags) add(cmd *cobra.Command, what string) {
	cmd.Flags().IntVar(&l.limit, "limit", 100, "number of "+what+" to print; 0: all")
	cmd.Flags().BoolVar(&l.all, "all", false, "print all "+what)
}

// check refuses a negative limit. With --all it sets the limit to 0.
func (l *listFlags) check() error {
	if l.limit < 0 {
		return usagef("--limit %d: must be 0 (all) or more", l.limit)
	}
	if l.all {
		l.limit = 0
	}
	return nil
}

// printList prints the first limit items of a list (0: all), and a note if there are more.
func printList[T any](r *Root, list listFlags, items iter.Seq2[T, error], c *columns[T]) error {
	more := false
	err := printLines(r, func(yield func(T, error) bool) {
		seen := 0
		for item, err := range items {
			if list.limit > 0 && seen == list.limit {
				more = err == nil
				return
			}
			if seen++; !yield(item, err) {
				return
			}
		}
	}, c)
	if more {
		r.Notef("Only the %s %d are printed; --all prints all.", cmp.Or(list.order, "newest"), list.limit)
	}
	return err
}
