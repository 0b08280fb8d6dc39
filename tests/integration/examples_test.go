package integration

import (
	"encoding/json"
	"io"
	"maps"
	"net/http"
	"net/http/httptest"
	"os"
	"os/exec"
	"slices"
	"sync"
	"testing"

	"github.com/stretchr/testify/require"

	"github.com/bulkaction/bulkaction/api"
	"github.com/bulkaction/bulkaction/client"
	"github.com/bulkaction/bulkaction/internal/testkit/childproc"
	"github.com/bulkaction/bulkaction/internal/testkit/proctest"
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
