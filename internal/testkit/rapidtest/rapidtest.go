// Package rapidtest runs property tests of rapid with the same random sequences in each run of the
// tests. It hides how the seed of rapid is set, and runs a model against a real Redis.
package rapidtest

import (
	"flag"
	"hash/fnv"
	"os"
	"path/filepath"
	"strconv"
	"sync"
	"sync/atomic"
	"testing"

	"github.com/redis/go-redis/v9"
	"pgregory.net/rapid"

	"github.com/bulkaction/bulkaction/internal/testkit/redistest"
)

// seedFlag and checksFlag are the names of rapid's flags for a seed and for the number of sequences.
// RAPID_SEED and RAPID_CHECKS set their defaults; 0 means no seed.
const seedFlag, checksFlag = "rapid.seed", "rapid.checks"

// apart is the distance between the seeds of two rounds. It must be large, because within a round
// of n checks rapid adds up to about n² / 2 to the seed.
const apart = 1 << 40

var (
	mu    sync.Mutex // held from the time at which the flags are set until rapid has read them
	given = sync.OnceValue(func() uint64 {
		return flag.Lookup(seedFlag).Value.(flag.Getter).Get().(uint64)
	})
)

// Check runs rapid.Check for one round of a test; the first round is 0. Each round draws random
// sequences of its own. They are derived from the name of the test, so they are the same in each
// run.
//
// The flag -rapid.seed, or RAPID_SEED, selects other sequences: the first one of round 0 has this
// seed. So the seed that rapid prints for a failure repeats the failure at once, whichever round
// found it.
//
// A test that uses Check must not call rapid.Check itself: it would read the flag while Check sets
// it for another test.
func Check(t rapid.TB, round int, property func(*rapid.T)) {
	t.Helper()
	check(t, round, 1, property)
}

// CheckFew is Check of round 0 with a fifth of the sequences, for a property that takes long; with
// all if soaking.
func CheckFew(t rapid.TB, property func(*rapid.T)) {
	t.Helper()
	if soaking() {
		check(t, 0, 1, property)
	} else {
		check(t, 0, 5, property)
	}
}

func check(t rapid.TB, round, of int, property func(*rapid.T)) {
	t.Helper()
	mu.Lock()
	checks := flag.Lookup(checksFlag).Value.(flag.Getter).Get().(int)
	unlock := sync.OnceFunc(func() {
		_ = flag.Set(checksFlag, strconv.Itoa(checks)) // it had this value
		mu.Unlock()
	})
	defer unlock()
	if err := flag.Set(checksFlag, strconv.Itoa((checks+of-1)/of)); err != nil {
		t.Fatalf("set the number of checks: %v", err)
	}
	seed := given()
	if seed == 0 {
		h := fnv.New32a()
		_, _ = h.Write([]byte(t.Name()))
		seed = 1 + uint64(h.Sum32())
	}
	if err := flag.Set(seedFlag, strconv.FormatUint(seed+uint64(round)*apart, 10)); err != nil {
		t.Fatalf("set the seed: %v", err)
	}
	rapid.Check(t, func(rt *rapid.T) { //nolint:forbidigo // with the seed that is set here
		unlock() // rapid has read the flags
		property(rt)
	})
}

// soaking says whether all sequences are to be tried, as by `make soak`.
func soaking() bool { return os.Getenv("BULKACTION_SOAK") != "" }

// callers is how many goroutines OnRedis calls a property from, each with a database of its own.
const callers = 4

// OnRedis starts a redis-server and checks a property on it for a tenth of the rounds, at least
// one; all if soaking. A round tries 100 random
// sequences, or the number given by -rapid.checks. connect is called once for each goroutine.
func OnRedis[C any](t *testing.T, rounds int, connect func(*redis.Options) C, property func(*rapid.T, C)) {
	t.Helper()
	if !soaking() {
		rounds = max(1, rounds/10)
	}
	socket := filepath.Join(t.TempDir(), "s")
	redistest.Server(t, redistest.Args("--unixsocket", socket)) // half the CPU time of TCP
	var next atomic.Int64
	var wg sync.WaitGroup
	for i := range callers {
		c := connect(&redis.Options{Network: "unix", Addr: socket, DB: i})
		wg.Go(func() {
			for round := int(next.Add(1) - 1); round < rounds && !t.Failed(); round = int(next.Add(1) - 1) {
				Check(t, round, func(rt *rapid.T) { property(rt, c) })
			}
		})
	}
	wg.Wait()
}

// Quick is a rapid.T whose method Helper does nothing, because it only costs time: rapid itself
// shows where a check has failed.
type Quick struct{ *rapid.T }

// Helper does nothing.
func (Quick) Helper() {}
