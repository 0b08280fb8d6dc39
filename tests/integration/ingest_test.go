package integration

import (
	"context"
	"encoding/json"
	"fmt"
	"math/rand/v2"
	"net"
	"net/http"
	"os/exec"
	"strings"
	"sync"
	"testing"

	"github.com/redis/go-redis/v9"
	"github.com/stretchr/testify/require"

	"github.com/bulkaction/bulkaction/api"
	"github.com/bulkaction/bulkaction/client"
	"github.com/bulkaction/bulkaction/processor/email/smtpsink"
)

// submission is the example command of the documents.
const submission = `redis-cli XADD bulk-action:ingest '*' type group.submit data '{"tenant":"acme","type":"SEND_EMAIL","seal":true,"jobs":[{"payload":{"to":"a@example.com"}}]}'`

// history waits for the last event of a group's round, and returns all events of this round, in the
// order of the stream.
func (s *system) history(group string, round int) []api.Event {
	s.t.Helper()
	var all []api.Event
	s.follow(s.space.Events(), "end of group "+group, func(m redis.XMessage) bool {
		var e api.Event
		data, _ := m.Values["data"].(string)
		require.NoError(s.t, json.Unmarshal([]byte(data), &e))
		if e.Group.ID != group || e.Group.Round != round {
			return false
		}
		require.Equal(s.t, e.ID, m.Values["id"])
		require.Equal(s.t, e.Type, m.Values["type"])
		all = append(all, e)
		return e.Group.Status.Ended()
	})
	return all
}

func types(events []api.Event) []string {
	all := make([]string, len(events))
	for i, e := range events {
		all[i] = e.Type
	}
	return all
}

func TestBulkActionByRedisCLI(t *testing.T) {
	t.Parallel()
	sink, err := smtpsink.Start("127.0.0.1:0", smtpsink.Options{})
	require.NoError(t, err)
	t.Cleanup(func() { require.NoError(t, sink.Close()) })
	host, port, err := net.SplitHostPort(sink.Addr())
	require.NoError(t, err)
	s := start(t, env("WORKER_TYPES", "SEND_EMAIL"), env("SMTP_HOST", host), env("SMTP_PORT", port), env("SMTP_TLS", "none"))

	_, redisPort, err := net.SplitHostPort(s.redis.Addr())
	require.NoError(t, err)
	shell := exec.CommandContext(t.Context(), "sh", "-c", strings.Replace(submission, "redis-cli", "redis-cli -p "+redisPort, 1))
	answer, err := shell.CombinedOutput()
	require.NoError(t, err, string(answer))
	id := strings.TrimSpace(string(answer)) // a group without an id gets the id of its stream entry

	events := s.history(id, 1)
	require.Equal(t, []string{"group.created", "group.dispatched", "group.running", "group.aggregating", "group.completed"}, types(events))
	seen := map[string]bool{}
	for i, e := range events {
		require.False(t, seen[e.ID], "id %s twice", e.ID)
		seen[e.ID] = true
		require.Equal(t, "group."+strings.ToLower(string(e.Group.Status)), e.Type)
		require.Equal(t, "acme", e.Group.Tenant)
		require.Equal(t, "SEND_EMAIL", e.Group.Type)
		require.Len(t, e.Group.Timestamps, i+1)
		conserved(t, e.Group.Counts)
		if i > 0 {
			require.False(t, e.At.Before(events[i-1].At))
		}
	}
	last := events[len(events)-1].Group
	require.Equal(t, api.Counts{Accepted: 1, Done: 1}, last.Counts)
	require.Equal(t, s.group(id), *last, "the event shows the group as the API does")
	require.Equal(t, 1, sink.ReceivedByRecipient("a@example.com"))
	require.EqualValues(t, 1, sink.Received())
}

func TestEndsOfGroups(t *testing.T) {
	t.Parallel()
	s := start(t)
	half := 0.5
	for name, tc := range map[string]struct {
		group client.Submission
		want  string
	}{
		"all-failed":     {client.Submission{Jobs: jobs(5, `{"fail":"permanent"}`)}, "group.failed"},
		"one-done":       {client.Submission{Jobs: append(jobs(4, `{"fail":"permanent"}`), jobs(1, `{}`)...)}, "group.completed"},
		"half-failed":    {client.Submission{Jobs: append(jobs(2, `{"fail":"permanent"}`), jobs(2, `{}`)...), FailureThreshold: &half}, "group.failed"},
		"under-the-half": {client.Submission{Jobs: append(jobs(1, `{"fail":"permanent"}`), jobs(2, `{}`)...), FailureThreshold: &half}, "group.completed"},
		"nothing-to-do":  {client.Submission{}, "group.completed"},
	} {
		t.Run(name, func(t *testing.T) {
			g := tc.group
			g.ID, g.Type, g.Seal = name, "NOOP", true
			s.submit(g)
			events := s.history(name, 1)
			require.Equal(t, []string{"group.created", "group.dispatched", "group.running", "group.aggregating", tc.want}, types(events))
			require.Len(t, events[4].Group.Timestamps, 5)
		})
	}
	t.Run("cancelled", func(t *testing.T) {
		ctx := context.Background()
		s.submit(client.Submission{ID: "cancelled", Type: "NOOP", Jobs: jobs(3, `{}`)}) // not sealed, so its status stays CREATED
		s.awaitCounts("cancelled", "all done", func(c api.Counts) bool { return c.Done == 3 })
		answer, err := s.api.Cancel(ctx, "cancelled")
		require.NoError(t, err)
		require.Equal(t, api.StatusCancelled, answer.Status)
		events := s.history("cancelled", 1)
		require.Equal(t, []string{"group.created", "group.cancelled"}, types(events))
	})
}

// TestAppendsAndSealsInAnyOrder: two ingest processes read three groups of 50 appends, each of
// which is there three times. One group is sealed first, one last, and one has all its messages in
// random order. Each group gets its 150 jobs once.
func TestAppendsAndSealsInAnyOrder(t *testing.T) {
	t.Parallel()
	const appends, each, times = 50, 3, 3
	s := start(t, replicas("ingest", 2))
	submission := func(group string) []any {
		return []any{"type", groupSubmit, "id", group + ".submit", "data", fmt.Sprintf(`{"id":%q,"tenant":"acme","type":"NOOP"}`, group)}
	}
	addition := func(group string, i int) []any {
		return []any{"type", jobsAppend, "id", fmt.Sprintf("%s.%d", group, i), "data",
			fmt.Sprintf(`{"group":%q,"jobs":[{"payload":{}},{"payload":{}},{"payload":{}}]}`, group)}
	}
	sealing := func(group, total string) []any {
		return []any{"type", groupSeal, "data", fmt.Sprintf(`{"group":%q%s}`, group, total)}
	}
	random := rand.New(rand.NewPCG(1, 1))
	var all [][]any // each append several times
	shuffled := func(group string) [][]any {
		all = nil
		for i := range appends {
			for range times {
				all = append(all, addition(group, i))
			}
		}
		random.Shuffle(len(all), func(i, j int) { all[i], all[j] = all[j], all[i] })
		return all
	}
	total := fmt.Sprintf(`,"total":%d`, appends*each)

	last := append([][]any{submission("sealed-last")}, shuffled("sealed-last")...)
	last = append(last, sealing("sealed-last", ""), sealing("sealed-last", ""))

	first := append([][]any{submission("sealed-first"), sealing("sealed-first", total)}, shuffled("sealed-first")...)

	anyhow := append(shuffled("anyhow"), submission("anyhow"), submission("anyhow"), sealing("anyhow", total), sealing("anyhow", total))
	random.Shuffle(len(anyhow), func(i, j int) { anyhow[i], anyhow[j] = anyhow[j], anyhow[i] })

	_, err := s.rdb.Pipelined(s.ctx(), func(pipe redis.Pipeliner) error {
		for i := range max(len(last), len(first), len(anyhow)) {
			for _, messages := range [][][]any{last, first, anyhow} {
				if i < len(messages) {
					pipe.XAdd(s.ctx(), &redis.XAddArgs{Stream: s.space.Ingest(), Values: messages[i]})
				}
			}
		}
		return nil
	})
	require.NoError(t, err)

	want := api.Counts{Accepted: appends * each, Done: appends * each}
	for _, group := range []string{"sealed-last", "sealed-first", "anyhow"} {
		g := s.wait(group)
		require.Equal(t, want, g.Counts, group)
		require.True(t, g.Sealed)
	}
	// Messages that are repeated after the end of their group are acknowledged and change nothing.
	for _, m := range append(append(last, first...), anyhow...) {
		s.xadd(s.space.Ingest(), m...)
	}
	s.await("nothing pending", func() bool { return s.rdb.XLen(s.ctx(), s.space.Ingest()).Val() == 0 })
	for _, group := range []string{"sealed-last", "sealed-first", "anyhow"} {
		require.Equal(t, want, s.group(group).Counts, group)
	}
	rejected, err := s.rdb.XRange(s.ctx(), s.space.Rejected(), "-", "+").Result()
	require.NoError(t, err)
	require.Empty(t, rejected)
	both := map[string]bool{}
	consumers, err := s.rdb.XInfoConsumers(s.ctx(), s.space.Ingest(), "ingest").Result()
	require.NoError(t, err)
	for _, c := range consumers {
		both[c.Name] = true
	}
	require.Len(t, both, 2)
}

// TestRepeatedMessageWithOtherContent: three messages with the id m1 append one, two and three
// jobs, one after the other, while two ingest processes run. The group gets the one job of the
// first message.
func TestRepeatedMessageWithOtherContent(t *testing.T) {
	t.Parallel()
	s := start(t, replicas("ingest", 2))
	s.xadd(s.space.Ingest(), "type", groupSubmit, "data", `{"id":"g","type":"NOOP","jobs":[]}`)
	for _, n := range []string{`{"payload":{}}`, `{"payload":{}},{"payload":{}}`, `{"payload":{}},{"payload":{}},{"payload":{}}`} {
		s.xadd(s.space.Ingest(), "type", jobsAppend, "id", "m1", "data", `{"group":"g","jobs":[`+n+`]}`)
		s.await("the message is acknowledged", func() bool { return s.rdb.XLen(s.ctx(), s.space.Ingest()).Val() == 0 })
	}
	s.xadd(s.space.Ingest(), "type", groupSeal, "data", `{"group":"g"}`)
	require.Equal(t, api.Counts{Accepted: 1, Done: 1}, s.wait("g").Counts)
}

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
	repeated := func(r response) {
		again := accepted(t, r)
		require.Len(t, again.Warnings, 1, "it says that the group has ended")
		again.Warnings = nil
		require.Equal(t, first, again)
	}
	repeated(submit(1, "at-once", body))
	s.stop(s.proc("ingest", 0))
	s.stop(s.proc("ingest", 1))
	s.add("ingest")
	s.api = client.NewAPI(s.url(2))
	repeated(submit(2, "at-once", body))

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
