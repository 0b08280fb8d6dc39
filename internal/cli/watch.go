package cli

import (
	"context"
	"fmt"
	"io"

	"github.com/spf13/cobra"

	"github.com/bulkaction/bulkaction/api"
	"github.com/bulkaction/bulkaction/client"
)

func newWatch(r *Root) *cobra.Command {
	return &cobra.Command{
		Use:   "watch GROUP",
		Short: "Follow a group to its end",
		Long: "Follow a group to its end. It prints a line for each change of the group's state, or with --json for\n" +
			"each event, and then a summary. The exit code is 3 if the group ends with failed jobs.",
		Args: requireGroup,
		RunE: func(cmd *cobra.Command, args []string) error {
			a, err := r.API()
			if err != nil {
				return err
			}
			emit := r.printState
			if r.JSON {
				emit = func(e api.Event) error { return r.Print(e) }
			}
			g, err := r.follow(cmd.Context(), a, args[0], emit)
			if err != nil {
				return err
			}
			if !r.JSON {
				if err := groupTable(r.Out, g); err != nil {
					return err
				}
			}
			return failedJobs(g)
		},
	}
}

// follow shows the progress of a group until the group has ended, and returns its final state. It
// calls emit with each event.
func (r *Root) follow(ctx context.Context, a *client.API, id string, emit func(api.Event) error) (api.Group, error) {
	var bar *bar
	defer func() { bar.stop() }()
	for e, err := range a.Events(ctx, id, "") {
		if err != nil && ctx.Err() != nil {
			return api.Group{}, withHint(err,
				"The group still runs: `bulkaction watch %[1]s` follows it again, `bulkaction cancel %[1]s` "+
					"cancels it.", id)
		}
		if err != nil {
			return api.Group{}, err
		}
		if bar == nil { // created late, so that an error message comes without a bar
			bar = r.newBar("", 0)
		}
		if err := emit(e); err != nil {
			return api.Group{}, err
		}
		if e.Group == nil {
			continue
		}
		bar.showGroup(*e.Group)
		if e.Group.Status.Ended() {
			return *e.Group, nil
		}
	}
	return a.Group(ctx, id)
}

const typeProgress = "group.progress"

// printState prints a change of state, unless a bar on the same terminal shows it.
func (r *Root) printState(e api.Event) error {
	if e.Group == nil || e.Type == typeProgress || (r.IsTerminal && r.OutIsTerminal) {
		return nil
	}
	line := fmt.Sprintf("%s %-11s %s, %s failed\n", formatTime(e.At), e.Group.Status, progressText(*e.Group),
		thousands(e.Group.Counts.Failed))
	_, err := io.WriteString(r.Out, line)
	return err
}
