package cli

import (
	"strings"
	"testing"

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
