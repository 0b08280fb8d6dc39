package integration

import (
	"context"
	"encoding/json"
	"net"
	"os/exec"
	"strings"
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
