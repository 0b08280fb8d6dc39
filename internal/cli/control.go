package cli

import (
	"context"
	"errors"
	"slices"
	"strings"

	"github.com/spf13/cobra"

	"github.com/bulkaction/bulkaction/api"
	"github.com/bulkaction/bulkaction/client"
)

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
		{"cancel", "Cancel a group at once: none of its jobs starts any more", (*client.API).Cancel, ""},
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
	return parentCommand("type", "Pause and resume job types; `stats` shows those that are paused",
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
