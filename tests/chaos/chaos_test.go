// Package chaos runs real processes on a real Redis and causes faults of many kinds. By the results
// and failures in Redis, the audit, and files that the workers write, it checks that no job is lost
// and none counts twice. `make chaos` is the full run; without CHAOS_FULL the tests are short.
package chaos

import (
	"maps"
	"math/rand/v2"
	"os"
	"runtime"
	"strconv"
	"strings"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/bulkaction/bulkaction/internal/testkit/proctest"
	"github.com/bulkaction/bulkaction/internal/testkit/redisproc"
)

// number returns the integer in the environment variable `name`; if it is not set, the value of the
// parameter otherwise.
func number(t testing.TB, name string, otherwise uint64) uint64 {
	t.Helper()
	text := os.Getenv(name)
	if text == "" {
		return otherwise
	}
	n, err := strconv.ParseUint(text, 10, 64)
	require.NoError(t, err, name)
	return n
}

// full is the number of faults of each kind in the phase single of the full run.
var full = counts{
	killProcess: 100, stopProcess: 50, restartRedis: 20, flushScripts: 10, fillMemory: 10,
	delayAll: 50, resetAll: 50, halfOpen: 50, dropReplies: 50,
}

// fewFaults is the number of faults of each kind in the short run.
var fewFaults = counts{
	killProcess: 4, stopProcess: 2, restartRedis: 1, flushScripts: 1, fillMemory: 1,
	delayAll: 1, resetAll: 1, halfOpen: 1, dropReplies: 1,
	delConsumer: 3, setID: 3, deleteStream: 2, deleteEntries: 2, writeGarbage: 3, stalledBodies: 1, silentReaders: 1, hostileIDs: 1,
}

// TestChaos is the full run if CHAOS_FULL is set. Otherwise it is one phase admin of 600 jobs with
// the faults in fewFaults. It prints the report, and fails if the report has a violation, a lost
// job or a duplicate effect.
func TestChaos(t *testing.T) {
	if testing.Short() {
		t.Skip("starts many processes")
	}
	seed := number(t, "CHAOS_SEED", 1)
	t.Logf("CHAOS_SEED=%d", seed)
	rng := func(n uint64) *rand.Rand { return rand.New(rand.NewPCG(seed, n)) }
	r := &report{Seed: seed, phase: *newPhase(""), Versions: versions(t)}
	s := scene{bins: built(t), proxies: 3, replicas: many}
	if os.Getenv("CHAOS_FULL") == "" {
		s.name, s.lease = "short", time.Second
		s.env = map[string]string{"BULKACTION_AUDIT_INTERVAL": "1s"}
		r.add(admin(t, s, rng(1), mix{jobs: 600, crashes: 1, tenants: 3, least: 10, most: 60, during: 10 * time.Second}, fewFaults))
	} else {
		s.lease = 2 * time.Second
		fullRun(t, s, r, rng)
	}
	require.NoError(t, r.print())
	require.False(t, r.red(), "%d violations; the first ones:\n%s", len(r.Violations), strings.Join(r.Violations[:min(10, len(r.Violations))], "\n"))
}

// fullRun runs all phases, or those that CHAOS_PHASES lists.
func fullRun(t *testing.T, s scene, r *report, rng func(uint64) *rand.Rand) {
	jobs := int(number(t, "CHAOS_JOBS", 20_000))
	only := os.Getenv("CHAOS_PHASES")
	for i, p := range []struct {
		name string
		run  func(t testing.TB, s scene, rng *rand.Rand) *phase
	}{
		{"single", func(t testing.TB, s scene, rng *rand.Rand) *phase {
			during := time.Duration(full.total()) * time.Second
			return single(t, s, rng, mix{jobs: jobs, crashes: 20, tenants: 5, least: 20, most: 200, during: during}, maps.Clone(full))
		}},
		{"lossy", func(t testing.TB, s scene, rng *rand.Rand) *phase {
			return lossy(t, s, rng, mix{jobs: 20_000, tenants: 5, least: 100, most: 1000, quick: true})
		}},
		{"aof-cut", func(t testing.TB, s scene, rng *rand.Rand) *phase {
			return aofCut(t, s, rng, mix{jobs: 5000, crashes: 2, tenants: 5, least: 20, most: 200, during: 30 * time.Second}, 5)
		}},
		{"sentinel", func(t testing.TB, s scene, rng *rand.Rand) *phase {
			return sentinel(t, s, rng, mix{jobs: 10_000, crashes: 2, tenants: 5, least: 20, most: 200, during: 2 * time.Minute}, 10)
		}},
		{"cluster", func(t testing.TB, s scene, rng *rand.Rand) *phase {
			return cluster(t, s, rng, mix{jobs: 10_000, crashes: 2, tenants: 20, least: 20, most: 200, during: time.Minute}, 4)
		}},
		{"rolling", func(t testing.TB, s scene, rng *rand.Rand) *phase {
			return rolling(t, s, rng, mix{jobs: 5000, tenants: 5, least: 20, most: 200, during: 2 * time.Minute}, 20)
		}},
		{"admin", func(t testing.TB, s scene, rng *rand.Rand) *phase {
			s.env = map[string]string{"BULKACTION_WORKER_COUNT": "3"} // few slots, so that jobs wait in the ready stream
			m := mix{jobs: 5000, crashes: 2, tenants: 5, least: 10, most: 100, during: 90 * time.Second}
			r := admin(t, s, rng, m, maps.Clone(adminFaults))
			for kind := range adminFaults {
				if r.Faults[kind] == 0 {
					r.violate("no fault of kind %s has had an effect", kind)
				}
			}
			for _, answer := range []string{silentReaders + ": 200", stalledBodies + ": 408", endlessLine + ": 413"} {
				if r.Answers[answer] == 0 {
					r.violate("no client got the answer %s", answer)
				}
			}
			if r.EndedAsLost == 0 {
				r.violate("no job has ended as LOST: the commands have deleted nothing of value")
			}
			return r
		}},
	} {
		if only != "" && !strings.Contains(","+only+",", ","+p.name+",") {
			continue
		}
		t.Run(p.name, func(t *testing.T) {
			s.name = p.name
			result := p.run(t, s, rng(uint64(i+1)))
			r.add(result)
		})
	}
}

// versions returns the versions of Redis and Go that the run uses, for the report.
func versions(t testing.TB) map[string]string {
	t.Helper()
	server, err := redisproc.Start(t.Context(), redisproc.Options{})
	require.NoError(t, err)
	defer func() { require.NoError(t, server.Close()) }()
	b, err := newBreaker(server, time.Second, 0)
	require.NoError(t, err)
	defer b.close()
	info, err := b.rdb.Info(t.Context(), "server").Result()
	require.NoError(t, err)
	_, version, _ := strings.Cut(info, "redis_version:")
	version, _, _ = strings.Cut(version, "\r\n")
	return map[string]string{"redis": version, "go": strings.TrimPrefix(runtime.Version(), "go")}
}

func TestMain(m *testing.M) { os.Exit(proctest.Run(m, "./cmd/bulkaction", "./tests/testworker")) }

// binaries has the paths of two programs: bulkaction, which runs as each other role and as the
// audit, and the worker of these tests.
type binaries struct{ bulkaction, worker string }

func built(t testing.TB) binaries {
	t.Helper()
	return binaries{proctest.Path(t, "bulkaction"), proctest.Path(t, "testworker")}
}
