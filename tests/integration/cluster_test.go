package integration

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"net/http"
	"slices"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/bulkaction/bulkaction/api"
	"github.com/bulkaction/bulkaction/client"
	"github.com/bulkaction/bulkaction/client/producer"
	"github.com/bulkaction/bulkaction/internal/redisx"
	"github.com/bulkaction/bulkaction/internal/testkit/proctest"
	"github.com/bulkaction/bulkaction/internal/testkit/redistest"
)

// producers submit groups for several tenants, over HTTP and through the ingest stream, until stop
// is called. loads has those that were accepted.
type producers struct {
	s      *system
	stream *producer.Producer
	stop   func()
	wait   sync.WaitGroup

	mu    sync.Mutex
	loads []submitted

	ended map[string]int64 // by group id: the number of jobs of groups that have ended
}

// submitted is a group that was accepted, with its expected outcome. A failover may lose a group
// that came through the ingest stream, because the producer's XADD waits for no replica
// (docs/operations.md). It may not lose one that was accepted over HTTP.
type submitted struct {
	load
	byStream bool
}

func (s *system) produce(tenants, jobs int) *producers {
	s.t.Helper()
	ctx, stop := context.WithCancel(s.ctx())
	p := &producers{s: s, stop: stop, ended: map[string]int64{}}
	s.t.Cleanup(func() { stop(); p.wait.Wait() })
	var err error
	p.stream, err = producer.New(ctx, proctest.AsUser("producer", s.env["BULKACTION_REDIS_URL"]))
	require.NoError(s.t, err)
	s.t.Cleanup(func() { _ = p.stream.Close() })
	overHTTP := client.NewAPI(s.url(0))
	for i := range tenants {
		p.wait.Go(func() {
			for round := 0; ctx.Err() == nil; round++ {
				n := jobs
				if i%3 == 0 {
					n *= 5 // more than one script call takes
				}
				l := newLoad(fmt.Sprint("tenant-", i), n)
				l.group.ID += fmt.Sprint("-", round)
				byStream := i%2 == 1
				submit := func() error { _, err := overHTTP.Submit(ctx, l.group); return err }
				if byStream {
					submit = func() error { _, err := p.stream.Submit(ctx, l.group); return err }
				}
				for submit() != nil { // the error does not tell whether the group was accepted: submit the same group again
					if redisx.Sleep(ctx, 50*time.Millisecond) != nil {
						return
					}
				}
				p.mu.Lock()
				p.loads = append(p.loads, submitted{l, byStream})
				p.mu.Unlock()
				if p.awaitEnd(ctx, l.group.ID, time.Second) != nil {
					return
				}
			}
		})
	}
	return p
}

// awaitEnd waits until a group has ended, at most for the time limit. A producer calls it before
// its next submission: so no backlog builds up on a slow machine, and yet groups are submitted
// during an outage too. It returns an error only if ctx has ended.
func (p *producers) awaitEnd(ctx context.Context, group string, limit time.Duration) error {
	look := client.NewAPI(p.s.url(0), client.WithRetry(1, limit))
	for start := time.Now(); time.Since(start) < limit; {
		if err := redisx.Sleep(ctx, 100*time.Millisecond); err != nil {
			return err
		}
		if g, err := look.Group(ctx, group); err == nil && g.Status.Ended() {
			break
		}
	}
	return ctx.Err()
}

// check stops the producers, waits until all accepted groups have ended, and compares counts,
// aggregates and results with the expected ones. If Redis has lost a group's entry in the ingest
// stream, check submits the group again.
func (p *producers) check(t *testing.T) {
	t.Helper()
	p.stop()
	p.wait.Wait()
	var jobs int64
	lost := 0
	for _, l := range p.loads {
		var g api.Group
		p.s.await("the end of "+l.group.ID, func() bool {
			waiting, err := p.s.rdb.XLen(p.s.ctx(), p.s.space.Ingest()).Result() // read before the group is looked up
			if err != nil {
				return false
			}
			g, err = p.s.api.Group(p.s.ctx(), l.group.ID)
			if problem, ok := errors.AsType[*client.Error](err); ok && problem.Status == http.StatusNotFound && l.byStream && waiting == 0 {
				lost++
				_, err = p.stream.Submit(p.s.ctx(), l.group)
				require.NoError(t, err)
				return false
			}
			return err == nil && g.Status.Ended()
		})
		l.check(t, g)
		seen := map[int64]bool{}
		for r, err := range p.s.api.Results(p.s.ctx(), l.group.ID) {
			require.NoError(t, err)
			require.False(t, seen[r.Ordinal], "result %d twice", r.Ordinal)
			seen[r.Ordinal] = true
		}
		require.Len(t, seen, int(l.counts.Done))
		jobs += l.counts.Accepted
	}
	t.Logf("%d groups, %d jobs; Redis lost %d groups, which were submitted again", len(p.loads), jobs, lost)
}

// awaitProgress waits until n more jobs of the producers' groups are done or failed than at the
// time of the call.
func (p *producers) awaitProgress(what string, n int) {
	p.s.t.Helper()
	look := client.NewAPI(p.s.url(0), client.WithRetry(1, time.Second)) // an unreachable group is looked up again later
	// Groups submitted before the call count from their state at the first successful read. Groups
	// submitted later count from 0.
	p.mu.Lock()
	old := len(p.loads)
	p.mu.Unlock()
	from := map[string]int64{}
	progress := func() (sum int64) {
		p.mu.Lock()
		loads := slices.Clone(p.loads)
		p.mu.Unlock()
		for i, l := range loads {
			ended, all := p.ended[l.group.ID]
			if !all {
				g, err := look.Group(p.s.ctx(), l.group.ID)
				if err != nil {
					continue
				}
				ended = g.Counts.Done + g.Counts.Failed
				if g.Status.Ended() {
					p.ended[l.group.ID] = ended
				}
			}
			if _, seen := from[l.group.ID]; !seen && i < old {
				from[l.group.ID] = ended
			}
			sum += ended - from[l.group.ID]
		}
		return sum
	}
	at := time.Now()
	p.s.await(what, func() bool { return progress() >= int64(n) })
	p.s.t.Logf("%s after %s", what, time.Since(at).Round(10*time.Millisecond))
}

// TestCluster: all roles run on a Redis Cluster while five hash slots move between its nodes, and
// then one of its three masters is killed. All accepted groups must end with the right outcome.
func TestCluster(t *testing.T) {
	t.Parallel()
	cluster := redistest.ClusterWithReplicas(t, 3, proctest.Users(t))
	s := start(t, onURL(cluster.URL), env("PARTITIONS", "16"), env("LEASE", "2s"), env("BACKPRESSURE_GLOBAL_RPS", "0"),
		env("BACKPRESSURE_DEFAULT_BACKOFF", "50ms"), env("CONGESTION_BASE_BACKOFF", "50ms"), env("REDIS_COMMAND_TIMEOUT", "1s"),
		env("REDIS_WAIT_REPLICAS", "1"), binary("worker", "testworker"))
	p := s.produce(6, 100)
	p.awaitProgress("first jobs", 300)

	keys := []string{s.space.Ingest(), s.space.Partition(0).Base(), s.space.OfTenant("tenant-1").Base(), s.space.OfTenant("tenant-2").Base(), s.space.Events()}
	for i, key := range keys {
		slot := cluster.SlotOf(key)
		to := cluster.Masters[i%3]
		if cluster.MasterOf(slot) == to {
			to = cluster.Masters[(i+1)%3]
		}
		first := true
		cluster.MoveSlot(slot, to, func(left int) {
			if first && left > 0 {
				first = false
				p.awaitProgress(fmt.Sprintf("jobs while %s moves, %d keys to go,", key, left), 100)
				if key == s.space.Partition(0).Base() { // all roles run scripts on this slot, now and then
					s.await("a warning that the slot moves", func() bool { return s.moveWarnings() > 0 })
				}
			}
		})
	}
	p.awaitProgress("jobs after a reshard", 300)
	s.moveWarnings()

	dead := cluster.MasterOf(cluster.SlotOf(s.space.OfTenant("tenant-0").Base()))
	dead.Kill()
	cluster.AwaitFailover()
	p.awaitProgress("jobs after a failover", 300)
	dead.Restart()
	cluster.AwaitWhole()
	p.awaitProgress("jobs after its return", 300)
	p.check(t)
}

// moveWarnings counts the log lines of all processes with TRYAGAIN, the error of Redis while a hash
// slot moves. It fails the test if one of them has the level ERROR.
func (s *system) moveWarnings() int {
	s.t.Helper()
	warnings := 0
	for role, procs := range s.procs {
		for _, p := range procs {
			for line := range strings.Lines(p.Log()) {
				if strings.Contains(line, "TRYAGAIN") {
					require.NotContains(s.t, line, `"level":"ERROR"`, role)
					warnings++
				}
			}
		}
	}
	return warnings
}

// load is a group of NOOP jobs with results to reduce, and its expected counts and aggregates. Of
// each 100 jobs, one fails permanently and two succeed after one retry.
type load struct {
	group     client.Submission
	counts    api.Counts
	retries   int64
	aggregate map[string]string
}

var loadAggregates = []client.Aggregate{
	{As: "cost", Op: "sum", Field: "data.cost"}, {As: "n", Op: "count"}, {As: "kinds", Op: "count_by", Field: "data.kind"},
}

func newLoad(tenant string, n int) load {
	l := load{
		group:  client.Submission{ID: "of-" + tenant, Tenant: tenant, Type: "NOOP", Seal: true, Aggregate: loadAggregates},
		counts: api.Counts{Accepted: int64(n)},
	}
	cost, kinds := 0, map[string]int{}
	for i := range n {
		kind := fmt.Sprint("k", i%5)
		payload := map[string]any{"result": map[string]any{"cost": i, "kind": kind}}
		switch {
		case i%100 == 50:
			payload["fail"] = "permanent"
			l.counts.Failed++
		case i%50 == 10:
			payload["fail"], payload["fail_times"] = "retry", 1
			l.retries++
			fallthrough
		default:
			l.counts.Done++
			cost += i
			kinds[kind]++
		}
		l.group.Jobs = append(l.group.Jobs, client.NewJob{Payload: payload})
	}
	byKind, _ := json.Marshal(kinds) // encoding a map[string]int can't fail
	l.aggregate = map[string]string{"cost": fmt.Sprint(cost), "n": fmt.Sprint(l.counts.Done), "kinds": string(byKind)}
	return l
}

// check requires that a group is COMPLETED, and has the expected counts, number of retries,
// failures by code and aggregates.
func (l load) check(t *testing.T, g api.Group) {
	t.Helper()
	require.Equal(t, api.StatusCompleted, g.Status)
	require.Equal(t, l.counts, g.Counts)
	require.Equal(t, l.retries, g.Retries)
	require.Equal(t, map[string]int64{"NOOP_PERMANENT": l.counts.Failed}, g.FailuresByCode)
	for as, want := range l.aggregate {
		require.JSONEq(t, want, string(g.Aggregate[as]), as)
	}
}

// TestFleets: seven groups of 1000 or 1001 jobs have their expected outcomes with one process of
// each role, and with two or three and four partitions or a rate limit. No job has two
// results, failures or dead letters, or both a result and a failure.
func TestFleets(t *testing.T) {
	t.Parallel()
	many := []option{
		apart, replicas("ingest", 2), replicas("fetcher", 2), replicas("dispatcher", 2), replicas("worker", 3), replicas("aggregator", 2), replicas("watcher", 2),
	}
	for name, opts := range map[string][]option{
		"one of each":                {apart},
		"some of each, 4 partitions": append([]option{env("PARTITIONS", "4")}, many...),
		"some of each, rate limited": append([]option{env("BACKPRESSURE_GLOBAL_RPS", "20000"), env("BACKPRESSURE_RATE_LIMIT_WINDOW", "100ms")}, many...),
	} {
		t.Run(name, func(t *testing.T) {
			s := start(t, append([]option{env("BACKPRESSURE_GLOBAL_RPS", "0"), env("BACKPRESSURE_DEFAULT_BACKOFF", "50ms"), env("CONGESTION_BASE_BACKOFF", "50ms")}, opts...)...)
			p, err := producer.New(s.ctx(), proctest.AsUser("producer", s.redis.URL()))
			require.NoError(t, err)
			defer p.Close()
			var loads []load
			for i := range 7 {
				l := newLoad(fmt.Sprint("tenant-", i), 1000+i%2)
				loads = append(loads, l)
				if i%2 == 0 {
					_, err = client.NewAPI(s.url(i%len(s.of("ingest")))).Submit(s.ctx(), l.group)
				} else {
					_, err = p.Submit(s.ctx(), l.group)
				}
				require.NoError(t, err)
			}
			var failed int64
			for _, l := range loads {
				l.check(t, s.wait(l.group.ID))
				l.check(t, s.group(l.group.ID))
				failed += l.counts.Failed
				seen := map[int64]bool{}
				for r, err := range s.api.Results(s.ctx(), l.group.ID) {
					require.NoError(t, err)
					require.False(t, seen[r.Ordinal], "result %d twice", r.Ordinal)
					seen[r.Ordinal] = true
				}
				require.Len(t, seen, int(l.counts.Done))
				for f, err := range s.api.Failures(s.ctx(), l.group.ID) {
					require.NoError(t, err)
					require.False(t, seen[f.Ordinal], "job %d is done and failed, or failed twice", f.Ordinal)
					seen[f.Ordinal] = true
				}
				require.Len(t, seen, int(l.counts.Accepted))
			}
			letters := map[string]bool{}
			for d, err := range s.api.DeadLetters(s.ctx(), client.DeadLetterFilter{}) {
				require.NoError(t, err)
				require.False(t, letters[d.Job])
				letters[d.Job] = true
			}
			require.Len(t, letters, int(failed))
			for role, procs := range s.procs {
				for i, p := range procs {
					require.True(t, p.Running(), "%s %d", role, i)
				}
			}
		})
	}
}
