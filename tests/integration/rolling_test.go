package integration

import (
	"fmt"
	"os"
	"strconv"
	"strings"
	"syscall"
	"testing"
	"time"

	"github.com/redis/go-redis/v9"
	"github.com/stretchr/testify/require"

	"github.com/bulkaction/bulkaction/api"
	"github.com/bulkaction/bulkaction/client"
)

// TestRollingRestarts: the only process of each role is replaced under load, one role after the
// other, in ROLLING_ROUNDS rounds (default 2). Each process ends within its grace period of 15 s,
// no job is lost, and no connection is left when all have stopped.
func TestRollingRestarts(t *testing.T) {
	t.Parallel()
	rounds := 2
	if n, err := strconv.Atoi(os.Getenv("ROLLING_ROUNDS")); err == nil {
		rounds = n
	}
	const grace = 15 * time.Second
	s := start(t, apart, env("WORKER_TIMEOUT", "100ms"), env("SHUTDOWN_GRACE_PERIOD", grace.String()), env("LEASE", "5s"))
	type group struct {
		id   string
		jobs int64
	}
	var all []group
	submit := func() {
		i := len(all)
		g := group{fmt.Sprint("g-", i), int64(20 + i%60)}
		all = append(all, g)
		if i%2 == 0 {
			s.submit(client.Submission{ID: g.id, Tenant: fmt.Sprint("t", i%5), Type: "NOOP", Jobs: jobs(int(g.jobs), `{"sleep_ms":30}`), Seal: true})
			return
		}
		s.xadd(s.space.Ingest(), "type", groupSubmit, "data", fmt.Sprintf(`{"id":%q,"tenant":"t%d","type":"NOOP","total":%d}`, g.id, i%5, g.jobs))
		for range g.jobs {
			s.xadd(s.space.Ingest(), "type", jobsAppend, "data", fmt.Sprintf(`{"group":%q,"jobs":[{"payload":{"sleep_ms":30}}]}`, g.id))
		}
	}
	for range 5 {
		submit()
	}
	for range rounds {
		for _, role := range roles {
			submit()
			old := s.procs[role][len(s.procs[role])-1]
			s.add(role)
			if role == "ingest" {
				s.api = client.NewAPI(s.url(len(s.procs[role]) - 1))
			}
			submit()
			old.Signal(syscall.SIGTERM)
			require.Equal(t, 0, old.Wait(grace), "exit code of %s", role)
		}
	}
	submit()
	for _, g := range all {
		s.await("group "+g.id+" ends", func() bool { return s.group(g.id).Status.Ended() })
		require.Equal(t, api.Counts{Accepted: g.jobs, Done: g.jobs}, s.group(g.id).Counts, g.id)
		require.Len(t, s.results(g.id), int(g.jobs))
	}
	s.stopAll()
	s.await("no connection left", func() bool { return connections(t, s.rdb) == 0 })
}

// connections returns how many clients are connected to Redis, without the connections of rdb.
func connections(t testing.TB, rdb redis.UniversalClient) int {
	t.Helper()
	list, err := rdb.ClientList(t.Context()).Result()
	require.NoError(t, err)
	return strings.Count(list, "id=") - int(rdb.PoolStats().TotalConns)
}
