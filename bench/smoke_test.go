package main

import (
	"context"
	"encoding/json"
	"flag"
	"fmt"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"

	"github.com/stretchr/testify/require"

	"github.com/bulkaction/bulkaction/internal/testkit/redistest"
)

// TestMain lets the test binary also run as a process that calls guards, or as a worker, and builds the product once
// for all tests, unless BULKACTION_BENCH_BIN names it.
func TestMain(m *testing.M) {
	ctx := context.Background()
	if len(os.Args) == 2 && (os.Args[1] == guardLoadCommand || os.Args[1] == batchWorkerCommand) {
		os.Exit(runMain(ctx, os.Args[1:], os.Stdin, os.Stdout, os.Stderr))
	}
	flag.Parse()
	code := 0
	if err := attempt("build the product", func() {
		if os.Getenv("BULKACTION_BENCH_BIN") == "" && !testing.Short() {
			folder := must(os.MkdirTemp("", "bulkaction-bench-"))
			defer os.RemoveAll(folder) //nolint:errcheck // a temporary folder
			check(buildProduct(ctx, filepath.Join(folder, "head")))
			check(os.Setenv("BULKACTION_BENCH_BIN", filepath.Join(folder, "head")))
		}
		code = m.Run()
	}); err != nil {
		panic(err)
	}
	os.Exit(code)
}

// bench runs a command line and returns the JSON that it prints.
func bench(t *testing.T, line string) map[string]any {
	t.Helper()
	if testing.Short() {
		t.Skip("starts processes")
	}
	var out, says strings.Builder
	args := append(strings.Fields(line), "--json")
	require.Zero(t, runMain(t.Context(), args, nil, &out, &says), says.String())
	var got map[string]any
	require.NoError(t, json.Unmarshal([]byte(out.String()), &got))
	return got
}

// requireRows requires that each row of the tables of goals about a benchmark names a figure of its
// result. without are parts of the paths of figures that the run did not measure.
func requireRows(t *testing.T, document, name string, result map[string]any, without ...string) {
	t.Helper()
	text, err := os.ReadFile(filepath.Join("../docs", document))
	require.NoError(t, err)
	rows := 0
	for _, row := range goalRow.FindAllStringSubmatch(string(text), -1) {
		if row[1] != name || slices.ContainsFunc(without, func(s string) bool { return strings.Contains(row[2], s) }) {
			continue
		}
		rows++
		require.NotEmpty(t, lookUp(result, strings.Split(row[2], ".")), "there is no figure %s", row[2])
	}
	require.Positive(t, rows)
}

func requireFields(t *testing.T, got map[string]any, names ...string) {
	t.Helper()
	for _, name := range names {
		require.Contains(t, got, name)
	}
}

func TestThroughput(t *testing.T) {
	got := bench(t, "throughput --jobs 3000 --tenants 5 --replicas fetcher=2 --fail-percent 1 --limits --ceiling --sampling 0.1")
	requireFields(t, got, "jobs", "jobs_per_second", "redis_cpu_us_per_job", "process_cpu_us_per_job",
		"redis_bytes_per_queued_job", "p50_ms", "p99_ms", "overrides")
	for _, name := range []string{"jobs_per_second", "redis_bytes_per_queued_job", "trace_bytes", "ceiling_ratio"} {
		require.Positive(t, got[name], name)
	}
}

func TestPerformance(t *testing.T) {
	got := bench(t, "performance --quick --only retries,latency,big")
	requireRows(t, "performance.md", "performance", got, "base", "aof", "limits", "tracing", "singles")
	require.Zero(t, got["big"].(map[string]any)["missing_results"])
}

func TestLatencyOnASharedRedisLeavesNothing(t *testing.T) {
	if testing.Short() {
		t.Skip("starts processes")
	}
	server := redistest.Server(t)
	c := server.Client()
	require.NoError(t, c.Set(t.Context(), "bulk-action:partitions", "7", 0).Err(), "a key of another installation")
	got := bench(t, "latency --seconds 1 --redis-url "+server.URL())
	require.Positive(t, got["p50_ms"])
	requireFields(t, got, "p99_ms", "max_ms")
	require.Equal(t, []string{"bulk-action:partitions"}, c.Keys(t.Context(), "*").Val())
}

// TestCompare compares the product with itself, in some variants. A run fails if its groups do not
// show what the variant asks for.
func TestCompare(t *testing.T) {
	if testing.Short() {
		t.Skip("starts processes")
	}
	older := filepath.Join(t.TempDir(), "older")
	require.NoError(t, os.Symlink(os.Getenv("BULKACTION_BENCH_BIN"), older))
	got := bench(t, "compare "+older+" --only aggregates,traced,http,single,small --rounds 1 --jobs 2000 --http-jobs 200 --groups 200 --lone 3 --expire --seconds 1")
	require.Equal(t, "older", got["base"])
	require.Len(t, got["variants"], 5)
	for _, v := range got["variants"].([]any) {
		for _, f := range v.(map[string]any)["figures"].([]any) {
			requireFields(t, f.(map[string]any), "name", "base", "head", "ratio", "base_runs", "head_runs")
		}
	}
}

func TestCeiling(t *testing.T) {
	got := bench(t, "ceiling --jobs 1000 --groups 100")
	require.Positive(t, got["jobs_per_second"])
	require.Len(t, got["groups"], 2)
	for i, speed := range lookUp(got, []string{"groups", "groups_per_second"}) {
		require.Positive(t, speed, i)
	}
}

func TestCongestion(t *testing.T) {
	got := bench(t, "congestion --jobs 700 --rps 200 --set WORKER_COUNT=5")
	requireRows(t, "flow-control.md", "congestion", got)
	requireFields(t, got, "ideal_seconds", "makespan_seconds", "limit_used_ratio")
	require.EqualValues(t, 700, got["permits"], "one permit for each job")
	require.Zero(t, got["windows_over_limit"])
	require.Equal(t, map[string]any{
		"BULKACTION_API_ADDR": "127.0.0.1:0", "BULKACTION_LOG_LEVEL": "warn", "BULKACTION_WORKER_TYPES": "NOOP",
		"BULKACTION_BACKPRESSURE_GLOBAL_RPS": "200", "BULKACTION_WORKER_COUNT": "5",
	}, got["overrides"])
}

func TestLimits(t *testing.T) {
	got := bench(t, "limits --limiter token --window 100ms --partitions 4 --seconds 1 --changes 2")
	requireRows(t, "flow-control.md", "limits", got, "limiter=fixed", "limiter=sliding", "partitions=1")
	require.Zero(t, lookUp(got, []string{"runs", "windows_over_limit"})[0])
}

func TestFairness(t *testing.T) {
	got := bench(t, "fairness --noisy-jobs 3000 --only noisy,weights,idle")
	requireRows(t, "flow-control.md", "fairness", got, "long", "behind", "admit_cost", "retry", "lane")
	requireFields(t, got, "small_p99_seconds", "small_solo_p99_seconds", "small_ratio", "throughput_ratio", "weight_error")
}

// TestBatch also checks what does not depend on the speed of the machine.
func TestBatch(t *testing.T) {
	got := bench(t, "batch --jobs 5000 --singles 20 --set WORKER_COUNT=2")
	require.Greater(t, lookUp(got, []string{"a", "items_per_call"})[0], 50.0)
	require.Zero(t, lookUp(got, []string{"b", "without_effect"})[0])
	require.Positive(t, lookUp(got, []string{"b", "suspects"})[0])
	require.Positive(t, lookUp(got, []string{"c", "ratio"})[0])
	require.Positive(t, lookUp(got, []string{"d", "ratio"})[0])
	require.EqualValues(t, 1, lookUp(got, []string{"e", "failed"})[0])
}

func TestGuards(t *testing.T) {
	got := bench(t, "guards --quick --rounds 1 --seconds 0.1")
	requireRows(t, "performance.md", "guards", got)
	require.Zero(t, got["overdraws"])
	require.Positive(t, got["allowed_under_faults"])
}

// TestRoom lets users wait at two brokers and kills one of these. The benchmark checks each frame
// and each token.
func TestRoom(t *testing.T) {
	got := bench(t, "room --users 300")
	requireRows(t, "performance.md", "room", got)
	require.Empty(t, got["violations"])
	require.EqualValues(t, 300, got["streams"])
}

func TestConsole(t *testing.T) {
	requireRows(t, "performance.md", "console", bench(t, "console --groups 100 --jobs 3000 --few-viewers 3 --many-viewers 5 --view-seconds 1 --rounds 1"))
}

func TestPeers(t *testing.T) {
	got := bench(t, "peers --jobs 300 --groups 100 --rounds 1 --latency-jobs 5")
	for _, name := range []string{nameOurs, peers[0].name, peers[1].name} {
		require.Positive(t, lookUp(got, []string{"medians", name, "jobs_per_second"})[0], name)
	}
	for _, name := range []string{"tuned_p50_ms", "groups_of_1_jobs_per_second", "groups_of_5_jobs_per_second"} {
		require.Positive(t, lookUp(got, []string{"ratios", nameAsynq, name})[0], name)
	}
}

func TestPlotsFillTheDocuments(t *testing.T) {
	docs := t.TempDir()
	require.NoError(t, os.Mkdir(filepath.Join(docs, "plots"), 0o755))
	require.NoError(t, os.WriteFile(filepath.Join(docs, "plots/limits.json"),
		[]byte(`{"rps":1000,"elastic":[{"partitions":4,"per_window":[{"busy":1,"others":2},{"busy":3,"others":4}]}]}`), 0o600))
	row := "| `limits.rps` | what | ≥ 5 | %s |\n"
	require.NoError(t, os.WriteFile(filepath.Join(docs, "a.md"), fmt.Appendf(nil, row, "? | ?"), 0o600))
	require.Zero(t, runMain(t.Context(), []string{"plots", "--docs", docs}, nil, os.Stdout, os.Stderr))
	filled, err := os.ReadFile(filepath.Join(docs, "a.md"))
	require.NoError(t, err)
	require.Equal(t, fmt.Sprintf(row, "1000 | yes"), string(filled))
	picture, err := os.ReadFile(filepath.Join(docs, "plots/elastic-4.svg"))
	require.NoError(t, err)
	wellFormed(t, string(picture))
}

func TestWrongUsage(t *testing.T) {
	for line, want := range map[string]string{
		"":                                    "usage: go run . WHAT",
		"fly":                                 "usage: go run . WHAT",
		"throughput --jobs 0":                 "--jobs 0: must be at least 1",
		"throughput --sampling 2":             "--sampling 2: must be from 0 to 1",
		"throughput --replicas cook=2":        "the roles are aggregator",
		"throughput 7":                        `takes no argument "7"`,
		"throughput --aof --redis-url x":      "--aof is for a private Redis",
		"limits --limiter bucket":             "must be among fixed,sliding,token",
		"limits --window 10500us":             "must be whole milliseconds",
		"fairness --only noisy,quiet":         "must be among noisy,long,weights",
		"congestion --set WORKER_COUNT":       "write it as NAME=VALUE",
		"congestion --set WORKER_COUNTS=4":    "there is no setting BULKACTION_WORKER_COUNTS",
		"limits --set BACKPRESSURE_LIMITER=a": "the benchmark sets this itself",
		"guards --set WORKER_COUNT=4":         "guards starts no roles",
		"compare nowhere":                     "find the other program",
	} {
		t.Run(line, func(t *testing.T) {
			var out, says strings.Builder
			t.Setenv("BULKACTION_BENCH_BIN", "unused")
			require.Equal(t, 2, runMain(t.Context(), strings.Fields(line), nil, &out, &says), says.String())
			require.Contains(t, says.String(), want)
			require.Empty(t, out.String())
		})
	}
}

func TestTextHasTheNamesOfTheJSON(t *testing.T) {
	var out strings.Builder
	require.NoError(t, show(&out, values{"a": values{"b": 1.5}, "list": []int{7}, "overrides": values{"x": 1}}, false))
	require.Equal(t, "a.b      1.5\nlist.0   7\n", out.String())
	compared := Comparison{Base: "c2a01d7", Head: "head", Variants: []ComparedVariant{{Name: "retries", Figures: []ComparedFigure{
		{Name: "p50_ms", Base: 1.6, Head: 1.68, Ratio: 1.05, BaseRuns: []float64{1.6, 2}, HeadRuns: []float64{1.44, 2.4}},
	}}}}
	out.Reset()
	require.NoError(t, show(&out, compared, false))
	require.Regexp(t, `(?m)^retries +p50_ms +1\.60 +1\.68 +1\.050 +0\.900 to 1\.200$`, out.String())
}

func TestOperationsBenchmark(t *testing.T) {
	got := bench(t, "operations --groups 300 --kills 1")
	require.EqualValues(t, 300, got["matched"])
	require.EqualValues(t, 300, got["changed"])
	require.EqualValues(t, 300, got["in_round_2"])
	require.Equal(t, true, got["audit_ok"])
}
