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

// TestCancelOfRateLimitedTenants: the groups of two rate-limited tenants are cancelled by messages
// on the ingest stream. Then no tenant is active, is rate-limited or has non-ready jobs, and the
// 200 jobs of each group are done or cancelled.
func TestCancelOfRateLimitedTenants(t *testing.T) {
	t.Parallel()
	s := start(t, replicas("fetcher", 0), env("BACKPRESSURE_SHARE", "static"), env("BACKPRESSURE_GLOBAL_RPS", "5"), env("BACKPRESSURE_RATE_LIMIT_WINDOW", "1s"))
	tenants := []string{"a", "b"}
	for _, tenant := range tenants {
		s.submit(client.Submission{ID: "of-" + tenant, Tenant: tenant, Type: "NOOP", Jobs: jobs(200, `{}`), Seal: true})
	}
	s.add("fetcher")
	for _, tenant := range tenants {
		s.await("tenant "+tenant+" was rate-limited", func() bool { return s.group("of-"+tenant).Throttles > 0 })
	}
	for _, tenant := range tenants {
		s.xadd(s.space.Ingest(), "type", groupCancel, "data", fmt.Sprintf(`{"group":"of-%s"}`, tenant))
	}
	for _, tenant := range tenants {
		g := s.wait("of-" + tenant)
		require.Equal(t, api.StatusCancelled, g.Status)
	}
	p := s.space.Partition(0)
	s.await("no tenant is active or rate-limited", func() bool {
		return s.rdb.SCard(s.ctx(), p.Active()).Val() == 0 && s.rdb.ZCard(s.ctx(), p.NonReady()).Val() == 0 &&
			s.rdb.ZCard(s.ctx(), p.RateLimited("NOOP")).Val() == 0
	})
	for _, tenant := range tenants {
		c := s.group("of-" + tenant).Counts
		conserved(t, c)
		require.EqualValues(t, 200, c.Done+c.Cancelled)
		require.Positive(t, c.Cancelled)
	}
	// The only active tenant gets five permits in a window: its five jobs are not throttled.
	s.submit(client.Submission{ID: "alone", Tenant: "c", Type: "NOOP", Jobs: jobs(5, `{}`), Seal: true})
	require.Zero(t, s.wait("alone").Throttles)
}
