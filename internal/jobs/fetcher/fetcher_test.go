package fetcher_test

import (
	"context"
	"fmt"
	"regexp"
	"strconv"
	"sync"
	"testing"
	"time"

	"github.com/redis/go-redis/v9"
	"github.com/stretchr/testify/require"
	"go.uber.org/goleak"

	"github.com/bulkaction/bulkaction/api"
	"github.com/bulkaction/bulkaction/internal/jobs/fetcher"
	"github.com/bulkaction/bulkaction/internal/jobs/ledger"
	"github.com/bulkaction/bulkaction/internal/messages"
	"github.com/bulkaction/bulkaction/internal/redisx/keyspace"
	"github.com/bulkaction/bulkaction/internal/stage/presence"
	"github.com/bulkaction/bulkaction/internal/testkit/redistest"
	"github.com/bulkaction/bulkaction/internal/testkit/stagetest"
)

func TestMain(m *testing.M) { goleak.VerifyTestMain(m, redistest.IgnoreServers()) }

// config returns a configuration whose interval is a minute: an idle fetcher pauses for a second,
// the longest wait of a loop, unless a wake token ends its wait.
func config() fetcher.Config {
	return fetcher.Config{
		Interval: time.Minute, BatchSize: 50, ReadyCap: 1000, Meter: ledger.Meter{Window: time.Second}, LaneWeights: [3]int{6, 3, 1},
	}
}

func TestWaitingJobsBecomeReady(t *testing.T) {
	stagetest.Both(t, func(w *stagetest.World) {
		w.Jobs("g", "T", 5)
		f := fetcher.New(stagetest.Process(w, "f"), config())
		require.False(w.T, f.Status().Running)
		stop := w.Run(f)
		w.AwaitCounts("g", api.Counts{Accepted: 5, Ready: 5})
		ctx := context.WithoutCancel(w.T.Context())
		require.EqualValues(w.T, 5, w.Conn.Cmd.XLen(ctx, w.P.Ready("T")).Val())

		w.Await("the count of admitted jobs", func() bool { return f.Status().Counts["total_fetched"] == 5 })
		st := f.Status()
		require.True(w.T, st.Running)
		require.EqualValues(w.T, 5, st.Counts["admitted_ready"])
		require.Zero(w.T, st.Counts["admitted_non_ready"])
		w.Await("the status to be published", func() bool {
			all, err := presence.Stages(ctx, w.Conn, w.Space)
			return err == nil && len(all) == 1 && all[0].Role == "fetcher" && all[0].Running && all[0].Counts["total_fetched"] == 5
		})
		stop()
		require.False(w.T, f.Status().Running)
		all, err := presence.Stages(ctx, w.Conn, w.Space)
		require.NoError(w.T, err)
		require.Empty(w.T, all)
	})
}

// TestReadyStreamIsFilledToItsBound: with a ReadyCap of 10, 10 of 20 jobs are admitted, and 4 more
// after a consumer has read 4. (The fair queue can't reorder jobs that are in the ready stream.)
func TestReadyStreamIsFilledToItsBound(t *testing.T) {
	stagetest.Both(t, func(w *stagetest.World) {
		w.Jobs("g", "T", 20)
		cfg := config()
		cfg.ReadyCap = 10
		f := fetcher.New(stagetest.Process(w, "f"), cfg)
		w.Run(f)
		w.AwaitCounts("g", api.Counts{Accepted: 20, Ready: 10, Waiting: 10})
		w.Await("the count of admitted jobs", func() bool { return f.Status().Counts["total_fetched"] == 10 })
		require.Zero(w.T, f.Status().Counts["total_rejected"], "a full ready stream turns no job away")

		// Once a worker has read four jobs, four more are admitted.
		ctx := context.WithoutCancel(w.T.Context())
		require.NoError(w.T, w.Conn.Cmd.XGroupCreate(ctx, w.P.Ready("T"), keyspace.GroupWorkers, "0").Err())
		require.NoError(w.T, w.Conn.Cmd.XReadGroup(ctx, &redis.XReadGroupArgs{
			Group: keyspace.GroupWorkers, Consumer: "c", Streams: []string{w.P.Ready("T"), ">"}, Count: 4, Block: -1}).Err())
		w.AwaitCounts("g", api.Counts{Accepted: 20, Ready: 14, Waiting: 6})
	})
}

// TestNewJobsWakeTheFetcher: 20 groups are submitted one after the other, each second one with a
// new type. Their jobs are admitted in less than half a second on average.
func TestNewJobsWakeTheFetcher(t *testing.T) {
	stagetest.Both(t, func(w *stagetest.World) {
		w.Run(fetcher.New(stagetest.Process(w, "f"), config()))
		began := time.Now()
		const rounds = 20
		for i := range rounds {
			group, typ := fmt.Sprint("g", i), fmt.Sprint("T", i/2)
			w.Jobs(group, typ, 3)
			w.AwaitCounts(group, api.Counts{Accepted: 3, Ready: 3})
		}
		require.Less(w.T, time.Since(began), rounds*time.Second/2) // an idle fetcher that is not woken pauses for a second
	})
}

// TestTypesWithoutWorkersTakeTurns: 70 types that no worker serves have a job each, and a served
// type has 600. Between two admissions of the served type, at most 20 of the other types have one.
// All jobs are admitted.
func TestTypesWithoutWorkersTakeTurns(t *testing.T) {
	stagetest.Both(t, func(w *stagetest.World) {
		const unserved, jobs = 70, 600
		publish := func() {
			require.NoError(w.T, presence.PublishWorker(w.T.Context(), w.Conn, w.Space, presence.WorkerReport{
				WorkerStatus: api.WorkerStatus{ID: "w", Types: []string{"SERVED"}, Workers: jobs, SeenAt: time.Now()},
			}))
		}
		publish()
		for i := range unserved {
			w.Jobs(fmt.Sprint("g", i), fmt.Sprint("T", i), 1)
		}
		w.Jobs("served", "SERVED", jobs)
		var mu sync.Mutex
		var admissions []string // the types, in order
		cfg := config()
		cfg.ReadyCap = 2 * jobs
		cfg.OnPermits = func(_ int64, _ int, typ string, _ []ledger.Permit) {
			mu.Lock()
			defer mu.Unlock()
			admissions = append(admissions, typ)
		}
		f := fetcher.New(stagetest.Process(w, "f"), cfg)
		stop := w.Run(f)
		w.Await("the admission of all jobs", func() bool {
			publish() // on a busy machine the first report may be out of date before the end
			return f.Status().Counts["admitted_ready"] == jobs+unserved
		})
		stop()
		others, turns := 0, 0
		for _, typ := range admissions {
			if others++; typ == "SERVED" {
				others, turns = 0, turns+1
			}
			require.LessOrEqual(w.T, others, 20)
		}
		require.Greater(w.T, turns, unserved/20)
	})
}

func TestIdleFetcherSendsFewCommands(t *testing.T) {
	t.Parallel()
	for name, jobs := range map[string]int{"when no job waits": 10, "when the ready stream is full": 20} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			server := redistest.Server(t)
			w := stagetest.New(t, server.URL(), "t:", 1)
			w.Jobs("g", "T", jobs)
			cfg := config()
			cfg.Interval, cfg.ReadyCap = 200*time.Millisecond, 10
			w.Run(fetcher.New(stagetest.Process(w, "f"), cfg))
			w.AwaitCounts("g", api.Counts{Accepted: int64(jobs), Ready: 10, Waiting: int64(jobs) - 10})
			before := commands(t, w)
			<-time.After(time.Second)
			require.Less(t, commands(t, w)-before, 300) // 5 steps of some commands each, one of the leader of the limits, and heartbeats; a fetcher without pauses would make 1,000 steps
		})
	}
}

var commandCalls = regexp.MustCompile(`cmdstat_[^:]+:calls=(\d+),`)

// commands returns how many commands the server has executed.
func commands(t *testing.T, w *stagetest.World) (n int) {
	t.Helper()
	info, err := w.Conn.Cmd.Info(t.Context(), "commandstats").Result()
	require.NoError(t, err)
	for _, found := range commandCalls.FindAllStringSubmatch(info, -1) {
		k, err := strconv.Atoi(found[1])
		require.NoError(t, err)
		n += k
	}
	return n
}

// TestRateLimitIsKept: of 48 jobs of three tenants, at most ten, the limit, become ready in a
// window of 100 ms. At least one job becomes a marker, and the fetcher admits the jobs behind it
// later, although no dispatcher runs.
func TestRateLimitIsKept(t *testing.T) {
	w := stagetest.Parallel(t, 1)
	for _, tenant := range []string{"a", "b", "c"} { // each tenant has three permits a window, and one permit is left
		w.Submit(messages.SubmitGroup{ID: tenant, Type: "T", Jobs: stagetest.Numbered(16)})
	}
	cfg := config()
	cfg.Meter.Window, cfg.Configured.RPS = 100*time.Millisecond, 100
	w.Limit(cfg.Meter, 100, ledger.ShareStatic)
	f := fetcher.New(stagetest.Process(w, "f"), cfg)
	w.Run(f)
	w.Await("all jobs to be admitted or rate-limited", func() bool { return f.Status().Counts["total_fetched"] == 48 })
	st, a, b, c := f.Status().Counts, w.Counts("a"), w.Counts("b"), w.Counts("c")
	require.Equal(t, st["admitted_non_ready"], a.NonReady+b.NonReady+c.NonReady)
	require.Equal(t, st["admitted_ready"], a.Ready+b.Ready+c.Ready)
	require.Positive(t, st["admitted_non_ready"])

	// The window of a job follows from the time of the script that has spent its permit.
	entries, err := w.Conn.Cmd.XRange(t.Context(), w.P.Ready("T"), "-", "+").Result()
	require.NoError(t, err)
	windows := map[int64]int{}
	for _, e := range entries {
		d, err := ledger.ParseJob(ledger.MessageBlob(e.Values))
		require.NoError(t, err)
		window := d.SinceMS / 100
		windows[window]++
		require.LessOrEqual(t, windows[window], 10)
	}
}

// TestFetcherGoesOnAfterAnOutage: a fetcher admits jobs again after a restart of Redis.
func TestFetcherGoesOnAfterAnOutage(t *testing.T) {
	t.Parallel()
	server := redistest.Server(t, redistest.AOF)
	w := stagetest.New(t, server.URL(), "t:", 1)
	w.Run(fetcher.New(stagetest.Process(w, "f"), config()))
	w.Jobs("a", "T", 1)
	w.AwaitCounts("a", api.Counts{Accepted: 1, Ready: 1})
	server.Kill()
	server.Restart()
	w.Jobs("b", "T", 1)
	w.AwaitCounts("b", api.Counts{Accepted: 1, Ready: 1})
}
