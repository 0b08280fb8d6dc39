package bulktest_test

import (
	"context"
	"encoding/json"
	"errors"
	"io"
	"net/http"
	"net/http/httptest"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/redis/go-redis/v9"
	"github.com/stretchr/testify/require"
	"go.uber.org/goleak"

	"github.com/bulkaction/bulkaction/api"
	"github.com/bulkaction/bulkaction/bulktest"
	"github.com/bulkaction/bulkaction/client"
	"github.com/bulkaction/bulkaction/client/producer"
	"github.com/bulkaction/bulkaction/guard"
	"github.com/bulkaction/bulkaction/processor"
	"github.com/bulkaction/bulkaction/run"
)

type number struct {
	N int `json:"n"`
}

var newNumber = client.Typed[number]("NUMBER")

func numbers(n int) []client.NewJob {
	jobs := make([]client.NewJob, n)
	for i := range jobs {
		jobs[i] = newNumber(number{i})
	}
	return jobs
}

// minute has settings with which each retry waits for about a minute.
var minute = map[string]string{"BACKPRESSURE_DEFAULT_BACKOFF": "60s", "BACKPRESSURE_MAX_BACKOFF": "60s"}

var sum = []client.Aggregate{{As: "sum", Op: "sum", Field: "data.n"}}

// TestBackoffsPass: each of 30 jobs fails twice, waits for two backoffs of the bubble's clock, and
// succeeds. Its result counts once.
func TestBackoffsPass(t *testing.T) {
	t.Parallel()
	echo := processor.Typed("NUMBER", func(_ context.Context, job processor.Job, p number) (number, error) {
		if job.Retries < 2 {
			return number{}, errors.New("not yet")
		}
		return p, nil
	})
	bulktest.Run(t, run.Config{Settings: minute}, []processor.Processor{echo}, func(t *testing.T, s *bulktest.System) {
		began := time.Now()
		g := s.Submit(client.Submission{ID: "g", Type: "NUMBER", Jobs: numbers(30), Aggregate: sum})
		require.Equal(t, api.StatusCompleted, g.Status)
		require.JSONEq(t, "435", string(g.Aggregate["sum"]))
		require.EqualValues(t, 60, g.Retries)
		require.Len(t, g.Results, 30)
		require.Equal(t, 3, g.Results[7].Attempts)
		require.Empty(t, g.Failures)
		took := time.Since(began)
		require.GreaterOrEqual(t, took, 2*54*time.Second)
		require.LessOrEqual(t, took, 3*time.Minute)
	})
}

// TestTomorrow: a group with a start time waits for it, and the clock jumps there. The hooks of
// run.Config are called only once, although the roles stop and start again meanwhile.
func TestTomorrow(t *testing.T) {
	t.Parallel()
	var hooks []string
	c := run.Config{
		OnStart: func(context.Context) error { hooks = append(hooks, "start"); return nil },
		OnStop:  func(context.Context) error { hooks = append(hooks, "stop"); return nil },
	}
	var startedAt time.Time
	proc := processor.Func("NUMBER", func(context.Context, processor.Job) (any, error) { startedAt = time.Now(); return nil, nil })
	bulktest.Run(t, c, []processor.Processor{proc}, func(t *testing.T, s *bulktest.System) {
		at := time.Now().Add(24 * time.Hour)
		_, err := s.API.Submit(t.Context(), client.Submission{ID: "g", Type: "NUMBER", Jobs: numbers(1), RunAt: &at, Seal: true})
		require.NoError(t, err)
		s.Sleep(23 * time.Hour)
		g, err := s.API.Group(t.Context(), "g")
		require.NoError(t, err)
		require.EqualValues(t, 1, g.Counts.Waiting+g.Counts.NonReady)
		require.EqualValues(t, 1, s.Wait("g").Counts.Done)
		require.False(t, startedAt.Before(at))
		require.Less(t, startedAt.Sub(at), 10*time.Second)
	})
	require.Equal(t, []string{"start", "stop"}, hooks)
}

// TestDecisions: jobs succeed after a deferral, a throttle and a panic, whose waits the clock
// skips. A permanent error and repeated timeouts fail jobs, each with its error code.
func TestDecisions(t *testing.T) {
	t.Parallel()
	var mu sync.Mutex
	deferred := map[int64]bool{}
	proc := processor.Typed("NUMBER", func(ctx context.Context, job processor.Job, p number) (any, error) {
		mu.Lock()
		defer mu.Unlock()
		switch {
		case p.N == 0:
			return nil, processor.Permanent("BAD", errors.New("refused"))
		case p.N == 1 && !deferred[job.Ordinal]:
			deferred[job.Ordinal] = true
			return nil, processor.Deferred(time.Hour, "no account")
		case p.N == 2 && !deferred[job.Ordinal]:
			deferred[job.Ordinal] = true
			return nil, processor.Throttled(2*time.Hour, nil)
		case p.N == 3 && job.Retries == 0:
			panic("on purpose")
		}
		return nil, nil
	})
	slow := processor.Func("SLOW", func(ctx context.Context, _ processor.Job) (any, error) {
		<-ctx.Done()
		return nil, ctx.Err()
	})
	c := run.Config{Settings: map[string]string{"JOB_TIMEOUTS": "SLOW=3s"}}
	bulktest.Run(t, c, []processor.Processor{proc, slow}, func(t *testing.T, s *bulktest.System) {
		g := s.Submit(client.Submission{ID: "g", Type: "NUMBER", Jobs: append(numbers(4), client.NewJob{Type: "SLOW", Payload: 1})})
		require.EqualValues(t, 3, g.Counts.Done)
		require.Equal(t, map[string]int64{"BAD": 1, processor.CodeTimeout: 1}, g.FailuresByCode)
		require.Equal(t, "refused", g.Failures[0].Error)
		require.Equal(t, 4, g.Failures[4].Attempts)
	})
}

// TestRateLimit: rate limits use the bubble's clock too. 10 jobs at 2 a second take at least 4
// seconds of it.
func TestRateLimit(t *testing.T) {
	t.Parallel()
	proc := processor.Func("NUMBER", func(context.Context, processor.Job) (any, error) { return nil, nil })
	bulktest.Run(t, run.Config{}, []processor.Processor{proc}, func(t *testing.T, s *bulktest.System) {
		rps := 2.0
		_, err := s.API.SetTenant(t.Context(), "acme", api.TenantSettings{RPS: &rps})
		require.NoError(t, err)
		began := time.Now()
		g := s.Submit(client.Submission{ID: "g", Tenant: "acme", Type: "NUMBER", Jobs: numbers(10)})
		require.EqualValues(t, 10, g.Counts.Done)
		require.GreaterOrEqual(t, time.Since(began), 4*time.Second)
		require.LessOrEqual(t, time.Since(began), time.Minute)
	})
}

// TestProducerAndGuard: package producer publishes a group through the embedded Redis. A client
// with DialRedis gets 1000 answers of 1 KiB in one pipeline, and a guard.Client with it limits and
// locks.
func TestProducerAndGuard(t *testing.T) {
	t.Parallel()
	proc := processor.Typed("NUMBER", func(_ context.Context, _ processor.Job, p number) (number, error) { return p, nil })
	bulktest.Run(t, run.Config{}, []processor.Processor{proc}, func(t *testing.T, s *bulktest.System) {
		p, err := producer.New(t.Context(), s.RedisURL)
		require.NoError(t, err)
		defer func() { require.NoError(t, p.Close()) }()
		id, err := p.Submit(t.Context(), client.Submission{Type: "NUMBER", Jobs: numbers(1200), Seal: true, Aggregate: sum})
		require.NoError(t, err)
		g := s.Wait(id)
		require.JSONEq(t, "719400", string(g.Aggregate["sum"]))
		require.Len(t, g.Results, 1200)

		rdb := redis.NewClient(&redis.Options{Dialer: s.DialRedis, Protocol: 2, DisableIdentity: true})
		defer func() { require.NoError(t, rdb.Close()) }()
		text := strings.Repeat("x", 1<<10)
		echoes, err := rdb.Pipelined(t.Context(), func(p redis.Pipeliner) error { // larger than all buffers on the way
			for range 1000 {
				p.Echo(t.Context(), text)
			}
			return nil
		})
		require.NoError(t, err)
		require.Equal(t, text, echoes[999].(*redis.StringCmd).Val())
		guards := guard.New(rdb)
		limiter := guards.Limiter("l", guard.PerWindow(1, time.Minute))
		for _, allowed := range []bool{true, false} {
			d, err := limiter.Take(t.Context(), "k", 1)
			require.NoError(t, err)
			require.Equal(t, allowed, d.Allowed)
		}
		l, err := guards.Lock("x").Lock(t.Context())
		require.NoError(t, err)
		_, err = guards.Lock("x").TryLock(t.Context())
		require.ErrorIs(t, err, guard.ErrDenied)
		require.NoError(t, l.Release(t.Context(), guard.Neutral))
		require.NoError(t, guards.Close(t.Context()))
	})
}

// TestNamesInTwoBubbles: names may be looked up in several bubbles of one program. A client of
// go-redis looks up the name of its server at its start.
func TestNamesInTwoBubbles(t *testing.T) {
	proc := processor.Typed("NUMBER", func(_ context.Context, _ processor.Job, p number) (number, error) { return p, nil })
	for range 2 {
		bulktest.Run(t, run.Config{}, []processor.Processor{proc}, func(t *testing.T, s *bulktest.System) {
			rdb := redis.NewClient(&redis.Options{Addr: "localhost:1", Dialer: s.DialRedis, Protocol: 2, DisableIdentity: true})
			require.NoError(t, rdb.Ping(t.Context()).Err())
			require.NoError(t, rdb.Close())
		})
	}
}

// TestNetwork: a processor may use the network.
func TestNetwork(t *testing.T) {
	t.Parallel()
	server := httptest.NewServer(http.HandlerFunc(func(w http.ResponseWriter, _ *http.Request) {
		_, _ = w.Write([]byte(`"answer"`))
	}))
	t.Cleanup(server.Close)
	downstream := &http.Client{Transport: &http.Transport{DisableKeepAlives: true}}
	proc := processor.Func("NUMBER", func(ctx context.Context, _ processor.Job) (any, error) {
		req, err := http.NewRequestWithContext(ctx, http.MethodGet, server.URL, http.NoBody)
		if err != nil {
			return nil, err
		}
		resp, err := downstream.Do(req)
		if err != nil {
			return nil, err
		}
		defer resp.Body.Close()
		b, err := io.ReadAll(resp.Body)
		return json.RawMessage(b), err
	})
	bulktest.Run(t, run.Config{}, []processor.Processor{proc}, func(t *testing.T, s *bulktest.System) {
		g := s.Submit(client.Submission{ID: "g", Type: "NUMBER", Jobs: numbers(1)})
		require.Equal(t, json.RawMessage(`"answer"`), g.Results[0].Data)
		require.Equal(t, 1, g.Results[0].Attempts)
	})
}

// TestMiddleware: Run and Attempt call a middleware, which doubles the result 1 to 2.
func TestMiddleware(t *testing.T) {
	t.Parallel()
	proc := processor.Func("NUMBER", func(context.Context, processor.Job) (any, error) { return 1, nil })
	double := func(next processor.Handler) processor.Handler {
		return func(ctx context.Context, job processor.Job) (any, error) {
			v, err := next(ctx, job)
			return 2 * v.(int), err
		}
	}
	c := run.Config{Middleware: []processor.Middleware{double}}
	bulktest.Run(t, c, []processor.Processor{proc}, func(t *testing.T, s *bulktest.System) {
		g := s.Submit(client.Submission{ID: "g", Type: "NUMBER", Jobs: numbers(1)})
		require.Equal(t, json.RawMessage("2"), g.Results[0].Data)
	})
	require.Equal(t, json.RawMessage("2"), bulktest.Attempt(t, c, proc, processor.Job{Payload: bulktest.JSON(t, 1)}).Result)
}

func TestMain(m *testing.M) { goleak.VerifyTestMain(m) }
