package integration

import (
	"encoding/json"
	"net/http"
	"strings"
	"testing"
	"time"

	"github.com/redis/go-redis/v9"
	"github.com/stretchr/testify/require"

	"github.com/bulkaction/bulkaction/api"
	"github.com/bulkaction/bulkaction/client"
	"github.com/bulkaction/bulkaction/internal/testkit/proctest"
	"github.com/bulkaction/bulkaction/internal/testkit/redistest"
)

// TestMemoryIsFull: while Redis's memory is full, a submission and a seal are answered with 429, a
// cancel with 202, and the jobs of an accepted group end, although the only worker is killed and
// replaced.
func TestMemoryIsFull(t *testing.T) {
	t.Parallel()
	s := start(t, apart, env("LEASE", "2s"), env("WORKER_TIMEOUT", "200ms"), env("BACKPRESSURE_GLOBAL_RPS", "0"),
		env("BACKPRESSURE_DEFAULT_BACKOFF", "50ms"), env("CONGESTION_BASE_BACKOFF", "50ms"))
	l := newLoad("acme", 2000)
	for _, j := range l.group.Jobs {
		j.Payload.(map[string]any)["sleep_ms"] = 5
	}
	s.submit(l.group)
	s.submit(client.Submission{ID: "open", Type: "NOOP", Jobs: jobs(1, `{}`)})
	doomed := client.Submission{ID: "doomed", Tenant: "other", Type: "NOOP", Jobs: jobs(100, `{"sleep_ms":100}`), Seal: true}
	later := time.Now().Add(time.Hour)
	doomed.Jobs[0].RunAt = &later // the group cannot end before it is cancelled
	s.submit(doomed)
	s.awaitCounts(l.group.ID, "in the middle", func(c api.Counts) bool { return c.Done > 100 })
	raw := &redis.XAddArgs{Stream: s.space.Ingest(), Values: []string{
		"type", "group.submit", "data", `{"id":"raw","type":"NOOP","seal":true,"jobs":[{"payload":{}}]}`,
	}}

	require.NoError(t, s.rdb.ConfigSet(s.ctx(), "maxmemory", "1mb").Err())
	require.ErrorContains(t, s.rdb.XAdd(s.ctx(), raw).Err(), "OOM")
	for path, body := range map[string]string{
		"/v1/groups": `{"id":"http","type":"NOOP","jobs":[{"payload":{}}],"seal":true}`, "/v1/groups/open/seal": ``,
	} {
		req, err := http.Post(s.url(0)+path, "application/json", strings.NewReader(body))
		require.NoError(t, err)
		var p api.Problem
		require.NoError(t, json.NewDecoder(req.Body).Decode(&p))
		require.NoError(t, req.Body.Close())
		require.Equal(t, http.StatusTooManyRequests, req.StatusCode, "%s: %+v", path, p)
		require.NotEmpty(t, req.Header.Get("Retry-After"), path)
	}
	status, answer := s.call("POST", s.url(0)+"/v1/groups/doomed/cancel", "")
	require.Equal(t, http.StatusAccepted, status, "cancel frees memory: %s", answer)

	// The only worker is killed with the jobs that it holds, and a new one starts.
	s.proc("worker", 0).Kill()
	s.add("worker")
	s.await("the end of what was accepted", func() bool { return s.group(l.group.ID).Status.Ended() })
	g := s.group(l.group.ID)
	require.Equal(t, l.counts, g.Counts)
	for as, want := range l.aggregate {
		require.JSONEq(t, want, string(g.Aggregate[as]), as)
	}
	s.awaitCounts("doomed", "settled", func(c api.Counts) bool { return c.Cancelled+c.Done == 100 })
	for _, role := range roles {
		require.True(t, s.proc(role, len(s.procs[role])-1).Running(), role)
	}
	require.ErrorContains(t, s.rdb.XAdd(s.ctx(), raw).Err(), "OOM", "memory is still full")

	require.NoError(t, s.rdb.ConfigSet(s.ctx(), "maxmemory", "0").Err())
	require.NoError(t, s.rdb.XAdd(s.ctx(), raw).Err())
	_, err := s.api.Seal(s.ctx(), "open", nil)
	require.NoError(t, err)
	for _, group := range []string{"raw", "open", l.group.ID, "doomed"} {
		s.wait(group) // events that found no memory are published now
	}
	require.Equal(t, api.Counts{Accepted: 1, Done: 1}, s.group("raw").Counts)
	require.Equal(t, api.Counts{Accepted: 1, Done: 1}, s.group("open").Counts)
	status, _ = s.call("GET", s.url(0)+"/v1/groups/http", "")
	require.Equal(t, http.StatusNotFound, status, "a refused group does not exist")
}

// TestEvictionIsRefused: each of the six roles for jobs ends with code 1 at its start if Redis has
// the maxmemory-policy allkeys-lru, because such a Redis would lose jobs.
func TestEvictionIsRefused(t *testing.T) {
	t.Parallel()
	server := redistest.Server(t, redistest.Args("--maxmemory-policy", "allkeys-lru"))
	for _, role := range roles {
		p := proctest.Start(t, "bulkaction", map[string]string{"BULKACTION_REDIS_URL": server.URL(), "BULKACTION_WORKER_TYPES": "NOOP"}, role)
		require.Equal(t, 1, p.Wait(patience), role)
		require.Contains(t, p.Log(), "maxmemory-policy allkeys-lru", role)
		require.Contains(t, p.Log(), "CONFIG SET maxmemory-policy noeviction", role)
	}
}
