package bench

import (
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/bulkaction/bulkaction/api"
	"github.com/bulkaction/bulkaction/internal/jobs/ledger"
	"github.com/bulkaction/bulkaction/internal/process/journal"
)

func permit(ms int64, by, tenant string, n int64) journal.PermitEvent {
	return journal.PermitEvent{At: ms * 1000, By: by, Tenant: tenant, Type: "NOOP", N: n}
}

func TestLimitRunCountsFromTheJournals(t *testing.T) {
	log := journal.Log{
		Permits: []journal.PermitEvent{
			permit(500, journal.Admit, "backlog-0", 10),
			permit(1000, journal.Admit, "backlog-0", 9),
			permit(1500, journal.Promote, "occasional-1", 1),
			permit(2100, journal.Admit, "backlog-1", 12), // two permits too many
			permit(3000, journal.Admit, "backlog-0", 7),
			permit(4000, journal.Admit, "backlog-0", 1),
			permit(6000, journal.Promote, "backlog-0", 1), // a retry, when no job waits any more
		},
		Starts: make([]journal.StartEvent, 41),
	}
	ended := []groupState{
		{Progress: ledger.Progress{Counts: api.Counts{Accepted: 30}, Retries: 2, Throttles: 3}},
		{Progress: ledger.Progress{Counts: api.Counts{Accepted: 10}, Retries: 1, Throttles: 1}},
	}
	var r LimitRun
	require.NoError(t, r.count(limitRule{"fixed", time.Second, 10}, ended, log, 400_000))
	require.Equal(t, LimitRun{
		Windows: 7, WindowsOverLimit: 1, MaxOver: 2, LimitUsedRatio: 0.9667, UsedWindows: 3, Jobs: 40, Permits: 41, Promoted: 2,
		Starts: 41, Retries: 3, ThrottlesPerJob: 0.1,
	}, r)
	require.ErrorIs(t, r.count(limitRule{"fixed", time.Second, 10}, ended, journal.Log{}, 0), errNoPermits)
}

func TestElasticCountsWindowsUntilTheShare(t *testing.T) {
	log := journal.Log{Permits: []journal.PermitEvent{
		permit(500, journal.Admit, "busy", 20),
		permit(1000, journal.Admit, "busy", 19), permit(1100, journal.Admit, "a", 1),
		permit(2000, journal.Admit, "busy", 20),
		// a and b return at 3.5 s
		permit(3000, journal.Admit, "busy", 18), permit(3900, journal.Admit, "a", 2),
		permit(4000, journal.Admit, "busy", 9), permit(4100, journal.Admit, "a", 10), permit(4900, journal.Admit, "b", 1),
		permit(5000, journal.Admit, "a", 10), permit(5001, journal.Admit, "b", 10),
	}}
	var e Elastic
	e.count(limitRule{"fixed", time.Second, 20}, log, 600_000, 3_400_000, map[string]int64{"a": 3_500_000, "b": 3_500_000}, 10)
	require.InDelta(t, 0.975, e.BusyShareOfLimit, 1e-9)
	require.Equal(t, 2, e.BusyWindows)
	require.Equal(t, 2, e.ReturnWindows, "b has its share in the second window after the one in which it returned")
	require.Zero(t, e.WindowsOverLimit)
	require.Equal(t, []ElasticWindow{{20, 0, 0}, {19, 1, 0}, {20, 0, 0}, {18, 2, 0}, {9, 11, 1}, {0, 20, 10}}, e.PerWindow)

	e = Elastic{}
	e.count(limitRule{"fixed", time.Second, 20}, log, 600_000, 3_400_000, map[string]int64{"c": 3_500_000}, 10)
	require.Equal(t, 3, e.ReturnWindows, "a tenant that never gets its share counts all windows")
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
	require.Equal(t, map[string]string{"A": "1 | 2", "B": "x"},
		unionOverrides(map[string]string{"A": "2"}, map[string]string{"A": "1", "B": "x"}, map[string]string{"A": "1"}, nil))
}
