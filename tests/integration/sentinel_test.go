package integration

import (
	"testing"

	"github.com/bulkaction/bulkaction/internal/testkit/proctest"
	"github.com/bulkaction/bulkaction/internal/testkit/redistest"
)

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
