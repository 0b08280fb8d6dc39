package cli

import (
	"context"
	"io/fs"
	"os"
	"path/filepath"
	"strings"
	"testing"

	"github.com/stretchr/testify/require"

	"github.com/bulkaction/bulkaction/internal/jobs/ledger"
	"github.com/bulkaction/bulkaction/internal/process/app"
	"github.com/bulkaction/bulkaction/internal/process/roles"
)

func runRole(t *testing.T, role process) int {
	t.Helper()
	var log strings.Builder
	code := app.Run(t.Context(), app.Options{
		Role: "fetcher", Environ: []string{"BULKACTION_ADMIN_ADDR=127.0.0.1:0"}, Stderr: &log,
	}, role)
	t.Log(log.String())
	return code
}

// TestRoleWritesItsJournal requires the lines that the module bench reads, also from binaries of
// other revisions.
func TestRoleWritesItsJournal(t *testing.T) {
	dir := t.TempDir()
	role := func(ctx context.Context, _ *app.Process) error {
		if h := roles.HooksOf(ctx); h.Admitted != nil {
			h.Admitted(7, 0, "T", []ledger.Permit{{Tenant: "acme", N: 3}})
			h.Promoted(8, 2, []ledger.Permit{{Tenant: "acme", N: 1}})
			h.Started(9, 0, "T", "acme", "g", 5, 1)
		}
		return nil
	}
	require.Equal(t, app.ExitOK, runRole(t, withJournal(dir, role)))
	files, err := filepath.Glob(filepath.Join(dir, "*.journal.tsv"))
	require.NoError(t, err)
	require.Len(t, files, 1)
	got, err := os.ReadFile(files[0])
	require.NoError(t, err)
	require.Equal(t, "P\t7\t0\tT\tacme\tadmit\t3\nP\t8\t2\t\tacme\tpromote\t1\nS\t9\t0\tT\tacme\tg\t5\t1\n", string(got))

	require.Equal(t, app.ExitOK, runRole(t, withJournal("", role)), "without a folder there is no journal")
	require.Equal(t, app.ExitError, runRole(t, withJournal(filepath.Join(dir, "nowhere"), role)))
	_, err = os.Stat(filepath.Join(dir, "nowhere"))
	require.ErrorIs(t, err, fs.ErrNotExist)
}

func TestRoleWritesItsCPUProfile(t *testing.T) {
	role := func(context.Context, *app.Process) error { return nil }
	name := filepath.Join(t.TempDir(), "worker.pprof")
	require.Equal(t, app.ExitOK, runRole(t, withProfile(name, role)))
	info, err := os.Stat(name)
	require.NoError(t, err)
	require.Positive(t, info.Size())
	require.Equal(t, app.ExitOK, runRole(t, withProfile("", role)))
	require.Equal(t, app.ExitError, runRole(t, withProfile(filepath.Join(name, "nowhere"), role)))
}
