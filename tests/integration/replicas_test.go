package integration

import (
	"encoding/json"
	"net/http"
	"strings"
	"testing"

	"github.com/alicebob/miniredis/v2"
	"github.com/stretchr/testify/require"

	"github.com/bulkaction/bulkaction/api"
	"github.com/bulkaction/bulkaction/internal/jobs/ledger"
	"github.com/bulkaction/bulkaction/internal/testkit/proctest"
	"github.com/bulkaction/bulkaction/internal/testkit/redistest"
)

// TestAcceptedMeansReplicated: with REDIS_WAIT_REPLICAS, ingest answers 503, and does not
// acknowledge an entry of the ingest stream, while the replica is suspended; it answers 202 and
// acknowledges the entry when the replica runs.
func TestAcceptedMeansReplicated(t *testing.T) {
	t.Parallel()
	s := start(t, env("PARTITIONS", "3"), env("REDIS_WAIT_REPLICAS", "1"), env("REDIS_COMMAND_TIMEOUT", "1s"), onRedis(redistest.Args("--repl-diskless-sync-delay", "0")))
	replica := redistest.Server(t, redistest.Args("--replicaof", strings.Replace(s.redis.Addr(), ":", " ", 1)))
	body := `{"id":"http","type":"NOOP","seal":true,"jobs":[{"payload":{}}]}`
	s.await("a replica", func() bool {
		status, _ := s.call("POST", s.url(0)+"/v1/groups", strings.Replace(body, "http", "first", 1))
		return status == http.StatusAccepted
	})

	replica.Suspend()
	status, answer := s.call("POST", s.url(0)+"/v1/groups", body)
	require.Equal(t, http.StatusServiceUnavailable, status, string(answer))
	var p api.Problem
	require.NoError(t, json.Unmarshal(answer, &p))
	s.xadd(s.space.Ingest(), "type", "group.submit", "data", strings.Replace(body, "http", "stream", 1))
	s.await("the entry to be read", func() bool {
		pending, err := s.rdb.XPending(s.ctx(), s.space.Ingest(), "ingest").Result()
		return err == nil && pending.Count == 1
	})
	// While the replica is suspended, both groups are stored and run, but neither submission is
	// acknowledged.
	require.Equal(t, api.Counts{Accepted: 1, Done: 1}, s.wait("http").Counts)
	require.Equal(t, api.Counts{Accepted: 1, Done: 1}, s.wait("stream").Counts)
	status, _ = s.call("POST", s.url(0)+"/v1/groups", body)
	require.Equal(t, http.StatusServiceUnavailable, status)
	require.EqualValues(t, 1, s.rdb.XLen(s.ctx(), s.space.Ingest()).Val(), "not acknowledged")

	replica.Resume()
	s.await("the answer", func() bool {
		status, _ := s.call("POST", s.url(0)+"/v1/groups", body)
		return status == http.StatusAccepted
	})
	s.await("the acknowledgement", func() bool { return s.rdb.XLen(s.ctx(), s.space.Ingest()).Val() == 0 })
	require.Equal(t, api.Counts{Accepted: 1, Done: 1}, s.group("http").Counts)
	require.NoError(t, replica.Client().Get(s.ctx(), s.space.OfGroup("stream").Owner("stream")).Err())
	statuses, err := ledger.Statuses(s.ctx(), replica.Client(), s.space.OfTenant("stream"), []string{"stream"})
	require.NoError(t, err)
	require.NotEmpty(t, statuses[0])
}

func TestEmbeddedRedisHasNoReplicas(t *testing.T) {
	t.Parallel()
	mini := miniredis.RunT(t)
	p := proctest.Start(t, "bulkaction", map[string]string{"BULKACTION_REDIS_URL": "redis://" + mini.Addr(), "BULKACTION_REDIS_WAIT_REPLICAS": "1"}, "ingest")
	require.Equal(t, 1, p.Wait(patience))
	require.Contains(t, p.Log(), "BULKACTION_REDIS_WAIT_REPLICAS to 0")
}
