package bench

import (
	"encoding/json"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/bulkaction/bulkaction/bench/measure"
	"github.com/bulkaction/bulkaction/internal/jobs/ledger"
	"github.com/bulkaction/bulkaction/internal/process/journal"
)

func starts(group string, every time.Duration, from, to time.Duration) []journal.StartEvent {
	var out []journal.StartEvent
	for at := from; at <= to; at += every {
		out = append(out, journal.StartEvent{At: at.Microseconds(), Group: group})
	}
	return out
}

func TestBusySpanIsWhileAllGroupsHaveWork(t *testing.T) {
	log := journal.Log{Starts: append(starts("a", 10*time.Millisecond, 0, 6*time.Second), starts("b", 20*time.Millisecond, 500*time.Millisecond, 9*time.Second)...)}
	groups := []group{{id: "a"}, {id: "b"}}
	s, err := findBusySpan(log, groups)
	require.NoError(t, err)
	require.EqualValues(t, 1_500_000, s.from, "one second after the first start of the group that began last")
	require.EqualValues(t, 5_000_000, s.to, "one second before the last start of the group that ended first")
	require.Equal(t, []int64{350, 175}, s.counts)
	require.InDelta(t, 0.0, worstDeviation(s.counts, []float64{2, 1}), 1e-9)

	_, err = findBusySpan(log, append(groups, group{id: "c"}))
	require.ErrorContains(t, err, "no start was logged")
	_, err = findBusySpan(journal.Log{Starts: append(starts("a", time.Millisecond, 0, time.Second), starts("b", time.Millisecond, 0, time.Second)...)}, groups)
	require.ErrorContains(t, err, "less than two seconds")
}

func TestLongestGap(t *testing.T) {
	events := at(0, 1, 1200, 1, 1500, 1, 4000, 1)
	require.EqualValues(t, 500_000, longestGap(events, 1_000_000, 2_000_000), "the time from the last event to the end is a gap too")
	require.EqualValues(t, 2_500_000, longestGap(events, 1_000_000, 4_100_000))
	require.EqualValues(t, 1_000_000, longestGap(nil, 1_000_000, 2_000_000), "without events the gap is the whole span")
}

func TestParseMonitorLineIgnoresCommandsOfScripts(t *testing.T) {
	require.Equal(t, clientCommand{"127.0.0.1:54321", "evalsha"}, parseMonitorLine("+1700000000.123456 [0 127.0.0.1:54321] \"evalsha\" \"x\"\r\n"))
	require.Equal(t, clientCommand{"[::1]:54321", "ping"}, parseMonitorLine("+1700000000.123456 [3 [::1]:54321] \"PING\"\r\n"))
	require.Empty(t, parseMonitorLine("+1700000000.123456 [0 lua] \"get\" \"] a [\"\r\n"))
	require.Empty(t, parseMonitorLine("+OK\r\n"))
}

func TestCommandTime(t *testing.T) {
	info := "# Commandstats\r\ncmdstat_eval:calls=1,usec=9,usec_per_call=9.00\r\ncmdstat_evalsha:calls=3,usec=120,usec_per_call=40.00,rejected_calls=0\r\n"
	byName := measure.ReadInfo(info).ByName
	require.Equal(t, measure.Command{Calls: 3, US: 120}, byName["evalsha"])
	require.Equal(t, measure.Command{Calls: 1, US: 9}, byName["eval"])
	require.Zero(t, byName["get"])
}

func TestCountTries(t *testing.T) {
	r := countTries([]tryResult{
		{accepted: true},
		{retryAfter: 2 * time.Second}, {afterWait: true, accepted: true},
		{retryAfter: time.Second}, {afterWait: true, retryAfter: 4 * time.Second}, {afterWait: true, accepted: true},
	})
	require.Equal(t, RetryAfter{
		RetryAccepted: 0.6667, RetryTries: 3, RetryFirstRefused: 2, RetryFirstTries: 3, RetryWaitP50: 2, RetryWaitMax: 4,
	}, r)
	require.Zero(t, countTries(nil).RetryAccepted)
}

func TestFairnessShowsOnlyThePartsThatRan(t *testing.T) {
	b, err := json.Marshal(Fairness{Weights: &Weights{}, Overrides: map[string]map[string]string{}})
	require.NoError(t, err)
	require.JSONEq(t, `{"weight_error":0,"weight_shares":null,"weight_starts":0,"overrides":{}}`, string(b))
}

func TestPerSecondCountsPermitsAndStarts(t *testing.T) {
	require.Equal(t, []SecondOfTenants{{0, 5, 1}, {1, 0, 4}, {2, 3, 0}, {3, 0, 2}},
		perSecond(at(1500, 5, 3100, 3), at(900, 7, 1600, 1, 2000, 4, 4000, 2)), "starts before the first permit are left out")
}

func TestMakespanIsFromTheFirstAcceptedToTheLastEnded(t *testing.T) {
	times := func(created, jobsEnded, completed int64) groupState {
		at := time.UnixMilli
		return groupState{Progress: ledger.Progress{Created: at(created), JobsEnded: at(jobsEnded), Completed: at(completed)}}
	}
	require.InDelta(t, 4.5, makespan([]groupState{times(2000, 3000, 3000), times(1000, 2000, 2000), times(1500, 5500, 9000)}), 1e-9)
}

func TestOverridesAreWhatTheProcessesAreGiven(t *testing.T) {
	// a variable of this process: the fleet does not inherit it
	t.Setenv("BULKACTION_WORKER_COUNT", "77")
	o := Options{Env: []string{"BULKACTION_LEASE=1s", "BULKACTION_LOG_LEVEL=info", "BULKACTION_LEASE=2s"}}
	require.Equal(t, map[string]string{
		"BULKACTION_API_ADDR": "127.0.0.1:0", "BULKACTION_LOG_LEVEL": "info", "BULKACTION_WORKER_TYPES": "NOOP", "BULKACTION_LEASE": "2s",
	}, o.overrides("BULKACTION_LEASE=7s"))

	x := run{overrides: map[string]string{}}
	r, err := x.limitRule(30)
	require.NoError(t, err)
	require.Equal(t, limitRule{"fixed", time.Second, 30}, r)
	require.Equal(t, 10, x.workerSlots())
	x.overrides = map[string]string{"BULKACTION_BACKPRESSURE_LIMITER": "token", "BULKACTION_BACKPRESSURE_RATE_LIMIT_WINDOW": "100ms", "BULKACTION_WORKER_COUNT": "4"}
	r, err = x.limitRule(30)
	require.NoError(t, err)
	require.Equal(t, limitRule{"token", 100 * time.Millisecond, 3}, r)
	require.Equal(t, 4, x.workerSlots())
}
