package cli

import (
	"context"
	"errors"
	"fmt"
	"strings"

	"github.com/spf13/cobra"

	"github.com/bulkaction/bulkaction/api"
	"github.com/bulkaction/bulkaction/client"
)

// appended is the output of append with --json.
type appended struct {
	ID string `json:"id"`
	api.Appended
}

func newAppend(r *Root) *cobra.Command {
	var v fileFlags
	cmd := &cobra.Command{
		Use:   "append GROUP --file PATH",
		Short: "Append the jobs of a file to a group that is not sealed",
		Long: "Append the jobs of a file to a group that is not sealed, such as one of `submit --no-seal`. The file\n" +
			"is as that of submit. The same command can be run again after an interruption: the same file is\n" +
			"added to a group once, also if `submit` has added it; with another --idempotency-key it is added\n" +
			"again.\n" +
			"`bulkaction seal GROUP` then says that no more jobs come.",
		Example: "  bulkaction append promo-7 --file recipients.csv\n  bulkaction seal promo-7",
		Args:    requireID("group"),
	}
	v.addFileFlags(cmd.Flags())
	cmd.RunE = func(cmd *cobra.Command, args []string) error {
		errs := v.checkFile(cmd.Flags())
		if v.file == "" {
			errs = []string{"there are no jobs: give --file"}
		}
		if len(errs) > 0 {
			return &usageError{strings.Join(errs, "; ")}
		}
		a, err := r.patientAPI()
		if err != nil {
			return err
		}
		return v.append(cmd.Context(), r, a, args[0])
	}
	return cmd
}

func (v *fileFlags) append(ctx context.Context, r *Root, a *client.API, group string) error {
	if v.dryRun {
		return v.checkOnly(r, nil)
	}
	if v.strict {
		if err := v.requireGood(r); err != nil {
			return err
		}
	}
	file, err := v.open(r.In)
	if err != nil {
		return err
	}
	defer func() { _ = file.Close() }() // it was only read
	before, err := a.Group(ctx, group)
	var answer api.Appended
	if err == nil {
		answer, err = v.send(ctx, r, a, group, file)
	}
	if isNotFound(err) {
		return withHint(err, "`bulkaction groups ls` lists the groups; `bulkaction submit --id %s --no-seal "+
			"--type TYPE` creates this one.", group)
	}
	if errors.Is(err, client.ErrConflict) {
		return takesNoMore(err, group, answer)
	}
	if err != nil {
		return withHint(err, "Group %s has accepted at least %d of the jobs. %s: no job counts twice.",
			group, answer.Accepted, v.again(""))
	}
	if answer.Rejected == nil {
		answer.Rejected = []api.LineError{}
	}
	row := counted(answer.Accepted, "job") + " accepted"
	if now, err := a.Group(ctx, group); err == nil && answer.Accepted > 0 &&
		now.Counts.Accepted == before.Counts.Accepted {
		row += " before: nothing is new"
	}
	err = r.show(appended{group, answer}, func(t table) { t.row(group, row) })
	if err != nil {
		return err
	}
	if answer.Accepted == 0 && answer.RejectedTotal == 0 && !r.JSON {
		r.Notef("%s", file.emptyNote())
	}
	if answer.RejectedTotal > 0 {
		return withHint(fmt.Errorf("%s rejected; %s accepted", counted(answer.RejectedTotal, "line"),
			counted(answer.Accepted, "other job")),
			"Correct the rejected lines and append them in a file of their own.")
	}
	return nil
}

func newSeal(r *Root) *cobra.Command {
	var total int64
	cmd := &cobra.Command{
		Use:   "seal GROUP [--total N]",
		Short: "Say that no more jobs come to a group, so that it can end",
		Long: "Say that no more jobs come to a group, so that it can end. With --total, the group still takes jobs\n" +
			"until it has that many. A group that is sealed already stays as it is.",
		Args: requireID("group"),
	}
	cmd.Flags().Int64Var(&total, "total", 0, "number of jobs of the whole group (default: those that it has now)")
	cmd.RunE = ask(r, func(ctx context.Context, a *client.API, args []string) (api.Accepted, error) {
		if !cmd.Flags().Changed("total") {
			return a.Seal(ctx, args[0], nil)
		}
		if total < 0 {
			return api.Accepted{}, usagef("--total %d: must be 0 or more", total)
		}
		return a.Seal(ctx, args[0], &total)
	}, func(t table, accepted api.Accepted) {
		c := accepted.Counts
		ended := fmt.Sprintf("%s of %s jobs ended", thousands(c.Ended()), thousands(c.Accepted))
		t.row(accepted.ID, accepted.Status, ended)
	})
	return cmd
}
