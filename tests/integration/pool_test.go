package integration

import (
	"fmt"
	"net/http"
	"testing"

	"github.com/stretchr/testify/require"

	"github.com/bulkaction/bulkaction/api"
	"github.com/bulkaction/bulkaction/client"
)

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
