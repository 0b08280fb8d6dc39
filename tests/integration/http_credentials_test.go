package integration

import (
	"fmt"
	"maps"
	"net/http"
	"net/http/httptest"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"sync"
	"syscall"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/bulkaction/bulkaction/api"
	"github.com/bulkaction/bulkaction/client"
	"github.com/bulkaction/bulkaction/internal/testkit/proctest"
)

// tokenAPI is a fake downstream API that counts the tokens it gets. Its answers contain the token,
// which must not leak. It refuses the first call of job 3 of each group with 401.
type tokenAPI struct {
	mu     sync.Mutex
	tokens map[string]int // calls by the header Authorization
	jobs   map[string]int // calls by job
}

func (a *tokenAPI) ServeHTTP(w http.ResponseWriter, r *http.Request) {
	got, job := r.Header.Get("Authorization"), r.Header.Get("Idempotency-Key")
	a.mu.Lock()
	a.tokens[got]++
	a.jobs[job]++
	first := a.jobs[job] == 1
	a.mu.Unlock()
	if first && strings.HasSuffix(job, ".3") {
		w.WriteHeader(http.StatusUnauthorized)
	}
	fmt.Fprintf(w, `{"got":%q}`, got)
}

func (a *tokenAPI) used() map[string]int {
	a.mu.Lock()
	defer a.mu.Unlock()
	return maps.Clone(a.tokens)
}

func TestHTTPCredentials(t *testing.T) {
	const jobs = 200
	mine, other := &tokenAPI{tokens: map[string]int{}, jobs: map[string]int{}}, &tokenAPI{tokens: map[string]int{}, jobs: map[string]int{}}
	server, foreign := httptest.NewServer(mine), httptest.NewServer(other)
	t.Cleanup(func() { server.Close(); foreign.Close() })
	dir := t.TempDir()
	write := func(name, content string) string {
		path := filepath.Join(dir, name)
		require.NoError(t, os.WriteFile(path, []byte(content), 0o600))
		return path
	}
	host := server.Listener.Addr().String()
	write("one", "Bearer secret-1\n")
	write("two", "Bearer secret-2\n")
	path := write("credentials.yaml", fmt.Sprintf(`credentials:
  - {id: one, hosts: [%q], header: Authorization, value_file: one}
  - {id: two, hosts: [%q], header: Authorization, value_file: two, concurrency: 4}
`, host, host))
	s := start(t, env("WORKER_TYPES", "HTTP"), env("HTTP_PROCESSOR_ALLOW_PRIVATE", "true"), env("HTTP_PROCESSOR_CREDENTIALS_FILE", path),
		env("HTTP_PROCESSOR_ACCOUNT_RATE", "1000/1s"), env("HTTP_PROCESSOR_HOST_RATE", "150/1s"), env("HTTP_PROCESSOR_HOST_BREAKER", "100/1s/1"),
		env("BACKPRESSURE_DEFAULT_BACKOFF", "100ms"), env("CONGESTION_BASE_BACKOFF", "100ms"))
	run := func(id, url string) {
		t.Helper()
		s.submit(client.Submission{ID: id, Tenant: "acme", Type: "HTTP"})
		payload := client.NewJob{Payload: map[string]any{"url": url}}
		_, err := s.api.Append(s.ctx(), id, slices.Values(slices.Repeat([]client.NewJob{payload}, jobs)))
		require.NoError(t, err)
		_, err = s.api.Seal(s.ctx(), id, nil)
		require.NoError(t, err)
		g := s.wait(id)
		if url == foreign.URL { // without a credential a refusal is the job's fault
			require.Equal(t, api.Counts{Accepted: jobs, Done: jobs - 1, Failed: 1}, g.Counts)
			return
		}
		require.Equal(t, api.Counts{Accepted: jobs, Done: jobs}, g.Counts)
		results := s.results(id)
		require.Len(t, results, jobs)
		for _, r := range results {
			require.NotContains(t, string(r.Data), "secret")
			require.Contains(t, string(r.Data), "***")
		}
	}
	run("mine", server.URL)
	used := mine.used()
	require.Len(t, used, 2)
	require.Equal(t, jobs+1, used["Bearer secret-1"]+used["Bearer secret-2"])
	run("other", foreign.URL)
	require.Equal(t, map[string]int{"": jobs}, other.used())

	pool := "pool/http." + strings.ReplaceAll(host, ":", "_")
	view, err := s.api.Guard(s.ctx(), pool)
	require.NoError(t, err)
	require.Len(t, view.Members, 2)
	keys := 0
	for g, err := range s.api.Guards(s.ctx(), "key") {
		require.NoError(t, err)
		require.Contains(t, g.Name, "key/http-host/")
		keys++
	}
	require.Equal(t, 2, keys, "each host has a guard")

	worker := s.proc("worker", 0)
	write("one", "Bearer secret-3\n")
	worker.Signal(syscall.SIGHUP)
	s.await("the worker has read the credentials", func() bool { return strings.Contains(worker.Log(), "accounts changed") })
	run("rotated", server.URL)
	require.NotZero(t, mine.used()["Bearer secret-3"])
	for role, procs := range s.procs {
		for _, p := range procs {
			require.NotContains(t, p.Log(), "secret", role)
		}
	}

	t.Run("a bad file", func(t *testing.T) {
		env := maps.Clone(s.env)
		env["BULKACTION_HTTP_PROCESSOR_CREDENTIALS_FILE"] = write("bad.yaml", "credentials: [{id: one, colour: red}]")
		bad := proctest.Start(t, "bulkaction", env, "worker")
		require.Equal(t, 2, bad.Wait(time.Minute))
		require.Contains(t, bad.Log(), "unknown field colour")
		require.Contains(t, bad.Log(), "account one: value_file is missing")
	})
}
