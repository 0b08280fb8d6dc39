package cli

import (
	"context"
	"math"
	"strconv"
	"strings"

	"github.com/spf13/cobra"

	"github.com/bulkaction/bulkaction/api"
	"github.com/bulkaction/bulkaction/client"
)

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
