package chaos

import (
	"context"
	"errors"
	"fmt"
	"math/rand/v2"
	"os"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/bulkaction/bulkaction/internal/redisx"
	"github.com/bulkaction/bulkaction/internal/testkit/proctest"
	"github.com/bulkaction/bulkaction/internal/testkit/redisproc"
	"github.com/bulkaction/bulkaction/internal/testkit/redistest"
)

// receiptLaw and registryLaw are laws of the audit: all jobs with a receipt must exist, and owner
// keys must belong to groups that exist.
const (
	receiptLaw  = "receipt"
	registryLaw = "registry"
)

// settleLosses judges a phase whose faults may make Redis lose data that it has acknowledged. The
// audit must report each loss. Then the groups with losses are submitted again, which must restore
// their jobs.
func (w *world) settleLosses(groups []*group) *phase {
	w.t.Helper()
	healed := time.Now()
	w.awaitIngested()
	return w.settleLossesSince(healed, groups)
}

// settleLossesSince is the part of settleLosses after the ingest stream is empty. healed is the
// time at which the faults ended.
func (w *world) settleLossesSince(healed time.Time, groups []*group) *phase {
	t, ctx := w.t, w.t.Context()
	t.Helper()
	short := w.short(groups)
	again := w.withMissing(groups, short)
	whole := slices.DeleteFunc(slices.Clone(groups), func(g *group) bool { return slices.Contains(again, g) })
	for _, g := range w.oracle.awaitEnded(ctx, whole, 2*endWithin, false) {
		w.phase.violate("group %s has not ended %s after healing", g.id, 2*endWithin)
	}
	w.phase.EndedWithin = time.Since(healed).Seconds()
	w.named(short)
	for _, g := range groups {
		g.after = 0
	}
	require.NoError(t, w.producers.submit(ctx, again))
	return w.settle(groups, 2*endWithin)
}

// withMissing returns the groups that must be submitted again: those that miss jobs, and those of
// which a message was deleted. If that message was the seal, the group has all its jobs but stays
// open.
func (w *world) withMissing(groups []*group, short map[string]int) []*group {
	return slices.DeleteFunc(slices.Clone(groups), func(g *group) bool {
		return short[g.id] == 0 && !w.oracle.deleted.messages[g.id]
	})
}

// awaitIngested waits until the ingest stream is empty, because ingest has turned all messages into
// jobs.
func (w *world) awaitIngested() {
	w.t.Helper()
	w.fleet.await(w.t, "the ingest stream is empty", 2*endWithin, func(ctx context.Context) error {
		n, err := w.oracle.conn.Cmd.XLen(ctx, w.oracle.space.Ingest()).Result()
		if err == nil && n > 0 {
			err = fmt.Errorf("%d messages are in the ingest stream", n)
		}
		return err
	})
}

// short returns, by group id, how many jobs with a receipt are missing, and adds them to RedisLost
// of the phase.
func (w *world) short(groups []*group) map[string]int {
	w.t.Helper()
	missing := map[string]int{}
	for _, g := range groups {
		got, err := w.oracle.api.Group(w.t.Context(), g.id)
		if !isMissing(err) {
			require.NoError(w.t, err)
		}
		if n := w.producers.receipts[g.id] - int(got.Counts.Accepted); n > 0 {
			missing[g.id] = n
			w.phase.RedisLost += n
		}
	}
	return missing
}

// receipts writes the producers' receipts to a file.
func (w *world) receipts() (path string) {
	w.t.Helper()
	path = filepath.Join(w.t.TempDir(), "receipts")
	require.NoError(w.t, w.producers.write(path))
	return path
}

// named runs the audit and checks that it reports exactly the missing jobs. It adds the reported
// ones to RedisLostNamed of the phase; each difference is a violation.
func (w *world) named(short map[string]int) {
	w.t.Helper()
	report, err := w.oracle.audit(w.t.Context(), w.receipts())
	require.NoError(w.t, err)
	said := map[string]string{}
	for _, v := range report.Violations {
		if v.Law == receiptLaw {
			said[v.Group] = v.Detail
			continue
		}
		if v.Law == registryLaw && short[v.Group] > 0 {
			continue // Redis has lost the group, and not the owner key that was written just before it
		}
		w.phase.violate("audit: law %s, group %q: %s", v.Law, v.Group, v.Detail)
	}
	for id, n := range short {
		detail, ok := said[id]
		delete(said, id)
		if !ok || !slices.Contains(strings.Fields(strings.NewReplacer(",", "", ":", " ").Replace(detail)), strconv.Itoa(n)) {
			w.phase.violate("group %s misses %d acknowledged jobs, and the audit says %q", id, n, detail)
			continue
		}
		w.phase.RedisLostNamed += n
	}
	for id, detail := range said {
		w.phase.violate("group %s misses nothing, and the audit says %q", id, detail)
	}
}

// aofCut runs a phase in which the redis-server is killed several times under load. Each time the
// end of its append-only file is cut off, as if a disk cache were lost, and Redis starts again.
func aofCut(t testing.TB, s scene, rng *rand.Rand, m mix, times int) *phase {
	w := newWorld(t, s)
	groups := plan(rng, "aof-cut", m)
	produced := w.produce(t.Context(), groups)
	for range times {
		require.NoError(t, redisx.Sleep(t.Context(), m.during/time.Duration(times+1)))
		w.breaker.server.Kill()
		require.NoError(t, cutTail(w.breaker.server, 1+rng.Int64N(96<<10)))
		require.NoError(t, w.breaker.server.Restart(t.Context()))
		w.rewriteAOF()
		w.phase.Faults[cutAOF]++
	}
	require.NoError(t, produced())
	return w.settleLosses(groups)
}

// rewriteAOF makes Redis rewrite its append-only file, as an operator must do after a cut.
// Otherwise the file still has the first commands of a script that was cut, and Redis executes them
// at its next start.
func (w *world) rewriteAOF() {
	w.t.Helper()
	require.NoError(w.t, w.breaker.rdb.BgRewriteAOF(w.t.Context()).Err())
	w.fleet.await(w.t, "AOF is rewritten", endWithin, func(ctx context.Context) error {
		said, err := w.breaker.rdb.Info(ctx, "persistence").Result()
		if err == nil && !(strings.Contains(said, "aof_rewrite_in_progress:0") && strings.Contains(said, "aof_rewrite_scheduled:0")) {
			err = fmt.Errorf("Redis says %q", said)
		}
		return err
	})
}

// cutTail cuts n bytes off the end of the server's newest append-only file, but at most half of the
// file.
func cutTail(server *redisproc.Server, n int64) error {
	files, err := filepath.Glob(filepath.Join(server.Dir(), "appendonlydir", "*.incr.aof"))
	if err != nil || len(files) == 0 {
		return fmt.Errorf("find the AOF of %s: %w", server.Addr(), os.ErrNotExist)
	}
	newest := slices.MaxFunc(files, func(a, b string) int { return len(a)*1000 + strings.Compare(a, b) - len(b)*1000 })
	info, err := os.Stat(newest)
	if err != nil {
		return err
	}
	return os.Truncate(newest, max(info.Size()/2, info.Size()-n))
}

// elsewhere returns a world on a Redis Cluster or a Redis with Sentinel. It has neither proxies nor
// a breaker, the part that causes faults: the phase itself causes them.
func elsewhere(t testing.TB, s scene, url string, partitions int) *world {
	w := &world{t: t, phase: newPhase(s.name), began: time.Now()}
	w.start(s, func(int) string { return url }, url, partitions)
	return w
}

// sentinel runs a phase on a Redis with Sentinel. Under load, the master is killed several times.
// Each time the replica becomes the master, and the killed one starts again as its replica.
func sentinel(t testing.TB, s scene, rng *rand.Rand, m mix, times int) *phase {
	redis := redistest.Sentinel(t, redistest.AOF, proctest.Users(t))
	w := elsewhere(t, s, redis.URL, 1)
	groups := plan(rng, "sentinel", m)
	produced := w.produce(t.Context(), groups)
	master, replica := redis.Master, redis.Replica
	for range times {
		require.NoError(t, redisx.Sleep(t.Context(), between(rng, time.Second, 2*time.Second)))
		master.Kill()
		redis.AwaitMaster(replica)
		redis.Rejoin(master)
		master, replica = replica, master
		w.phase.Faults[failOver]++
	}
	require.NoError(t, produced())
	return w.settleLosses(groups)
}

// clusterPartitions is the number of partitions in the phase cluster, spread over three masters.
const clusterPartitions = 16

// cluster runs a phase on a Redis Cluster. Under load, masters are killed, masters and their
// replicas exchange their roles, and partitions move to other nodes.
func cluster(t testing.TB, s scene, rng *rand.Rand, m mix, times int) *phase {
	redis := redistest.ClusterWithReplicas(t, 3, redistest.AOF, proctest.Users(t))
	s.env = map[string]string{"BULKACTION_PARTITIONS": strconv.Itoa(clusterPartitions)}
	w := elsewhere(t, s, redis.URL, clusterPartitions)
	groups := plan(rng, "cluster", m)
	produced := w.produce(t.Context(), groups)
	slot := func() int { return redis.SlotOf(w.oracle.space.Partition(rng.IntN(clusterPartitions)).Base()) }
	for range times {
		require.NoError(t, redisx.Sleep(t.Context(), between(rng, 500*time.Millisecond, time.Second)))
		dead := redis.MasterOf(slot())
		dead.Kill()
		redis.AwaitFailover()
		dead.Restart()
		redis.AwaitWhole()
		w.phase.Faults[loseMaster]++

		w.swap(redis, redis.MasterOf(slot()))
		w.phase.Faults[swapMaster]++

		for range 3 {
			moved := slot()
			from := redis.MasterOf(moved)
			to := from
			for to == from {
				to = redis.MasterOf(slot())
			}
			redis.MoveSlot(moved, to)
			w.phase.Faults[reshardSlots]++
		}
	}
	require.NoError(t, produced())
	return w.settleLosses(groups)
}

// swap makes the replica of a master the master, by the command CLUSTER FAILOVER, in which both
// nodes coordinate the change.
func (w *world) swap(cluster *redistest.Clustered, master *redistest.Redis) {
	w.t.Helper()
	_, port, _ := strings.Cut(master.Addr(), ":")
	for _, node := range append(slices.Clone(cluster.Masters), cluster.Replicas...) {
		client := node.Client()
		role := func(ctx context.Context) string { return client.Info(ctx, "replication").Val() }
		if !strings.Contains(role(w.t.Context()), "master_port:"+port) {
			continue
		}
		var asked time.Time
		w.fleet.await(w.t, "failover", endWithin, func(ctx context.Context) error {
			said := role(ctx)
			if strings.Contains(said, "role:master") {
				return nil
			}
			if time.Since(asked) > 6*time.Second { // Redis gives a failover up after 5 s
				asked = time.Now()
				return errors.Join(fmt.Errorf("the replica says %q", said), client.ClusterFailover(ctx).Err())
			}
			return fmt.Errorf("the replica says %q", said)
		})
		cluster.AwaitWhole()
		return
	}
	w.t.Fatalf("master %s has no replica", master.Addr())
}
