// Package integration tests the system from outside, as producers and operators see it. A test
// runs all roles for jobs in one process, or each in a process of its own, on a private
// redis-server; see start.
package integration

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"maps"
	"net/http"
	"os"
	"slices"
	"strconv"
	"strings"
	"syscall"
	"testing"
	"time"

	"github.com/redis/go-redis/v9"
	"github.com/stretchr/testify/require"

	"github.com/bulkaction/bulkaction/api"
	"github.com/bulkaction/bulkaction/client"
	"github.com/bulkaction/bulkaction/internal/audit"
	"github.com/bulkaction/bulkaction/internal/redisx"
	"github.com/bulkaction/bulkaction/internal/redisx/keyspace"
	"github.com/bulkaction/bulkaction/internal/testkit/proctest"
	"github.com/bulkaction/bulkaction/internal/testkit/redistest"
)

func TestMain(m *testing.M) {
	if store := os.Getenv(storeEnv); store != "" { // a child process of TestSuspendedHolder
		if err := holdLock(os.Getenv(storeRedisEnv), store); err != nil {
			fmt.Fprintln(os.Stderr, err)
			os.Exit(1)
		}
		os.Exit(0)
	}
	os.Exit(proctest.Run(m, "./cmd/bulkaction", "./tests/testworker", "./examples/credential-pool", "./examples/custom-processor",
		"./examples/custom-reducer", "./examples/embedded", "./examples/protected-shop"))
}

// roles are the names of the roles for jobs, in the order of the pipeline.
var roles = []string{"ingest", "fetcher", "dispatcher", "worker", "aggregator", "watcher"}

// patience is how long a test waits for an event. It allows for a busy machine.
const patience = 60 * time.Second

// system is an installation: a Redis and the processes that use it. Its methods fail the test on
// errors. When a test has succeeded, the data is audited; then the processes are stopped.
type system struct {
	t     testing.TB
	redis *redistest.Redis // nil if the test started its own
	rdb   redis.UniversalClient
	space keyspace.Space
	env   map[string]string
	procs map[string][]*proctest.Process // by role; a process with all roles is in procs["all"]
	bins  map[string]string              // by role: its binary, if that is not bulkaction

	api *client.API // client of the first process with an API; nil if there is none
}

// setup is changed by a test's options before start uses it.
type setup struct {
	replicas map[string]int // number of processes of a role; 1 if absent
	apart    bool           // each role is a process of its own
	env      map[string]string
	redis    []redistest.Option
	url      string
	binaries map[string]string // by role: its binary, if that is not bulkaction
}

type option func(*setup)

// apart is an option of start: each role is a process of its own, with the Redis user of the role.
func apart(o *setup) { o.apart = true }

// replicas is an option of start: n processes have the role, not one. 0 includes apart.
func replicas(role string, n int) option {
	return func(o *setup) { o.replicas[role], o.apart = n, o.apart || n == 0 }
}

// binary is an option of start, and includes apart: the role is run by the program `name`, not by
// bulkaction.
func binary(role, name string) option {
	return func(o *setup) { o.binaries[role], o.apart = name, true }
}

// env is an option of start: it sets an environment variable of all processes. name is without the
// prefix BULKACTION_, unless it is a variable of OpenTelemetry.
func env(name, value string) option { return func(o *setup) { o.env[variable(name)] = value } }

// onRedis is an option of start: its redis-server gets these options.
func onRedis(opts ...redistest.Option) option {
	return func(o *setup) { o.redis = append(o.redis, opts...) }
}

// onURL is an option of start: the system uses a Redis that the test has started itself, with the
// users of proctest.Users.
func onURL(url string) option { return func(o *setup) { o.url = url } }

func variable(name string) string {
	if strings.HasPrefix(name, "OTEL_") {
		return name
	}
	return "BULKACTION_" + name
}

// start starts a Redis and a process with all roles, or with the option apart one process of each
// role, and waits until all are ready.
func start(t testing.TB, opts ...option) *system {
	t.Helper()
	o := setup{replicas: map[string]int{}, binaries: map[string]string{}, env: map[string]string{
		"BULKACTION_WORKER_TYPES":        "NOOP",
		"BULKACTION_REDIS_POOL_MIN_IDLE": "1",
	}}
	for _, opt := range opts {
		opt(&o)
	}
	partitions := 1
	if n := o.env["BULKACTION_PARTITIONS"]; n != "" {
		var err error
		partitions, err = strconv.Atoi(n)
		require.NoError(t, err)
	}
	space, err := keyspace.New("bulk-action:", partitions)
	require.NoError(t, err)
	s := &system{t: t, space: space, env: o.env, bins: o.binaries, procs: map[string][]*proctest.Process{}}
	if o.url == "" {
		s.redis = redistest.Server(t, append(o.redis, proctest.Users(t))...)
		o.url = s.redis.URL()
	}
	s.rdb = connect(t, o.url).Cmd
	s.env["BULKACTION_REDIS_URL"] = o.url
	if !o.apart {
		s.launch(allRoles, nil)
	}
	for _, role := range roles {
		n, ok := o.replicas[role]
		if !ok {
			n = 1
		}
		if !o.apart {
			n-- // one has all roles
		}
		for range n {
			s.launch(role, nil)
		}
	}
	for _, procs := range s.procs {
		for _, p := range procs {
			p.WaitReady()
		}
	}
	if len(s.of("ingest")) > 0 {
		s.api = client.NewAPI(s.url(0))
	}
	t.Cleanup(func() {
		if !t.Failed() {
			s.audit()
			s.requireNoDenial()
		}
	})
	return s
}

func connect(t testing.TB, url string) *redisx.Conn {
	t.Helper()
	conn, err := redisx.Connect(context.WithoutCancel(t.Context()), redisx.Config{URL: url, DialTimeout: time.Second, CommandTimeout: 3 * time.Second})
	require.NoError(t, err)
	t.Cleanup(func() { _ = conn.Close() })
	return conn
}

// ctx returns the test's context without its cancellation, because clean-ups use it too.
func (s *system) ctx() context.Context { return context.WithoutCancel(s.t.Context()) }

// allRoles is the command, and the Redis user, of a process with all roles.
const allRoles = "all"

// launch starts one more process of a role, or of allRoles, as the Redis user of that role, with
// additional variables (full names). It does not wait until the process is ready.
func (s *system) launch(role string, more map[string]string) *proctest.Process {
	s.t.Helper()
	environ := maps.Clone(s.env)
	environ["BULKACTION_REDIS_URL"] = proctest.AsUser(role, environ["BULKACTION_REDIS_URL"])
	maps.Copy(environ, more)
	name, args := "bulkaction", []string{role}
	if own, ok := s.bins[role]; ok {
		name, args = own, nil
	}
	p := proctest.Start(s.t, name, environ, args...)
	s.procs[role] = append(s.procs[role], p)
	return p
}

// add starts one more process of a role and waits until it is ready.
func (s *system) add(role string) *proctest.Process {
	s.t.Helper()
	p := s.launch(role, nil)
	p.WaitReady()
	return p
}

// of returns the processes that have a role: the one with all roles first.
func (s *system) of(role string) []*proctest.Process {
	return slices.Concat(s.procs[allRoles], s.procs[role])
}

func (s *system) proc(role string, i int) *proctest.Process {
	s.t.Helper()
	procs := s.of(role)
	require.Greater(s.t, len(procs), i)
	return procs[i]
}

// stop stops a process with SIGTERM; the exit code must be 0.
func (s *system) stop(p *proctest.Process) {
	s.t.Helper()
	p.Signal(syscall.SIGTERM)
	require.Equal(s.t, 0, p.Wait(patience), "exit code")
}

// stopAll stops all processes at the same time with SIGTERM and waits for their end. They have then
// written and sent all that they had buffered. s.procs is empty afterwards.
func (s *system) stopAll() {
	s.t.Helper()
	for _, procs := range s.procs {
		for _, p := range procs {
			if p.Running() {
				p.Signal(syscall.SIGTERM)
			}
		}
	}
	for role, procs := range s.procs {
		for _, p := range procs {
			require.Equal(s.t, 0, p.Wait(patience), "exit code of %s", role)
		}
	}
	s.procs = map[string][]*proctest.Process{}
}

// url returns the base URL of the i-th ingest's API.
func (s *system) url(i int) string { s.t.Helper(); return "http://" + s.proc("ingest", i).APIAddr() }

// submit creates a group over HTTP, through the first ingest, and returns its id.
func (s *system) submit(g client.Submission) string {
	s.t.Helper()
	accepted, err := s.api.Submit(s.ctx(), g)
	require.NoError(s.t, err)
	return accepted.ID
}

// group returns a group, as the first ingest shows it.
func (s *system) group(id string) api.Group {
	s.t.Helper()
	g, err := s.api.Group(s.ctx(), id)
	require.NoError(s.t, err)
	return g
}

// jobs returns n NOOP jobs with the same payload.
func jobs(n int, payload string) []client.NewJob {
	return slices.Repeat([]client.NewJob{{Payload: json.RawMessage(payload)}}, n)
}

// wait waits until a group has ended its first round, and returns the group as its event in the
// stream `events` shows it.
func (s *system) wait(group string) api.Group { s.t.Helper(); return s.waitRound(group, 1) }

func (s *system) waitRound(group string, round int) api.Group {
	s.t.Helper()
	e := s.event("group "+group+" ends", func(e api.Event) bool {
		return e.Group != nil && e.Group.ID == group && e.Group.Round == round && e.Group.Status.Ended()
	})
	return *e.Group
}

// event waits for an event in the stream `events` for which the function `is` returns true, and
// returns the event. It may have been published before the call. `what` names it in errors.
func (s *system) event(what string, is func(api.Event) bool) api.Event {
	s.t.Helper()
	var found api.Event
	s.follow(s.space.Events(), what, func(m redis.XMessage) bool {
		require.NoError(s.t, json.Unmarshal([]byte(m.Values["data"].(string)), &found))
		return is(found)
	})
	return found
}

// follow calls the function done with each entry of a stream, from its beginning, until done
// returns true. The test fails after patience.
func (s *system) follow(stream, what string, done func(redis.XMessage) bool) {
	s.t.Helper()
	ctx, cancel := context.WithTimeout(s.ctx(), patience)
	defer cancel()
	for last := "0"; ; {
		found, err := s.rdb.XRead(ctx, &redis.XReadArgs{Streams: []string{stream, last}, Count: 1000, Block: time.Second}).Result()
		if ctx.Err() != nil {
			require.Fail(s.t, "await "+what, "nothing of it on %s after %s", stream, patience)
		}
		if err != nil && !errors.Is(err, redis.Nil) {
			_ = redisx.Sleep(ctx, 20*time.Millisecond) // some tests stop Redis
			continue
		}
		for _, st := range found {
			for _, m := range st.Messages {
				last = m.ID
				if done(m) {
					return
				}
			}
		}
	}
}

// await calls ok repeatedly until it returns true; the test fails after patience. Use it only where
// no event can be waited for.
func (s *system) await(what string, ok func() bool) {
	s.t.Helper()
	expired := time.After(patience)
	tick := time.NewTicker(10 * time.Millisecond)
	defer tick.Stop()
	for !ok() {
		select {
		case <-tick.C:
		case <-expired:
			require.Fail(s.t, "await "+what, "not so after %s", patience)
		}
	}
}

// awaitCounts waits until the function ok returns true for the counts of a group, and returns these
// counts.
func (s *system) awaitCounts(group, what string, ok func(api.Counts) bool) api.Counts {
	s.t.Helper()
	var c api.Counts
	s.await("group "+group+": "+what, func() bool { c = s.group(group).Counts; return ok(c) })
	return c
}

// response is the answer to an HTTP request.
type response struct {
	status int
	body   []byte
	err    error
}

// do makes one HTTP request; header contains pairs of name and value. Any goroutine may call it.
func do(method, url, body string, header ...string) (r response) {
	req, err := http.NewRequest(method, url, strings.NewReader(body))
	if err != nil {
		return response{err: err}
	}
	if body != "" {
		req.Header.Set("Content-Type", "application/json")
	}
	for i := 0; i < len(header); i += 2 {
		req.Header.Set(header[i], header[i+1])
	}
	resp, err := http.DefaultClient.Do(req)
	if err != nil {
		return response{err: err}
	}
	defer resp.Body.Close()
	r.status = resp.StatusCode
	r.body, r.err = io.ReadAll(resp.Body)
	return r
}

// call makes an HTTP request that must get an answer, and returns its status and body.
func (s *system) call(method, url, body string, header ...string) (int, []byte) {
	s.t.Helper()
	r := do(method, url, body, header...)
	require.NoError(s.t, r.err)
	return r.status, r.body
}

// xadd adds an entry to a stream and returns its id, which Redis chooses. fields are names and
// values in turn.
func (s *system) xadd(stream string, fields ...any) string {
	s.t.Helper()
	id, err := s.rdb.XAdd(s.ctx(), &redis.XAddArgs{Stream: stream, Values: fields}).Result()
	require.NoError(s.t, err)
	return id
}

// conserved requires that each accepted job is counted in exactly one state.
func conserved(t testing.TB, c api.Counts) {
	t.Helper()
	require.Equal(t, c.Accepted, c.Waiting+c.NonReady+c.Ready+c.InFlight+c.Done+c.Failed+c.Cancelled, "%+v", c)
}

// audit requires that a full audit finds no violation.
func (s *system) audit() {
	s.t.Helper()
	conn := connect(s.t, s.env["BULKACTION_REDIS_URL"])
	report, err := audit.Run(s.ctx(), conn, s.space, audit.Options{})
	require.NoError(s.t, err)
	require.Empty(s.t, report.Violations)
	require.True(s.t, report.OK)
}
