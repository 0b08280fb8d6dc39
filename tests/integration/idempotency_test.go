package integration

import (
	"encoding/json"
	"net/http"
	"sync"
	"testing"

	"github.com/stretchr/testify/require"

	"github.com/bulkaction/bulkaction/api"
	"github.com/bulkaction/bulkaction/client"
	"github.com/bulkaction/bulkaction/internal/testkit/proctest"
)

// atOnce calls request n times concurrently, with i from 0 to n-1, and returns the responses in the
// order of i.
func atOnce(n int, request func(i int) response) []response {
	var at sync.WaitGroup
	all := make([]response, n)
	for i := range n {
		at.Go(func() { all[i] = request(i) })
	}
	at.Wait()
	return all
}

// accepted requires that all responses are 202 and have the same body, and returns this body
// decoded.
func accepted(t *testing.T, all ...response) api.Accepted {
	t.Helper()
	var a api.Accepted
	for _, r := range all {
		require.NoError(t, r.err)
		require.Equal(t, http.StatusAccepted, r.status, string(r.body))
		require.JSONEq(t, string(all[0].body), string(r.body))
	}
	require.NoError(t, json.Unmarshal(all[0].body, &a))
	return a
}

func TestIdempotencyKeyMakesOneGroup(t *testing.T) {
	t.Parallel()
	s := start(t, apart, replicas("ingest", 2), env("WORKER_TIMEOUT", "100ms"))
	const body = `{"tenant":"acme","type":"NOOP","seal":true,"jobs":[{"payload":{}},{"payload":{}}]}`
	const other = `{"tenant":"acme","type":"NOOP","seal":true,"jobs":[{"payload":{}}]}`
	submit := func(i int, key, body string) response {
		return do("POST", s.url(i)+"/v1/groups", body, "Idempotency-Key", key)
	}

	// Send one request eight times concurrently, to both ingest processes.
	first := accepted(t, atOnce(8, func(i int) response { return submit(i%2, "at-once", body) })...)
	id := first.ID
	require.Equal(t, api.Counts{Accepted: 2, Done: 2}, s.wait(id).Counts)

	// Send the request again when the group has ended: to an old ingest process, and to a new one.
	require.Equal(t, first, accepted(t, submit(1, "at-once", body)))
	s.stop(s.proc("ingest", 0))
	s.stop(s.proc("ingest", 1))
	s.add("ingest")
	s.api = client.NewAPI(s.url(2))
	require.Equal(t, first, accepted(t, submit(2, "at-once", body)))

	// Other content with an idempotency key that was used is refused. With another key it creates
	// another group.
	require.Equal(t, http.StatusConflict, submit(2, "at-once", other).status)
	second := accepted(t, submit(2, "another", other))
	require.NotEqual(t, id, second.ID)
	require.Equal(t, api.Counts{Accepted: 1, Done: 1}, s.wait(second.ID).Counts)

	var all []string
	for g, err := range s.api.Groups(s.ctx(), client.GroupFilter{Tenant: "acme"}) {
		require.NoError(t, err)
		all = append(all, g.ID)
	}
	require.ElementsMatch(t, []string{id, second.ID}, all)
	require.Equal(t, api.Counts{Accepted: 2, Done: 2}, s.group(id).Counts)
}

func TestIdempotencyKeyOfAnAppend(t *testing.T) {
	t.Parallel()
	s := start(t, replicas("ingest", 2))
	s.submit(client.Submission{ID: "g", Type: "NOOP"})
	const lines = "{\"payload\":{}}\n{\"payload\":{}}\nnonsense\n{\"payload\":{}}\n"
	for range 3 {
		for _, r := range atOnce(2, func(i int) response {
			return do("POST", s.url(i)+"/v1/groups/g/jobs", lines, "Idempotency-Key", "k", "Content-Type", "application/x-ndjson")
		}) {
			require.NoError(t, r.err)
			require.Equal(t, http.StatusOK, r.status, string(r.body))
			var a api.Appended
			require.NoError(t, json.Unmarshal(r.body, &a))
			require.EqualValues(t, 3, a.Accepted)
			require.Len(t, a.Rejected, 1)
			require.EqualValues(t, 3, a.Rejected[0].Line)
		}
	}
	_, err := s.api.Seal(s.ctx(), "g", nil)
	require.NoError(t, err)
	require.Equal(t, api.Counts{Accepted: 3, Done: 3}, s.wait("g").Counts)
}

func TestOtherNumberOfPartitionsIsRefused(t *testing.T) {
	t.Parallel()
	s := start(t, env("PARTITIONS", "4"))
	s.submit(client.Submission{ID: "g", Type: "NOOP", Jobs: jobs(1, `{}`), Seal: true})
	s.wait("g")
	for _, role := range roles {
		p := proctest.Start(t, "bulkaction", map[string]string{"BULKACTION_REDIS_URL": s.redis.URL(), "BULKACTION_PARTITIONS": "3", "BULKACTION_WORKER_TYPES": "NOOP"}, role)
		require.Positive(t, p.Wait(patience), role)
		require.Regexp(t, `\b4\b.*BULKACTION_PARTITIONS|BULKACTION_PARTITIONS.*\b4\b`, p.Log(), role)
		require.Regexp(t, `\b3\b`, p.Log(), role)
	}
}
