package cli

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"iter"
	"slices"
	"strconv"
	"strings"
	"time"

	"github.com/spf13/cobra"

	"github.com/bulkaction/bulkaction/api"
	"github.com/bulkaction/bulkaction/client"
)

func newJobs(r *Root) *cobra.Command {
	var filter client.JobFilter
	var list listFlags
	cmd := &cobra.Command{
		Use:   "jobs GROUP [--state STATE] [--key KEY]",
		Short: "List a group's jobs",
		Long: "List a group's jobs, or find one by its key, in a group that was submitted with --unique-keys. The\n" +
			"list has the keys of failed jobs; of other jobs it prints ?, and results has the keys of done ones.",
		Example: "  bulkaction jobs promo-7 --state in_flight",
		Args: func(cmd *cobra.Command, args []string) error {
			filter.State = strings.ReplaceAll(strings.ToLower(filter.State), "-", "_")
			if filter.State != "" && !slices.Contains(api.JobStates, filter.State) {
				return usagef("--state %q: must be one of %s", filter.State, strings.Join(api.JobStates, ", "))
			}
			return requireID("group")(cmd, args)
		},
		RunE: r.withAPI(func(ctx context.Context, a *client.API, args []string) error {
			return printList(r, list, a.Jobs(ctx, args[0], filter), &columns[api.Job]{
				none:   "No jobs found.",
				format: "%-10v %-20v %-10v %-8v %v",
				head:   []any{"JOB", "KEY", "STATE", "ATTEMPTS", "LAST ERROR"},
				cells: func(j api.Job) []any {
					last := "-"
					if j.LastError != nil {
						last = j.LastError.Code + ": " + j.LastError.Error
					}
					key := cmp.Or(j.Key, "-")
					lost := j.LastError == nil || j.LastError.Code == "LOST"
					if j.Key == "" && (j.State != "failed" || lost) {
						key = "?" // the list knows only the keys of failed jobs that were not lost
					}
					return []any{j.Ordinal, key, j.State, j.Attempts, last}
				},
			})
		}),
	}
	cmd.Flags().StringVar(&filter.State, "state", "", "only jobs in this state: "+strings.Join(api.JobStates, ", "))
	cmd.Flags().StringVar(&filter.Key, "key", "", "only the job with this key")
	cmd.Flags().StringVar(&filter.Code, "code", "", "only jobs that failed with this error code")
	list.add(cmd, "jobs")
	list.order = "first"
	return cmd
}

func newJob(r *Root) *cobra.Command {
	var key string
	ordinal := int64(-1)
	cmd := &cobra.Command{
		Use:   "job GROUP ORDINAL | --key KEY",
		Short: "Show one job: its state, result, last errors, and why it waits",
		Long: "Show one job by its ordinal, or by its key, in a group that was submitted with --unique-keys: its\n" +
			"state, key, start, run time, worker, result and last errors, and why it waits. 10 MiB of a group's\n" +
			"results are searched for the result.",
		Example: "  bulkaction job promo-7 --key customer-4711",
		Args: func(_ *cobra.Command, args []string) (err error) {
			switch {
			case key != "" && len(args) == 2:
				return usagef("give the ordinal or --key, not both")
			case key == "" && len(args) != 2, key != "" && len(args) != 1:
				return usagef("job needs a group, and an ordinal or --key, got %s", argumentsText(args))
			case key == "":
				if ordinal, err = parseOrdinal(args[1]); err != nil {
					return err
				}
			}
			return checkID("group", args[0])
		},
		RunE: r.withAPI(func(ctx context.Context, a *client.API, args []string) error {
			if key != "" {
				found, err := first(a.Jobs(ctx, args[0], client.JobFilter{Key: key}))
				if err != nil {
					return err
				}
				if found == nil {
					return withHint(fmt.Errorf("no job of group %s has the key %q", args[0], key),
						"`bulkaction jobs %s` lists the group's jobs.", args[0])
				}
				ordinal = found.Ordinal
			}
			j, err := jobOf(ctx, a, args[0], ordinal)
			if err != nil {
				return err
			}
			j.Key = cmp.Or(j.Key, key)
			return r.show(j, func(t table) { jobRows(t, j) })
		}),
	}
	cmd.Flags().StringVar(&key, "key", "", "the job with this key, instead of an ordinal")
	cmd.AddCommand(newJobCancel(r))
	return cmd
}

func newJobCancel(r *Root) *cobra.Command {
	return &cobra.Command{
		Use:   "cancel GROUP ORDINAL",
		Short: "End a job that no worker has taken, as cancelled",
		Args: func(_ *cobra.Command, args []string) error {
			if len(args) != 2 {
				return usagef("job cancel needs a group and an ordinal, got %s", argumentsText(args))
			}
			if _, err := parseOrdinal(args[1]); err != nil {
				return err
			}
			return checkID("group", args[0])
		},
		RunE: ask(r, func(ctx context.Context, a *client.API, args []string) (j api.Job, err error) {
			ordinal, err := parseOrdinal(args[1])
			if err != nil {
				return j, err
			}
			return a.CancelJob(ctx, args[0], ordinal)
		}, func(t table, j api.Job) { t.row(j.ID, j.State) }),
	}
}

func newRetry(r *Root) *cobra.Command {
	var choice api.RetryChoice
	cmd := &cobra.Command{
		Use:   "retry GROUP [--code CODE]... [--job ORDINAL]...",
		Short: "Run the failed jobs of an ended group again",
		Long: "Run the failed jobs of an ended group again: all, or those that failed with one of the codes and\n" +
			"those with one of the ordinals. The others stay failed. The dead letters of jobs that run again are\n" +
			"deleted.",
		Example: "  bulkaction retry promo-7 --code SMTP_451 --code TIMEOUT",
		Args:    requireID("group"),
		RunE: ask(r, func(ctx context.Context, a *client.API, args []string) (api.Accepted, error) {
			answer, err := a.RetryChosen(ctx, args[0], choice)
			if !errors.Is(err, client.ErrConflict) {
				return answer, err
			}
			if g, lost := a.Group(ctx, args[0]); lost == nil && !g.Status.Ended() {
				err = withHint(err, "`bulkaction watch %s` waits for its end.", args[0])
			}
			return answer, err
		}, func(t table, answer api.Accepted) {
			t.row(answer.ID, answer.Status, "failed jobs run again")
		}),
	}
	cmd.Flags().StringArrayVar(&choice.Codes, "code", nil, "only jobs that failed with this code (repeatable)")
	cmd.Flags().Int64SliceVar(&choice.Jobs, "job", nil, "only the job with this ordinal (repeatable, or 1,5,9)")
	return cmd
}

// first returns the first item of a list; nil if the list is empty.
func first[T any](items iter.Seq2[T, error]) (*T, error) {
	for item, err := range items {
		return &item, err
	}
	return nil, nil
}

// jobRows adds what is known of a job to the table.
func jobRows(t table, j api.Job) {
	whyRows(t, whyOf(j), &j)
	t.row("Attempts", j.Attempts)
	if j.AcceptedAt != nil {
		t.row("Accepted", formatTime(*j.AcceptedAt))
	}
	if j.EndedAt != nil {
		t.row("Ended", formatTime(*j.EndedAt))
	}
	if j.Waits != nil {
		t.row("Waited", fmt.Sprintf("%d ms for its turn, %d ms for rate limits, %d ms after errors or for busy services",
			j.Waits.TurnMS, j.Waits.RateMS, j.Waits.CongestionMS))
	}
	if len(j.Payload) > 0 {
		t.row("Payload", truncate(string(j.Payload), 2000))
	}
	if len(j.Result) > 0 {
		t.row("Result", truncate(string(j.Result), 2000))
	}
	if j.ResultHint != "" {
		t.row("Result", j.ResultHint)
	}
	if j.TraceID != "" {
		t.row("Trace", j.TraceID)
	}
}

func newFailures(r *Root) *cobra.Command {
	var payload, summary bool
	var code string
	cmd := &cobra.Command{
		Use:   "failures GROUP",
		Short: "Print a group's failed jobs, or what their errors have in common",
		Long: "Print a group's failed jobs. With --summary, count them by code, and by errors that differ only in\n" +
			"digits, UUIDs, and names and addresses of hosts and users; 5,000 failed jobs are read for that.",
		Example: "  bulkaction failures promo-7 --summary",
		Args: func(cmd *cobra.Command, args []string) error {
			if summary && (payload || code != "") {
				return usagef("--summary: can't be combined with --payload or --code")
			}
			return requireID("group")(cmd, args)
		},
		RunE: r.withAPI(func(ctx context.Context, a *client.API, args []string) error {
			if summary {
				sum, err := a.FailureSummary(ctx, args[0])
				if err != nil {
					return err
				}
				return r.show(sum, func(t table) { summaryRows(t, sum) })
			}
			failures, last := a.Failures(ctx, args[0]), "ERROR"
			if payload {
				failures, last = a.FailuresWithPayloads(ctx, args[0]), "ERROR, PAYLOAD"
			}
			if code != "" {
				q := client.FailureQuery{Code: code, Payloads: payload, Limit: 1000}
				failures = everyPage(func(cursor string) ([]api.Failure, string, error) {
					q.Cursor = cursor
					page, err := a.FailurePage(ctx, args[0], q)
					return page.Failures, page.Cursor, err
				})
			}
			return printLines(r, failures, &columns[api.Failure]{
				none:   "No failed jobs found.",
				format: "%-10v %-20v %-20v %-8v %-20v %v",
				head:   []any{"JOB", "KEY", "CODE", "ATTEMPTS", "AT", last},
				cells: func(f api.Failure) []any {
					text := f.Error
					if payload {
						text += "  " + string(f.Payload)
					}
					return []any{f.Ordinal, cmp.Or(f.Key, "-"), f.Code, f.Attempts, formatTime(f.At), text}
				},
			})
		}),
	}
	cmd.Flags().BoolVar(&payload, "payload", false, "print the payloads, too")
	cmd.Flags().BoolVar(&summary, "summary", false, "count by code and error, with examples")
	cmd.Flags().StringVar(&code, "code", "", "only jobs that failed with this code")
	return cmd
}

// summaryRows adds to the table the error codes, the fingerprints of each, and an example of each
// fingerprint.
func summaryRows(t table, sum api.FailureSummary) {
	t.row("Failed jobs", thousands(sum.Total))
	t.row("Read", thousands(sum.Seen))
	for _, c := range sum.Codes {
		t.section(c.Code, thousands(c.Count))
		for _, f := range c.Fingerprints {
			about := ""
			if sum.Seen < sum.Total {
				about = "about "
			}
			t.row("  "+about+thousands(f.Count), f.Text)
			for _, s := range f.Samples[:min(1, len(f.Samples))] {
				t.row("", "job "+thousands(s.Ordinal)+": "+truncate(s.Error, 200))
			}
		}
	}
}

// mapWidth is how many characters of a map a line has.
const mapWidth = 80

func newMap(r *Root) *cobra.Command {
	var buckets int
	cmd := &cobra.Command{
		Use:   "map GROUP",
		Short: "Show the states of a group's jobs by ordinal",
		Long: "Show the states of a group's jobs by ordinal. A character stands for a range of jobs and shows the\n" +
			"state of most of them: W waiting, N non-ready, R ready, I in flight, D done, F failed, C cancelled; f:\n" +
			"some have failed, but not most. The first column is the ordinal of the line's first job.",
		Args: func(cmd *cobra.Command, args []string) error {
			if buckets < 1 || buckets > 1000 {
				return usagef("--buckets %d: must be 1 to 1000", buckets)
			}
			return requireID("group")(cmd, args)
		},
		RunE: ask(r, func(ctx context.Context, a *client.API, args []string) (api.JobMap, error) {
			return a.JobMap(ctx, args[0], buckets)
		}, mapRows),
	}
	cmd.Flags().IntVar(&buckets, "buckets", 5*mapWidth, "number of ranges, 1 to 1000")
	return cmd
}

// mapRows adds the lines of a map.
func mapRows(t table, m api.JobMap) {
	t.row("Jobs", thousands(m.Jobs))
	for len(m.Buckets) > 0 {
		n := min(mapWidth, len(m.Buckets))
		var line strings.Builder
		for i := range m.Buckets[:n] {
			line.WriteByte(mapLetter(&m.Buckets[i]))
		}
		t.row(thousands(m.Buckets[0].From), line.String())
		m.Buckets = m.Buckets[n:]
	}
}

// mapLetter returns the character for a range of jobs: the letter of the most frequent state, or f
// if another state is more frequent than failed but some jobs failed.
func mapLetter(b *api.MapBucket) byte {
	letter, most := byte('?'), int64(0)
	for i, n := range []int64{b.Failed, b.InFlight, b.Ready, b.NonReady, b.Waiting, b.Done, b.Cancelled} {
		if n > most {
			letter, most = "FIRNWDC"[i], n
		}
	}
	if b.Failed > 0 && letter != 'F' {
		return 'f'
	}
	return letter
}

func newWhy(r *Root) *cobra.Command {
	var ordinal int64
	return &cobra.Command{
		Use:   "why GROUP [ORDINAL]",
		Short: "Say why a job, or the next job of a group, is not running",
		Long: "Say why a job is not running. The reason is the first of these that applies: paused, scheduled,\n" +
			"no_processor, missing_role, retry, congestion, resource, rate, capacity, fairness. Without ORDINAL it is the reason of the\n" +
			"group's next job. --json prints the job, or without ORDINAL the reason.",
		Example: "  bulkaction why promo-7 0",
		Args: func(cmd *cobra.Command, args []string) (err error) {
			if len(args) < 1 || len(args) > 2 {
				return usagef("why needs a group, and an ordinal for one of its jobs, got %s", argumentsText(args))
			}
			if len(args) == 2 {
				if ordinal, err = parseOrdinal(args[1]); err != nil {
					return err
				}
			}
			return checkID("group", args[0])
		},
		RunE: r.withAPI(func(ctx context.Context, a *client.API, args []string) error {
			if len(args) == 1 {
				why, err := a.Why(ctx, args[0])
				if err != nil {
					return err
				}
				return r.show(why, func(t table) { whyRows(t, why, nil) })
			}
			j, err := jobOf(ctx, a, args[0], ordinal)
			if err != nil {
				return err
			}
			return r.show(j, func(t table) { whyRows(t, whyOf(j), &j) })
		}),
	}
}

func jobOf(ctx context.Context, a *client.API, group string, ordinal int64) (api.Job, error) {
	j, err := a.Job(ctx, group, ordinal)
	if !isNotFound(err) {
		return j, err
	}
	g, lost := a.Group(ctx, group)
	switch n := g.Counts.Accepted; {
	case lost != nil:
		return j, err
	case n == 0:
		return j, withHint(err, "Group %s exists and has no jobs yet.", group)
	default:
		return j, withHint(err, "Group %s exists; the ordinals of its jobs are 0 to %d.", group, n-1)
	}
}

func parseOrdinal(arg string) (int64, error) {
	n, err := strconv.ParseInt(arg, 10, 64)
	if err != nil || n < 0 {
		return 0, usagef("ordinal %q: must be a whole number from 0", arg)
	}
	return n, nil
}

func whyOf(j api.Job) api.Why { return *cmp.Or(j.Why, &api.Why{Job: j.ID}) }

// whyRows adds to the table why a job waits. j is nil if the server named only the group's next
// job.
func whyRows(t table, w api.Why, j *api.Job) {
	if w.Job != "" {
		t.row("Job", w.Job)
	}
	if j != nil {
		if j.Key != "" {
			t.row("Key", j.Key)
		}
		t.row("State", strings.ReplaceAll(j.State, "_", " "))
		runRows(t, *j)
	}
	if w.Reason != "" {
		t.row("Waits for", w.Reason)
	}
	if w.Detail != "" {
		t.row("Why", w.Detail)
	}
	if w.Until != nil {
		t.row("Not before", formatTime(*w.Until))
	}
	if w.Position != nil {
		t.row("Jobs before it", thousands(*w.Position))
	}
	if w.EstimateSeconds != nil {
		t.row("Starts in about", formatSeconds(*w.EstimateSeconds))
	}
	if l := w.Limit; l != nil {
		t.row("Limit", whyLimitText(*l))
	}
	if j != nil {
		errorRows(t, j.Errors)
	}
}

// runRows adds when the last attempt of a job started, how long it ran or has run, and where.
func runRows(t table, j api.Job) {
	if j.StartedAt != nil {
		t.row("Started", formatTime(*j.StartedAt))
	}
	if j.RunSeconds != nil {
		name := "Ran for"
		if j.State == "in_flight" {
			name = "Has run for"
		}
		t.row(name, time.Duration(*j.RunSeconds*float64(time.Second)).Round(time.Microsecond))
	}
	if j.Worker != "" {
		t.row("Worker", j.Worker)
	}
}

// errorRows adds the last errors of a job, newest first.
func errorRows(t table, errs []api.JobError) {
	name := "Last error"
	for _, e := range errs {
		t.row(name, fmt.Sprintf("%s: %s (attempt %d, %s)", e.Code, e.Error, e.Attempt, formatTime(e.At)))
		name = "Error before"
	}
}

func whyLimitText(l api.WhyLimit) string {
	rps := plainNumber(l.RPS)
	whose := map[string]string{
		"tenant": "its tenant", "share": "its tenant's share", "type": "its type", "global": "all tenants",
	}[l.Scope]
	// a partition has only a part of these limits
	shared := l.Scope == "global" || l.Scope == "type"
	if permits := perWindow(l.RPS, l.WindowMS); shared && permits > l.PerWindow {
		return fmt.Sprintf("%s a second for %s; its partition has %s of the %s of a window of %d ms, %s used",
			rps, whose, thousands(l.PerWindow), thousands(permits), l.WindowMS, thousands(l.Used))
	}
	return fmt.Sprintf("%s a second for %s; %s of %s used in this window of %d ms",
		rps, whose, thousands(l.Used), thousands(l.PerWindow), l.WindowMS)
}

// formatDuration formats seconds as 1m23s.
func formatDuration(s float64) string {
	return time.Duration(s * float64(time.Second)).Round(time.Second).String()
}
