package cli

import (
	"context"
	"encoding/json"
	"io/fs"
	"os"
	"path/filepath"
	"strings"
	"testing"

	"github.com/stretchr/testify/require"

	"github.com/bulkaction/bulkaction/bench"
	"github.com/bulkaction/bulkaction/internal/jobs/ledger"
	"github.com/bulkaction/bulkaction/internal/process/app"
	"github.com/bulkaction/bulkaction/internal/process/journal"
	"github.com/bulkaction/bulkaction/internal/process/roles"
)

func TestBenchRefusesWrongFlagsBeforeItStartsAnything(t *testing.T) {
	for _, tt := range []struct{ args, says string }{
		{"bench congestion --jobs 0", "--jobs 0: must be at least 1"},
		{"bench congestion --rps -1", "--rps -1: must be at least 1"},
		{"bench congestion --jobs 2 --tenants 3", "--tenants 3: must be at most --jobs 2"},
		{"bench limits --limiter leaky", `--limiter "leaky": must be one of fixed, sliding, token`},
		{"bench limits --window 5ms", `--window "5ms": must be whole milliseconds from 10ms to 1h`},
		{"bench limits --window 100", `--window "100": must be whole milliseconds`},
		{"bench limits --window 10500us", `--window "10500us": must be whole milliseconds`},
		{"bench limits --partitions 0", "--partitions 0: must be from 1 to 64"},
		{"bench limits --parallel 0", "--parallel at least 1"},
		{"bench fairness --only noisy,quiet", `--only "quiet": must be among noisy,long,weights,lanes,behind,cost,idle,retry-after`},
		{"bench fairness --noisy-jobs 10", "--noisy-jobs 10: must be at least 2000"},
		{"bench congestion --set WORKER_COUNT", `--set "WORKER_COUNT": write it as NAME=VALUE`},
		{"bench limits --set BULKACTION_BACKPRESSURE_LIMITER=token", "the benchmark sets this itself"},
		{"bench throughput --jobs 0", "--jobs 0: must be at least 1"},
		{"bench throughput --groups 0", "--groups 0: must be at least 1"},
		{"bench throughput --payload -1", "--payload -1: must be from 0 to 262144"},
		{"bench throughput --backlog -1", "--backlog -1: must be at least 0"},
		{"bench throughput --partitions 0", "--partitions 0: must be from 1 to 1024"},
		{"bench throughput --fail-percent 101", "--fail-percent 101: must be from 0 to 100"},
		{"bench throughput --sampling 2", "--sampling 2: must be from 0 to 1"},
		{"bench throughput --workers 0", "--replicas worker=0: must be from 1 to 64"},
		{"bench throughput --replicas cook=2", "--replicas cook=2: the roles are aggregator"},
		{"bench throughput --cluster --redis-url redis://127.0.0.1:1/0", "--aof and --cluster are for a private Redis"},
		{"bench latency --rate 0", "--rate 0: must be from 1 to 10000"},
		{"bench latency --seconds 0", "--seconds 0: must be at least 1"},
		{"bench ceiling --jobs 0", "--jobs 0"},
		{"bench big --jobs 9", "--jobs 9: must be at least 10"},
		{"bench performance --rounds 0", "--rounds 0: must be at least 1"},
		{"bench performance --only base,fast", `--only "fast": must be among base,aof,limits,retries,tracing,singles,latency,big`},
		{"bench compare", "accepts 1 arg(s), received 0"},
		{"bench compare nowhere", "find the other program: stat nowhere"},
		{"bench compare . --only base,fast", `--only "fast": must be among base,tenants,retries,aggregates,http`},
		{"bench compare . --rounds 0", "--rounds 0: must be at least 1"},
		{"bench compare . --jobs 999", "--jobs 999: must be at least 1000"},
		{"bench compare . --http-jobs 99", "--http-jobs 99: must be at least 100"},
		{"bench compare . --rate 0", "--rate 0: must be at least 1"},
		{"bench compare . --seconds 0", "--seconds 0: must be at least 1"},
		{"bench compare . --set API_ADDR=127.0.0.1:1", "the benchmark sets this itself"},
		{"bench guards --rounds 0", "--rounds 0: must be at least 1"},
		{"bench guards --seconds 0.01", "--seconds 0.01: must be from 0.1 to 60"},
		{"bench guards --only take,give", `--only "give": must be among take,pairs,lock,handover,waiting,costs,limits,order,probes,memory`},
		{"bench guards --set WORKER_COUNT=4", "--set: bench guards starts no roles"},
		{"bench throughput --set PARTITIONS=4", "the benchmark sets this itself"},
		{"bench room --users 9", "--users 9: must be at least 10"},
		{"bench room --users 20001", "--users 20001: must be at most 20000"},
		{"bench room --brokers 0", "--brokers 0: must be at least 1"},
		{"bench room --brokers 65", "--brokers 65: must be at most 64"},
		{"bench room --events 0", "--events 0: must be at least 1"},
		{"bench room --users 50 --events 51", "--events 51: must be at most 10000, and at most --users 50"},
		{"bench room --capacity 0", "--capacity 0: must be at least 1"},
		{"bench room --capacity 3001", "--capacity 3001: must be at most --users 3000"},
		{"bench room --rate 0.5", "--rate 0.5: must be from 1 to 100000"},
		{"bench room --session 1ms", "--session 1ms: must be from 10ms to 1m0s"},
		{"bench room --churn 1.5", "--churn 1.5: must be from 0 to 1"},
		{"bench room --kill 2", "--kill 2: must be less than --brokers 2"},
		{"bench room --only streams,flows", `--only "flows": must be among streams,enter,promotion,empty,kill,events,abandon,scripts`},
		{"bench room --set BROKER_IDENTITY=cookie", "the benchmark sets this itself"},
		{"bench fairness extra", `takes no argument "extra"`},
		{"bench", "bench needs a subcommand: throughput, latency, ceiling, big, performance, compare, congestion, limits, fairness, guards, room"},
		{"bench foo", `unknown command "foo"`},
		{"bench throughput --set WORKER_COUNTS=4", "--set BULKACTION_WORKER_COUNTS: there is no such setting; did you mean BULKACTION_WORKER_COUNT?"},
		{"bench congestion --set XYZZY=4", "--set BULKACTION_XYZZY: there is no such setting; docs/configuration.md"},
		{"bench limits --set WORKER_COUNT=none", `BULKACTION_WORKER_COUNT="none": must be`},
	} {
		t.Run(tt.args, func(t *testing.T) {
			var out, says strings.Builder
			code := Main(t.Context(), strings.Fields(tt.args), IO{In: strings.NewReader(""), Out: &out, Err: &says})
			require.Equal(t, exitUsage, code, says.String())
			require.Contains(t, says.String(), tt.says)
			require.Empty(t, out.String())
		})
	}
}

func TestSetPassesSettingsToTheProcesses(t *testing.T) {
	env, err := (&variables{"WORKER_COUNT=20", "BULKACTION_LEASE=5s", "FAIR_QUEUE_LANE_WEIGHTS=1,1,1"}).env()
	require.NoError(t, err)
	require.Equal(t, []string{"BULKACTION_WORKER_COUNT=20", "BULKACTION_LEASE=5s", "BULKACTION_FAIR_QUEUE_LANE_WEIGHTS=1,1,1"}, env)
}

func TestRoleWritesItsJournal(t *testing.T) {
	dir := t.TempDir()
	role := func(ctx context.Context, _ *app.Process) error {
		if h := roles.HooksOf(ctx); h.Admitted != nil {
			h.Admitted(7, 0, "T", []ledger.Permit{{Tenant: "acme", N: 3}})
			h.Promoted(8, 0, []ledger.Permit{{Tenant: "acme", N: 1}})
			h.Started(9, 0, "T", "acme", "g", 5, 1)
		}
		return nil
	}
	var log strings.Builder
	run := func(dir string) int {
		return app.Run(t.Context(), app.Options{Role: "fetcher", Environ: []string{"BULKACTION_ADMIN_ADDR=127.0.0.1:0"}, Stderr: &log}, withJournal(dir, role))
	}
	require.Equal(t, app.ExitOK, run(dir), log.String())
	got, err := journal.Read(dir)
	require.NoError(t, err)
	require.Equal(t, journal.Log{
		Permits: []journal.PermitEvent{{At: 7, By: journal.Admit, Type: "T", Tenant: "acme", N: 3}, {At: 8, By: journal.Promote, Tenant: "acme", N: 1}},
		Starts:  []journal.StartEvent{{At: 9, Type: "T", Tenant: "acme", Group: "g", Ordinal: 5, Attempt: 1}},
	}, got)

	require.Equal(t, app.ExitOK, run(""), "without a folder there is no journal")
	require.Equal(t, app.ExitError, run(filepath.Join(dir, "nowhere")))
	_, err = os.Stat(filepath.Join(dir, "nowhere"))
	require.ErrorIs(t, err, fs.ErrNotExist)
}

func TestRoleWritesItsCPUProfile(t *testing.T) {
	var log strings.Builder
	role := func(context.Context, *app.Process) error { return nil }
	run := func(name string) int {
		return app.Run(t.Context(), app.Options{Role: "worker", Environ: []string{"BULKACTION_ADMIN_ADDR=127.0.0.1:0"}, Stderr: &log}, withProfile(name, role))
	}
	name := filepath.Join(t.TempDir(), "worker.pprof")
	require.Equal(t, app.ExitOK, run(name), log.String())
	info, err := os.Stat(name)
	require.NoError(t, err)
	require.Positive(t, info.Size())
	require.Equal(t, app.ExitOK, run(""))
	require.Equal(t, app.ExitError, run(filepath.Join(name, "nowhere")))
}

func TestBenchPrintsOneObject(t *testing.T) {
	var out, says strings.Builder
	code := Main(t.Context(), strings.Fields("bench ceiling --jobs 400 --json"), IO{In: strings.NewReader(""), Out: &out, Err: &says})
	require.Equal(t, exitOK, code, says.String())
	var got bench.Ceiling
	require.NoError(t, json.Unmarshal([]byte(out.String()), &got))
	require.Positive(t, got.JobsPerSecond)
}

func TestBenchTablesShowWhatWasRun(t *testing.T) {
	show := func(result any) string {
		var out strings.Builder
		r := &Root{IO: IO{Out: &out}}
		require.NoError(t, r.showBench(result))
		return out.String()
	}
	got := show(bench.Throughput{
		Jobs: 1000, JobsPerSecond: 12345, Ceiling: &bench.Ceiling{JobsPerSecond: 24690}, CeilingRatio: 0.5, MasterCommands: []float64{0.75, 0.25}, MasterCPU: []float64{1, 2},
		ProcessCPUByRole: map[string]float64{"worker": 9.5}, PeakMBByRole: map[string]float64{"worker": 40}, Overrides: map[string]string{"A": "1"},
	})
	require.Regexp(t, `(?m)^jobs_per_second +12,345$`, got)
	require.Regexp(t, `(?m)^ceiling\.jobs_per_second +24,690$`, got)
	require.Regexp(t, `(?m)^ceiling_ratio +0\.5$`, got)
	require.Regexp(t, `(?m)^process_cpu_us_per_job_by_role\.worker +9\.5$`, got)
	require.Regexp(t, `(?m)^peak_rss_mb_by_role\.worker +40$`, got)
	require.Regexp(t, `(?m)^commands_share_by_master +\[0\.75 0\.25\]$`, got)
	require.Regexp(t, `(?m)^redis_cpu_us_per_job_by_master +\[1 2\]$`, got)
	require.NotContains(t, got, "overrides")
	require.NotContains(t, got, "trace_bytes", "it was not measured")

	got = show(bench.Performance{Big: &bench.BigGroup{Jobs: 10, Results: 9, MissingResults: 1}, Variants: map[string]bench.MeasuredVariant{"aof": {Ratio: 0.7, Ratios: []float64{0.7}}}})
	require.Regexp(t, `(?m)^big\.missing_results +1$`, got)
	require.Regexp(t, `(?m)^variants\.aof\.ratio +0\.7$`, got)
	require.NotContains(t, got, "variants.aof.run")
	require.NotContains(t, got, "latency")

	got = show(bench.Fairness{Idle: &bench.Idle{IdleCommands: 12.5}, Weights: &bench.Weights{WeightShares: []float64{0.14, 0.29, 0.57}, WeightError: 0.02}})
	require.Regexp(t, `(?m)^idle_commands_per_second +12\.5$`, got)
	require.Regexp(t, `(?m)^weight_shares +\[0\.14 0\.29 0\.57\]$`, got)
	require.Regexp(t, `(?m)^weight_error +0\.02$`, got)
	require.NotContains(t, got, "noisy")

	got = show(bench.Limits{
		Runs:    []bench.LimitRun{{Limiter: "token", WindowMS: 100, Partitions: 4, Windows: 90, WindowsOverLimit: 2, LimitUsedRatio: 0.991, Retries: 8}},
		Elastic: []bench.Elastic{{Partitions: 4, BusyShareOfLimit: 0.97, ReturnWindows: 1}},
	})
	require.Regexp(t, `(?m)^limiter +window_ms +partitions +windows +windows_over_limit +limit_used_ratio +starts_without_permit +retries$`, got)
	require.Regexp(t, `(?m)^token +100 +4 +90 +2 +0\.991 +0 +8$`, got)
	require.Regexp(t, `(?m)^partitions +busy_share_of_limit +busy_windows +return_windows +windows_over_limit +limit_used_ratio$`, got)
	require.Regexp(t, `(?m)^4 +0\.97 +0 +1 +0 +0$`, got)

	compared := bench.Comparison{Base: "c2a01d7", Head: "head", Variants: []bench.ComparedVariant{{Name: "retries", Figures: []bench.ComparedFigure{
		{Name: "p50_ms", Base: 1.6, Head: 1.68, Ratio: 1.05, BaseRuns: []float64{1.6, 2}, HeadRuns: []float64{1.44, 2.4}},
	}}}}
	require.Regexp(t, `^variant +figure +c2a01d7 +head +ratio +ratios of rounds\nretries +p50_ms +1\.60 +1\.68 +1\.050 +0\.900 to 1\.200\n$`, show(compared))
}

func TestBenchCompareWritesAFile(t *testing.T) {
	name := filepath.Join(t.TempDir(), "compare.json")
	want := bench.Comparison{Base: "a", Head: "b", Rounds: 5, Variants: []bench.ComparedVariant{{Name: "http", Jobs: 7}}}
	require.NoError(t, writeJSON(name, want))
	b, err := os.ReadFile(name)
	require.NoError(t, err)
	var got bench.Comparison
	require.NoError(t, json.Unmarshal(b, &got))
	require.Equal(t, want, got)
	require.Error(t, writeJSON(filepath.Join(name, "below"), want))
}
