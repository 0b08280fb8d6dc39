// Command grafana writes the dashboards for Grafana 10 and later, which are in this folder, from the
// tables of panels in this file.
package main

import (
	"encoding/json"
	"fmt"
	"os"
)

//go:generate go run .

// docs is where the descriptions of panels link to.
const docs = "https://github.com/bulkaction/bulkaction/blob/main/docs/"

// panel is a time series panel. Each query has a legend, which may use labels as in {{type}}.
type panel struct {
	title, unit, text, page string // page is below docs
	queries                 [][2]string
}

type dashboard struct {
	uid, title string
	panels     []panel
}

const (
	metricsPage = "metrics.md"
	ops         = "operations.md#"
)

func rate(metric string) string { return "sum(rate(bulk_action_" + metric + "[$__rate_interval]))" }

func rateBy(label, metric string) string {
	return "sum by (" + label + ") (rate(bulk_action_" + metric + "[$__rate_interval]))"
}

// quantile is a query for a quantile of a histogram, by the labels in by, such as ", route".
func quantile(q, metric, by string) string {
	return fmt.Sprintf("histogram_quantile(%s, sum by (le%s) (rate(bulk_action_%s_bucket[$__rate_interval])))", q, by, metric)
}

// ours limits metrics that every process has to ours.
func ours(expr string) string { return expr + " and on (instance, job) bulk_action_build_info" }

var (
	backlog = panel{"Backlog", "short", "Jobs that wait to run, and those that may run now.", ops + "workers-idle-although-jobs-wait",
		[][2]string{{"max by (type) (bulk_action_backlog)", "{{type}}"}, {"sum(bulk_action_backlog_runnable)", "may run"}}}
	attempts = panel{"Attempts", "ops", "Attempts that ended.", ops + "non-ready-grows",
		[][2]string{{rate("worker_job_success_total"), "succeeded"}, {rate("worker_job_failed_total"), "failed"}, {rate("worker_job_timeout_total"), "timed out"}}}
	delay = panel{"Start delay", "ms", "From accepted to the first start.", ops + "ready-streams-full",
		[][2]string{{quantile("0.5", "job_start_delay_ms", ""), "p50"}, {quantile("0.99", "job_start_delay_ms", ""), "p99"}}}
	dead = panel{"Dead letters", "ops", "Jobs that failed for good.", ops + "dead-letters-rise",
		[][2]string{{rateBy("reason", "worker_dead_letter_total"), "{{reason}}"}}}
	memory = panel{"Redis memory", "percentunit", "Used part of maxmemory of the fullest server.", ops + "memory-is-full",
		[][2]string{{"max(bulk_action_redis_memory_ratio)", "used"}}}
	processes = panel{"Processes", "short", "Live processes by role and version.", ops + "a-role-stopped",
		[][2]string{{"count by (role, version) (bulk_action_build_info)", "{{role}} {{version}}"}}}
	slots = panel{"Worker slots", "short", "Slots, and jobs that run.", ops + "ready-streams-full",
		[][2]string{{"sum(bulk_action_worker_pool_size)", "slots"}, {"sum(bulk_action_worker_pool_active)", "active"}, {"sum(bulk_action_worker_pool_idle)", "idle"}}}
	callbacks = panel{"Callbacks", "short", "Callbacks that wait, and dead ones.", ops + "callbacks-are-late-or-dead",
		[][2]string{{"max(bulk_action_callback_pending)", "pending"}, {"max(bulk_action_callback_dead)", "dead"}}}
)

var dashboards = []dashboard{
	{"bulkaction-overview", "overview", []panel{
		backlog, attempts, delay,
		{"Starts later than 30 s", "percentunit", "Part of the jobs; the promise is at most 1%.", ops + "alerts",
			[][2]string{{"bulk_action:job_starts_slow:ratio_rate5m", "5 minutes"}, {"bulk_action:job_starts_slow:ratio_rate6h", "6 hours"}}},
		dead, slots, processes, memory, callbacks,
		{"Audit violations", "short", "Violations that stay.", ops + "audit-violation",
			[][2]string{{"max by (law) (bulk_action_audit_violations)", "{{law}}"}}},
		{"Lost jobs", "short", "Jobs that ended as LOST in an hour.", ops + "lost-jobs",
			[][2]string{{`sum(increase(bulk_action_watcher_dead_letter_total{code="LOST"}[1h]))`, "lost"}}},
		{"Unreadable messages", "short", "Messages that could not be read, while they are kept.", ops + "entries-that-cant-be-read",
			[][2]string{{"max(bulk_action_rejected_messages)", "messages"}}},
	}},
	{"bulkaction-flow", "flow", []panel{
		{"Taken out of the fair queue", "ops", "Jobs by where they went.", metricsPage,
			[][2]string{{rateBy("destination", "backpressure_admitted_total"), "{{destination}}"}}},
		{"Queues", "short", "Ready and non-ready jobs.", ops + "ready-streams-full",
			[][2]string{{"max(bulk_action_ready_queue_size)", "ready"}, {"max(bulk_action_non_ready_queue_size)", "non-ready"}}},
		{"Promotions", "ops", "Jobs promoted from non-ready, and cycles skipped because ready streams were full.", ops + "non-ready-grows",
			[][2]string{{rate("dispatch_moved_total"), "moved"}, {rate("dispatch_skip_total"), "skipped"}}},
		{"Permits", "ops", "Permits by tenant.", ops + "one-tenant-gets-most-of-the-capacity",
			[][2]string{{rateBy("tenant", "rate_limit_allowed_total"), "{{tenant}}"}}},
		{"Denied permits", "ops", "By the limit that was reached.", "flow-control.md",
			[][2]string{{rateBy("reason", "rate_limit_denied_total"), "{{reason}}"}}},
		{"Waits, p99", "ms", "For a turn, for a permit, and after errors.", metricsPage,
			[][2]string{{quantile("0.99", "wait_fairness_ms", ""), "turn"}, {quantile("0.99", "wait_rate_ms", ""), "permit"}, {quantile("0.99", "wait_congestion_ms", ""), "errors"}}},
		{"Retries", "ops", "Attempts that will be followed by another, and deferred jobs.", ops + "accounts-are-busy",
			[][2]string{{rate("worker_job_retry_total"), "retried"}, {rateBy("type", "worker_job_deferred_total"), "deferred {{type}}"}}},
		{"Reclaimed", "ops", "Jobs of dead or slow workers.", ops + "jobs-are-reclaimed",
			[][2]string{{rate("dispatcher_total_taken_back"), "taken back"}, {rate("worker_leases_lost_total"), "lease lost"}, {rate("worker_stale_total"), "stale outcomes"}}},
		{"Unserved backlog", "short", "Jobs whose type no live worker serves.", ops + "workers-idle-although-jobs-wait",
			[][2]string{{"max(bulk_action_unserved_backlog)", "jobs"}}},
		{"Outbox", "short", "Changes of groups that are not published yet.", ops + "a-role-stopped",
			[][2]string{{"max(bulk_action_outbox_size)", "entries"}}},
		{"Callback tries", "ops", "By outcome.", "callbacks.md",
			[][2]string{{rateBy("outcome", "callback_tries_total"), "{{outcome}}"}}},
		{"Oldest callback", "ms", "Age of the oldest callback that waits.", ops + "callbacks-are-late-or-dead",
			[][2]string{{"max(bulk_action_callback_oldest_ms)", "age"}}},
	}},
	{"bulkaction-roles", "roles", []panel{
		processes, slots,
		{"Leaders", "short", "Watchers that lead each partition: 1.", ops + "a-role-stopped",
			[][2]string{{"sum by (partition) (bulk_action_leader)", "partition {{partition}}"}}},
		{"CPU", "percentunit", "Of one core.", "sizing.md",
			[][2]string{{ours("rate(process_cpu_seconds_total[$__rate_interval])"), "{{instance}}"}}},
		{"Resident memory", "bytes", "Of each process.", "sizing.md",
			[][2]string{{ours("process_resident_memory_bytes"), "{{instance}}"}}},
		{"Goroutines", "short", "Of each process.", "sizing.md", [][2]string{{ours("go_goroutines"), "{{instance}}"}}},
		{"Open files", "short", "Of each process.", "sizing.md", [][2]string{{ours("process_open_fds"), "{{instance}}"}}},
		{"Job duration", "ms", "Run time of processors, per attempt.", metricsPage,
			[][2]string{{quantile("0.5", "worker_job_duration_ms", ""), "p50"}, {quantile("0.99", "worker_job_duration_ms", ""), "p99"}}},
		{"Dispatch cycle, p99", "ms", "Time of one cycle.", metricsPage,
			[][2]string{{quantile("0.99", "dispatch_cycle_duration_ms", ""), "p99"}}},
		{"Fetcher", "ops", "Jobs taken out, and looks that found nothing.", metricsPage,
			[][2]string{{rate("fetcher_total_fetched"), "fetched"}, {rate("fetcher_empty_polls"), "empty polls"}}},
	}},
	{"bulkaction-redis", "Redis and guards", []panel{
		memory,
		{"PING", "ms", "Time of a PING; none: Redis is away.", ops + "redis-is-away", [][2]string{{"bulk_action_redis_ping_ms", "{{instance}}"}}},
		{"Connections", "short", "Of all pools.", ops + "guards",
			[][2]string{{"sum(bulk_action_redis_pool_active)", "active"}, {"sum(bulk_action_redis_pool_idle)", "idle"}}},
		{"Pool timeouts", "ops", "Calls that got no connection in time.", ops + "guards", [][2]string{{rate("redis_pool_timeouts"), "timeouts"}}},
		{"Guard members", "short", "By state.", ops + "guards",
			[][2]string{{"max by (guard, state) (bulk_action_guard_members)", "{{guard}} {{state}}"}}},
		{"Guard calls", "ops", "By result.", "guards.md#metrics", [][2]string{{rateBy("guard, result", "guard_requests_total"), "{{guard}} {{result}}"}}},
		{"Denied guard calls", "ops", "By reason.", "guards.md#metrics", [][2]string{{rateBy("guard, reason", "guard_denied_total"), "{{guard}} {{reason}}"}}},
		{"Guard waits, p99", "ms", "Until a call was granted or refused.", "guards.md#metrics",
			[][2]string{{quantile("0.99", "guard_wait_ms", ", guard"), "{{guard}}"}}},
		{"Leases of guards", "short", "That processes hold, and calls in queues.", "guards.md#metrics",
			[][2]string{{"sum by (guard) (bulk_action_guard_held)", "{{guard}} held"}, {"sum by (guard) (bulk_action_guard_queue_size)", "{{guard}} queued"}}},
		{"Leases that ended without a release", "short", "In an hour.", ops + "guards",
			[][2]string{{"sum by (guard, how) (increase(bulk_action_guard_leases_ended_total[1h]))", "{{guard}} {{how}}"}}},
	}},
	{"bulkaction-api", "API", []panel{
		{"Requests", "reqps", "By route.", metricsPage + "#servers",
			[][2]string{{"sum by (route, method) (rate(http_server_request_duration_seconds_count[$__rate_interval]))", "{{method}} {{route}}"}}},
		{"Answers", "reqps", "By status.", "problems.md",
			[][2]string{{"sum by (status) (rate(http_server_request_duration_seconds_count[$__rate_interval]))", "{{status}}"}}},
		{"Server errors", "percentunit", "Part of the requests.", ops + "redis-is-away",
			[][2]string{{`(sum(rate(http_server_request_duration_seconds_count{status=~"5.."}[$__rate_interval])) or vector(0)) / ` +
				"sum(rate(http_server_request_duration_seconds_count[$__rate_interval]))", "errors"}}},
		{"Duration, p99", "s", "By route, without streams.", metricsPage + "#servers",
			[][2]string{{"histogram_quantile(0.99, sum by (le, route) (rate(http_server_request_duration_seconds_bucket{" +
				`route!~".*/(events|waiting|results|failures|jobs)"}[$__rate_interval])))`, "{{route}}"}}},
		{"Refused callers", "ops", "By reason.", ops + "callers-are-refused", [][2]string{{rateBy("reason", "api_auth_failures_total"), "{{reason}}"}}},
		{"Submissions refused with 429", "ops", "Jobs of them.", ops + "memory-is-full", [][2]string{{rate("backpressure_rejected_total"), "jobs"}}},
	}},
	{"bulkaction-waiting-room", "waiting room", []panel{
		room("Queue", "short", "Users who wait, and who are away.", "max by (event) (bulk_action_room_waiting)", "{{event}} waiting",
			"max by (event) (bulk_action_room_away)", "{{event}} away"),
		room("Slots", "short", "By state.", "max by (event, state) (bulk_action_room_slots)", "{{event}} {{state}}"),
		room("Pace", "ops", "Promotions a second in the last minute.", "max by (event) (bulk_action_room_pace)", "{{event}}"),
		room("Users", "ops", "Entered, promoted, admitted, completed.", rate("room_entered_total"), "entered",
			rate("room_promoted_total"), "promoted", rate("room_admitted_total"), "admitted", rate("room_completed_total"), "completed"),
		room("Endings", "ops", "Without a completed session.", rate("room_left_total"), "left", rate("room_expired_total"), "expired",
			rate("room_no_shows_total"), "no-shows"),
		room("Lag of promotion", "ms", "How long nobody was promoted although somebody could be.",
			"max by (event) (bulk_action_room_promotion_lag_ms)", "{{event}}"),
		room("Late events", "short", "Events with a lag of promotion.", "max(bulk_action_room_promotion_late_events)", "events"),
		room("Streams", "short", "Open streams by broker.", "sum by (instance) (bulk_action_room_connections)", "{{instance}}"),
		room("Age of positions, p99", "ms", "That streams are shown.", quantile("0.99", "room_position_age_ms", ""), "p99"),
		room("From promotion to token, p99", "ms", "On streams.", quantile("0.99", "room_promote_to_notify_ms", ""), "p99"),
		room("Scripts, p99", "ms", "With the way to Redis.", quantile("0.99", "room_script_ms", ", script"), "{{script}}"),
		room("Refused", "ops", "By reason.", rateBy("reason", "room_refused_total"), "{{reason}}"),
		room("Brokers", "ops", "What dead and slow brokers and clients cause.", rate("room_reconnects_total"), "reconnects",
			rate("room_orphans_total"), "orphans", rate("room_resyncs_total"), "resyncs", rate("room_slow_readers_total"), "slow readers",
			rate("room_clock_off_total"), "clock off"),
		room("Messages to brokers", "short", "Not read yet.", "sum by (instance) (bulk_action_room_dispatch_pending)", "{{instance}}"),
	}},
}

// room returns a panel of the waiting room. queries are queries and legends in turn.
func room(title, unit, text string, queries ...string) panel {
	p := panel{title, unit, text, ops + "metrics-of-the-waiting-room", nil}
	for i := 0; i < len(queries); i += 2 {
		p.queries = append(p.queries, [2]string{queries[i], queries[i+1]})
	}
	return p
}

type object = map[string]any

func (d dashboard) encode() []byte {
	source := object{"type": "prometheus", "uid": "${datasource}"}
	var panels []object
	for i, p := range d.panels {
		var targets []object
		for n, q := range p.queries {
			targets = append(targets, object{"refId": string(rune('A' + n)), "datasource": source, "expr": q[0], "legendFormat": q[1]})
		}
		panels = append(panels, object{
			"id": i + 1, "type": "timeseries", "title": p.title + unitName[p.unit], "description": p.text + " [More](" + docs + p.page + ")",
			"datasource": source, "targets": targets, "gridPos": object{"x": i % 3 * 8, "y": i / 3 * 8, "w": 8, "h": 8},
			"fieldConfig": object{"defaults": object{"unit": p.unit, "min": 0}, "overrides": []object{}},
			"options":     object{"legend": object{"displayMode": "list", "placement": "bottom"}, "tooltip": object{"mode": "multi"}},
		})
	}
	text, err := json.MarshalIndent(object{
		"uid": d.uid, "title": "bulkaction: " + d.title, "tags": []string{"bulkaction"}, "schemaVersion": 38, "version": 1, "editable": true,
		"refresh": "30s", "time": object{"from": "now-1h", "to": "now"}, "panels": panels,
		"templating": object{"list": []object{{"name": "datasource", "label": "Data source", "type": "datasource", "query": "prometheus"}}},
		"links":      []object{{"type": "dashboards", "title": "bulkaction", "tags": []string{"bulkaction"}, "asDropdown": true}},
	}, "", " ")
	if err != nil {
		panic(err)
	}
	return append(text, '\n')
}

// unitName is what titles say of a unit.
var unitName = map[string]string{
	"ops": " (per second)", "reqps": " (per second)", "ms": " (ms)", "s": " (s)", "short": " (number)", "percentunit": " (%)", "bytes": " (bytes)",
}

func main() {
	for _, d := range dashboards {
		if err := os.WriteFile(d.uid[len("bulkaction-"):]+".json", d.encode(), 0o644); err != nil {
			fmt.Fprintln(os.Stderr, err)
			os.Exit(1)
		}
	}
}
