package integration

import (
	"encoding/json"
	"fmt"
	"net/http"
	"slices"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/alicebob/miniredis/v2"
	"github.com/redis/go-redis/v9"
	"github.com/stretchr/testify/require"

	"github.com/bulkaction/bulkaction/api"
	"github.com/bulkaction/bulkaction/client"
	"github.com/bulkaction/bulkaction/internal/jobs/ledger"
	"github.com/bulkaction/bulkaction/internal/redisx/keyspace"
	"github.com/bulkaction/bulkaction/internal/redisx/layout"
	"github.com/bulkaction/bulkaction/internal/redisx/stream"
	"github.com/bulkaction/bulkaction/internal/stage"
	"github.com/bulkaction/bulkaction/internal/testkit/proctest"
	"github.com/bulkaction/bulkaction/internal/testkit/redistest"
)

// awaitReadyz waits until /readyz of every process answers with this HTTP status.
func (s *system) awaitReadyz(status int) {
	s.t.Helper()
	for role, procs := range s.procs {
		for _, p := range procs {
			s.await(fmt.Sprintf("readyz of %s answers %d", role, status), func() bool {
				got, _ := s.call("GET", "http://"+p.AdminAddr()+"/readyz", "")
				return got == status
			})
		}
	}
}

func TestRedisDiesAndComesBack(t *testing.T) {
	t.Parallel()
	const n = 3000
	s := start(t, apart, onRedis(redistest.AOF), env("LEASE", "2s"), env("WORKER_TIMEOUT", "200ms"))
	s.awaitReadyz(http.StatusOK)
	sum := []client.Aggregate{{As: "n", Op: "sum", Field: "data"}}
	s.submit(client.Submission{ID: "before", Type: "NOOP", Jobs: jobs(n, `{"sleep_ms":5,"result":1}`), Seal: true, Aggregate: sum})
	s.submit(client.Submission{ID: "open", Type: "NOOP", Jobs: jobs(1, `{"result":1}`), Aggregate: sum})
	s.awaitCounts("before", "in the middle", func(c api.Counts) bool { return c.Done > 100 })

	s.redis.Kill()
	s.awaitReadyz(http.StatusServiceUnavailable)
	for role, procs := range s.procs {
		status, body := s.call("GET", "http://"+procs[0].AdminAddr()+"/healthz", "")
		require.Equal(t, http.StatusOK, status, "%s still runs: %s", role, body)
		_, body = s.call("GET", "http://"+procs[0].AdminAddr()+"/readyz", "")
		require.Contains(t, string(body), "redis", role)
	}
	for path, body := range map[string]string{
		"/v1/groups": `{"type":"NOOP","jobs":[{"payload":{}}],"seal":true}`, "/v1/groups/open/seal": ``, "/v1/groups/open/cancel": ``,
	} {
		status, answer := s.call("POST", s.url(0)+path, body)
		require.Equal(t, http.StatusServiceUnavailable, status, "%s: %s", path, answer)
		var p api.Problem
		require.NoError(t, json.Unmarshal(answer, &p))
		require.Equal(t, http.StatusServiceUnavailable, p.Status)
	}
	status, answer := s.call("GET", s.url(0)+"/v1/groups/before", "")
	require.Equal(t, http.StatusServiceUnavailable, status, string(answer))

	s.redis.Restart()
	s.awaitReadyz(http.StatusOK)
	s.submit(client.Submission{ID: "after", Type: "NOOP", Jobs: jobs(10, `{"result":1}`), Seal: true, Aggregate: sum})
	require.Equal(t, api.Counts{Accepted: 10, Done: 10}, s.wait("after").Counts)
	g := s.wait("before")
	require.Equal(t, api.Counts{Accepted: n, Done: n}, g.Counts)
	require.JSONEq(t, fmt.Sprint(n), string(g.Aggregate["n"]))
	require.Len(t, s.results("before"), n)
	_, err := s.api.Seal(s.ctx(), "open", nil)
	require.NoError(t, err)
	require.Equal(t, api.Counts{Accepted: 1, Done: 1}, s.wait("open").Counts)
}

// TestMemoryIsFull: while Redis's memory is full, a submission and a seal are answered with 429, a
// cancel with 202, and the jobs of an accepted group end, although the only worker is killed and
// replaced.
func TestMemoryIsFull(t *testing.T) {
	t.Parallel()
	s := start(t, apart, env("LEASE", "2s"), env("WORKER_TIMEOUT", "200ms"), env("BACKPRESSURE_GLOBAL_RPS", "0"),
		env("BACKPRESSURE_DEFAULT_BACKOFF", "50ms"), env("CONGESTION_BASE_BACKOFF", "50ms"))
	l := newLoad("acme", 2000)
	for _, j := range l.group.Jobs {
		j.Payload.(map[string]any)["sleep_ms"] = 5
	}
	s.submit(l.group)
	s.submit(client.Submission{ID: "open", Type: "NOOP", Jobs: jobs(1, `{}`)})
	doomed := client.Submission{ID: "doomed", Tenant: "other", Type: "NOOP", Jobs: jobs(100, `{"sleep_ms":100}`), Seal: true}
	later := time.Now().Add(time.Hour)
	doomed.Jobs[0].RunAt = &later // the group cannot end before it is cancelled
	s.submit(doomed)
	s.awaitCounts(l.group.ID, "in the middle", func(c api.Counts) bool { return c.Done > 100 })
	raw := &redis.XAddArgs{Stream: s.space.Ingest(), Values: []string{
		"type", "group.submit", "data", `{"id":"raw","type":"NOOP","seal":true,"jobs":[{"payload":{}}]}`,
	}}

	require.NoError(t, s.rdb.ConfigSet(s.ctx(), "maxmemory", "1mb").Err())
	require.ErrorContains(t, s.rdb.XAdd(s.ctx(), raw).Err(), "OOM")
	for path, body := range map[string]string{
		"/v1/groups": `{"id":"http","type":"NOOP","jobs":[{"payload":{}}],"seal":true}`, "/v1/groups/open/seal": ``,
	} {
		req, err := http.Post(s.url(0)+path, "application/json", strings.NewReader(body))
		require.NoError(t, err)
		var p api.Problem
		require.NoError(t, json.NewDecoder(req.Body).Decode(&p))
		require.NoError(t, req.Body.Close())
		require.Equal(t, http.StatusTooManyRequests, req.StatusCode, "%s: %+v", path, p)
		require.NotEmpty(t, req.Header.Get("Retry-After"), path)
	}
	status, answer := s.call("POST", s.url(0)+"/v1/groups/doomed/cancel", "")
	require.Equal(t, http.StatusAccepted, status, "cancel frees memory: %s", answer)

	// The only worker is killed with the jobs that it holds, and a new one starts.
	s.proc("worker", 0).Kill()
	s.add("worker")
	s.await("the end of what was accepted", func() bool { return s.group(l.group.ID).Status.Ended() })
	g := s.group(l.group.ID)
	require.Equal(t, l.counts, g.Counts)
	for as, want := range l.aggregate {
		require.JSONEq(t, want, string(g.Aggregate[as]), as)
	}
	s.awaitCounts("doomed", "settled", func(c api.Counts) bool { return c.Cancelled+c.Done == 100 })
	for _, role := range roles {
		require.True(t, s.proc(role, len(s.procs[role])-1).Running(), role)
	}
	require.ErrorContains(t, s.rdb.XAdd(s.ctx(), raw).Err(), "OOM", "memory is still full")

	require.NoError(t, s.rdb.ConfigSet(s.ctx(), "maxmemory", "0").Err())
	require.NoError(t, s.rdb.XAdd(s.ctx(), raw).Err())
	_, err := s.api.Seal(s.ctx(), "open", nil)
	require.NoError(t, err)
	for _, group := range []string{"raw", "open", l.group.ID, "doomed"} {
		s.wait(group) // events that found no memory are published now
	}
	require.Equal(t, api.Counts{Accepted: 1, Done: 1}, s.group("raw").Counts)
	require.Equal(t, api.Counts{Accepted: 1, Done: 1}, s.group("open").Counts)
	status, _ = s.call("GET", s.url(0)+"/v1/groups/http", "")
	require.Equal(t, http.StatusNotFound, status, "a refused group does not exist")
}

// TestPlannedFailover: an administrator swaps the master and its replica while groups arrive.
// Sentinel promotes the replica about a second before it announces this. What the old master
// accepts meanwhile is lost, unless ingest waits for the replica or writes are paused
// (docs/operations.md). The test tries both, and no accepted group may be lost.
func TestPlannedFailover(t *testing.T) {
	t.Parallel()
	for name, c := range map[string]struct {
		waitReplicas string
		pause        bool
	}{
		"replicas": {waitReplicas: "1"},
		"paused":   {waitReplicas: "0", pause: true},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			sentinels := redistest.Sentinel(t, proctest.Users(t))
			s := start(t, onURL(sentinels.URL), env("REDIS_WAIT_REPLICAS", c.waitReplicas),
				replicas("fetcher", 0), replicas("dispatcher", 0), replicas("worker", 0), replicas("aggregator", 0))
			var stop atomic.Bool
			var clients sync.WaitGroup
			var count atomic.Int64
			accepted := make([][]string, 4) // group ids by client
			for i := range accepted {
				clients.Go(func() {
					for n := 0; !stop.Load(); n++ {
						id := fmt.Sprintf("g-%d-%d", i, n)
						r := do(http.MethodPost, s.url(0)+"/v1/groups", `{"id":"`+id+`","tenant":"acme","type":"NOOP","jobs":[{"payload":{}}]}`)
						if r.status == http.StatusAccepted {
							accepted[i] = append(accepted[i], id)
							count.Add(1)
						}
					}
				})
			}
			defer clients.Wait()
			defer stop.Store(true)
			s.await("groups before the failover", func() bool { return count.Load() >= 20 })
			if c.pause {
				master := sentinels.Master.Client()
				require.NoError(t, master.Do(s.ctx(), "client", "pause", 20_000, "write").Err())
				s.await("the replica to have everything", func() bool {
					info := master.Info(s.ctx(), "replication").Val()
					_, end, _ := strings.Cut(info, "master_repl_offset:")
					end, _, _ = strings.Cut(end, "\r")
					return end != "" && strings.Contains(info, "state=online,offset="+end+",")
				})
			}
			sentinels.StartFailover()
			sentinels.AwaitFailover()
			stop.Store(true)
			clients.Wait()
			lost := 0
			for _, id := range slices.Concat(accepted...) {
				found, err := s.rdb.Exists(s.ctx(), s.space.Partition(0).Group(id)).Result()
				require.NoError(t, err)
				lost += 1 - int(found)
			}
			t.Logf("lost %d of %d accepted groups", lost, count.Load())
			require.Zero(t, lost)
		})
	}
}

// TestSentinel: all roles run on a master that Sentinel watches. The master dies while they work;
// later the promoted replica dies too. All accepted groups must end with the right outcome.
func TestSentinel(t *testing.T) {
	t.Parallel()
	sentinels := redistest.Sentinel(t, proctest.Users(t))
	s := start(t, onURL(sentinels.URL), env("PARTITIONS", "4"), env("LEASE", "2s"), env("BACKPRESSURE_GLOBAL_RPS", "0"),
		env("BACKPRESSURE_DEFAULT_BACKOFF", "50ms"), env("CONGESTION_BASE_BACKOFF", "50ms"), env("REDIS_COMMAND_TIMEOUT", "1s"),
		env("REDIS_WAIT_REPLICAS", "1"), binary("worker", "testworker"))
	p := s.produce(4, 100)
	p.awaitProgress("first jobs", 300)
	for range 2 {
		sentinels.Master.Kill()
		sentinels.AwaitMaster(sentinels.Replica)
		sentinels.Rejoin(sentinels.Master) // with no replica, nothing is accepted
		p.awaitProgress("jobs after a failover", 300)
		sentinels.Master, sentinels.Replica = sentinels.Replica, sentinels.Master
	}
	p.check(t)
}

// TestAcceptedMeansReplicated: with REDIS_WAIT_REPLICAS, ingest answers 503, and does not
// acknowledge an entry of the ingest stream, while the replica is suspended; it answers 202 and
// acknowledges the entry when the replica runs.
func TestAcceptedMeansReplicated(t *testing.T) {
	t.Parallel()
	s := start(t, env("PARTITIONS", "3"), env("REDIS_WAIT_REPLICAS", "1"), env("REDIS_COMMAND_TIMEOUT", "1s"), onRedis(redistest.Args("--repl-diskless-sync-delay", "0")))
	replica := redistest.Server(t, redistest.Args("--replicaof", strings.Replace(s.redis.Addr(), ":", " ", 1)))
	body := `{"id":"http","type":"NOOP","seal":true,"jobs":[{"payload":{}}]}`
	s.await("a replica", func() bool {
		status, _ := s.call("POST", s.url(0)+"/v1/groups", strings.Replace(body, "http", "first", 1))
		return status == http.StatusAccepted
	})

	replica.Suspend()
	status, answer := s.call("POST", s.url(0)+"/v1/groups", body)
	require.Equal(t, http.StatusServiceUnavailable, status, string(answer))
	var p api.Problem
	require.NoError(t, json.Unmarshal(answer, &p))
	s.xadd(s.space.Ingest(), "type", "group.submit", "data", strings.Replace(body, "http", "stream", 1))
	s.await("the entry to be read", func() bool {
		pending, err := s.rdb.XPending(s.ctx(), s.space.Ingest(), "ingest").Result()
		return err == nil && pending.Count == 1
	})
	// While the replica is suspended, both groups are stored and run, but neither submission is
	// acknowledged.
	require.Equal(t, api.Counts{Accepted: 1, Done: 1}, s.wait("http").Counts)
	require.Equal(t, api.Counts{Accepted: 1, Done: 1}, s.wait("stream").Counts)
	status, _ = s.call("POST", s.url(0)+"/v1/groups", body)
	require.Equal(t, http.StatusServiceUnavailable, status)
	require.EqualValues(t, 1, s.rdb.XLen(s.ctx(), s.space.Ingest()).Val(), "not acknowledged")

	replica.Resume()
	s.await("the answer", func() bool {
		status, _ := s.call("POST", s.url(0)+"/v1/groups", body)
		return status == http.StatusAccepted
	})
	s.await("the acknowledgement", func() bool { return s.rdb.XLen(s.ctx(), s.space.Ingest()).Val() == 0 })
	require.Equal(t, api.Counts{Accepted: 1, Done: 1}, s.group("http").Counts)
	require.NoError(t, replica.Client().Get(s.ctx(), s.space.OfGroup("stream").Owner("stream")).Err())
	statuses, err := ledger.Statuses(s.ctx(), replica.Client(), s.space.OfTenant("stream"), []string{"stream"})
	require.NoError(t, err)
	require.NotEmpty(t, statuses[0])
}

// TestRestoredBackup: Redis is restored from an older backup: while the roles run, while they are
// stopped, and without the workers' consumers. Groups of the backup end with exact counts. A group
// created after the backup is missing, and is submitted again under its id.
func TestRestoredBackup(t *testing.T) {
	t.Parallel()
	for name, restore := range map[string]func(t *testing.T, s *system, snapshot []byte){
		"under running roles": func(_ *testing.T, s *system, snapshot []byte) { s.redis.Restore(snapshot) },
		"before the roles start": func(_ *testing.T, s *system, snapshot []byte) {
			start := s.replaceAll()
			s.redis.Restore(snapshot)
			start()
		},
		"without the workers' consumers": func(t *testing.T, s *system, snapshot []byte) {
			start := s.replaceAll()
			s.redis.Restore(snapshot)
			unowned := s.removeConsumers(s.space.Partition(0).Ready("NOOP"))
			require.NotEmpty(t, unowned)
			start()
			s.await("the entries get an owner", func() bool {
				return slices.ContainsFunc(s.procs["dispatcher"], func(p *proctest.Process) bool {
					return strings.Contains(p.Log(), "no consumer owned entries")
				})
			})
		},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			s := start(t, binary("worker", "testworker"), replicas("worker", 2), env("WORKER_COUNT", "5"),
				env("LEASE", "2s"), env("WORKER_TIMEOUT", "100ms"), env("AUDIT_INTERVAL", "1s"),
				env("BACKPRESSURE_DEFAULT_BACKOFF", "50ms"), env("CONGESTION_BASE_BACKOFF", "50ms"))
			var known []load
			for i := range 3 {
				l := newLoad(fmt.Sprint("tenant-", i), 400)
				l.slow(10)
				s.submit(l.group)
				known = append(known, l)
			}
			s.submit(client.Submission{ID: "open", Tenant: "tenant-0", Type: "NOOP", Jobs: jobs(10, `{}`)})
			s.awaitCounts(known[0].group.ID, "jobs in flight, after some have ended", func(c api.Counts) bool {
				return c.Done > 20 && c.InFlight > 0
			})
			snapshot := s.redis.Backup()

			younger := newLoad("tenant-3", 200)
			s.submit(younger.group)
			s.append("open", 10)
			younger.check(t, s.wait(younger.group.ID))
			s.awaitCounts(known[1].group.ID, "more jobs have ended", func(c api.Counts) bool { return c.Done > 100 })
			restore(t, s, snapshot)

			s.await("the younger group is gone", func() bool {
				status, _ := s.call("GET", s.url(0)+"/v1/groups/"+younger.group.ID, "")
				return status == 404
			})
			s.submit(younger.group)
			s.append("open", 10)
			_, err := s.api.Seal(s.ctx(), "open", nil)
			require.NoError(t, err)
			for _, l := range append(known, younger) {
				l.check(t, s.wait(l.group.ID))
				require.Len(t, s.results(l.group.ID), int(l.counts.Done))
			}
			require.Equal(t, api.Counts{Accepted: 20, Done: 20}, s.wait("open").Counts)
		})
	}
}

// slow makes each job of the load run for ms milliseconds.
func (l *load) slow(ms int) {
	for _, j := range l.group.Jobs {
		j.Payload.(map[string]any)["sleep_ms"] = ms
	}
}

// append adds n jobs to an open group. Each call uses the idempotency key append-1, so a repeated
// call with an equal n adds nothing unless Redis has lost the first one.
func (s *system) append(group string, n int) {
	s.t.Helper()
	_, err := s.api.Append(s.ctx(), group, slices.Values(jobs(n, `{}`)), client.WithIdempotencyKey("append-1"))
	require.NoError(s.t, err)
}

// replaceAll stops all processes. It returns a function that starts as many new ones of each role,
// and waits until they are ready.
func (s *system) replaceAll() (start func()) {
	s.t.Helper()
	stopped := s.procs
	s.stopAll()
	return func() {
		s.t.Helper()
		for role, procs := range stopped {
			for range procs {
				s.launch(role, nil)
			}
		}
		for _, procs := range s.procs {
			for _, p := range procs {
				p.WaitReady()
			}
		}
		s.api = client.NewAPI(s.url(0))
	}
}

// removeConsumers removes all consumers from the workers' consumer group of a ready stream, and
// returns the ids of the entries that are unowned then.
func (s *system) removeConsumers(ready string) []string {
	s.t.Helper()
	consumers, err := s.rdb.XInfoConsumers(s.ctx(), ready, keyspace.GroupWorkers).Result()
	require.NoError(s.t, err)
	for _, c := range consumers {
		require.NoError(s.t, s.rdb.XGroupDelConsumer(s.ctx(), ready, keyspace.GroupWorkers, c.Name).Err())
	}
	unowned, err := stream.Unowned(s.ctx(), s.rdb, ready, keyspace.GroupWorkers)
	require.NoError(s.t, err)
	return unowned
}

// TestUnfitRedisIsRefused: a role ends with code 1 at its start if Redis would evict keys, has no
// replicas to wait for, or has the data of another number of partitions.
func TestUnfitRedisIsRefused(t *testing.T) {
	t.Parallel()
	fit := redistest.Server(t)
	space, err := keyspace.New("bulk-action:", 4)
	require.NoError(t, err)
	conn := connect(t, fit.URL())
	require.NoError(t, stage.CheckPartitions(t.Context(), conn, space))
	require.NoError(t, conn.Cmd.HSet(t.Context(), space.Layouts(), layout.Jobs, ledger.Layout.Newest, layout.Rooms, 1).Err())
	for name, c := range map[string]struct {
		url, setting, value string
		says                string
	}{
		"eviction":    {redistest.Server(t, redistest.Args("--maxmemory-policy", "allkeys-lru")).URL(), "LOG_LEVEL", "info", "CONFIG SET maxmemory-policy noeviction"},
		"no replicas": {"redis://" + miniredis.RunT(t).Addr(), "REDIS_WAIT_REPLICAS", "1", "BULKACTION_REDIS_WAIT_REPLICAS to 0"},
		"partitions":  {fit.URL(), "PARTITIONS", "3", "BULKACTION_PARTITIONS is 3, but the data in Redis was made with 4"},
	} {
		p := proctest.Start(t, "bulkaction", map[string]string{"BULKACTION_REDIS_URL": c.url, "BULKACTION_" + c.setting: c.value}, "ingest")
		require.Equal(t, 1, p.Wait(patience), name)
		require.Contains(t, p.Log(), c.says, name)
	}
}
