package chaos

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"math/rand/v2"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/bulkaction/bulkaction/api"
	"github.com/bulkaction/bulkaction/internal/jobs/ledger"
	"github.com/bulkaction/bulkaction/internal/redisx"
	"github.com/bulkaction/bulkaction/lua"
)

// These tests check the harness's own computations.

func TestASeedDecidesEverything(t *testing.T) {
	seeded := func(seed uint64) ([]*group, []time.Duration) {
		rng := rand.New(rand.NewPCG(seed, 1))
		groups := plan(rng, "x", mix{jobs: 500, crashes: 3, tenants: 2, least: 5, most: 20, during: time.Minute})
		var times []time.Duration
		for _, f := range schedule(rng, full, time.Minute) {
			times = append(times, f.at)
			require.NotNil(t, f.rng)
		}
		return groups, times
	}
	groups, times := seeded(1)
	again, timesAgain := seeded(1)
	require.Equal(t, groups, again)
	require.Equal(t, times, timesAgain)
	require.IsNonDecreasing(t, times)
	require.Len(t, times, 390)
	others, _ := seeded(2)
	require.NotEqual(t, groups, others)
	jobs, crashes := 0, 0
	for _, g := range groups {
		for _, j := range g.jobs {
			jobs++
			if j.Crash {
				crashes++
			}
		}
	}
	require.Equal(t, 500, jobs)
	require.Equal(t, 3, crashes)
}

func TestRecoveriesAreReadFromTheWorkersFiles(t *testing.T) {
	dir := t.TempDir()
	write := func(name, lines string) {
		require.NoError(t, os.WriteFile(filepath.Join(dir, name), []byte(lines), 0o600))
	}
	at := func(seconds int64) time.Time { return time.Unix(seconds, 0) }
	const s = "000000000"
	write("killed", "start g.0 1 10"+s+"\nstart g.1 1 10"+s+"\nend g.1 1 11"+s+"\n")
	write("stopped", "start g.2 1 10"+s+"\nend g.2 1 30"+s+"\nstart g.3 1 10"+s+"\nfail g.3 1 30"+s+"\n")
	write("crashed", "start g.4 1 10"+s+"\ncrash g.4 1 12"+s+"\n")
	write("well", "start g.0 2 15"+s+"\nend g.0 2 16"+s+"\nstart g.2 2 17"+s+"\nend g.2 2 18"+s+"\nstart g.3 2 40"+s+"\nstart g.4 2 14"+s+"\n")
	runs, err := readRuns(dir)
	require.NoError(t, err)
	require.Len(t, runs, 5)
	got := recoveries(runs, []span{{process: "killed", from: at(12)}, {process: "stopped", from: at(11), until: at(30)}})
	require.ElementsMatch(t, []time.Duration{3 * time.Second, 6 * time.Second, 2 * time.Second}, got, "g.3 was not taken back from the stopped process")
	require.Equal(t, 6*time.Second, percentile(got, 0.99))

	write("torn", "end g.9 1 10"+s+"\n")
	_, err = readRuns(dir)
	require.ErrorContains(t, err, "its start is missing")
}

// TestTheOracleSeesLosses gives the oracle one group of three jobs with different outcomes. The
// oracle may report no violation only if each job ended once, as planned, or as LOST after its
// entry was deleted.
func TestTheOracleSeesLosses(t *testing.T) {
	at := time.Unix(100, 0)
	lost := func(ordinal int64) api.Failure {
		return api.Failure{Ordinal: ordinal, Code: codeLost, Error: "the job was ready and vanished", At: at.Add(3 * time.Second)}
	}
	crashed := func(ordinal int64) api.Failure {
		return api.Failure{Ordinal: ordinal, Code: "WORKER_LOST", Error: "its workers died", At: at}
	}
	group := &group{id: "g", jobs: []payload{{N: 0, Value: 5}, {N: 1, Crash: true}, {N: 2, Value: 7}}}
	// The ordinals of the jobs differ from their indices in the plan: the job with ordinal 0 has
	// index 2.
	type deleted = map[int64]deletion
	for name, c := range map[string]struct {
		deleted  deleted
		results  map[int64]int // index by ordinal
		failures []api.Failure
		done     int64
		codes    map[string]int64
		lost     int
		red      bool
	}{
		"as planned":                  {nil, map[int64]int{0: 2, 2: 0}, []api.Failure{crashed(1)}, 2, map[string]int64{"WORKER_LOST": 1}, 0, false},
		"lost after a deletion":       {deleted{0: {2, at}}, map[int64]int{2: 0}, []api.Failure{crashed(1), lost(0)}, 1, map[string]int64{"WORKER_LOST": 1, codeLost: 1}, 0, false},
		"a crash lost after deletion": {deleted{1: {1, at}}, map[int64]int{0: 2, 2: 0}, []api.Failure{lost(1)}, 2, map[string]int64{codeLost: 1}, 0, false},
		"deleted, and done":           {deleted{0: {2, at}}, map[int64]int{0: 2, 2: 0}, []api.Failure{crashed(1)}, 2, map[string]int64{"WORKER_LOST": 1}, 0, false},
		"a job is missing":            {deleted{0: {2, at}}, map[int64]int{2: 0}, []api.Failure{crashed(1)}, 2, map[string]int64{"WORKER_LOST": 1}, 1, true},
		"lost without a deletion":     {deleted{2: {0, at}}, map[int64]int{2: 0}, []api.Failure{crashed(1), lost(0)}, 1, map[string]int64{"WORKER_LOST": 1, codeLost: 1}, 1, true},
		"lost, and done":              {deleted{0: {2, at}}, map[int64]int{0: 2, 2: 0}, []api.Failure{crashed(1), lost(0)}, 1, map[string]int64{"WORKER_LOST": 1, codeLost: 1}, 0, true},
		"found too late":              {deleted{0: {2, at.Add(-endWithin)}}, map[int64]int{2: 0}, []api.Failure{crashed(1), lost(0)}, 1, map[string]int64{"WORKER_LOST": 1, codeLost: 1}, 0, true},
		"lost, but counted as done":   {deleted{0: {2, at}}, map[int64]int{2: 0}, []api.Failure{crashed(1), lost(0)}, 2, map[string]int64{"WORKER_LOST": 1}, 0, true},
	} {
		t.Run(name, func(t *testing.T) {
			r, e := newPhase(""), newEnds(group, c.deleted)
			got := api.Group{Counts: api.Counts{Accepted: 3, Done: c.done, Failed: 3 - c.done}, FailuresByCode: c.codes}
			sum := int64(0)
			for ordinal, n := range c.results {
				e.add(r, ordinal, n, payload.done, "a result")
				sum += group.jobs[n].Value
			}
			e.addFailures(r, c.failures)
			e.judge(r)
			got.Aggregate = map[string]json.RawMessage{"n": json.RawMessage(fmt.Sprint(len(c.results))), "sum": json.RawMessage(fmt.Sprint(sum))}
			judgeCounts(r, group, e.lost, got)
			require.Equal(t, c.red, r.red(), "%v", r.Violations)
			require.Equal(t, c.lost, r.Lost, "%v", r.Violations)
			if r.EndedAsLost > 0 && name != "found too late" {
				require.InDelta(t, 3, r.LostWithin, 0.01)
			}
		})
	}
}

func TestDeletionsAreReadFromEntries(t *testing.T) {
	at := time.Unix(1, 0)
	d := newDeletions()
	for _, e := range []struct {
		in     string
		fields []string
	}{
		{readyStream, []string{"j", `g|CHAOS|0|0|0|0|0|0|0|0||7|0||{"n":3,"value":1}`}},
		{readyStream, []string{`h|CHAOS|1|0|0|0|0|0|0|0||`, `0|0||{"n":1}`}},
		{readyStream, []string{garbageText, garbageText}},
		{resultStream, []string{"g", "g", "l", `{"ordinal":2,"data":{"n":4,"value":1}}` + "\n" + `{"ordinal":3,"data":{"n":5,"value":1}}`, "t", ""}},
		{resultStream, []string{"g", "g", "l", garbageText, "t", ""}},
		{ingestStream, []string{"type", "jobs.append", "data", `{"group":"i","jobs":[]}`}},
		{ingestStream, []string{"type", "group.submit", "data", `{"id":"k"}`}},
		{ingestStream, []string{"type", "group.submit"}},
	} {
		require.NoError(t, d.note(e.in, e.fields, at))
	}
	require.Equal(t, map[string]map[int64]deletion{"g": {7: {3, at}, 2: {4, at}, 3: {5, at}}, "h": {0: {1, at}}}, d.jobs)
	require.Equal(t, map[string]bool{"i": true, "k": true}, d.messages)
	require.Equal(t, 4, d.count())
	require.Error(t, d.note(readyStream, []string{"j", `g|CHAOS|0|0|0|0|0|0|0|0||7|0||`}, at), "its payload is missing")
}

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
			"if applied[request] or seen and not older then return { 'DUP' } end\n",
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
		env: map[string]string{
			"CHAOS_LUA": without(t, control), "BULKACTION_MAX_DELIVERIES": "10", "BULKACTION_WORKER_COUNT": "10",
			"CHAOS_BATCH": "", // a killed worker would leave so many suspects, which run one by one, that a minute is too short
		},
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
