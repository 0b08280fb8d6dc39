package integration

import (
	"encoding/json"
	"fmt"
	"testing"

	"github.com/stretchr/testify/require"

	"github.com/bulkaction/bulkaction/api"
	"github.com/bulkaction/bulkaction/client"
	"github.com/bulkaction/bulkaction/client/producer"
	"github.com/bulkaction/bulkaction/internal/testkit/proctest"
)

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
