package cli

import (
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
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

// maxShownRejects is how many rejected lines are printed at most.
const maxShownRejects = 20

// send appends the jobs of a file to a group. It shows a progress bar, and prints rejected lines.
func (v *fileFlags) send(
	ctx context.Context, r *Root, a *client.API, group string, file *jobFile,
) (api.Appended, error) {
	m := &progressReader{Reader: file, size: file.size, bar: r.newProgress()}
	do := a.AppendNDJSON
	if file.csv {
		do = a.AppendCSV
	}
	key := v.key
	if key == "" {
		// This key makes it safe to run the command again with the same file and group: no job is
		// stored twice while the server remembers the requests (RETENTION_MESSAGE_IDS). If the file
		// was changed, each changed part is stored again.
		key = "bulkaction submit " + group
	}
	appended, err := do(ctx, group, m, append(file.opts, client.WithIdempotencyKey(key))...)
	m.bar.stop()
	r.printRejected(appended.Rejected, appended.RejectedTotal)
	return appended, err
}

// printRejected prints the first rejected lines to Err, at most maxShownRejects, and how many
// others there are. With --json it prints nothing, because the JSON has them.
func (r *Root) printRejected(lines []api.LineError, total int64) {
	if r.JSON {
		return
	}
	for _, l := range lines[:min(len(lines), maxShownRejects)] {
		r.Notef("line %d: %s", l.Line, printable(l.Error))
	}
	if more := total - maxShownRejects; more > 0 {
		r.Notef("and %s", counted(more, "more line"))
	}
}

// requireGood checks the whole file, for --strict, before anything is sent. If lines are wrong, it
// prints them and returns an error.
func (v *fileFlags) requireGood(r *Root) error {
	file, err := v.open(r.In)
	if err != nil {
		return err
	}
	defer func() { _ = file.Close() }() // it was only read
	found, err := file.check()
	if err != nil || found.RejectedTotal == 0 {
		return err
	}
	if r.JSON {
		if err := r.Print(found); err != nil {
			return err
		}
	}
	r.printRejected(found.Rejected, found.RejectedTotal)
	return withHint(fmt.Errorf("%s has %s, and --strict sends nothing then", v.file,
		counted(found.RejectedTotal, "wrong line")),
		"Correct the lines, or leave out --strict to send the %s.", counted(found.Jobs, "other job"))
}

// checkOnly carries out --dry-run: it checks the jobs of the file, prints the result and sends
// nothing. Without a file, the jobs are those of --payload, which were checked before.
func (v *fileFlags) checkOnly(r *Root, payloads []client.NewJob) error {
	found := jobCheck{}
	for _, p := range payloads {
		found.add(p.Payload.(json.RawMessage), 0, nil) // group has made it
	}
	if v.file != "" {
		file, err := v.open(r.In)
		if err != nil {
			return err
		}
		defer func() { _ = file.Close() }() // it was only read
		if found, err = file.check(); err != nil {
			return err
		}
	}
	r.printRejected(found.Rejected, found.RejectedTotal)
	err := r.show(found, func(t table) {
		t.row("Jobs", thousands(found.Jobs))
		t.row("Wrong lines", thousands(found.RejectedTotal))
		for i, p := range found.FirstPayloads {
			t.row(fmt.Sprintf("Payload %d", i), truncate(string(p), 200))
		}
	})
	if err != nil {
		return err
	}
	if !r.JSON {
		r.Notef("Nothing was sent (--dry-run).")
	}
	if found.RejectedTotal > 0 {
		return withHint(fmt.Errorf("the file has %s", counted(found.RejectedTotal, "wrong line")),
			"Correct them; without --strict, the other lines would be sent.")
	}
	return nil
}

// progressReader shows on a bar how much was read.
type progressReader struct {
	io.Reader
	size, bytes, lines int64
	bar                *progress
}

func (m *progressReader) Read(p []byte) (int, error) {
	n, err := m.Reader.Read(p)
	m.lines += int64(bytes.Count(p[:n], []byte("\n")))
	m.bytes += int64(n)
	note := thousands(m.lines) + " lines"
	if m.size > 0 {
		note += fmt.Sprintf(" (%d%%)", 100*m.bytes/m.size)
	}
	m.bar.show("sending", "", note, m.bytes, m.size)
	return n, err
}

// again returns a hint how to run the command again after an interruption.
func (v *fileFlags) again(moreFlags string) string {
	text := "Run the same command again"
	if moreFlags != "" {
		text += ", with " + moreFlags
	}
	if v.file == fromStdin {
		return text + " and the same input, to continue"
	}
	return strings.TrimSpace(text) + " and an unchanged file, to continue"
}
