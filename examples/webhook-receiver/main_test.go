package main

import (
	"bytes"
	"encoding/json"
	"errors"
	"fmt"
	"net/http"
	"net/http/httptest"
	"strconv"
	"strings"
	"testing"
	"time"

	standardwebhooks "github.com/standard-webhooks/standard-webhooks/libraries/go"
	"github.com/stretchr/testify/require"

	"github.com/bulkaction/bulkaction/api"
)

const secret = "whsec_MfKQ9r8GKYqrTwjUPD8ILPZIo2LaLaSw"

// send sends a callback that is signed with the secrets, and returns the status of the answer.
func send(t *testing.T, s *receiver, id, group string, secrets ...string) int {
	t.Helper()
	body, err := json.Marshal(api.WebhookEvent{
		Type: "group.completed", Timestamp: time.Now(), Data: api.Group{ID: group, Tenant: "acme", Round: 1, Counts: api.Counts{Done: 3}},
	})
	require.NoError(t, err)
	r := httptest.NewRequest(http.MethodPost, "/hook", bytes.NewReader(body))
	at := time.Now()
	var signatures []string
	for _, secret := range secrets {
		library, err := standardwebhooks.NewWebhook(secret)
		require.NoError(t, err)
		signature, err := library.Sign(id, at, body)
		require.NoError(t, err)
		signatures = append(signatures, signature)
	}
	r.Header.Set("webhook-id", id)
	r.Header.Set("webhook-timestamp", strconv.FormatInt(at.Unix(), 10))
	r.Header.Set("webhook-signature", strings.Join(signatures, " "))
	w := httptest.NewRecorder()
	s.ServeHTTP(w, r)
	return w.Code
}

func TestReceiver(t *testing.T) {
	t.Parallel()
	var out bytes.Buffer
	s := newReceiver(secret, &out)
	require.Equal(t, 204, send(t, s, "g.1.completed", "g", secret))
	const first = "group.completed: g of acme in round 1, 3 jobs done, 0 failed\n"
	require.Equal(t, first, out.String())
	require.Equal(t, 204, send(t, s, "g.1.completed", "g", secret), "a repeated one is accepted")
	require.Equal(t, first, out.String(), "and dropped")

	require.Equal(t, 401, send(t, s, "x.1.completed", "x", "whsec_d3Jvbmc="))
	w := httptest.NewRecorder()
	s.ServeHTTP(w, httptest.NewRequest(http.MethodPost, "/hook", strings.NewReader("{}")))
	require.Equal(t, 401, w.Code)
	w = httptest.NewRecorder()
	s.ServeHTTP(w, httptest.NewRequest(http.MethodPost, "/hook", strings.NewReader(strings.Repeat("x", maxBody+1))))
	require.Equal(t, 400, w.Code)
	require.Equal(t, first, out.String())

	require.Equal(t, 204, send(t, s, "h.1.completed", "h", "whsec_bmV3", secret), "during a rotation")
	require.Contains(t, out.String(), ": h of acme")
}

type failingOnce struct {
	bytes.Buffer
	failed bool
}

func (f *failingOnce) Write(p []byte) (int, error) {
	if !f.failed {
		f.failed = true
		return 0, errors.New("disk full")
	}
	return f.Buffer.Write(p)
}

// TestFailedCallbackComesAgain: what was not handled is answered with 500, and handled when it is repeated.
func TestFailedCallbackComesAgain(t *testing.T) {
	t.Parallel()
	out := &failingOnce{}
	s := newReceiver(secret, out)
	require.Equal(t, 500, send(t, s, "g.1.completed", "g", secret))
	require.Equal(t, 204, send(t, s, "g.1.completed", "g", secret))
	require.Contains(t, out.String(), ": g of acme")
}

func TestIDsAreForgotten(t *testing.T) {
	t.Parallel()
	s := newReceiver(secret, &bytes.Buffer{})
	for i := range maxSeen + 10 {
		require.NoError(t, s.once(fmt.Sprint(i), func() error { return nil }))
	}
	require.Len(t, s.seen, maxSeen)
	require.False(t, s.seen["9"])
	require.True(t, s.seen["10"])
}
