package bench

import (
	"encoding/json"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/bulkaction/bulkaction/api"
	"github.com/bulkaction/bulkaction/bench/measure"
	"github.com/bulkaction/bulkaction/internal/process/journal"
)

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
	before := fleetUse{roles: map[string]time.Duration{"worker": time.Second}, masters: []measure.Redis{
		{Addr: "a", CPU: time.Second, Commands: 10, ByName: map[string]measure.Command{"xadd": {Calls: 5, US: 50}, "get": {Calls: 1, US: 1}}}, {Addr: "b"},
	}}
	after := fleetUse{roles: map[string]time.Duration{"worker": 3 * time.Second, "ingest": time.Second}, masters: []measure.Redis{
		{Addr: "a", CPU: 2 * time.Second, Commands: 40, ByName: map[string]measure.Command{"xadd": {Calls: 15, US: 250}, "get": {Calls: 1, US: 1}}},
		{Addr: "b", CPU: time.Second, Commands: 10, ByName: map[string]measure.Command{"xadd": {Calls: 10, US: 100}}},
	}}
	u := after.since(before)
	require.Equal(t, 3*time.Second, u.processCPU())
	all := u.redisTotal()
	require.Equal(t, measure.Redis{CPU: 2 * time.Second, Commands: 40, ByName: map[string]measure.Command{"xadd": {Calls: 20, US: 300}}}, all)
	require.Contains(t, all.Table(100), "xadd")
	require.NotContains(t, all.Table(100), "get")

	out := Throughput{Jobs: 1_000_000}
	out.computePerJob(u, 10*time.Second)
	require.InDelta(t, 100_000, out.JobsPerSecond, 0)
	require.InDelta(t, 2, out.RedisCPUPerJob, 0)
	require.InDelta(t, 3, out.ProcessCPUPerJob, 0)
	require.Equal(t, []float64{0.75, 0.25}, out.MasterCommands)
}

func TestLatencyIsComputedFromTheJournal(t *testing.T) {
	sent, due := []group{{id: "a"}, {id: "b"}}, []int64{1_000_100, 1_010_000}
	log := journal.Log{Starts: []journal.StartEvent{
		{At: 1_003_500, Group: "a"}, {At: 1_012_000, Group: "b"}, {At: 2_000_000, Group: "b", Attempt: 1},
	}}
	var l Latency
	end := func(heard, created int64) groupEnd {
		return groupEnd{heard, &api.Group{Timestamps: map[string]time.Time{"created": time.UnixMilli(created)}}}
	}
	l.compute(sent, due, []groupEnd{end(1_005_100, 1001), end(1_013_400, 1010)}, log)
	require.Equal(t, []float64{2, 2.5, 2.5}, []float64{l.P50MS, l.P99MS, l.MaxMS})
	require.Equal(t, Quantiles{2, 3.4, 3.4}, l.PublishedStarted)
	require.Equal(t, Quantiles{3.4, 5, 5}, l.PublishedFinished, "only the first start of a job counts")
}

func TestMedianBySpeed(t *testing.T) {
	require.InDelta(t, 2, medianBySpeed([]Throughput{{JobsPerSecond: 3}, {JobsPerSecond: 1}, {JobsPerSecond: 2}}).JobsPerSecond, 0)
	require.True(t, slices.Contains(PerformanceParts(), "retries"))
}
