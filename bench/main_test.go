package main

import (
	"encoding/json"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"github.com/redis/go-redis/v9"
	"github.com/stretchr/testify/require"

	"github.com/bulkaction/bulkaction/api"
	"github.com/bulkaction/bulkaction/guard"
	"github.com/bulkaction/bulkaction/internal/jobs/ledger"
)

// at returns events from pairs of numbers: a time in ms and a number of permits.
func at(pairs ...int64) []event {
	var out []event
	for i := 0; i < len(pairs); i += 2 {
		out = append(out, event{pairs[i] * 1000, pairs[i+1]})
	}
	return out
}

func TestWindowsOver(t *testing.T) {
	tests := map[string]struct {
		limiter string
		events  []event
		windows int
		worst   float64
	}{
		"nothing":                               {"fixed", nil, 0, 0},
		"fixed keeps the limit":                 {"fixed", at(0, 5, 999, 5, 1000, 10), 0, 0},
		"fixed breaks it":                       {"fixed", at(0, 5, 999, 6), 1, 1},
		"fixed breaks one window once":          {"fixed", at(0, 20, 10, 1, 1000, 10), 1, 11},
		"fixed breaks two windows":              {"fixed", at(0, 11, 2000, 13), 2, 3},
		"fixed may burst across a border":       {"fixed", at(999, 10, 1000, 10), 0, 0},
		"sliding may not burst across a border": {"sliding", at(999, 10, 1000, 10), 1, 10},
		"sliding frees after a window":          {"sliding", at(100, 10, 1100, 10), 0, 0},
		"sliding just before a window is over":  {"sliding", []event{{100_000, 10}, {1_099_999, 1}}, 1, 1},
		"sliding counts each span":              {"sliding", at(0, 4, 500, 6, 1000, 4, 1400, 1), 1, 1},
		"token allows its burst":                {"token", at(0, 10, 100, 1, 200, 1), 0, 0},
		"token refuses more than its burst":     {"token", at(0, 11), 1, 1},
		"token refills at the rate":             {"token", at(0, 10, 1000, 10, 1500, 5), 0, 0},
		"token holds no more than its burst":    {"token", at(0, 10, 60_000, 11), 1, 1},
		"token over a long span":                {"token", at(0, 10, 500, 5, 900, 5), 1, 1},
	}
	for name, tt := range tests {
		t.Run(name, func(t *testing.T) {
			windows, worst := limitRule{tt.limiter, time.Second, 10}.windowsOver(tt.events)
			require.Equal(t, tt.windows, windows)
			require.InDelta(t, tt.worst, worst, 1e-9)
		})
	}
}

// TestTokenLooksAtEverySpan compares the leaky bucket, which excess uses for the token limiter,
// with the definition, which looks at each span.
func TestTokenLooksAtEverySpan(t *testing.T) {
	r := limitRule{"token", time.Second, 10}
	events := at(0, 7, 130, 4, 131, 1, 900, 9, 2500, 3, 2501, 8, 2600, 2)
	for j, got := range r.excess(events) {
		want := -1e18
		for i := range j + 1 {
			sum := 0.0
			for _, e := range events[i : j+1] {
				sum += float64(e.n)
			}
			want = max(want, sum-10*float64(events[j].at-events[i].at)/1e6-10)
		}
		require.InDelta(t, want, got, 1e-9, "span that ends with event %d", j)
	}
}

func TestNewLimitRule(t *testing.T) {
	require.EqualValues(t, 100, newLimitRule("fixed", 1000, 100*time.Millisecond).perWindow)
	require.EqualValues(t, 1, newLimitRule("fixed", 5, 100*time.Millisecond).perWindow, "at least one permit")
}

func TestUsedRatio(t *testing.T) {
	r := limitRule{"fixed", time.Second, 10}
	events := at(500, 10, 1000, 10, 2000, 9, 3000, 10, 4100, 1)
	ratio, windows := r.usedRatio(events, 500_000, 4_100_000)
	require.Equal(t, 3, windows, "the windows of 1, 2 and 3 s; the first and the last are not complete")
	require.InDelta(t, 29.0/30, ratio, 5e-5)

	ratio, windows = r.usedRatio(events, 500_000, 1_900_000)
	require.Zero(t, windows)
	require.Zero(t, ratio)
	require.Equal(t, 5, r.windowCount(events))
	require.Zero(t, r.windowCount(nil))
}

func TestStatistics(t *testing.T) {
	values := []float64{5, 1, 4, 2, 3}
	require.InDelta(t, 3.0, percentile(values, 50), 0)
	require.InDelta(t, 5.0, percentile(values, 99), 0)
	require.InDelta(t, 1.0, percentile(values, 0), 0)
	require.Zero(t, percentile(nil, 99))
	require.Equal(t, []float64{5, 1, 4, 2, 3}, values, "percentile must not sort its argument")

	shares, sum := sharesOf([]int64{1, 3})
	require.Equal(t, []float64{0.25, 0.75}, shares)
	require.EqualValues(t, 4, sum)
	shares, _ = sharesOf([]int64{0, 0})
	require.Equal(t, []float64{0, 0}, shares)
	require.InDelta(t, 0.0, worstDeviation([]int64{100, 200, 400}, []float64{1, 2, 4}), 0)
	require.InDelta(t, 0.4, worstDeviation([]int64{60, 200, 440}, []float64{1, 2, 4}), 0, "the largest deviation, relative to the due part")
	require.InDelta(t, 1.0, worstDeviation([]int64{0, 300}, []float64{1, 2}), 0, "a count of 0 deviates by 100%")
	require.InDelta(t, 2.0, ratio(4, 2), 0)
	require.Zero(t, ratio(4, 0))
}

func permit(ms int64, by, tenant string, n int64) permitEvent {
	return permitEvent{at: ms * 1000, by: by, tenant: tenant, n: n}
}

func TestLimitRunCountsFromTheJournals(t *testing.T) {
	log := journalLog{
		permits: []permitEvent{
			permit(500, "admit", "backlog-0", 10),
			permit(1000, "admit", "backlog-0", 9),
			permit(1500, "promote", "occasional-1", 1),
			permit(2100, "admit", "backlog-1", 12), // two permits too many
			permit(3000, "admit", "backlog-0", 7),
			permit(4000, "admit", "backlog-0", 1),
			permit(6000, "promote", "backlog-0", 1), // a retry, when no job waits any more
		},
		starts: make([]startEvent, 41),
	}
	ended := []groupState{
		{Progress: ledger.Progress{Counts: api.Counts{Accepted: 30}, Retries: 2, Throttles: 3}},
		{Progress: ledger.Progress{Counts: api.Counts{Accepted: 10}, Retries: 1, Throttles: 1}},
	}
	got := values{}
	countLimit(got, limitRule{"fixed", time.Second, 10}, ended, log, 400_000)
	require.Equal(t, values{
		"windows": 7, "windows_over_limit": 1, "max_over": 2.0, "limit_used_ratio": 0.9667, "used_windows": 3,
		"jobs": int64(40), "permits": int64(41), "promoted": int64(2), "starts": int64(41), "retries": int64(3),
		"starts_without_permit": int64(0), "throttles_per_job": 0.1,
	}, got)
	require.ErrorIs(t, attempt("", func() { countLimit(got, limitRule{"fixed", time.Second, 10}, ended, journalLog{}, 0) }), errNoPermits)
}

func TestElasticCountsWindowsUntilTheShare(t *testing.T) {
	log := journalLog{permits: []permitEvent{
		permit(500, "admit", "busy", 20),
		permit(1000, "admit", "busy", 19), permit(1100, "admit", "a", 1),
		permit(2000, "admit", "busy", 20),
		// a and b return at 3.5 s
		permit(3000, "admit", "busy", 18), permit(3900, "admit", "a", 2),
		permit(4000, "admit", "busy", 9), permit(4100, "admit", "a", 10), permit(4900, "admit", "b", 1),
		permit(5000, "admit", "a", 10), permit(5001, "admit", "b", 10),
	}}
	rule := limitRule{"fixed", time.Second, 20}
	e := countElastic(rule, log, 600_000, 3_400_000, map[string]int64{"a": 3_500_000, "b": 3_500_000}, 10)
	require.InDelta(t, 0.975, e["busy_share_of_limit"], 1e-9)
	require.Equal(t, 2, e["busy_windows"])
	require.EqualValues(t, 2, e["return_windows"], "b has its share in the second window after the one in which it returned")
	require.Equal(t, 0, e["windows_over_limit"])
	require.Equal(t, map[string]int64{"busy": 9, "others": 11}, e["per_window"].([]map[string]int64)[4])

	e = countElastic(rule, log, 600_000, 3_400_000, map[string]int64{"c": 3_500_000}, 10)
	require.EqualValues(t, 3, e["return_windows"], "a tenant that never gets its share counts all windows")
}

func TestLimitLoadIsTheSameEachTimeAndAsLargeAsAsked(t *testing.T) {
	backlog, occasional := limitLoad("x", 10_000, 10, 7)
	jobs := 0
	for _, g := range backlog {
		jobs += g.jobs
	}
	for i, v := range occasional {
		jobs += v.jobs
		require.LessOrEqual(t, v.after, 7*time.Second, "occasional groups come before the backlogs are done")
		require.True(t, i == 0 || occasional[i-1].after <= v.after, "groups must be ordered by time")
	}
	require.InDelta(t, 10_000, jobs, float64(len(occasional)))
	again, same := limitLoad("x", 10_000, 10, 7)
	require.Len(t, again, len(backlog))
	for i := range occasional {
		require.Equal(t, occasional[i].after, same[i].after)
		require.Equal(t, occasional[i].jobs, same[i].jobs)
		require.Equal(t, occasional[i].tenant, same[i].tenant)
	}
}

func TestUnionListsEveryValue(t *testing.T) {
	run := func(v map[string]string) values { return values{"overrides": v} }
	require.Equal(t, map[string]string{"A": "1 | 2", "B": "x"}, unionOverrides([]values{
		run(map[string]string{"A": "2"}), run(map[string]string{"A": "1", "B": "x"}), run(map[string]string{"A": "1"}), run(nil),
	}))
}

func starts(group string, every time.Duration, from, to time.Duration) []startEvent {
	var out []startEvent
	for at := from; at <= to; at += every {
		out = append(out, startEvent{at: at.Microseconds(), group: group})
	}
	return out
}

func TestBusySpanIsWhileAllGroupsHaveWork(t *testing.T) {
	log := journalLog{starts: append(starts("a", 10*time.Millisecond, 0, 6*time.Second), starts("b", 20*time.Millisecond, 500*time.Millisecond, 9*time.Second)...)}
	groups := []group{{id: "a"}, {id: "b"}}
	s, err := findBusySpan(log, groups)
	require.NoError(t, err)
	require.EqualValues(t, 1_500_000, s.from, "one second after the first start of the group that began last")
	require.EqualValues(t, 5_000_000, s.to, "one second before the last start of the group that ended first")
	require.Equal(t, []int64{350, 175}, s.counts)
	require.InDelta(t, 0.0, worstDeviation(s.counts, []float64{2, 1}), 1e-9)

	_, err = findBusySpan(log, append(groups, group{id: "c"}))
	require.ErrorContains(t, err, "no start was logged")
	_, err = findBusySpan(journalLog{starts: append(starts("a", time.Millisecond, 0, time.Second), starts("b", time.Millisecond, 0, time.Second)...)}, groups)
	require.ErrorContains(t, err, "less than two seconds")
}

func TestParseMonitorLineIgnoresCommandsOfScripts(t *testing.T) {
	require.Equal(t, clientCommand{"127.0.0.1:54321", "evalsha"}, parseMonitorLine("+1700000000.123456 [0 127.0.0.1:54321] \"evalsha\" \"x\"\r\n"))
	require.Equal(t, clientCommand{"[::1]:54321", "ping"}, parseMonitorLine("+1700000000.123456 [3 [::1]:54321] \"PING\"\r\n"))
	require.Empty(t, parseMonitorLine("+1700000000.123456 [0 lua] \"get\" \"] a [\"\r\n"))
	require.Empty(t, parseMonitorLine("+OK\r\n"))
}

func TestCountTries(t *testing.T) {
	r := countTries([]tryResult{
		{accepted: true},
		{retryAfter: 2 * time.Second}, {afterWait: true, accepted: true},
		{retryAfter: time.Second}, {afterWait: true, retryAfter: 4 * time.Second}, {afterWait: true, accepted: true},
	})
	require.Equal(t, values{
		"retry_after_accepted_ratio": 0.6667, "retry_after_tries": 3, "retry_after_first_tries_refused": 2,
		"retry_after_first_tries": 3, "retry_after_p50_seconds": 2.0, "retry_after_max_seconds": 4.0,
	}, r)
	require.Zero(t, countTries(nil)["retry_after_accepted_ratio"])
}

func TestPerSecondCountsPermitsAndStarts(t *testing.T) {
	require.Equal(t, []secondOfTenants{{0, 5, 1}, {1, 0, 4}, {2, 3, 0}, {3, 0, 2}},
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
	o := options{env: []string{"BULKACTION_LEASE=1s", "BULKACTION_LOG_LEVEL=info", "BULKACTION_LEASE=2s"}}
	require.Equal(t, map[string]string{
		"BULKACTION_API_ADDR": "127.0.0.1:0", "BULKACTION_LOG_LEVEL": "info", "BULKACTION_WORKER_TYPES": "NOOP", "BULKACTION_LEASE": "2s",
	}, o.overrides("BULKACTION_LEASE=7s"))

	x := run{overrides: map[string]string{}}
	require.Equal(t, limitRule{"fixed", time.Second, 30}, x.limitRule(30))
	require.Equal(t, 10, x.workerSlots())
	x.overrides = map[string]string{"BULKACTION_BACKPRESSURE_LIMITER": "token", "BULKACTION_BACKPRESSURE_RATE_LIMIT_WINDOW": "100ms", "BULKACTION_WORKER_COUNT": "4"}
	require.Equal(t, limitRule{"token", 100 * time.Millisecond, 3}, x.limitRule(30))
	require.Equal(t, 4, x.workerSlots())
}

func grantsAt(name string, ms ...int64) (events []guardEvent) {
	for _, at := range ms {
		events = append(events, guardEvent{Name: name, Granted: at * 1000, Works: at * 1000, Ends: at*1000 + 1, Released: at*1000 + 2})
	}
	return events
}

func TestOverdrawsOfAWindow(t *testing.T) {
	of := guardTask{Kind: "take", Rate: guard.PerWindow(2, time.Second)}
	require.Zero(t, overdraws(grantsAt("a", 0, 999, 1000, 1999), of))
	require.Equal(t, 1, overdraws(grantsAt("a", 0, 998, 999, 1999), of), "the third call is within a second of the first")
	require.Zero(t, overdraws(append(grantsAt("a", 0, 1), grantsAt("b", 0, 1)...), of), "each key has a limit of its own")
}

func TestOverdrawsOfABucket(t *testing.T) {
	of := guardTask{Kind: "take", Rate: guard.Rate{Permits: 10, Window: time.Second, Burst: 3}}
	require.Zero(t, overdraws(grantsAt("a", 0, 0, 0, 100, 200, 1000, 1000, 1000), of))
	require.Equal(t, 1, overdraws(grantsAt("a", 0, 0, 0, 99), of))
}

func TestOverdrawsOfLeases(t *testing.T) {
	of := guardTask{Kind: "lease", Rate: guard.PerWindow(2, time.Second), Capacity: 1}
	events := grantsAt("a", 0, 100)
	require.Zero(t, overdraws(events, of))
	events[0].Ends = 150_000
	require.Equal(t, 1, overdraws(events, of), "the second lease began while the first was held")
	events = grantsAt("a", 0, 500, 1100)
	require.Zero(t, overdraws(events, of))
	events[0].Works = 900_000
	require.Equal(t, 1, overdraws(events, of), "the first holder worked late")
	events[0].Released = 1_000_000
	require.Zero(t, overdraws(events, of), "a lease that was held for a whole window is outside the promise")
}

type jobBody struct {
	Payload json.RawMessage `json:"payload"`
}

func TestJobsAreAsLongAsAskedFor(t *testing.T) {
	for _, fields := range []string{"", `"fail":"retry","fail_times":1,`, `"result":{"cost":2},`} {
		for _, n := range []int{60, 200, 5000} {
			var j jobBody
			require.NoError(t, json.Unmarshal(encodeJob(n, fields), &j))
			require.Len(t, j.Payload, n)
		}
		var short jobBody
		require.NoError(t, json.Unmarshal(encodeJob(0, fields), &short))
	}
	require.JSONEq(t, `{"payload":{}}`, string(encodeJob(2, "")))
}

func TestFailingJobsAreSpreadEvenly(t *testing.T) {
	for _, percent := range []float64{0, 1, 2.5, 100} {
		g := group{id: "g", job: failingJobs(60, percent)}
		failing := 0
		for i := range 20 {
			var m struct {
				Group string    `json:"group"`
				Jobs  []jobBody `json:"jobs"`
			}
			require.NoError(t, json.Unmarshal(g.appendMessage(nil, 100*i, 100), &m))
			require.Equal(t, "g", m.Group)
			require.Len(t, m.Jobs, 100)
			inMessage := 0
			for _, j := range m.Jobs {
				if strings.Contains(string(j.Payload), "fail") {
					inMessage++
				}
			}
			require.InDelta(t, percent, float64(inMessage), 1)
			failing += inMessage
		}
		require.InDelta(t, 20*percent, float64(failing), 0)
	}
}

func TestDivideJobsGivesEachJobToAGroup(t *testing.T) {
	groups, jobs := divideJobs("b", 1003, 10, 3, nil), 0
	require.Len(t, groups, 30)
	byTenant := map[string]int{}
	for _, g := range groups {
		jobs += g.jobs
		byTenant[g.tenant]++
	}
	require.Equal(t, 1003, jobs)
	require.Len(t, byTenant, 10)
	require.Equal(t, 3, byTenant["tenant-0"])
}

func TestTenthSpeeds(t *testing.T) {
	at := func(pairs ...int) []sample {
		out := []sample{{}}
		for i := 0; i < len(pairs); i += 2 {
			out = append(out, sample{time.Duration(pairs[i]) * time.Millisecond, pairs[i+1]})
		}
		return out
	}
	first, last := tenthSpeeds(at(1000, 0, 2000, 500, 3000, 1000), 1000)
	require.InDelta(t, 500, first, 1.1, "the time before the first job does not count")
	require.InDelta(t, 500, last, 1)
	first, last = tenthSpeeds(at(1000, 500, 2000, 900, 4000, 1000), 1000)
	require.InDelta(t, 500, first, 1)
	require.InDelta(t, 50, last, 1, "the last tenth was slow")
	first, last = tenthSpeeds(at(1000, 500), 1000)
	require.Zero(t, first, "the samples do not cover all jobs")
	require.Zero(t, last)
}

func TestFleetUseSince(t *testing.T) {
	before := fleetUse{roles: map[string]time.Duration{"worker": time.Second}, redis: redisUse{
		cpu: time.Second, commands: 10, byName: map[string]commandUse{"xadd": {5, 50}, "get": {1, 1}},
	}}
	after := fleetUse{roles: map[string]time.Duration{"worker": 3 * time.Second, "ingest": time.Second}, redis: redisUse{
		cpu: 3 * time.Second, commands: 50, byName: map[string]commandUse{"xadd": {25, 350}, "get": {1, 1}},
	}}
	u := after.since(before)
	require.Equal(t, 3*time.Second, u.processCPU())
	require.Equal(t, redisUse{cpu: 2 * time.Second, commands: 40, byName: map[string]commandUse{"xadd": {20, 300}}}, u.redis)
	require.Contains(t, u.redis.table(100), "xadd")
	require.NotContains(t, u.redis.table(100), "get")

	out := Throughput{ThroughputLoad: ThroughputLoad{Jobs: 1_000_000}}
	out.computePerJob(u, 10*time.Second)
	require.InDelta(t, 100_000, out.JobsPerSecond, 0)
	require.InDelta(t, 2, out.RedisCPUPerJob, 0)
	require.InDelta(t, 3, out.ProcessCPUPerJob, 0)
}

func TestLatencyIsComputedFromTheJournal(t *testing.T) {
	sent, due := []group{{id: "a"}, {id: "b"}}, []int64{1_000_100, 1_010_000}
	log := journalLog{starts: []startEvent{
		{at: 1_003_500, group: "a"}, {at: 1_012_000, group: "b"}, {at: 2_000_000, group: "b"},
	}}
	var l Latency
	end := func(heard, created int64) groupEnd {
		return groupEnd{readAt: heard, group: &api.Group{Timestamps: map[string]time.Time{"created": time.UnixMilli(created)}}}
	}
	l.compute(sent, due, []groupEnd{end(1_005_100, 1001), end(1_013_400, 1010)}, log)
	require.Equal(t, []float64{2, 2.5, 2.5}, []float64{l.P50MS, l.P99MS, l.MaxMS})
	require.Equal(t, Quantiles{2, 3.4, 3.4}, l.PublishedStarted)
	require.Equal(t, Quantiles{3.4, 5, 5}, l.PublishedFinished, "only the first start of a job counts")
}

func TestCompareChecksTheLoad(t *testing.T) {
	end := func(done, retries int64, aggregate string) groupEnd {
		g := &api.Group{ID: "g", Counts: api.Counts{Done: done}, Retries: retries}
		require.NoError(t, json.Unmarshal([]byte(aggregate), &g.Aggregate))
		return groupEnd{group: g}
	}
	variant := map[string]compareVariant{}
	for _, v := range compareVariants {
		variant[v.name] = v
	}
	for _, tt := range []struct {
		name, variant string
		ends          []groupEnd
		jobs          int
		fails         bool
	}{
		{"all jobs done", "base", []groupEnd{end(60, 0, `{}`), end(70, 0, `{}`)}, 130, false},
		{"a job is missing", "base", []groupEnd{end(60, 0, `{}`), end(69, 0, `{}`)}, 130, true},
		{"an unexpected retry", "base", []groupEnd{end(130, 1, `{}`)}, 130, true},
		{"1% retried", "retries", []groupEnd{end(150, 2, `{}`), end(50, 0, `{}`)}, 200, false},
		{"20% retried", "retried", []groupEnd{end(150, 25, `{}`), end(52, 15, `{}`)}, 202, false},
		{"no job retried", "retries", []groupEnd{end(200, 0, `{}`)}, 200, true},
		{"all values", "aggregates", []groupEnd{end(60, 0, `{"cost":1830,"spread":{"count":60}}`), end(42, 0, `{"cost":3223,"spread":{"count":42}}`)}, 102, false},
		{"a wrong sum", "aggregates", []groupEnd{end(60, 0, `{"cost":1829,"spread":{"count":60}}`)}, 60, true},
		{"a value is missing", "aggregates", []groupEnd{end(60, 0, `{"cost":1830,"spread":{"count":59}}`)}, 60, true},
		{"no aggregate", "aggregates", []groupEnd{end(60, 0, `{}`)}, 60, true},
	} {
		t.Run(tt.name, func(t *testing.T) {
			err := variant[tt.variant].checkGroups(tt.ends, tt.jobs)
			require.Equal(t, tt.fails, err != nil, "%v", err)
		})
	}
}

func TestCompareComputesMediansAndRatios(t *testing.T) {
	speed := func(values ...float64) (out []roundFigures) {
		for _, v := range values {
			out = append(out, roundFigures{figureSpeed: v})
		}
		return out
	}
	got := computeMedians([2][]roundFigures{speed(100, 80, 120), speed(90, 100, 108)})
	require.Equal(t, []ComparedFigure{{
		Name: figureSpeed, Base: 100, Head: 100, Ratio: 1, BaseRuns: []float64{100, 80, 120}, HeadRuns: []float64{90, 100, 108},
	}}, got, "figures that were not measured are left out")
	least, most := got[0].Range()
	require.Equal(t, []float64{0.9, 1.25}, []float64{least, most})
	require.InDelta(t, 2.5, median([]float64{4, 1, 2, 3}), 0)
}

func TestEndListenerReportsGroupsThatAreNotCompleted(t *testing.T) {
	e := &endListener{ends: map[string]groupEnd{
		"a": {group: &api.Group{Status: api.StatusCompleted}}, "b": {group: &api.Group{ID: "b", Status: api.StatusFailed, Counts: api.Counts{Failed: 3}}},
	}}
	got, err := e.completed([]group{{id: "a"}, {id: "c"}})
	require.NoError(t, err)
	require.Len(t, got, 1)
	_, err = e.completed([]group{{id: "a"}, {id: "b"}})
	require.ErrorContains(t, err, "await group b: it is FAILED with 3 failed jobs")
}

func TestEndListenerKnowsWhenTheEndWasPublished(t *testing.T) {
	e := &endListener{ends: map[string]groupEnd{}}
	event := func(typ, data string) map[string]any { return map[string]any{"type": typ, "data": data} }
	require.NoError(t, e.record([]redis.XMessage{
		{ID: "1700000000100-0", Values: event("group.running", `{}`)},
		{ID: "1700000000123-4", Values: event("group.completed", `{"group":{"id":"a","timestamps":{"created":"2023-11-14T22:13:20.1Z"}}}`)},
		{ID: "1700000000125-0", Values: event("group.completed", `{"group":{"id":"a"}}`)},
	}, 0))
	require.InDelta(t, 23, e.ends["a"].msUntil(e.ends["a"].published.UnixMicro()), 0, "a repeated event does not count")
	require.Equal(t, "1700000000125-0", e.last)
}

func TestSmallGroupsAreWholeMessages(t *testing.T) {
	c := &compareRun{run: &run{name: "b"}, v: compareVariant{tenants: 2}}
	c.job = func(i int) []byte { return fmt.Appendf(nil, `{"payload":%d}`, i) }
	messages := c.encodeGroups(c.smallGroups("-s", 3, 2))
	require.Len(t, messages, 3)
	require.JSONEq(t, `{"id":"b-s-2","tenant":"tenant-0","type":"NOOP","seal":true,"jobs":[{"payload":4},{"payload":5}]}`, string(messages[2]))
}

// TestCompareLeavesOutBenchmarksOfOneSide runs common.awk, as compare.sh does before benchstat, on
// two outputs: two benchmarks have moved to another package, two exist on one side only.
func TestCompareLeavesOutBenchmarksOfOneSide(t *testing.T) {
	dir := t.TempDir()
	for name, text := range map[string]string{
		"old": "goos: linux\npkg: m/lua\nBenchmarkAdmit-2 1 9 ns/op\nBenchmarkAppend-2 1 9 ns/op\nPASS\nok m/lua 1s\n" +
			"pkg: m/messages\nBenchmarkAppend-2 1 8 ns/op\nBenchmarkGone-2 1 8 ns/op\nPASS\n",
		"new": "goos: linux\npkg: m/ledger\nBenchmarkAdmit-2 1 7 ns/op\nBenchmarkAppend-2 1 7 ns/op\nPASS\n" +
			"pkg: m/messages\nBenchmarkAppend-2 1 6 ns/op\npkg: m/groups\nBenchmarkAdded-2 1 6 ns/op\nPASS\n",
	} {
		require.NoError(t, os.WriteFile(filepath.Join(dir, name), []byte(text), 0o600))
	}
	script, err := filepath.Abs("common.awk")
	require.NoError(t, err)
	cmd := exec.CommandContext(t.Context(), "awk", "-f", script, "old", "new", "old", "new")
	cmd.Dir = dir
	out, err := cmd.CombinedOutput()
	require.NoError(t, err, "%s", out)
	for name, want := range map[string]string{
		"old": "goos: linux\npkg: m/ledger\nBenchmarkAdmit-2 1 9 ns/op\npkg: m/ledger\nBenchmarkAppend-2 1 9 ns/op\npkg: m/messages\nBenchmarkAppend-2 1 8 ns/op\n",
		"new": "goos: linux\npkg: m/ledger\nBenchmarkAdmit-2 1 7 ns/op\npkg: m/ledger\nBenchmarkAppend-2 1 7 ns/op\npkg: m/messages\nBenchmarkAppend-2 1 6 ns/op\n",
	} {
		got, err := os.ReadFile(filepath.Join(dir, name+".common"))
		require.NoError(t, err)
		require.Equal(t, want, string(got), name)
	}
}
