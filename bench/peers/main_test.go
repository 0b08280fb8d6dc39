package main

import (
	"bytes"
	"os"
	"path/filepath"
	"testing"

	"github.com/stretchr/testify/require"
)

// TestMain lets the test binary also run as a child process of a peer, as main does.
func TestMain(m *testing.M) {
	if len(os.Args) == 3 && os.Args[1] == childCommand {
		exit(runChild(os.Args[2]))
	}
	os.Exit(m.Run())
}

// fakeProgram writes a file with a shell script that replaces the program bulkaction in a test, and
// returns its path.
func fakeProgram(t *testing.T, script string) string {
	path := filepath.Join(t.TempDir(), "bulkaction")
	require.NoError(t, os.WriteFile(path, []byte("#!/bin/sh\n"+script), 0o700)) // #nosec G306: a program
	return path
}

func TestCompare(t *testing.T) {
	o, output, err := parse([]string{
		"--jobs", "300", "--rounds", "2", "--latency-jobs", "5", "--json=out.json",
		"--bulkaction", fakeProgram(t, `echo '{"jobs_per_second":1000000,"published_to_started":{"p50_ms":1}}'`),
	})
	require.NoError(t, err)
	require.Equal(t, "out.json", output)

	var progress []string
	c, err := compare(t.Context(), o, func(s string) { progress = append(progress, s) })
	require.NoError(t, err)
	require.Len(t, progress, 2*3)
	require.Equal(t, 1e6, c.Medians[nameOurs].JobsPerSecond)
	require.NotEmpty(t, c.Versions["redis"])
	for _, name := range peerNames() {
		require.Len(t, c.Runs[name], 2)
		f := c.Medians[name]
		for i, field := range f.fields()[:6] {
			require.Positive(t, *field, "%s: figure %d", name, i)
		}
		require.Greater(t, f.QueuedBytes, float64(o.Payload), name)
		require.Positive(t, c.Ratios[name].JobsPerSecond, name)
	}
	require.Positive(t, c.Ratios[nameAsynq].TunedP50MS)

	var table bytes.Buffer
	require.NoError(t, c.writeTable(&table))
	require.Contains(t, table.String(), "ours / "+nameAsynq)
}

func TestCompareGuards(t *testing.T) {
	c, err := compareGuards(t.Context(), guardOptions{Rounds: 1, Seconds: 0.1}, func(string) {})
	require.NoError(t, err)
	require.Len(t, c.Figures, len(guardPeers))
	for _, f := range c.Figures {
		require.Positive(t, f.Ours, f.Name)
		require.Positive(t, f.Peers, f.Name)
		require.Positive(t, f.Ratio, f.Name)
	}
	require.EqualValues(t, failingCallers, c.FailuresCounted[nameOurs], "no failure is lost")

	var table bytes.Buffer
	require.NoError(t, c.writeTable(&table))
	require.Contains(t, table.String(), "redsync")
	require.ErrorContains(t, runGuards(t.Context(), []string{"--rounds", "0"}), "at least 1 round")
}

func TestCompareReturnsTheErrorOfOurProgram(t *testing.T) {
	o, _, err := parse([]string{"--bulkaction", fakeProgram(t, "echo no luck >&2; exit 3")})
	require.NoError(t, err)
	_, err = compare(t.Context(), o, func(string) {})
	require.ErrorContains(t, err, "run bulkaction: ")
	require.ErrorContains(t, err, "no luck")
}

func TestParse(t *testing.T) {
	for name, tc := range map[string]struct {
		args []string
		want string
	}{
		"unknown peer":          {[]string{"--peers", "asynq,nobody"}, `--peers "nobody"`},
		"no jobs":               {[]string{"--jobs", "0"}, "--jobs 0: must be at least 1"},
		"payload too small":     {[]string{"--payload", "1"}, "--payload 1: must be at least 10"},
		"blank before the file": {[]string{"--json", "file"}, "--json=FILE"},
	} {
		t.Run(name, func(t *testing.T) {
			_, _, err := parse(tc.args)
			require.ErrorContains(t, err, tc.want)
		})
	}
}

func TestMedian(t *testing.T) {
	for want, values := range map[float64][]float64{
		3:   {3},
		2.5: {4, 1},
		2:   {9, 1, 2},
	} {
		runs := make([]figures, len(values))
		for i, v := range values {
			runs[i].P99MS = v
		}
		require.Equal(t, want, mediansOf(runs).P99MS)
	}
}

func TestPayload(t *testing.T) {
	b := payload(100_000, 200)
	require.Len(t, b, 200)
	require.Equal(t, 100_000, jobNumber(b))
}
