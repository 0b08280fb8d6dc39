package chaos

import (
	"math/rand/v2"
	"os"
	"path/filepath"
	"testing"
	"time"

	"github.com/stretchr/testify/require"
)

// These tests check the harness's own computations.

func TestASeedDecidesEverything(t *testing.T) {
	seeded := func(seed uint64) ([]*group, []time.Duration) {
		rng := rand.New(rand.NewPCG(seed, 1))
		groups := plan(rng, "x", mix{jobs: 500, crashes: 3, tenants: 2, least: 5, most: 20, during: time.Minute})
		var times []time.Duration
		for _, f := range schedule(rng, full, time.Minute) {
			times = append(times, f.at)
			require.NotNil(t, f.rng)
		}
		return groups, times
	}
	groups, times := seeded(1)
	again, timesAgain := seeded(1)
	require.Equal(t, groups, again)
	require.Equal(t, times, timesAgain)
	require.IsNonDecreasing(t, times)
	require.Len(t, times, 390)
	others, _ := seeded(2)
	require.NotEqual(t, groups, others)
	jobs, crashes := 0, 0
	for _, g := range groups {
		for _, j := range g.jobs {
			jobs++
			if j.Crash {
				crashes++
			}
		}
	}
	require.Equal(t, 500, jobs)
	require.Equal(t, 3, crashes)
}

func TestRecoveriesAreReadFromTheWorkersFiles(t *testing.T) {
	dir := t.TempDir()
	write := func(name, lines string) {
		require.NoError(t, os.WriteFile(filepath.Join(dir, name), []byte(lines), 0o600))
	}
	at := func(seconds int64) time.Time { return time.Unix(seconds, 0) }
	const s = "000000000"
	write("killed", "start g.0 1 10"+s+"\nstart g.1 1 10"+s+"\nend g.1 1 11"+s+"\n")
	write("stopped", "start g.2 1 10"+s+"\nend g.2 1 30"+s+"\nstart g.3 1 10"+s+"\nfail g.3 1 30"+s+"\n")
	write("crashed", "start g.4 1 10"+s+"\ncrash g.4 1 12"+s+"\n")
	write("well", "start g.0 2 15"+s+"\nend g.0 2 16"+s+"\nstart g.2 2 17"+s+"\nend g.2 2 18"+s+"\nstart g.3 2 40"+s+"\nstart g.4 2 14"+s+"\n")
	runs, err := readRuns(dir)
	require.NoError(t, err)
	require.Len(t, runs, 5)
	got := recoveries(runs, []span{{process: "killed", from: at(12)}, {process: "stopped", from: at(11), until: at(30)}})
	require.ElementsMatch(t, []time.Duration{3 * time.Second, 6 * time.Second, 2 * time.Second}, got, "g.3 was not taken back from the stopped process")
	require.Equal(t, 6*time.Second, percentile(got, 0.99))

	write("torn", "end g.9 1 10"+s+"\n")
	_, err = readRuns(dir)
	require.ErrorContains(t, err, "its start is missing")
}
