package cli

import (
	"cmp"
	"context"
	"fmt"
	"io"
	"slices"
	"strconv"
	"strings"

	"github.com/spf13/cobra"

	"github.com/bulkaction/bulkaction/api"
	"github.com/bulkaction/bulkaction/client"
)

func newStatus(r *Root) *cobra.Command {
	return &cobra.Command{
		Use:   "status GROUP",
		Short: "Show a group: counts, failures by code, aggregate, timestamps",
		Long: "Show a group: counts, failures by code, aggregate, timestamps.\nThe exit code is 0, also if jobs " +
			"failed; `watch` and `submit --wait` return 3 then.",
		Args: requireID("group"),
		RunE: r.withAPI(func(ctx context.Context, a *client.API, args []string) error {
			g, err := a.Group(ctx, args[0])
			if err != nil {
				return err
			}
			if err := r.show(g, func(t table) { groupRows(t, g) }); err != nil {
				return err
			}
			if err := failedJobs(g); err != nil && !r.JSON {
				r.Notef("%s", advice(err))
			}
			return nil
		}),
	}
}

func newResults(r *Root) *cobra.Command {
	return &cobra.Command{
		Use:   "results GROUP",
		Short: "Print the results of a group's done jobs",
		Args:  requireID("group"),
		RunE: r.withAPI(func(ctx context.Context, a *client.API, args []string) error {
			return printLines(r, a.Results(ctx, args[0]), &columns[api.Result]{
				none:   "No results yet.",
				format: "%-10v %-20v %-8v %12v %v",
				head:   []any{"JOB", "KEY", "ATTEMPTS", "MS", "DATA"},
				cells: func(s api.Result) []any {
					ms := strconv.FormatFloat(s.DurationMS, 'f', 1, 64)
					return []any{s.Ordinal, cmp.Or(s.Key, "-"), s.Attempts, ms, string(s.Data)}
				},
			})
		}),
	}
}

func newWatch(r *Root) *cobra.Command {
	return &cobra.Command{
		Use:   "watch GROUP",
		Short: "Follow a group to its end",
		Long: "Follow a group to its end. It prints a line for each change of the group's state, or with --json for\n" +
			"each event, and then a summary. The exit code is 3 if the group ends with failed jobs.",
		Args: requireID("group"),
		RunE: r.withAPI(func(ctx context.Context, a *client.API, args []string) error {
			first := true
			g, err := r.follow(ctx, a, args[0], func(e api.Event) error {
				if first && !r.JSON && e.Group != nil && neverEnds(*e.Group) { // no bar is shown yet
					r.Notef("Group %[1]s is not sealed, so it does not end: `bulkaction seal %[1]s` says that it has "+
						"all its jobs.", e.Group.ID)
				}
				first = first && e.Group == nil
				return r.printEvent(e)
			})
			if err != nil {
				return err
			}
			if !r.JSON {
				if err := r.show(g, func(t table) { groupRows(t, g) }); err != nil {
					return err
				}
			}
			return failedJobs(g)
		}),
	}
}

// follow follows a group until the group has ended, and returns its final state. It calls emit with
// each event, and on a terminal shows a progress bar.
func (r *Root) follow(ctx context.Context, a *client.API, id string, emit func(api.Event) error) (api.Group, error) {
	bar := r.newProgress()
	defer bar.stop()
	for e, err := range a.Events(ctx, id, "") {
		if err != nil && ctx.Err() != nil {
			return api.Group{}, withHint(err,
				"The group still runs: `bulkaction watch %[1]s` follows it again, `bulkaction cancel %[1]s` "+
					"cancels it.", id)
		}
		if err != nil {
			return api.Group{}, err
		}
		if err := emit(e); err != nil {
			return api.Group{}, err
		}
		if e.Group == nil {
			continue
		}
		bar.showGroup("", *e.Group)
		if e.Group.Status.Ended() && len(e.Omitted) == 0 {
			return *e.Group, nil
		}
	}
	return a.Group(ctx, id)
}

// neverEnds reports whether a group can't end because it is not sealed and has no announced total.
func neverEnds(g api.Group) bool { return !g.Sealed && g.Total == nil && !g.Status.Ended() }

const typeProgress = "group.progress"

// isPast reports whether the group has already left the status that its event shows. Then the
// event's counts are not of that time.
func isPast(g api.Group) bool {
	at := slices.Index(lifecycle, strings.ToLower(string(g.Status)))
	return slices.ContainsFunc(lifecycle[at+1:], func(later string) bool {
		_, reached := g.Timestamps[later]
		return reached
	})
}

// printEvent prints an event of a group: with --json as JSON, otherwise a line for each change of
// state. It prints no line if a progress bar shows the state on the same terminal.
func (r *Root) printEvent(e api.Event) error {
	if r.JSON {
		return r.Print(e)
	}
	if e.Group == nil || e.Type == typeProgress || (r.IsTerminal && r.OutIsTerminal) {
		return nil
	}
	line := fmt.Sprintf("%s %s\n", formatTime(e.At), e.Group.Status)
	if !isPast(*e.Group) {
		line = fmt.Sprintf("%s %-11s %s, %s failed\n", formatTime(e.At), e.Group.Status, progressText(*e.Group),
			thousands(e.Group.Counts.Failed))
	}
	_, err := io.WriteString(r.Out, line)
	return err
}
