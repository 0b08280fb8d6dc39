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

func TestTypeWithoutWorkers(t *testing.T) {
	t.Parallel()
	s := start(t, env("NO_PROCESSOR_TIMEOUT", "1s"))
	const n = 150
	s.submit(client.Submission{ID: "unserved", Tenant: "acme", Type: "NOBODY", Jobs: jobs(n, `{}`), Seal: true})
	mixed := jobs(20, `{}`)
	for i := range 5 {
		mixed[4*i].Type = "NOBODY"
	}
	s.submit(client.Submission{ID: "mixed", Tenant: "acme", Type: "NOOP", Jobs: mixed, Seal: true})
	s.awaitCounts("mixed", "the others done", func(c api.Counts) bool { return c.Done == 15 })

	g := s.wait("unserved")
	require.Equal(t, api.StatusFailed, g.Status)
	require.Equal(t, api.Counts{Accepted: n, Failed: n}, g.Counts)
	require.Equal(t, map[string]int64{"NO_PROCESSOR": n}, g.FailuresByCode)
	require.Equal(t, api.Counts{Accepted: 20, Done: 15, Failed: 5}, s.wait("mixed").Counts)
	letters := 0
	for d, err := range s.api.DeadLetters(s.ctx(), client.DeadLetterFilter{}) {
		require.NoError(t, err)
		require.Equal(t, "NO_PROCESSOR", d.Code)
		require.Equal(t, "NOBODY", d.Type)
		require.JSONEq(t, `{}`, string(d.Payload))
		letters++
	}
	require.Equal(t, n+5, letters)
}

func TestLargePayloads(t *testing.T) {
	t.Parallel()
	s := start(t)
	none := 0
	large := func(rest string) string { return `{"x":"` + strings.Repeat("x", 100<<10) + `",` + rest + `}` }
	all := jobs(30, large(`"result":1`))
	all = append(all, jobs(5, large(`"fail":"retry","fail_times":1,"result":1`))...)
	s.submit(client.Submission{ID: "g", Tenant: "acme", Type: "NOOP", Jobs: all, Seal: true, MaxRetries: &none, Aggregate: []client.Aggregate{{As: "n", Op: "sum", Field: "data"}}})
	require.Equal(t, api.Counts{Accepted: 35, Done: 30, Failed: 5}, s.wait("g").Counts)
	payloads := s.space.OfTenant("acme").Payloads("g")
	require.EqualValues(t, 5, s.rdb.HLen(s.ctx(), payloads).Val(), "payloads of failed jobs are kept for a retry")
	for d, err := range s.api.DeadLetters(s.ctx(), client.DeadLetterFilter{}) {
		require.NoError(t, err)
		require.True(t, json.Valid(d.Payload))
		require.Greater(t, len(d.Payload), 100<<10)
	}
	_, err := s.api.Retry(s.ctx(), "g")
	require.NoError(t, err)
	g := s.waitRound("g", 2)
	require.Equal(t, api.Counts{Accepted: 35, Done: 35}, g.Counts)
	require.JSONEq(t, "35", string(g.Aggregate["n"]))
	require.Zero(t, s.rdb.Exists(s.ctx(), payloads).Val())
}
