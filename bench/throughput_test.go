package bench_test

import (
	"os"
	"path/filepath"
	"testing"

	"github.com/stretchr/testify/require"

	"github.com/bulkaction/bulkaction/bench"
	"github.com/bulkaction/bulkaction/internal/testkit/redistest"
)

func smallThroughput(t *testing.T) bench.ThroughputOptions {
	return bench.ThroughputOptions{Options: options(t, ""), Jobs: 600, Tenants: 3, Batch: 50, Payload: 100}
}

func TestThroughputMeasuresTheCostOfAJob(t *testing.T) {
	o := smallThroughput(t)
	o.Jobs, o.Ceiling, o.Groups = 20_000, true, 2 // many jobs: processes' CPU time comes in ticks of 10 ms
	o.Replicas = map[string]int{"worker": 2}
	r, err := bench.RunThroughput(t.Context(), o)
	require.NoError(t, err)
	require.Positive(t, r.JobsPerSecond)
	require.InEpsilon(t, float64(o.Jobs)/r.ElapsedSeconds, r.JobsPerSecond, 0.01)
	require.Positive(t, r.RedisCPUPerJob)
	require.Positive(t, r.ProcessCPUPerJob)
	require.Positive(t, r.CommandsPerJob)
	require.InDelta(t, 150, r.BytesPerQueuedJob, 50, "the payload and up to 100 bytes")
	require.GreaterOrEqual(t, r.P99MS, r.P50MS)
	require.Len(t, r.ProcessCPUByRole, 7)
	require.Len(t, r.PeakMBByRole, 8)
	require.Positive(t, r.CeilingRatio)
	require.Positive(t, r.RedisCeilingRatio)
	require.Positive(t, r.Ceiling.RedisCPUPerJob)
	require.Equal(t, "0", r.Overrides["BULKACTION_BACKPRESSURE_GLOBAL_RPS"])
}

// TestThroughputOfVariants measures one run that has tenant limits, retries, traces, a backlog, an
// append-only file and CPU profiles all together.
func TestThroughputOfVariants(t *testing.T) {
	o := smallThroughput(t)
	o.Brief, o.Limits, o.FailPercent, o.Sampling, o.AOF, o.Profile = true, true, 10, 0.5, true, t.TempDir()
	o.Backlog = 500
	r, err := bench.RunThroughput(t.Context(), o)
	require.NoError(t, err)
	require.Positive(t, r.TraceBytes)
	require.Zero(t, r.BytesPerQueuedJob)
	require.Equal(t, "1ms", r.Overrides["BULKACTION_BACKPRESSURE_DEFAULT_BACKOFF"])
	for _, name := range []string{"worker-0.pprof", "ingest-0.pprof", "commandstats.txt"} {
		info, err := os.Stat(filepath.Join(o.Profile, name))
		require.NoError(t, err)
		require.Positive(t, info.Size(), name)
	}
}

func TestThroughputOnACluster(t *testing.T) {
	o := smallThroughput(t)
	o.Brief, o.Masters, o.Partitions, o.Tenants, o.Batch = true, 3, 16, 40, 1
	r, err := bench.RunThroughput(t.Context(), o)
	require.NoError(t, err)
	require.Len(t, r.MasterCommands, 3)
	sum := 0.0
	for _, share := range r.MasterCommands {
		require.Positive(t, share)
		sum += share
	}
	require.InDelta(t, 1, sum, 0.001)
}

func TestThroughputAndCeilingLeaveNothingOnASharedRedis(t *testing.T) {
	server := redistest.Server(t)
	c := server.Client()
	require.NoError(t, c.Set(t.Context(), "bulk-action:partitions", "7", 0).Err(), "the key of another installation, whose number of partitions differs")
	o := smallThroughput(t)
	o.RedisURL, o.Brief = server.URL(), true
	_, err := bench.RunThroughput(t.Context(), o)
	require.NoError(t, err)
	ceiling, err := bench.RunCeiling(t.Context(), bench.CeilingOptions{Options: bench.Options{RedisURL: server.URL()}, Jobs: 1050, Payload: 10})
	require.NoError(t, err)
	require.Positive(t, ceiling.JobsPerSecond)
	require.Equal(t, []string{"bulk-action:partitions"}, c.Keys(t.Context(), "*").Val())
}

func TestLatencyOfSingleJobs(t *testing.T) {
	r, err := bench.RunLatency(t.Context(), bench.LatencyOptions{Options: options(t, ""), Rate: 50, Seconds: 1})
	require.NoError(t, err)
	require.Equal(t, 50, r.Jobs)
	require.Positive(t, r.P50MS)
	require.GreaterOrEqual(t, r.P99MS, r.P50MS)
	require.GreaterOrEqual(t, r.MaxMS, r.P99MS)
	require.Positive(t, r.PublishedStarted.P50MS)
	require.Greater(t, r.PublishedFinished.P50MS, r.PublishedStarted.P50MS)
}

func TestBigGroupReturnsAllResults(t *testing.T) {
	r, err := bench.RunBigGroup(t.Context(), bench.BigGroupOptions{Options: options(t, ""), Jobs: 6000, Payload: 100})
	require.NoError(t, err)
	require.Equal(t, 6000, r.Results)
	require.Zero(t, r.MissingResults)
	require.Positive(t, r.PeakMB)
	require.Positive(t, r.JobsPerSecond)
	require.Positive(t, r.UploadSeconds)
}
