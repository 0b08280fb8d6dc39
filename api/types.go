// Package api holds the JSON documents that the HTTP API and the brokers answer with, and some that
// they read, the errors of a store, the rule for ids, and the parser of traceparents. The server,
// the client and the command line share them. Submissions and appends are in the server's package
// messages; a producer builds them with package client.
package api

import (
	"encoding/json"
	"time"
)

// Status is a group's state.
type Status string

// The states of a group, in the order in which they follow each other. The last three are final.
const (
	StatusCreated     Status = "CREATED"
	StatusDispatched  Status = "DISPATCHED"
	StatusRunning     Status = "RUNNING"
	StatusAggregating Status = "AGGREGATING"
	StatusCompleted   Status = "COMPLETED"
	StatusFailed      Status = "FAILED"
	StatusCancelled   Status = "CANCELLED"
)

// Ended reports whether the group is in a final state. The command retry can open another round
// after it.
func (s Status) Ended() bool {
	return s == StatusCompleted || s == StatusFailed || s == StatusCancelled
}

// Counts are the numbers of a group's jobs by state. Accepted is always the sum of the others.
type Counts struct {
	Accepted  int64 `json:"accepted"`
	Waiting   int64 `json:"waiting"`
	NonReady  int64 `json:"non_ready"`
	Ready     int64 `json:"ready"`
	InFlight  int64 `json:"in_flight"`
	Done      int64 `json:"done"`
	Failed    int64 `json:"failed"`
	Cancelled int64 `json:"cancelled"`
}

// Ended returns how many jobs are in a final state.
func (c Counts) Ended() int64 { return c.Done + c.Failed + c.Cancelled }

// Group is a bulk action as GET /v1/groups/{id} shows it.
type Group struct {
	ID             string           `json:"id"`
	Tenant         string           `json:"tenant"`
	Name           string           `json:"name,omitempty"`
	Type           string           `json:"type"`
	Priority       string           `json:"priority"`
	Status         Status           `json:"status"`
	Paused         bool             `json:"paused"`
	Sealed         bool             `json:"sealed"`
	Total          *int64           `json:"total,omitempty"` // number of jobs, when the producer announced it
	Round          int              `json:"round"`           // 1 at first; each retry adds 1
	Counts         Counts           `json:"counts"`
	FailuresByCode map[string]int64 `json:"failures_by_code"`
	// Throttles counts how often a job of the group became non-ready because its tenant had no
	// permit.
	Throttles int64                      `json:"throttles"`
	Retries   int64                      `json:"retries"`
	Aggregate map[string]json.RawMessage `json:"aggregate"`
	// Timestamps says when the group entered each state of this round. The keys are the states in
	// lower case.
	Timestamps map[string]time.Time `json:"timestamps"`
	ETASeconds *float64             `json:"eta_seconds"` // until the group ends; null: there is no estimate
}

// GroupList is a page of groups, newest first.
type GroupList struct {
	Groups []Group `json:"groups"`
	Cursor string  `json:"cursor,omitempty"` // asks for the next page; empty on the last page
	// Scanned is how many groups this call has looked at. A call looks at 5,000 at most, so that a
	// filtered page may be short, or empty, although it has a cursor.
	Scanned int `json:"scanned"`
}

// Accepted is the answer to a submission, and to a command on a group.
type Accepted struct {
	ID     string `json:"id"`
	Status Status `json:"status"`
	// Counts are those of the submission's own jobs when they were accepted, or those of the group
	// right after a command.
	Counts Counts            `json:"counts"`
	Links  map[string]string `json:"links,omitempty"` // self (the group) and events
	// Only the answer to a submission has the next two fields.
	Tenant   string   `json:"tenant,omitempty"`   // the group's own id if no tenant was named
	Warnings []string `json:"warnings,omitempty"` // for people: why the group may not end
}

// LineError is a rejected line of a streamed append.
type LineError struct {
	Line  int64  `json:"line"`
	Error string `json:"error"`
}

// Appended is the answer to a streamed append.
type Appended struct {
	Accepted int64       `json:"accepted"`
	Rejected []LineError `json:"rejected"`
	// RejectedTotal counts all rejected lines. Rejected lists the first 1,000 of them.
	RejectedTotal int64 `json:"rejected_total"`
}

// Job is a job as GET /v1/groups/{id}/jobs/{ordinal} shows it.
type Job struct {
	ID      string `json:"id"`
	Group   string `json:"group"`
	Ordinal int64  `json:"ordinal"`
	// Key is the producer's own name of the job. It is present only if the job was requested by its
	// key, has failed, or has Why with a Key.
	Key       string    `json:"key,omitempty"`
	State     string    `json:"state"` // waiting, non_ready, ready, in_flight, done, failed, cancelled
	Attempts  int       `json:"attempts"`
	LastError *JobError `json:"last_error,omitempty"`
	// Errors are the errors of the latest attempts in this round, at most three, newest first:
	// LastError and those before it. A done job has none, and a job of a list has only LastError.
	Errors []JobError      `json:"errors,omitempty"`
	Result json.RawMessage `json:"result,omitempty"`
	// TraceID is the job's trace, 32 hex digits. It is present only if the job has failed and the
	// trace is recorded.
	TraceID string `json:"trace_id,omitempty"`
	// Waiting says why a job that may still run is not running: one of the constants Why….
	Waiting string     `json:"waiting,omitempty"`
	Until   *time.Time `json:"until,omitempty"` // the job does not start before this time
	Why     *Why       `json:"why,omitempty"`   // the same as Waiting and Until, with details
}

// JobList is a page of a group's jobs, in the order of their ordinals. Errors, Waiting, Until and
// Why are absent.
type JobList struct {
	Jobs   []Job  `json:"jobs"`
	Cursor string `json:"cursor,omitempty"` // of the next page; "": there is none
}

// JobStates are the states of a job.
var JobStates = []string{"waiting", "non_ready", "ready", "in_flight", "done", "failed", "cancelled"}

// JobError is the error with which an attempt of a job has ended, or why the attempt was deferred.
type JobError struct {
	Code    string    `json:"code"`
	Error   string    `json:"error"`
	Attempt int       `json:"attempt"`
	At      time.Time `json:"at"`
}

// Result is a line of GET /v1/groups/{id}/results: what the processor returned for one job.
type Result struct {
	Ordinal    int64           `json:"ordinal"`
	Key        string          `json:"key,omitempty"` // the producer's own name of the job
	DurationMS float64         `json:"duration_ms"`
	Attempts   int             `json:"attempts"`
	Data       json.RawMessage `json:"data"`
}

// Failure is a line of GET /v1/groups/{id}/failures: why one job failed.
type Failure struct {
	Ordinal  int64     `json:"ordinal"`
	Key      string    `json:"key,omitempty"` // the producer's own name of the job
	Code     string    `json:"code"`
	Error    string    `json:"error"`
	Attempts int       `json:"attempts"`
	At       time.Time `json:"at"`
	// Payload is present if it was asked for. null: the payload is lost.
	Payload json.RawMessage `json:"payload,omitempty"`
}

// RetryChoice says which failed jobs of a group run again: those with one of the codes and those
// with one of the ordinals. The zero value stands for all failed jobs.
type RetryChoice struct {
	Codes []string `json:"codes,omitempty"` // at most 100 error codes
	Jobs  []int64  `json:"jobs,omitempty"`  // at most 1,000 ordinals
}

// DeadLetter is a job that failed, for example because it had no retry left or its error was
// permanent.
type DeadLetter struct {
	EntryID  string          `json:"entry_id"`
	Job      string          `json:"job"`
	Tenant   string          `json:"tenant"`
	Group    string          `json:"group"`
	Ordinal  int64           `json:"ordinal"`
	Key      string          `json:"key,omitempty"` // the producer's own name of the job
	Type     string          `json:"type"`
	Code     string          `json:"code"`
	Error    string          `json:"error"`
	Attempts int             `json:"attempts"`
	At       time.Time       `json:"at"`
	Payload  json.RawMessage `json:"payload,omitempty"`
}

// DeadLetterList is a page of dead letters, newest first.
type DeadLetterList struct {
	DeadLetters []DeadLetter `json:"dead_letters"`
	Cursor      string       `json:"cursor,omitempty"`
	// Scanned is how many dead letters this call has looked at. A call looks at 10,000 at most, so
	// that a page with a filter may be short, or empty, although it has a cursor.
	Scanned int `json:"scanned"`
}

// TypeStats are the numbers of jobs of one type by state, over all partitions.
type TypeStats struct {
	Type     string `json:"type"`
	Backlog  int64  `json:"backlog"` // waiting + non-ready + ready
	Waiting  int64  `json:"waiting"`
	NonReady int64  `json:"non_ready"`
	Ready    int64  `json:"ready"`
	InFlight int64  `json:"in_flight"`
	Workers  int    `json:"workers"` // live worker processes that serve the type
	Paused   bool   `json:"paused"`
	// Totals count since the type's first job; they begin again if the type was idle for so long
	// that it was deleted.
	Totals JobTotals `json:"totals"`

	// StaleOutcomes counts reports of attempts that were not the job's current attempt. Such a
	// report changed nothing.
	StaleOutcomes int64 `json:"stale_outcomes"`
	// LeasesLost counts job leases that the worker renewed too late.
	LeasesLost int64 `json:"leases_lost"`
}

// WorkerStatus describes one live worker process. Workers is its number of slots: Active of them
// run a job, Idle do not. CurrentJobs has the ids of up to 20 of these jobs.
type WorkerStatus struct {
	ID           string    `json:"id"`
	Version      string    `json:"version,omitempty"` // of the program; absent: it does not report one
	Types        []string  `json:"types"`
	Workers      int       `json:"workers"`
	Active       int       `json:"active"`
	Idle         int       `json:"idle"`
	CurrentJobs  []string  `json:"current_jobs"`
	ShuttingDown bool      `json:"shutting_down"`
	SeenAt       time.Time `json:"seen_at"`
}

// MaxWorkers is the largest number of slots of a worker process.
const MaxWorkers = 10_000

// PoolSize is the number of slots that a worker process is to have, from 0 to MaxWorkers.
type PoolSize struct {
	ID      string `json:"id"`
	Workers int    `json:"workers"`
}

// StageStatus describes one live process of another role than worker. Counts has what the process
// has counted since it started. For a broker it has the number of streams now, and position_age_ms:
// how old the oldest positions are that it has shown last.
type StageStatus struct {
	ID      string           `json:"id"`
	Version string           `json:"version,omitempty"` // as in WorkerStatus
	Role    string           `json:"role"`
	Running bool             `json:"running"`
	Counts  map[string]int64 `json:"counts"`
	SeenAt  time.Time        `json:"seen_at"`
}

// Roles are the names of the roles that every installation needs, in the order of the pipeline.
var Roles = []string{"ingest", "fetcher", "dispatcher", "worker", "aggregator", "watcher"}

// RoleBroker is the role that only an installation with a waiting room needs.
const RoleBroker = "broker"

// RoleStatus says how many processes of a role are alive.
type RoleStatus struct {
	Role      string `json:"role"`
	Processes int    `json:"processes"` // 0: none is alive
}

// Stats is the answer of GET /v1/stats.
type Stats struct {
	Partitions    int            `json:"partitions"`
	Groups        int64          `json:"groups"`
	ActiveTenants int64          `json:"active_tenants"`
	Types         []TypeStats    `json:"types"`
	Workers       []WorkerStatus `json:"workers"`
	Stages        []StageStatus  `json:"stages"`
	// Roles has each of the six roles, also those without a live process, and the role broker if a
	// broker is alive.
	Roles     []RoleStatus `json:"roles"`
	RateLimit RateLimit    `json:"rate_limit"`
	// StartedPerSec is how many jobs the workers started per second, over the last seconds.
	StartedPerSec float64 `json:"started_per_second"`
	Rejected      int64   `json:"rejected_messages"` // entries of the stream ingest:rejected
	DeadLetters   int64   `json:"dead_letters"`
	// Totals are the sums over all types, also those that were deleted.
	Totals JobTotals `json:"totals"`
}

// RateLimit is the global rate limit and its use in the current window.
type RateLimit struct {
	Limiter  string `json:"limiter"`
	Share    string `json:"share"`
	RPS      int64  `json:"rps"` // permits per second; 0: no limit
	WindowMS int64  `json:"window_ms"`
	Used     int64  `json:"used"` // permits spent in the current window
}

// Event is an event of a group, on the stream events and on the SSE endpoint.
type Event struct {
	ID    string    `json:"id"`   // stays the same when the event is repeated
	Type  string    `json:"type"` // group.created, group.dispatched, …
	At    time.Time `json:"at"`
	Group *Group    `json:"group,omitempty"`
	// ReadAt is when the SSE endpoint read Group. In an event of a past status, only the status is
	// as it was at the time At; the counts are as of ReadAt. Events on the Redis stream "events"
	// have no ReadAt: their groups are as of At, except for error codes and aggregates, which may
	// be newer.
	ReadAt *time.Time `json:"read_at,omitempty"`
	// Omitted names the fields of the group that an event of GET /v1/groups/{id}/events leaves out
	// because they are large. GET /v1/groups/{id} has them.
	Omitted []string `json:"omitted,omitempty"`
}

// AuditEvent is the event audit.violation. Only the Redis stream "events" has it, not the SSE
// endpoint.
type AuditEvent struct {
	Event
	Violation Violation `json:"violation"`
}

// Violation is a group, job or key that breaks a law of the audit. It holds no payload.
type Violation struct {
	Law       string `json:"law"`
	Partition int    `json:"partition"`         // -1 when the violation is about a guard
	Group     string `json:"group"`             // "" when the violation is about a tenant, a type, a guard or an event
	Ordinal   *int64 `json:"ordinal,omitempty"` // nil when the violation is not about one job
	Detail    string `json:"detail"`
	// Count is the number of violations that this document stands for, when Detail summarizes many
	// ("and 900 more like these").
	Count int64 `json:"count,omitempty"`
	// Key identifies the violation: it stays the same while the counts in Detail change.
	Key string `json:"-"`
}
