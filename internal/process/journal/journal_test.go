package journal_test

import (
	"os"
	"path/filepath"
	"strconv"
	"sync"
	"testing"

	"github.com/stretchr/testify/require"
	"go.uber.org/goleak"

	"github.com/bulkaction/bulkaction/internal/jobs/ledger"
	"github.com/bulkaction/bulkaction/internal/process/journal"
)

func TestMain(m *testing.M) { goleak.VerifyTestMain(m) }

func open(t *testing.T, dir, instance string) *journal.Journal {
	t.Helper()
	j, err := journal.Open(dir, instance)
	require.NoError(t, err)
	t.Cleanup(func() { _ = j.Close() })
	return j
}

func TestReadReturnsTheLogsOfAllProcesses(t *testing.T) {
	dir := t.TempDir()
	a, b := open(t, dir, "fetcher-a"), open(t, dir, "worker-b")
	a.Promoted(30, 1, []ledger.Permit{{Tenant: "x", N: 2}, {Tenant: "y", N: 1}})
	a.Admitted(10, 0, "T", []ledger.Permit{{Tenant: "x", N: 50}})
	b.Started(40, 1, "T", "x", "g", 7, 2)
	b.Started(20, 0, "U", "x", "g", 0, 1)
	b.Admitted(50, 0, "T", nil)
	require.NoError(t, a.Close())
	require.NoError(t, a.Close(), "closing again")
	require.NoError(t, b.Close())

	log, err := journal.Read(dir)
	require.NoError(t, err)
	require.Equal(t, journal.Log{
		Permits: []journal.PermitEvent{
			{At: 10, Partition: 0, By: journal.Admit, Type: "T", Tenant: "x", N: 50},
			{At: 30, Partition: 1, By: journal.Promote, Tenant: "x", N: 2},
			{At: 30, Partition: 1, By: journal.Promote, Tenant: "y", N: 1},
		},
		Starts: []journal.StartEvent{
			{At: 20, Partition: 0, Type: "U", Tenant: "x", Group: "g", Ordinal: 0, Attempt: 1},
			{At: 40, Partition: 1, Type: "T", Tenant: "x", Group: "g", Ordinal: 7, Attempt: 2},
		},
	}, log)
}

// TestFormatIsStable: the format of the files does not change, because `bench compare` reads
// journals of older programs.
func TestFormatIsStable(t *testing.T) {
	dir := t.TempDir()
	j := open(t, dir, "worker-a")
	j.Promoted(10, 1, []ledger.Permit{{Tenant: "x", N: 2}})
	j.Admitted(15, 1, "T", []ledger.Permit{{Tenant: "x", N: 2}})
	j.Started(20, 0, "U", "x", "g", 7, 3)
	require.NoError(t, j.Close())
	got, err := os.ReadFile(filepath.Join(dir, "worker-a.journal.tsv"))
	require.NoError(t, err)
	require.Equal(t, "P\t10\t1\t\tx\tpromote\t2\nP\t15\t1\tT\tx\tadmit\t2\nS\t20\t0\tU\tx\tg\t7\t3\n", string(got))
}

func TestConcurrentWritersLoseNothing(t *testing.T) {
	dir := t.TempDir()
	j := open(t, dir, "w")
	var wg sync.WaitGroup
	for g := range 8 {
		wg.Go(func() {
			for i := range 5000 {
				j.Started(int64(i), 0, "T", "x", strconv.Itoa(g), int64(i), 1)
			}
		})
	}
	wg.Wait()
	require.NoError(t, j.Close())
	log, err := journal.Read(dir)
	require.NoError(t, err)
	seen := map[journal.StartEvent]bool{}
	for _, s := range log.Starts {
		seen[s] = true
	}
	require.Len(t, log.Starts, 40000)
	require.Len(t, seen, 40000)
}

func TestEachProcessHasItsOwnFile(t *testing.T) {
	dir := t.TempDir()
	open(t, dir, "same")
	_, err := journal.Open(dir, "same")
	require.ErrorIs(t, err, os.ErrExist)
	_, err = journal.Open(filepath.Join(dir, "nowhere"), "i")
	require.ErrorIs(t, err, os.ErrNotExist)
}

func TestReadIgnoresATornLineAndRefusesUnreadableOnes(t *testing.T) {
	write := func(t *testing.T, content string) string {
		dir := t.TempDir()
		require.NoError(t, os.WriteFile(filepath.Join(dir, "p.journal.tsv"), []byte(content), 0o600))
		return dir
	}
	log, err := journal.Read(write(t, "P\t1\t0\tT\tx\tadmit\t3\nS\t2\t0\tT\tx\tg\t1"))
	require.NoError(t, err)
	require.Len(t, log.Permits, 1)
	require.Empty(t, log.Starts)

	for name, content := range map[string]string{
		"unknown kind":   "Q\t1\n",
		"missing fields": "P\t1\t0\tT\tx\tadmit\n",
		"no number":      "S\t1\t0\tT\tx\tg\tone\t1\n",
		"empty line":     "\n",
	} {
		t.Run(name, func(t *testing.T) {
			_, err := journal.Read(write(t, content))
			require.ErrorContains(t, err, "line 1")
		})
	}
}

func BenchmarkStarts(b *testing.B) {
	j, err := journal.Open(b.TempDir(), "bench")
	require.NoError(b, err)
	defer j.Close()
	b.ReportAllocs()
	for b.Loop() {
		for i := range int64(100) {
			j.Started(1_700_000_000_000_000, 0, "NOOP", "tenant-1", "group-1", i, 1)
		}
	}
}
