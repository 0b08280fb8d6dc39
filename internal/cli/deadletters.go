package cli

import (
	"fmt"
	"iter"

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
			more := false
			wanted := func(d api.DeadLetter) bool {
				return (code == "" || d.Code == code) && (group == "" || d.Group == group)
			}
			letters := firstN(limit, filter(wanted, a.DeadLetters(cmd.Context())), &more)
			const format = "%-20v %-24v %-16v %-16v %-20v %v"
			head := fmt.Sprintf(format, "AT", "JOB", "TENANT", "TYPE", "CODE", "ERROR")
			err = printLines(r, letters, head, func(d api.DeadLetter) string {
				return fmt.Sprintf(format, formatTime(d.At), d.Job, d.Tenant, d.Type, d.Code, d.Error)
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

// filter returns the items for which wanted is true, and all errors.
func filter[T any](wanted func(T) bool, items iter.Seq2[T, error]) iter.Seq2[T, error] {
	return func(yield func(T, error) bool) {
		for item, err := range items {
			if (err != nil || wanted(item)) && !yield(item, err) {
				return
			}
		}
	}
}

// firstN returns the first n items; all if n is 0. It sets *more if there are more.
func firstN[T any](n int, items iter.Seq2[T, error], more *bool) iter.Seq2[T, error] {
	return func(yield func(T, error) bool) {
		seen := 0
		for item, err := range items {
			if n > 0 && seen == n {
				*more = err == nil
				return
			}
			if !yield(item, err) {
				return
			}
			seen++
		}
	}
}
