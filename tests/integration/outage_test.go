package integration

import (
	"encoding/json"
	"fmt"
	"net/http"
	"testing"

	"github.com/stretchr/testify/require"

	"github.com/bulkaction/bulkaction/api"
	"github.com/bulkaction/bulkaction/client"
	"github.com/bulkaction/bulkaction/internal/testkit/redistest"
)

// awaitReadyz waits until /readyz of every process answers with this HTTP status.
func (s *system) awaitReadyz(status int) {
	s.t.Helper()
	for role, procs := range s.procs {
		for _, p := range procs {
			s.await(fmt.Sprintf("readyz of %s answers %d", role, status), func() bool {
				got, _ := s.call("GET", "http://"+p.AdminAddr()+"/readyz", "")
				return got == status
			})
		}
	}
}

func TestRedisDiesAndComesBack(t *testing.T) {
	t.Parallel()
	const n = 3000
	s := start(t, apart, onRedis(redistest.AOF), env("LEASE", "2s"), env("WORKER_TIMEOUT", "200ms"))
	s.awaitReadyz(http.StatusOK)
	sum := []client.Aggregate{{As: "n", Op: "sum", Field: "data"}}
	s.submit(client.Submission{ID: "before", Type: "NOOP", Jobs: jobs(n, `{"sleep_ms":5,"result":1}`), Seal: true, Aggregate: sum})
	s.submit(client.Submission{ID: "open", Type: "NOOP", Jobs: jobs(1, `{"result":1}`), Aggregate: sum})
	s.awaitCounts("before", "in the middle", func(c api.Counts) bool { return c.Done > 100 })

	s.redis.Kill()
	s.awaitReadyz(http.StatusServiceUnavailable)
	for role, procs := range s.procs {
		status, body := s.call("GET", "http://"+procs[0].AdminAddr()+"/healthz", "")
		require.Equal(t, http.StatusOK, status, "%s still runs: %s", role, body)
		_, body = s.call("GET", "http://"+procs[0].AdminAddr()+"/readyz", "")
		require.Contains(t, string(body), "redis", role)
	}
	for path, body := range map[string]string{
		"/v1/groups": `{"type":"NOOP","jobs":[{"payload":{}}],"seal":true}`, "/v1/groups/open/seal": ``, "/v1/groups/open/cancel": ``,
	} {
		status, answer := s.call("POST", s.url(0)+path, body)
		require.Equal(t, http.StatusServiceUnavailable, status, "%s: %s", path, answer)
		var p api.Problem
		require.NoError(t, json.Unmarshal(answer, &p))
		require.Equal(t, http.StatusServiceUnavailable, p.Status)
	}
	status, answer := s.call("GET", s.url(0)+"/v1/groups/before", "")
	require.Equal(t, http.StatusServiceUnavailable, status, string(answer))

	s.redis.Restart()
	s.awaitReadyz(http.StatusOK)
	s.submit(client.Submission{ID: "after", Type: "NOOP", Jobs: jobs(10, `{"result":1}`), Seal: true, Aggregate: sum})
	require.Equal(t, api.Counts{Accepted: 10, Done: 10}, s.wait("after").Counts)
	g := s.wait("before")
	require.Equal(t, api.Counts{Accepted: n, Done: n}, g.Counts)
	require.JSONEq(t, fmt.Sprint(n), string(g.Aggregate["n"]))
	require.Len(t, s.results("before"), n)
	_, err := s.api.Seal(s.ctx(), "open", nil)
	require.NoError(t, err)
	require.Equal(t, api.Counts{Accepted: 1, Done: 1}, s.wait("open").Counts)
}

// TestRedisStalls: while Redis stalls, /readyz of all processes answers 503. Afterwards all 1000
// jobs are done, and each has one result and is reduced once.
func TestRedisStalls(t *testing.T) {
	t.Parallel()
	const n = 1000
	s := start(t, env("LEASE", "1s"), env("REDIS_COMMAND_TIMEOUT", "500ms"), env("REDIS_DIAL_TIMEOUT", "500ms"), env("WORKER_TIMEOUT", "200ms"))
	s.submit(client.Submission{ID: "g", Type: "NOOP", Jobs: jobs(n, `{"sleep_ms":5,"result":1}`), Seal: true, Aggregate: []client.Aggregate{{As: "n", Op: "sum", Field: "data"}}})
	s.awaitCounts("g", "in the middle", func(c api.Counts) bool { return c.Done > 100 })
	s.redis.Suspend()
	s.awaitReadyz(http.StatusServiceUnavailable)
	s.redis.Resume()
	s.awaitReadyz(http.StatusOK)
	g := s.wait("g")
	require.Equal(t, api.Counts{Accepted: n, Done: n}, g.Counts)
	require.JSONEq(t, fmt.Sprint(n), string(g.Aggregate["n"]))
	require.Len(t, s.results("g"), n)
}
