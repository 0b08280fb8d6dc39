package chaos

import (
	"context"
	"errors"
	"fmt"
	"math/rand/v2"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/bulkaction/bulkaction/internal/jobs/ledger"
	"github.com/bulkaction/bulkaction/internal/redisx"
	"github.com/bulkaction/bulkaction/lua"
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

// edit is a change of a script: instead replaces guard, a text that keeps a rule.
type edit struct{ script, guard, instead string }

// controls are edits that break a rule of the scripts, by the name of the safeguard that is off.
var controls = map[string][]edit{
	// A report counts, whatever became of its attempt meanwhile.
	"attempt": {
		{"jobs/outcome", "local mine = live and states[i] == 'I' .. m\n", "local mine = live and states[i] ~= ''\n"},
		{
			"jobs/outcome",
			"local mine = live and (state == (kind == 'u' and 'R' or 'I') .. m or kind == 'd' and state == 'R' .. m)\n",
			"local mine = live and state ~= ''\n",
		},
	},
	// An append that is asked again is applied again.
	"retry": {
		{"jobs/append", "if mode ~= '' and g[10] then return { 'DUP' } end\n", ""},
		{"jobs/append", "if piece and piece < tonumber(g[11] or 0) then return { 'DUP' } end\n", ""},
		{
			"jobs/append",
			"if request ~= '' and not piece and (applied[request] or call('ZSCORE', known, request)) " +
				"then return { 'DUP' } end\n",
			"",
		},
	},
	// An entry leaves its stream before its job has run.
	"order": {
		{"jobs/start", "local all = g[1] and", "local all = false and g[1] and"},
		{"jobs/start", "new[i] = 'I' .. mark(token)", "new[i], gone[#gone + 1] = 'I' .. mark(token), entries[i]"},
	},
}

// without returns a folder with the scripts without a safeguard, for CHAOS_LUA; "" if control is.
func without(t *testing.T, control string) string {
	t.Helper()
	if control == "" {
		return ""
	}
	changed := map[string]string{}
	for _, e := range controls[control] {
		text, ok := changed[e.script]
		if !ok {
			text = lua.Source(e.script)
		}
		require.Equal(t, 1, strings.Count(text, e.guard), "%s: %q has moved: let the control follow", e.script, e.guard)
		changed[e.script] = strings.Replace(text, e.guard, e.instead, 1)
	}
	folder := t.TempDir()
	for script, text := range changed {
		file := filepath.Join(folder, script+".lua")
		require.NoError(t, os.MkdirAll(filepath.Dir(file), 0o700))
		require.NoError(t, os.WriteFile(file, []byte(text), 0o600))
	}
	return folder
}

// directed runs a phase with the faults against which safeguards of the code protect. control names
// a safeguard that is switched off; "": all are on. The faults: replies to ingest and to the
// aggregator are lost, one worker process is cut off from Redis for three leases, and another one
// is killed while it runs jobs.
func directed(t *testing.T, control string) *phase {
	one := map[string]int{"aggregator": 1, "watcher": 1, "worker": 2, "dispatcher": 1, "fetcher": 1, "ingest": 1}
	lease := time.Second
	w := newWorld(t, scene{
		name: control, bins: built(t), lease: lease, proxies: places, replicas: one,
		env: map[string]string{"CHAOS_LUA": without(t, control), "BULKACTION_MAX_DELIVERIES": "10", "BULKACTION_WORKER_COUNT": "10"},
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
