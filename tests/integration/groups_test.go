package integration

import (
	"encoding/json"
	"fmt"
	"net/http"
	"strings"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/bulkaction/bulkaction/api"
	"github.com/bulkaction/bulkaction/client"
	"github.com/bulkaction/bulkaction/internal/testkit/proctest"
)

var rounds = []string{"group.created", "group.dispatched", "group.running", "group.aggregating"}

func TestRetryRunsOnlyWhatFailed(t *testing.T) {
	t.Parallel()
	s := start(t, apart)
	const good, bad, hopeless = 200, 50, 10
	none := 0
	all := jobs(good, `{"result":1}`)
	all = append(all, jobs(bad, `{"fail":"retry","fail_times":1,"result":100}`)...) // round 1 has only one attempt
	all = append(all, jobs(hopeless, `{"fail":"permanent"}`)...)
	s.submit(client.Submission{ID: "g", Type: "NOOP", Jobs: all, Seal: true, MaxRetries: &none, Aggregate: []client.Aggregate{{As: "sum", Op: "sum", Field: "data"}, {As: "n", Op: "count"}}})
	require.Equal(t, append(rounds, "group.completed"), types(s.history("g", 1)))
	g := s.group("g")
	require.Equal(t, api.Counts{Accepted: good + bad + hopeless, Done: good, Failed: bad + hopeless}, g.Counts)
	require.Equal(t, map[string]int64{"NOOP_RETRY": bad, "NOOP_PERMANENT": hopeless}, g.FailuresByCode)
	require.JSONEq(t, fmt.Sprint(good), string(g.Aggregate["sum"]))

	answer, err := s.api.Retry(s.ctx(), "g")
	require.NoError(t, err)
	require.Equal(t, "g", answer.ID)
	second := s.history("g", 2)
	require.Equal(t, append(rounds, "group.completed"), types(second))
	for _, e := range second {
		require.Contains(t, e.ID, "g.2.")
		require.EqualValues(t, good, e.Group.Counts.Done+e.Group.Counts.Failed+e.Group.Counts.Waiting+e.Group.Counts.Ready+e.Group.Counts.InFlight-bad-hopeless)
	}
	g = s.group("g")
	require.Equal(t, 2, g.Round)
	require.Equal(t, api.Counts{Accepted: good + bad + hopeless, Done: good + bad, Failed: hopeless}, g.Counts)
	require.Equal(t, map[string]int64{"NOOP_PERMANENT": hopeless}, g.FailuresByCode)
	require.JSONEq(t, fmt.Sprint(good+100*bad), string(g.Aggregate["sum"]))
	require.JSONEq(t, fmt.Sprint(good+bad), string(g.Aggregate["n"]))
	for ordinal, r := range s.results("g") {
		want := 1
		if ordinal >= good {
			want = 2
		}
		require.Equal(t, want, r.Attempts, "job %d", ordinal)
	}
	failures := 0
	for f, err := range s.api.Failures(s.ctx(), "g") {
		require.NoError(t, err)
		require.GreaterOrEqual(t, f.Ordinal, int64(good+bad))
		require.Equal(t, 2, f.Attempts)
		failures++
	}
	require.Equal(t, hopeless, failures)

	// Four concurrent retry requests, answered with 202 or 409, open one round together, the third.
	s.stop(s.proc("worker", 0))
	for _, r := range atOnce(4, func(int) response { return do("POST", s.url(0)+"/v1/groups/g/retry", "") }) {
		require.NoError(t, r.err)
		require.Contains(t, []int{http.StatusAccepted, http.StatusConflict}, r.status, string(r.body))
	}
	require.Equal(t, 3, s.group("g").Round)
	s.add("worker")
	require.EqualValues(t, hopeless, s.waitRound("g", 3).Counts.Failed)
	s.submit(client.Submission{ID: "fine", Type: "NOOP", Jobs: jobs(1, `{}`), Seal: true})
	s.wait("fine")
	status, _ := s.call("POST", s.url(0)+"/v1/groups/fine/retry", "")
	require.Equal(t, http.StatusConflict, status, "nothing has failed")
}

func TestScheduledGroupsAndJobs(t *testing.T) {
	t.Parallel()
	s := start(t)
	at := time.Now().Add(1500 * time.Millisecond).Truncate(time.Millisecond)
	s.submit(client.Submission{ID: "group", Type: "NOOP", Jobs: jobs(20, `{}`), Seal: true, RunAt: &at})
	mixed := jobs(20, `{"result":1}`)
	mixed[7].RunAt = &at
	s.submit(client.Submission{ID: "job", Type: "NOOP", Jobs: mixed, Seal: true})
	s.submit(client.Submission{ID: "now", Type: "NOOP", Jobs: jobs(20, `{}`), Seal: true})

	s.wait("now") // scheduled jobs do not delay it
	s.awaitCounts("job", "all but one done", func(c api.Counts) bool { return c == api.Counts{Accepted: 20, Done: 19, NonReady: 1} })
	require.Equal(t, api.Counts{Accepted: 20, Waiting: 20}, s.group("group").Counts)
	require.Equal(t, api.StatusDispatched, s.group("group").Status)
	for _, id := range []string{"group", "job"} {
		g := s.wait(id)
		require.Equal(t, api.Counts{Accepted: 20, Done: 20}, g.Counts)
		require.False(t, g.Timestamps["completed"].Before(at), "%s: %s is before %s", id, g.Timestamps["completed"], at)
	}
	require.False(t, s.group("group").Timestamps["running"].Before(at))
}

// endless is the payload of a NOOP job that runs longer than the test, unless its context ends.
const endless = `{"sleep_ms":3600000}`

// pool reads the status of a worker process's slots from /pool at its admin address.
func (s *system) pool(p *proctest.Process) api.WorkerStatus {
	s.t.Helper()
	status, body := s.call("GET", "http://"+p.AdminAddr()+"/pool", "")
	require.Equal(s.t, http.StatusOK, status, string(body))
	var w api.WorkerStatus
	require.NoError(s.t, json.Unmarshal(body, &w))
	return w
}

func TestCancelEndsJobsWhereverTheyAre(t *testing.T) {
	t.Parallel()
	s := start(t, env("WORKER_COUNT", "5"), env("FETCH_BATCH_SIZE", "10"), env("BACKPRESSURE_DEFAULT_BACKOFF", "1h"), env("BACKPRESSURE_MAX_BACKOFF", "1h"),
		env("CONGESTION_BASE_BACKOFF", "1h"), env("CONGESTION_MAX_BACKOFF", "1h"))
	next := time.Now().Add(240 * time.Hour)
	large := json.RawMessage(`{"sleep_ms":3600000,"x":"` + strings.Repeat("x", 10<<10) + `"}`)
	// Slow jobs keep the worker from prefetching many.
	all := jobs(3, `{"sleep_ms":50}`)                                         // done
	all = append(all, jobs(2, `{"sleep_ms":50,"fail":"permanent"}`)...)       // failed
	all = append(all, jobs(4, `{"sleep_ms":50,"fail":"retry"}`)...)           // non-ready, for a retry
	all = append(all, client.NewJob{RunAt: &next, Payload: map[string]any{}}) // non-ready, until its time
	all = append(all, client.NewJob{Payload: large}, client.NewJob{Payload: large})
	all = append(all, jobs(100, endless)...) // running, ready, waiting
	s.submit(client.Submission{ID: "g", Tenant: "acme", Type: "NOOP", Jobs: all, Seal: true, JobTimeout: time.Hour})
	s.submit(client.Submission{ID: "later", Tenant: "acme", Type: "NOOP", Jobs: jobs(5, endless), RunAt: &next})
	before := s.awaitCounts("g", "jobs everywhere", func(c api.Counts) bool {
		return c.Done == 3 && c.Failed == 2 && c.NonReady == 5 && c.InFlight >= 5 && c.Ready > 0 && c.Waiting > 0
	})

	for _, id := range []string{"g", "later"} {
		for range 2 { // the second time changes nothing
			answer, err := s.api.Cancel(s.ctx(), id)
			require.NoError(t, err)
			require.Equal(t, api.StatusCancelled, answer.Status)
		}
	}
	g := s.group("g")
	require.Equal(t, api.StatusCancelled, g.Status)
	conserved(t, g.Counts)
	require.Equal(t, api.Counts{Accepted: before.Accepted, Done: 3, Failed: 2, Cancelled: before.Accepted - 5}, g.Counts)
	require.Equal(t, api.Counts{Accepted: 5, Cancelled: 5}, s.group("later").Counts)
	s.await("idle worker", func() bool { w := s.pool(s.proc("worker", 0)); return w.Active == 0 && len(w.CurrentJobs) == 0 })
	require.Equal(t, g.Counts, s.group("g").Counts, "outcomes of cancelled jobs change no counts")
	require.Equal(t, []string{"group.created", "group.dispatched", "group.running", "group.cancelled"}, types(s.history("g", 1)))

	// After the cancel, six keys of the partition, the tenant and the group do not exist. The 50
	// jobs of a new group are done.
	p := s.space.Partition(0)
	s.await("nothing is left", func() bool {
		st, err := s.api.Stats(s.ctx())
		require.NoError(t, err)
		return st.Types[0].Backlog == 0 && st.Types[0].InFlight == 0 && st.ActiveTenants == 0
	})
	require.Equal(t, g.Counts, s.group("g").Counts, "all outcomes have been reported")
	for _, key := range []string{p.NonReady(), p.NonReadyOf("acme"), p.Payloads("g"), p.Queue("g", "NOOP"), p.Scheduled(), p.Active()} {
		require.Zero(t, s.rdb.Exists(s.ctx(), key).Val(), key)
	}
	for _, command := range []string{"retry", "seal"} {
		status, _ := s.call("POST", s.url(0)+"/v1/groups/g/"+command, "")
		require.Contains(t, []int{http.StatusConflict, http.StatusAccepted}, status, command)
	}
	status, _ := s.call("POST", s.url(0)+"/v1/groups/g/jobs", `{"payload":{}}`, "Content-Type", "application/x-ndjson")
	require.Equal(t, http.StatusConflict, status)
	s.submit(client.Submission{ID: "next", Tenant: "acme", Type: "NOOP", Jobs: jobs(50, `{}`), Seal: true})
	require.EqualValues(t, 50, s.wait("next").Counts.Done)
	status, _ = s.call("POST", s.url(0)+"/v1/groups/next/cancel", "")
	require.Equal(t, http.StatusConflict, status, "the group has ended")
}

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
