package cli

import (
	"cmp"
	"context"
	"iter"
	"strings"

	"github.com/spf13/cobra"

	"github.com/bulkaction/bulkaction/api"
	"github.com/bulkaction/bulkaction/client"
)

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
				failures = failuresWith(ctx, a, args[0], q)
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

// failuresWith iterates over the failed jobs that a query selects. It reads page by page.
func failuresWith(
	ctx context.Context, a *client.API, group string, q client.FailureQuery,
) iter.Seq2[api.Failure, error] {
	return func(yield func(api.Failure, error) bool) {
		for q := q; ; {
			page, err := a.FailurePage(ctx, group, q)
			if err != nil {
				yield(api.Failure{}, err)
				return
			}
			for _, f := range page.Failures {
				if !yield(f, nil) {
					return
				}
			}
			if q.Cursor = page.Cursor; q.Cursor == "" {
				return
			}
		}
	}
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
		RunE: r.withAPI(func(ctx context.Context, a *client.API, args []string) error {
			m, err := a.JobMap(ctx, args[0], buckets)
			if err != nil {
				return err
			}
			return r.show(m, func(t table) { mapRows(t, m) })
		}),
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
