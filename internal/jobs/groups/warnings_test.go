package groups_test

import (
	"testing"

	"github.com/stretchr/testify/require"

	"github.com/bulkaction/bulkaction/api"
	"github.com/bulkaction/bulkaction/internal/jobs/groups"
	"github.com/bulkaction/bulkaction/internal/messages"
	"github.com/bulkaction/bulkaction/internal/stage/presence"
	"github.com/bulkaction/bulkaction/internal/testkit/stagetest"
)

func TestWarningsOfASubmission(t *testing.T) {
	t.Parallel()
	total := int64(5)
	payload := []byte("{}")
	const unsealed = "The group is not sealed, so it does not end: " +
		"when it has all its jobs, seal it with POST /v1/groups/g/seal or `bulkaction seal g`."
	for name, c := range map[string]struct {
		g    messages.SubmitGroup
		want []string
	}{
		"sealed": {messages.SubmitGroup{Type: "T", Seal: true, Jobs: []messages.Job{{Payload: payload}}}, nil},
		"total":  {messages.SubmitGroup{Type: "T", Total: &total, Jobs: []messages.Job{{Payload: payload}}}, nil},
		"waits": {
			messages.SubmitGroup{Type: "T", Seal: true, Total: &total, Jobs: []messages.Job{{Payload: payload}}},
			[]string{"The group has 1 of 5 jobs (total): it does not end before it has all of them."},
		},
		"no jobs":    {messages.SubmitGroup{Type: "T"}, nil},
		"unsealed":   {messages.SubmitGroup{Type: "T", Jobs: []messages.Job{{Payload: payload}}}, []string{unsealed}},
		"lower case": {messages.SubmitGroup{Type: "t"}, []string{"No live worker serves the type t: its jobs wait until one does. Did you mean T?"}},
		"a type for tests": {messages.SubmitGroup{Type: "NOOP", Seal: true, Jobs: []messages.Job{{Payload: payload}}}, []string{
			"No live worker serves the type NOOP: its jobs wait until one does. Name it in BULKACTION_WORKER_TYPES."}},
		"a type that needs accounts": {messages.SubmitGroup{Type: "PUSH_NOTIFICATION", Seal: true, Jobs: []messages.Job{{Payload: payload}}}, []string{
			"No live worker serves the type PUSH_NOTIFICATION: its jobs wait until one does. Workers serve it with BULKACTION_PUSH_ACCOUNTS_FILE."}},
		"types of jobs": {
			messages.SubmitGroup{Type: "X", Seal: true, Jobs: []messages.Job{{Type: "U", Payload: payload}, {Type: "Y", Payload: payload}, {Type: "Y", Payload: payload}}},
			[]string{"No live worker serves the type Y: its jobs wait until one does."},
		},
	} {
		t.Run(name, func(t *testing.T) {
			c.g.ID = "g"
			w := stagetest.Shared(t)
			require.NoError(t, presence.PublishWorker(stagetest.Trusted(t), w.Conn, w.Space, presence.WorkerReport{
				WorkerStatus: api.WorkerStatus{ID: "w", Types: []string{"T", "U"}}}))
			a, err := w.Store.Submit(stagetest.Trusted(t), &c.g, groups.Origin{})
			require.NoError(t, err)
			require.Equal(t, c.want, a.Warnings)
			require.Equal(t, "g", a.Tenant, "a group without a tenant is its own tenant")
		})
	}
}

// TestReusedIDWithoutTenant: a group id that was used without a tenant can't be used again with a
// tenant. The answer does not say whose id it is.
func TestReusedIDWithoutTenant(t *testing.T) {
	t.Parallel()
	w := stagetest.Shared(t)
	_, err := w.Store.Submit(stagetest.Trusted(t), &messages.SubmitGroup{ID: "g", Type: "T", Seal: true}, groups.Origin{})
	require.NoError(t, err)
	_, err = w.Store.Submit(stagetest.Trusted(t), &messages.SubmitGroup{ID: "g", Tenant: "acme", Type: "T", Seal: true}, groups.Origin{})
	require.ErrorIs(t, err, api.ErrConflict)
	require.ErrorContains(t, err, "group g: this id is taken: choose another")
}
