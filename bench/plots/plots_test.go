package main

import (
	"encoding/json"
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

// wellFormed requires that an SVG picture is well-formed XML, and returns the number of its
// elements of each kind.
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

func TestTablesMarkGoalsThatWereNotReached(t *testing.T) {
	var congestion, limits any
	require.NoError(t, json.Unmarshal([]byte(`{"makespan_ratio":1.02,"throttles_per_job":0.2}`), &congestion))
	require.NoError(t, json.Unmarshal([]byte(`{"runs":[{"limiter":"sliding","limit_used_ratio":0.96},{"limiter":"sliding","limit_used_ratio":0.94,"windows_over_limit":1},
		{"limiter":"fixed","limit_used_ratio":1,"windows_over_limit":0}],"elastic":[{"partitions":4,"return_windows":2}]}`), &limits))
	row := func(figure, goal, rest string) string {
		return "| `" + figure + "` | what | " + goal + " | " + rest + " |\n"
	}
	got := fillTables("a\n"+
		row("congestion.makespan_ratio", "≤ 1.03 × ideal", "? | ?")+
		row("congestion.throttles_per_job", "≤ 0.1", "0 | yes")+
		row("congestion.missing", "≤ 0.1", "old | kept")+
		row("fairness.small_ratio", "≤ 2", "old | kept")+
		row("limits.runs.windows_over_limit", "= 0", "? | ?")+
		row("limits.runs.limiter=sliding.limit_used_ratio", "≥ 0.95", "? | ?")+
		row("limits.runs.limiter=fixed.limit_used_ratio", "≥ 0.95", "? | ?")+
		row("limits.elastic.partitions=4.return_windows", "< 1,000 windows", "? | ?")+
		"| `x` | other table |\nz\n", map[string]any{"congestion": congestion, "limits": limits})
	require.Equal(t, "a\n"+
		row("congestion.makespan_ratio", "≤ 1.03 × ideal", "1.02 | yes")+
		row("congestion.throttles_per_job", "≤ 0.1", "0.2 | **no**")+
		row("congestion.missing", "≤ 0.1", "old | kept")+
		row("fairness.small_ratio", "≤ 2", "old | kept")+
		row("limits.runs.windows_over_limit", "= 0", "1 | **no**")+
		row("limits.runs.limiter=sliding.limit_used_ratio", "≥ 0.95", "0.94 | **no**")+
		row("limits.runs.limiter=fixed.limit_used_ratio", "≥ 0.95", "1 | yes")+
		row("limits.elastic.partitions=4.return_windows", "< 1,000 windows", "2 | yes")+
		"| `x` | other table |\nz\n", got)
}

// TestTheDocumentsNameFiguresThatExist: each row of the tables of goals, 22 in flow-control.md and
// 72 in performance.md, names a figure of the benchmarks' results.
func TestTheDocumentsNameFiguresThatExist(t *testing.T) {
	document := func(result any) any {
		b, err := json.Marshal(result)
		require.NoError(t, err)
		var out any
		require.NoError(t, json.Unmarshal(b, &out))
		return out
	}
	var runs []bench.LimitRun
	for _, limiter := range bench.Limiters {
		runs = append(runs, bench.LimitRun{Limiter: limiter})
	}
	variants := map[string]bench.MeasuredVariant{}
	for _, part := range bench.PerformanceParts() {
		variants[part] = bench.MeasuredVariant{}
	}
	results := map[string]any{
		"congestion": document(bench.Congestion{}),
		"limits":     document(bench.Limits{Runs: runs, Elastic: []bench.Elastic{{Partitions: 1}, {Partitions: 4}}}),
		"fairness": document(bench.Fairness{
			NoisyNeighbour: &bench.NoisyNeighbour{}, NoisyLongJobs: &bench.NoisyLongJobs{}, Weights: &bench.Weights{}, Lanes: &bench.Lanes{},
			BehindHugeGroup: &bench.BehindHugeGroup{}, AdmitCost: &bench.AdmitCost{}, Idle: &bench.Idle{}, RetryAfter: &bench.RetryAfter{},
		}),
		"guards": document(bench.Guards{
			GuardTakes: &bench.GuardTakes{}, GuardPairs: &bench.GuardPairs{}, GuardLocks: &bench.GuardLocks{},
			GuardHandovers: &bench.GuardHandovers{}, GuardWaiting: &bench.GuardWaiting{}, GuardCosts: &bench.GuardCosts{},
			GuardLimits: &bench.GuardLimits{}, GuardOrder: &bench.GuardOrder{}, GuardProbes: &bench.GuardProbes{}, GuardMemory: &bench.GuardMemory{},
			GuardPipeline: &bench.GuardPipeline{}, GuardPush: &bench.GuardPush{},
		}),
		"room": document(bench.Room{
			RoomStreams: &bench.RoomStreams{}, RoomEnter: &bench.RoomEnter{}, RoomPromotion: &bench.RoomPromotion{}, RoomUse: &bench.RoomUse{},
			RoomReturns: &bench.RoomReturns{}, RoomMemory: &bench.RoomMemory{},
			Scripts: bench.RoomScripts{
				RoomStreamCosts: &bench.RoomStreamCosts{}, RoomEnterCosts: &bench.RoomEnterCosts{}, RoomPromotionCosts: &bench.RoomPromotionCosts{},
				RoomEmpty: &bench.RoomEmpty{}, RoomKill: &bench.RoomKill{}, RoomEvents: &bench.RoomEvents{}, RoomAbandon: &bench.RoomAbandon{},
				RoomBatches: &bench.RoomBatches{},
			},
		}),
		"console": document(bench.Console{
			Lists: &bench.ConsoleLists{Pages: []bench.ConsolePage{{}}}, Group: &bench.ConsoleGroup{}, Viewers: &bench.ConsoleViewers{},
			Throughput: &bench.ConsoleThroughput{},
		}),
		"performance": document(bench.Performance{
			Base: &bench.Throughput{CeilingRatio: 1, RedisCeilingRatio: 1}, Variants: variants, Latency: &bench.Latency{}, Big: &bench.BigGroup{},
		}),
	}
	for file, want := range map[string]int{"flow-control.md": 22, "performance.md": 72} {
		b, err := os.ReadFile(filepath.Join("../../docs", file))
		require.NoError(t, err)
		rows := goalRow.FindAllStringSubmatch(string(b), -1)
		require.Len(t, rows, want, file)
		for _, m := range rows {
			require.NotEmpty(t, lookUp(results[m[1]], strings.Split(m[2], ".")), "%s: there is no figure %s.%s", file, m[1], m[2])
		}
	}
}
