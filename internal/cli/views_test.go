package cli

import (
	"strings"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/bulkaction/bulkaction/api"
)

func TestBusiestTenants(t *testing.T) {
	f := newFakeAPI(t)
	got := f.exec(t.Context(), console{}, "tenant", "ls", "--sort", "backlog")
	require.Equal(t, exitOK, got.code)
	require.Equal(t, "No watcher has looked at the tenants yet.\n", got.err)
	f.tenants = map[string]api.TenantSettings{"a": {}, "b": {}}
	got = f.exec(t.Context(), console{}, "tenant", "ls", "--sort", "backlog")
	require.Equal(t, "As of 2030-01-02 03:04:05Z.\n", got.err)
	lines := strings.Split(got.out, "\n")
	require.True(t, strings.HasPrefix(lines[1], "b "), got.out)
	require.True(t, strings.HasPrefix(lines[2], "a "), got.out)
	for _, args := range []string{"--sort name", "--sort backlog --all"} {
		got = f.exec(t.Context(), console{}, append([]string{"tenant", "ls"}, strings.Fields(args)...)...)
		require.Equal(t, exitUsage, got.code, args)
	}
}

func TestLastAudit(t *testing.T) {
	f := newFakeAPI(t)
	f.audit = api.AuditState{OK: true, Partitions: []api.AuditedPartition{{Leader: "w-1", LookedAt: &epoch}}}
	require.Equal(t, run{exitOK, `PARTITION   LEADER   LOOKED AT              FULL AUDIT AT
0           w-1      2030-01-02 03:04:05Z   never
`, ""}, f.exec(t.Context(), console{}, "audit", "--last"))

	ordinal := int64(7)
	f.audit.OK, f.audit.Partitions[0].Leader = false, ""
	f.audit.Violations = []api.Violation{{Law: "location", Group: "g", Ordinal: &ordinal, Detail: "it is gone"}}
	got := f.exec(t.Context(), console{}, "audit", "--last")
	require.Equal(t, exitError, got.code)
	require.Contains(t, got.out, "0           none")
	require.Contains(t, got.out, "location   0           g       7     it is gone")
	require.Contains(t, got.err, "a violation is open")
	got = f.exec(t.Context(), console{}, "audit", "--last", "--json")
	require.Equal(t, exitError, got.code)
	require.Contains(t, got.out, `"looked_at":"2030-01-02T03:04:05Z","deep_at":null`)
	require.Equal(t, exitUsage, f.exec(t.Context(), console{}, "audit", "--last", "--repair").code)
}

func TestHistory(t *testing.T) {
	f := newFakeAPI(t)
	got := f.exec(t.Context(), console{}, "history")
	require.Equal(t, exitOK, got.code)
	require.Contains(t, got.out, "No points yet")
	f.history = api.History{StepSeconds: 10, Points: []api.HistoryPoint{
		{T: epoch, Done: 4}, {T: epoch.Add(10 * time.Second), Done: 8, Gauges: api.Gauges{Waiting: 1234}},
		{T: epoch.Add(20 * time.Second), Done: 0.5},
	}}
	got = f.exec(t.Context(), console{}, "history", "--minutes", "15")
	require.Equal(t, exitOK, got.code, got.err)
	require.Contains(t, got.out, "TO     2030-01-02 03:04:25Z")
	require.Regexp(t, `done/s +▅█▁ +0\.5 +8\n`, got.out)
	require.Regexp(t, `waiting +█ +0 +1,234\n`, got.out)
	got = f.exec(t.Context(), console{}, "history", "--json")
	require.Contains(t, got.out, `{"step_seconds":10,"points":[{"t":"2030-01-02T03:04:05Z","accepted":0,"started":0,"done":4,`)
	for _, minutes := range []string{"14", "1441"} {
		require.Equal(t, exitUsage, f.exec(t.Context(), console{}, "history", "--minutes", minutes).code)
	}
}

func TestPlot(t *testing.T) {
	require.Empty(t, plot(nil, 60))
	require.Equal(t, "   ", plot([]float64{0, 0, 0}, 60))
	require.Equal(t, "▁▂▃▄▅▆▇█", plot([]float64{0.1, 1, 2, 3, 4, 5, 6, 8}, 60))
	require.Equal(t, "█ ", plot([]float64{0, 9, 0, 0}, 2), "the highest of several")
}
