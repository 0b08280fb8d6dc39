package cli

import (
	"cmp"
	"context"
	"log/slog"
	"time"

	"github.com/spf13/cobra"

	"github.com/bulkaction/bulkaction/api"
	"github.com/bulkaction/bulkaction/client"
	"github.com/bulkaction/bulkaction/internal/access/activity"
	"github.com/bulkaction/bulkaction/internal/redisx"
	"github.com/bulkaction/bulkaction/internal/redisx/keyspace"
)

func newActivity(r *Root) *cobra.Command {
	var list listFlags
	var q client.ActivityQuery
	var since string
	cmd := &cobra.Command{
		Use:   "activity",
		Short: "Print who changed what, newest first",
		Long: "Print who changed what, newest first: the log of all changes but submissions and appends. It needs\n" +
			"the key of an admin. An entry with an outcome says why a change failed; the entry before it has the\n" +
			"same request id.",
		Args: func(cmd *cobra.Command, args []string) (err error) {
			if err := list.check(); err != nil {
				return err
			}
			if q.Since, err = parseSince(since, time.Now()); err != nil {
				return err
			}
			return cobra.NoArgs(cmd, args)
		},
		RunE: r.withAPI(func(ctx context.Context, a *client.API, _ []string) error {
			return printList(r, list, activities(ctx, a, q), &columns[api.Activity]{
				none:   "No entries found.",
				format: "%-20v %-16v %-9v %-4v %-18v %-28v %v",
				head:   []any{"AT", "ACTOR", "ROLE", "VIA", "ACTION", "OBJECT", "AFTER"},
				cells: func(e api.Activity) []any {
					return []any{
						formatTime(e.At), e.Actor, cmp.Or(e.Role, "-"), e.Via, e.Action, e.Object,
						cmp.Or(e.Outcome, string(e.After)),
					}
				},
			})
		}),
	}
	list.add(cmd, "entries")
	cmd.Flags().StringVar(&q.Actor, "actor", "", "only changes of this actor, the id of a key or cli:USER")
	cmd.Flags().StringVar(&q.Tenant, "tenant", "", "only changes with keys of this tenant")
	cmd.Flags().StringVar(&since, "since", "", "only changes since then: a time such as 2026-01-02T15:04:05Z, or an "+
		"age such as 24h")
	return cmd
}

// parseSince parses the value of --since: a time, or an age (not negative) before now. "" is the
// zero time.
func parseSince(text string, now time.Time) (time.Time, error) {
	if text == "" {
		return time.Time{}, nil
	}
	if age, err := time.ParseDuration(text); err == nil && age >= 0 {
		return now.Add(-age), nil
	}
	at, err := time.Parse(time.RFC3339, text)
	if err != nil {
		return at, usagef("--since %s: must be a time such as 2026-01-02T15:04:05Z, or an age such as 24h", text)
	}
	return at, nil
}

// activities iterates over all entries of the activity log that a query selects. It reads page by
// page.
func activities(ctx context.Context, a *client.API, q client.ActivityQuery) func(func(api.Activity, error) bool) {
	return func(yield func(api.Activity, error) bool) {
		for q := q; ; {
			page, err := a.Activity(ctx, q)
			if err != nil {
				yield(api.Activity{}, err)
				return
			}
			for _, e := range page.Activity {
				if !yield(e, nil) {
					return
				}
			}
			if q.Cursor = page.Cursor; q.Cursor == "" {
				return
			}
		}
	}
}

// record writes to the activity log that this command changes something in Redis, and then calls
// change. If it can't write the entry, it does not call change. If change fails, a second entry
// says so.
func record(
	ctx context.Context, conn *redisx.Conn, space keyspace.Space, e api.Activity, change func(context.Context) error,
) error {
	ctx = activity.WithActor(ctx, api.Activity{Actor: operatorName(), Via: api.ViaCLI})
	return activity.New(conn.Cmd, space, 0, slog.New(slog.DiscardHandler)).Do(ctx, e, change)
}
