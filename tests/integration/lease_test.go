package integration

import (
	"fmt"
	"net/http"
	"net/http/httptest"
	"sync/atomic"
	"syscall"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/bulkaction/bulkaction/api"
	"github.com/bulkaction/bulkaction/client"
	"github.com/bulkaction/bulkaction/internal/jobs/ledger"
)

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

// TestStoppedWorkerComesBack: a worker process with 20 jobs is suspended (SIGSTOP) until another
// one has run them. After it continues, it cancels its runs, and no job is counted twice or lost.
func TestStoppedWorkerComesBack(t *testing.T) {
	t.Parallel()
	const n = 40
	var stopped atomic.Bool
	var hanging atomic.Int32
	gone := make(chan struct{}, n)
	sink := httptest.NewServer(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		if !stopped.Load() { // requests of the stopped worker hang until it cancels them
			hanging.Add(1)
			<-r.Context().Done()
			gone <- struct{}{}
			return
		}
		fmt.Fprint(w, `{"n":1}`)
	}))
	t.Cleanup(sink.Close)
	s := start(t, apart, env("LEASE", "1s"), env("WORKER_TIMEOUT", "100ms"), env("WORKER_COUNT", "20"), env("WORKER_TYPES", "HTTP"),
		env("HTTP_PROCESSOR_ALLOW_PRIVATE", "true"))
	frozen := s.proc("worker", 0)
	s.submit(client.Submission{
		ID: "g", Type: "HTTP", Jobs: jobs(n, `{"url":"`+sink.URL+`"}`), Seal: true,
		Aggregate: []client.Aggregate{{As: "runs", Op: "count"}},
	})
	s.await("the worker is full", func() bool { return hanging.Load() == 20 })
	frozen.Suspend()
	stopped.Store(true)
	second := s.add("worker")
	g := s.wait("g") // the jobs run elsewhere while the worker is stopped
	require.Equal(t, api.Counts{Accepted: n, Done: n}, g.Counts)
	frozen.Signal(syscall.SIGCONT)
	for range 20 { // the worker learns that its leases are lost and cancels the jobs' contexts, which ends their requests
		select {
		case <-gone:
		case <-time.After(patience):
			require.Fail(t, "a job of the worker that came back still runs")
		}
	}
	s.await("leases are counted as lost", func() bool { return s.load("HTTP").LeasesLost >= 20 })
	s.submit(client.Submission{ID: "after", Type: "HTTP", Jobs: jobs(10, `{"url":"`+sink.URL+`"}`), Seal: true})
	require.Equal(t, api.Counts{Accepted: 10, Done: 10}, s.wait("after").Counts)

	g = s.group("g")
	require.Equal(t, api.Counts{Accepted: n, Done: n}, g.Counts)
	require.JSONEq(t, fmt.Sprint(n), string(g.Aggregate["runs"]))
	require.Len(t, s.results("g"), n)
	require.True(t, frozen.Running())
	require.True(t, second.Running())
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
