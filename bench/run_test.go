package bench_test

import (
	"context"
	"os"
	"slices"
	"testing"

	"github.com/stretchr/testify/require"

	"github.com/bulkaction/bulkaction/bench"
	"github.com/bulkaction/bulkaction/bench/roomload"
	"github.com/bulkaction/bulkaction/internal/cli"
	"github.com/bulkaction/bulkaction/internal/testkit/redistest"
)

// TestMain lets the test binary also run as a role or as a process that generates load, as the
// program bulkaction does: the benchmarks start their own binary for both.
func TestMain(m *testing.M) {
	own := []string{"role", bench.GuardLoadCommand, roomload.Command}
	if len(os.Args) > 1 && slices.Contains(own, os.Args[1]) {
		os.Exit(cli.Main(context.Background(), os.Args[1:], cli.Std()))
	}
	os.Exit(m.Run())
}

func options(t *testing.T, redisURL string) bench.Options {
	if testing.Short() {
		t.Skip("starts processes")
	}
	return bench.Options{Role: []string{os.Args[0], "role"}, RedisURL: redisURL}
}

func TestCongestionIsComputedFromTheJournals(t *testing.T) {
	var told []string
	o := bench.CongestionOptions{Options: options(t, ""), Jobs: 700, Tenants: 3, RPS: 200}
	o.Env = []string{"BULKACTION_WORKER_COUNT=5"}
	o.Progress = func(part string, done, total int64) {
		if total > 0 && done == total {
			told = append(told, part)
		}
	}
	r, err := bench.RunCongestion(t.Context(), o)
	require.NoError(t, err)
	require.EqualValues(t, 700, r.Permits, "one permit for each job")
	require.Zero(t, r.WindowsOverLimit)
	require.GreaterOrEqual(t, r.Windows, 4)
	require.Positive(t, r.MakespanSeconds)
	require.InDelta(t, 3.5, r.IdealSeconds, 1e-9)
	var permits, starts int64
	for _, s := range r.PerSecond {
		permits, starts = permits+s.Permits, starts+s.Starts
	}
	require.EqualValues(t, 700, permits)
	require.EqualValues(t, 700, starts)
	require.Equal(t, map[string]string{
		"BULKACTION_API_ADDR": "127.0.0.1:0", "BULKACTION_LOG_LEVEL": "warn", "BULKACTION_WORKER_TYPES": "NOOP",
		"BULKACTION_BACKPRESSURE_GLOBAL_RPS": "200", "BULKACTION_WORKER_COUNT": "5",
	}, r.Overrides)
	require.NotEmpty(t, told, "the last progress must show all jobs")
}

// TestExperimentLeavesNothingOnASharedRedis: after the part idle of the fairness benchmark, the
// only key in Redis is the one of another installation, which was there before.
func TestExperimentLeavesNothingOnASharedRedis(t *testing.T) {
	server := redistest.Server(t)
	o := options(t, server.URL())
	c := server.Client()
	require.NoError(t, c.Set(t.Context(), "bulk-action:partitions", "7", 0).Err(), "the key of another installation, whose number of partitions differs")

	r, err := bench.RunFairness(t.Context(), bench.FairnessOptions{Options: o, Only: []string{"idle"}})
	require.NoError(t, err)
	require.Positive(t, r.IdleCommands)
	require.Len(t, r.IdleByRole, 6)
	require.Equal(t, []string{"bulk-action:partitions"}, c.Keys(t.Context(), "*").Val())
}

func TestFleetThatCannotStartReturnsTheReason(t *testing.T) {
	o := bench.CongestionOptions{Options: options(t, ""), Jobs: 10, Tenants: 1, RPS: 10}
	o.Env = []string{"BULKACTION_WORKER_COUNT=0"}
	_, err := bench.RunCongestion(t.Context(), o)
	require.ErrorContains(t, err, "WORKER_COUNT")
}
