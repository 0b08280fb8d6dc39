package cli

import (
	"context"
	"fmt"
	"strconv"
	"strings"
	"time"

	"github.com/spf13/cobra"

	"github.com/bulkaction/bulkaction/api"
	"github.com/bulkaction/bulkaction/client"
)

func newWhy(r *Root) *cobra.Command {
	var ordinal int64
	return &cobra.Command{
		Use:   "why GROUP [ORDINAL]",
		Short: "Say why a job, or the next job of a group, is not running",
		Long: "Say why a job is not running. The reason is the first of these that applies: paused, scheduled,\n" +
			"no_processor, retry, congestion, resource, rate, fairness. Without ORDINAL it is the reason of the\n" +
			"group's next job. --json prints the job, or without ORDINAL the reason.",
		Example: "  bulkaction why promo-7 0",
		Args: func(cmd *cobra.Command, args []string) (err error) {
			if len(args) < 1 || len(args) > 2 {
				return usagef("why needs a group, and an ordinal for one of its jobs, got %s", argumentsText(args))
			}
			if len(args) == 2 {
				if ordinal, err = strconv.ParseInt(args[1], 10, 64); err != nil || ordinal < 0 {
					return usagef("ordinal %q: must be a whole number from 0", args[1])
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
			j, err := a.Job(ctx, args[0], ordinal)
			if isNotFound(err) {
				return hintUnknownJob(ctx, a, args[0], err)
			}
			if err != nil {
				return err
			}
			why := api.Why{Job: j.ID}
			if j.Why != nil {
				why = *j.Why
			}
			return r.show(j, func(t table) { whyRows(t, why, &j) })
		}),
	}
}

// hintUnknownJob adds to the error "job not found" which ordinals the group has. If the group does
// not exist either, it returns err unchanged.
func hintUnknownJob(ctx context.Context, a *client.API, group string, err error) error {
	g, lost := a.Group(ctx, group)
	switch n := g.Counts.Accepted; {
	case lost != nil:
		return err
	case n == 0:
		return withHint(err, "Group %s exists and has no jobs yet.", group)
	default:
		return withHint(err, "Group %s exists; the ordinals of its jobs are 0 to %d.", group, n-1)
	}
}

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

// errorRows adds the last errors of a job, newest first.
func errorRows(t table, errs []api.JobError) {
	name := "Last error"
	for _, e := range errs {
		t.row(name, fmt.Sprintf("%s: %s (attempt %d, %s)", e.Code, e.Error, e.Attempt, formatTime(e.At)))
		name = "Error before"
	}
}

func whyLimitText(l api.WhyLimit) string {
	rps := strconv.FormatFloat(l.RPS, 'f', -1, 64)
	// a partition has only a part of the global limit
	if globalPermits := perWindow(l.RPS, l.WindowMS); l.Scope == "global" && globalPermits > l.PerWindow {
		return fmt.Sprintf("%s a second for all tenants; its partition has %s of the %s of a window of %d ms, %s used",
			rps, thousands(l.PerWindow), thousands(globalPermits), l.WindowMS, thousands(l.Used))
	}
	whose := map[string]string{"tenant": "its tenant", "share": "its tenant's share", "global": "all tenants"}[l.Scope]
	return fmt.Sprintf("%s a second for %s; %s of %s used in this window of %d ms",
		rps, whose, thousands(l.Used), thousands(l.PerWindow), l.WindowMS)
}

// formatDuration formats seconds as 1m23s.
func formatDuration(s float64) string {
	return time.Duration(s * float64(time.Second)).Round(time.Second).String()
}
