package run_test

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"log/slog"
	"net"
	"net/http"
	"net/http/httptest"
	"os"
	"path/filepath"
	"runtime"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/stretchr/testify/require"
	"go.uber.org/goleak"

	"github.com/bulkaction/bulkaction/api"
	"github.com/bulkaction/bulkaction/client"
	"github.com/bulkaction/bulkaction/internal/testkit/childproc"
	"github.com/bulkaction/bulkaction/internal/testkit/redistest"
	"github.com/bulkaction/bulkaction/processor"
	"github.com/bulkaction/bulkaction/run"
)

const patience = 30 * time.Second

func TestMain(m *testing.M) { goleak.VerifyTestMain(m, redistest.IgnoreServers()) }

// start runs e in the background, until stop is called or the test ends.
func start(t *testing.T, e *run.Embedded) (stop func() error) {
	t.Helper()
	ctx, cancel := context.WithCancel(context.Background())
	done := make(chan error, 1)
	go func() { done <- e.Run(ctx) }()
	stop = sync.OnceValue(func() error {
		cancel()
		select {
		case err := <-done:
			return err
		case <-time.After(patience):
			return errors.New("Run does not end")
		}
	})
	t.Cleanup(func() { require.NoError(t, stop()) })
	return stop
}

// TestEmbedded: one Embedded has all roles, a second one only a worker. Both run jobs of a typed
// processor through middleware, and read nothing from the environment. The first one calls OnStart
// and OnStop.
func TestEmbedded(t *testing.T) {
	t.Setenv("BULKACTION_WORKER_COUNT", "nonsense")
	t.Setenv("BULKACTION_REDIS_URL", "nonsense")
	url, prefix := redistest.Shared(t)
	type in struct {
		N int `json:"n"`
	}
	double := client.Typed[in]("DOUBLE")
	var calls, running atomic.Int64
	both := make(chan struct{}) // closed when both workers run a job
	listening := make(chan string, 1)
	var order []string
	config := func() run.Config {
		return run.Config{
			RedisURL: url, Settings: map[string]string{"KEY_PREFIX": prefix, "API_ADDR": "127.0.0.1:0", "WORKER_COUNT": "2"},
			Logger: slog.New(slog.DiscardHandler), Listening: func(addr string) { listening <- addr },
			Middleware: []processor.Middleware{func(next processor.Handler) processor.Handler {
				first := sync.OnceFunc(func() {
					if running.Add(1) == 2 {
						close(both)
					}
				})
				return func(ctx context.Context, job processor.Job) (any, error) {
					calls.Add(1)
					first()
					return next(ctx, job)
				}
			}},
		}
	}
	proc := processor.Typed("DOUBLE", func(_ context.Context, job processor.Job, p in) (in, error) {
		<-both
		return in{2 * p.N}, nil
	})
	all := config()
	all.OnStart = func(context.Context) error { order = append(order, "start"); return nil }
	all.OnStop = func(ctx context.Context) error { order = append(order, "stop"); return ctx.Err() }
	stop := start(t, run.NewAll(all, proc))
	addr := <-listening
	start(t, run.NewWorker(config(), proc))

	a := client.NewAPI("http://" + addr)
	jobs := make([]client.NewJob, 200)
	for i := range jobs {
		jobs[i] = double(in{i})
	}
	ctx, cancel := context.WithTimeout(t.Context(), patience)
	defer cancel()
	_, err := a.Submit(ctx, client.Submission{
		ID: "g", Tenant: "acme", Type: "DOUBLE", Jobs: jobs, Seal: true,
		Aggregate: []client.Aggregate{{As: "sum", Op: "sum", Field: "data.n"}},
	})
	require.NoError(t, err)
	g, err := a.Wait(ctx, "g")
	require.NoError(t, err)
	require.Equal(t, api.StatusCompleted, g.Status)
	require.JSONEq(t, "39800", string(g.Aggregate["sum"]))
	require.EqualValues(t, 200, calls.Load())
	require.NoError(t, stop())
	require.Equal(t, []string{"start", "stop"}, order)
}

// TestKeysOfJobs: a job's key from its producer is in the job's result, or in its failure and its
// dead letter.
func TestKeysOfJobs(t *testing.T) {
	url, prefix := redistest.Parallel(t)
	listening := make(chan string, 1)
	proc := processor.Func("T", func(_ context.Context, job processor.Job) (any, error) {
		if job.Key == "ann@example.com" {
			return map[string]string{"seen": job.Key}, nil
		}
		return nil, processor.Permanent("BAD", errors.New("refused"))
	})
	start(t, run.NewAll(run.Config{
		RedisURL: url, Settings: map[string]string{"KEY_PREFIX": prefix, "API_ADDR": "127.0.0.1:0"},
		Logger: slog.New(slog.DiscardHandler), Listening: func(addr string) { listening <- addr },
	}, proc))
	a := client.NewAPI("http://" + <-listening)
	ctx, cancel := context.WithTimeout(t.Context(), patience)
	defer cancel()
	_, err := a.Submit(ctx, client.Submission{
		ID: "g", Type: "T", Seal: true, Jobs: []client.NewJob{{Payload: 1, Key: "ann@example.com"}, {Payload: 2, Key: "Bo \u2603"}, {Payload: 3}},
		Aggregate: []client.Aggregate{{As: "n", Op: "count"}},
	})
	require.NoError(t, err)
	g, err := a.Wait(ctx, "g")
	require.NoError(t, err)
	require.JSONEq(t, "1", string(g.Aggregate["n"]))
	for result, err := range a.Results(ctx, "g") {
		require.NoError(t, err)
		require.Equal(t, "ann@example.com", result.Key)
		require.JSONEq(t, `{"seen": "ann@example.com"}`, string(result.Data))
	}
	want := map[int64]string{1: "Bo \u2603", 2: ""}
	failed, dead := map[int64]string{}, map[int64]string{}
	for f, err := range a.Failures(ctx, "g") {
		require.NoError(t, err)
		failed[f.Ordinal] = f.Key
	}
	require.Equal(t, want, failed)
	for d, err := range a.DeadLetters(ctx, client.DeadLetterFilter{}) {
		require.NoError(t, err)
		dead[d.Ordinal] = d.Key
	}
	require.Equal(t, want, dead)
	job, err := a.Job(ctx, "g", 1)
	require.NoError(t, err)
	require.Equal(t, "Bo \u2603", job.Key)
}

// TestAddressOfTheAPIIsTaken: the error names the setting, because Run reads no environment.
func TestAddressOfTheAPIIsTaken(t *testing.T) {
	url, prefix := redistest.Parallel(t)
	taken, err := net.Listen("tcp", "127.0.0.1:0")
	require.NoError(t, err)
	t.Cleanup(func() { _ = taken.Close() })
	ctx, cancel := context.WithTimeout(t.Context(), patience)
	defer cancel()
	err = run.NewAll(run.Config{
		RedisURL: url, Settings: map[string]string{"KEY_PREFIX": prefix, "API_ADDR": taken.Addr().String()},
		Logger: slog.New(slog.DiscardHandler),
	}).Run(ctx)
	require.ErrorContains(t, err, "set API_ADDR in Settings to another address")
}

func TestMistakes(t *testing.T) {
	url, prefix := redistest.Parallel(t)
	settings := func(name, value string) map[string]string {
		return map[string]string{"KEY_PREFIX": prefix, "API_ADDR": "127.0.0.1:0", name: value}
	}
	proc := processor.Func("T", func(context.Context, processor.Job) (any, error) { return nil, nil })
	taken, err := net.Listen("tcp", "127.0.0.1:0")
	require.NoError(t, err)
	t.Cleanup(func() { _ = taken.Close() })
	hook := errors.New("the database is away")
	for name, test := range map[string]struct {
		config run.Config
		says   string
	}{
		"wrong value":  {run.Config{Settings: settings("WORKER_COUNT", "ten")}, `BULKACTION_WORKER_COUNT="ten": must be`},
		"unknown":      {run.Config{Settings: settings("WORKER_CONT", "10")}, "did you mean BULKACTION_WORKER_COUNT?"},
		"no processor": {run.Config{RedisURL: url, Settings: settings("WORKER_TYPES", "OTHER")}, "OTHER"},
		"admin address is taken": {
			run.Config{RedisURL: url, Settings: settings("ADMIN_ADDR", taken.Addr().String())}, "ADMIN_ADDR",
		},
		"hook": {
			run.Config{RedisURL: url, Settings: settings("WORKER_COUNT", "1"), OnStart: func(context.Context) error { return hook }},
			hook.Error(),
		},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			test.config.Logger = slog.New(slog.DiscardHandler)
			ctx, cancel := context.WithTimeout(t.Context(), patience)
			defer cancel()
			err := run.NewWorker(test.config, proc).Run(ctx)
			require.ErrorContains(t, err, test.says)
			require.NoError(t, ctx.Err())
		})
	}
}

type brokenError struct{ text string }

func (e *brokenError) Error() string { return e.text } // panics if e is nil

type nameless struct{ processor.Processor } // its Type panics

// TestCodeOfTheProgramIsGuarded: a hook, a processor or middleware that is nil, that panics, whose
// error panics or that ends its goroutine makes Run return an error, and the log has the place. The
// other clean-ups run.
func TestCodeOfTheProgramIsGuarded(t *testing.T) {
	t.Parallel()
	url, prefix := redistest.Shared(t)
	proc := processor.Func("T", func(context.Context, processor.Job) (any, error) { return nil, nil })
	hook := func(f func()) func(context.Context) error {
		return func(context.Context) error { f(); return nil }
	}
	panics := func() { panic("at this place") }
	nilError := func(context.Context) error {
		var e *brokenError
		return e
	}
	var none *nameless
	for name, test := range map[string]struct {
		config run.Config
		proc   processor.Processor
		says   string
		log    string
	}{
		"nil processor":         {run.Config{}, nil, "processor 0 is nil (<nil>)", ""},
		"nil function":          {run.Config{}, processor.Func("T", nil), "processor 0 is nil", ""},
		"nil typed function":    {run.Config{}, processor.Typed[int, any]("T", nil), "processor 0 is nil", ""},
		"nil pointer":           {run.Config{}, none, "processor 0 is nil (*run_test.nameless)", ""},
		"processor":             {run.Config{}, nameless{}, "processor 0 (run_test.nameless) or its middleware panicked", "nameless"},
		"built-in ones count 0": {run.Config{BuiltIn: true}, nil, "processor 0 is nil", ""},
		"nil middleware":        {run.Config{Middleware: []processor.Middleware{nil}}, proc, "middleware 0 is nil", ""},
		"middleware": {run.Config{Middleware: []processor.Middleware{func(processor.Handler) processor.Handler {
			panic("at this place")
		}}}, proc, "processor 0 (processor.funcProcessor) or its middleware panicked", "at this place"},
		"OnStart panics":     {run.Config{OnStart: hook(panics)}, proc, "OnStart panicked: see `code of the program panicked` in the log", "run_test.go"},
		"error of OnStart":   {run.Config{OnStart: nilError}, proc, "OnStart panicked", "brokenError"},
		"OnStart never ends": {run.Config{OnStart: hook(runtime.Goexit)}, proc, "OnStart ended its goroutine", ""},
		"OnStop panics":      {run.Config{OnStop: hook(panics)}, proc, "OnStop panicked", "at this place"},
		"error of OnStop":    {run.Config{OnStop: nilError}, proc, "OnStop panicked", "brokenError"},
		"OnStop never ends":  {run.Config{OnStop: hook(runtime.Goexit)}, proc, "OnStop ended its goroutine", ""},
		"Listening":          {run.Config{Listening: func(string) { panics() }}, proc, "Listening panicked", "run_test.go"},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			var log strings.Builder
			var mu sync.Mutex
			c := test.config
			c.RedisURL, c.Settings = url, map[string]string{"KEY_PREFIX": prefix, "API_ADDR": "127.0.0.1:0"}
			c.Logger = slog.New(slog.NewTextHandler(lockedWriter{&mu, &log}, nil))
			ctx, cancel := context.WithTimeout(t.Context(), patience)
			defer cancel()
			if c.OnStop != nil {
				c.Listening = func(string) { cancel() } // now Run stops
			}
			err := run.NewAll(c, test.proc).Run(ctx)
			require.ErrorContains(t, err, test.says)
			require.NotErrorIs(t, ctx.Err(), context.DeadlineExceeded)
			mu.Lock()
			defer mu.Unlock()
			require.Contains(t, log.String(), test.log)
		})
	}
}

// TestDeadlineOfRun: a deadline only says when to stop. Nothing in the log says that Redis is away.
func TestDeadlineOfRun(t *testing.T) {
	t.Parallel()
	url, prefix := redistest.Shared(t)
	var log strings.Builder
	var mu sync.Mutex
	ctx, cancel := context.WithTimeout(t.Context(), 2*time.Second)
	defer cancel()
	require.NoError(t, run.NewAll(run.Config{
		RedisURL: url, Settings: map[string]string{"KEY_PREFIX": prefix, "API_ADDR": "127.0.0.1:0"},
		Logger: slog.New(slog.NewTextHandler(lockedWriter{&mu, &log}, &slog.HandlerOptions{Level: slog.LevelWarn})),
	}, processor.Func("T", func(context.Context, processor.Job) (any, error) { return nil, nil })).Run(ctx))
	require.ErrorIs(t, ctx.Err(), context.DeadlineExceeded)
	require.NotContains(t, log.String(), "redis_unavailable")
	require.NotContains(t, log.String(), "level=ERROR")
}

// TestHandlersOfHTTPJobs: a type of the credentials file has its URL there. Code and text of the
// handler's answer are those of the failure and of the aggregate, and the handler knows the job.
func TestHandlersOfHTTPJobs(t *testing.T) {
	t.Parallel()
	url, prefix := redistest.Shared(t)
	handler := httptest.NewServer(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		body, _ := io.ReadAll(r.Body)
		w.WriteHeader(http.StatusUnprocessableEntity)
		_, _ = fmt.Fprintf(w, `{"code": "NO_CUSTOMER", "message": "%s has no %s"}`, r.Header.Get("Bulkaction-Tenant"), body)
	}))
	t.Cleanup(handler.Close)
	file := filepath.Join(t.TempDir(), "http.yaml")
	require.NoError(t, os.WriteFile(file, []byte("types: {ORDERS: {url: "+handler.URL+"}}"), 0o600))
	listening := make(chan string, 1)
	start(t, run.NewAll(run.Config{
		RedisURL: url, BuiltIn: true, Logger: slog.New(slog.DiscardHandler), Listening: func(addr string) { listening <- addr },
		Settings: map[string]string{
			"KEY_PREFIX": prefix, "API_ADDR": "127.0.0.1:0", "HTTP_PROCESSOR_CREDENTIALS_FILE": file,
			"HTTP_PROCESSOR_ALLOWED_CIDRS": "127.0.0.0/8",
		},
	}))
	a := client.NewAPI("http://" + <-listening)
	ctx, cancel := context.WithTimeout(t.Context(), patience)
	defer cancel()
	_, err := a.Submit(ctx, client.Submission{
		ID: "g", Tenant: "acme", Type: "ORDERS", Seal: true, Jobs: []client.NewJob{{Payload: 7}},
		Aggregate: []client.Aggregate{{As: "codes", Op: "count_by", Field: "data.code", Over: "failed"}},
	})
	require.NoError(t, err)
	g, err := a.Wait(ctx, "g")
	require.NoError(t, err)
	require.JSONEq(t, `{"NO_CUSTOMER": 1}`, string(g.Aggregate["codes"]))
	for f, err := range a.Failures(ctx, "g") {
		require.NoError(t, err)
		require.Equal(t, "NO_CUSTOMER", f.Code)
		require.Equal(t, "call 127.0.0.1: status 422 Unprocessable Entity: acme has no 7", f.Error)
	}
}

// TestBatchesOfHTTPJobs: jobs of HTTP_BATCH share requests. The handler refuses each request with a
// poison item, which alone fails.
func TestBatchesOfHTTPJobs(t *testing.T) {
	t.Parallel()
	url, prefix := redistest.Shared(t)
	var largest atomic.Int64
	handler := httptest.NewServer(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		var items []struct {
			ID   string
			Body string
		}
		_ = json.NewDecoder(r.Body).Decode(&items)
		largest.Store(max(largest.Load(), int64(len(items))))
		outcomes := make([]map[string]string, len(items))
		for i, item := range items {
			if outcomes[i] = map[string]string{"result": item.ID}; item.Body == "poison" {
				w.WriteHeader(http.StatusUnprocessableEntity)
				_, _ = io.WriteString(w, `{"code": "POISON"}`)
				return
			}
		}
		_ = json.NewEncoder(w).Encode(outcomes)
	}))
	t.Cleanup(handler.Close)
	listening := make(chan string, 1)
	start(t, run.NewAll(run.Config{
		RedisURL: url, BuiltIn: true, Logger: slog.New(slog.DiscardHandler), Listening: func(addr string) { listening <- addr },
		Settings: map[string]string{
			"KEY_PREFIX": prefix, "API_ADDR": "127.0.0.1:0", "HTTP_PROCESSOR_ALLOWED_CIDRS": "127.0.0.0/8",
			"HTTP_PROCESSOR_BATCH_SIZE": "20", "HTTP_PROCESSOR_BATCH_WAIT": "200ms", "BACKPRESSURE_DEFAULT_BACKOFF": "10ms",
			"CONGESTION_BASE_BACKOFF": "10ms", "MAX_RETRY_COUNT": "0",
		},
	}))
	a := client.NewAPI("http://" + <-listening)
	ctx, cancel := context.WithTimeout(t.Context(), patience)
	defer cancel()
	submission := client.Submission{ID: "g", Tenant: "acme", Type: "HTTP_BATCH", Seal: true}
	for i := range 50 {
		body := "good"
		if i == 7 {
			body = "poison"
		}
		submission.Jobs = append(submission.Jobs, client.NewJob{Payload: map[string]string{"url": handler.URL, "body": body}})
	}
	_, err := a.Submit(ctx, submission)
	require.NoError(t, err)
	g, err := a.Wait(ctx, "g")
	require.NoError(t, err)
	require.EqualValues(t, 49, g.Counts.Done)
	require.Greater(t, largest.Load(), int64(1))
	for f, err := range a.Failures(ctx, "g") {
		require.NoError(t, err)
		require.Equal(t, int64(7), f.Ordinal)
		require.Equal(t, "POISON", f.Code)
	}
	for r, err := range a.Results(ctx, "g") {
		require.NoError(t, err)
		require.JSONEq(t, fmt.Sprintf(`"g.%d"`, r.Ordinal), string(r.Data))
	}
}

// TestRedisIsAway: Run of a worker, at an address where nothing listens, logs that it waits for
// Redis. When ctx ends, Run returns no error. A setting without effect is named at the start.
func TestRedisIsAway(t *testing.T) {
	t.Parallel()
	var log strings.Builder
	var mu sync.Mutex
	logger := slog.New(slog.NewTextHandler(lockedWriter{&mu, &log}, nil))
	proc := processor.Func("T", func(context.Context, processor.Job) (any, error) { return nil, nil })
	stop := start(t, run.NewWorker(run.Config{
		RedisURL: "redis://" + childproc.FreeAddr(), Logger: logger, Settings: map[string]string{"WORKER_TIMEOUT": "1001ms"},
	}, proc))
	require.Eventually(t, func() bool {
		mu.Lock()
		defer mu.Unlock()
		return strings.Contains(log.String(), "waiting for it") && strings.Contains(log.String(), "address_set_by=RedisURL")
	}, patience, 10*time.Millisecond)
	require.NoError(t, stop())
	require.Equal(t, 1, strings.Count(log.String(), "BULKACTION_WORKER_TIMEOUT is longer than one read may block"))
	require.Contains(t, log.String(), "timeout=1.001s longest=1s")
}

type lockedWriter struct {
	mu *sync.Mutex
	w  *strings.Builder
}

func (l lockedWriter) Write(p []byte) (int, error) {
	l.mu.Lock()
	defer l.mu.Unlock()
	return l.w.Write(p)
}
