package cli

import (
	"context"
	"slices"
	"strings"

	"github.com/spf13/cobra"

	"github.com/bulkaction/bulkaction/api"
	"github.com/bulkaction/bulkaction/client"
	"github.com/bulkaction/bulkaction/internal/messages"
)

func newPause(r *Root) *cobra.Command {
	return &cobra.Command{
		Use:   "pause GROUP",
		Short: "Pause a group: none of its jobs starts until it is resumed; running jobs finish",
		Args:  requireGroup,
		RunE:  r.groupCommand((*client.API).Pause, statePaused),
	}
}

func newResume(r *Root) *cobra.Command {
	return &cobra.Command{
		Use:   "resume GROUP",
		Short: "Resume a paused group",
		Args:  requireGroup,
		RunE:  r.groupCommand((*client.API).Resume, stateResumed),
	}
}

func newType(r *Root) *cobra.Command {
	return parentCommand("type", "Pause and resume job types; `stats` shows those that are paused",
		&cobra.Command{
			Use:   "pause TYPE",
			Short: "Pause a type: none of its jobs starts until it is resumed; running jobs finish",
			Args:  requireID("type"),
			RunE: r.pauseOrResume(func(a *client.API, ctx context.Context, id string) (api.Paused, error) {
				r.warnUnknownType(ctx, a, id)
				return a.PauseType(ctx, id)
			}),
		},
		&cobra.Command{
			Use:   "resume TYPE",
			Short: "Resume a paused type",
			Args:  requireID("type"),
			RunE:  r.pauseOrResume((*client.API).ResumeType),
		})
}

// States that a command prints.
const (
	statePaused  = "paused"
	stateResumed = "resumed"
)

// warnUnknownType warns before a type is paused that has neither jobs nor workers. The name may
// have a typing error, or its jobs may come later.
func (r *Root) warnUnknownType(ctx context.Context, a *client.API, typ string) {
	stats, err := a.Stats(ctx)
	if err != nil || slices.ContainsFunc(stats.Types, func(t api.TypeStats) bool { return t.Type == typ }) {
		return // the call itself returns the same error
	}
	r.Notef(
		"Type %s is unknown: it has neither jobs nor workers. It stays paused until `bulkaction type resume %s`.",
		typ, typ,
	)
}

// warnUnknownTenant warns before a tenant is paused that has neither groups nor settings.
func (r *Root) warnUnknownTenant(ctx context.Context, a *client.API, tenant string) {
	if _, err := a.Tenant(ctx, tenant); isNotFound(err) {
		r.Notef(
			"Tenant %s is unknown: it has neither groups nor settings. It stays paused until "+
				"`bulkaction tenant resume %s`.",
			tenant, tenant,
		)
	}
}

// pauseOrResume returns a command that calls do, which pauses or resumes a tenant or type, and
// prints the new state.
func (r *Root) pauseOrResume(
	do func(*client.API, context.Context, string) (api.Paused, error),
) func(*cobra.Command, []string) error {
	return func(cmd *cobra.Command, args []string) error {
		a, err := r.API()
		if err != nil {
			return err
		}
		p, err := do(a, cmd.Context(), args[0])
		if err != nil {
			return err
		}
		if r.JSON {
			return r.Print(p)
		}
		state := stateResumed
		if p.Paused {
			state = statePaused
		}
		t := newTable(r.Out)
		t.row(p.ID, state)
		return t.flush()
	}
}

// parentCommand returns a command that only has subcommands.
func parentCommand(name, short string, subcommands ...*cobra.Command) *cobra.Command {
	names := make([]string, len(subcommands))
	for i, m := range subcommands {
		names[i] = m.Name()
	}
	cmd := &cobra.Command{
		Use:   name,
		Short: short,
		Args:  cobra.NoArgs,
		RunE: func(*cobra.Command, []string) error {
			return usagef("%s needs a subcommand: %s", name, strings.Join(names, ", "))
		},
	}
	cmd.AddCommand(subcommands...)
	return cmd
}

// requireID accepts exactly one argument: a valid id. kind names it in errors, for example
// "tenant".
func requireID(kind string) cobra.PositionalArgs {
	return func(cmd *cobra.Command, args []string) error {
		if len(args) != 1 {
			return usagef("%s needs the id of one %s, got %d arguments", cmd.Name(), kind, len(args))
		}
		return checkID(kind, args[0])
	}
}

// checkID returns an error unless id is valid.
func checkID(kind, id string) error {
	if !messages.ValidID(id) {
		return usagef("%s id %q: must match ^[A-Za-z0-9._-]{1,128}$", kind, id)
	}
	return nil
}
