// Package chaos breaks the system in every way that its design can meet, on real processes and a
// real Redis, and proves with the workers' own files that nothing is lost and nothing counts twice.
// `make chaos` is the whole run; the tests run a bit of it.
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

	"github.com/bulkaction/bulkaction/internal/redisproc"
)

// number is a variable's, or else what is given.
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

// full is what the whole run does on one redis-server.
var full = counts{
	killProcess: 100, stopProcess: 50, restartRedis: 20, flushScripts: 10, fillMemory: 10,
	delayAll: 50, resetAll: 50, halfOpen: 50, dropReplies: 50,
}

// taste is one or some of each.
var taste = counts{
	killProcess: 4, stopProcess: 2, restartRedis: 1, flushScripts: 1, fillMemory: 1,
	delayAll: 1, resetAll: 1, halfOpen: 1, dropReplies: 1,
}

// TestChaos is the whole run with CHAOS_FULL, and a short one without.
func TestChaos(t *testing.T) {
	if testing.Short() {
		t.Skip("starts many processes")
	}
	seed := number(t, "CHAOS_SEED", 1)
	t.Logf("CHAOS_SEED=%d", seed)
	rng := func(n uint64) *rand.Rand { return rand.New(rand.NewPCG(seed, n)) }
	r := &report{Seed: seed, phase: *newPhase(""), Versions: versions(t)}
	s := scene{bins: built(t, plainBuild), proxies: 3, replicas: many}
	if os.Getenv("CHAOS_FULL") == "" {
		s.name, s.lease = "single", time.Second
		r.add(single(t, s, rng(1), mix{jobs: 600, crashes: 1, tenants: 3, least: 10, most: 60, during: 10 * time.Second}, taste))
	} else {
		s.lease = 2 * time.Second
		fullRun(t, s, r, rng)
	}
	require.NoError(t, r.print())
	require.False(t, r.red(), "%d violations; the first ones:\n%s", len(r.Violations), strings.Join(r.Violations[:min(10, len(r.Violations))], "\n"))
}

// fullRun goes through all phases, or through those that CHAOS_PHASES names.
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

// versions of what the run has run on.
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
