package chaos

import (
	"context"
	"errors"
	"fmt"
	"math/rand/v2"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/bulkaction/bulkaction/internal/jobs/ledger"
	"github.com/bulkaction/bulkaction/internal/redisx"
)

// These are the indices of the processes that directed starts, and of their proxies. Each process
// has a proxy of its own.
const (
	theAggregator = iota
	_             // the watcher
	workerCutOff
	workerKilled
	_ // the dispatcher
	_ // the fetcher
	theIngest
	places
)

// directed runs a phase with the faults against which safeguards of the code protect. control names
// a safeguard that is switched off; "": all are on. The faults: replies to ingest and to the
// aggregator are lost, one worker process is cut off from Redis for three leases, and another one
// is killed while it runs jobs.
func directed(t *testing.T, control string) *phase {
	one := map[string]int{"aggregator": 1, "watcher": 1, "worker": 2, "dispatcher": 1, "fetcher": 1, "ingest": 1}
	lease := time.Second
	w := newWorld(t, scene{
		name: control, bins: built(t, taggedBuild), lease: lease, proxies: places, replicas: one,
		env: map[string]string{"BULKACTION_CHAOS_CONTROL": control, "BULKACTION_MAX_DELIVERIES": "10", "BULKACTION_WORKER_COUNT": "10"},
	})
	rng := rand.New(rand.NewPCG(1, 1))
	groups := plan(rng, "directed", mix{jobs: 200, tenants: 2, least: 20, most: 20, ms: 600, ignoreCancel: true, pieces: true})
	b := w.breaker
	b.proxies[theIngest].DropReplies(0.3, rng)
	b.proxies[theAggregator].DropReplies(0.2, rand.New(rand.NewPCG(2, 2)))
	// The type is paused until ingest has handled all messages. Otherwise the workers might never
	// run several jobs at once.
	ctx, partition := t.Context(), w.oracle.space.Partition(0)
	require.NoError(t, ledger.Pause(ctx, w.oracle.conn.Cmd, partition, ledger.PauseType, "CHAOS"))
	require.NoError(t, w.produce(ctx, groups)())
	w.awaitHandled(10 * time.Second)
	require.NoError(t, ledger.Resume(ctx, w.oracle.conn.Cmd, partition, ledger.PauseType, "CHAOS"))
	w.awaitRunning(workerKilled, 2)
	w.awaitRunning(workerCutOff, 2)
	b.proxies[workerCutOff].HalfOpen()
	require.NoError(t, w.fleet.slots[workerKilled].kill(t.Context()))
	require.NoError(t, redisx.Sleep(t.Context(), 3*lease))
	for _, p := range b.proxies {
		p.Heal()
	}
	patience := 15 * time.Second // a group that lost jobs because of a missing safeguard does not end
	if control == "" {
		patience = endWithin
	}
	return w.settle(groups, patience)
}

// awaitHandled waits until no message is left in the ingest stream. Replies to ingest may get lost
// only during the time lossy: without this limit, chance would decide how long the wait takes.
func (w *world) awaitHandled(lossy time.Duration) {
	w.t.Helper()
	healing := time.AfterFunc(lossy, w.breaker.proxies[theIngest].Heal)
	defer healing.Stop()
	w.fleet.await(w.t, "handled messages", endWithin, func(ctx context.Context) error {
		left, err := w.oracle.conn.Cmd.XLen(ctx, w.oracle.space.Ingest()).Result()
		if err == nil && left > 0 {
			err = fmt.Errorf("%w: %d are left", errNotHandled, left)
		}
		return err
	})
}

var errNotHandled = errors.New("ingest has not handled all messages")

// awaitRunning waits until, by its own file, the worker process in slot `place` of the fleet runs
// at least n jobs.
func (w *world) awaitRunning(place, n int) {
	w.t.Helper()
	p := w.fleet.slots[place].running(w.t.Context())
	w.fleet.await(w.t, "jobs in flight", endWithin, func(context.Context) error {
		runs, err := readRuns(w.fleet.files)
		if err != nil {
			return err
		}
		running, ended := map[string]int{}, map[string]int{} // by process
		for _, of := range runs {
			for _, e := range of {
				if e.how == "" {
					running[e.process]++
				} else {
					ended[e.process]++
				}
			}
		}
		if running[p.name] < n {
			return fmt.Errorf("%w in %s: running %v, ended %v", errTooFew, p.name, running, ended)
		}
		return nil
	})
}

// TestGuards shows that the tests would notice a missing safeguard of the code. The same faults
// cause no violation while all safeguards are on, and a violation while one of attempt, retry and
// order is off.
func TestGuards(t *testing.T) {
	if testing.Short() {
		t.Skip("starts many processes")
	}
	for _, control := range []string{"", "attempt", "retry", "order"} {
		t.Run("without "+control, func(t *testing.T) {
			t.Parallel()
			r := directed(t, control)
			if control == "" {
				require.False(t, r.red(), "%v", r.Violations)
				require.Positive(t, r.StaleRefused, "late outcomes were refused")
				return
			}
			// Chance decides which replies are lost. A run in which no lost reply needed the
			// safeguard has no violation, so there are up to three more runs.
			for range 3 {
				if r.red() {
					break
				}
				r = directed(t, control)
			}
			require.True(t, r.red())
			t.Logf("lost %d, duplicate effects %d, first of %d violations: %s", r.Lost, r.DuplicateEffects, len(r.Violations), r.Violations[0])
		})
	}
}
