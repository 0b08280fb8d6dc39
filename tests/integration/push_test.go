package integration

import (
	"crypto/ecdsa"
	"crypto/elliptic"
	"crypto/rand"
	"crypto/x509"
	"encoding/pem"
	"fmt"
	"maps"
	"net"
	"net/http"
	"net/http/httptest"
	"os"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/bulkaction/bulkaction/api"
	"github.com/bulkaction/bulkaction/client"
	"github.com/bulkaction/bulkaction/internal/testkit/proctest"
)

// pushService is a fake APNs server. Its answer depends on the job's ordinal, which is the number
// at the end of the device token.
type pushService struct {
	mu          sync.Mutex
	calls       map[int]int
	accepted    map[int]int
	ids         map[int]map[string]bool // the header apns-id of all calls
	connections int
}

const deviceToken = "5ec2e7-"

// ServeHTTP answers most calls with 200. Of 100 jobs, one gets 429 with Retry-After at its first
// call, one 500, one 503, and one 410 at every call.
func (s *pushService) ServeHTTP(w http.ResponseWriter, r *http.Request) {
	ordinal, err := strconv.Atoi(strings.TrimPrefix(r.URL.Path, "/3/device/"+deviceToken))
	if err != nil {
		w.WriteHeader(http.StatusTeapot)
		return
	}
	s.mu.Lock()
	defer s.mu.Unlock()
	s.calls[ordinal]++
	if s.ids[ordinal] == nil {
		s.ids[ordinal] = map[string]bool{}
	}
	s.ids[ordinal][r.Header.Get("Apns-Id")] = true
	first := s.calls[ordinal] == 1
	switch kind := ordinal % 100; {
	case kind == 1 && first:
		w.Header().Set("Retry-After", "1")
		w.WriteHeader(http.StatusTooManyRequests)
		if ordinal > 1 { // about this device; else about the account
			fmt.Fprint(w, `{"reason":"TooManyRequests"}`)
		}
	case kind == 2 && first:
		w.WriteHeader(http.StatusInternalServerError)
	case kind == 3 && first:
		w.WriteHeader(http.StatusServiceUnavailable)
	case kind == 4:
		w.WriteHeader(http.StatusGone)
		fmt.Fprint(w, `{"reason":"Unregistered"}`)
	default:
		s.accepted[ordinal]++
	}
}

// pushAccounts writes an accounts file with one APNs account that sends to the server, and the
// server's certificate. It returns the paths of both.
func pushAccounts(t *testing.T, server *httptest.Server) (file, authority string) {
	dir := t.TempDir()
	write := func(name string, content []byte) string {
		path := filepath.Join(dir, name)
		require.NoError(t, os.WriteFile(path, content, 0o600))
		return path
	}
	key, err := ecdsa.GenerateKey(elliptic.P256(), rand.Reader)
	require.NoError(t, err)
	der, err := x509.MarshalPKCS8PrivateKey(key)
	require.NoError(t, err)
	write("key.p8", pem.EncodeToMemory(&pem.Block{Type: "PRIVATE KEY", Bytes: der}))
	authority = write("ca.pem", pem.EncodeToMemory(&pem.Block{Type: "CERTIFICATE", Bytes: server.Certificate().Raw}))
	return write("accounts.yaml", fmt.Appendf(nil,
		"apns: [{id: shop, key_file: key.p8, key_id: K, team_id: T, topic: org.example.app, url: %q, rate: none, concurrency: unbounded}]", server.URL)), authority
}

func TestPushJobs(t *testing.T) {
	const total = 2000
	service := &pushService{calls: map[int]int{}, accepted: map[int]int{}, ids: map[int]map[string]bool{}}
	server := httptest.NewUnstartedServer(service)
	server.EnableHTTP2 = true
	server.Config.ConnState = func(_ net.Conn, state http.ConnState) {
		if state == http.StateNew {
			service.mu.Lock()
			defer service.mu.Unlock()
			service.connections++
		}
	}
	server.StartTLS()
	t.Cleanup(server.Close)
	file, authority := pushAccounts(t, server)
	s := start(t, env("WORKER_TYPES", "PUSH_NOTIFICATION"), env("PUSH_ACCOUNTS_FILE", file), env("PUSH_TLS_CA_FILE", authority), env("PUSH_ACCOUNT_BREAKER", "10/1s/1"),
		env("WORKER_COUNT", "100"), env("BACKPRESSURE_GLOBAL_RPS", "0"), env("BACKPRESSURE_DEFAULT_BACKOFF", "100ms"),
		env("CONGESTION_BASE_BACKOFF", "100ms"))

	s.submit(client.Submission{ID: "sale", Tenant: "acme", Type: "PUSH_NOTIFICATION"})
	pushes := make([]client.NewJob, total)
	for i := range pushes {
		pushes[i] = client.NewJob{Payload: map[string]any{"to": map[string]string{"apns": deviceToken + strconv.Itoa(i)}, "title": "Sale"}}
	}
	appended, err := s.api.Append(s.ctx(), "sale", slices.Values(pushes))
	require.NoError(t, err)
	require.EqualValues(t, total, appended.Accepted)
	_, err = s.api.Seal(s.ctx(), "sale", nil)
	require.NoError(t, err)
	g := s.wait("sale")

	gone := int64(total / 100)
	require.Equal(t, api.Counts{Accepted: total, Done: total - gone, Failed: gone}, g.Counts)
	require.Equal(t, map[string]int64{"PUSH_UNREGISTERED": gone}, g.FailuresByCode)
	service.mu.Lock() // not held while the test may fail: the server's end would wait for it
	calls, accepted, ids, connections := maps.Clone(service.calls), maps.Clone(service.accepted), maps.Clone(service.ids), service.connections
	service.mu.Unlock()
	for ordinal := range total {
		if ordinal%100 == 4 {
			require.Equal(t, 1, calls[ordinal], "a permanent error is not retried")
			continue
		}
		require.Equal(t, 1, accepted[ordinal], "job %d", ordinal)
		require.Len(t, ids[ordinal], 1, "all calls of a job have the same apns-id")
	}
	require.Equal(t, len(s.of("worker")), connections, "a worker process has one connection to APNs")
	for role, procs := range s.procs {
		for _, p := range procs {
			require.NotContains(t, p.Log(), deviceToken, "%s logs no device token", role)
		}
	}

	t.Run("a bad accounts file", func(t *testing.T) {
		env := maps.Clone(s.env)
		env["BULKACTION_PUSH_ACCOUNTS_FILE"] = filepath.Join(t.TempDir(), "accounts.yaml")
		require.NoError(t, os.WriteFile(env["BULKACTION_PUSH_ACCOUNTS_FILE"], []byte("apns: [{id: shop, colour: red}]"), 0o600))
		worker := proctest.Start(t, "bulkaction", env, "worker")
		require.Equal(t, 2, worker.Wait(time.Minute))
		require.Contains(t, worker.Log(), "unknown field colour")
		require.Contains(t, worker.Log(), "apns account shop: key_file is missing")
	})
}
