package cli

import (
	"context"
	"maps"
	"slices"
	"strconv"
	"strings"

	"github.com/spf13/cobra"

	"github.com/bulkaction/bulkaction/api"
	"github.com/bulkaction/bulkaction/client"
)

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

	t.section("ROLE", "PROCESSES")
	for _, role := range s.Roles {
		n := strconv.Itoa(role.Processes)
		if role.Processes == 0 {
			n = "none"
		}
		t.row(role.Role, n)
	}
	t.section("TYPE", "BACKLOG", "WAITING", "NON-READY", "READY", "IN FLIGHT", "WORKERS")
	for _, y := range s.Types {
		name := y.Type
		if y.Paused {
			name += " (paused)"
		}
		t.row(name, thousands(y.Backlog), thousands(y.Waiting), thousands(y.NonReady), thousands(y.Ready),
			thousands(y.InFlight), y.Workers)
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
