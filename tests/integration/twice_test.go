package integration

import (
	"context"
	"encoding/json"
	"fmt"
	"net/http"
	"os"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/redis/go-redis/v9"
	"github.com/stretchr/testify/require"

	"github.com/bulkaction/bulkaction/api"
	"github.com/bulkaction/bulkaction/client"
	"github.com/bulkaction/bulkaction/client/producer"
	"github.com/bulkaction/bulkaction/internal/audit"
	"github.com/bulkaction/bulkaction/internal/process/app"
	role "github.com/bulkaction/bulkaction/internal/process/roles"
	"github.com/bulkaction/bulkaction/internal/redisx/keyspace"
	"github.com/bulkaction/bulkaction/internal/testkit/redistest"
	"github.com/bulkaction/bulkaction/processor"
	"github.com/bulkaction/bulkaction/processor/noop"
)

// twice is a hook of the Redis client. After each EVAL or EVALSHA without an error it sends the
// command once more, as a Cluster client may do at any time, and returns the second reply.
type twice struct{ runs atomic.Int64 }

func (h *twice) DialHook(next redis.DialHook) redis.DialHook { return next }

func (h *twice) again(cmd redis.Cmder) bool {
	if name := cmd.Name(); cmd.Err() != nil || name != "evalsha" && name != "eval" {
		return false
	}
	h.runs.Add(1)
	return true
}

func (h *twice) ProcessHook(next redis.ProcessHook) redis.ProcessHook {
	return func(ctx context.Context, cmd redis.Cmder) error {
		err := next(ctx, cmd)
		if h.again(cmd) {
			err = next(ctx, cmd)
		}
		return err
	}
}

func (h *twice) ProcessPipelineHook(next redis.ProcessPipelineHook) redis.ProcessPipelineHook {
	return func(ctx context.Context, cmds []redis.Cmder) error {
		err := next(ctx, cmds)
		var scripts []redis.Cmder
		for _, cmd := range cmds {
			if h.again(cmd) {
				scripts = append(scripts, cmd)
			}
		}
		if len(scripts) > 0 {
			if second := next(ctx, scripts); err == nil {
				err = second
			}
		}
		return err
	}
}

// byRuns is a NOOP processor whose jobs fail in their first fail_times runs. The real one counts
// attempts, which also grow without a run: when a start is repeated, or a job that waited too long
// for a slot is released.
type byRuns struct {
	noop.Processor
	mu   sync.Mutex
	runs map[string]int // by job id
}

func (p *byRuns) Process(ctx context.Context, job processor.Job) (any, error) {
	p.mu.Lock()
	p.runs[job.ID()]++
	job.Attempt = p.runs[job.ID()]
	p.mu.Unlock()
	return p.Processor.Process(ctx, job)
}

// inOne runs all roles in this process until the test ends, with a hook on their Redis commands,
// and returns the address of the API.
func inOne(t *testing.T, url string, hook redis.Hook, environ ...string) string {
	t.Helper()
	ctx, stop := context.WithCancel(context.WithoutCancel(t.Context()))
	api, ended := make(chan string, 1), make(chan int, 1)
	go func() {
		o := app.Options{Role: "dev", Stderr: os.Stderr, Environ: append([]string{
			"BULKACTION_REDIS_URL=" + url, "BULKACTION_WORKER_TYPES=NOOP", "BULKACTION_API_ADDR=127.0.0.1:0", "BULKACTION_LOG_LEVEL=error",
		}, environ...)}
		ended <- app.Run(ctx, o, func(ctx context.Context, p *app.Process) error {
			b, err := role.Connect(ctx, p)
			if err != nil {
				return err
			}
			b.Conn.Cmd.AddHook(hook)
			own := role.Own{
				Processors: []processor.Runner{&byRuns{runs: map[string]int{}}},
				Listening:  func(addr string) { api <- addr },
			}
			return role.Together(ctx, p, b, own.Jobs())
		})
	}()
	t.Cleanup(func() {
		stop()
		require.Equal(t, 0, <-ended, "exit code")
	})
	select {
	case addr := <-api:
		return addr
	case code := <-ended:
		require.Fail(t, "the roles ended", "exit code %d", code)
	case <-time.After(patience):
		require.Fail(t, "the roles do not start")
	}
	return ""
}

// TestEveryScriptTwice: the roles send each script call twice, more than 500 calls, and yet groups
// that are retried, throttled, deferred, paused, cancelled or fail have exact counts. A Cluster
// client repeats a command when Redis redirects it, whatever its settings are.
func TestEveryScriptTwice(t *testing.T) {
	t.Parallel()
	ctx := context.WithoutCancel(t.Context())
	server := redistest.Server(t)
	space, err := keyspace.New("bulk-action:", 2)
	require.NoError(t, err)
	hook := &twice{}
	addr := inOne(t, server.URL(), hook, "BULKACTION_PARTITIONS=2", "BULKACTION_BACKPRESSURE_GLOBAL_RPS=2000", "BULKACTION_BACKPRESSURE_RATE_LIMIT_WINDOW=100ms",
		"BULKACTION_BACKPRESSURE_DEFAULT_BACKOFF=50ms", "BULKACTION_CONGESTION_BASE_BACKOFF=50ms", "BULKACTION_LEASE=6s")
	s := &system{t: t, redis: server, rdb: connect(t, server.URL()).Cmd, space: space, api: client.NewAPI("http://" + addr)}
	s.env = map[string]string{"BULKACTION_REDIS_URL": server.URL()}
	told := func(method, path, body string) {
		t.Helper()
		status, answer := s.call(method, "http://"+addr+path, body)
		require.Contains(t, []int{http.StatusOK, http.StatusAccepted}, status, "%s: %s", path, answer)
	}
	stream, err := producer.New(ctx, server.URL())
	require.NoError(t, err)
	defer stream.Close()

	told("PUT", "/v1/tenants/tenant-0", `{"rps":500,"weight":3}`)
	var loads []load
	for i := range 4 {
		l := newLoad(fmt.Sprint("tenant-", i), 500)
		loads = append(loads, l)
		if i%2 == 0 {
			_, err = s.api.Submit(ctx, l.group)
		} else {
			_, err = stream.Submit(ctx, l.group)
		}
		require.NoError(t, err)
	}
	s.submit(client.Submission{ID: "throttled", Type: "NOOP", Jobs: jobs(20, `{"fail":"throttle","fail_times":1,"result":1}`), Seal: true, Aggregate: loadAggregates[1:2]})
	s.submit(client.Submission{ID: "deferred", Type: "NOOP", Jobs: jobs(20, `{"fail":"defer","fail_times":3,"result":1}`), Seal: true, Aggregate: loadAggregates[1:2]})
	s.submit(client.Submission{ID: "failing", Type: "NOOP", Jobs: jobs(50, `{"fail":"permanent","fail_times":1,"result":1}`), Seal: true, Aggregate: loadAggregates[1:2]})
	s.submit(client.Submission{ID: "held", Type: "NOOP", Jobs: jobs(1, `{"sleep_ms":2500}`), Seal: true}) // its lease is renewed every 2 s
	s.submit(client.Submission{ID: "doomed", Type: "NOOP", Jobs: jobs(300, `{"sleep_ms":200}`), Seal: true})
	s.submit(client.Submission{ID: "paused", Tenant: "idle", Type: "NOOP", Jobs: jobs(100, `{"sleep_ms":20}`)})
	told("POST", "/v1/groups/paused/pause", "")
	told("POST", "/v1/groups/doomed/cancel", "")
	told("POST", "/v1/tenants/tenant-1/pause", "")
	told("POST", "/v1/types/NOOP/pause", "")
	told("POST", "/v1/types/NOOP/resume", "")
	told("POST", "/v1/tenants/tenant-1/resume", "")
	told("POST", "/v1/groups/paused/resume", "")
	told("POST", "/v1/groups/paused/seal", "")

	for _, l := range loads {
		l.check(t, s.wait(l.group.ID))
		n := 0
		for _, err := range s.api.Results(ctx, l.group.ID) {
			require.NoError(t, err)
			n++
		}
		require.EqualValues(t, l.counts.Done, n)
	}
	require.Equal(t, api.Counts{Accepted: 100, Done: 100}, s.wait("paused").Counts)
	require.Equal(t, api.Counts{Accepted: 1, Done: 1}, s.wait("held").Counts)
	for _, again := range []string{"throttled", "deferred"} {
		g := s.wait(again)
		require.Equal(t, api.Counts{Accepted: 20, Done: 20}, g.Counts, again)
		require.JSONEq(t, "20", string(g.Aggregate["n"]), again)
		require.Equal(t, int64(0), g.Retries, again)
	}
	g := s.wait("doomed")
	require.Equal(t, api.StatusCancelled, g.Status)
	s.awaitCounts("doomed", "settled", func(c api.Counts) bool { return c.Cancelled+c.Done == 300 })

	letters := func() int {
		t.Helper()
		jobs := map[string]bool{}
		for d, err := range s.api.DeadLetters(ctx, client.DeadLetterFilter{}) {
			require.NoError(t, err)
			key := d.Group + "/" + d.Job
			require.False(t, jobs[key], key)
			jobs[key] = true
		}
		return len(jobs)
	}
	require.Equal(t, api.Counts{Accepted: 50, Failed: 50}, s.wait("failing").Counts)
	require.Equal(t, 50+4*5, letters())
	told("POST", "/v1/groups/failing/retry", "")
	g = s.waitRound("failing", 2)
	require.Equal(t, api.Counts{Accepted: 50, Done: 50}, g.Counts)
	require.JSONEq(t, "50", string(g.Aggregate["n"]))
	require.Equal(t, 4*5, letters(), "a retry deletes the dead letters of the jobs that it starts anew")

	seen := map[string]bool{}
	s.follow(space.Events(), "the last event", func(m redis.XMessage) bool {
		var e api.Event
		require.NoError(t, json.Unmarshal([]byte(m.Values["data"].(string)), &e))
		require.NotEqual(t, "audit.violation", e.Type, m.Values["data"])
		seen[e.ID] = true
		return e.Group != nil && e.Group.ID == "failing" && e.Group.Round == 2 && e.Group.Status.Ended()
	})
	require.Greater(t, hook.runs.Load(), int64(500))
	t.Logf("%d scripts ran twice, %d events", hook.runs.Load(), len(seen))
	report, err := audit.Run(ctx, connect(t, server.URL()), space, audit.Options{})
	require.NoError(t, err)
	require.Empty(t, report.Violations)
}
