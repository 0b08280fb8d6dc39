package integration

import (
	"context"
	"encoding/json"
	"io"
	"maps"
	"net/http"
	"net/http/httptest"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"sync"
	"syscall"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/bulkaction/bulkaction/api"
	"github.com/bulkaction/bulkaction/client"
	"github.com/bulkaction/bulkaction/internal/testkit/childproc"
	"github.com/bulkaction/bulkaction/internal/testkit/proctest"
	"github.com/bulkaction/bulkaction/internal/testkit/redistest"
)

// example runs a program of the folder examples as a process of the system until the test ends.
func (s *system) example(name string, more map[string]string, args ...string) {
	s.t.Helper()
	cmd := exec.Command(proctest.Path(s.t, name), args...)
	cmd.Env = []string{"PATH=" + os.Getenv("PATH"), "HOME=" + os.Getenv("HOME")}
	all := maps.Clone(s.env)
	maps.Copy(all, more)
	for _, k := range slices.Sorted(maps.Keys(all)) {
		cmd.Env = append(cmd.Env, k+"="+all[k])
	}
	log := &childproc.Tail{}
	cmd.Stderr = log
	child, err := childproc.Start(cmd)
	require.NoError(s.t, err)
	s.t.Cleanup(func() {
		child.Stop(patience)
		if state := child.State(); s.t.Failed() || !state.Success() {
			s.t.Errorf("%s ended with %v: %s", name, state, log)
		}
	})
}

func TestCustomProcessor(t *testing.T) {
	s := start(t, replicas("worker", 0))
	s.example("custom-processor", map[string]string{"BULKACTION_WORKER_TYPES": ""})
	id := s.submit(client.Submission{
		Tenant: "acme", Type: "WORD_COUNT", Seal: true, Aggregate: []client.Aggregate{{As: "words", Op: "sum", Field: "data.words"}},
		Jobs: []client.NewJob{{Payload: "to be or not to be"}, {Payload: "that is the question"}, {Payload: 42}},
	})
	g := s.wait(id)
	require.Equal(t, api.Counts{Accepted: 3, Done: 2, Failed: 1}, g.Counts)
	require.Equal(t, map[string]int64{"INVALID_PAYLOAD": 1}, g.FailuresByCode)
	require.JSONEq(t, "10", string(g.Aggregate["words"]))
}

func TestCustomReducer(t *testing.T) {
	s := start(t, replicas("ingest", 0), replicas("aggregator", 0), replicas("watcher", 0))
	s.example("custom-reducer", nil, "aggregator")
	s.example("custom-reducer", nil, "watcher")
	s.example("custom-reducer", map[string]string{"BULKACTION_API_ADDR": "127.0.0.1:0"}, "ingest")
	s.xadd(s.space.Ingest(), "type", "group.submit", "data", `{"id":"words","tenant":"acme","type":"NOOP","seal":true,"aggregate":[{"as":"word","op":"longest"}],
		"jobs":[{"payload":{"result":"to"}},{"payload":{"result":"question"}},{"payload":{"result":"be"}},{"payload":{"result":7}}]}`)
	shown := s.wait("words")
	require.Equal(t, int64(4), shown.Counts.Done)
	var word string
	require.NoError(t, json.Unmarshal(shown.Aggregate["word"], &word))
	require.Equal(t, "question", word)
}

// TestCredentialPool: examples/credential-pool runs 60 jobs with three tokens. No token is in two
// calls at once, and the one that the API refuses is used for three calls in all.
func TestCredentialPool(t *testing.T) {
	s := start(t, replicas("worker", 0))
	var mu sync.Mutex
	calls, running, together := map[string]int{}, map[string]int{}, 0
	apiServer := httptest.NewServer(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		token := r.Header.Get("Authorization")
		mu.Lock()
		calls[token]++
		running[token]++
		if running[token] > 1 {
			together++
		}
		mu.Unlock()
		_, _ = io.Copy(io.Discard, r.Body)
		mu.Lock()
		running[token]--
		mu.Unlock()
		if token == "Bearer refused" {
			w.WriteHeader(http.StatusUnauthorized)
		}
	}))
	defer apiServer.Close()
	s.example("credential-pool", map[string]string{
		"BULKACTION_WORKER_TYPES": "", "TRANSLATE_URL": apiServer.URL, "TRANSLATE_TOKENS": "a=good,b=also-good,c=refused",
	})
	const jobs = 60
	g := client.Submission{Tenant: "acme", Type: "TRANSLATE", Seal: true}
	for i := range jobs {
		g.Jobs = append(g.Jobs, client.NewJob{Payload: i})
	}
	require.Equal(t, api.Counts{Accepted: jobs, Done: jobs}, s.wait(s.submit(g)).Counts)
	mu.Lock()
	defer mu.Unlock()
	require.Equal(t, 3, calls["Bearer refused"])
	require.Equal(t, jobs, calls["Bearer good"]+calls["Bearer also-good"])
	require.Zero(t, together)
}

// TestAllRolesInOneProcess: one process has all roles, a second one only a worker. Both are listed
// as workers, a group completes, and both processes exit with 0 after SIGTERM.
func TestAllRolesInOneProcess(t *testing.T) {
	t.Parallel()
	server := redistest.Server(t, proctest.Users(t))
	env := func(user string) map[string]string {
		return map[string]string{"BULKACTION_REDIS_URL": proctest.AsUser(user, server.URL()), "BULKACTION_WORKER_TYPES": "NOOP"}
	}
	all := proctest.Start(t, "bulkaction", env("all"), "all")
	worker := proctest.Start(t, "bulkaction", env("worker"), "worker")
	ctx, cancel := context.WithTimeout(t.Context(), time.Minute)
	defer cancel()
	a := client.NewAPI("http://" + all.APIAddr())
	jobs := make([]client.NewJob, 50)
	for i := range jobs {
		jobs[i] = client.NewJob{Payload: map[string]int{"n": i}}
	}
	_, err := a.Submit(ctx, client.Submission{ID: "g", Type: "NOOP", Jobs: jobs, Seal: true})
	require.NoError(t, err)
	g, err := a.Wait(ctx, "g")
	require.NoError(t, err)
	require.Equal(t, api.StatusCompleted, g.Status)
	require.Eventually(t, func() bool {
		stats, err := a.Stats(ctx)
		return err == nil && len(stats.Workers) == 2
	}, time.Minute, 20*time.Millisecond, "two worker processes are listed")
	for _, p := range []*proctest.Process{all, worker} {
		p.Signal(syscall.SIGTERM)
		require.Zero(t, p.Wait(time.Minute))
	}
	(&system{t: t, env: map[string]string{"BULKACTION_REDIS_URL": server.URL()}}).requireNoDenial()
}

// TestRoleBinaries: each role runs as its own binary of cmd/, the broker too, and a group of 200
// jobs has its expected outcome.
func TestRoleBinaries(t *testing.T) {
	t.Parallel()
	folder := t.TempDir()
	build := []string{"build", "-buildvcs=false", "-ldflags=-s -w", "-o", folder}
	named := append([]string{"broker"}, roles...)
	for _, role := range named {
		build = append(build, "../../cmd/"+role)
	}
	out, err := exec.Command("go", build...).CombinedOutput()
	require.NoError(t, err, "%s", out)
	opts := []option{env("BROKER_TOKEN_KEYS_FILE", tokenKeys(t)), env("BROKER_ADDR", "127.0.0.1:0")}
	for _, role := range named {
		opts = append(opts, binary(role, filepath.Join(folder, role)))
	}
	s := start(t, opts...)
	s.add("broker")
	l := newLoad("acme", 200)
	s.submit(l.group)
	l.check(t, s.wait(l.group.ID))
}

// TestEmbeddedExample: examples/embedded exits with 0 by itself, and prints that 100 of 100 jobs of
// its group are done.
func TestEmbeddedExample(t *testing.T) {
	t.Parallel()
	ctx, cancel := context.WithTimeout(t.Context(), time.Minute)
	defer cancel()
	stdout, err := exec.CommandContext(ctx, proctest.Path(t, "embedded"), "-redis", redistest.Server(t).URL(), "-addr", "127.0.0.1:0").Output()
	require.NoError(t, err)
	require.Equal(t, "COMPLETED: 100 of 100 invoices charged, 5050 cents\n", string(stdout))
}
