package integration

import (
	"fmt"
	"slices"
	"strings"
	"testing"

	"github.com/stretchr/testify/require"

	"github.com/bulkaction/bulkaction/api"
	"github.com/bulkaction/bulkaction/client"
	"github.com/bulkaction/bulkaction/internal/redisx/keyspace"
	"github.com/bulkaction/bulkaction/internal/redisx/stream"
	"github.com/bulkaction/bulkaction/internal/testkit/proctest"
)

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
