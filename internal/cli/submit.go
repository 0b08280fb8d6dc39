package cli

import (
	"context"
	"errors"
	"fmt"
	"time"

	"github.com/google/uuid"
	"github.com/spf13/cobra"

	"github.com/bulkaction/bulkaction/api"
	"github.com/bulkaction/bulkaction/client"
)

func newSubmit(r *Root) *cobra.Command {
	s := &submission{root: r}
	cmd := &cobra.Command{
		Use:   "submit --type TYPE (--file PATH | --payload JSON ...) | submit --body PATH",
		Short: "Submit a group of jobs and print its id",
		Long: "Submit a group of jobs and print its id.\n\n" +
			"A file is streamed, so it may have any length. NDJSON has one job a line, {\"payload\": ...}; " +
			"in CSV the\n" +
			"header row names the payload's fields. With --id or --idempotency-key, the same command can be run\n" +
			"again after an interruption, and no job counts twice. --dry-run checks the jobs and sends nothing.\n" +
			"The exit code is 1 if lines of the file were rejected. With --wait it is 3 if the group ends with\n" +
			"failed jobs, and 1 if it is cancelled.",
		Example: "  bulkaction submit --type SEND_EMAIL --tenant acme --file recipients.csv --wait\n" +
			"  bulkaction submit --type NOOP --payload '{\"sleep_ms\": 10}' --aggregate as=n,op=count",
		Args: cobra.NoArgs,
		RunE: func(cmd *cobra.Command, _ []string) error { return s.run(cmd) },
	}
	s.addFlags(cmd.Flags())
	return cmd
}

// submission has the flags of one `bulkaction submit`.
type submission struct {
	root *Root
	flagValues
}

// submitted is the output of submit with --json.
type submitted struct {
	ID     string            `json:"id"`
	Status api.Status        `json:"status"`
	Counts *api.Counts       `json:"counts,omitempty"` // when the jobs were accepted; nil: not known
	Links  map[string]string `json:"links,omitempty"`
	Tenant string            `json:"tenant,omitempty"`
	// Warnings are those of the API, such as why the group may not end, and notes that the group
	// existed before or got no jobs. Without --json they are printed to stderr.
	Warnings []string `json:"warnings,omitempty"`
	// The next three fields are set with --file.
	Accepted      *int64          `json:"accepted,omitempty"`
	Rejected      []api.LineError `json:"rejected,omitempty"` // the first 1,000
	RejectedTotal int64           `json:"rejected_total,omitempty"`
	Group         *api.Group      `json:"group,omitempty"` // the final state, with --wait
}

func (s *submission) run(cmd *cobra.Command) error {
	if err := s.check(cmd.Flags()); err != nil {
		return err
	}
	if s.dryRun {
		g, err := s.group(cmd.Flags())
		if err != nil {
			return err
		}
		return s.checkOnly(s.root, g.Jobs)
	}
	a, err := s.root.patientAPI()
	if err != nil {
		return err
	}
	out, err := s.submit(cmd, a)
	if err != nil {
		return err
	}
	if !s.root.JSON {
		if _, err := fmt.Fprintln(s.root.Out, out.ID); err != nil {
			return err
		}
		for _, warning := range out.Warnings {
			s.root.Notef("%s", warning)
		}
	}
	if s.wait {
		if err := s.await(cmd.Context(), a, &out); err != nil {
			return err
		}
	}
	if s.root.JSON {
		if err := s.root.Print(out); err != nil {
			return err
		}
	}
	return s.checkOutcome(out)
}

func (s *submission) submit(cmd *cobra.Command, a *client.API) (submitted, error) {
	ctx := cmd.Context()
	if s.body != "" {
		body, err := s.readBody(s.root.In)
		if err != nil {
			return submitted{}, err
		}
		return newSubmitted(a.SubmitJSON(ctx, body, s.callOptions()...))
	}
	g, err := s.group(cmd.Flags())
	if err != nil {
		return submitted{}, err
	}
	if g.RunAt != nil && g.RunAt.Before(time.Now().Add(-time.Second)) {
		s.root.Notef("--run-at %s is in the past: the jobs start at once.", s.runAt)
	}
	if s.file == "" {
		out, err := newSubmitted(a.Submit(ctx, g, s.callOptions()...))
		return out, s.withRunAtHint(err)
	}
	if g.ID == "" && s.key == "" { // with a key, the server's first answer has the id
		g.ID = uuid.NewString() // chosen here, so that the hint after an interruption can name it
	}
	return s.submitFile(ctx, a, g)
}

// withRunAtHint adds a hint to a conflict error if --run-at is a duration: then each run of the
// same command asks for another time, so the server takes it for a different group of the same id.
func (s *submission) withRunAtHint(err error) error {
	if _, bad := time.ParseDuration(s.runAt); bad != nil || !errors.Is(err, client.ErrConflict) {
		return err
	}
	return withHint(err, "--run-at %s is another time in each run of the command: to run it again, give --run-at as "+
		"a time such as 2030-01-31T09:00:00Z. If the group is the one that you mean, it has been submitted before.",
		s.runAt)
}

func newSubmitted(accepted api.Accepted, err error) (submitted, error) {
	return submitted{
		ID: accepted.ID, Status: accepted.Status, Counts: &accepted.Counts, Links: accepted.Links,
		Tenant: accepted.Tenant, Warnings: accepted.Warnings,
	}, err
}

// await shows the progress of the group until the group has ended, and stores its final state in
// out. Without --json it prints the final state.
func (s *submission) await(ctx context.Context, a *client.API, out *submitted) error {
	g, err := s.root.follow(ctx, a, out.ID, func(api.Event) error { return nil })
	if err != nil {
		return err
	}
	out.Group, out.Status = &g, g.Status
	if s.root.JSON {
		return nil
	}
	return s.root.show(g, func(t table) { groupRows(t, g) })
}

// checkOutcome returns an error if lines were rejected or, with --wait, if jobs failed or the group
// was cancelled.
func (s *submission) checkOutcome(out submitted) error {
	if g := out.Group; g != nil {
		rejected := ""
		if out.RejectedTotal > 0 {
			rejected = fmt.Sprintf("; besides, %s rejected", counted(out.RejectedTotal, "line"))
		}
		if failed := failedJobs(*g); failed != nil {
			return &refusedError{failed.Error() + rejected, failed}
		}
		if g.Status == api.StatusCancelled {
			return fmt.Errorf("group %s was cancelled: %s did not run%s", g.ID,
				counted(g.Counts.Cancelled, "job"), rejected)
		}
	}
	if out.RejectedTotal > 0 {
		return withHint(fmt.Errorf("%s rejected; group %s has %s of the file",
			counted(out.RejectedTotal, "line"), out.ID, counted(*out.Accepted, "other job")),
			"Correct the rejected lines and submit them as a new group.")
	}
	return nil
}
