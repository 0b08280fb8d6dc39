package cli

import (
	"cmp"
	"context"
	"encoding/json"
	"fmt"
	"reflect"
	"slices"
	"strings"
	"time"

	"github.com/spf13/cobra"

	"github.com/bulkaction/bulkaction/api"
	"github.com/bulkaction/bulkaction/client"
	"github.com/bulkaction/bulkaction/internal/redisx"
)

func newOperation(r *Root) *cobra.Command {
	cmd := parentCommand("operation", "Change all groups, or dead letters, that a filter matches", newOperationStart(r),
		newOperationList(r), newOperationShow(r))
	shorts := map[api.OperationCommand]string{
		api.PauseOperation:  "Pause an operation; the step at which it works is completed",
		api.ResumeOperation: "Let a paused operation go on where it was",
		api.CancelOperation: "Cancel an operation; the step at which it works is completed, and what it has changed stays",
	}
	for _, do := range api.OperationCommands {
		cmd.AddCommand(&cobra.Command{
			Use:   string(do) + " OPERATION",
			Short: shorts[do],
			Args:  requireID("operation"),
			RunE: ask(r, func(ctx context.Context, a *client.API, args []string) (api.Operation, error) {
				return a.ControlOperation(ctx, args[0], do)
			}, operationRows),
		})
	}
	return cmd
}

func newOperationStart(r *Root) *cobra.Command {
	var request api.OperationRequest
	var status string
	var paused, failedJobs, wait bool
	var since, until time.Time
	var tags []string
	f := &request.Filter
	cmd := &cobra.Command{
		Use:   "start WHAT [--all | filters]",
		Short: "Start an operation: " + strings.Join(api.OperationKinds, ", "),
		Long: "Start an operation: one change of all groups, or dead letters, that the filters match.\n\n" +
			"WHAT is one of " + strings.Join(api.OperationKinds, ", ") + ".\n" +
			"The last two are about dead letters. retry lets the failed jobs of ended groups run again, with --code\n" +
			"those that have it. Without any filter, --all says that everything is meant.\n\n" +
			"The exit code is 0 once the operation is stored, whatever it will skip. With --wait it is 1 unless the\n" +
			"operation is completed: if it was cancelled, paused or set aside meanwhile.",
		Example: "  bulkaction operation start retry --tenant acme --code TIMEOUT --dry-run --wait",
		Args: func(cmd *cobra.Command, args []string) error {
			if len(args) != 1 || !slices.Contains(api.OperationKinds, args[0]) {
				return usagef("operation start needs one of %s", strings.Join(api.OperationKinds, ", "))
			}
			var err error
			if f.Tags, err = api.ParseTags(tags); err != nil {
				return usagef("--tag: %v", err)
			}
			for flag, to := range map[string]**bool{"paused": &f.Paused, "failed-jobs": &f.FailedJobs} {
				if cmd.Flags().Changed(flag) {
					*to = map[string]*bool{"paused": &paused, "failed-jobs": &failedJobs}[flag]
				}
			}
			for at, to := range map[*time.Time]**time.Time{&since: &f.Since, &until: &f.Until} {
				if !at.IsZero() {
					*to = at
				}
			}
			request.Do, f.Status = args[0], api.Status(strings.ToUpper(status))
			if reflect.ValueOf(*f).IsZero() {
				return usagef("operation start without a filter means everything: narrow it, or say --all")
			}
			return nil
		},
		RunE: r.withAPI(func(ctx context.Context, a *client.API, _ []string) error {
			o, err := a.StartOperation(ctx, request)
			if err == nil && wait {
				o, err = r.awaitOperation(ctx, a, o)
			}
			if err != nil {
				return err
			}
			err = r.show(o, func(t table) { operationRows(t, o) })
			if err == nil && wait && o.State != api.OperationCompleted {
				return fmt.Errorf("operation %s is %s, not completed", o.ID, o.State)
			}
			return err
		}),
	}
	flags := cmd.Flags()
	flags.BoolVar(&f.All, "all", false, "everything, without any filter")
	flags.StringVar(&f.Tenant, "tenant", "", "only of this tenant")
	flags.StringVar(&f.Type, "type", "", "only of this job type")
	flags.StringVar(&f.Code, "code", "", "only dead letters with this error code, and groups with a failed job that has it")
	addSince(flags, &since, "only groups created, or jobs failed,")
	flags.Var((*sinceValue)(&until), "until", "only before then: a time such as 2026-01-02T15:04:05Z, or an age such as 24h")
	flags.StringVar(&f.Group, "group", "", "only dead letters of this group")
	flags.StringVar(&status, "status", "", "only groups in this state, such as RUNNING or FAILED")
	flags.BoolVar(&paused, "paused", false, "only paused groups; --paused=false: only those that are not")
	flags.BoolVar(&failedJobs, "failed-jobs", false, "only groups with failed jobs; --failed-jobs=false: only those without")
	flags.StringVar(&f.Prefix, "prefix", "", "only groups whose id begins with this")
	flags.StringArrayVar(&tags, "tag", nil, "only groups with this tag, KEY=VALUE (repeatable: with all of them)")
	flags.BoolVar(&request.DryRun, "dry-run", false, "only count what would change")
	flags.BoolVar(&wait, "wait", false, "wait for the end, with a progress bar on a terminal")
	return cmd
}

// awaitOperation waits until an operation has ended or is paused, and shows its progress.
func (r *Root) awaitOperation(ctx context.Context, a *client.API, o api.Operation) (api.Operation, error) {
	bar := r.newProgress()
	defer bar.stop()
	id := o.ID
	for !o.State.Ended() && o.State != api.OperationPaused {
		bar.show("", string(o.State), operationText(o), int64(100*o.Progress), 100)
		err := redisx.Sleep(ctx, 500*time.Millisecond)
		if err == nil {
			o, err = a.Operation(ctx, id)
		}
		if err != nil && ctx.Err() != nil {
			return o, withHint(err, "The operation goes on: `bulkaction operation show %[1]s` shows it, "+
				"`bulkaction operation cancel %[1]s` cancels it.", id)
		}
		if err != nil {
			return o, err
		}
	}
	return o, nil
}

// operationText returns what an operation has counted.
func operationText(o api.Operation) string {
	verb := "changed"
	if o.DryRun {
		verb = "would change"
	}
	return fmt.Sprintf("%s matched, %s %s, %s skipped", counted(o.Matched, operationUnit(o)), thousands(o.Changed), verb,
		thousands(o.Skipped))
}

// operationUnit names one of what an operation counts.
func operationUnit(o api.Operation) string {
	if api.OnDeadLetters(o.Do) {
		return "dead letter"
	}
	return "group"
}

// examinedText returns how much of what it looks at an operation has compared with its filter.
func examinedText(o api.Operation) string {
	if o.Total == 0 { // not known, or there is nothing
		return counted(o.Examined, operationUnit(o))
	}
	return thousands(o.Examined) + " of " + counted(o.Total, operationUnit(o))
}

func filterText(f api.OperationFilter) string {
	text, err := json.Marshal(f)
	if err != nil {
		return err.Error()
	}
	return string(text)
}

func operationRows(t table, o api.Operation) {
	t.row("operation", o.ID)
	t.row("what", operationKind(o))
	t.row("filter", filterText(o.Filter))
	if o.Tenant != "" {
		t.row("only tenant", o.Tenant)
	}
	t.row("state", o.State)
	t.row("examined", examinedText(o))
	t.row("counted", operationText(o))
	for _, s := range o.Reasons {
		t.row("  skipped", fmt.Sprintf("%s %s, such as %s", thousands(s.Count), s.Reason, strings.Join(s.Examples, ", ")))
	}
	if !o.State.Ended() {
		t.row("progress", fmt.Sprintf("%.0f%%", 100*o.Progress))
	}
	t.row("created", formatTime(o.CreatedAt))
	if o.EndedAt != nil {
		t.row("ended", formatTime(*o.EndedAt))
	}
	if o.CreatedBy != "" {
		t.row("by", o.CreatedBy)
	}
	if o.Error != "" {
		t.row("error", o.Error)
	}
}

func operationKind(o api.Operation) string {
	if o.DryRun {
		return o.Do + " (dry run)"
	}
	return o.Do
}

func newOperationList(r *Root) *cobra.Command {
	var list listFlags
	cmd := &cobra.Command{
		Use:     "ls",
		Aliases: []string{"list"},
		Short:   "List operations, newest first",
		Args:    cobra.NoArgs,
		RunE: r.withAPI(func(ctx context.Context, a *client.API, _ []string) error {
			return printList(r, list, a.Operations(ctx), &columns[api.Operation]{
				none:   "No operations found.",
				format: "%-36v %-29v %-10v %10v %10v %10v %-25v %-20v %-20v %-12v %v",
				head: []any{
					"OPERATION", "WHAT", "STATE", "MATCHED", "CHANGED", "SKIPPED", "EXAMINED", "CREATED", "BY", "TENANT", "FILTER",
				},
				cells: func(o api.Operation) []any {
					return []any{
						o.ID, operationKind(o), o.State, thousands(o.Matched), thousands(o.Changed), thousands(o.Skipped),
						examinedText(o), formatTime(o.CreatedAt), cmp.Or(o.CreatedBy, "-"), cmp.Or(o.Tenant, "-"), filterText(o.Filter),
					}
				},
			})
		}),
	}
	list.add(cmd, "operations")
	return cmd
}

func newOperationShow(r *Root) *cobra.Command {
	return &cobra.Command{
		Use:   "show OPERATION",
		Short: "Show an operation: what it has changed, and skipped for which reasons",
		Args:  requireID("operation"),
		RunE: ask(r, func(ctx context.Context, a *client.API, args []string) (api.Operation, error) {
			return a.Operation(ctx, args[0])
		}, operationRows),
	}
}
