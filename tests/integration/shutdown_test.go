package integration

import (
	"fmt"
	"syscall"
	"testing"

	"github.com/stretchr/testify/require"

	"github.com/bulkaction/bulkaction/api"
	"github.com/bulkaction/bulkaction/client"
	"github.com/bulkaction/bulkaction/client/producer"
	"github.com/bulkaction/bulkaction/internal/testkit/proctest"
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

func TestStoppedWorkerFinishesItsJobs(t *testing.T) {
	t.Parallel()
	s := start(t, apart, env("WORKER_TIMEOUT", "100ms"), env("WORKER_COUNT", "10"))
	s.submit(client.Submission{ID: "slow", Type: "NOOP", Jobs: jobs(10, `{"sleep_ms":1000}`), Seal: true})
	s.awaitCounts("slow", "all run", func(c api.Counts) bool { return c.InFlight == 10 })
	s.stop(s.proc("worker", 0))
	c := s.group("slow").Counts
	require.Equal(t, api.Counts{Accepted: 10, Done: 10}, c, "all outcomes are stored when the process has ended")
	s.wait("slow")
	for _, r := range s.results("slow") {
		require.Equal(t, 1, r.Attempts)
	}
	require.Contains(t, s.proc("worker", 0).Log(), `"msg":"stopped"`)
	st, err := s.api.Stats(s.ctx())
	require.NoError(t, err)
	require.Empty(t, st.Workers, "a stopped process is not shown")
}

func TestStoppedWorkerReleasesWhatItCannotFinish(t *testing.T) {
	t.Parallel()
	s := start(t, apart, env("WORKER_TIMEOUT", "100ms"), env("WORKER_COUNT", "10"), env("SHUTDOWN_GRACE_PERIOD", "100ms"))
	s.submit(client.Submission{ID: "slow", Type: "NOOP", Jobs: jobs(25, `{"sleep_ms":1500}`), Seal: true})
	s.awaitCounts("slow", "some run", func(c api.Counts) bool { return c.InFlight >= 10 })
	first := s.proc("worker", 0)
	s.stop(first)
	c := s.group("slow").Counts
	conserved(t, c)
	require.Zero(t, c.InFlight)
	require.Zero(t, c.Done)
	s.add("worker")
	g := s.wait("slow")
	require.Equal(t, api.Counts{Accepted: 25, Done: 25}, g.Counts)
	require.Zero(t, g.Retries, "a released job uses no retry")
	again := 0
	for _, r := range s.results("slow") {
		if r.Attempts > 1 {
			again++
		}
	}
	require.GreaterOrEqual(t, again, 10)
}

// underLoad calls the function `during` while six groups of 1000 jobs run: five were submitted over
// HTTP before, and the sixth gets its jobs through the ingest stream meanwhile. Then all jobs must
// be done, each with one result. From then on s.api uses the newest ingest process.
func (s *system) underLoad(t *testing.T, during func()) {
	t.Helper()
	const groups, messages, each = 5, 20, 50
	payload := `{"sleep_ms":5,"result":{"n":1}}`
	sum := []client.Aggregate{{As: "n", Op: "sum", Field: "data.n"}}
	ids := []string{"streamed"}
	for i := range groups {
		ids = append(ids, s.submit(client.Submission{ID: fmt.Sprint("g", i), Tenant: fmt.Sprint("t", i%3), Type: "NOOP", Jobs: jobs(messages*each, payload), Seal: true, Aggregate: sum}))
	}
	p, err := producer.New(s.ctx(), s.redis.URL())
	require.NoError(t, err)
	defer p.Close()
	_, err = p.Submit(s.ctx(), client.Submission{ID: "streamed", Type: "NOOP", Aggregate: sum})
	require.NoError(t, err)
	produced := make(chan error, 1)
	begun := make(chan struct{})
	go func() {
		for i := range messages {
			if _, err := p.AppendJobs(s.ctx(), "streamed", jobs(each, payload)); err != nil {
				produced <- err
				return
			}
			if i == messages/2 {
				close(begun)
			}
		}
		produced <- p.Seal(s.ctx(), "streamed", nil)
	}()
	<-begun
	during()
	require.NoError(t, <-produced)
	for _, id := range ids {
		g := s.wait(id)
		require.Equal(t, api.Counts{Accepted: messages * each, Done: messages * each}, g.Counts, id)
		require.JSONEq(t, fmt.Sprint(messages*each), string(g.Aggregate["n"]), id)
	}
	s.api = client.NewAPI(s.url(len(s.procs["ingest"]) - 1))
	for _, id := range ids {
		require.Len(t, s.results(id), messages*each)
	}
}

func TestEveryRoleIsReplacedUnderLoad(t *testing.T) {
	t.Parallel()
	s := start(t, apart, env("WORKER_TIMEOUT", "100ms"), env("LEASE", "5s"))
	s.underLoad(t, func() {
		for _, role := range roles {
			old := s.proc(role, 0)
			next := s.launch(role, nil)
			old.Signal(syscall.SIGTERM)
			require.Equal(t, 0, old.Wait(patience), role)
			next.WaitReady()
		}
	})
}

func TestAllRolesStopAndOthersGoOn(t *testing.T) {
	t.Parallel()
	s := start(t, apart, env("WORKER_TIMEOUT", "100ms"), env("LEASE", "5s"))
	s.underLoad(t, func() {
		s.stopAll()
		for _, role := range roles {
			s.add(role)
		}
	})
}

func TestKilledWorker(t *testing.T) {
	t.Parallel()
	s := start(t, apart, env("LEASE", "1s"), replicas("worker", 2))
	const n = 600
	s.submit(client.Submission{ID: "g", Type: "NOOP", Jobs: jobs(n, `{"sleep_ms":20,"result":1}`), Seal: true, Aggregate: []client.Aggregate{{As: "n", Op: "sum", Field: "data"}}})
	s.awaitCounts("g", "in the middle", func(c api.Counts) bool { return c.Done > 50 && c.InFlight >= 20 })
	s.proc("worker", 0).Kill()
	g := s.wait("g")
	require.Equal(t, api.Counts{Accepted: n, Done: n}, g.Counts)
	require.JSONEq(t, fmt.Sprint(n), string(g.Aggregate["n"]))
	require.Zero(t, g.Retries, "a lost worker uses no retry")
	again := 0
	all := s.results("g")
	for _, r := range all {
		if r.Attempts > 1 {
			again++
		}
	}
	require.Len(t, all, n)
	require.Positive(t, again, "jobs of the killed worker have run again")
	s.await("the dispatcher counts them", func() bool { return s.stage("dispatcher").Counts["taken_back"] > 0 })
}

func TestEveryRoleIsKilledUnderLoad(t *testing.T) {
	t.Parallel()
	s := start(t, apart, env("WORKER_TIMEOUT", "100ms"), env("LEASE", "1s"))
	s.underLoad(t, func() {
		var fresh []*proctest.Process
		for _, role := range roles {
			s.proc(role, 0).Kill()
			fresh = append(fresh, s.launch(role, nil))
		}
		for _, p := range fresh {
			p.WaitReady()
		}
	})
}
