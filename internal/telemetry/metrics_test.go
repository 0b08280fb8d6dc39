package telemetry

import (
	"bufio"
	"context"
	"fmt"
	"net/http"
	"net/http/httptest"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/stretchr/testify/require"
)

// scrape calls the MetricsHandler. It returns the samples of this project as "name{labels} value",
// without histogram buckets, and the types of all metrics by name.
func scrape(t *testing.T, tel *Telemetry) (samples []string, types map[string]string) {
	t.Helper()
	request := httptest.NewRequest(http.MethodGet, "/metrics", nil)
	request.Header.Set("Accept", "application/openmetrics-text; version=1.0.0, text/plain; q=0.5")
	response := httptest.NewRecorder()
	tel.MetricsHandler().ServeHTTP(response, request)
	require.Equal(t, http.StatusOK, response.Code)
	types = map[string]string{}
	for lines := bufio.NewScanner(response.Body); lines.Scan(); {
		line := lines.Text()
		if family, ok := strings.CutPrefix(line, "# TYPE "); ok {
			name, typ, _ := strings.Cut(family, " ")
			types[name] = typ
		}
		if strings.HasPrefix(line, NamePrefix) && !strings.Contains(line, "_bucket{") {
			samples = append(samples, line)
		}
	}
	slices.Sort(samples)
	return samples, types
}

func TestMetricsExistFromTheStart(t *testing.T) {
	clearOTel(t)
	tel := setup(t, testOptions)
	NewFetcherMetrics(tel.Meter)
	NewSubmissionMetrics(tel.Meter)
	NewDispatcherMetrics(tel.Meter)
	NewWorkerMetrics(tel.Meter)
	NewWatcherMetrics(tel.Meter)
	samples, types := scrape(t, tel)
	require.Equal(t, []string{
		`bulk_action_backpressure_admitted_total{destination="non_ready"} 0`,
		`bulk_action_backpressure_admitted_total{destination="ready"} 0`,
		`bulk_action_backpressure_rejected_total 0`,
		`bulk_action_dispatch_moved_total 0`,
		`bulk_action_dispatch_skip_total 0`,
		`bulk_action_dispatcher_total_moved 0`,
		`bulk_action_dispatcher_total_skipped 0`,
		`bulk_action_dispatcher_total_taken_back 0`,
		`bulk_action_fetcher_admitted_non_ready 0`,
		`bulk_action_fetcher_admitted_ready 0`,
		`bulk_action_fetcher_empty_polls 0`,
		`bulk_action_fetcher_total_fetched 0`,
		`bulk_action_watcher_dead_letter_total{code="LOST"} 0`,
		`bulk_action_watcher_dead_letter_total{code="NO_PROCESSOR"} 0`,
		`bulk_action_worker_dead_letter_total{reason="lost"} 0`,
		`bulk_action_worker_dead_letter_total{reason="no_processor"} 0`,
		`bulk_action_worker_dead_letter_total{reason="permanent"} 0`,
		`bulk_action_worker_dead_letter_total{reason="retries"} 0`,
		`bulk_action_worker_dead_letter_total{reason="throttles"} 0`,
		`bulk_action_worker_dead_letter_total{reason="worker_lost"} 0`,
		`bulk_action_worker_job_failed_total 0`,
		`bulk_action_worker_job_retry_total 0`,
		`bulk_action_worker_job_success_total 0`,
		`bulk_action_worker_job_timeout_total 0`,
		`bulk_action_worker_leases_lost_total 0`,
		`bulk_action_worker_pool_active 0`,
		`bulk_action_worker_pool_idle 0`,
		`bulk_action_worker_pool_size 0`,
		`bulk_action_worker_stale_total 0`,
	}, samples)
	require.Contains(t, types, "go_goroutines")
	require.Contains(t, types, "process_cpu_seconds_total")
}

// TestMetricNames: the metric names are a contract: exactly these names, without a suffix added by
// the exporter.
func TestMetricNames(t *testing.T) {
	clearOTel(t)
	tel := setup(t, testOptions)

	fetcher := NewFetcherMetrics(tel.Meter)
	fetcher.Fetched(3, 1)
	fetcher.EmptyPoll()
	NewSubmissionMetrics(tel.Meter).Rejected(0)
	fetcher.Allowed("acme", 3)
	fetcher.Denied("acme", DeniedPerGroup)
	dispatcher := NewDispatcherMetrics(tel.Meter)
	dispatcher.Allowed("acme", 2)
	dispatcher.Denied("zeta", DeniedGlobal)
	dispatcher.Cycle(2, true, 1500*time.Microsecond)
	worker := NewWorkerMetrics(tel.Meter)
	worker.ObservePool(func() (int, int) { return 10, 4 })
	worker.Started(20 * time.Millisecond)
	worker.Waited(3*time.Millisecond, 40*time.Millisecond, 500*time.Millisecond)
	worker.Waited(0, 0, 0)
	worker.Ran(100 * time.Millisecond)
	worker.Ran(time.Second)
	worker.Ran(time.Second)
	worker.Ended(1, 2, 1)
	worker.Retried(1)
	worker.Deferred("SEND_EMAIL")
	worker.DeadLettered(DeadThrottles, 1)
	worker.Stale(2)
	worker.LeasesLost(3)
	dispatcher.TakenBack(4)
	dispatcher.DeadLettered(5)
	watcher := NewWatcherMetrics(tel.Meter)
	watcher.SetQueues(QueueSizes{Ready: 5, NonReady: 6, Outbox: 9, Rejected: 10, MemoryRatio: .5}, map[string]int{"SEND_EMAIL": 7, "HTTP": 0}, map[string]int{"SEND_EMAIL": 4})
	watcher.SetUnserved(8)
	watcher.DeadLettered("LOST", 2)
	watcher.DeadLettered("NO_PROCESSOR", 3)

	samples, types := scrape(t, tel)
	require.Equal(t, []string{
		`bulk_action_backlog_runnable{type="HTTP"} 0`,
		`bulk_action_backlog_runnable{type="SEND_EMAIL"} 4`,
		`bulk_action_backlog{type="HTTP"} 0`,
		`bulk_action_backlog{type="SEND_EMAIL"} 7`,
		`bulk_action_backpressure_admitted_total{destination="non_ready"} 1`,
		`bulk_action_backpressure_admitted_total{destination="ready"} 3`,
		`bulk_action_backpressure_rejected_total 1`,
		`bulk_action_dispatch_cycle_duration_ms_count 1`,
		`bulk_action_dispatch_cycle_duration_ms_sum 1.5`,
		`bulk_action_dispatch_moved_total 2`,
		`bulk_action_dispatch_skip_total 1`,
		`bulk_action_dispatcher_total_moved 2`,
		`bulk_action_dispatcher_total_skipped 1`,
		`bulk_action_dispatcher_total_taken_back 4`,
		`bulk_action_fetcher_admitted_non_ready 1`,
		`bulk_action_fetcher_admitted_ready 3`,
		`bulk_action_fetcher_empty_polls 1`,
		`bulk_action_fetcher_total_fetched 4`,
		`bulk_action_job_start_delay_ms_count 1`,
		`bulk_action_job_start_delay_ms_sum 20`,
		`bulk_action_non_ready_queue_size 6`,
		`bulk_action_outbox_size 9`,
		`bulk_action_rate_limit_allowed_total{tenant="acme"} 5`, // the sum of both roles in this process
		`bulk_action_rate_limit_denied_total{reason="global",tenant="zeta"} 1`,
		`bulk_action_rate_limit_denied_total{reason="per_group",tenant="acme"} 1`,
		`bulk_action_ready_queue_size 5`,
		`bulk_action_redis_memory_ratio 0.5`,
		`bulk_action_rejected_messages 10`,
		`bulk_action_unserved_backlog 8`,
		`bulk_action_wait_congestion_ms_count 2`,
		`bulk_action_wait_congestion_ms_sum 500`,
		`bulk_action_wait_fairness_ms_count 2`,
		`bulk_action_wait_fairness_ms_sum 3`,
		`bulk_action_wait_rate_ms_count 2`,
		`bulk_action_wait_rate_ms_sum 40`,
		`bulk_action_watcher_dead_letter_total{code="LOST"} 2`,
		`bulk_action_watcher_dead_letter_total{code="NO_PROCESSOR"} 3`,
		`bulk_action_worker_dead_letter_total{reason="lost"} 2`,
		`bulk_action_worker_dead_letter_total{reason="no_processor"} 3`,
		`bulk_action_worker_dead_letter_total{reason="permanent"} 0`,
		`bulk_action_worker_dead_letter_total{reason="retries"} 0`,
		`bulk_action_worker_dead_letter_total{reason="throttles"} 1`,
		`bulk_action_worker_dead_letter_total{reason="worker_lost"} 5`,
		`bulk_action_worker_job_deferred_total{type="SEND_EMAIL"} 1`,
		`bulk_action_worker_job_duration_ms_count 3`,
		`bulk_action_worker_job_duration_ms_sum 2100`,
		`bulk_action_worker_job_failed_total 2`,
		`bulk_action_worker_job_retry_total 1`,
		`bulk_action_worker_job_success_total 1`,
		`bulk_action_worker_job_timeout_total 1`,
		`bulk_action_worker_leases_lost_total 3`,
		`bulk_action_worker_pool_active 4`,
		`bulk_action_worker_pool_idle 6`,
		`bulk_action_worker_pool_size 10`,
		`bulk_action_worker_stale_total 2`,
	}, samples)

	want := map[string]string{}
	for _, name := range []string{
		"rate_limit_allowed_total", "rate_limit_denied_total", "dispatch_moved_total", "dispatch_skip_total",
		"backpressure_admitted_total", "backpressure_rejected_total", "fetcher_total_fetched", "fetcher_empty_polls",
		"fetcher_admitted_ready", "fetcher_admitted_non_ready", "dispatcher_total_moved", "dispatcher_total_skipped",
		"worker_job_success_total", "worker_job_failed_total", "worker_job_timeout_total", "worker_job_retry_total", "worker_job_deferred_total",
		"worker_dead_letter_total", "worker_stale_total", "worker_leases_lost_total", "dispatcher_total_taken_back", "watcher_dead_letter_total",
	} {
		want[NamePrefix+name] = "counter"
	}
	for _, name := range []string{"ready_queue_size", "non_ready_queue_size", "outbox_size", "rejected_messages", "redis_memory_ratio", "backlog", "backlog_runnable", "unserved_backlog", "worker_pool_size", "worker_pool_active", "worker_pool_idle"} {
		want[NamePrefix+name] = "gauge"
	}
	for _, name := range []string{"dispatch_cycle_duration_ms", "worker_job_duration_ms", "job_start_delay_ms", "wait_fairness_ms", "wait_rate_ms", "wait_congestion_ms"} {
		want[NamePrefix+name] = "histogram"
	}
	for name := range types {
		if strings.HasPrefix(name, "go_") || strings.HasPrefix(name, "process_") {
			delete(types, name)
		}
	}
	require.Equal(t, want, types, "no target_info, no scope, no suffixes")
}

func TestTenantLabelsAreBounded(t *testing.T) {
	clearOTel(t)
	tel := setup(t, testOptions)
	now := time.Now()
	limits := newRateLimits(instruments{tel.Meter}, func() time.Time { return now })
	tenant := func(n int) string { return fmt.Sprintf("t%03d", n) }
	for n := range 100 {
		limits.Allowed(tenant(n), 1)
	}
	limits.Allowed(Other, 5)

	series := func() map[string]string {
		samples, _ := scrape(t, tel)
		got := map[string]string{}
		for _, s := range samples {
			name, value, _ := strings.Cut(s, " ")
			got[strings.TrimSuffix(strings.TrimPrefix(name, NamePrefix+`rate_limit_allowed_total{tenant="`), `"}`)] = value
		}
		return got
	}
	got := series()
	require.Len(t, got, MaxLabels+1)
	require.Equal(t, "1", got[tenant(MaxLabels-1)])
	require.Equal(t, "41", got[Other])

	t.Run("a tenant with permits since the last sweep keeps its series", func(t *testing.T) {
		now = now.Add(keepSeries)
		limits.Allowed(tenant(99), 1)
		require.Equal(t, "42", series()[Other])
	})
	t.Run("tenants without permits lose their series to new tenants", func(t *testing.T) {
		limits.Allowed(tenant(0), 1)
		limits.Denied(tenant(1), DeniedGlobal)
		now = now.Add(keepSeries)
		limits.Allowed(tenant(99), 1)
		limits.Allowed(tenant(2), 1)
		got := series()
		require.Equal(t, "2", got[tenant(0)])
		require.Equal(t, "1", got[tenant(1)])
		require.Equal(t, "1", got[tenant(2)], "it begins anew")
		require.Equal(t, "1", got[tenant(99)])
		require.NotContains(t, got, tenant(3))
		require.Equal(t, "42", got[Other], "which keeps what it has counted")
	})
}

func TestBacklogTypesAreBounded(t *testing.T) {
	clearOTel(t)
	tel := setup(t, testOptions)
	watcher := NewWatcherMetrics(tel.Meter)
	backlog := map[string]int{Other: 1}
	for n := range MaxLabels + 2 {
		backlog[fmt.Sprintf("T%03d", n)] = 10 + n
	}
	watcher.SetQueues(QueueSizes{}, backlog, map[string]int{Other: 1, "T000": 2, "T065": 3})
	samples, _ := scrape(t, tel)
	require.Contains(t, samples, `bulk_action_backlog{type="T065"} 75`)
	require.Contains(t, samples, `bulk_action_backlog{type="other"} 22`, "its own 1 and the two smallest")
	require.Contains(t, samples, `bulk_action_backlog_runnable{type="T065"} 3`)
	require.Contains(t, samples, `bulk_action_backlog_runnable{type="other"} 3`)
	require.NotContains(t, strings.Join(samples, "\n"), `"T001"`)

	watcher.SetQueues(QueueSizes{}, map[string]int{"HTTP": 3}, nil)
	samples, _ = scrape(t, tel)
	samples = slices.DeleteFunc(samples, func(s string) bool { return strings.Contains(s, "dead_letter") })
	require.Equal(t, []string{`bulk_action_backlog_runnable{type="HTTP"} 0`, `bulk_action_backlog{type="HTTP"} 3`, `bulk_action_non_ready_queue_size 0`, `bulk_action_outbox_size 0`, `bulk_action_ready_queue_size 0`, `bulk_action_redis_memory_ratio 0`, `bulk_action_rejected_messages 0`, `bulk_action_unserved_backlog 0`}, samples)

	watcher.HideQueues()
	samples, _ = scrape(t, tel)
	require.NotContains(t, strings.Join(samples, "\n"), "queue_size")
}

func TestAuditViolations(t *testing.T) {
	clearOTel(t)
	tel := setup(t, testOptions)
	m := NewWatcherMetrics(tel.Meter)
	m.SetViolations(map[string]int{"location": 2, "counters": 0})
	samples, types := scrape(t, tel)
	require.Contains(t, samples, `bulk_action_audit_violations{law="location"} 2`)
	require.Contains(t, samples, `bulk_action_audit_violations{law="counters"} 0`)
	require.Equal(t, "gauge", types["bulk_action_audit_violations"])
}

// TestLagsOfPromotion: events that share a label show their longest lag, and each of them is counted.
func TestLagsOfPromotion(t *testing.T) {
	clearOTel(t)
	tel := setup(t, testOptions)
	m := NewRoomMetrics(tel.Meter)
	m.ShowGauges(tel.Meter, func(context.Context) int64 { return 0 })
	for n := range maxRoomLabels {
		m.Count(RoomEntered, fmt.Sprintf("e%d", n), 1) // takes a label
	}
	m.SetGauges("e0", RoomGauges{})
	m.SetGauges("late", RoomGauges{Lag: 2 * time.Second})
	m.SetGauges("later", RoomGauges{Lag: 5 * time.Second})
	samples, _ := scrape(t, tel)
	require.Contains(t, samples, `bulk_action_room_promotion_lag_ms{event="e0"} 0`)
	require.Contains(t, samples, `bulk_action_room_promotion_lag_ms{event="other"} 5000`)
	require.Contains(t, samples, `bulk_action_room_promotion_late_events 2`)
}

func TestShrunkPoolHasNoIdlePlaces(t *testing.T) {
	clearOTel(t)
	tel := setup(t, testOptions)
	NewWorkerMetrics(tel.Meter).ObservePool(func() (int, int) { return 2, 5 })
	samples, _ := scrape(t, tel)
	require.Contains(t, samples, `bulk_action_worker_pool_idle 0`)
}

func BenchmarkRecord(b *testing.B) {
	tel, err := Setup(b.Context(), testOptions)
	require.NoError(b, err)
	fetcher, worker := NewFetcherMetrics(tel.Meter), NewWorkerMetrics(tel.Meter)
	b.Run("permit", func(b *testing.B) {
		b.ReportAllocs()
		for b.Loop() {
			fetcher.Allowed("acme", 1)
		}
	})
	b.Run("attempt", func(b *testing.B) {
		b.ReportAllocs()
		for b.Loop() {
			worker.Started(time.Millisecond)
			worker.Waited(time.Millisecond, 0, 0)
			worker.Ran(time.Millisecond)
		}
	})
	require.NoError(b, tel.Shutdown(b.Context()))
}
