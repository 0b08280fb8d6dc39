package integration

import (
	"context"
	"fmt"
	"net/http"
	"net/http/httptest"
	"os"
	"strconv"
	"strings"
	"sync/atomic"
	"syscall"
	"testing"
	"time"

	"github.com/redis/go-redis/v9"
	"github.com/stretchr/testify/require"
	"go.uber.org/goleak"

	"github.com/bulkaction/bulkaction/api"
	"github.com/bulkaction/bulkaction/client"
	"github.com/bulkaction/bulkaction/internal/jobs/ledger"
	"github.com/bulkaction/bulkaction/internal/process/dev"
	"github.com/bulkaction/bulkaction/internal/testkit/redistest"
)

// results returns the results of a group by ordinal. It fails the test if an ordinal occurs twice.
func (s *system) results(group string) map[int64]api.Result {
	s.t.Helper()
	all := map[int64]api.Result{}
	for r, err := range s.api.Results(s.ctx(), group) {
		require.NoError(s.t, err)
		require.NotContains(s.t, all, r.Ordinal, "result twice")
		all[r.Ordinal] = r
	}
	return all
}

// TestRollingRestarts: the only process of each role is replaced under load, one role after the
// other, in ROLLING_ROUNDS rounds (default 2). Each process ends within its grace period of 15 s,
// no job is lost, and no connection is left when all have stopped.
func TestRollingRestarts(t *testing.T) {
	t.Parallel()
	rounds := 2
	if n, err := strconv.Atoi(os.Getenv("ROLLING_ROUNDS")); err == nil {
		rounds = n
	}
	const grace = 15 * time.Second
	s := start(t, apart, env("WORKER_TIMEOUT", "100ms"), env("SHUTDOWN_GRACE_PERIOD", grace.String()), env("LEASE", "5s"))
	type group struct {
		id   string
		jobs int64
	}
	var all []group
	submit := func() {
		i := len(all)
		g := group{fmt.Sprint("g-", i), int64(20 + i%60)}
		all = append(all, g)
		if i%2 == 0 {
			s.submit(client.Submission{ID: g.id, Tenant: fmt.Sprint("t", i%5), Type: "NOOP", Jobs: jobs(int(g.jobs), `{"sleep_ms":30}`), Seal: true})
			return
		}
		s.xadd(s.space.Ingest(), "type", groupSubmit, "data", fmt.Sprintf(`{"id":%q,"tenant":"t%d","type":"NOOP","total":%d}`, g.id, i%5, g.jobs))
		for range g.jobs {
			s.xadd(s.space.Ingest(), "type", jobsAppend, "data", fmt.Sprintf(`{"group":%q,"jobs":[{"payload":{"sleep_ms":30}}]}`, g.id))
		}
	}
	for range 5 {
		submit()
	}
	for range rounds {
		for _, role := range roles {
			submit()
			old := s.procs[role][len(s.procs[role])-1]
			s.add(role)
			if role == "ingest" {
				s.api = client.NewAPI(s.url(len(s.procs[role]) - 1))
			}
			submit()
			old.Signal(syscall.SIGTERM)
			require.Equal(t, 0, old.Wait(grace), "exit code of %s", role)
		}
	}
	submit()
	for _, g := range all {
		s.await("group "+g.id+" ends", func() bool { return s.group(g.id).Status.Ended() })
		require.Equal(t, api.Counts{Accepted: g.jobs, Done: g.jobs}, s.group(g.id).Counts, g.id)
		require.Len(t, s.results(g.id), int(g.jobs))
	}
	s.stopAll()
	s.await("no connection left", func() bool { return connections(t, s.rdb) == 0 })
}

// connections returns how many clients are connected to Redis, without the connections of rdb.
func connections(t testing.TB, rdb redis.UniversalClient) int {
	t.Helper()
	list, err := rdb.ClientList(t.Context()).Result()
	require.NoError(t, err)
	return strings.Count(list, "id=") - int(rdb.PoolStats().TotalConns)
}

// TestJobsOutliveTheirLeases: a job may run longer than its lease, because its worker renews the
// lease. With leases of 1 s, four jobs of 3 s run once each, and no lease is lost.
func TestJobsOutliveTheirLeases(t *testing.T) {
	t.Parallel()
	s := start(t, env("LEASE", "1s"), env("WORKER_TIMEOUT", "100ms"), env("WORKER_COUNT", "4"))
	const n = 4
	s.submit(client.Submission{ID: "long", Type: "NOOP", Jobs: jobs(n, `{"sleep_ms":3000}`), Seal: true})
	s.awaitCounts("long", "four run", func(c api.Counts) bool { return c.InFlight == 4 })
	g := s.wait("long")
	require.Equal(t, api.Counts{Accepted: n, Done: n}, g.Counts)
	for ordinal, r := range s.results("long") {
		require.Equal(t, 1, r.Attempts, "runs of job %d", ordinal)
		require.GreaterOrEqual(t, r.DurationMS, 3000.0)
	}
	require.Zero(t, s.load("NOOP").StaleOutcomes)
	require.Zero(t, s.load("NOOP").LeasesLost)
}

// load returns the counters of a type in the first partition.
func (s *system) load(typ string) api.TypeStats {
	s.t.Helper()
	loads, err := ledger.Loads(s.ctx(), s.rdb, s.space.Partition(0), []string{typ})
	require.NoError(s.t, err)
	return loads[0]
}

// TestLateOutcomesAreRefused: when a suspended worker continues, its outcomes are refused and
// counted as stale, even while another worker still runs the jobs. Only the outcomes of the later
// attempts count.
func TestLateOutcomesAreRefused(t *testing.T) {
	t.Parallel()
	const n = 3
	var requests atomic.Int32
	first, second := make(chan struct{}), make(chan struct{})
	sink := httptest.NewServer(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		attempt, answer := 1, first
		if requests.Add(1) > n {
			attempt, answer = 2, second
		}
		select {
		case <-answer:
		case <-r.Context().Done():
		}
		fmt.Fprintf(w, `{"attempt":%d}`, attempt)
	}))
	t.Cleanup(sink.Close)
	s := start(t, apart, env("LEASE", "1s"), env("WORKER_TIMEOUT", "100ms"), env("WORKER_COUNT", "20"), env("WORKER_TYPES", "HTTP"),
		env("HTTP_PROCESSOR_ALLOW_PRIVATE", "true"))
	frozen := s.proc("worker", 0)
	s.submit(client.Submission{
		ID: "g", Type: "HTTP", Jobs: jobs(n, `{"url":"`+sink.URL+`"}`), Seal: true,
		Aggregate: []client.Aggregate{{As: "runs", Op: "count"}},
	})
	s.await("all run", func() bool { return requests.Load() == n })
	frozen.Suspend()
	close(first) // the stopped worker finds the answers when it continues
	for range n {
		s.add("worker") // each runs one of the jobs alone
	}
	s.await("all run elsewhere", func() bool { return requests.Load() >= 2*n })
	frozen.Signal(syscall.SIGCONT)
	s.await("each late outcome is refused, or has counted", func() bool {
		return s.load("HTTP").StaleOutcomes >= n || s.group("g").Counts.InFlight != n
	})
	require.Equal(t, api.Counts{Accepted: n, InFlight: n}, s.group("g").Counts)
	close(second)
	g := s.wait("g")
	require.Equal(t, api.Counts{Accepted: n, Done: n}, g.Counts)
	require.JSONEq(t, fmt.Sprint(n), string(g.Aggregate["runs"]))
	results := s.results("g")
	require.Len(t, results, n)
	for ordinal, r := range results {
		require.JSONEq(t, `{"status":200,"body":{"attempt":2}}`, string(r.Data), "job %d", ordinal)
	}
}

// stage returns the status in /v1/stats of a role's only process. It fails the test if there is not
// exactly one. The role may not be worker.
func (s *system) stage(role string) api.StageStatus {
	s.t.Helper()
	st, err := s.api.Stats(s.ctx())
	require.NoError(s.t, err)
	var found []api.StageStatus
	for _, stage := range st.Stages {
		if stage.Role == role {
			found = append(found, stage)
		}
	}
	require.Len(s.t, found, 1, role)
	return found[0]
}

func TestPoolIsResizedAtRunTime(t *testing.T) {
	t.Parallel()
	s := start(t, apart, env("WORKER_COUNT", "2"), env("FETCH_BATCH_SIZE", "5"), env("BACKPRESSURE_DEFAULT_BACKOFF", "10ms"), env("CONGESTION_BASE_BACKOFF", "10ms"))
	s.submit(client.Submission{ID: "quick", Type: "NOOP", Jobs: append(jobs(9, `{}`), jobs(1, `{"fail":"retry","fail_times":1}`)...), Seal: true})
	s.wait("quick")
	s.await("fetcher and dispatcher show their status", func() bool {
		return s.stage("fetcher").Counts["total_fetched"] == 10 && s.stage("dispatcher").Counts["total_moved"] == 1
	})
	require.True(t, s.stage("fetcher").Running)
	require.EqualValues(t, 10, s.stage("fetcher").Counts["admitted_ready"])
	require.True(t, s.stage("dispatcher").Running)
	for _, role := range []string{"ingest", "aggregator", "watcher"} {
		require.True(t, s.stage(role).Running)
	}

	s.submit(client.Submission{ID: "endless", Type: "NOOP", Jobs: jobs(100, endless), Seal: true})
	worker := s.proc("worker", 0)
	resize := func(n int) {
		status, body := s.call("PUT", "http://"+worker.AdminAddr()+"/pool", fmt.Sprintf(`{"workers":%d}`, n))
		require.Equal(t, http.StatusOK, status, string(body))
	}
	// shown waits until /v1/stats shows a worker process with this number of slots and of slots
	// that run a job.
	shown := func(workers, active int) api.WorkerStatus {
		t.Helper()
		var w api.WorkerStatus
		s.await(fmt.Sprintf("%d of %d workers active", active, workers), func() bool {
			st, err := s.api.Stats(s.ctx())
			require.NoError(t, err)
			require.Len(t, st.Workers, 1)
			w = st.Workers[0]
			return w.Workers == workers && w.Active == active
		})
		return w
	}
	w := shown(2, 2)
	require.Equal(t, []string{"NOOP"}, w.Types)
	require.Zero(t, w.Idle)
	require.False(t, w.ShuttingDown)
	require.Len(t, w.CurrentJobs, 2)
	for _, job := range w.CurrentJobs {
		require.Regexp(t, `^endless\.\d+$`, job)
	}
	resize(7)
	require.Len(t, shown(7, 7).CurrentJobs, 7)
	require.Equal(t, 7, s.pool(worker).Workers)
	for _, bad := range []string{`{"workers":-1}`, `{"workers":1000000}`, `{}`, `[]`, ``, `{"workers":"many"}`} {
		status, _ := s.call("PUT", "http://"+worker.AdminAddr()+"/pool", bad)
		require.Equal(t, http.StatusUnprocessableEntity, status, bad)
	}
	require.Equal(t, 7, s.pool(worker).Workers)

	// Resized from 7 slots to 0, the worker process still runs 7 jobs until their group is
	// cancelled. Resized to 3, it runs a new group.
	_, err := s.api.ResizeWorker(s.ctx(), w.ID, 0)
	require.NoError(t, err)
	shown(0, 7)
	_, err = s.api.Cancel(s.ctx(), "endless")
	require.NoError(t, err)
	shown(0, 0)
	s.submit(client.Submission{ID: "more", Type: "NOOP", Jobs: jobs(50, `{"sleep_ms":5}`), Seal: true})
	_, err = s.api.ResizeWorker(s.ctx(), w.ID, 3)
	require.NoError(t, err)
	s.wait("more")
	require.Equal(t, 3, shown(3, 0).Idle)
	_, err = s.api.ResizeWorker(s.ctx(), "gone", 3)
	require.ErrorContains(t, err, "no live process")

	st, err := s.api.Stats(s.ctx())
	require.NoError(t, err)
	require.EqualValues(t, 3, st.Groups)
	require.Equal(t, 1, st.Partitions)
	require.Equal(t, "NOOP", st.Types[0].Type)
	require.Equal(t, 1, st.Types[0].Workers)
	s.stop(s.proc("fetcher", 0))
	st, err = s.api.Stats(s.ctx())
	require.NoError(t, err)
	for _, stage := range st.Stages {
		require.NotEqual(t, "fetcher", stage.Role, "a stopped process is not shown")
	}
}

// TestNothingLeaks: all roles run in this process, and are started and stopped five times under
// load. At the end no goroutine and no connection is left, and all accepted jobs are done. It does
// not run in parallel, because goroutines of other tests would be counted too.
func TestNothingLeaks(t *testing.T) {
	server := redistest.Server(t)
	rdb := server.Client()
	before := goleak.IgnoreCurrent()
	const rounds = 5
	var accepted []string
	for i := range rounds {
		ctx, stop := context.WithCancel(t.Context())
		started, ended := make(chan string, 1), make(chan int, 1)
		go func() {
			ended <- dev.Run(ctx, dev.Options{
				RedisURL: server.URL(), Addr: "127.0.0.1:0", Log: t.Output(), Started: func(at dev.Addresses) { started <- at.API },
				Environ: []string{"BULKACTION_ADMIN_ADDR=127.0.0.1:0", "BULKACTION_LOG_LEVEL=error", "BULKACTION_WORKER_TIMEOUT=100ms", "BULKACTION_REDIS_POOL_MIN_IDLE=1"},
			})
		}()
		var api *client.API
		select {
		case addr := <-started:
			api = client.NewAPI("http://" + addr)
		case code := <-ended:
			require.Failf(t, "the process ended before it was ready", "exit code %d", code)
		}
		for n := range 4 {
			g := client.Submission{ID: fmt.Sprintf("g-%d-%d", i, n), Type: "NOOP", Jobs: jobs(25, `{"sleep_ms":20}`), Seal: true}
			_, err := api.Submit(ctx, g)
			require.NoError(t, err)
			accepted = append(accepted, g.ID)
		}
		for n := 0; i == rounds-1 && n < len(accepted); n++ {
			g, err := api.Wait(ctx, accepted[n])
			require.NoError(t, err)
			require.EqualValues(t, 25, g.Counts.Done, accepted[n])
		}
		stop()
		require.Equal(t, 0, <-ended)
	}
	http.DefaultClient.CloseIdleConnections()
	require.NoError(t, goleak.Find(before))
	require.Zero(t, connections(t, rdb), "connections that were not closed")
}
