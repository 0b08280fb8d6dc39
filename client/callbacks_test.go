package client_test

import (
	"encoding/json"
	"net/http"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/bulkaction/bulkaction/api"
	"github.com/bulkaction/bulkaction/client"
	"github.com/bulkaction/bulkaction/internal/calls/webhook"
	"github.com/bulkaction/bulkaction/internal/testkit/apitest"
	"github.com/bulkaction/bulkaction/internal/web/httpapi"
)

// TestCallbacksOfClientAndServerAgree makes each call on callbacks at the real API.
func TestCallbacksOfClientAndServerAgree(t *testing.T) {
	m := apitest.NewBackend()
	m.Redelivered = []api.Redelivered{{Redelivered: 3, Full: true}}
	a, _ := serve(t, httpapi.New(httpapi.Options{Backend: m}))
	ctx := t.Context()
	_, err := a.SetCallback(ctx, "acme", api.CallbackSettings{URL: "https://example.com", Events: []string{"group.failed"}})
	require.NoError(t, err)
	_, err = a.SetCallback(ctx, "acme", api.CallbackSettings{URL: "https://example.com"})
	require.NoError(t, err)
	c, err := a.Callback(ctx, "acme")
	require.NoError(t, err)
	require.Equal(t, apitest.EndpointView(), c)
	_, err = a.Callback(ctx, "globex")
	require.ErrorIs(t, err, client.ErrNotFound)
	removed, err := a.DeleteCallback(ctx, "acme")
	require.NoError(t, err)
	require.Equal(t, api.CallbackRemoval{Tenant: "acme", Deleted: true}, removed)
	s, err := a.CallbackSecret(ctx, "acme")
	require.NoError(t, err)
	rotated, err := a.RotateCallbackSecret(ctx, "acme")
	require.NoError(t, err)
	require.Equal(t, s.Secret, rotated.Previous)
	states := map[string]int{}
	for _, f := range []client.CallbackFilter{{}, {State: api.CallbackPending, Tenant: "acme"}} {
		for c, err := range a.Callbacks(ctx, f) {
			require.NoError(t, err)
			states[c.State]++
		}
	}
	require.Equal(t, map[string]int{api.CallbackDead: 2, api.CallbackPending: 2}, states)
	again, err := a.Redeliver(ctx, "g.1.completed")
	require.NoError(t, err)
	require.Equal(t, "g", again.Group)
	sent, err := a.RedeliverDead(ctx, "acme")
	require.NoError(t, err)
	require.Equal(t, api.Redelivered{Redelivered: 3, Full: true}, sent)
	_, err = a.RedeliverDead(ctx, "")
	require.NoError(t, err)
	require.Equal(t, []string{
		"set callback acme https://example.com [group.failed]", "set callback acme https://example.com []",
		"delete callback acme", "rotate acme",
		"callbacks {State:dead Tenant: Cursor: Limit:1000}", "callbacks {State:dead Tenant: Cursor:next Limit:1000}",
		"callbacks {State:pending Tenant:acme Cursor: Limit:1000}", "callbacks {State:pending Tenant:acme Cursor:next Limit:1000}",
		"redeliver g.1.completed", "redeliver dead acme", "redeliver dead ",
	}, m.Calls)
	for _, id := range []string{"", "g", "../v1/keys", "g.1.completed/redeliver?"} {
		_, err = a.Redeliver(ctx, id)
		require.ErrorContains(t, err, "must be that of an event")
	}
}

// TestRotationIsNotRepeated: a second rotation would end the validity of the secret that receivers have.
func TestRotationIsNotRepeated(t *testing.T) {
	f := &flakyServer{steps: []func(http.ResponseWriter){dropConnection}}
	a, _ := serve(t, f)
	_, err := a.RotateCallbackSecret(t.Context(), "acme")
	require.Error(t, err)
	f.mu.Lock()
	defer f.mu.Unlock()
	require.Len(t, f.keys, 1)
}

func TestVerifyWebhook(t *testing.T) {
	const secret = "whsec_MfKQ9r8GKYqrTwjUPD8ILPZIo2LaLaSw"
	body, err := json.Marshal(api.WebhookEvent{
		Type: "group.completed", Timestamp: time.Unix(1e9, 0).UTC(), Data: api.Group{ID: "g", Round: 2}, Truncated: true,
	})
	require.NoError(t, err)
	header := http.Header{}
	require.NoError(t, webhook.Sign(header, "g.2.completed", time.Now(), body, secret))
	e, err := client.VerifyWebhook(secret, header, body)
	require.NoError(t, err)
	require.Equal(t, "g", e.Data.ID)
	require.Equal(t, 2, int(e.Data.Round))
	require.True(t, e.Truncated)

	_, err = client.VerifyWebhook(secret, header, append(body, ' '))
	require.ErrorIs(t, err, client.ErrSignature)
	_, err = client.VerifyWebhook("whsec_", header, body)
	require.ErrorContains(t, err, "whsec_ and base64")
	require.NoError(t, webhook.Sign(header, "g.2.completed", time.Now(), []byte("[]"), secret))
	_, err = client.VerifyWebhook(secret, header, []byte("[]"))
	require.ErrorContains(t, err, "decode event")
}
