package main

import (
	"os"
	"path/filepath"
	"testing"

	"github.com/stretchr/testify/require"
)

func TestWritesTheTableBetweenItsMarks(t *testing.T) {
	dir := t.TempDir()
	from, to := filepath.Join(dir, "report.json"), filepath.Join(dir, "page.md")
	require.NoError(t, os.WriteFile(from, []byte(`{"seed":7,"jobs":30,"faults":{"kill_9":2},"versions":{"redis":"7.0.15","go":"1.26"},"lost":1,
		"phases":[{"name":"single","jobs":30,"faults":{"kill_9":2},"lost":1,"recovery_p99_seconds":2.54,
			"deleted_jobs":9,"ended_as_lost":4}]}`), 0o600))
	require.NoError(t, os.WriteFile(to, []byte("before\n"+begin+"\nold\n"+end+"\nafter\n"), 0o600))
	require.NoError(t, write(from, to))
	page, err := os.ReadFile(to)
	require.NoError(t, err)
	require.Contains(t, string(page), "before\n"+begin+"\nSeed 7, Redis 7.0.15, Go 1.26, 30 jobs")
	require.Contains(t, string(page), "| phase | single | **all** |\n")
	require.Contains(t, string(page), "| `kill_9` | 2 | 2 |\n")
	require.Contains(t, string(page), "| jobs with a deleted entry / ended as `LOST` | 9 / 4 | 0 / 0 |\n")
	require.Contains(t, string(page), "| loss of a worker → next start, p99 | 2.5 s | 0.0 s |\n")
	require.Contains(t, string(page), end+"\nafter\n")
	require.NotContains(t, string(page), "old")

	require.NoError(t, os.WriteFile(to, []byte("no marks"), 0o600))
	require.ErrorContains(t, write(from, to), "no place")
}
