// Package api holds the JSON documents that the HTTP API answers with, shared by the server, the
// client and the command line. Request bodies are in the server's message package; a producer
// builds them with package client.
package api

import (
	"encoding/json"
	"time"
)

// Status is a group's place in its lifecycle.
type Status string

// The states of a group, in the order in which they follow.
const (
	StatusCreated     Status = "CREATED"
	StatusDispatched  Status = "DISPATCHED"
	StatusRunning     Status = "RUNNING"
	StatusAggregating Status = "AGGREGATING"
	StatusCompleted   Status = "COMPLETED"
	StatusFailed      Status = "FAILED"
	StatusCancelled   Status = "CANCELLED"
)

// Ended says whether the group has come to its end in this round.
func (s Status) Ended() bool {
	return s == StatusCompleted || s == StatusFailed || s == StatusCancelled
}

// Counts is a group's ledger. accepted is the sum of the others, always.
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

// Ended counts the jobs that will not run any more in this round.
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
	Total          *int64           `json:"total,omitempty"` // as announced by the producer
	Round          int              `json:"round"`           // 1, and one more with each retry
	Counts         Counts           `json:"counts"`
	FailuresByCode map[string]int64 `json:"failures_by_code"`
	// times a job was sent to non-ready for want of a permit
	Throttles int64                      `json:"throttles"`
	Retries   int64                      `json:"retries"`
	Aggregate map[string]json.RawMessage `json:"aggregate"`
	// by state, in lower case, of this round; plus "created"
	Timestamps map[string]time.Time `json:"timestamps"`
	ETASeconds *float64             `json:"eta_seconds"`
}

// GroupList is a page of groups, newest first.
type GroupList struct {
	Groups []Group `json:"groups"`
	Cursor string  `json:"cursor,omitempty"` // pass it on for the next page; empty on the last
}

// Accepted is the answer to a submission and to a command on a group.
type Accepted struct {
	ID     string            `json:"id"`
	Status Status            `json:"status"`
	Links  map[string]string `json:"links,omitempty"`
}

// LineError is one refused line of a streamed append.
type LineError struct {
	Line  int64  `json:"line"`
	Error string `json:"error"`
}

// Appended is the answer to a streamed append.
type Appended struct {
	Accepted int64       `json:"accepted"`
	Rejected []LineError `json:"rejected"`
	// RejectedTotal counts all refused lines; Rejected lists the first thousand.
	RejectedTotal int64 `json:"rejected_total"`
}

// Job is one job as GET /v1/groups/{id}/jobs/{ordinal} shows it.
type Job struct {
	ID        string          `json:"id"`
	Group     string          `json:"group"`
	Ordinal   int64           `json:"ordinal"`
	State     string          `json:"state"` // waiting, non_ready, ready, in_flight, done, failed, cancelled
	Attempts  int             `json:"attempts"`
	LastError *JobError       `json:"last_error,omitempty"`
	Result    json.RawMessage `json:"result,omitempty"`
	// Waiting says why an unfinished job is not running: fairness, rate, congestion, retry, paused,
	// scheduled, no_processor.
	Waiting string     `json:"waiting,omitempty"`
	Until   *time.Time `json:"until,omitempty"` // not before
	Why     *Why       `json:"why,omitempty"`   // the same at length
}

// JobError is what went wrong with a job's latest failed attempt.
type JobError struct {
	Code  string    `json:"code"`
	Error string    `json:"error"`
	At    time.Time `json:"at"`
}

// Result is one line of GET /v1/groups/{id}/results.
type Result struct {
	Ordinal    int64           `json:"ordinal"`
	DurationMS float64         `json:"duration_ms"`
	Attempts   int             `json:"attempts"`
	Data       json.RawMessage `json:"data"`
}

// Failure is one line of GET /v1/groups/{id}/failures.
type Failure struct {
	Ordinal  int64     `json:"ordinal"`
	Code     string    `json:"code"`
	Error    string    `json:"error"`
	Attempts int       `json:"attempts"`
	At       time.Time `json:"at"`
}

// DeadLetter is one job that used up its retries or failed for good.
type DeadLetter struct {
	EntryID  string          `json:"entry_id"`
	Job      string          `json:"job"`
	Tenant   string          `json:"tenant"`
	Group    string          `json:"group"`
	Ordinal  int64           `json:"ordinal"`
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
}

// TypeStats is what waits and runs of one job type, over all partitions.
type TypeStats struct {
	Type     string `json:"type"`
	Backlog  int64  `json:"backlog"` // waiting + non-ready + ready
	Waiting  int64  `json:"waiting"`
	NonReady int64  `json:"non_ready"`
	Ready    int64  `json:"ready"`
	InFlight int64  `json:"in_flight"`
	Workers  int    `json:"workers"` // live worker processes that serve the type
	Paused   bool   `json:"paused"`

	// reports of attempts that were not the job's any more; they changed nothing
	StaleOutcomes int64 `json:"stale_outcomes"`
	LeasesLost    int64 `json:"leases_lost"` // renewals that came too late
}

// WorkerStatus is one live worker process's pool.
type WorkerStatus struct {
	ID           string    `json:"id"`
	Types        []string  `json:"types"`
	Workers      int       `json:"workers"`
	Active       int       `json:"active"`
	Idle         int       `json:"idle"`
	CurrentJobs  []string  `json:"current_jobs"`
	ShuttingDown bool      `json:"shutting_down"`
	SeenAt       time.Time `json:"seen_at"`
}

// StageStatus is one live fetcher or dispatcher process with its counts since start.
type StageStatus struct {
	ID      string           `json:"id"`
	Role    string           `json:"role"`
	Running bool             `json:"running"`
	Counts  map[string]int64 `json:"counts"`
	SeenAt  time.Time        `json:"seen_at"`
}

// Stats is the answer of GET /v1/stats.
type Stats struct {
	Partitions    int            `json:"partitions"`
	Groups        int64          `json:"groups"`
	ActiveTenants int64          `json:"active_tenants"`
	Types         []TypeStats    `json:"types"`
	Workers       []WorkerStatus `json:"workers"`
	Stages        []StageStatus  `json:"stages"`
	RateLimit     RateLimit      `json:"rate_limit"`
	StartedPerSec float64        `json:"started_per_second"` // over the last seconds
	Rejected      int64          `json:"rejected_messages"`  // entries in ingest:rejected
	DeadLetters   int64          `json:"dead_letters"`
}

// RateLimit is the global limit and its use in the current window.
type RateLimit struct {
	Limiter  string `json:"limiter"`
	Share    string `json:"share"`
	RPS      int64  `json:"rps"` // 0: no limit
	WindowMS int64  `json:"window_ms"`
	Used     int64  `json:"used"` // permits spent in the current window
}

// Event is what the events stream and the SSE endpoint carry.
type Event struct {
	ID    string    `json:"id"`   // the same when the event is repeated
	Type  string    `json:"type"` // group.created, group.dispatched, …
	At    time.Time `json:"at"`
	Group *Group    `json:"group,omitempty"`
}

// AuditEvent is the event audit.violation, which only the events stream carries.
type AuditEvent struct {
	Event
	Violation Violation `json:"violation"`
}

// Violation is one breach of a law that the audit watches over. It holds no payload.
type Violation struct {
	Law       string `json:"law"`
	Partition int    `json:"partition"`
	Group     string `json:"group"`             // "" when it is about a tenant or a type
	Ordinal   *int64 `json:"ordinal,omitempty"` // nil when it is not about one job
	Detail    string `json:"detail"`
	Count     int64  `json:"count,omitempty"` // of the violations that this one stands for: "and 900 more like these"
	Key       string `json:"-"`               // what stays the same while counts in Detail change
}

// Problem is an error answer, application/problem+json (RFC 9457).
type Problem struct {
	Type   string       `json:"type"`
	Title  string       `json:"title"`
	Status int          `json:"status"`
	Detail string       `json:"detail,omitempty"`
	Fields []FieldError `json:"fields,omitempty"`
}

// FieldError names one bad field and what is wrong with it.
type FieldError struct {
	Field   string `json:"field"`
	Problem string `json:"problem"`
}
