package integration

import (
	"context"
	"os"
	"strconv"
	"syscall"
	"testing"
	"time"

	"github.com/redis/go-redis/v9"
	"github.com/stretchr/testify/require"

	"github.com/bulkaction/bulkaction/api"
	"github.com/bulkaction/bulkaction/client"
	"github.com/bulkaction/bulkaction/internal/redisx"
	"github.com/bulkaction/bulkaction/internal/redisx/keyspace"
)

// TestVanishedDataEndsWithinAMinute: with default settings, jobs whose data vanishes from Redis
// while their group makes progress end as LOST within a minute: the ready stream is deleted,
// renamed or misses 30 entries, or the results are deleted. Each round begins at another time of
// the audit interval, and takes two minutes. LOST_ROUNDS is the number of rounds; without it the
// test is skipped.
func TestVanishedDataEndsWithinAMinute(t *testing.T) {
	rounds, _ := strconv.Atoi(os.Getenv("LOST_ROUNDS"))
	if rounds == 0 {
		t.Skip("LOST_ROUNDS is not set")
	}
	const auditInterval = 15 * time.Second // the default of AUDIT_INTERVAL
	for name, vanish := range map[string]func(*system, keyspace.Partition) (jobs int64){
		"DEL of the ready stream": func(s *system, p keyspace.Partition) int64 {
			ready := s.undelivered(p)
			require.NoError(s.t, s.rdb.Del(s.ctx(), p.Ready("NOOP")).Err())
			return ready
		},
		"RENAME of the ready stream": func(s *system, p keyspace.Partition) int64 {
			ready := s.undelivered(p)
			require.NoError(s.t, s.rdb.Rename(s.ctx(), p.Ready("NOOP"), p.Ready("NOOP")+".away").Err())
			return ready
		},
		"XDEL of 30 entries": func(s *system, p keyspace.Partition) int64 {
			last, err := s.rdb.XRevRangeN(s.ctx(), p.Ready("NOOP"), "+", "-", 30).Result()
			require.NoError(s.t, err)
			var ids []string
			for _, e := range last {
				ids = append(ids, e.ID)
			}
			deleted, err := s.rdb.XDel(s.ctx(), p.Ready("NOOP"), ids...).Result()
			require.NoError(s.t, err)
			return deleted
		},
		"DEL of the results stream": func(s *system, p keyspace.Partition) int64 {
			aggregator := s.proc("aggregator", 0)
			aggregator.Suspend() // otherwise results are reduced within milliseconds
			s.await("results", func() bool { return s.rdb.XLen(s.ctx(), p.ResultStream()).Val() > 0 })
			var entries *redis.IntCmd
			_, err := s.rdb.TxPipelined(s.ctx(), func(tx redis.Pipeliner) error {
				entries = tx.XLen(s.ctx(), p.ResultStream())
				return tx.Del(s.ctx(), p.ResultStream()).Err()
			})
			require.NoError(s.t, err)
			aggregator.Signal(syscall.SIGCONT)
			return entries.Val()
		},
	} {
		for round := range rounds {
			t.Run(name+" "+strconv.Itoa(round+1), func(t *testing.T) {
				t.Parallel()
				const n = 2000
				s := start(t, apart, replicas("worker", 4))
				p := s.space.Partition(0)
				require.NoError(t, redisx.Sleep(t.Context(), time.Duration(round)*auditInterval/time.Duration(rounds)))
				s.submit(client.Submission{ID: "g", Type: "NOOP", Jobs: jobs(n, `{"sleep_ms":1800}`), Seal: true})
				s.await("more ready jobs than slots", func() bool { return s.undelivered(p) >= 30 })
				at, vanished := time.Now(), vanish(s, p)
				var first, last time.Duration
				var lost int64
				s.followGroup("g", func(g api.Group) bool {
					if now := g.FailuresByCode["LOST"]; now > lost {
						if last = time.Since(at); lost == 0 {
							first = last
						}
						lost = now
					}
					return g.Status.Ended()
				})
				t.Logf("%d entries vanished, %d jobs ended as LOST, %.1f to %.1f s later", vanished, lost, first.Seconds(), last.Seconds())
				require.GreaterOrEqual(t, lost, vanished)
				require.LessOrEqual(t, last, time.Minute)
				require.Equal(t, api.Counts{Accepted: n, Done: n - lost, Failed: lost}, s.group("g").Counts)
			})
		}
	}
}

// undelivered returns the number of entries of the ready stream of the type NOOP that no worker has
// read.
func (s *system) undelivered(p keyspace.Partition) int64 {
	s.t.Helper()
	info, err := s.rdb.XInfoGroups(s.ctx(), p.Ready("NOOP")).Result()
	if err != nil || len(info) == 0 {
		return 0 // no stream yet
	}
	return s.rdb.XLen(s.ctx(), p.Ready("NOOP")).Val() - info[0].Pending
}

// followGroup reads a group ten times a second and calls done with it, until done returns true. The
// test fails after three minutes.
func (s *system) followGroup(group string, done func(api.Group) bool) {
	s.t.Helper()
	ctx, cancel := context.WithTimeout(s.ctx(), 3*time.Minute)
	defer cancel()
	tick := time.NewTicker(100 * time.Millisecond)
	defer tick.Stop()
	for !done(s.group(group)) {
		select {
		case <-tick.C:
		case <-ctx.Done():
			require.Fail(s.t, "group "+group+" has not ended")
		}
	}
}
