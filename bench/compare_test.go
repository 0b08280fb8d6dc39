package bench

import (
	"encoding/json"
	"os"
	"os/exec"
	"path/filepath"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/bulkaction/bulkaction/api"
	"github.com/bulkaction/bulkaction/bench/measure"
)

// smallCompare returns options that compare this test binary with itself under the name "older" (a
// symbolic link), with few jobs. With -short it skips the test.
func smallCompare(t *testing.T, only ...string) CompareOptions {
	if testing.Short() {
		t.Skip("starts processes")
	}
	copied := filepath.Join(t.TempDir(), "older")
	require.NoError(t, os.Symlink(os.Args[0], copied))
	return CompareOptions{
		Options: Options{Role: []string{os.Args[0], "role"}}, Base: []string{copied, "role"},
		Only: only, Rounds: 1, Jobs: 2000, HTTPJobs: 200, Rate: 100, Seconds: 1,
	}
}

func TestCompareRunsBothProgramsInTurn(t *testing.T) {
	o := smallCompare(t, "base")
	var parts []string
	o.Progress = func(part string, _, _ int64) { parts = append(parts, part) }
	c, err := RunCompare(t.Context(), o)
	require.NoError(t, err)
	require.Equal(t, "older", c.Base)
	require.Equal(t, []string{"round 1 of 1, base, older", "round 1 of 1, base, " + c.Head}, parts)
	require.Len(t, c.Variants, 1)
	v := c.Variants[0]
	require.Equal(t, "base", v.Name)
	require.Equal(t, 2000, v.Jobs)
	require.Len(t, v.Figures, len(comparedFigureNames))
	for i, f := range v.Figures {
		require.Equal(t, comparedFigureNames[i], f.Name)
		require.Len(t, f.BaseRuns, 1)
		require.Len(t, f.HeadRuns, 1)
		if f.Name != figureRoleCPU { // counted in ticks of 10 ms, so it may be 0
			require.Positive(t, f.Base, f.Name)
			require.Positive(t, f.Head, f.Name)
			require.Positive(t, f.Ratio, f.Name)
		}
	}
}

// TestCompareVariants runs each variant but the base with one program. A run fails if its groups do
// not show what the variant asks for, so success shows that the load is right.
func TestCompareVariants(t *testing.T) {
	for _, v := range compareVariants[1:] {
		t.Run(v.name, func(t *testing.T) {
			t.Parallel()
			o := smallCompare(t)
			got, err := o.measure(t.Context(), o.Role, v)
			require.NoError(t, err)
			for _, name := range []string{figureSpeed, figureRedisCPU, figureCommands, figureP50, figureP99} {
				require.Positive(t, got[name], name)
			}
			require.NotContains(t, got, figureMemory)
		})
	}
}

func TestCompareSaysWhichProgramFailed(t *testing.T) {
	o := smallCompare(t, "retries")
	o.Base = []string{filepath.Join(t.TempDir(), "missing")}
	c, err := RunCompare(t.Context(), o)
	require.ErrorContains(t, err, "round 1 of 1, retries, missing: measure throughput: start")
	require.Empty(t, c.Variants)
}

func TestCompareChecksTheLoad(t *testing.T) {
	end := func(done, retries int64, aggregate string) groupEnd {
		g := &api.Group{ID: "g", Counts: api.Counts{Done: done}, Retries: retries}
		require.NoError(t, json.Unmarshal([]byte(aggregate), &g.Aggregate))
		return groupEnd{group: g}
	}
	variant := map[string]compareVariant{}
	for _, v := range compareVariants {
		variant[v.name] = v
	}
	for _, tt := range []struct {
		name, variant string
		ends          []groupEnd
		jobs          int
		fails         bool
	}{
		{"all jobs done", "base", []groupEnd{end(60, 0, `{}`), end(70, 0, `{}`)}, 130, false},
		{"a job is missing", "base", []groupEnd{end(60, 0, `{}`), end(69, 0, `{}`)}, 130, true},
		{"an unexpected retry", "base", []groupEnd{end(130, 1, `{}`)}, 130, true},
		{"1% retried", "retries", []groupEnd{end(150, 2, `{}`), end(50, 0, `{}`)}, 200, false},
		{"no job retried", "retries", []groupEnd{end(200, 0, `{}`)}, 200, true},
		{"all values", "aggregates", []groupEnd{end(60, 0, `{"cost":1830,"spread":{"count":60}}`), end(42, 0, `{"cost":3223,"spread":{"count":42}}`)}, 102, false},
		{"a wrong sum", "aggregates", []groupEnd{end(60, 0, `{"cost":1829,"spread":{"count":60}}`)}, 60, true},
		{"a value is missing", "aggregates", []groupEnd{end(60, 0, `{"cost":1830,"spread":{"count":59}}`)}, 60, true},
		{"no aggregate", "aggregates", []groupEnd{end(60, 0, `{}`)}, 60, true},
	} {
		t.Run(tt.name, func(t *testing.T) {
			err := variant[tt.variant].checkGroups(tt.ends, tt.jobs)
			require.Equal(t, tt.fails, err != nil, "%v", err)
		})
	}
}

func TestCompareComputesMediansAndRatios(t *testing.T) {
	speed := func(values ...float64) (out []roundFigures) {
		for _, v := range values {
			out = append(out, roundFigures{figureSpeed: v})
		}
		return out
	}
	got := computeMedians([2][]roundFigures{speed(100, 80, 120), speed(90, 100, 108)})
	require.Equal(t, []ComparedFigure{{
		Name: figureSpeed, Base: 100, Head: 100, Ratio: 1, BaseRuns: []float64{100, 80, 120}, HeadRuns: []float64{90, 100, 108},
	}}, got, "figures that were not measured are left out")
	least, most := got[0].Range()
	require.Equal(t, []float64{0.9, 1.25}, []float64{least, most})
	require.InDelta(t, 2.5, measure.Median([]float64{4, 1, 2, 3}), 0)
}

func TestEndListenerReportsGroupsThatAreNotCompleted(t *testing.T) {
	e := &endListener{ends: map[string]groupEnd{
		"a": {group: &api.Group{Status: api.StatusCompleted}}, "b": {group: &api.Group{ID: "b", Status: api.StatusFailed, Counts: api.Counts{Failed: 3}}},
	}}
	got, err := e.completed([]group{{id: "a"}, {id: "c"}})
	require.NoError(t, err)
	require.Len(t, got, 1)
	_, err = e.completed([]group{{id: "a"}, {id: "b"}})
	require.ErrorContains(t, err, "await group b: it is FAILED with 3 failed jobs")
}

func TestLastCompletedIsTheLatest(t *testing.T) {
	at := func(ms int64) groupEnd {
		return groupEnd{group: &api.Group{Timestamps: map[string]time.Time{"completed": time.UnixMilli(ms)}}}
	}
	require.Equal(t, time.UnixMilli(9), lastCompleted([]groupEnd{at(3), at(9), at(5)}))
}

// TestCompareLeavesOutBenchmarksOfOneSide runs common.awk, as compare.sh does before benchstat, on
// two outputs: two benchmarks have moved to another package, two exist on one side only.
func TestCompareLeavesOutBenchmarksOfOneSide(t *testing.T) {
	dir := t.TempDir()
	for name, text := range map[string]string{
		"old": "goos: linux\npkg: m/lua\nBenchmarkAdmit-2 1 9 ns/op\nBenchmarkAppend-2 1 9 ns/op\nPASS\nok m/lua 1s\n" +
			"pkg: m/messages\nBenchmarkAppend-2 1 8 ns/op\nBenchmarkGone-2 1 8 ns/op\nPASS\n",
		"new": "goos: linux\npkg: m/ledger\nBenchmarkAdmit-2 1 7 ns/op\nBenchmarkAppend-2 1 7 ns/op\nPASS\n" +
			"pkg: m/messages\nBenchmarkAppend-2 1 6 ns/op\npkg: m/groups\nBenchmarkAdded-2 1 6 ns/op\nPASS\n",
	} {
		require.NoError(t, os.WriteFile(filepath.Join(dir, name), []byte(text), 0o600))
	}
	script, err := filepath.Abs("common.awk")
	require.NoError(t, err)
	cmd := exec.CommandContext(t.Context(), "awk", "-f", script, "old", "new", "old", "new")
	cmd.Dir = dir
	out, err := cmd.CombinedOutput()
	require.NoError(t, err, "%s", out)
	for name, want := range map[string]string{
		"old": "goos: linux\npkg: m/ledger\nBenchmarkAdmit-2 1 9 ns/op\npkg: m/ledger\nBenchmarkAppend-2 1 9 ns/op\npkg: m/messages\nBenchmarkAppend-2 1 8 ns/op\n",
		"new": "goos: linux\npkg: m/ledger\nBenchmarkAdmit-2 1 7 ns/op\npkg: m/ledger\nBenchmarkAppend-2 1 7 ns/op\npkg: m/messages\nBenchmarkAppend-2 1 6 ns/op\n",
	} {
		got, err := os.ReadFile(filepath.Join(dir, name+".common"))
		require.NoError(t, err)
		require.Equal(t, want, string(got), name)
	}
}
