package main

import (
	"encoding/xml"
	"errors"
	"io"
	"math"
	"os"
	"path/filepath"
	"strings"
	"testing"

	"github.com/stretchr/testify/require"

	"github.com/bulkaction/bulkaction/bench"
)

// wellFormed parses an SVG picture to its end and returns the number of elements of each kind.
func wellFormed(t *testing.T, svg string) map[string]int {
	t.Helper()
	count, d := map[string]int{}, xml.NewDecoder(strings.NewReader(svg))
	for {
		token, err := d.Token()
		if errors.Is(err, io.EOF) {
			return count
		}
		require.NoError(t, err)
		if e, ok := token.(xml.StartElement); ok {
			count[e.Name.Local]++
		}
	}
}

func TestChartsAreWellFormedAndDrawEveryValue(t *testing.T) {
	bars := chart{title: `a < "b" & c`, labels: []string{"x", "y"}, series: []series{{"s", []float64{1, math.NaN()}}, {"t", []float64{2, 3}}}, goals: []goal{{"g", 4}}, format: "%.1f"}
	count := wellFormed(t, bars.svg())
	require.Equal(t, 1+3+2, count["rect"], "one rectangle for the background, three for bars, two for the legend")
	require.Contains(t, bars.svg(), "a &lt; &#34;b&#34; &amp; c")
	require.NotContains(t, bars.svg(), "NaN")

	lines := chart{lines: true, series: []series{{"s", []float64{1, 2, 3}}, {"t", []float64{0, 0, 0}}}}
	require.Equal(t, 2, wellFormed(t, lines.svg())["path"])
	wellFormed(t, chart{lines: true, series: []series{{"s", []float64{0}}}}.svg())
}

func TestRoundStep(t *testing.T) {
	for x, want := range map[float64]float64{0.7: 1, 1: 1, 1.3: 2, 3: 5, 6: 10, 0.03: 0.05, 0: 1} {
		require.InDelta(t, want, roundStep(x), 1e-12, "%v", x)
	}
	require.Equal(t, "0.25", formatNumber(0.25))
	require.Equal(t, "100", formatNumber(100))
}

func TestRunDrawsThePartsThatWereMeasured(t *testing.T) {
	dir := t.TempDir()
	require.NoError(t, run(dir), "an empty folder")
	write := func(name, content string) {
		require.NoError(t, os.WriteFile(filepath.Join(dir, name), []byte(content), 0o600))
	}
	write("limits.json", `{"rps":1000,"runs":[{"limiter":"fixed","window_ms":1000,"partitions":1,"limit_used_ratio":1},{"limiter":"fixed","window_ms":1000,"partitions":4,"limit_used_ratio":0.5}],
		"elastic":[{"partitions":4,"per_window":[{"busy":1,"others":2},{"busy":3,"others":4}]}]}`)
	write("fairness.json", `{"small_ratio":1.5,"noisy_jobs":10,"small_seconds":[1,2],"small_solo_seconds":[1],"weight_shares":[0.1,0.3,0.6],"lane_shares":[0.6,0.3,0.1],"overrides":{}}`)
	write("congestion.json", `{"jobs":15000,"rps":30,"per_second":[{"second":0,"permits":30,"starts":10}],"makespan_ratio":1.01}`)
	require.NoError(t, run(dir))
	for _, name := range []string{"limits", "elastic-4", "noisy", "shares", "congestion", "congestion-rate"} {
		b, err := os.ReadFile(filepath.Join(dir, name+".svg"))
		require.NoError(t, err)
		wellFormed(t, string(b))
	}
	_, err := os.Stat(filepath.Join(dir, "admit-cost.svg"))
	require.ErrorIs(t, err, os.ErrNotExist, "a part that did not run has no picture")
	write("limits.json", `{`)
	require.ErrorContains(t, run(dir), "limits.json")
}

func TestTableMarksGoalsThatWereNotReached(t *testing.T) {
	var r results
	require.Empty(t, r.figures(), "without measurements there are no figures")
	r.congestion = bench.Congestion{Jobs: 15000, Tenants: 3, RPS: 30, MakespanSeconds: 510, MakespanRatio: 1.02, ThrottlesPerJob: 0.2, Windows: 511}
	r.limits = bench.Limits{
		Runs:    []bench.LimitRun{{Limiter: "sliding", LimitUsedRatio: 0.96}, {Limiter: "sliding", LimitUsedRatio: 0.94, Windows: 10, WindowsOverLimit: 1}},
		Elastic: []bench.Elastic{{Partitions: 4, BusyShareOfLimit: 0.96, ReturnWindows: 2}},
	}
	require.Equal(t, []bool{true, false, true, false, false, true, false}, reached(r.figures()))

	text, ok := insertTable("a\n"+figuresBegin+"old\n"+tableEnd+"z\n", figuresBegin, bench.Markdown(r.figures()[:2]))
	require.True(t, ok)
	require.Equal(t, "a\n"+figuresBegin+"| experiment | goal | measured | reached |\n|---|---|---|---|\n"+
		"| congestion, 15000 jobs of 3 tenants, 30/s: makespan | ≤ 1.03 × ideal | 510.00 s, 1.020 × | yes |\n"+
		"| congestion, 15000 jobs of 3 tenants, 30/s: throttles a job | ≤ 0.1 | 0.2000 | **no** |\n"+tableEnd+"z\n", text)
	_, ok = insertTable("no table here\n", figuresBegin, "")
	require.False(t, ok)
}

func reached(figures []bench.Figure) []bool {
	var out []bool
	for _, f := range figures {
		out = append(out, f.Reached)
	}
	return out
}
