package cli

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"iter"
	"slices"
	"strconv"
	"strings"

	"github.com/spf13/cobra"

	"github.com/bulkaction/bulkaction/api"
	"github.com/bulkaction/bulkaction/client"
)

func newJobs(r *Root) *cobra.Command {
	var filter client.JobFilter
	var list listFlags
	cmd := &cobra.Command{
		Use:   "jobs GROUP [--state STATE] [--key KEY]",
		Short: "List a group's jobs",
		Long: "List a group's jobs, or find one by its key, in a group that was submitted with --unique-keys. The\n" +
			"list has the keys of failed jobs; of other jobs it prints ?, and results has the keys of done ones.",
		Example: "  bulkaction jobs promo-7 --state in_flight",
		Args: func(cmd *cobra.Command, args []string) error {
			filter.State = strings.ReplaceAll(strings.ToLower(filter.State), "-", "_")
			if filter.State != "" && !slices.Contains(api.JobStates, filter.State) {
				return usagef("--state %q: must be one of %s", filter.State, strings.Join(api.JobStates, ", "))
			}
			if err := list.check(); err != nil {
				return err
			}
			return requireID("group")(cmd, args)
		},
		RunE: r.withAPI(func(ctx context.Context, a *client.API, args []string) error {
			return printList(r, list, a.Jobs(ctx, args[0], filter), &columns[api.Job]{
				none:   "No jobs found.",
				format: "%-10v %-20v %-10v %-8v %v",
				head:   []any{"JOB", "KEY", "STATE", "ATTEMPTS", "LAST ERROR"},
				cells: func(j api.Job) []any {
					last := "-"
					if j.LastError != nil {
						last = j.LastError.Code + ": " + j.LastError.Error
					}
					key := cmp.Or(j.Key, "-")
					lost := j.LastError == nil || j.LastError.Code == "LOST"
					if j.Key == "" && (j.State != "failed" || lost) {
						key = "?" // the list knows only the keys of failed jobs that were not lost
					}
					return []any{j.Ordinal, key, j.State, j.Attempts, last}
				},
			})
		}),
	}
	cmd.Flags().StringVar(&filter.State, "state", "", "only jobs in this state: "+strings.Join(api.JobStates, ", "))
	cmd.Flags().StringVar(&filter.Key, "key", "", "only the job with this key")
	list.add(cmd, "jobs")
	list.order = "first"
	return cmd
}

func newJob(r *Root) *cobra.Command {
	var key string
	ordinal := int64(-1)
	cmd := &cobra.Command{
		Use:   "job GROUP ORDINAL | --key KEY",
		Short: "Show one job: its state, its last errors, and why it waits",
		Long: "Show one job by its ordinal, or by its key, in a group that was submitted with --unique-keys: its\n" +
			"state, its last errors, and why it waits.",
		Example: "  bulkaction job promo-7 --key customer-4711",
		Args: func(_ *cobra.Command, args []string) (err error) {
			switch {
			case key != "" && len(args) == 2:
				return usagef("give the ordinal or --key, not both")
			case key == "" && len(args) != 2, key != "" && len(args) != 1:
				return usagef("job needs a group, and an ordinal or --key, got %s", argumentsText(args))
			case key == "":
				if ordinal, err = strconv.ParseInt(args[1], 10, 64); err != nil || ordinal < 0 {
					return usagef("ordinal %q: must be a whole number from 0", args[1])
				}
			}
			return checkID("group", args[0])
		},
		RunE: r.withAPI(func(ctx context.Context, a *client.API, args []string) error {
			if key != "" {
				found, err := first(a.Jobs(ctx, args[0], client.JobFilter{Key: key}))
				if err != nil {
					return err
				}
				if found == nil {
					return withHint(fmt.Errorf("no job of group %s has the key %q", args[0], key),
						"`bulkaction jobs %s` lists the group's jobs.", args[0])
				}
				ordinal = found.Ordinal
			}
			j, err := a.Job(ctx, args[0], ordinal)
			if isNotFound(err) {
				return hintUnknownJob(ctx, a, args[0], err)
			}
			if err != nil {
				return err
			}
			j.Key = cmp.Or(j.Key, key)
			return r.show(j, func(t table) { jobRows(t, j) })
		}),
	}
	cmd.Flags().StringVar(&key, "key", "", "the job with this key, instead of an ordinal")
	return cmd
}

func newRetry(r *Root) *cobra.Command {
	var choice api.RetryChoice
	cmd := &cobra.Command{
		Use:   "retry GROUP [--code CODE]... [--job ORDINAL]...",
		Short: "Run the failed jobs of an ended group again",
		Long: "Run the failed jobs of an ended group again: all, or those that failed with one of the codes and\n" +
			"those with one of the ordinals. The others stay failed. The dead letters of jobs that run again are\n" +
			"deleted.",
		Example: "  bulkaction retry promo-7 --code SMTP_451 --code TIMEOUT",
		Args:    requireID("group"),
		RunE: ask(r, func(ctx context.Context, a *client.API, args []string) (api.Accepted, error) {
			answer, err := a.RetryChosen(ctx, args[0], choice)
			if !errors.Is(err, client.ErrConflict) {
				return answer, err
			}
			if g, lost := a.Group(ctx, args[0]); lost == nil && !g.Status.Ended() {
				err = withHint(err, "`bulkaction watch %s` waits for its end.", args[0])
			}
			return answer, err
		}, func(t table, answer api.Accepted) {
			t.row(answer.ID, answer.Status, "failed jobs run again")
		}),
	}
	cmd.Flags().StringArrayVar(&choice.Codes, "code", nil, "only jobs that failed with this code (repeatable)")
	cmd.Flags().Int64SliceVar(&choice.Jobs, "job", nil, "only the job with this ordinal (repeatable, or 1,5,9)")
	return cmd
}

// first returns the first item of a list; nil if the list is empty.
func first[T any](items iter.Seq2[T, error]) (*T, error) {
	for item, err := range items {
		return &item, err
	}
	return nil, nil
}

// jobRows adds what is known of a job to the table.
func jobRows(t table, j api.Job) {
	why := api.Why{Job: j.ID}
	if j.Why != nil {
		why = *j.Why
	}
	whyRows(t, why, &j)
	t.row("Attempts", j.Attempts)
	if j.TraceID != "" {
		t.row("Trace", j.TraceID)
	}
}
