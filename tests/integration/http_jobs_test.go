package integration

import (
	"fmt"
	"io"
	"maps"
	"net/http"
	"net/http/httptest"
	"slices"
	"strconv"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/bulkaction/bulkaction/api"
	"github.com/bulkaction/bulkaction/client"
)

// unreliableAPI is a fake downstream API whose answer depends on the job's ordinal. It counts the
// calls of each job.
type unreliableAPI struct {
	mu    sync.Mutex
	calls map[string]int // by job
	ok    map[string]int // calls answered with 200, by job
	hung  sync.WaitGroup
	end   chan struct{}
}

// ServeHTTP answers most jobs at once with 200. Of 1000 jobs, one gets 429 with Retry-After at its
// first call, one 429 without, one an error 500, and one 404 at every call. The first call of job 5
// of each group gets no answer.
func (p *unreliableAPI) ServeHTTP(w http.ResponseWriter, r *http.Request) {
	_, _ = io.Copy(io.Discard, r.Body)
	job := r.Header.Get("Idempotency-Key")
	ordinal, err := strconv.Atoi(job[strings.LastIndexByte(job, '.')+1:])
	if err != nil {
		w.WriteHeader(http.StatusTeapot)
		return
	}
	p.mu.Lock()
	p.calls[job]++
	first := p.calls[job] == 1
	p.mu.Unlock()
	switch kind := ordinal % 1000; {
	case kind == 1 && first:
		w.Header().Set("Retry-After", "1")
		w.WriteHeader(http.StatusTooManyRequests)
		return
	case kind == 2 && first:
		w.WriteHeader(http.StatusTooManyRequests)
		return
	case kind == 3 && first:
		w.WriteHeader(http.StatusInternalServerError)
		return
	case kind == 4:
		w.WriteHeader(http.StatusNotFound)
		return
	case ordinal == 5 && first:
		p.hung.Add(1)
		defer p.hung.Done()
		select {
		case <-r.Context().Done():
		case <-p.end:
		}
		return
	}
	p.mu.Lock()
	p.ok[job]++
	p.mu.Unlock()
	w.Header().Set("Content-Type", "application/json")
	fmt.Fprintf(w, `{"cost":%d}`, ordinal%7)
}

func TestHTTPJobs(t *testing.T) {
	const tenants, total = 10, 10_000
	p := &unreliableAPI{calls: map[string]int{}, ok: map[string]int{}, end: make(chan struct{})}
	server := httptest.NewServer(p)
	t.Cleanup(func() { close(p.end); server.Close() })
	s := start(t, env("WORKER_TYPES", "HTTP"), env("HTTP_PROCESSOR_ALLOW_PRIVATE", "true"), env("HTTP_PROCESSOR_MAX_IDLE_CONNS_PER_HOST", "200"),
		env("WORKER_COUNT", "100"), env("BACKPRESSURE_GLOBAL_RPS", "0"), env("BACKPRESSURE_DEFAULT_BACKOFF", "100ms"),
		env("CONGESTION_BASE_BACKOFF", "100ms"))

	each := total / tenants
	groups := make([]string, tenants)
	for i := range groups {
		groups[i] = s.submit(client.Submission{
			ID: fmt.Sprintf("http-%d", i), Tenant: fmt.Sprintf("tenant-%d", i), Type: "HTTP", JobTimeout: 15 * time.Second,
			Aggregate: []client.Aggregate{{As: "cost", Op: "sum", Field: "data.body.cost"}, {As: "n", Op: "count"}},
		})
		job := client.NewJob{Payload: map[string]any{"url": server.URL, "body": map[string]int{"tenant": i}}}
		appended, err := s.api.Append(s.ctx(), groups[i], slices.Values(slices.Repeat([]client.NewJob{job}, each)))
		require.NoError(t, err)
		require.EqualValues(t, each, appended.Accepted)
		_, err = s.api.Seal(s.ctx(), groups[i], nil)
		require.NoError(t, err)
	}

	for _, id := range groups {
		var g api.Group
		require.Eventually(t, func() bool { g = s.group(id); return g.Status.Ended() }, 5*time.Minute, 50*time.Millisecond, "%s ends", id)
		refused, cost, done := 0, 0, 0
		p.mu.Lock() // not held while the test may fail: the server's end would wait for it
		calls, ok := maps.Clone(p.calls), maps.Clone(p.ok)
		p.mu.Unlock()
		for ordinal := range each {
			job := fmt.Sprintf("%s.%d", id, ordinal)
			if ordinal%1000 == 4 {
				refused++
				require.Equal(t, 1, calls[job], "a permanent error of %s is not retried", job)
				continue
			}
			done++
			cost += ordinal % 7
			require.Equal(t, 1, ok[job], "the downstream API executed %s once", job)
		}
		require.Equal(t, api.StatusCompleted, g.Status)
		require.Equal(t, api.Counts{Accepted: int64(each), Done: int64(done), Failed: int64(refused)}, g.Counts)
		require.Equal(t, map[string]int64{"HTTP_404": int64(refused)}, g.FailuresByCode)
		require.JSONEq(t, strconv.Itoa(cost), string(g.Aggregate["cost"]))
		require.JSONEq(t, strconv.Itoa(done), string(g.Aggregate["n"]))
	}
}
