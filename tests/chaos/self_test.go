package chaos

import (
	"encoding/json"
	"fmt"
	"math/rand/v2"
	"os"
	"path/filepath"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/bulkaction/bulkaction/api"
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
