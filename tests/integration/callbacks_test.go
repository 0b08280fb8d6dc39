package integration

import (
	"io"
	"net/http"
	"net/http/httptest"
	"os"
	"path/filepath"
	"strings"
	"sync"
	"testing"

	"github.com/stretchr/testify/require"

	"github.com/bulkaction/bulkaction/api"
	"github.com/bulkaction/bulkaction/client"
	"github.com/bulkaction/bulkaction/internal/testkit/redistest"
)

// TestCallbacksOfProcesses: with the rights of their roles, processes tell an endpoint of each end, also
// of one while Redis's memory is full, and after the watcher and Redis have died.
func TestCallbacksOfProcesses(t *testing.T) {
	t.Parallel()
	key := filepath.Join(t.TempDir(), "key")
	require.NoError(t, os.WriteFile(key, []byte(strings.Repeat("k", 32)), 0o600))
	s := start(t, apart, onRedis(redistest.AOF), env("CALLBACK_MASTER_KEY_FILE", key), env("CALLBACK_ALLOW_HTTP", "true"),
		env("CALLBACK_ALLOWED_CIDRS", "127.0.0.0/8"))
	require.NoError(t, s.rdb.ConfigSet(s.ctx(), "appendfsync", "always").Err())
	var mu sync.Mutex
	secret, status, told := "", http.StatusOK, map[string]int{}
	hook := httptest.NewServer(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		body, _ := io.ReadAll(r.Body)
		mu.Lock()
		defer mu.Unlock()
		e, err := client.VerifyWebhook(secret, r.Header, body)
		if err == nil && e.Data.Status.Ended() && status == http.StatusOK {
			told[e.Data.ID]++
		}
		w.WriteHeader(status)
	}))
	t.Cleanup(hook.Close)
	answers := func(code int) {
		mu.Lock()
		defer mu.Unlock()
		status = code
	}
	ends := func(id string) {
		s.submit(client.Submission{ID: id, Tenant: "acme", Type: "NOOP", Jobs: jobs(1, `{}`), Seal: true})
	}
	isTold := func(id string) {
		s.await("the endpoint to be told of "+id, func() bool { mu.Lock(); defer mu.Unlock(); return told[id] > 0 })
	}
	_, err := s.api.SetCallback(s.ctx(), "acme", api.CallbackSettings{URL: hook.URL})
	require.NoError(t, err)
	made, err := s.api.CallbackSecret(s.ctx(), "acme")
	require.NoError(t, err)
	mu.Lock()
	secret = made.Secret
	mu.Unlock()
	ends("first")
	isTold("first")

	s.submit(client.Submission{ID: "full", Tenant: "acme", Type: "NOOP", Jobs: jobs(1, `{"sleep_ms":1000}`), Seal: true})
	require.NoError(t, s.rdb.ConfigSet(s.ctx(), "maxmemory", "1mb").Err())
	s.awaitCounts("full", "done", func(c api.Counts) bool { return c.Done == 1 })
	require.NoError(t, s.rdb.ConfigSet(s.ctx(), "maxmemory", "0").Err())
	isTold("full")

	answers(http.StatusGone)
	ends("gone")
	s.await("the endpoint to be disabled", func() bool {
		c, err := s.api.Callback(s.ctx(), "acme")
		return err == nil && c.DisabledAt != nil
	})
	_, err = s.api.Redeliver(s.ctx(), "gone.1.completed")
	require.ErrorContains(t, err, "disabled")
	answers(http.StatusOK)
	_, err = s.api.SetCallback(s.ctx(), "acme", api.CallbackSettings{URL: hook.URL})
	require.NoError(t, err)

	s.proc("watcher", 0).Kill()
	ends("later")
	s.awaitCounts("later", "done", func(c api.Counts) bool { return c.Done == 1 })
	s.redis.Kill()
	s.redis.Restart()
	s.add("watcher")
	isTold("later")
	sent, err := s.api.RedeliverDead(s.ctx(), "")
	require.NoError(t, err)
	require.EqualValues(t, 1, sent.Redelivered)
	isTold("gone")
	mu.Lock()
	defer mu.Unlock()
	require.Equal(t, 1, told["full"], "events that wait for memory are not told again and again")
}
