package cli

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"io"
	"slices"
	"strconv"
	"strings"

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
	var status string
	var paused, failedJobs bool
	var list listFlags
	var tags []string
	cmd := &cobra.Command{
		Use:   "ls [--tenant TENANT] [--status STATUS]",
		Short: "List the groups, newest first",
		Long: "List the groups, newest first. With --status and without --tenant, the newest is the one that was\n" +
			"opened or has ended last; otherwise, and for CANCELLED, the one that was created last.",
		Example: "  bulkaction groups ls --status FAILED --since 24h",
		Args: func(cmd *cobra.Command, args []string) error {
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
			var err error
			if filter.Tags, err = api.ParseTags(tags); err != nil {
				return usagef("--tag: %v", err)
			}
			if cmd.Flags().Changed("paused") {
				filter.Paused = &paused
			}
			if cmd.Flags().Changed("failed-jobs") {
				filter.FailedJobs = &failedJobs
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
	cmd.Flags().BoolVar(&failedJobs, "failed-jobs", false, "only groups with failed jobs, including COMPLETED ones; "+
		"--failed-jobs=false: only those without")
	cmd.Flags().StringArrayVar(&tags, "tag", nil, "only groups with this tag, KEY=VALUE; several must all match (repeatable)")
	cmd.Flags().StringVar(&filter.Prefix, "prefix", "", "only groups whose id begins with this")
	cmd.Flags().StringVar(&filter.Name, "name", "", "only groups with exactly this name")
	addSince(cmd.Flags(), &filter.Since, "only groups created")
	list.add(cmd, "groups")
	return cmd
}

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

// States that a command prints.
const (
	statePaused  = "paused"
	stateResumed = "resumed"
)

// groupActions returns functions that create the commands cancel, pause and resume.
func groupActions() []Command {
	var all []Command
	for _, action := range []struct {
		name, short string
		do          func(*client.API, context.Context, string) (api.Accepted, error)
		pauseState  string // "" for an action whose effect the status shows
	}{
		{"cancel", "Cancel a group at once: no more of its jobs start", (*client.API).Cancel, ""},
		{"pause", "Pause a group: none of its jobs starts until it is resumed; running jobs finish",
			(*client.API).Pause, statePaused},
		{"resume", "Resume a paused group", (*client.API).Resume, stateResumed},
	} {
		all = append(all, func(r *Root) *cobra.Command {
			return &cobra.Command{
				Use:   action.name + " GROUP",
				Short: action.short,
				Args:  requireID("group"),
				RunE: ask(r, func(ctx context.Context, a *client.API, args []string) (actionAnswer, error) {
					accepted, err := action.do(a, ctx, args[0])
					answer := actionAnswer{Accepted: accepted}
					if action.pauseState != "" {
						paused := action.pauseState == statePaused
						answer.Paused = &paused
					}
					return answer, err
				}, func(t table, answer actionAnswer) {
					cells := []any{answer.ID, answer.Status}
					if action.pauseState != "" {
						cells = append(cells, action.pauseState)
					}
					t.row(cells...)
				}),
			}
		})
	}
	return all
}

func newDelete(r *Root) *cobra.Command {
	return &cobra.Command{
		Use:   "delete GROUP",
		Short: "Delete a group and all that is kept of its jobs; one that has not ended is cancelled first",
		Args:  requireID("group"),
		RunE: ask(r, func(ctx context.Context, a *client.API, args []string) (api.Deletion, error) {
			return a.Delete(ctx, args[0])
		}, func(t table, d api.Deletion) { t.row(d.ID, "deleted") }),
	}
}

func newTenantErase(r *Root) *cobra.Command {
	return &cobra.Command{
		Use:   "erase TENANT KEY",
		Short: "Erase what is kept of a tenant's jobs with a key, such as a person's address",
		Long: "Erase what is kept of a tenant's jobs with a key, such as a person's address, in all its groups. Jobs that\n" +
			"wait are cancelled; of those that have ended, payload, key, errors and result data are deleted. The exit\n" +
			"code is 1 if something is left: repeat the command when these jobs have ended.",
		Args: cobra.ExactArgs(2),
		RunE: r.withAPI(func(ctx context.Context, a *client.API, args []string) error {
			e, err := a.Erase(ctx, args[0], args[1])
			if err != nil {
				return err
			}
			if err := r.show(e, func(t table) {
				t.row("Groups looked at", thousands(int64(e.Groups)))
				t.row("Jobs erased", thousands(int64(e.Erased)))
				for _, left := range e.Left {
					job := left.Group
					if left.Ordinal != nil {
						job += "." + strconv.FormatInt(*left.Ordinal, 10)
					}
					t.row("Left", job, left.Reason)
				}
			}); err != nil || len(e.Left) == 0 {
				return err
			}
			return errors.New("not all could be erased: repeat this when what is left has ended")
		}),
	}
}

// actionAnswer is the answer to a change of a group.
type actionAnswer struct {
	api.Accepted
	Paused *bool `json:"paused,omitempty"` // nil for an action that neither pauses nor resumes
}

func newType(r *Root) *cobra.Command {
	known := func(ctx context.Context, a *client.API, typ string) bool {
		stats, err := a.Stats(ctx)
		return err != nil || slices.ContainsFunc(stats.Types, func(t api.TypeStats) bool { return t.Type == typ })
	}
	return parentCommand("type", "Show, limit, pause and resume job types; `stats` shows those that are paused",
		newTypeShow(r), newTypeScale(r), newTypeSet(r),
		newPause(r, "type", (*client.API).PauseType, known, "Type %s is unknown: it has neither jobs nor workers."),
		newResume(r, "type", (*client.API).ResumeType))
}

// pauseCall is a call of the API that pauses or resumes a tenant or type.
type pauseCall func(*client.API, context.Context, string) (api.Paused, error)

// newPause returns the command that pauses a tenant or type. If known returns false, the command
// first prints warning, that the name is unknown. It pauses nevertheless, because jobs of this name
// may come later.
func newPause(
	r *Root, kind string, pause pauseCall, known func(context.Context, *client.API, string) bool, warning string,
) *cobra.Command {
	return &cobra.Command{
		Use:   "pause " + strings.ToUpper(kind),
		Short: "Pause a " + kind + ": none of its jobs starts until it is resumed; running jobs finish",
		Args:  requireID(kind),
		RunE: ask(r, func(ctx context.Context, a *client.API, args []string) (api.Paused, error) {
			if !known(ctx, a, args[0]) {
				r.Notef(warning+" It stays paused until `bulkaction %s resume %s`.", args[0], kind, args[0])
			}
			return pause(a, ctx, args[0])
		}, pauseRow),
	}
}

func newResume(r *Root, kind string, resume pauseCall) *cobra.Command {
	return &cobra.Command{
		Use:   "resume " + strings.ToUpper(kind),
		Short: "Resume a paused " + kind,
		Args:  requireID(kind),
		RunE: ask(r, func(ctx context.Context, a *client.API, args []string) (api.Paused, error) {
			return resume(a, ctx, args[0])
		}, pauseRow),
	}
}

func pauseRow(t table, p api.Paused) {
	state := stateResumed
	if p.Paused {
		state = statePaused
	}
	t.row(p.ID, state)
}

// requireID returns a check of a command's arguments. It accepts exactly one argument: a valid id.
// kind names it in errors, for example "tenant".
func requireID(kind string) cobra.PositionalArgs {
	return func(cmd *cobra.Command, args []string) error {
		if len(args) != 1 {
			return usagef("%s needs the id of one %s, got %s", cmd.Name(), kind, argumentsText(args))
		}
		return checkID(kind, args[0])
	}
}

// checkID returns an error unless id is valid.
func checkID(kind, id string) error {
	if !api.ValidID(id) {
		return usagef("%s id %q: must "+api.IDRule, kind, id)
	}
	return nil
}

func isNotFound(err error) bool { return errors.Is(err, client.ErrNotFound) }

// isUnknownID reports whether err says that the API knows the call, but not the object with the id
// in it.
func isUnknownID(err error) bool { return isNotFound(err) && !isOtherServer(err) }
