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
	"github.com/bulkaction/bulkaction/internal/ledger"
)

// The lease bounds how long a worker may be silent, not how long a job may run.
func TestJobsOutliveTheirLeases(t *testing.T) {
	t.Parallel()
	s := start(t, env("LEASE", "1s"), env("WORKER_TIMEOUT", "100ms"), env("WORKER_COUNT", "4"))
	const n = 4
	s.submit(client.Group{ID: "long", Type: "NOOP", Jobs: jobs(n, `{"sleep_ms":10000}`), Seal: true})
	s.awaitCounts("long", "four run", func(c api.Counts) bool { return c.InFlight == 4 })
	g := s.wait("long")
	require.Equal(t, api.Counts{Accepted: n, Done: n}, g.Counts)
	for ordinal, r := range s.results("long") {
		require.Equal(t, 1, r.Attempts, "runs of job %d", ordinal)
		require.GreaterOrEqual(t, r.DurationMS, 10_000.0)
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

// A worker that is stopped (SIGSTOP) for three leases loses its jobs to others. When it continues,
// it does no harm.
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
	s := start(t, env("LEASE", "1s"), env("WORKER_TIMEOUT", "100ms"), env("WORKER_COUNT", "20"), env("WORKER_TYPES", "HTTP"),
		env("HTTP_PROCESSOR_ALLOW_PRIVATE", "true"))
	frozen := s.proc("worker", 0)
	s.submit(client.Group{
		ID: "g", Type: "HTTP", Jobs: jobs(n, `{"url":"`+sink.URL+`"}`), Seal: true,
		Aggregate: []client.Aggregate{{As: "runs", Op: "count"}},
	})
	s.await("the worker is full", func() bool { return hanging.Load() == 20 })
	frozen.Signal(syscall.SIGSTOP)
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
	s.submit(client.Group{ID: "after", Type: "HTTP", Jobs: jobs(10, `{"url":"`+sink.URL+`"}`), Seal: true})
	require.Equal(t, api.Counts{Accepted: 10, Done: 10}, s.wait("after").Counts)

	g = s.group("g")
	require.Equal(t, api.Counts{Accepted: n, Done: n}, g.Counts)
	require.JSONEq(t, fmt.Sprint(n), string(g.Aggregate["runs"]))
	require.Len(t, s.results("g"), n)
	require.True(t, frozen.Running())
	require.True(t, second.Running())
}

// Outcomes of a worker that was stopped too long are refused and counted, because other workers
// have run its jobs.
func TestLateOutcomesAreRefused(t *testing.T) {
	t.Parallel()
	s := start(t, env("LEASE", "1s"), env("WORKER_TIMEOUT", "100ms"), env("WORKER_COUNT", "20"))
	const n = 10
	frozen := s.proc("worker", 0)
	// The jobs sleep by the clock: all have ended when the worker continues, so that it reports
	// before it renews leases.
	s.submit(client.Group{ID: "g", Type: "NOOP", Jobs: jobs(n, `{"sleep_ms":500,"result":1}`), Seal: true, Aggregate: []client.Aggregate{{As: "sum", Op: "sum", Field: "data"}}})
	s.awaitCounts("g", "all run", func(c api.Counts) bool { return c.InFlight == n })
	frozen.Signal(syscall.SIGSTOP)
	s.add("worker")
	g := s.wait("g")
	frozen.Signal(syscall.SIGCONT)
	s.await("late outcomes are refused, or their leases are lost", func() bool { l := s.load("NOOP"); return l.StaleOutcomes+l.LeasesLost >= n })
	require.Equal(t, api.Counts{Accepted: n, Done: n}, g.Counts)
	g = s.group("g")
	require.Equal(t, api.Counts{Accepted: n, Done: n}, g.Counts)
	require.JSONEq(t, fmt.Sprint(n), string(g.Aggregate["sum"]))
	require.Len(t, s.results("g"), n)
}
