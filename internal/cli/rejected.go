package cli

import (
	"cmp"
	"context"
	"fmt"

	"github.com/spf13/cobra"

	"github.com/bulkaction/bulkaction/api"
	"github.com/bulkaction/bulkaction/client"
)

func newRejected(r *Root) *cobra.Command {
	var list listFlags
	var data bool
	cmd := &cobra.Command{
		Use:   "rejected",
		Short: "Print the messages of the ingest stream that were rejected, newest first",
		Long: "Print the messages of the ingest stream that were rejected, newest first, each with the reason.\n" +
			"A message is accepted or rejected whole: correct it and send it again.",
		Args: func(cmd *cobra.Command, args []string) error {
			if err := list.check(); err != nil {
				return err
			}
			return cobra.NoArgs(cmd, args)
		},
		RunE: r.withAPI(func(ctx context.Context, a *client.API, _ []string) error {
			return printList(r, list, rejectedMessages(ctx, a, data), &columns[api.RejectedMessage]{
				none:   "No rejected messages.",
				format: "%-20v %-24v %-16v %10v %v",
				head:   []any{"AT", "MESSAGE", "TYPE", "BYTES", "REASON"},
				cells: func(m api.RejectedMessage) []any {
					at := "-"
					if m.At != nil {
						at = formatTime(*m.At)
					}
					reason := m.Reason
					if m.Data != "" {
						reason += fmt.Sprintf(" %q", m.Data)
					}
					return []any{at, cmp.Or(m.MessageID, m.Entry, m.ID), cmp.Or(m.Type, "-"), m.Bytes, reason}
				},
			})
		}),
	}
	list.add(cmd, "messages")
	cmd.Flags().BoolVar(&data, "data", false, "print the messages' data, too")
	return cmd
}

// rejectedMessages iterates over all rejected messages. It reads page by page.
func rejectedMessages(ctx context.Context, a *client.API, data bool) func(func(api.RejectedMessage, error) bool) {
	return func(yield func(api.RejectedMessage, error) bool) {
		for q := (client.RejectedQuery{Data: data}); ; {
			page, err := a.Rejected(ctx, q)
			if err != nil {
				yield(api.RejectedMessage{}, err)
				return
			}
			for _, m := range page.Rejected {
				if !yield(m, nil) {
					return
				}
			}
			if q.Cursor = page.Cursor; q.Cursor == "" {
				return
			}
		}
	}
}
