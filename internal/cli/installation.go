package cli

import (
	"cmp"
	"context"
	"fmt"
	"log/slog"
	"maps"
	"math"
	"slices"
	"strconv"
	"strings"

	"github.com/spf13/cobra"

	"github.com/bulkaction/bulkaction/api"
	"github.com/bulkaction/bulkaction/client"
	"github.com/bulkaction/bulkaction/internal/access/activity"
	"github.com/bulkaction/bulkaction/internal/redisx"
	"github.com/bulkaction/bulkaction/internal/redisx/keyspace"
)

// layoutsText writes the numbers of the layouts in one line.
func layoutsText(numbers map[string]string) string {
	var all []string
	for _, part := range slices.Sorted(maps.Keys(numbers)) {
		all = append(all, part+" "+numbers[part])
	}
	return strings.Join(all, ", ")
}

func newStats(r *Root) *cobra.Command {
	return &cobra.Command{
		Use:   "stats",
		Short: "Show waiting and running jobs by type, and the processes of all roles",
		Args:  cobra.NoArgs,
		RunE: ask(r, func(ctx context.Context, a *client.API, _ []string) (api.Stats, error) { return a.Stats(ctx) },
			statsRows),
	}
}

func statsRows(t table, s api.Stats) {
	t.row("Groups", thousands(s.Groups))
	t.row("Active tenants", thousands(s.ActiveTenants))
	t.row("Started per second", strconv.FormatFloat(s.StartedPerSec, 'f', 1, 64))
	t.row("Rate limit", limitText(s.RateLimit))
	t.row("Rejected messages", thousands(s.Rejected))
	t.row("Dead letters", thousands(s.DeadLetters))
	t.row("Partitions", s.Partitions)
	t.row("Layout of the data", layoutsText(s.Layouts))

	t.section("ROLE", "PROCESSES")
	for _, role := range s.Roles {
		n := strconv.Itoa(role.Processes)
		if role.Processes == 0 {
			n = "none"
		}
		t.row(role.Role, n)
	}
	t.section("TYPE", "BACKLOG", "RUNNABLE", "WAITING", "NON-READY", "READY", "IN FLIGHT", "WORKERS")
	for _, y := range s.Types {
		name := y.Type
		if y.Paused {
			name += " (paused)"
		}
		t.row(name, thousands(y.Backlog), thousands(y.Runnable), thousands(y.Waiting), thousands(y.NonReady),
			thousands(y.Ready), thousands(y.InFlight), y.Workers)
	}
	t.section("WORKER", "ACTIVE", "OF", "SERVES", "SEEN")
	for _, w := range s.Workers {
		seen := formatTime(w.SeenAt)
		if w.ShuttingDown {
			seen += ", shutting down"
		}
		t.row(w.ID, w.Active, w.Workers, strings.Join(w.Types, " "), seen)
	}
	t.section("STAGE", "ROLE", "COUNTS", "SEEN")
	for _, st := range s.Stages {
		role := st.Role
		if !st.Running {
			role += ", not running"
		}
		t.row(st.ID, role, countsText(st.Counts), formatTime(st.SeenAt))
	}
}

func limitText(l api.RateLimit) string {
	if l.RPS == 0 {
		return "none"
	}
	return thousands(l.RPS) + " a second, " + l.Limiter + " window of " + strconv.FormatInt(l.WindowMS, 10) + " ms, " +
		l.Share + "; " + thousands(l.Used) + " used in this window"
}

func countsText(counts map[string]int64) string {
	var parts []string
	for _, name := range slices.Sorted(maps.Keys(counts)) {
		parts = append(parts, name+"="+strconv.FormatInt(counts[name], 10))
	}
	return strings.Join(parts, " ")
}

func newHistory(r *Root) *cobra.Command {
	minutes := 60
	cmd := &cobra.Command{
		Use:   "history",
		Short: "Show throughput and queues of the last minutes",
		Long: "Show throughput and queues of the last minutes as small plots, the newest at the right. A plot goes\n" +
			"from 0 to the highest value.",
		Args: func(cmd *cobra.Command, args []string) error {
			if minutes < api.MinHistoryMinutes || minutes > api.MaxHistoryMinutes {
				return usagef("--minutes %d: must be %d to %d", minutes, api.MinHistoryMinutes, api.MaxHistoryMinutes)
			}
			return cobra.NoArgs(cmd, args)
		},
		RunE: ask(r, func(ctx context.Context, a *client.API, _ []string) (api.History, error) {
			return a.History(ctx, minutes)
		}, historyRows),
	}
	cmd.Flags().IntVar(&minutes, "minutes", minutes, "how much to show, from 15 to 1440")
	return cmd
}

// plotWidth is the number of characters of a plot.
const plotWidth = 60

// series are the rows of the history.
var series = []struct {
	name string
	of   func(api.HistoryPoint) float64
}{
	{"accepted/s", func(p api.HistoryPoint) float64 { return p.Accepted }},
	{"started/s", func(p api.HistoryPoint) float64 { return p.Started }},
	{"done/s", func(p api.HistoryPoint) float64 { return p.Done }},
	{"failed/s", func(p api.HistoryPoint) float64 { return p.Failed }},
	{"retried/s", func(p api.HistoryPoint) float64 { return p.Retried }},
	{"throttled/s", func(p api.HistoryPoint) float64 { return p.Throttled }},
	{"waiting", func(p api.HistoryPoint) float64 { return float64(p.Waiting) }},
	{"non-ready", func(p api.HistoryPoint) float64 { return float64(p.NonReady) }},
	{"ready", func(p api.HistoryPoint) float64 { return float64(p.Ready) }},
	{"in flight", func(p api.HistoryPoint) float64 { return float64(p.InFlight) }},
	{"active tenants", func(p api.HistoryPoint) float64 { return float64(p.ActiveTenants) }},
	{"slots", func(p api.HistoryPoint) float64 { return float64(p.Pool) }},
	{"busy slots", func(p api.HistoryPoint) float64 { return float64(p.Busy) }},
}

func historyRows(t table, h api.History) {
	if len(h.Points) == 0 {
		t.row("No points yet: a watcher takes a sample every 10 seconds, and a point needs two of them.")
		return
	}
	t.row("FROM", formatTime(h.Points[0].T))
	t.row("TO", formatTime(h.Points[len(h.Points)-1].T))
	t.section("", "PLOT", "NOW", "HIGHEST")
	for _, s := range series {
		values := make([]float64, len(h.Points))
		highest := 0.0
		for i, p := range h.Points {
			values[i] = s.of(p)
			highest = max(highest, values[i])
		}
		t.row(s.name, plot(values, plotWidth), figure(values[len(values)-1]), figure(highest))
	}
}

func figure(v float64) string {
	if v == math.Trunc(v) {
		return thousands(int64(v))
	}
	return strconv.FormatFloat(v, 'f', 1, 64)
}

// plot returns a line of bars for values, of at most width characters. If there are more values,
// each bar shows the highest of several. 0 is a space; any other value has a visible bar.
func plot(values []float64, width int) string {
	bars := []rune("▁▂▃▄▅▆▇█")
	width = min(width, len(values))
	heights := make([]float64, width)
	highest := 0.0
	for i, v := range values {
		at := i * width / len(values)
		heights[at] = max(heights[at], v)
		highest = max(highest, v)
	}
	var b strings.Builder
	for _, v := range heights {
		if v <= 0 {
			b.WriteByte(' ')
			continue
		}
		b.WriteRune(bars[min(len(bars)-1, int(v/highest*float64(len(bars))))])
	}
	return b.String()
}

func newWorker(r *Root) *cobra.Command {
	return asRole(parentCommand("worker", "Run the role worker, or resize a running one; `stats` lists them",
		&cobra.Command{
			Use:   "resize WORKER SLOTS",
			Short: "Set how many jobs a worker process runs at once",
			Long: "Set how many jobs a worker process runs at once, within a second. With 0 it starts no job;\n" +
				"running jobs finish. A process that starts again begins with BULKACTION_WORKER_COUNT.",
			Example: "  bulkaction worker resize worker-host-1-0a1b2c3d 20",
			Args: func(_ *cobra.Command, args []string) error {
				if len(args) != 2 {
					return usagef("resize needs the id of a worker and a number of slots, got %s", argumentsText(args))
				}
				if _, err := slots(args[1]); err != nil {
					return err
				}
				return checkID("worker", args[0])
			},
			RunE: ask(r, func(ctx context.Context, a *client.API, args []string) (api.PoolSize, error) {
				n, err := slots(args[1])
				if err != nil {
					return api.PoolSize{}, err
				}
				size, err := a.ResizeWorker(ctx, args[0], n)
				if isUnknownID(err) {
					err = withHint(err, "`bulkaction stats` lists the worker processes that are alive.")
				}
				return size, err
			}, func(t table, p api.PoolSize) { t.row(p.ID, p.Workers) }),
		}))
}

// slots reads the number of slots of a worker process.
func slots(arg string) (int, error) {
	n, err := strconv.Atoi(arg)
	if err != nil || n < 0 || n > api.MaxWorkers {
		return 0, usagef("slots %q: must be 0 to %d", arg, api.MaxWorkers)
	}
	return n, nil
}

func newDeadLetters(r *Root) *cobra.Command {
	var list listFlags
	var filter client.DeadLetterFilter
	cmd := &cobra.Command{
		Use:   "dead-letters",
		Short: "Print the failed jobs of all groups, newest first",
		Args:  cobra.NoArgs,
		RunE: r.withAPI(func(ctx context.Context, a *client.API, _ []string) error {
			return printList(r, list, a.DeadLetters(ctx, filter), &columns[api.DeadLetter]{
				none:   "No dead letters found.",
				format: "%-20v %-24v %-16v %-16v %-20v %v",
				head:   []any{"AT", "JOB", "TENANT", "TYPE", "CODE", "ERROR"},
				cells: func(d api.DeadLetter) []any {
					return []any{formatTime(d.At), d.Job, d.Tenant, d.Type, d.Code, d.Error}
				},
			})
		}),
	}
	list.add(cmd, "jobs")
	flags := cmd.Flags()
	flags.StringVar(&filter.Code, "code", "", "only jobs that failed with this code, such as LOST")
	flags.StringVar(&filter.Group, "group", "", "only jobs of this group")
	flags.StringVar(&filter.Tenant, "tenant", "", "only jobs of this tenant")
	flags.StringVar(&filter.Type, "type", "", "only jobs of this type")
	addSince(flags, &filter.Since, "only jobs that failed")
	return cmd
}

func newRejected(r *Root) *cobra.Command {
	var list listFlags
	var data bool
	cmd := &cobra.Command{
		Use:   "rejected",
		Short: "Print the messages of the ingest stream that were rejected, newest first",
		Long: "Print the messages of the ingest stream that were rejected, newest first, each with the reason.\n" +
			"A message is accepted or rejected whole: correct it and send it again.",
		Args: cobra.NoArgs,
		RunE: r.withAPI(func(ctx context.Context, a *client.API, _ []string) error {
			messages := everyPage(func(cursor string) ([]api.RejectedMessage, string, error) {
				page, err := a.Rejected(ctx, client.RejectedQuery{Cursor: cursor, Data: data})
				return page.Rejected, page.Cursor, err
			})
			return printList(r, list, messages, &columns[api.RejectedMessage]{
				none:   "No rejected messages.",
				format: "%-20v %-24v %-16v %10v %v",
				head:   []any{"AT", "MESSAGE", "TYPE", "BYTES", "REASON"},
				cells: func(m api.RejectedMessage) []any {
					at := "-"
					if m.At != nil {
						at = formatTime(*m.At)
					}
					reason := m.Reason
					if m.Data != "" {
						reason += fmt.Sprintf(" %q", m.Data)
					}
					return []any{at, cmp.Or(m.MessageID, m.Entry, m.ID), cmp.Or(m.Type, "-"), m.Bytes, reason}
				},
			})
		}),
	}
	list.add(cmd, "messages")
	cmd.Flags().BoolVar(&data, "data", false, "print the messages' data, too")
	return cmd
}

func newActivity(r *Root) *cobra.Command {
	var list listFlags
	var q client.ActivityQuery
	cmd := &cobra.Command{
		Use:   "activity",
		Short: "Print who changed what, newest first",
		Long: "Print who changed what, newest first: the log of all changes but submissions and appends. It needs\n" +
			"the key of an admin. An entry with an outcome says why a change failed; the entry before it has the\n" +
			"same request id.",
		Args: cobra.NoArgs,
		RunE: r.withAPI(func(ctx context.Context, a *client.API, _ []string) error {
			entries := everyPage(func(cursor string) ([]api.Activity, string, error) {
				q.Cursor = cursor
				page, err := a.Activity(ctx, q)
				return page.Activity, page.Cursor, err
			})
			return printList(r, list, entries, &columns[api.Activity]{
				none:   "No entries found.",
				format: "%-20v %-16v %-9v %-4v %-18v %-28v %v",
				head:   []any{"AT", "ACTOR", "ROLE", "VIA", "ACTION", "OBJECT", "AFTER"},
				cells: func(e api.Activity) []any {
					return []any{
						formatTime(e.At), e.Actor, cmp.Or(e.Role, "-"), e.Via, e.Action, e.Object,
						cmp.Or(e.Outcome, string(e.After)),
					}
				},
			})
		}),
	}
	list.add(cmd, "entries")
	cmd.Flags().StringVar(&q.Actor, "actor", "", "only changes of this actor, the id of a key or cli:USER")
	cmd.Flags().StringVar(&q.Tenant, "tenant", "", "only changes with keys of this tenant")
	addSince(cmd.Flags(), &q.Since, "only changes")
	return cmd
}

// record writes to the activity log that this command changes something in Redis, and then calls
// change. If it can't write the entry, it does not call change. If change fails, a second entry
// says so.
func record(
	ctx context.Context, conn *redisx.Conn, space keyspace.Space, e api.Activity, change func(context.Context) error,
) error {
	ctx = activity.WithActor(ctx, api.Activity{Actor: operatorName(), Via: api.ViaCLI})
	return activity.New(conn.Cmd, space, 0, slog.New(slog.DiscardHandler)).Do(ctx, e, change)
}
