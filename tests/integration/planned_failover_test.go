package integration

import (
	"fmt"
	"net/http"
	"slices"
	"strings"
	"sync"
	"sync/atomic"
	"testing"

	"github.com/stretchr/testify/require"

	"github.com/bulkaction/bulkaction/internal/testkit/proctest"
	"github.com/bulkaction/bulkaction/internal/testkit/redistest"
)

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
