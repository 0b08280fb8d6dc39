package integration

import (
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/bulkaction/bulkaction/api"
	"github.com/bulkaction/bulkaction/client"
)

// TestPauseWherever: while a group, tenant or type is paused, its jobs in flight finish and no more
// of its jobs are done. After resume, all are done. Pause and resume are each called twice.
func TestPauseWherever(t *testing.T) {
	t.Parallel()
	for what, c := range map[string]struct {
		pause, resume func(s *system) error
	}{
		"group": {
			func(s *system) error { _, err := s.api.Pause(s.ctx(), "g"); return err },
			func(s *system) error { _, err := s.api.Resume(s.ctx(), "g"); return err },
		},
		"tenant": {
			func(s *system) error { _, err := s.api.PauseTenant(s.ctx(), "acme"); return err },
			func(s *system) error { _, err := s.api.ResumeTenant(s.ctx(), "acme"); return err },
		},
		"type": {
			func(s *system) error { _, err := s.api.PauseType(s.ctx(), "NOOP"); return err },
			func(s *system) error { _, err := s.api.ResumeType(s.ctx(), "NOOP"); return err },
		},
	} {
		t.Run(what, func(t *testing.T) {
			t.Parallel()
			s := start(t, env("WORKER_COUNT", "3"), env("BACKPRESSURE_DEFAULT_BACKOFF", "200ms"), env("CONGESTION_BASE_BACKOFF", "200ms"), replicas("worker", 2))
			all := append(jobs(20, `{"sleep_ms":20,"fail":"retry","fail_times":1}`), jobs(180, `{"sleep_ms":20}`)...)
			s.submit(client.Submission{ID: "g", Tenant: "acme", Type: "NOOP", Jobs: all, Seal: true})
			s.awaitCounts("g", "jobs run", func(c api.Counts) bool { return c.Done >= 10 && c.NonReady > 0 && c.Waiting > 0 })
			require.NoError(t, c.pause(s))
			require.NoError(t, c.pause(s)) // the same command again
			still := s.awaitCounts("g", "jobs in flight have ended", func(c api.Counts) bool { return c.InFlight == 0 && c.Ready == 0 })
			conserved(t, still)
			why, err := s.api.Why(s.ctx(), "g")
			require.NoError(t, err)
			require.Equal(t, api.WhyPaused, why.Reason)
			require.Contains(t, why.PausedBy, what)

			// While a group or tenant is paused, a group of another tenant with jobs of type NOOP
			// ends. While the type NOOP is paused, the 20 jobs of that group are waiting or
			// non-ready.
			other := client.Submission{ID: "other", Tenant: "beta", Type: "NOOP", Jobs: jobs(20, `{}`), Seal: true}
			s.submit(other)
			if what == "type" {
				s.awaitCounts("other", "its jobs wait, too", func(c api.Counts) bool { return c.Waiting+c.NonReady == 20 })
			} else {
				s.wait("other")
			}
			require.Equal(t, still.Done, s.group("g").Counts.Done, "no job has started")
			s.audit()

			require.NoError(t, c.resume(s))
			require.NoError(t, c.resume(s))
			for _, id := range []string{"g", "other"} {
				g := s.wait(id)
				require.Equal(t, api.StatusCompleted, g.Status)
				require.Equal(t, g.Counts.Accepted, g.Counts.Done)
			}
			require.EqualValues(t, 20, s.group("g").Retries)
			s.audit()
		})
	}
}

// TestCancelWhilePaused: a group that is cancelled while it is paused and has suspended jobs ends
// as CANCELLED, and leaves no suspended job and no active tenant.
func TestCancelWhilePaused(t *testing.T) {
	t.Parallel()
	s := start(t, env("WORKER_COUNT", "2"), env("BACKPRESSURE_DEFAULT_BACKOFF", "50ms"), env("CONGESTION_BASE_BACKOFF", "50ms"))
	s.submit(client.Submission{ID: "g", Tenant: "acme", Type: "NOOP", Jobs: jobs(100, `{"sleep_ms":20,"fail":"retry","fail_times":2}`), Seal: true})
	s.awaitCounts("g", "some are non-ready", func(c api.Counts) bool { return c.NonReady > 2 })
	_, err := s.api.Pause(s.ctx(), "g")
	require.NoError(t, err)
	p := s.space.Partition(0)
	s.await("some jobs are suspended", func() bool { return s.rdb.ZCard(s.ctx(), p.SuspendedOf("acme")).Val() > 0 })
	_, err = s.api.Cancel(s.ctx(), "g")
	require.NoError(t, err)
	require.Equal(t, api.StatusCancelled, s.wait("g").Status)
	s.await("no job is left", func() bool {
		return s.rdb.ZCard(s.ctx(), p.SuspendedOf("acme")).Val()+s.rdb.SCard(s.ctx(), p.Suspended()).Val()+s.rdb.SCard(s.ctx(), p.Active()).Val() == 0
	})
	s.audit()
}

// TestTenantsOwnLimit: with three fetchers and two dispatchers, 60 jobs of a tenant with a limit of
// 50 a second, five of which are throttled once, take more than five windows of 200 ms. The list of
// tenants shows this limit, and none for another tenant.
func TestTenantsOwnLimit(t *testing.T) {
	t.Parallel()
	s := start(t, replicas("fetcher", 3), replicas("dispatcher", 2), env("BACKPRESSURE_RATE_LIMIT_WINDOW", "200ms"))
	rps, weight := 50.0, 2.0
	_, err := s.api.SetTenant(s.ctx(), "acme", api.TenantSettings{RPS: &rps, Weight: &weight})
	require.NoError(t, err)
	s.submit(client.Submission{ID: "g", Tenant: "acme", Type: "NOOP", Jobs: append(jobs(5, `{"fail":"throttle","fail_times":1}`), jobs(55, `{}`)...), Seal: true})
	s.submit(client.Submission{ID: "free", Tenant: "beta", Type: "NOOP", Jobs: jobs(300, `{}`), Seal: true})
	s.wait("free")
	g := s.wait("g")
	require.EqualValues(t, 60, g.Counts.Done)
	require.Positive(t, g.Throttles)
	// The jobs run 65 times in all. At 10 permits in each window of 200 ms that uses at least seven
	// windows, of which the first and the last may count in part.
	took := g.Timestamps["completed"].Sub(g.Timestamps["running"])
	require.Greater(t, took, 5*200*time.Millisecond)

	shown := map[string]api.Tenant{}
	for tenant, err := range s.api.Tenants(s.ctx(), client.TenantFilter{}) {
		require.NoError(t, err)
		shown[tenant.ID] = tenant
	}
	require.Len(t, shown, 2)
	require.Equal(t, &rps, shown["acme"].RPS)
	require.InDelta(t, weight, shown["acme"].Weight, 0)
	require.Nil(t, shown["beta"].RPS)
	s.audit()
}

// TestLimitOfSeveralPartitions: with four partitions and two fetchers, the global limit holds: 400
// jobs of one tenant, at 40 permits a window, take more than eight windows.
func TestLimitOfSeveralPartitions(t *testing.T) {
	t.Parallel()
	const perWindow, window = 40, 200 * time.Millisecond
	s := start(t, replicas("fetcher", 2), env("PARTITIONS", "4"), env("BACKPRESSURE_GLOBAL_RPS", "200"), env("BACKPRESSURE_RATE_LIMIT_WINDOW", window.String()))
	s.submit(client.Submission{ID: "busy", Tenant: "busy", Type: "NOOP", Jobs: jobs(400, `{}`), Seal: true})
	g := s.wait("busy")
	took := g.Timestamps["completed"].Sub(g.Timestamps["running"])
	require.Greater(t, took, (400/perWindow-2)*window, "the limit of all is kept")
	s.audit()
}
