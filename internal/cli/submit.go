package cli

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"net/http"
	"slices"
	"strings"
	"time"

	"github.com/google/uuid"
	"github.com/spf13/cobra"
	"github.com/spf13/pflag"

	"github.com/bulkaction/bulkaction/api"
	"github.com/bulkaction/bulkaction/client"
	"github.com/bulkaction/bulkaction/internal/messages"
)

func newSubmit(r *Root) *cobra.Command {
	s := &submission{root: r}
	s.hasUniqueKeys = func() (bool, error) { return s.uniqueKeys, nil }
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
		if err := checkGroup(g); err != nil {
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

// checkGroup returns the error for which the server would refuse a group. It takes any name for a
// reducer, because the servers may have reducers of their own.
func checkGroup(g client.Submission) error {
	body, err := g.MarshalJSON()
	if err != nil {
		return err
	}
	decoder := messages.Decoder{Ops: map[string]bool{}}
	for _, a := range g.Aggregate {
		decoder.Ops[a.Op] = true
	}
	if _, err := decoder.DecodeSubmit(body); err != nil {
		return fmt.Errorf("the server would refuse the group: %w", err)
	}
	return nil
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

// submitFile creates a group, appends the jobs of the file and, without --no-seal, seals the group.
// If all lines are rejected, it returns an error, and cancels the group unless the group has jobs.
func (s *submission) submitFile(ctx context.Context, a *client.API, g client.Submission) (submitted, error) {
	if s.strict {
		if err := s.requireGood(s.root); err != nil {
			return submitted{}, err
		}
	}
	file, err := s.open(s.root.In)
	if err != nil {
		return submitted{}, err
	}
	defer func() { _ = file.Close() }() // it was only read

	accepted, err := a.Submit(ctx, g, s.callOptions()...)
	if err != nil {
		return submitted{}, s.withRunAtHint(err)
	}
	before := api.Group{}
	if s.id != "" || s.key != "" {
		before, _ = a.Group(ctx, accepted.ID) // only for a note, so that an error does no harm
	}
	appended, err := s.send(ctx, s.root, a, accepted.ID, file)
	if err != nil {
		if refused := s.cancelRefused(ctx, a, accepted.ID, err); refused != nil {
			return submitted{}, refused
		}
		if errors.Is(err, client.ErrConflict) {
			return submitted{}, takesNoMore(err, accepted.ID, appended)
		}
		return submitted{}, s.withResumeHint(err, accepted.ID, appended)
	}
	if appended.Accepted == 0 && appended.RejectedTotal > 0 {
		if g, err := a.Group(ctx, accepted.ID); err != nil || g.Counts.Accepted > 0 {
			err := fmt.Errorf("no line was accepted; group %s keeps the jobs that it had", accepted.ID)
			return submitted{}, withHint(err, "Correct the lines and submit the file again.")
		}
		if _, err := a.Cancel(ctx, accepted.ID); err != nil {
			return submitted{}, fmt.Errorf("no line was accepted, and group %s could not be cancelled: %w",
				accepted.ID, err)
		}
		err := fmt.Errorf("no line was accepted, so group %s is cancelled", accepted.ID)
		return submitted{}, withHint(err,
			"Correct the lines and submit the file again, under another --id if you gave one.")
	}
	if !s.noSeal {
		sealed, err := a.Seal(ctx, accepted.ID, nil)
		if errors.Is(err, client.ErrConflict) {
			return submitted{}, takesNoMore(err, accepted.ID, appended)
		}
		if err != nil {
			return submitted{}, s.withResumeHint(err, accepted.ID, appended)
		}
		accepted.Status, accepted.Counts = sealed.Status, sealed.Counts
	}
	out, err := newSubmitted(accepted, nil)
	if note := s.noteExisting(ctx, a, before, out); note != "" {
		out.Warnings = append(out.Warnings, note)
	}
	if appended.Accepted == 0 {
		out.Warnings = append(out.Warnings, file.emptyNote())
	}
	if s.noSeal {
		out.Counts = nil
	}
	out.Accepted, out.Rejected, out.RejectedTotal = &appended.Accepted, appended.Rejected, appended.RejectedTotal
	return out, err
}

// cancelRefused cancels the group if the server refused all of its jobs for good, for example
// because of a bad header row. It then returns an error with a hint. In any other case, also if the
// cancellation fails, it returns nil.
func (s *submission) cancelRefused(ctx context.Context, a *client.API, group string, err error) error {
	if e, ok := errors.AsType[*client.Error](err); !ok || e.Status != http.StatusUnprocessableEntity {
		return nil
	}
	if g, lost := a.Group(ctx, group); lost != nil || g.Counts.Accepted > 0 {
		return nil
	}
	if _, lost := a.Cancel(ctx, group); lost != nil {
		return nil
	}
	return withHint(fmt.Errorf("%w; group %s has no jobs and is cancelled", err, group),
		"Correct %s and submit it as a new group.", s.file)
}

// noteExisting returns a text that says what the command has added to a group that had jobs before;
// "" if it had none. before is the group before the command. out has the counts after it, except
// with --no-seal: then noteExisting reads the group.
func (s *submission) noteExisting(ctx context.Context, a *client.API, before api.Group, out submitted) string {
	had, has := before.Counts.Accepted, out.Counts.Accepted
	if had == 0 {
		return ""
	}
	if s.noSeal {
		now, err := a.Group(ctx, out.ID)
		if err != nil {
			return ""
		}
		has = now.Counts.Accepted
	}
	text := fmt.Sprintf("Group %s had %s jobs already, and has %s now", out.ID, thousands(had), thousands(has))
	if had == has {
		text = fmt.Sprintf("Group %s has accepted these jobs before: nothing is new", out.ID)
	}
	if !s.noSeal && !before.Sealed {
		text += "; it is sealed now. `bulkaction append` adds jobs and does not seal"
	}
	return text + "."
}

// takesNoMore returns the error for a group that accepts no more jobs. Its hint is to use another
// id, because to repeat the command is no help.
func takesNoMore(err error, group string, appended api.Appended) error {
	text := fmt.Sprintf("group %s takes no more jobs", group)
	if e, ok := errors.AsType[*client.Error](err); ok && e.Problem.Code == api.Sealed {
		text = fmt.Sprintf("group %s is sealed: it takes no more jobs", group)
	} else if ok && e.Problem.Detail != "" {
		text = e.Problem.Detail
	}
	if appended.Accepted > 0 {
		text += fmt.Sprintf("; it has accepted %s jobs of this file", thousands(appended.Accepted))
	}
	return withHint(&refusedError{text, err}, "Submit the file as a separate group, under another --id.")
}

// withResumeHint adds a hint to an error that interrupted a submission: how to continue.
func (s *submission) withResumeHint(err error, group string, appended api.Appended) error {
	id := ""
	if s.id == "" && s.key == "" {
		id = "--id " + group
	}
	return withHint(err,
		"Group %s has accepted at least %d jobs and is not sealed. %s: no job counts twice. Or `bulkaction cancel %s`.",
		group, appended.Accepted, s.again(id), group)
}

type flagValues struct {
	typ, tenant, id, name, priority string
	callbackURL                     string
	maxRetries                      int
	jobTimeout                      time.Duration
	failureThreshold                float64
	runAt                           string
	basePriority                    float64
	aggregates, tags                []string

	fileFlags
	payloads     []string
	body         string
	noSeal, wait bool
	uniqueKeys   bool
}

func (v *flagValues) addFlags(f *pflag.FlagSet) {
	f.StringVar(&v.typ, "type", "", "job type: the processor that runs the jobs")
	f.StringVar(&v.tenant, "tenant", "", "tenant of the group (default: the group is its own tenant)")
	f.StringVar(&v.id, "id", "", "id of the group (default: a new one)")
	f.StringVar(&v.name, "name", "", "name to show")
	f.StringArrayVar(&v.tags, "tag", nil, "a tag by which the group is found, KEY=VALUE, up to 8 (repeatable)")
	f.StringVar(&v.callbackURL, "callback-url", "",
		"a URL that is called when the group has ended (default: the tenant's endpoint, if it has one)")
	f.StringVar(&v.priority, "priority", "", "high, normal or low (default normal)")
	f.Float64Var(&v.basePriority, "base-priority", 0,
		"among the groups of a lane, with the server's BULKACTION_FAIR_QUEUE_POLICY=priority: higher comes first")
	f.IntVar(&v.maxRetries, "max-retries", 0, "retries of a failed job (default: the workers' setting)")
	f.DurationVar(&v.jobTimeout, "job-timeout", 0, "longest run of a job, such as 30s (default: the workers' setting)")
	f.Float64Var(&v.failureThreshold, "failure-threshold", 1,
		"share of failed jobs, above 0 to 1, at which the group is FAILED")
	f.StringVar(&v.runAt, "run-at", "",
		"start no job before: a time such as 2030-01-31T09:00:00Z, or a duration from now such as 10m;\n"+
			"with a duration the command can't be run again with the same --id or --idempotency-key")
	f.StringArrayVar(&v.aggregates, "aggregate", nil,
		"reduce the results, for example as=cost,op=sum,field=data.cost, or with over=failed the errors (repeatable)")

	v.addFileFlags(f)
	f.StringArrayVar(&v.payloads, "payload", nil, "a job's payload, JSON (repeatable)")
	f.StringVar(&v.body, "body", "",
		"submit this file unchanged as the body of POST /v1/groups; - is standard input")
	f.BoolVar(&v.uniqueKeys, "unique-keys", false,
		"refuse a job whose key another job of the group has; jobs GROUP --key KEY finds a job then")
	f.BoolVar(&v.noSeal, "no-seal", false, "do not seal the group: more jobs will be appended later")
	f.BoolVar(&v.wait, "wait", false, "wait until the group has ended")
}

// allowedWithBody are the flags that may be combined with --body, besides those that all commands
// have (isGlobal).
var allowedWithBody = map[string]bool{"body": true, "wait": true, "idempotency-key": true}

// check returns an error that names all wrong combinations of flags, and the wrong values among
// those that it checks: group and the server check the others.
func (v *flagValues) check(f *pflag.FlagSet) error {
	var errs []string
	addError := func(format string, args ...any) { errs = append(errs, fmt.Sprintf(format, args...)) }
	sources := 0
	for _, name := range []string{"file", "payload", "body"} {
		if f.Changed(name) {
			sources++
		}
	}
	switch {
	case sources > 1:
		addError("--file, --payload and --body exclude each other")
	case sources == 0 && !v.noSeal:
		addError("there are no jobs: give --file, --payload or --body, or --no-seal to append jobs later")
	}
	f.Visit(func(fl *pflag.Flag) {
		if f.Changed("body") && sources == 1 && !allowedWithBody[fl.Name] && !isGlobal(fl.Name) {
			addError("--%s cannot be combined with --body", fl.Name)
		}
	})
	if !f.Changed("body") && v.typ == "" {
		addError("--type is missing")
	}
	for _, id := range []struct{ flag, value string }{{"type", v.typ}, {"tenant", v.tenant}, {"id", v.id}} {
		if id.value != "" && !api.ValidID(id.value) {
			addError("--%s %q: must "+api.IDRule, id.flag, id.value)
		}
	}
	if !slices.Contains([]string{"", client.PriorityHigh, client.PriorityNormal, client.PriorityLow}, v.priority) {
		addError("--priority %q: must be high, normal or low", v.priority)
	}
	errs = append(errs, v.checkFile(f)...)
	if v.dryRun && v.wait {
		addError("--dry-run sends nothing, so --wait has nothing to wait for")
	}
	if v.wait && v.noSeal {
		addError("--wait would never end with --no-seal")
	}
	if len(errs) > 0 {
		return &usageError{strings.Join(errs, "; ")}
	}
	return nil
}

// group builds the request for a group from the flags. The values of --payload become its jobs.
func (v *flagValues) group(f *pflag.FlagSet) (client.Submission, error) {
	g := client.Submission{
		ID: v.id, Tenant: v.tenant, Name: v.name, Type: v.typ, Priority: v.priority, JobTimeout: v.jobTimeout,
		BasePriority: v.basePriority, CallbackURL: v.callbackURL,
		Seal:       v.file == "" && !v.noSeal,
		UniqueKeys: v.uniqueKeys,
	}
	var err error
	if g.Tags, err = api.ParseTags(v.tags); err != nil {
		return g, usagef("--tag: %v", err)
	}
	if f.Changed("max-retries") {
		g.MaxRetries = &v.maxRetries
	}
	if f.Changed("failure-threshold") {
		g.FailureThreshold = &v.failureThreshold
	}
	if v.runAt != "" {
		at, err := parseRunAt(v.runAt, time.Now())
		if err != nil {
			return g, err
		}
		g.RunAt = &at
	}
	for _, text := range v.aggregates {
		a, err := parseAggregate(text)
		if err != nil {
			return g, err
		}
		g.Aggregate = append(g.Aggregate, a)
	}
	for i, p := range v.payloads {
		if !json.Valid([]byte(p)) {
			return g, usagef("--payload number %d is not JSON: write it in single quotes, for example "+
				`--payload '{"to": "a@example.com"}'`, i+1)
		}
		g.Jobs = append(g.Jobs, client.NewJob{Payload: json.RawMessage(p)})
	}
	return g, nil
}

func parseRunAt(text string, now time.Time) (time.Time, error) {
	if d, err := time.ParseDuration(text); err == nil {
		return now.Add(d).UTC(), nil
	}
	at, err := time.Parse(time.RFC3339, text)
	if err != nil {
		return at, usagef(
			"--run-at %q: write a time such as 2030-01-31T09:00:00Z, or a duration from now such as 10m",
			text,
		)
	}
	return at, nil
}

func parseAggregate(text string) (a client.Aggregate, err error) {
	seen := map[string]bool{}
	for part := range strings.SplitSeq(text, ",") {
		key, value, _ := strings.Cut(part, "=")
		key = strings.TrimSpace(key)
		if seen[key] {
			return a, usagef("--aggregate %q: %s is there twice; repeat the flag for another aggregate", text, key)
		}
		seen[key] = true
		switch key {
		case "as":
			a.As = value
		case "op":
			a.Op = value
		case "field":
			a.Field = value
		case "over":
			a.Over = value
		default:
			return a, usagef("--aggregate %q: the keys are as, op, field and over, not %q", text, key)
		}
	}
	if a.As == "" || a.Op == "" {
		return a, usagef("--aggregate %q: needs as=NAME and op=OPERATION", text)
	}
	return a, nil
}

// readBody reads the file of --body. With --wait it returns an error if the body neither seals the
// group nor announces a total, because then the group would not end.
func (v *flagValues) readBody(stdin io.Reader) ([]byte, error) {
	in, err := open(v.body, stdin)
	if err != nil {
		return nil, err
	}
	defer in.Close()
	body, err := io.ReadAll(in)
	if err != nil {
		return nil, fmt.Errorf("read %s: %w", v.body, err)
	}
	var end struct {
		Seal  bool   `json:"seal"`
		Total *int64 `json:"total"`
	}
	if err := json.Unmarshal(body, &end); err != nil {
		return nil, usagef("--body %s is not the JSON of a group: %v", v.body, err)
	}
	if v.wait && !end.Seal && end.Total == nil {
		return nil, usagef(`--wait would never end: the body has neither "seal": true nor a "total"`)
	}
	return body, nil
}

func (v *flagValues) callOptions() []client.CallOption {
	if v.key == "" {
		return nil
	}
	return []client.CallOption{client.WithIdempotencyKey(v.key)}
}
